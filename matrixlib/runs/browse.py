"""Runs, their curves and held-out rows to look through: menus and buttons in JupyterLab, parameters everywhere else.

What is shown is a function of the values in the menus. Headless it is called once with the notebook's parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas
from matplotlib.figure import Figure
from pandas import DataFrame

from matrixlib import files, progress
from matrixlib.config import Config
from matrixlib.engine import metrics
from matrixlib.engine.folder import read_run, read_run_config, whole_runs
from matrixlib.runs import figures, report
from matrixlib.runs import run as runs
from matrixlib.tasks import get_task, load, load_config, parse_config

if TYPE_CHECKING:
    from matrixlib.engine.network import Network
    from matrixlib.tasks.spec import Check, Viewer

NETWORKS = 4  # kept in memory
NONE = "none"
Draw = Callable[..., Any]  # a figure, or always the same widget


@dataclass(frozen=True)
class Shelf:
    """What there is to look through, and what is looked at first.

    names: runs with metrics, newest first. run, against: two of them; `against` may be empty. file: looked through
    in place of `count` held-out rows, unless it is empty.
    """

    names: tuple[str, ...]
    run: str
    against: str
    checkpoint: str
    device: str
    file: str
    count: int
    position: int = 0

    def viewer(self, run: str = "") -> Viewer | None:
        """What can be looked through with the networks of a run; None where its task has nothing to show."""
        return _viewer(run or self.run, self.file, self.count, self.device)

    def curves(self) -> None:
        """Show the curves of one run, or two beside each other."""
        if is_file(self.run):
            print(f"'{self.run}' is the file of a network: it has no curves")
            return
        others = (NONE, *self.names)
        show(curves_figure, {"run": (self.names, self.run), "against": (others, self.against or NONE)})

    def boards(self) -> None:
        """Show the rows one after the other, with what a checkpoint of a run makes of them."""
        viewer = self.viewer()
        if viewer is None:
            print(f"there is nothing to look through with a run of the task '{_task(self.run, self.device)}'")
            return
        menus = {
            "run": (runs_like(self.run, self.names, self.device), self.run),
            "checkpoint": (checkpoints(self.run), self.checkpoint),
        }
        draw = partial(self._board, {}) if progress.interactive() else self._figure
        show(draw, menus, ("position", len(viewer), self.position))

    def _board(self, shown: dict[str, Any], run: str, checkpoint: str, position: int) -> Any:
        """The widget of the task, always the same; shown: where it is kept."""
        viewer = self.viewer(run)
        assert viewer is not None, "the menu holds runs of one task"
        network = _network(run, checkpoint, self.device)
        shown["widget"] = viewer.board(network, min(position, len(viewer) - 1), shown.get("widget"))
        return shown["widget"]

    def _figure(self, run: str, checkpoint: str, position: int) -> Any:
        viewer = self.viewer(run)
        assert viewer is not None, "the menu holds runs of one task"
        return viewer.figure(_network(run, checkpoint, self.device), min(position, len(viewer) - 1))

    def checks(self) -> list[Check]:
        """What must hold of what is shown: name, whether it does, details."""
        checks: list[Check] = []
        if not is_file(self.run):
            checks.append(("every update of the run can be read", bool(_rows(self.run)), "metrics.jsonl"))
        viewer = self.viewer()
        if viewer is not None:
            checks.append(viewer.check(_network(self.run, self.checkpoint, self.device)))
        return checks


def open_shelf(
    run: str = "",
    against: str = "",
    checkpoint: str = "best",
    device: str = "auto",
    positions: int = 32,
    position: int = 0,
    game: str = "",
) -> Shelf:
    """All runs under the reports root, with `run` first: the newest complete run of the demo preset's task if empty,
    and where there is none, a demo that is trained now with all that there is to look at.

    run may also be the file of a network. game: path of a file whose first game takes the place of `positions` held-out
    rows. ValueError for an unknown run or checkpoint, a position that is not there, or a file without a game.
    """
    if positions < 1:
        raise ValueError(f"positions must be at least 1, not {positions}")
    demo = get_task(load_config("demo").task)
    name = run if is_file(run) else runs.finished_run(run, overrides=demo.viewer_overrides).name
    if is_file(name):
        if against:
            raise ValueError(f"'{name}' is the file of a network: it has no curves to show against '{against}'")
        if checkpoint not in ("", "best", "newest"):
            raise ValueError(f"'{name}' is one network, without a checkpoint '{checkpoint}'")
        checkpoint = "best"
    names = tuple(known_runs())
    if against and against not in names:
        raise ValueError(f"no run '{against}'; runs: {', '.join(names)}")
    checkpoint = checkpoint or "best"
    shelf = Shelf(names, name, against, checkpoint, device, game, positions, position)
    viewer = shelf.viewer()
    if viewer is not None and checkpoint not in (known := checkpoints(name)):  # a menu would only say "invalid"
        raise ValueError(f"no checkpoint '{checkpoint}' in {_folder(name)}; there are: {', '.join(known)}")
    if viewer is not None and not 0 <= position < len(viewer):
        raise ValueError(f"position {position} is not there: take one from 0 to {len(viewer) - 1}")
    return shelf


def known_runs() -> list[str]:
    """Names of the runs that have metrics, the one that began last first."""
    return [run.name for run in whole_runs() if (run.path / "metrics.jsonl").exists()]


def runs_like(run: str, names: Sequence[str], device: str = "auto") -> tuple[str, ...]:
    """Those of the same task that have a checkpoint, and `run` itself where it is a file, opened on `device`."""
    task = _task(run, device)
    return (run,) * is_file(run) + tuple(name for name in names if _task(name, device) == task and checkpoints(name))


def is_file(run: str) -> bool:
    """Whether this is the path of a network's file in place of the name of a run."""
    return bool(run) and os.path.isfile(run)


def checkpoints(run: str) -> tuple[str, ...]:
    """What `matrixlib.load` takes for a run, newest checkpoint first; empty where there is none yet."""
    if is_file(run):
        return ("best",)
    folders = [path.name for kind in ("best", "step") for path in _folder(run).glob(f"checkpoints/{kind}_*[0-9]")]
    return ("best", "newest", *sorted(folders, reverse=True)) if folders else ()


def table(names: Sequence[str]) -> DataFrame:
    """A row a run: verdict, updates and result."""
    rows = {}
    for name in names:
        summary = read_run(_folder(name)).summary
        word, text = report.outcome(_folder(name), summary)
        rows[name] = (word, summary.get("steps", "?"), text or summary.get("headline", ""))
    return pandas.DataFrame.from_dict(rows, orient="index", columns=["verdict", "updates", "result"])


def curves_figure(run: str, against: str = NONE) -> Figure:
    """All curves of a run; or losses, gradient norms and speeds of two."""
    if against in (NONE, run):
        return figures.training_figure(_rows(run), run)
    return figures.comparison_figure({run: [_rows(run)], against: [_rows(against)]})


# In the front end


def show(draw: Draw, menus: Mapping[str, tuple[Sequence[str], str]], steps: tuple[str, int, int] | None = None) -> None:
    """Show draw(**values); in JupyterLab below menus, and a slider with buttons, that draw it again in place.

    menus: name -> (choices, the first one). steps: (name, how many, the first one). A menu of checkpoints holds those
    of the menu of runs.
    """
    from IPython.display import Image, display

    values: dict[str, Any] = {name: first for name, (_, first) in menus.items()}
    if steps:
        values[steps[0]] = steps[2]
    if not progress.interactive():
        drawn = draw(**values)
        display(Image(data=figures.png(drawn), format="png") if isinstance(drawn, Figure) else drawn)
        return
    import ipywidgets as widgets

    controls: dict[str, Any] = {
        name: widgets.Dropdown(options=list(choices), value=first, description=name)
        for name, (choices, first) in menus.items()
    }
    if "run" in controls and "checkpoint" in controls:
        _follow(controls["run"], controls["checkpoint"])
    rows = [widgets.HBox(list(controls.values()))]
    if steps:
        name, count, first = steps
        slider = widgets.IntSlider(first, 0, count - 1, description=name, continuous_update=False)
        slider.layout.width = "30rem"
        controls[name] = slider
        rows.append(widgets.HBox([slider, _stepper(slider, -1, "previous"), _stepper(slider, 1, "next")]))
    note = widgets.Label()
    picture = draw(**values)
    if isinstance(picture, Figure):  # no output: a page that was loaded again would not draw that anew
        layout = widgets.Layout(width="fit-content")
        picture = widgets.Image(value=figures.png(picture), format="png", layout=layout)
    display(widgets.VBox([*rows, note, picture]))

    def redraw(change: Any) -> None:
        values = {name: control.value for name, control in controls.items()}
        if None in values.values():  # a menu is being filled anew
            return
        note.value = "drawing ..."
        try:
            drawn = draw(**values)
            if isinstance(drawn, Figure):
                picture.value = figures.png(drawn)
            note.value = ""
        except ValueError as error:  # nobody would see it elsewhere
            note.value = str(error)

    for control in controls.values():
        control.observe(redraw, "value")


def _follow(run: Any, checkpoint: Any) -> None:
    """Let the menu of checkpoints be that of the run."""

    def fill(change: Any) -> None:
        before, names = checkpoint.value, checkpoints(run.value)
        checkpoint.options = names
        checkpoint.value = before if before in names else names[0]

    run.observe(fill, "value")


def _stepper(slider: Any, by: int, text: str) -> Any:
    import ipywidgets as widgets

    button = widgets.Button(description=text, icon="arrow-left" if by < 0 else "arrow-right")

    def step(button: Any) -> None:
        slider.value = min(max(slider.value + by, slider.min), slider.max)

    button.on_click(step)
    return button


# What is looked at


def _folder(run: str) -> Path:
    return Path(run) if is_file(run) else files.reports_root() / run


def _task(run: str, device: str) -> str:
    if is_file(run):
        return str(_config(run, device).task)
    return read_run(_folder(run)).task


def _rows(run: str) -> list[dict[str, Any]]:
    rows = metrics.read(_folder(run) / "metrics.jsonl")
    if not rows:
        raise ValueError(f"run '{run}' has made no update yet")
    return rows


@lru_cache(NETWORKS)
def _network(run: str, checkpoint: str, device: str) -> Network:
    return load(_folder(run), checkpoint, device)


@lru_cache(NETWORKS)
def _viewer(run: str, file: str, count: int, device: str) -> Viewer | None:
    task = _task(run, device)
    if ":" in task:  # somebody's own code, which nobody has named here
        return None
    return get_task(task).viewer(lambda: runs.held_out_data(_config(run, device)), count, file)


def _config(run: str, device: str) -> Config:
    if is_file(run):
        return _network(run, "best", device).task.config  # type: ignore[attr-defined]
    return parse_config(*read_run_config(_folder(run)))
