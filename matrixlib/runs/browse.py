"""Runs, their curves and held-out rows to look through: menus in JupyterLab, parameters everywhere else.

What is shown is a function of the values in the menus. Headless it is called once with the notebook's parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True)
class RunBrowser:
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

    def curves(self) -> Any:
        """The curves of one run, or two beside each other, as a Figure, in JupyterLab below menus."""
        if is_file(self.run):
            print(f"'{self.run}' is the file of a network: it has no curves")
            return None
        return _below_menus(curves_figure, {"run": self.names, "against": (NONE, *self.names)}, self._first("against"))

    def boards(self) -> Any:
        """The rows one after the other, with what a checkpoint of a run makes of them."""
        viewer = self.viewer()
        if viewer is None:
            print(f"there is nothing to look through with a run of the task '{_task(self.run, self.device)}'")
            return None
        menus = {"run": runs_like(self.run, self.names, self.device), "checkpoint": checkpoints(self.run)}
        widgets: list[Any] = []

        def board(run: str, checkpoint: str, position: int) -> Any:
            viewer = self.viewer(run)
            assert viewer is not None, "the menu holds runs of one task"
            network, position = _network(run, checkpoint, self.device), min(position, len(viewer) - 1)
            if not progress.interactive():
                return viewer.figure(network, position)
            widgets[:] = [viewer.board(network, position, *widgets)]  # always the same one
            return widgets[0]

        return _below_menus(board, menus, self._first("checkpoint") | {"position": self.position}, len(viewer))

    def _first(self, name: str) -> dict[str, Any]:
        return {"run": self.run, name: getattr(self, name) or NONE}

    def checks(self) -> list[Check]:
        """What must hold of what is shown: name, whether it does, details."""
        checks: list[Check] = []
        if not is_file(self.run):
            checks.append(("every update of the run can be read", bool(_rows(self.run)), "metrics.jsonl"))
        viewer = self.viewer()
        if viewer is not None:
            checks.append(viewer.check(_network(self.run, self.checkpoint, self.device)))
        return checks


def open_browser(
    run: str = "",
    against: str = "",
    checkpoint: str = "best",
    device: str = "auto",
    positions: int = 32,
    position: int = 0,
    game: str = "",
) -> RunBrowser:
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
    browser = RunBrowser(names, name, against, checkpoint, device, game, positions, position)
    viewer = browser.viewer()
    if viewer is not None and checkpoint not in (known := checkpoints(name)):  # a menu would only say "invalid"
        raise ValueError(f"no checkpoint '{checkpoint}' in {_folder(name)}; there are: {', '.join(known)}")
    if viewer is not None and not 0 <= position < len(viewer):
        raise ValueError(f"position {position} is not there: take one from 0 to {len(viewer) - 1}")
    return browser


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
    runs = report.frame().set_index("run").rename_axis(None).reindex(list(names))
    return runs[["verdict", "updates", "result"]]


def curves_figure(run: str, against: str = NONE) -> Figure:
    """All curves of a run; or losses, gradient norms and speeds of two."""
    if against in (NONE, run):
        return figures.training_figure(_rows(run), run)
    return figures.comparison_figure({run: [_rows(run)], against: [_rows(against)]})


def _below_menus(
    draw: Callable[..., Any], menus: Mapping[str, Sequence[str]], first: Mapping[str, Any], positions: int = 0
) -> Any:
    """draw(**first); in JupyterLab below a menu for each name, and a number with buttons for `positions`, which draw
    again in place. A menu of checkpoints holds those of the menu of runs."""
    if not progress.interactive():
        return draw(**first)
    import ipywidgets as widgets
    from IPython.display import display

    controls: dict[str, Any] = {
        name: widgets.Dropdown(options=list(choices), value=first[name], description=name)
        for name, choices in menus.items()
    }
    if "checkpoint" in controls:
        run, checkpoint = controls["run"], controls["checkpoint"]

        def fill(change: Any) -> None:
            before, names = checkpoint.value, checkpoints(change.new)
            checkpoint.options = names
            checkpoint.value = before if before in names else names[0]

        run.observe(fill, "value")
    if positions:
        position = widgets.BoundedIntText(first["position"], 0, positions - 1, description="position")
        controls["position"] = position  # with buttons for the next and the previous one
    shown: list[Any] = []

    def show(**values: Any) -> None:
        try:
            drawn = draw(**values)
        except ValueError as error:  # nobody would see it elsewhere
            shown.clear()
            print(error)
        else:
            if drawn not in shown:  # the board changes in place
                display(drawn)
            shown[:] = [drawn]

    return widgets.VBox([widgets.HBox(list(controls.values())), widgets.interactive_output(show, controls)])


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


def _network(run: str, checkpoint: str, device: str) -> Network:
    """As it is now: while a run goes on, `newest` and `best` become other checkpoints."""
    there = (str(_folder(run).stat().st_mtime_ns),) if is_file(run) else checkpoints(run)
    return _loaded(run, checkpoint, device, there)


@lru_cache(NETWORKS)
def _loaded(run: str, checkpoint: str, device: str, there: tuple[str, ...]) -> Network:
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
