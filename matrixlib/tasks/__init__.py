"""Tasks, one folder each: found by name, entry point, or import path."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matrixlib import config as configuration
from matrixlib.config import Config, ConfigError, nearest
from matrixlib.engine.folder import read_run_config
from matrixlib.engine.parts import Parts
from matrixlib.tasks.spec import TaskSpec, find_run, load_network, no_network

if TYPE_CHECKING:
    from torch import nn

    from matrixlib.engine.network import Network

TASKS = ("chess", "latin", "tictactoe", "melee")  # tasks of the package
GROUP = "matrixlib.tasks"  # entry points of this group are tasks


def get_task(name: str) -> TaskSpec[Any]:
    """A task by name, entry point, or import path such as `my_package.my_module:TASK`. Import paths run code: only pass
    what the user named, never what a run or checkpoint contains. Raises ConfigError."""
    if name in TASKS:
        path = f"matrixlib.tasks.{name}.spec:TASK"
    else:
        installed = {point.name: point.value for point in entry_points(group=GROUP)}
        path = installed.get(name, name)
        if ":" not in path:
            known = [*TASKS, *sorted(installed)]
            raise ConfigError(
                f"unknown task {name!r}{nearest(name, known)} (tasks: {', '.join(known)}; one of your own by its "
                "import path: 'my_package.my_module:TASK')"
            )
    module, _, attribute = path.partition(":")
    if not (module and attribute) or module.startswith("."):
        raise ConfigError(f"task '{name}': give a module and a name in it: 'my_package.my_module:TASK'")
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"task '{name}': cannot import '{module}' ({error}); is its folder on PYTHONPATH?") from error
    if not hasattr(imported, attribute):
        raise ConfigError(f"task '{name}': module '{module}' has no '{attribute}'")
    spec = getattr(imported, attribute)
    if not isinstance(spec, TaskSpec):
        raise ConfigError(f"task '{name}': {attribute} is {type(spec).__name__}, not a matrixlib.tasks.spec.TaskSpec")
    return spec


def load_config(preset: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """A preset by name, or a YAML file by path, with nested overrides. ConfigError for what is unknown or mistyped."""
    data, name = configuration.read_preset(preset, overrides)
    return validate_config(data, name)


def parse_config(data: Mapping[str, Any], name: str, task: str = "") -> Config:
    """Validate the configuration of a run or checkpoint by its task's schema.

    task: the import path that the user named; no other is imported. ConfigError names every bad key.
    """
    stored = data.get("task")
    if isinstance(stored, str) and ":" in stored and stored != task:
        raise ConfigError(
            f"{name}: it is of the task '{stored}', which is code of somebody's own: name it, if you trust it "
            f"(`task` of matrixlib.load and eval.ipynb, or a preset with `task: {stored}`)"
        )
    return validate_config(data, name)


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """A configuration with nested changes; raises ConfigError."""
    return validate_config(configuration.merge(configuration.dump(config), changes), "config")


def validate_config(data: Mapping[str, Any], name: str, prefix: str = "") -> Config:
    """Validate a nested mapping by its `task`'s schema; raises ConfigError. name, prefix: for messages, before the
    message and before each key."""
    task = task_of(data, name, prefix)
    config: Config = configuration.validated(task.config, data, name, prefix)
    if config.validation.strength.every and task.game is None:
        raise ConfigError(f"{name}: '{prefix}validation.strength.every': {config.task} is no game for two; set it to 0")
    return config


def task_of(data: Mapping[str, Any], name: str, prefix: str = "") -> TaskSpec[Any]:
    """The task named in a user's nested mapping; ConfigError as `validate_config`."""
    task = data.get("task")
    if not isinstance(task, str):
        problem = "is missing" if task is None else f"is {task!r}"
        raise ConfigError(f"{name}: key '{prefix}task' {problem}; it is one of {', '.join(TASKS)}, or an import path")
    try:
        return get_task(task)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def load(
    run: str | Path,
    checkpoint: str = "",
    device: str = "auto",
    compile: bool | str = "auto",
    task: str = "",
    heads: Sequence[Any] = (),
    trunk: "Callable[[Any], nn.Module] | None" = None,
) -> "Network":
    """The network of a run of any task, EMA weights if the run has them; `run` as for `find_run`.

    Or a network file: Lc0's `.pb.gz`, Matrix0's `.pt`, or an ONNX file written by `export`. checkpoint: `best`,
    `newest` or a folder name such as `step_00000500`; empty: the best, or the one `run` names. compile: torch.compile
    for policy and value. task: import path of your own task. heads, trunk: the run's own parts; without its heads a
    network still plays. ValueError names the missing or damaged run or checkpoint.
    """
    folder, named = find_run(run)
    if folder.is_file():
        if checkpoint not in ("", "best", "newest"):
            raise ValueError(f"'{folder.name}' is one network, without a checkpoint '{checkpoint}'")
        return open_file(folder, device, compile, task)
    config = parse_config(*read_run_config(folder), task)
    if task not in ("", config.task):
        raise ValueError(f"'{folder.name}' is of the task {config.task}, not {task}")
    parts = Parts(tuple(heads), trunk)
    return load_network(get_task(config.task), config, folder, checkpoint or named, device, compile, parts)


def open_file(path: Path, device: str = "auto", compile: bool | str = "auto", task: str = "") -> "Network":
    """The network in a file, by the first task that reads it. ValueError if none does, or it is damaged."""
    for name in (task,) if task else TASKS:
        net = get_task(name).open_file(path, device, compile)
        if net is not None:
            return net
    raise ValueError(no_network(path))
