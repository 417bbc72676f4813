"""Panel of a run while it trains: live in JupyterLab, one static picture everywhere else."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pandas as pd
from IPython import get_ipython
from matplotlib.figure import Figure

from matrixlib.engine import metrics
from matrixlib.engine.stats import Stats
from matrixlib.progress import LinePace, clock_time, duration, interactive, silent
from matrixlib.runs import figures

EVERY_SECONDS = 0.5  # between two redraws of bar and text
DRAWING_SHARE = 1 / 20  # of the time, at most, that drawing the curves may take
BUILT_SECONDS = 1.0  # after which the browser has made a widget that it was told to show


class LivePlot(AbstractContextManager["LivePlot"]):
    """Panel of a run: its losses, learning rate, gradient norm, throughput and accuracy (`figures.PLOTS`), and curves
    of one's own.

    In JupyterLab a progress bar, a line of text and the picture are redrawn at most every half second (and for at
    most a twentieth of the time); at the end they are replaced in place by one static PNG. Headless (papermill, nbval,
    nbconvert, a terminal) no widget is made: a line is printed every few seconds, and in a notebook the final PNG is
    shown. MATRIXLIB_LIVE=0 or 1 overrides; with 0 there are no lines either.

    Use it as a context manager: an exception leaves the picture of what came before it.
    `history` takes rows of metrics.jsonl (`metrics.read`), so that a resumed run continues its curve.
    """

    def __init__(self, total: int, title: str = "training", *, history: Iterable[Mapping[str, Any]] = ()) -> None:
        self.total = total
        self.title = title
        self.draws = 0
        self._rows = list(history)
        self._live = interactive()
        self._began = time.perf_counter()
        self._step = self._first = self._rows[-1]["step"] if self._rows else 0
        self._next = self._redraw = 0.0
        self._lines = LinePace(self._began, self._began)
        self._in_sight = False
        self._figure = Figure(figsize=(10, 5.6))
        self._handle: Any = None
        if self._live:
            self._open()

    def update(self, stats: Stats, **own: float) -> None:
        """Take in one update's stats, and own numbers, each of which is drawn; cheap unless a redraw is due.

        `run.log` of the same numbers brings them into metrics.jsonl too.
        """
        row = stats.row() | ({"extra": own} if own else {})
        self._step, self.total = stats.step, row.get("steps", self.total)
        if stats.messages or not self._step % metrics.interval(self.total):  # what the log of a long run holds, too
            self._rows.append(row)
        now = time.perf_counter()
        if not self._live and not silent() and self._lines.due(now):
            print(f"{clock_time()}  {self.title}: {self._progress(now)} | {_line(row)}", flush=True)
        if not self._live or now < self._next:
            return
        if not self._in_sight and now - self._began > BUILT_SECONDS:
            self._bar.focus()  # into sight: "Run All Cells" leaves the last cell there
            self._in_sight = True
        self._bar.max = self.total
        self._bar.value = min(self._step, self.total)
        self._pace.value = self._progress(now)
        self._now.value = html.escape(_line(row))
        self._next = now + EVERY_SECONDS
        if now >= self._redraw:
            self._image.value = self._png(72)
            drawing = time.perf_counter() - now
            self._redraw = now + drawing / DRAWING_SHARE

    def table(self) -> pd.DataFrame:
        """What is drawn (`figures.frame`)."""
        return figures.frame(self._rows)

    def __exit__(self, *error: object) -> None:
        """Show the final picture: in place of the panel, or as an output of a headless notebook."""
        if not self._live and getattr(get_ipython(), "kernel", None) is None:
            return
        from IPython.display import Image, display

        image = Image(data=self._png(100), format="png", alt=f"Curves of {self.title}", width=1000)
        if self._handle is not None:
            self._handle.update(image)
            self._box.close()
        else:
            display(image)

    def _open(self) -> None:
        import ipywidgets as widgets
        from IPython.display import display

        self._bar = widgets.FloatProgress(value=self._first, max=self.total, tabbable=True)
        self._pace = widgets.Label(value=f"step {self._first:,}/{self.total:,}")
        self._now = widgets.HTML(value="starting ...")  # wraps where a Label would cut off its end
        # without an initial picture the browser shows a broken one; without fit-content it is stretched
        self._image = widgets.Image(value=self._png(72), format="png", layout=widgets.Layout(width="fit-content"))
        self._box = widgets.VBox([widgets.HBox([self._bar, self._pace]), self._now, self._image])
        self._handle = display(self._box, display_id=True)

    def _png(self, dpi: int) -> bytes:
        self.draws += 1
        figures.draw(self._figure, self.table(), self.title, self.total)
        return figures.png(self._figure, dpi)

    def _progress(self, now: float) -> str:
        """Where the run is, its pace since it was opened, and the time left."""
        parts = [f"step {self._step:,}/{self.total:,} ({self._step / max(self.total, 1):.0%})"]
        if (done := self._step - self._first) > 0:
            each = (now - self._began) / done
            parts += [f"{duration(each)} a step", f"{duration(max(0.0, each * (self.total - self._step)))} left"]
        return " | ".join(parts)


def _line(row: Mapping[str, Any]) -> str:
    """One update's losses and own numbers, learning rate and throughput."""
    numbers = metrics.flatten({**row["losses"], **row.get("extra", {})})
    values = " ".join(f"{name} {value:.3f}" for name, value in numbers)
    return f"{values} | learning rate {row['learning_rate']:.2g} | {row['throughput']:,.0f} positions/s"
