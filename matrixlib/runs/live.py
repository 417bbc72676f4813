"""Pictures of a training run: a live panel in JupyterLab, one static PNG everywhere else.

Only Figure objects are used, never pyplot's global state: nothing leaks and no backend is chosen for anyone.
"""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, Protocol

from matplotlib.figure import Figure

from matrixlib.progress import duration, in_notebook, interactive
from matrixlib.runs.figures import History, _numbers, draw, png

BUILT = 1.0  # seconds after which the browser has made a widget that it was told to show
"""Rows of a run's metrics.jsonl, in order."""


class Stats(Protocol):
    """What the trainer yields after each update, as far as the plot reads it."""

    @property
    def step(self) -> int: ...
    @property
    def losses(self) -> Mapping[str, float]: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def throughput(self) -> float: ...
    @property
    def rollbacks(self) -> int: ...
    @property
    def phase(self) -> int | None: ...
    @property
    def validation(self) -> Mapping[str, Any] | None: ...


class LivePlot:
    """Panel of a run: losses, learning rate, gradient norm, throughput and validation accuracy.

    In JupyterLab a progress bar, a line of text and the picture are redrawn at most every `every` seconds
    (and for at most an eighth of the time); at the end they are replaced in place by one static PNG. Headless
    (papermill, nbval, nbconvert) no widget is made: only the final PNG is shown, and lines of text at most
    every ten seconds if `progress` is "text". Outside IPython nothing is displayed. MATRIXLIB_LIVE=0 or 1
    overrides.

    Use it as a context manager: an exception leaves the picture of what came before it.
    `history` takes rows of metrics.jsonl (`metrics.read`), so that a resumed run goes on with its curve.
    """

    def __init__(
        self,
        total: int,
        title: str = "training",
        *,
        history: Iterable[Mapping[str, Any]] = (),
        progress: Literal["none", "text"] = "none",
        live: bool | None = None,
        every: float = 0.5,
    ) -> None:
        self.total = total
        self.title = title
        self.progress = progress
        self.every = every
        self.live = interactive() if live is None else live
        self.history = History()
        for row in history:
            self.history.add(row)
        self.draws = 0
        self._began = time.perf_counter()
        self._first = self.history.step
        self._next = 0.0
        self._closed = self._seen = False
        self._figure = Figure(figsize=(10, 5.6))
        self._handle: Any = None
        if self.live:
            self._open()

    def update(self, stats: Stats) -> None:
        """Take in one update's stats; cheap unless a redraw is due."""
        row = {
            "step": stats.step,
            "losses": stats.losses,
            "metrics": stats.metrics,
            "learning_rate": stats.learning_rate,
            "grad_norm": stats.grad_norm,
            "throughput": stats.throughput,
            "rollbacks": stats.rollbacks,
            "phase": stats.phase,
            "validation": stats.validation,
        }
        self.history.add(row)
        now = time.perf_counter()
        if now < self._next:
            return
        if self.live:
            if not self._seen and now - self._began > BUILT:
                self._bar.focus()  # into sight: "Run All Cells" leaves the last cell there
                self._seen = True
            self._bar.value = min(stats.step, self.total)
            self._pace.value = " | ".join(self._progress(stats.step, now))
            self._now.value = html.escape(_figures(row))
            self._image.value = self._png(72)
            spent = time.perf_counter() - now
            self._next = now + max(self.every, 7 * spent)  # a slow machine trains, it does not draw
        elif self.progress == "text":
            print(" | ".join([*self._progress(stats.step, now), _figures(row)]), flush=True)
            self._next = now + 10.0

    def close(self) -> None:
        """Show the final picture: in place of the panel, or as an output of a headless notebook."""
        if self._closed:
            return
        self._closed = True
        if not self.live and not in_notebook():
            return
        from IPython.display import Image, display

        image = Image(data=self._png(100), format="png", alt=f"Curves of {self.title}", width=1000)
        if self._handle is not None:
            self._handle.update(image)
            self._box.close()
        else:
            display(image)

    def figure(self) -> Figure:
        """The picture as it is now."""
        draw(self._figure, self.history, self.title, self.total)
        return self._figure

    def __enter__(self) -> LivePlot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        import ipywidgets as widgets
        from IPython.display import display

        self._bar = widgets.FloatProgress(value=self._first, max=self.total, tabbable=True)
        self._pace = widgets.Label(value=f"step {self._first:,}/{self.total:,}")
        self._now = widgets.HTML(value="starting ...")  # wraps where a Label would cut off its end
        # without an initial picture the browser shows a broken one; without fit-content it is stretched
        self._image = widgets.Image(
            value=self._png(72), format="png", layout=widgets.Layout(width="fit-content")
        )
        self._box = widgets.VBox([widgets.HBox([self._bar, self._pace]), self._now, self._image])
        self._handle = display(self._box, display_id=True)

    def _png(self, dpi: int) -> bytes:
        self.draws += 1
        return png(self.figure(), dpi)

    def _progress(self, step: int, now: float) -> list[str]:
        """Where the run is, its pace since it was opened, and the time left."""
        parts = [f"step {step:,}/{self.total:,} ({step / max(self.total, 1):.0%})"]
        if (done := step - self._first) > 0:
            each = (now - self._began) / done
            parts += [f"{duration(each)} a step", f"{duration(max(0.0, each * (self.total - step)))} left"]
        return parts


def _figures(row: Mapping[str, Any]) -> str:
    """One update's losses, learning rate and throughput in a line."""
    losses = " ".join(f"{name} {value:.3f}" for name, value in _numbers(row["losses"]))
    rate, throughput = f"learning rate {row['learning_rate']:.2g}", f"{row['throughput']:,.0f} positions/s"
    return " | ".join(filter(None, [losses, rate, throughput]))
