"""What runs, notebooks and benchmarks need of a task beyond the engine: a TaskSpec, one object a task.

A task's folder has its configuration, engine task, data and figures, and a `spec.py` with `TASK = MySpec()`. Only
`config`, `layout` and `task` are required; the rest has defaults.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from matrixlib.config import Config, ConfigError, DataConfig, OpeningOptions
from matrixlib.data.remote import download_catalogue, is_remote
from matrixlib.engine.curriculum import Curriculum, Phase, SourceCurriculumConfig
from matrixlib.engine.parts import Parts
from matrixlib.files import SHIPPED, folder_of, from_home, read_json
from matrixlib.hardware import machine
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
    from matrixlib.play.game import Game, Openings, Trace
    from matrixlib.play.match import Player
    from matrixlib.play.search import Evaluate
    from matrixlib.play.selfplay import Judges

Check = tuple[str, bool, str]  # name, whether it holds, what it says


@dataclass(frozen=True)
class Stage:
    """A curriculum phase made concrete: its task, shard sources (none: all), and their weights if not by size."""

    task: Task
    sources: Sequence[str] = ()
    weights: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Overfit:
    """When a network has memorised a few rows.

    overrides: over a preset. gaps: term -> most nats of its mean loss above the floor. exact: metrics that must be 1.
    inputs, labels: arrays of `prepare` that make up a row and its target, compared between visits. needs: what the
    configuration lacks, as text.
    """

    overrides: Mapping[str, Any] = field(default_factory=dict)
    gaps: Mapping[str, float] = field(default_factory=dict)
    exact: Sequence[str] = ()
    inputs: Sequence[str] = ()
    labels: Sequence[str] = ()
    needs: Callable[[Any], str] = lambda config: ""


class GameSpec(ABC):
    """What a cycle needs of a game beyond its rules. It shows the held-out figure `top1` if there is one."""

    ending: ClassVar[str]  # of the name of a file that holds what `Game.write` gives
    solved: ClassVar[bool] = False  # whether perfect play is known

    @property
    @abstractmethod
    def game(self) -> Game:
        """The rules."""

    @abstractmethod
    def batch(self, traces: Sequence[Trace], ids: Mapping[int, int]) -> Batch:
        """Training rows of games. ids: number of a game -> its id."""

    @abstractmethod
    def keys(self, records: np.ndarray) -> np.ndarray:
        """(N,) u8, equal for records that are the same position to a network."""

    def judges(self, syzygy: str = "", material: float = 0) -> Judges:
        """Who judges self-play games that are cut off, by the options `syzygy` and `material` of self-play. ValueError
        for tables that cannot be read, or where the game has no such thing."""
        if syzygy or material:
            raise ValueError(f"selfplay.syzygy and selfplay.material are for chess, and {self.game.name} has neither")
        return {}

    def read_openings(self, file: str, plies: int, count: int, seed: int | Sequence[int]) -> Openings:
        """Up to `count` distinct openings of a book, of at most `plies` plies, chosen by the seed. ValueError."""
        raise ValueError(f"openings '{file}': {self.game.name} has no opening books; leave `openings` empty")

    def openings(self, options: OpeningOptions, count: int, seed: int | Sequence[int], plies: int) -> Openings:
        """`count` distinct openings: of the options' file, else of `plies` random plies. ValueError for too few."""
        import numpy as np

        from matrixlib.play.game import Openings
        from matrixlib.play.match import random_openings

        file, limit = options.openings, options.opening_plies
        if not file:
            states = random_openings(self.game, count, seed, plies)
            return Openings(states, [np.zeros(0, np.uint64)] * count)
        found = self.read_openings(file, limit, count, seed)
        if len(found) < count:
            raise ValueError(
                f"openings '{file}': {len(found)} different ones, where {count} are asked for; give "
                "fewer pairs, more plies or another file"
            )
        return found

    def engine(self, text: str) -> AbstractContextManager[tuple[str, Player]] | None:
        """Name and player of an engine that a text says how to run, until the context ends; None for other texts.
        ValueError for a wrong one; EngineError, also of the player."""
        return None

    def perfection(self, evaluate: Evaluate, player: Player) -> dict[str, float]:
        """Rates of a network, and of a player with it, against perfect play. Only for solved games."""
        raise NotImplementedError("nobody knows perfect play")

    def checks(self, perfection: Mapping[str, float]) -> list[Check]:
        """What must hold of the best network, by these figures."""
        return []


ConfigT = TypeVar("ConfigT", bound=Config)


class TaskSpec(ABC, Generic[ConfigT]):
    """One task, for runs, notebooks and benchmarks. Stateless."""

    name: ClassVar[str]
    config: ClassVar[type[Any]]  # the schema of its configuration, a subclass of `config.Config`
    demo: ClassVar[str] = ""  # name of its preset for demonstrations; empty where it has none
    objective_options: ClassVar[Sequence[str]] = ()  # keys, or `section.`, that change what losses mean
    measured_on_options: ClassVar[Sequence[str]] = ()  # keys that change what its held-out figures are measured on
    held_out: ClassVar[str] = ""  # what share of what is added to its data is held out, in words
    overfit: ClassVar[Overfit] = Overfit()
    small: ClassVar[Mapping[str, Any]] = {}  # overrides that make its demo preset smaller still
    game: ClassVar[GameSpec | None] = None  # where it is a game for two
    next_steps: ClassVar[str] = "look into the network with eval.ipynb and browse.ipynb (make lab)"
    """What to do with a trained network, for people; `{run}` stands for its run's folder."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Layout of its shards."""

    @abstractmethod
    def task(self, config: ConfigT) -> Task:
        """What the engine trains."""

    def with_parts(self, task: Task, parts: Parts) -> Task:
        """The task with the caller's own heads, trunk and losses. ValueError if unsupported."""
        if parts.heads or parts.trunk or parts.losses:
            raise ValueError(f"the task {self.name} does not support own heads, trunk or losses; chess does")
        return task

    def folder(self, config: ConfigT) -> Path:
        """Folder of its shards; shipped or generated sets are made on first use. Raises ConfigError."""
        return given_folder(config.data)

    def catalogue(self, config: ConfigT) -> Catalogue:
        """The catalogue of its data; of several data sets, one with their names as sources. Raises as `folder`."""
        from matrixlib.data.catalogue import Catalogue, JoinedCatalogue

        def one(name: str) -> Catalogue:
            return Catalogue(
                self.folder(config.model_copy(update={"data": config.data.model_copy(update={"source": name})}))
            )

        if isinstance(config.data.source, str):
            return Catalogue(self.folder(config))
        if not config.data.source:
            raise ConfigError("data.source names no data set; give one, or several with weights")
        return JoinedCatalogue({name: one(name) for name in config.data.source})

    def curriculum(self, config: ConfigT) -> Curriculum | None:
        """Its curriculum, None without; default: over sources."""
        section = getattr(config, "curriculum", None)
        if not isinstance(section, SourceCurriculumConfig):
            return None
        curriculum = Curriculum(section, {"sources": section.sources})
        return curriculum if len(curriculum.phases) > 1 or curriculum.phases[0].values["sources"] else None

    def stage(self, task: Task, phase: Phase) -> Stage:
        """What a phase trains, and on what; default: weights of sources."""
        weights = phase.values["sources"]
        return Stage(task, list(weights), weights)

    def teacher(self, config: ConfigT, runtime: Runtime, record: Mapping[str, Any]) -> Teacher | None:
        """The frozen network that its losses need, on the device. record: how it was computed at first, {} when new."""
        return None

    def sidecars(
        self, config: ConfigT, folder: Path, shards: Sequence[ShardRow], teacher: Teacher | None
    ) -> Sidecars | None:
        """Files with extra rows for these shards, made if missing, whose rows `prepare` gets."""
        return None

    def inputs(self, task: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The network's inputs from a prepared batch on its device, by name (chess: `planes`)."""
        return {}

    def show(self, task: Any, batch: Mapping[str, Tensor], rows: int) -> Any:
        """The first rows of a prepared batch for display in a notebook; default: a table of its arrays."""
        import pandas as pd

        table = {
            name: {"shape": tuple(t.shape), "dtype": str(t.dtype)[6:], "least": t.min().item(), "most": t.max().item()}
            for name, t in batch.items()
        }
        return pd.DataFrame(table).T

    def training_flops(self, config: ConfigT) -> float | None:
        """FLOPs of training on one row; None if unknown."""
        return None

    def network(self, model: nn.Module, config: ConfigT, runtime: Runtime, serving: Serving | None = None) -> Network:
        from matrixlib.engine.network import Network

        return Network(model, self.task(config), runtime, serving)  # type: ignore[arg-type]

    def open_file(self, path: Path, device: str | Runtime = "auto", compile: bool | str = "auto") -> Network | None:
        """The network in a file of another program or `export`; None if not of this task, ValueError if damaged."""
        return None

    def evaluate(self, net: Network, held_out: Loader, catalogue: Catalogue, sample: int = 0) -> dict[str, Any]:
        """Held-out figures with `baselines`, and `by_source` where there are several. sample: rows, 0 = all. Default:
        each term's loss with its chance level, and every metric."""
        return by_source(lambda rows: self._losses(net, rows, sample), held_out)

    def _losses(self, net: Network, held_out: Loader, sample: int) -> dict[str, Any]:
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
        """The figures in one line, each with its baseline `<what>_<figure>`."""
        base = {name.partition("_")[2]: (name.partition("_")[0], value) for name, value in figures["baselines"].items()}
        parts = {name: f"{name} {value:.3g}" for name, value in figures.items() if isinstance(value, float)}
        return ", ".join(
            f"{text} ({base[name][0]} {base[name][1]:.3g})" if name in base else text for name, text in parts.items()
        )

    def checks(self, figures: Mapping[str, Any]) -> list[Check]:
        """What must hold of any network that learned something."""
        return [
            (f"held-out {name} below chance", figures[name] < chance, "the loss of a fresh network")
            for name in figures
            if (chance := figures["baselines"].get(f"chance_{name}")) is not None
        ]

    def viewer(self, held_out: Callable[[], Loader], count: int, file: str = "") -> Any:
        """Viewer of `count` held-out rows, or of a user's file, if the task has one. ValueError for an unsuitable file.

        It has a length, `figure(net, item, name)` for display in a cell, `board(net, item, name, widget=None)` as a
        widget (the given one, updated), and `check(net) -> Check`: what must hold of a network's outputs on all items.
        """
        return None

    def label_problems(self, task: Any, batch: dict[str, np.ndarray]) -> list[str]:
        """What is wrong with the targets of a batch of `prepare`, as texts."""
        return []

    def export(self, net: Any, path: Path | str) -> OnnxFile:
        """Write a network as ONNX; ValueError if unsupported."""
        raise ValueError(f"networks of the task {self.name} cannot be written as ONNX files")

    def ssl_targets(self, task: Any, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Targets of the SSL terms in a prepared host batch, by term; default: none."""
        return {}


def given_folder(data: DataConfig, name: str = "") -> Path:
    """The shard folder of `data.source`, or the local catalogue folder of a URL; ConfigError if absent, RemoteError if
    the URL fails. name: a valid source that is no folder."""
    source = data.source
    if not isinstance(source, str):
        raise ConfigError(f"data.source names several data sets ({', '.join(source)}) where one is needed; give one")
    if is_remote(source):
        return download_catalogue(source, data.cache)
    folder = from_home(source)
    if not source or not os.path.isdir(folder):
        either = f"'{name}' or " if name else ""
        problem = f"'{source}' is no folder" if source else "is not set"
        raise ConfigError(f"data.source {problem}; use {either}a folder of shards (data.ipynb makes one), or its URL")
    return folder


def find_run(run: str | Path) -> tuple[Path, str]:
    """(folder, checkpoint) of a run's folder, a name under reports/, a checkpoint folder, or `shipped`.

    checkpoint: `best` unless named. For a file: its path and no checkpoint. ValueError if nothing is there.
    """
    if not isinstance(run, str | os.PathLike):
        raise ValueError(f"give a run's folder or name, not {run!r}")
    if os.path.isfile(run):
        return Path(run), ""
    for folder in (Path(run), folder_of(run)):
        if os.path.exists(folder / "config.yaml"):
            return folder, "best"
        if os.path.exists(folder / "state.json") and (folder.resolve().parents[1] / "config.yaml").exists():
            return folder.resolve().parents[1], folder.resolve().name
    raise ValueError(
        f"no run at '{run}': expected a folder with config.yaml, such as reports/<run>, one of its checkpoints, the "
        f"file of a network (.pb.gz, .pt, .onnx), or '{SHIPPED.name}'"
    )


def no_network(path: Path) -> str:
    """Error message for a file that no task reads."""
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
    """The network of a run's folder, EMA weights if available, with this machine's best runtime.

    device: or a whole runtime, to compute as before. parts: the run's own trunk and heads; heads may be omitted.
    ValueError names the missing or damaged checkpoint, or a missing trunk.
    """
    from matrixlib.engine import optim
    from matrixlib.engine.memory import fresh_model

    recorded = read_json(folder / "run.json").get("parts", {})
    if "trunk" in recorded and parts.trunk is None:
        raise ValueError(
            f"run '{folder.name}' was trained with its own trunk, {recorded['trunk']['path']}: give it as "
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
    net.sha256, net.updates, net.lesson = sha256, stored.step, stored.state.get("teacher", {})
    return net


def pick_checkpoint(folder: Path, config: Config, checkpoint: str) -> Checkpoint:
    """A checkpoint of a run's folder. CheckpointError if missing or damaged."""
    from matrixlib.engine.checkpoint import CheckpointError, Checkpoints

    try:
        return Checkpoints(folder / "checkpoints", config.checkpoint.keep).pick(checkpoint)
    except CheckpointError as error:
        if folder != SHIPPED or checkpoint not in ("best", "newest"):
            raise
        raise CheckpointError(f"the network of the package is damaged ({error}): install the package again") from error


def runtime_for_use(config: Config, device: str | Runtime = "auto", precision: str = "") -> Runtime:
    """This machine's runtime for evaluation; a given runtime is returned. precision: default the training's, so that
    figures are equal on all machines, or fp32 where this one lacks it."""
    if isinstance(device, runtimes.Runtime):
        return device
    settings = {"device": device, "threads": "auto", "channels_last": "auto", "compile": False}
    settings |= {"precision": precision or config.runtime.precision}
    try:
        runtime = runtimes.resolve(config.runtime.model_copy(update=settings), config.train, config.data)
    except ValueError:
        if precision:
            raise
        return runtime_for_use(config, device, "fp32")
    emulated = runtime.dtype == "bf16" and not runtimes.native_bf16(machine.facts(), runtime.device)
    return runtime_for_use(config, device, "fp32") if emulated and not precision else runtime


def weights(stored: Checkpoint) -> tuple[dict[str, Tensor], str]:
    """Evaluation tensors of a checkpoint (the moving average if available) and their file's SHA-256."""
    group = "ema" if stored.tensors.get("ema") else "model"
    return stored.tensors[group], stored.sha256[group]


def other_weights(what: str, sha256: str, record: Mapping[str, Any], when: str) -> str:
    """Message that the network `what` has other weights than recorded when `when`; "" if equal or unrecorded."""
    before = str(record.get("sha256", sha256))
    same = sha256 == before
    return "" if same else f"{what} holds other weights than when {when} ({sha256[:12]} in place of {before[:12]})"


class NoTargets(ValueError):
    """No held-out row has the target that the figures need."""


def by_source(figures: Callable[[Loader], dict[str, Any]], held_out: Loader) -> dict[str, Any]:
    """Figures of held-out rows; of several sources, also `by_source`: those of each, {} of one that has none."""
    whole, sources = figures(held_out), held_out.of_sources()

    def of(rows: np.ndarray) -> dict[str, Any]:
        try:
            return figures(held_out.only(rows))
        except NoTargets:
            return {}

    return whole | ({"by_source": {name: of(rows) for name, rows in sources.items()}} if len(sources) > 1 else {})


def figures_table(evaluation: Mapping[str, Any]) -> Any:
    """An evaluation (of summary.json, say) as a DataFrame of text: a row for each figure, columns `value`, `baselines`.

    A baseline belongs to figures that contain its last word: `uniform_top1` to `top1`, `majority_wdl` to
    `wdl_accuracy`. Rates (top..., ...accuracy) are in percent. Other types are left out; figures of `by_source` follow.
    """
    import pandas as pd

    rows = {}
    parts = {"": evaluation} | {f" of {source}": own for source, own in evaluation.get("by_source", {}).items()}
    for suffix, figures, name, value in ((s, f, *item) for s, f in parts.items() for item in f.items()):
        if isinstance(value, (int, float, str)):
            baselines = [(key.rpartition("_"), other) for key, other in figures.get("baselines", {}).items()]
            beside = [(key.replace("_", " "), other) for (key, _, of), other in baselines if of in name.split("_")]
            texts = [f"{key} {number_text(name, other)}" for key, other in beside]
            rows[name.replace("_", " ") + suffix] = number_text(name, value), ", ".join(texts)
    return pd.DataFrame.from_dict(rows, orient="index", columns=["value", "baselines"])


def number_text(name: str, value: Any) -> str:
    """A figure as text: rates in percent, fractions with three digits."""
    if isinstance(value, float):
        share = name.replace("_", " ").split()[-1].startswith(("top", "accuracy", "valid"))
        return f"{value:.1%}" if share else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
