"""Browsing runs, networks and held-out rows: menus in JupyterLab, one picture elsewhere.

What is shown is a function in browse.ipynb; headless it is called once with the notebook's parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matrixlib import files, progress
from matrixlib.config import Config
from matrixlib.engine import metrics
from matrixlib.engine.folder import intact_runs, read_run, read_run_config
from matrixlib.runs import run as runs
from matrixlib.tasks import get_task, load, parse_config

if TYPE_CHECKING:
    from matrixlib.engine.network import Network

NETWORKS = 4  # kept in memory


def known_runs() -> list[str]:
    """Names of runs with metrics, newest first; then `shipped`."""
    own = [run.name for run in intact_runs() if (run.path / "metrics.jsonl").exists()]
    return own + [files.SHIPPED.name] * (files.SHIPPED.name not in own)


def runs_like(run: str, names: Sequence[str], device: str = "auto") -> list[str]:
    """Runs of the same task that have a checkpoint; also `run` itself if it is a file, opened on `device`."""
    task = task_of(run, device)
    return [run] * is_file(run) + [name for name in names if task_of(name, device) == task and checkpoints(name)]


def is_file(run: str) -> bool:
    """Whether `run` is the path of a network file, not a run's name."""
    return bool(run) and os.path.isfile(run)


def checkpoints(run: str) -> list[str]:
    """Checkpoint names for `matrixlib.load`, newest first; empty if there are none."""
    if is_file(run):
        return ["best"]
    folders = [path.name for kind in ("best", "step") for path in _folder(run).glob(f"checkpoints/{kind}_*[0-9]")]
    return ["best", "newest", *sorted(folders, reverse=True)] if folders else []


def task_of(run: str, device: str = "auto") -> str:
    return str(_config(run, device).task) if is_file(run) else read_run(_folder(run)).task


def rows(run: str) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl; ValueError if there are none."""
    found = metrics.read(_folder(run) / "metrics.jsonl")
    if not found:
        raise ValueError(f"run '{run}' has no updates yet")
    return found


def network(run: str, checkpoint: str, device: str) -> Network:
    """The network as it is now: `newest` and `best` of a live run change."""
    there = [str(_folder(run).stat().st_mtime_ns)] if is_file(run) else checkpoints(run)
    return _loaded(run, checkpoint, device, tuple(there))


@lru_cache(NETWORKS)
def _loaded(run: str, checkpoint: str, device: str, there: tuple[str, ...]) -> Network:
    return load(_folder(run), checkpoint, device)


@lru_cache(NETWORKS)
def viewer(run: str, file: str, count: int, device: str) -> Any:
    """`count` held-out rows of the run's data set, or the contents of `file`, if any; None without a viewer."""
    task = task_of(run, device)
    if ":" in task:  # custom code, not imported here
        return None
    return get_task(task).viewer(lambda: runs.held_out_data(_config(run, device)), count, file)


def below_menus(
    draw: Callable[..., Any], menus: Mapping[str, Sequence[str]], first: Mapping[str, Any], positions: int = 0
) -> Any:
    """draw(**first); in JupyterLab below menus and a spinner for `positions`, redrawn. Checkpoints follow the run."""
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
        controls["position"] = position  # a spinner
    shown: list[Any] = []

    def show(**values: Any) -> None:
        try:
            drawn = draw(**values)
        except ValueError as error:  # widgets swallow exceptions
            shown.clear()
            print(error)
        else:
            if drawn not in shown:  # boards are updated in place
                display(drawn)
            shown[:] = [drawn]

    return widgets.VBox([widgets.HBox(list(controls.values())), widgets.interactive_output(show, controls)])


def _folder(run: str) -> Path:
    return Path(run) if is_file(run) else files.folder_of(run)


def _config(run: str, device: str) -> Config:
    if is_file(run):
        return network(run, "best", device).task.config  # type: ignore[attr-defined]
    return parse_config(*read_run_config(_folder(run)))
