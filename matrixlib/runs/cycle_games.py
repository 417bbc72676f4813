"""Self-play of a cycle: chunks of games, played in worker processes and written as shards."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import nn

from matrixlib import files
from matrixlib.config import Config
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader
from matrixlib.data.shards import pack_shard, read_info, select
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.engine.network import Network
from matrixlib.engine.optim import named_tensors
from matrixlib.hardware.runtime import Runtime
from matrixlib.play.evaluator import Evaluator
from matrixlib.play.game import Game, States, Trace, uniform
from matrixlib.play.match import Player, play_pairs, search_player
from matrixlib.play.selfplay import SelfPlayOptions, play_games
from matrixlib.runs.cycle_config import CycleConfig
from matrixlib.runs.cycle_state import CycleError, Pairs, Tally
from matrixlib.tasks import get_task
from matrixlib.tasks.spec import GameSpec, weights

TRIAL_GAMES = 4
HELD_OUT = 20  # every so many games one is held out of training


def held_out(number: int) -> bool:
    """Whether a game is held out of training."""
    return number % HELD_OUT == HELD_OUT - 1


def source(generation: int) -> str:
    """The name by which the catalogue knows the positions of a generation."""
    return f"selfplay_{generation:03d}"


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


def trial_rows(config: CycleConfig) -> dict[str, torch.Tensor]:
    """An update's rows to try a device with, of beginnings of games between players who know nothing, called drawn."""
    spec = get_task(config.network.task)
    assert spec.game is not None, "load_cycle takes games only"
    options = SelfPlayOptions(parallel=TRIAL_GAMES, num_simulations=2, plies=8)
    traces = play_games(spec.game.game, uniform, range(TRIAL_GAMES), options)
    drawn = [replace(trace, result=0.0) for trace in traces]
    batch = spec.game.batch(drawn, {trace.number: trace.number for trace in drawn})
    arrays = spec.task(config.network).prepare(batch, np.random.default_rng(config.seed))
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def player(config: CycleConfig, net: Network) -> Player:
    """How a network plays in matches."""
    spec = get_task(config.network.task)
    assert spec.game is not None, "load_cycle takes games only"
    return search_player(spec.game.game, Evaluator(net), config.match.num_simulations, config.search)


def keep(catalogue: Catalogue, games: Games) -> None:
    """Put the shards of games that were played somewhere into the cycle's. CycleError where they came over damaged."""
    for name, (data, sha256) in games.shards.items():
        if hashlib.sha256(data).hexdigest() != sha256:
            raise CycleError(f"{name} came over damaged (SHA-256): start again to play its games again")
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
    """Games that were played. shards: name -> (bytes, their SHA-256), one of training and one of held-out games."""

    tally: Tally
    shards: Mapping[str, tuple[bytes, str]]


@dataclass(frozen=True)
class Chunk:
    """Games `first` to `first + games - 1` of a generation, played by the network of generation `by`; a part of a
    fleet, on one thread, as its processes are the parallelism: their number does not change the games.

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
        config, spec = self.config, get_task(self.config.network.task)
        assert spec.game is not None, "load_cycle takes games only"
        evaluator = Evaluator(network(config, self.runtime, stored))
        seed = config.seed * 1_000_003 + self.generation
        start = time.monotonic()
        numbers = range(self.first, self.first + self.games)
        traces = list(play_games(spec.game.game, evaluator, numbers, config.selfplay, config.search, seed))
        traces.sort(key=lambda trace: trace.number)
        ids = {number: self._id(number) for number in numbers}
        batch = spec.game.batch(traces, ids)
        outside = np.array([ids[number] for number in numbers if held_out(number)], np.uint64)
        validation = np.isin(batch["records"]["game"], outside)
        origin = {"cycle": self.cycle, "generation": self.generation, "by": self.by, "first": self.first}
        meta = {"source": source(self.generation), "generator": origin, "seed": seed, "created": self.created}
        shards = {}
        for split, rows in (("train", ~validation), ("validation", validation)):
            if rows.any():
                part = select(batch, np.flatnonzero(rows), spec.layout)
                data = pack_shard(spec.layout, part, {**meta, "split": split})
                name = f"{self.generation:03d}_{self.first:06d}_{split}.npz"
                shards[name] = data, hashlib.sha256(data).hexdigest()
        return Games(tally(spec.game.game, traces, len(batch["records"]), time.monotonic() - start), shards)

    def _id(self, number: int) -> int:
        """A 64-bit id of a game, for its records. Whether it is held out is not in it: the shard says so."""
        name = f"{self.cycle}/{self.generation}/{number}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Pairing:
    """Pairs of games between two generations, from `first` on, all at once; a part of a fleet as a `Chunk` is."""

    config: CycleConfig
    runtime: Runtime
    generations: tuple[int, int]
    openings: States
    first: int

    def __call__(self, *stored: bytes) -> tuple[str, Pairs]:
        """(the games as they are written, how many pairs scored what) of the networks with these weights."""
        self.runtime.apply()
        spec = get_task(self.config.network.task)
        assert spec.game is not None, "load_cycle takes games only"
        one, two = (player(self.config, network(self.config, self.runtime, part)) for part in stored)
        first, second = (f"generation {number}" for number in self.generations)
        game, plies = spec.game.game, self.config.match.plies
        match = play_pairs(game, one, two, self.openings, plies, (first, second), 2 * self.first)
        text = "\n\n".join(game.write(record) for record in match.games) + "\n"
        return text, tuple(match.pairs().tolist())
