"""`python -m matrixlib.tasks.chess.uci`, the same as `matrixlib-uci`."""

import sys

from matrixlib.tasks.chess.uci.engine import main

if __name__ == "__main__":
    sys.exit(main())
