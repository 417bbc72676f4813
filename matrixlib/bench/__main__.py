"""`python -m matrixlib.bench`."""

import sys

from matrixlib.bench.report import main

if __name__ == "__main__":
    sys.exit(main())
