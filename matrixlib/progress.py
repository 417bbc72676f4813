"""Progress of long work: a bar in JupyterLab or a terminal, lines of text elsewhere; durations as text."""

import math
import os
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any

LINE_SECONDS, LINE_SHARE = 5.0, 0.01  # between lines, or share of the elapsed time if longer
LINE = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
BAR = "{desc}: {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]"  # of a closed bar


def interactive() -> bool:
    """Whether a Jupyter front end started this kernel.

    jupyter-server sets JPY_SESSION_NAME, papermill and nbval do not. MATRIXLIB_LIVE=0 or 1 overrides, else ValueError.
    """
    forced = os.environ.get("MATRIXLIB_LIVE")
    if forced is not None:
        if forced not in ("0", "1"):
            raise ValueError(f"MATRIXLIB_LIVE is '{forced}'; set it to 0 or 1, or leave it out")
        return forced == "1"
    return "JPY_SESSION_NAME" in os.environ


def silent() -> bool:
    """Whether to print nothing that depends on the clock (MATRIXLIB_LIVE=0), for reproducible outputs."""
    return os.environ.get("MATRIXLIB_LIVE") == "0"


@dataclass
class LinePace:
    """When the next line is due: every five seconds, later every hundredth of the elapsed time, for short logs."""

    began: float
    last: float

    def due(self, now: float) -> bool:
        """Whether a line is due; if so it counts as printed. Seconds of any clock."""
        if now - self.last < max(LINE_SECONDS, LINE_SHARE * (now - self.began)):
            return False
        self.last = now
        return True


def live_bar(**options: Any) -> Any:
    """A live bar in a front end; closed, it becomes a line of text, as widgets do not outlive their kernel.

    Headless only for work of more than 20 seconds: in place in a terminal; in files and notebook outputs a timed line
    every few seconds (see `LinePace`), without carriage returns. Nothing if `silent`.
    """
    from tqdm import tqdm

    quiet = options.pop("disable", False) or silent()
    if not quiet and interactive():
        return _notebook_bar(**options)
    options |= {"delay": 20, "miniters": 1, "mininterval": 5, "disable": quiet}

    class Bar(tqdm):
        monitor_interval = 0  # no monitor thread

    class Lines(Bar):
        def __init__(self) -> None:
            now = time.monotonic()
            self.pace = LinePace(now, now + options["delay"])
            self.told: float = 0
            super().__init__(**{**options, "bar_format": LINE, "leave": False})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if msg is None and self.pace.due(time.monotonic()):
                self.told = self.n
                print(f"{clock_time()}  {self}", file=self.fp, flush=True)

        def close(self) -> None:
            if not self.disable and self.n != self.told and time.monotonic() > self.pace.last:
                self.pace.last = -math.inf  # always print the last state
                self.display()
            super().close()

    return Bar(**options) if sys.stderr.isatty() else Lines()


def _notebook_bar(**options: Any) -> Any:
    from IPython.display import display
    from tqdm.notebook import tqdm_notebook

    class Bar(tqdm_notebook):
        monitor_interval = 0

        def close(self) -> None:
            if self.disable:  # already closed
                return
            line = self.format_meter(**{**self.format_dict, "bar_format": BAR, "ncols": None}) if self.leave else ""
            super().close()
            shown.update({"text/plain": line}, raw=True)
            self.container.close()

    bar = Bar(display=False, **{"miniters": 1, **options})
    shown = display(bar.container, display_id=True)
    return bar


def clock_time() -> str:
    """Local time with zone: "14:03:05 CET"."""
    return f"{datetime.now().astimezone():%H:%M:%S %Z}"


def duration(seconds: float) -> str:
    """Time in a fitting unit: "840 µs", "5.2 ms", "12.3 s", "3 min 20 s", "2 h 05 min", "3 d 4 h". "?" if not finite;
    ValueError if negative."""
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
