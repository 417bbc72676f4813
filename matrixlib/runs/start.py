"""What a run begins with: random weights, those of another network, or a complete checkpoint before any update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matrixlib import config as configuration
from matrixlib.config import Config
from matrixlib.data.shards import file_hash
from matrixlib.engine.folder import read_run_config
from matrixlib.files import read_json
from matrixlib.runs.data import RunError
from matrixlib.tasks import get_task, open_file, parse_config
from matrixlib.tasks.spec import find_run, other_weights, pick_checkpoint, weights

if TYPE_CHECKING:
    from torch import Tensor

    from matrixlib.engine.task import Batch, Task, Teacher
    from matrixlib.engine.trainer import Trainer
    from matrixlib.hardware.runtime import Runtime
    from matrixlib.tasks.spec import TaskSpec

LISTED = 8  # names in a message


@dataclass(frozen=True)
class Start:
    """Weights that a run begins with, by the names of its model's state.

    source: as it was asked for. sha256: of the file that they are from. new: names that the source does not have, or in
    another shape, which stay random. left_out: names of the source that have no place here. anew: names of either that
    belong to a training, not to its network.
    """

    source: str
    sha256: str
    tensors: Mapping[str, Tensor]
    new: tuple[str, ...]
    left_out: tuple[str, ...]
    anew: tuple[str, ...]
    differences: Mapping[str, tuple[Any, Any]]

    def record(self) -> dict[str, Any]:
        """What run.json keeps of it."""
        return {"source": self.source, "sha256": self.sha256, "new": list(self.new), "left_out": list(self.left_out)}

    def messages(self) -> list[str]:
        """What a person should know."""
        lines = [f"begins with the weights of {self.source} (SHA-256 {self.sha256[:12]})"]
        lines += [f"new, so random: {_listed(self.new)}"] if self.new else []
        lines += [f"left out of the source: {_listed(self.left_out)}"] if self.left_out else []
        lines += (
            [f"of the training, not of the network, so it counts for nothing: {_listed(self.anew)}"]
            if self.anew
            else []
        )
        changes = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in self.differences.items())
        return lines + ([f"the source's network has other options: {changes}"] if changes else [])


def start_of(folder: Path, config: Config, task: Task, record: Mapping[str, Any]) -> Start | None:
    """The weights for a run without a checkpoint. RunError where they are other ones than when it began."""
    from matrixlib.engine.checkpoint import Checkpoints

    if not config.train.init or Checkpoints(folder / "checkpoints", config.checkpoint.keep).steps():
        return None
    start = read_start(config, task)
    _refuse_other(f"'{start.source}'", start.sha256, record.get("init", {}), folder.name)
    return start


@dataclass(frozen=True)
class AbsentTeacher:
    """In the place of the teacher of a complete run that cannot be had: it tells `problem` to whoever asks it."""

    record: Mapping[str, Any]
    problem: str
    auxiliary_terms: frozenset[str] = frozenset()

    def __call__(self, batch: Batch, progress: float | None = None) -> Batch:
        raise RunError(self.problem)


def teacher_of(
    folder: Path, spec: TaskSpec[Any], config: Config, runtime: Runtime, record: Mapping[str, Any]
) -> Teacher | None:
    """The frozen network that a run's losses need. RunError where it cannot be had, or is another one than when the run
    began; a complete run is opened without.
    """
    before = record.get("teacher", {})
    try:
        teacher = spec.teacher(config, runtime, before)
        if teacher is not None:
            _refuse_other(f"teacher '{teacher.record['name']}'", teacher.record["sha256"], before, folder.name)
    except ValueError as error:
        if not read_json(folder / "summary.json").get("complete"):
            raise
        return AbsentTeacher(before, f"this run needs its teacher to be trained further: {error}")
    return teacher


def about_teacher(teacher: Teacher) -> str:
    """What a person should know of it."""
    if isinstance(teacher, AbsentTeacher):
        return f"opened without its teacher; {teacher.problem}"
    return f"learns from {teacher.record['name']} (SHA-256 {teacher.record['sha256'][:12]})"


def _refuse_other(what: str, sha256: str, record: Mapping[str, Any], run: str) -> None:
    if problem := other_weights(what, sha256, record, f"run '{run}' began"):
        raise RunError(f"{problem}; give it another run name")


def read_start(config: Config, task: Task) -> Start:
    """The weights that `train.init` names: of a run (the best, averaged where it kept an average), of one of its
    checkpoints, or of a file of Matrix0.

    Names and shapes have to be those of the model; with `train.init_partial` what fits is taken. What a training learns
    for itself alone, such as a temperature, is no part of the network: it begins anew and counts on neither side.
    ValueError names what does not fit.
    """
    from matrixlib.engine.optim import own_to_training

    source = config.train.init
    tensors, options, sha256, aside = _weights(source, config)
    model = task.build_model()
    own, anew = model.state_dict(), aside | own_to_training(model)
    fits = {
        name: tensor
        for name, tensor in tensors.items()
        if name in own and own[name].shape == tensor.shape and name not in anew
    }
    new = tuple(name for name in own if name not in fits and name not in anew)
    left_out = tuple(name for name in tensors if name not in fits and name not in anew)
    differences = configuration.difference(config.model, options) if type(options) is type(config.model) else {}
    start = Start(
        source,
        sha256,
        {name: fits.get(name, tensor) for name, tensor in own.items()},
        new,
        left_out,
        tuple(sorted(anew)),
        {f"model.{key}": values for key, values in differences.items()},
    )
    if not fits:
        raise RunError(f"train.init: nothing of '{source}' fits this network")
    if not config.train.init_partial and (new or left_out):
        problems = "; ".join(start.messages()[1:])
        raise RunError(
            f"train.init: '{source}' is not of this network. {problems}. Give the options of its network, or take what "
            "fits with train.init_partial: true"
        )
    return start


def write_base(trainer: Trainer, name: str) -> Path:
    """Write the complete checkpoint of a network before any update, for others to begin with; its folder.

    It goes the way of every checkpoint. RunError where the run, of this name, has been trained.
    """
    if trainer.step:
        raise RunError(f"run '{name}' has made {trainer.step} updates: give a new run name")
    path = trainer.save()
    trainer.checkpoints.join()
    return path


def _weights(source: str, config: Config) -> tuple[Mapping[str, Tensor], Any, str, set[str]]:
    """(tensors, options of the network, SHA-256 of the tensors' file, names of those that are not of the network)."""
    from matrixlib.engine.optim import own_to_training

    folder, named = find_run(source)
    if folder.is_file():
        net = open_file(folder, "cpu", False, config.task)
        options = net.task.config.model  # type: ignore[attr-defined]
        return net.model.state_dict(), options, file_hash(folder), set()
    given = parse_config(*read_run_config(folder), config.task)
    if given.task != config.task:
        raise RunError(f"train.init: '{source}' is of the task {given.task}, not {config.task}")
    model = get_task(given.task).task(given).build_model()
    tensors, sha256 = weights(pick_checkpoint(folder, given, named, model))
    return tensors, given.model, sha256, own_to_training(model)


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{len(names)} ({', '.join(names[:LISTED])}{more})"
