"""Live panel of a training: interactive in JupyterLab, one picture elsewhere."""

import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pandas as pd
from IPython import get_ipython

from matrixlib.engine import metrics
from matrixlib.engine.stats import Stats
from matrixlib.progress import LinePace, clock_time, duration, interactive, silent
from matrixlib.runs import figures

REDRAW_SECONDS = 0.5  # between panel updates
REDRAW_RATIO = 1 / 40  # most of the time that redraws may take
WIDTH = 900  # display width of the picture, pixels


class LivePlot(AbstractContextManager["LivePlot"]):
    """Panel of a run: losses, accuracy, learning rate, gradient norm, throughput, memory (`figures.charts`), events
    (`figures.marks`), and the user's own curves.

    In JupyterLab curves update at most every half second: drag to zoom, double-click to reset, click a name to hide its
    curve, hover over a mark for its text. A picture replaces the panel at the end. Headless it prints a line every few
    seconds, and shows the picture in a notebook. MATRIXLIB_LIVE=0 or 1 overrides; 0 also prints no lines.

    Use as a context manager: after an exception the picture shows what came before. `history`: rows of metrics.jsonl
    (`metrics.read`), to continue the curves of a resumed run.
    """

    def __init__(self, total: int, title: str = "training", *, history: Iterable[Mapping[str, Any]] = ()) -> None:
        self.total = total
        self.title = title
        self._rows = list(history)
        self._numbers = [figures.numbers(row) for row in self._rows]
        self._began = time.perf_counter()
        self._step = self._first = self._rows[-1]["step"] if self._rows else 0
        self._epoch = self._rows[-1].get("epoch") if self._rows else None
        self._next = self._redraw = 0.0
        self._lines = LinePace(self._began, self._began)
        self._panel: Any = None
        if interactive():
            from IPython.display import display

            from matrixlib.runs import panel

            self._view = panel.view
            self._panel = panel.Panel(progress=self._progress("starting ..."), view=self._curves())
            self._handle = display(self._panel, display_id=True)

    def update(self, stats: Stats, **own: float) -> None:
        """Add one update's stats and the user's own numbers; cheap unless a redraw is due. Use `run.log` to store own
        numbers in metrics.jsonl too."""
        row = stats.row() | ({"extra": own} if own else {})
        self._step, self.total, self._epoch = stats.step, row.get("steps", self.total), stats.epoch
        if stats.messages or not self._step % metrics.interval(self.total):  # as in the log of a long run
            self._rows.append(row)
            self._numbers.append(figures.numbers(row))
        now = time.perf_counter()
        if self._panel is None:
            if not silent() and self._lines.due(now):
                print(f"{clock_time()}  {self.title}: {self._pace(now)} | {_line(row)}", flush=True)
            return
        if now < self._next:
            return
        self._next = now + REDRAW_SECONDS
        self._panel.progress = self._progress(_line(row))
        if now >= self._redraw:
            self._panel.view = self._curves()
            self._redraw = now + (time.perf_counter() - now) / REDRAW_RATIO

    def table(self) -> pd.DataFrame:
        """The plotted data (`figures.frame`)."""
        return figures.tabulated(self._numbers)

    def __exit__(self, *error: object) -> None:
        """Show the picture: replacing the panel, or as output of a headless notebook."""
        if self._panel is None and getattr(get_ipython(), "kernel", None) is None:
            return
        from IPython.display import Image, display

        data = figures.png(figures.training_figure(self._rows, self.title))
        image = Image(data=data, format="png", alt=f"Curves of {self.title}", width=WIDTH)
        if self._panel is None:
            display(image)
        else:
            self._handle.update(image)
            self._panel.close()

    def _curves(self) -> dict[str, Any]:
        return self._view(figures.charts(self.table()), figures.marks(self._rows))

    def _progress(self, line: str) -> dict[str, Any]:
        return {"step": self._step, "total": self.total, "text": self._pace(time.perf_counter()), "line": line}

    def _pace(self, now: float) -> str:
        """Progress, time a step since opening, and time left."""
        parts = [f"step {self._step:,}/{self.total:,} ({self._step / max(self.total, 1):.0%})"]
        if self._epoch is not None:
            parts.append(f"epoch {self._epoch:.2f}")
        if (done := self._step - self._first) > 0:
            each = (now - self._began) / done
            parts.append(f"{duration(each)} a step")
            if self._step < self.total:
                parts.append(f"{duration(each * (self.total - self._step))} left")
        return " | ".join(parts)


def _line(row: Mapping[str, Any]) -> str:
    """One update's losses and own numbers, learning rate and throughput."""
    numbers = metrics.flatten({**row["losses"], **row.get("extra", {})})
    values = " ".join(f"{name} {value:.3f}" for name, value in numbers)
    return f"{values} | learning rate {row['learning_rate']:.2g} | {row['throughput']:,.0f} positions/s"
