"""Parts of a cycle: options, record of a generation, networks, and the games that worker processes play."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import safetensors.torch
import torch
from pandas import DataFrame
from pydantic import Field, SerializeAsAny, model_validator
from torch import nn

from matrixlib.config import Config, ConfigError, Count, Processes, Real, Section, option, read_preset, validated
from matrixlib.data.shards import pack_shard, select
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.engine.network import Network
from matrixlib.engine.optim import named_tensors
from matrixlib.files import PARAMS, read_json, write_json
from matrixlib.hardware.runtime import Runtime
from matrixlib.play.elo import rating_table
from matrixlib.play.game import Openings, uniform
from matrixlib.play.match import MatchOptions, Player, play_pairs, search_player
from matrixlib.play.search import Evaluator, SearchOptions
from matrixlib.play.selfplay import SelfPlayOptions, play_games, tally
from matrixlib.runs.fleet import Kind
from matrixlib.tasks import TASKS, get_task, task_of, validate_config
from matrixlib.tasks.spec import GameSpec, weights

TRIAL_GAMES = 4
START = "start.safetensors"  # weights of generation 0, of `start`
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
        "network of generation 0, with its architecture: a run, checkpoint or Matrix0 file; empty = random weights",
    )
    sources: dict[str, Annotated[Real, Field(gt=0, lt=1)]] = option(
        {}, "share of a batch for each other data set, beside the games, such as `{sample: 0.25}`"
    )
    seed: Annotated[int, Field(ge=0, lt=2**62)] = option(0, "of games, openings and training")
    generations: Count = option(6, "generations to train")
    games: Annotated[int, Field(ge=20)] = option(512, "games of self-play in a generation; every twentieth is held out")
    chunk: Count = option(128, "games of a shard; what a killed process loses at most")
    window: Count = option(3, "latest generations that are trained on")
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
        if (total := sum(self.sources.values())) >= 1:
            raise ValueError(f"the shares of sources are {total:g} in all, which leaves nothing for the games")
        return self


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
        raise ConfigError(
            f"{name}: network.train.init is '{config.train.init}': a cycle begins with the network of `start`, so give "
            "it there"
        )
    cycle = validated(CycleConfig, {**data, "network": config}, name)
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

    by: generation that plays the games and is the opponent; begun: UTC; chunks: first game -> tally. start, sources,
    known: fixed when training starts: generation of the initial weights, weights of recent generations' positions and
    of other data sets, number of decisions. top1: on held-out positions, None if the game has no such figure; top1_new:
    on those in no training game; new: their share. match, anchor: the candidate's results by batch. anchor_by: opponent
    of the anchor match, None for generation 0 in cycles of before. rollbacks: between this decision and the next.
    """

    number: int
    by: int = 0
    begun: str = ""
    chunks: dict[str, Tally] = {}
    start: int = 0
    sources: dict[str, float] | None = None
    known: int = 0
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
        return f"generation {self.number}: {self.selfplay['games']} games, {text}"

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
    known = [(g.number, *row) for g in generations for row in g.results.items()]
    found = {(str(number), str(other)): pairs for number, other, pairs in known if sum(pairs)}
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
            return (folder / START).read_bytes()
        except OSError as error:
            raise CycleError(f"{error.filename} cannot be read: bring it back, or begin another cycle") from error
    if generation:
        checkpoints = folder.parent / f"{folder.name}-{generation:03d}" / "checkpoints"
        tensors = weights(Checkpoints(checkpoints, config.network.checkpoint.keep).pick("newest"))[0]
    else:
        tensors = named_tensors(_model(config))
    return safetensors.torch.save({name: tensor.detach().clone() for name, tensor in tensors.items()})


def network(config: CycleConfig, runtime: Runtime, stored: bytes) -> Network:
    """The cycle's network with these weights."""
    model = _model(config)
    model.load_state_dict(safetensors.torch.load(stored), strict=True)
    return get_task(config.network.task).network(model, config.network, runtime)


def _model(config: CycleConfig) -> nn.Module:
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
    task = get_task(config.network.task).task(config.network)
    arrays = task.prepare(batch, np.random.default_rng(config.seed))
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
    seed = config.seed * 1_000_003 + generation.number
    began = time.monotonic()
    numbers = range(first, min(first + config.chunk, config.games))
    traces = list(play_games(game.game, evaluator, numbers, config.selfplay, config.search, seed, openings))
    traces.sort(key=lambda trace: trace.number)
    hashes = {n: hashlib.blake2b(f"{cycle}/{generation.number}/{n}".encode(), digest_size=8) for n in numbers}
    ids = {n: int.from_bytes(named.digest(), "little") for n, named in hashes.items()}
    batch = game.batch(traces, ids)
    outside = np.array([ids[number] for number in numbers if number % HELD_OUT == HELD_OUT - 1], np.uint64)
    validation = np.isin(batch["records"]["game"], outside)
    origin = {"cycle": cycle, "generation": generation.number, "by": generation.by, "first": first}
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
    starts, past = openings.states, openings.history
    match = play_pairs(game, one, two, starts, config.match.plies, names, 2 * first, past)
    return "\n\n".join(game.write(record) for record in match.games) + "\n", tuple(match.pairs().tolist())
