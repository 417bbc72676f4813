"""What the workspace asks of a task beyond the engine's seam: a TaskSpec, one object for each task.

A task's folder holds its configuration, its engine task, its data and all that is said of its results, and one
`spec.py` with `TASK = MySpec()`. Only `config`, `layout` and `task` have to be written; the rest has defaults.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from matrixlib.config import Config, ConfigError, DataConfig
from matrixlib.data.remote import bring_catalogue, is_remote
from matrixlib.engine.curriculum import Curriculum, Phase, SourceCurriculumConfig
from matrixlib.engine.parts import Parts
from matrixlib.files import from_home, read_json, reports_root
from matrixlib.hardware import runtime as runtimes

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from matrixlib.data.catalogue import Catalogue, ShardRow
    from matrixlib.data.loader import Loader
    from matrixlib.data.reader import Sidecars
    from matrixlib.data.shards import Batch, Layout
    from matrixlib.engine.checkpoint import Checkpoint
    from matrixlib.engine.network import Network
    from matrixlib.engine.onnx import OnnxFile
    from matrixlib.engine.task import Task, Teacher
    from matrixlib.hardware.runtime import Runtime, Serving
    from matrixlib.play.game import Game, Trace
    from matrixlib.play.match import Player
    from matrixlib.play.search import Evaluate

Check = tuple[str, bool, str]
"""Name, whether it holds, what it says."""


@dataclass(frozen=True)
class Stage:
    """A phase of a curriculum made concrete: its task, the sources of its shards (none: all), and their shares of a
    batch where they are not those of their sizes."""

    task: Task
    sources: Sequence[str] = ()
    weights: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Overfit:
    """When a network has learned a few rows by heart.

    overrides: over a preset. gaps: term -> how far its mean loss may be above the least that any network can reach
    (nats). exact: metrics that have to be 1. inputs, labels: arrays of `prepare` that make a row and its target, to be
    compared between visits. needs: what of the configuration is missing, in words.
    """

    overrides: Mapping[str, Any] = field(default_factory=dict)
    gaps: Mapping[str, float] = field(default_factory=dict)
    exact: Sequence[str] = ()
    inputs: Sequence[str] = ()
    labels: Sequence[str] = ()
    needs: Callable[[Any], str] = lambda config: ""


class GameSpec(ABC):
    """What a cycle asks of a game beyond its rules; of its task's held-out figures it shows `top1`, if there is one."""

    ending: ClassVar[str]
    """Of the name of a file that holds what `Game.write` gives."""
    solved: ClassVar[bool] = False
    """Whether perfect play is known."""

    @property
    @abstractmethod
    def game(self) -> Game:
        """The rules."""

    @abstractmethod
    def batch(self, traces: Sequence[Trace], ids: Mapping[int, int]) -> Batch:
        """What there is to learn from games; ids: number of a game -> its id."""

    @abstractmethod
    def keys(self, records: np.ndarray) -> np.ndarray:
        """(N,) u8, equal for those of N records that are one position to a network."""

    def perfection(self, evaluate: Evaluate, player: Player) -> dict[str, float]:
        """A network, and a player with it, beside perfect play: shares by name. Only of a game that is solved."""
        raise NotImplementedError("nobody knows perfect play")

    def checks(self, perfection: Mapping[str, float]) -> list[Check]:
        """What must hold of the best network, by these figures."""
        return []


ConfigT = TypeVar("ConfigT", bound=Config)


class TaskSpec(ABC, Generic[ConfigT]):
    """One task, as runs, notebooks and benchmarks use it. It holds nothing: whatever it needs comes with a call."""

    name: ClassVar[str]
    config: ClassVar[type[Any]]
    """The schema of its configuration, a subclass of `config.Config`."""
    demo: ClassVar[str] = ""
    """Name of its preset for demonstrations; empty where it has none."""
    objective_options: ClassVar[Sequence[str]] = ()
    """Keys of the configuration (a section with a dot at its end) that change what its losses mean."""
    measured_on_options: ClassVar[Sequence[str]] = ()
    """Keys that change what its held-out figures are measured on."""
    held_out: ClassVar[str] = ""
    """What share of what is added to its data is held out, in words."""
    overfit: ClassVar[Overfit] = Overfit()
    small: ClassVar[Mapping[str, Any]] = {}
    """Overrides that make its demo preset smaller still, for a dozen runs with planted faults."""
    game: ClassVar[GameSpec | None] = None
    """Where it is a game for two."""
    next_steps: ClassVar[str] = "look into the network with eval.ipynb and browse.ipynb (make lab)"
    """What to do with a trained network, for people; `{run}` stands for its run's folder."""
    viewer_overrides: ClassVar[Mapping[str, Any]] = {}
    """Overrides of its demo preset by which a viewer has all that there is to show."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """What a shard of it holds."""

    @abstractmethod
    def task(self, config: ConfigT) -> Task:
        """What the engine trains."""

    def with_parts(self, task: Task, parts: Parts) -> Task:
        """The task with heads, a trunk and losses of a caller's own. ValueError for those that it cannot take."""
        if parts.heads or parts.trunk or parts.losses:
            raise ValueError(f"the task {self.name} takes no heads, trunk or losses of one's own; chess does")
        return task

    def folder(self, config: ConfigT) -> Path:
        """Folder of its shards; a set that ships or is generated is made at first use. Raises ConfigError."""
        return given_folder(config.data)

    def curriculum(self, config: ConfigT) -> Curriculum | None:
        """The phases of its training; None where there is one. By default those of a curriculum over sources."""
        section = getattr(config, "curriculum", None)
        if not isinstance(section, SourceCurriculumConfig):
            return None
        curriculum = Curriculum(section, {"sources": section.sources})
        return curriculum if len(curriculum.phases) > 1 or curriculum.phases[0].values["sources"] else None

    def stage(self, task: Task, phase: Phase) -> Stage:
        """What a phase trains, and on what; by default, shares of sources."""
        weights = phase.values["sources"]
        return Stage(task, list(weights), weights)

    def teacher(self, config: ConfigT, runtime: Runtime, record: Mapping[str, Any]) -> Teacher | None:
        """The frozen network that its losses need, on the device of a training; record: what it computed with when the
        training began, {} of one that begins."""
        return None

    def sidecars(
        self, config: ConfigT, folder: Path, shards: Sequence[ShardRow], teacher: Teacher | None
    ) -> Sidecars | None:
        """Files beside these shards, made where they are missing, of which `prepare` is to have the rows."""
        return None

    def inputs(self, task: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the network takes of a prepared batch on its device, by name, to look at (chess: `planes`)."""
        return {}

    def show(self, task: Any, batch: Mapping[str, Tensor], rows: int) -> Any:
        """The first rows of a prepared batch, as a notebook displays them; by default a table of its arrays."""
        import pandas as pd

        table = {
            name: {"shape": tuple(t.shape), "dtype": str(t.dtype)[6:], "least": t.min().item(), "most": t.max().item()}
            for name, t in batch.items()
        }
        return pd.DataFrame(table).T

    def training_flops(self, config: ConfigT) -> float | None:
        """Floating-point operations of training on one row; None where nobody has counted them."""
        return None

    def network(self, model: nn.Module, config: ConfigT, runtime: Runtime, serving: Serving | None = None) -> Network:
        """A trained model for use."""
        from matrixlib.engine.network import Network

        return Network(model, self.task(config), runtime, serving)  # type: ignore[arg-type]

    def open_file(self, path: Path, device: str | Runtime = "auto", compile: bool | str = "auto") -> Network | None:
        """The network in a file that another program, or `export`, has written; None where it reads no such file,
        ValueError where that is damaged."""
        return None

    def evaluate(self, net: Network, held_out: Loader, catalogue: Catalogue, sample: int = 0) -> dict[str, Any]:
        """Figures on held-out rows (sample: on so many, 0 = all), with their `baselines`; by default the loss of each
        term beside its chance level, and every metric."""
        from matrixlib.engine.task import active_terms
        from matrixlib.engine.validation import validate

        task: Any = net.task
        batches = list(held_out.sequential(task.config.validation.batch_size, sample=sample))
        validation = validate(task, net.model, batches, net.runtime, active_terms(task), "full")
        if validation is None:
            raise ValueError("nothing is held out to evaluate on")
        bounds = [task.bounds(batch) for batch in batches]
        figures: dict[str, Any] = {f"{term}_loss": loss for term, loss in validation.losses.items()}
        figures |= {name.replace("/", "_"): value for name, value in validation.metrics.items()}
        chance = {
            f"chance_{term}_loss": sum(one[term][0] for one in bounds) / validation.counts[term]
            for term in validation.losses
        }
        return figures | {"baselines": chance}

    def headline(self, figures: Mapping[str, Any]) -> str:
        """The figures in one line, each with a baseline `<what>_<figure>` behind it."""
        base = {name.partition("_")[2]: (name.partition("_")[0], value) for name, value in figures["baselines"].items()}
        parts = {name: f"{name} {value:.3g}" for name, value in figures.items() if isinstance(value, float)}
        return ", ".join(
            f"{text} ({base[name][0]} {base[name][1]:.3g})" if name in base else text for name, text in parts.items()
        )

    def checks(self, figures: Mapping[str, Any]) -> list[Check]:
        """What must hold of any network that has learned something."""
        return [
            (f"held-out {name} below chance", figures[name] < chance, "the loss of a fresh network")
            for name in figures
            if (chance := figures["baselines"].get(f"chance_{name}")) is not None
        ]

    def viewer(self, held_out: Callable[[], Loader], count: int, file: str = "") -> Any:
        """`count` held-out rows (held_out opens the data set) to look through, or what a file of the user's holds;
        None: there is nothing to see. ValueError for a file that does not fit.

        It has a length, `figure(net, item)` as a cell displays it, `board(net, item, widget=None)` as a widget (the
        given one, changed), and `check(net) -> Check`: what must hold of all that a network makes of them.
        """
        return None

    def label_problems(self, task: Any, batch: dict[str, np.ndarray]) -> list[str]:
        """What is wrong with the targets of a batch of `prepare`, in words."""
        return []

    def export(self, net: Any, path: Path | str) -> OnnxFile:
        """Write a network as an ONNX file for other programs; ValueError where the task has no such form."""
        raise ValueError(f"networks of the task {self.name} cannot be written as ONNX files")

    def ssl_targets(self, task: Any, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The targets of the self-supervised terms in a prepared batch on the host, by term; of none by default."""
        return {}


def given_folder(data: DataConfig, name: str = "") -> Path:
    """A folder of shards that `data.source` names, or of the catalogue of those at a URL; ConfigError where there is
    none, RemoteError where the URL does not give it. name: one that is no folder.
    """
    source = data.source
    if is_remote(source):
        return bring_catalogue(source, data.cache)
    folder = from_home(source)
    if not source or not os.path.isdir(folder):
        either = f"'{name}' or " if name else ""
        problem = f"'{source}' is no folder" if source else "is not set"
        raise ConfigError(f"data.source {problem}; use {either}a folder of shards, or its URL")
    return folder


def find_run(run: str | Path) -> tuple[Path, str]:
    """(folder, checkpoint) of a run's folder, of its name under reports/, or of a checkpoint's folder in it.

    checkpoint: `best` unless one was named. Of a file: its path, and no checkpoint. ValueError where there is nothing.
    """
    if os.path.isfile(run):
        return Path(run), ""
    for folder in (Path(run), reports_root() / run):
        if os.path.exists(folder / "config.yaml"):
            return folder, "best"
        if os.path.exists(folder / "state.json") and (folder.resolve().parents[1] / "config.yaml").exists():
            return folder.resolve().parents[1], folder.resolve().name
    raise ValueError(
        f"no run at '{run}': expected a folder with config.yaml, such as reports/<run>, one of its checkpoints, or the "
        "file of a network (.pb.gz, .pt, .onnx)"
    )


def no_network(path: Path) -> str:
    """What to say of a file that no task reads."""
    return (
        f"'{path}' is no network that can be read: give a run, a checkpoint's folder, Lc0's weights (.pb.gz), a "
        "checkpoint of Matrix0 (.pt), or an ONNX file that `export` wrote"
    )


def load_network(
    spec: TaskSpec[Any],
    config: Config,
    folder: Path,
    checkpoint: str,
    device: str | Runtime = "auto",
    compile: bool | str = "auto",
    parts: Parts = Parts(),  # noqa: B008 - frozen
) -> Network:
    """The network of a run's folder, EMA weights where the run kept them, in what this machine computes best with.

    device: also the whole runtime, of a network that is to compute as it did before. parts: the trunk and heads that
    the run was given; heads may be left out. Raises ValueError naming the checkpoint that is missing or damaged, and
    for a trunk that is not given.
    """
    from matrixlib.engine import optim
    from matrixlib.engine.memory import fresh_model

    recorded = read_json(folder / "run.json").get("parts", {})
    if "trunk" in recorded and parts.trunk is None:
        raise ValueError(
            f"run '{folder.name}' was trained with a trunk of its own, {recorded['trunk']['path']}: give it as "
            "load(run, trunk=...); its source is in run.json"
        )
    model = fresh_model(spec.with_parts(spec.task(config), parts))
    stored = pick_checkpoint(folder, config, checkpoint)
    tensors, sha256 = weights(stored)
    if recorded and not parts.heads:
        own = optim.named_tensors(model)
        tensors = {name: tensor for name, tensor in tensors.items() if name in own}
    optim.load_tensors(model, tensors, f"{folder.name}/config.yaml is not that of {stored.path.name}")
    runtime = runtime_for_use(config, device)
    net = spec.network(model, config, runtime, runtimes.serving(runtime.device, compile))
    net.sha256, net.lesson = sha256, stored.state.get("teacher", {})
    return net


def pick_checkpoint(folder: Path, config: Config, checkpoint: str) -> Checkpoint:
    """A checkpoint of a run's folder. CheckpointError naming one that is missing or damaged."""
    from matrixlib.engine.checkpoint import Checkpoints

    return Checkpoints(folder / "checkpoints", config.checkpoint.keep).pick(checkpoint)


def runtime_for_use(config: Config, device: str | Runtime = "auto", precision: str = "auto") -> Runtime:
    """What this machine evaluates a network with, whatever it was trained with; a runtime that is given stays."""
    if isinstance(device, runtimes.Runtime):
        return device
    settings = {"device": device, "precision": precision, "threads": "auto", "channels_last": "auto", "compile": False}
    return runtimes.resolve(config.runtime.model_copy(update=settings), config.train, config.data)


def weights(stored: Checkpoint) -> tuple[dict[str, Tensor], str]:
    """The tensors of a checkpoint to evaluate with, the moving average where there is one, and their file's SHA-256."""
    group = "ema" if stored.tensors.get("ema") else "model"
    return stored.tensors[group], stored.sha256[group]


def other_weights(what: str, sha256: str, record: Mapping[str, Any], when: str) -> str:
    """That a network, called `what`, has other weights than those of `record`, made when `when`, in words; "" where it
    has not, or nothing was written down."""
    before = str(record.get("sha256", sha256))
    same = sha256 == before
    return "" if same else f"{what} holds other weights than when {when} ({sha256[:12]} in place of {before[:12]})"
