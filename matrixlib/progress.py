"""Progress of long work: a bar in JupyterLab or a terminal, a line of text elsewhere; durations in words."""

from __future__ import annotations

import math
import os
from typing import Any

BAR = "{desc}: {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]"  # of a progress bar that was closed


def interactive() -> bool:
    """Whether a Jupyter front end started this kernel.

    jupyter-server sets JPY_SESSION_NAME; papermill, nbconvert and nbval do not. MATRIXLIB_LIVE=0 or 1
    overrides; any other value raises ValueError.
    """
    forced = os.environ.get("MATRIXLIB_LIVE")
    if forced is not None:
        if forced not in ("0", "1"):
            raise ValueError(f"MATRIXLIB_LIVE is '{forced}'; set it to 0 or 1, or leave it out")
        return forced == "1"
    return "JPY_SESSION_NAME" in os.environ


def live_bar(**options: Any) -> Any:
    """A live bar where a front end shows it; closed, it becomes a line of text, as no widget outlives its kernel.

    Headless it is text, a line every five seconds, and only for work of more than 20 seconds; there is none where
    MATRIXLIB_LIVE is 0, so that what a notebook stores does not depend on how slow the machine was.
    """
    from tqdm import tqdm

    silent = options.pop("disable", False) or os.environ.get("MATRIXLIB_LIVE") == "0"
    if silent or not interactive():
        return tqdm(**options, delay=20, mininterval=5, disable=silent)
    from IPython.display import display
    from tqdm.notebook import tqdm_notebook

    class Bar(tqdm_notebook):
        def close(self) -> None:
            if self.disable:  # closed before
                return
            line = self.format_meter(**{**self.format_dict, "bar_format": BAR, "ncols": None}) if self.leave else ""
            super().close()
            shown.update({"text/plain": line}, raw=True)
            self.container.close()

    bar = Bar(display=False, **options)
    shown = display(bar.container, display_id=True)
    return bar


def in_notebook() -> bool:
    """Whether this runs in an IPython kernel (a notebook), where displayed pictures go somewhere."""
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


def duration(seconds: float) -> str:
    """Time in the unit that fits: "840 µs", "5.2 ms", "12.3 s", "3 min 20 s", "2 h 05 min", "3 d 4 h".

    "?" where it is not finite; ValueError where negative.
    """
    if not math.isfinite(seconds):
        return "?"
    if seconds < 0:
        raise ValueError(f"a duration cannot be negative: {seconds}")
    for scale, unit in ((1e6, "µs"), (1e3, "ms"), (1.0, "s")):
        scaled = seconds * scale
        if scaled < (59.95 if unit == "s" else 999.5):
            return f"{scaled:.1f} {unit}" if scaled < 99.95 else f"{scaled:.0f} {unit}"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"
