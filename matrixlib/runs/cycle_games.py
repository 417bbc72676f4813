"""Generations of a cycle: the games of each, played in worker processes and written as shards, and how far it has come.

`generation_001.json` is rewritten whenever something is done for good: a chunk of games, the choice of what to learn
from, the training, a batch of a match, the decision. It appears whole or not at all, so a cycle that was killed goes on
behind the last thing that is in it. `generation_000.json` is there where a roll-back came before any decision.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.torch
import torch
from torch import nn

from matrixlib import files
from matrixlib.config import Config, Section
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader
from matrixlib.data.shards import pack_shard, read_info, select
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.engine.network import Network
from matrixlib.engine.optim import named_tensors
from matrixlib.files import read_json, write_json
from matrixlib.hardware.runtime import Runtime
from matrixlib.play.evaluator import Evaluator
from matrixlib.play.game import Game, States, Trace, uniform
from matrixlib.play.match import Player, play_pairs, search_player
from matrixlib.play.selfplay import SelfPlayOptions, play_games
from matrixlib.runs.cycle_config import CycleConfig
from matrixlib.tasks import get_task
from matrixlib.tasks.spec import GameSpec, weights

TRIAL_GAMES = 4
HELD_OUT = 20  # every so many games one is held out of training
Pairs = tuple[int, int, int, int, int]
"""Pairs that scored 0, 1/2, 1, 3/2 and 2 points of 2."""


class CycleError(ValueError):
    """A cycle that cannot be begun or continued; says what to do."""


# What is stored


class Tally(Section):
    """Games of self-play. wins, draws, losses: of the side that starts a game, unknown: those without a result;
    played_out: games that were played on although a side would have resigned, wrong: those that it did not lose;
    seconds: of computing."""

    games: int
    positions: int
    plies: int
    wins: int
    draws: int
    losses: int
    unknown: int
    wrong: int
    played_out: int
    seconds: float


class TrainingInputs(Section):
    """What a candidate learns from, settled when its training begins, whatever becomes of shards meanwhile.

    start: generation of its first weights; sources: weights of the latest generations' positions; decisions: how many
    there were about the best network.
    """

    start: int
    sources: dict[str, float]
    decisions: int


class Decision(Section):
    """Which network is the best one from then on. kind: what decided; after: the last generation before it."""

    kind: Literal["match", "rollback"]
    after: int
    best: int
    reason: str
    time: str


class Generation(Section):
    """One generation, as far as it has come.

    by: generation whose network plays the games and is the opponent; begun: UTC time; chunks: first game -> tally;
    top1: on held-out positions, None in a game that has no such figure; top1_new: on those of them that no game to
    learn from has; new: their share; match, anchor: results of the candidate against that network and against
    generation 0, batch by batch; rollbacks: those between this generation's decision and the next one's.
    """

    number: int
    by: int = 0
    begun: str = ""
    chunks: dict[str, Tally] = {}
    inputs: TrainingInputs | None = None
    top1: float | None = None
    top1_new: float | None = None
    new: float | None = None
    match: tuple[Pairs, ...] = ()
    anchor: tuple[Pairs, ...] = ()
    decision: Decision | None = None
    rollbacks: tuple[Decision, ...] = ()

    def __str__(self) -> str:
        text = self.decision.reason if self.decision else "not decided yet"
        return f"generation {self.number}: {self.selfplay.games} games, {text}"

    @property
    def learned(self) -> bool:
        """Whether its network has been trained."""
        return self.new is not None or self.top1 is not None

    @property
    def selfplay(self) -> Tally:
        """All of its games."""
        names = Tally.model_fields
        return Tally(**{name: sum(getattr(t, name) for t in self.chunks.values()) for name in names})

    def pairs(self, kind: Literal["match", "anchor"]) -> tuple[int, ...]:
        """(5,) results of all batches."""
        return tuple(np.sum([(0, 0, 0, 0, 0), *getattr(self, kind)], axis=0).tolist())

    def write(self, folder: Path, **changes: Any) -> Generation:
        """Replace its file, with these changes; returns what was written."""
        changed = self.model_copy(update=changes)
        write_json(folder / f"generation_{self.number:03d}.json", changed.model_dump())
        return changed


def read_generations(folder: Path) -> dict[int, Generation]:
    """All that a cycle's folder holds, by number, in their order."""
    stored = []
    for path in folder.glob("generation_*.json"):
        try:
            stored.append(Generation.model_validate(read_json(path)))
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise CycleError(f"{path} is damaged ({reason}): bring it back, or begin another cycle") from error
    return {generation.number: generation for generation in sorted(stored, key=lambda g: g.number)}


# Networks


def rules(config: CycleConfig) -> GameSpec:
    """The game that a cycle plays."""
    game = get_task(config.network.task).game
    assert game is not None, "load_cycle takes games only"
    return game


def weights_of(folder: Path, config: CycleConfig, generation: int) -> bytes:
    """The averaged weights of a generation of the cycle in `folder`, as safetensors; 0 is the untrained network."""
    if generation:
        checkpoints = folder.parent / f"{folder.name}-{generation:03d}" / "checkpoints"
        tensors = weights(Checkpoints(checkpoints, config.network.checkpoint.keep).pick("newest"))[0]
    else:
        tensors = named_tensors(_model(config))
    return safetensors.torch.save({name: tensor.detach().clone() for name, tensor in tensors.items()})


def network(config: CycleConfig, runtime: Runtime, stored: bytes) -> Network:
    """The network of a cycle with these weights."""
    model = _model(config)
    model.load_state_dict(safetensors.torch.load(stored), strict=True)
    return get_task(config.network.task).network(model, _seeded(config), runtime)


def _model(config: CycleConfig) -> nn.Module:
    return get_task(config.network.task).task(_seeded(config)).build_model()


def _seeded(config: CycleConfig) -> Config:
    return config.network.model_copy(update={"seed": config.seed})


def player(config: CycleConfig, net: Network) -> Player:
    """How a network plays in matches."""
    return search_player(rules(config).game, Evaluator(net), config.match.num_simulations, config.search)


# Games


def source(generation: int) -> str:
    """The name by which the catalogue knows the positions of a generation."""
    return f"selfplay_{generation:03d}"


def trial_rows(config: CycleConfig) -> dict[str, torch.Tensor]:
    """An update's rows to try a device with: openings of games between uniform players, called drawn."""
    game = rules(config)
    options = SelfPlayOptions(parallel=TRIAL_GAMES, num_simulations=2, plies=8)
    drawn = [replace(trace, result=0.0) for trace in play_games(game.game, uniform, range(TRIAL_GAMES), options)]
    batch = game.batch(drawn, {trace.number: trace.number for trace in drawn})
    task = get_task(config.network.task).task(config.network)
    arrays = task.prepare(batch, np.random.default_rng(config.seed))
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def keep(catalogue: Catalogue, games: Games) -> None:
    """Put the shards of games that were played somewhere into the cycle's."""
    for name, data in games.shards.items():
        files.write_bytes(catalogue.folder / name, data)
        info = read_info(catalogue.folder / name)
        catalogue.add(info, info.meta["split"], info.meta["source"])


def unlearned(training: Loader, held_out: Loader, game: GameSpec) -> Loader:
    """The held-out positions that no game to learn from has: games begin alike."""
    return held_out.only(~np.isin(held_out.of_records(game.keys), training.of_records(game.keys)))


def tally(game: Game, traces: Sequence[Trace], positions: int, seconds: float) -> Tally:
    """The figures of some games. positions: to learn from."""
    starters = [-1 if game.to_move(trace.states[:1])[0] else 1 for trace in traces]  # results are the first mover's
    points = Counter(None if t.result is None else t.result * side for t, side in zip(traces, starters, strict=True))
    judged = [trace.wrongly_given_up for trace in traces if trace.wrongly_given_up is not None]
    return Tally(
        games=len(traces),
        positions=positions,
        plies=sum(len(trace.line) for trace in traces),
        wins=points[1.0],
        draws=points[0.0],
        losses=points[-1.0],
        unknown=points[None],
        wrong=sum(judged),
        played_out=len(judged),
        seconds=seconds,
    )


@dataclass(frozen=True)
class Games:
    """Games that were played. shards: name -> bytes, one of training and one of held-out games."""

    tally: Tally
    shards: Mapping[str, bytes]


@dataclass(frozen=True)
class Chunk:
    """Games `first` to `first + games - 1` of a generation, played by the network of generation `by`; a part for
    `fleet.compute`, on one thread, as its processes are the parallelism: their number does not change the games.

    runtime: of one thread. created: of the shards.
    """

    cycle: str
    config: CycleConfig
    runtime: Runtime
    generation: int
    by: int
    created: str
    first: int
    games: int

    def __call__(self, stored: bytes) -> Games:
        """Play the games with these weights."""
        self.runtime.apply()
        config, spec, game = self.config, get_task(self.config.network.task), rules(self.config)
        evaluator = Evaluator(network(config, self.runtime, stored))
        seed = config.seed * 1_000_003 + self.generation
        start = time.monotonic()
        numbers = range(self.first, self.first + self.games)
        traces = list(play_games(game.game, evaluator, numbers, config.selfplay, config.search, seed))
        traces.sort(key=lambda trace: trace.number)
        ids = {number: self._id(number) for number in numbers}
        batch = game.batch(traces, ids)
        outside = np.array([ids[number] for number in numbers if number % HELD_OUT == HELD_OUT - 1], np.uint64)
        validation = np.isin(batch["records"]["game"], outside)
        origin = {"cycle": self.cycle, "generation": self.generation, "by": self.by, "first": self.first}
        meta = {"source": source(self.generation), "generator": origin, "seed": seed, "created": self.created}
        shards = {}
        for split, rows in (("train", ~validation), ("validation", validation)):
            if rows.any():
                part = select(batch, np.flatnonzero(rows), spec.layout)
                name = f"{self.generation:03d}_{self.first:06d}_{split}.npz"
                shards[name] = pack_shard(spec.layout, part, {**meta, "split": split})
        return Games(tally(game.game, traces, len(batch["records"]), time.monotonic() - start), shards)

    def _id(self, number: int) -> int:
        """A 64-bit id of a game, for its records. Whether it is held out is not in it: the shard says so."""
        name = f"{self.cycle}/{self.generation}/{number}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Pairing:
    """Pairs of games between two generations, from `first` on, all at once; a part for `fleet.compute`."""

    config: CycleConfig
    runtime: Runtime
    generations: tuple[int, int]
    openings: States
    first: int

    def __call__(self, *stored: bytes) -> tuple[str, Pairs]:
        """(the games as they are written, how many pairs scored what) of the networks with these weights."""
        self.runtime.apply()
        game = rules(self.config).game
        one, two = (player(self.config, network(self.config, self.runtime, part)) for part in stored)
        first, second = (f"generation {number}" for number in self.generations)
        match = play_pairs(game, one, two, self.openings, self.config.match.plies, (first, second), 2 * self.first)
        text = "\n\n".join(game.write(record) for record in match.games) + "\n"
        return text, tuple(match.pairs().tolist())
