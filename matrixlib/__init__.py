"""Training AlphaZero-style networks that do not blow up: a workspace driven by notebooks.

>>> net = matrixlib.load("reports/<run>")
>>> net.evaluate("r1bqkbnr/pppp1ppp/2n5/4p3/4P3/5N2/PPPP1PPP/RNBQKB1R w KQkq - 2 3")[0].best
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matrixlib.runs.run import Run


def load(run: str | Path, **options: Any) -> Any:
    """The trained network of a run of any task; see `matrixlib.tasks.load`."""
    from matrixlib.hardware.machine import set_waiting_policy

    set_waiting_policy()  # before torch is imported, which is heavy: only when it is needed
    from matrixlib.tasks import load as load_network

    return load_network(run, **options)


def open_run(preset: str = "demo", **options: Any) -> "Run":
    """Start or resume a run of a preset; see `matrixlib.runs.run.open_run`."""
    from matrixlib.runs.run import open_run as open_one

    return open_one(preset, **options)
