"""Parts of a cycle: options, record of a generation, networks, and the games that worker processes play."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import numpy as np
import safetensors.torch
import torch
from pydantic import Field, SerializeAsAny, model_validator
from torch import nn

from matrixlib.config import (
    BelowOne,
    Config,
    ConfigError,
    Count,
    CountOrZero,
    NonNegative,
    Processes,
    Section,
    option,
    read_preset,
    validated,
)
from matrixlib.data.shards import pack_shard, select
from matrixlib.engine.checkpoint import Checkpoint, Checkpoints
from matrixlib.engine.network import Network
from matrixlib.engine.optim import named_tensors
from matrixlib.files import PARAMS, read_json, write_json
from matrixlib.hardware.runtime import Runtime
from matrixlib.play.elo import rating_table
from matrixlib.play.game import Openings, uniform
from matrixlib.play.match import MatchOptions, Player, play_pairs, search_player
from matrixlib.play.search import Evaluator, SearchOptions
from matrixlib.play.selfplay import Judges, SelfPlayOptions, play_games, tally
from matrixlib.runs.fleet import Kind
from matrixlib.tasks import TASKS, get_task, task_of, validate_config
from matrixlib.tasks.spec import GameSpec, weights

if TYPE_CHECKING:
    from pandas import DataFrame

TRIAL_GAMES = 4
START = "start.safetensors"  # weights of generation 0, of `start`
WINDOW_LAW = 0.75, 0.4  # power, and positions that the window grows by for each new one at first
BY_HEART_RATIO, BY_HEART_GAIN = 0.5, 0.05  # see `Generation.by_heart`
SEEDS = 1_000_003  # of a generation: cycle's seed * SEEDS + number
HELD_OUT = 20  # one in so many games is held out
Pairs: TypeAlias = tuple[int, int, int, int, int]  # pairs that scored 0, 1/2, 1, 3/2, 2 points
Tally: TypeAlias = dict[str, Any]  # see `selfplay.tally`
Against: TypeAlias = Literal["match", "anchor"]  # the best network, or the opponent for the scale of ratings


class CycleError(ValueError):
    """A cycle cannot be started or resumed; says what to do."""


class CycleConfig(Section):
    """A cycle: generations of self-play, training, and a match that decides about promotion.

    `network` is the network and its training, with its task's sections, as in a preset.
    """

    start: str = option(
        "",
        "network of generation 0, with its architecture: a run, `shipped`, a checkpoint, or a file of Matrix0 or Lc0; "
        "empty = random weights",
    )
    sources: dict[str, BelowOne | Annotated[list[BelowOne], Field(min_length=1)]] = option(
        {},
        "share of a batch for each other data set, beside the games, such as `{sample: 0.25}`; 0 leaves out one of the "
        "preset; a list is by generation, such as `{sample: [0.5, 0.25, 0]}`; the last one stays",
    )
    seed: Annotated[int, Field(ge=0, lt=2**62)] = option(0, "of games, openings and training")
    generations: Count = option(6, "generations to train")
    games: Annotated[int, Field(ge=20)] = option(512, "games of self-play in a generation; every twentieth is held out")
    chunk: Count = option(128, "games of a shard; what a killed process loses at most")
    window: Count = option(3, "latest generations that are trained on")
    window_rows: CountOrZero = option(
        0, "positions from which on the window grows slower than what there is (KataGo), in place of `window`; 0 = off"
    )
    row_uses: NonNegative = option(
        0.0, "updates by new positions: uses of each (KataGo: 4 to 8), in place of network.train.steps; 0 = off"
    )
    carry: bool = option(False, "carry optimizer state, raw weights and averages from one training to the next")
    workers: Processes = option(1, "processes of self-play and matches, each of which computes on one thread")
    fleet: Kind = option(
        "local",
        "`ray`: every thread, or every GPU, of the Ray cluster that this machine belongs to, in place of `workers`",
    )
    selfplay: SelfPlayOptions = SelfPlayOptions()
    search: SearchOptions = SearchOptions()
    match: MatchOptions = MatchOptions()
    network: SerializeAsAny[Config]

    @model_validator(mode="after")
    def _leaves_games(self) -> CycleConfig:
        lists = {name: share for name, share in self.sources.items() if isinstance(share, list)}
        if unused := [name for name, shares in lists.items() if not any(shares)]:
            raise ValueError(f"source '{unused[0]}' has a share in no generation: leave it out")
        for number in range(1, 1 + max(map(len, lists.values()), default=1)):
            if (total := sum(self.shares(number).values())) >= 1:
                raise ValueError(f"sources take {total:g} in generation {number}, which leaves nothing for the games")
        return self

    def shares(self, generation: int) -> dict[str, float]:
        """Share of a batch of each other data set that a generation learns from."""
        shares = {
            name: share[min(generation, len(share)) - 1] if isinstance(share, list) else share
            for name, share in self.sources.items()
        }
        return {name: share for name, share in shares.items() if share}

    def recent(self, rows: Sequence[int]) -> int:
        """Number of latest generations to learn from. rows: training positions of each generation.

        window_rows c: as many as have c (1 + b ((n / c)^a - 1) / a) of all n positions, with a and b of WINDOW_LAW (Wu
        2019, https://arxiv.org/abs/1902.10565, appendix); all up to c.
        """
        (power, slope), start, total = WINDOW_LAW, self.window_rows, sum(rows)
        if not start:
            return self.window
        wanted = start * (1 + slope * ((total / start) ** power - 1) / power) if total > start else total
        return int(np.searchsorted(np.cumsum(rows[::-1]), wanted)) + 1

    def updates(self, generation: int, rows: int) -> int:
        """Updates of a generation with so many new training positions, 0 = as `network.train.steps` says."""
        of_games = self.network.train.batch_size * (1 - sum(self.shares(generation).values()))
        return max(1, math.ceil(self.row_uses * rows / of_games)) if self.row_uses else 0


def load_cycle(preset: str, overrides: Mapping[str, Any] | None = None) -> CycleConfig:
    """Read a cycle's preset by name from params/cycle/, or a YAML file by path, and apply nested overrides.

    ConfigError for an unknown preset, unknown or mistyped keys, or a task that is not a two-player game.
    """
    data, name = read_preset(preset, overrides, PARAMS / "cycle")
    network = data.get("network")
    if not isinstance(network, Mapping):
        raise ConfigError(f"{name}: key 'network' is missing: the network and its training, as in a preset")
    if task_of(network, name, "network.").game is None:
        games = ", ".join(task for task in TASKS if get_task(task).game is not None)
        raise ConfigError(f"{name}: a cycle plays games for two ({games}), and task '{network['task']}' is none")
    config = validate_config(network, name, "network.")
    if config.train.init:
        raise ConfigError(f"{name}: network.train.init is '{config.train.init}': give it as the cycle's `start`")
    cycle = validated(CycleConfig, {**data, "network": config}, name)
    if cycle.start and (given := (overrides or {}).get("network", {}).get("model")):
        raise ConfigError(f"{name}: `start` has its network: leave out network.model ({', '.join(given)}), or `start`")
    return cycle.model_copy(update={"network": config.model_copy(update={"seed": cycle.seed})})


class Decision(Section):
    """A change of the best network. kind: what decided; after: the last generation before it."""

    kind: Literal["match", "rollback"]
    after: int
    best: int
    reason: str


class Generation(Section):
    """One generation as far as it has come: `generation_001.json`, replaced after every finished stage.
    `generation_000.json` exists if a roll-back preceded any decision.

    by: generation that plays the games and is the opponent; begun: UTC; chunks: first game -> tally. start,
    sources, known, steps: fixed when training starts: generation of the initial weights, weights of recent
    generations' positions and of other data sets, number of decisions, updates (0: as the network's configuration
    says). top1: on held-out positions of self-play, None if the game has no such figure; top1_new: on those in no
    training game; new: their share. value_loss: on positions of the games trained on, on held-out ones, its standard
    error over games, and chance; empty without such a term. match, anchor: the candidate's results by batch. anchor_by:
    opponent of the anchor match, None for generation 0 in cycles of before. rollbacks: between this decision and the
    next.
    """

    number: int
    by: int = 0
    begun: str = ""
    chunks: dict[str, Tally] = {}
    start: int = 0
    sources: dict[str, float] | None = None
    known: int = 0
    steps: int = 0
    value_loss: dict[Literal["train", "held out", "error", "chance"], float] = {}
    top1: float | None = None
    top1_new: float | None = None
    new: float | None = None
    match: tuple[Pairs, ...] = ()
    anchor: tuple[Pairs, ...] = ()
    anchor_by: int | None = None
    decision: Decision | None = None
    rollbacks: tuple[Decision, ...] = ()

    def __str__(self) -> str:
        text = self.decision.reason if self.decision else "not decided yet"
        heart = ", values learned by heart" if self.by_heart else ""
        return f"generation {self.number}: {self.selfplay['games']} games, {text}{heart}"

    @property
    def by_heart(self) -> bool:
        """Whether values were learned by heart: of what is gained over chance on the games trained on, if it is
        anything (0.05), less than half is gained on held-out games, by more than the standard error."""
        if not (loss := self.value_loss):
            return False
        train, held_out = loss["chance"] - loss["train"], loss["chance"] - loss["held out"]
        return train > BY_HEART_GAIN and held_out + loss["error"] < BY_HEART_RATIO * train

    @property
    def selfplay(self) -> Tally:
        """Tally over all its games."""
        return sum(map(Counter, self.chunks.values()), Counter[str]())

    def pairs(self, kind: Against) -> tuple[int, ...]:
        """(5,) results over all batches."""
        return tuple(np.sum([(0, 0, 0, 0, 0), *getattr(self, kind)], axis=0).tolist())

    @property
    def results(self) -> dict[int, tuple[int, ...]]:
        """Results (5,) of all its games, by opponent."""
        found = {self.by: np.array(self.pairs("match"))}
        found[self.anchor_by or 0] = found.get(self.anchor_by or 0, 0) + np.array(self.pairs("anchor"))
        return {other: tuple(pairs.tolist()) for other, pairs in found.items()}

    def write(self, folder: Path, **changes: Any) -> Generation:
        """Write its file with these changes; returns the new record."""
        changed = self.model_copy(update=changes)
        write_json(folder / f"generation_{self.number:03d}.json", changed.model_dump())
        return changed


def read_generations(folder: Path) -> dict[int, Generation]:
    """All generations in a cycle's folder, by number, ascending."""
    stored = {}
    for path in sorted(folder.glob("generation_*.json")):
        try:
            generation = Generation.model_validate(read_json(path))
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise CycleError(f"{path} is damaged ({reason}): bring it back, or begin another cycle") from error
        stored[generation.number] = generation
    return dict(sorted(stored.items()))


def ratings(generations: Iterable[Generation]) -> DataFrame:
    """Elo of generations over generation 0 from all their matches: `rating_table`, a row a generation, ascending."""
    found = {(str(g.number), str(other)): row for g in generations for other, row in g.results.items() if sum(row)}
    return rating_table(found, zero="0").rename(index=int).sort_index()


def rules(config: CycleConfig) -> GameSpec:
    """The cycle's game."""
    game = get_task(config.network.task).game
    assert game is not None, "load_cycle takes games only"
    return game


def weights_of(folder: Path, config: CycleConfig, generation: int) -> bytes:
    """Averaged weights of a generation in `folder`, as safetensors; 0 is the network of `start`, or untrained."""
    if generation == 0 and config.start:
        try:
            kept = (folder / START).read_bytes()
        except OSError as error:
            raise CycleError(f"{error.filename} cannot be read: bring it back, or begin another cycle") from error
        if hashlib.sha256(kept).hexdigest() != read_json(folder / "start.json").get("kept"):
            raise CycleError(f"{folder / START} is damaged or another network: bring it back, or begin another cycle")
        return kept
    tensors = weights(newest_checkpoint(folder, config, generation))[0] if generation else named_tensors(build(config))
    return safetensors.torch.save({name: tensor.detach().clone() for name, tensor in tensors.items()})


def newest_checkpoint(folder: Path, config: CycleConfig, generation: int) -> Checkpoint:
    """The newest checkpoint of a generation's training."""
    checkpoints = folder.parent / f"{folder.name}-{generation:03d}" / "checkpoints"
    return Checkpoints(checkpoints, config.network.checkpoint.keep).pick("newest")


def network(config: CycleConfig, runtime: Runtime, stored: bytes) -> Network:
    """The cycle's network with these weights."""
    model = build(config)
    model.load_state_dict(safetensors.torch.load(stored), strict=True)
    return get_task(config.network.task).network(model, config.network, runtime)


def judges(config: CycleConfig) -> Judges:
    """Who judges self-play games that are cut off. ConfigError if the game has no such thing, or without tables."""
    try:
        return rules(config).judges(config.selfplay.syzygy, config.selfplay.material)
    except ValueError as error:
        raise ConfigError(f"selfplay: {error}") from error


def build(config: CycleConfig) -> nn.Module:
    """The cycle's network with random weights."""
    return get_task(config.network.task).task(config.network).build_model()


def player(config: CycleConfig, net: Network) -> Player:
    """A network as a match player."""
    return search_player(rules(config).game, Evaluator(net), config.match.num_simulations, config.search)


def trial_rows(config: CycleConfig) -> dict[str, torch.Tensor]:
    """Rows for the device self-test: openings of random games, labelled as draws."""
    game = rules(config)
    options = SelfPlayOptions(parallel=TRIAL_GAMES, num_simulations=2, plies=8)
    drawn = [replace(trace, result=0.0) for trace in play_games(game.game, uniform, range(TRIAL_GAMES), options)]
    batch = game.batch(drawn, {trace.number: trace.number for trace in drawn})
    arrays = get_task(config.network.task).task(config.network).prepare(batch, np.random.default_rng(config.seed))
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def play_chunk(
    cycle: str,
    config: CycleConfig,
    runtime: Runtime,
    generation: Generation,
    first: int,
    stored: bytes,
    openings: Openings | None = None,
) -> tuple[Tally, dict[str, bytes]]:
    """One chunk of self-play games from `first` on, with these weights: tally, and shards (name -> bytes) of training
    and held-out games. runtime: single-threaded, as processes are the parallelism. openings: see `play_games`."""
    runtime.apply()
    spec, game = get_task(config.network.task), rules(config)
    evaluator = Evaluator(network(config, runtime, stored))
    seed = config.seed * SEEDS + generation.number
    began = time.monotonic()
    numbers = range(first, min(first + config.chunk, config.games))
    played = play_games(game.game, evaluator, numbers, config.selfplay, config.search, seed, openings, judges(config))
    outside = {number for number in numbers if number % HELD_OUT == HELD_OUT - 1}
    traces = [  # what is held out is measured as it is, whatever it surprises
        replace(trace, copies=trace.full.astype(np.int64)) if trace.number in outside else trace
        for trace in sorted(played, key=lambda trace: trace.number)
    ]
    hashes = {n: hashlib.blake2b(f"{cycle}/{generation.number}/{n}".encode(), digest_size=8) for n in numbers}
    ids = {n: int.from_bytes(named.digest(), "little") for n, named in hashes.items()}
    batch = game.batch(traces, ids)
    validation = np.isin(batch["records"]["game"], np.array([ids[number] for number in outside], np.uint64))
    endings = {ending: [ids[t.number] for t in traces if t.ending == ending] for ending in {t.ending for t in traces}}
    origin = {"cycle": cycle, "generation": generation.number, "by": generation.by, "first": first, "endings": endings}
    source = f"selfplay_{generation.number:03d}"
    meta = {"source": source, "generator": origin, "seed": seed, "created": generation.begun}
    shards = {}
    for split, rows in (("train", ~validation), ("validation", validation)):
        if rows.any():
            part = select(batch, np.flatnonzero(rows), spec.layout)
            name = f"{generation.number:03d}_{first:06d}_{split}.npz"
            shards[name] = pack_shard(spec.layout, part, {**meta, "split": split})
    figures = tally(game.game, traces) | {"positions": len(batch["records"]), "seconds": time.monotonic() - began}
    return figures, shards


def play_part(
    config: CycleConfig, runtime: Runtime, generations: tuple[int, int], openings: Openings, first: int, *stored: bytes
) -> tuple[str, Pairs]:
    """Game pairs between two generations from number `first` on: (games as text, pair results)."""
    runtime.apply()
    game = rules(config).game
    one, two = (player(config, network(config, runtime, part)) for part in stored)
    names = f"generation {generations[0]}", f"generation {generations[1]}"
    match = play_pairs(game, one, two, openings.states, config.match.plies, names, 2 * first, openings.history)
    return "\n\n".join(game.write(record) for record in match.games) + "\n", tuple(match.pairs().tolist())
