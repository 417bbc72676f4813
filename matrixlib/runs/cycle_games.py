"""Self-play of a cycle: chunks of games, played in worker processes and written as shards."""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from matrixlib.files import end_with_parent
from matrixlib.hardware.runtime import Runtime
from matrixlib.play.game import uniform
from matrixlib.play.selfplay import SelfPlayOptions, play_games
from matrixlib.runs.cycle_config import CycleConfig
from matrixlib.runs.cycle_state import Tally
from matrixlib.tasks import get_task
from matrixlib.tasks.spec import GameSpec, weights

if TYPE_CHECKING:
    import torch

    from matrixlib.data.loader import Loader
    from matrixlib.engine.network import Network
    from matrixlib.play.game import Game, Trace

TRIAL_GAMES = 4
HELD_OUT = 20  # every so many games one is held out of training


def held_out(number: int) -> bool:
    """Whether a game is held out of training."""
    return number % HELD_OUT == HELD_OUT - 1


def source(generation: int) -> str:
    """The name by which the catalogue knows the positions of a generation."""
    return f"selfplay_{generation:03d}"


def network(folder: Path, config: CycleConfig, generation: int, runtime: Runtime) -> Network:
    """The network of a generation of the cycle in `folder`, averaged weights; 0 is the untrained one."""
    from matrixlib.engine.checkpoint import Checkpoints

    spec = get_task(config.network.task)
    settings = config.network.model_copy(update={"seed": config.seed})
    model = spec.task(settings).build_model()
    if generation:
        checkpoints = folder.parent / f"{folder.name}-{generation:03d}" / "checkpoints"
        stored = Checkpoints(checkpoints, config.network.checkpoint.keep).pick("newest")
        model.load_state_dict(weights(stored)[0], strict=True)
    return spec.network(model, settings, runtime)


def trial_rows(config: CycleConfig) -> dict[str, torch.Tensor]:
    """An update's rows to try a device with, of beginnings of games between players who know nothing, called drawn."""
    import torch

    spec = get_task(config.network.task)
    assert spec.game is not None, "load_cycle takes games only"
    options = SelfPlayOptions(parallel=TRIAL_GAMES, num_simulations=2, plies=8)
    traces = play_games(spec.game.game, uniform, range(TRIAL_GAMES), options)
    drawn = [replace(trace, result=0.0) for trace in traces]
    batch = spec.game.batch(drawn, {trace.number: trace.number for trace in drawn})
    arrays = spec.task(config.network).prepare(batch, np.random.default_rng(config.seed))
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def play_chunks(chunks: Sequence[Chunk], workers: int) -> Iterator[tuple[Chunk, Tally]]:
    """Play the chunks and yield each when it is done, in worker processes where there are several."""
    if workers == 1 or len(chunks) < 2:
        for chunk in chunks:
            yield chunk, chunk.play()
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(chunks)), context, end_with_parent) as pool:
        futures = {pool.submit(chunk.play): chunk for chunk in chunks}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:  # after an error the chunks that have not begun are not waited for
            pool.shutdown(cancel_futures=True)


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
class Chunk:
    """Games `first` to `first + games - 1` of a generation, played by the network of generation `by`."""

    folder: Path
    config: CycleConfig
    runtime: Runtime
    generation: int
    by: int
    first: int
    games: int

    def play(self) -> Tally:
        """Play the games and write their shards, one of training and one of held-out games.

        On one thread, as the processes of self-play are the parallelism: their number does not change the games.
        """
        from matrixlib.data.catalogue import Catalogue
        from matrixlib.data.shards import select, write_shard
        from matrixlib.play.evaluator import Evaluator

        runtime = replace(self.runtime, threads=1)
        runtime.apply()
        config, spec = self.config, get_task(self.config.network.task)
        assert spec.game is not None, "load_cycle takes games only"
        evaluator = Evaluator(network(self.folder, config, self.by, runtime))
        seed = config.seed * 1_000_003 + self.generation
        start = time.monotonic()
        numbers = range(self.first, self.first + self.games)
        traces = list(play_games(spec.game.game, evaluator, numbers, config.selfplay, config.search, seed))
        traces.sort(key=lambda trace: trace.number)
        ids = {number: self._id(number) for number in numbers}
        batch = spec.game.batch(traces, ids)
        outside = np.array([ids[number] for number in numbers if held_out(number)], np.uint64)
        validation = np.isin(batch["records"]["game"], outside)
        catalogue = Catalogue(self.folder / "shards")
        origin = {
            "cycle": self.folder.name,
            "generation": self.generation,
            "by": self.by,
            "first": self.first,
        }
        meta = {"source": source(self.generation), "generator": origin, "seed": seed}
        for split, rows in (("train", ~validation), ("validation", validation)):
            if rows.any():
                part = select(batch, np.flatnonzero(rows), spec.layout)
                path = self.folder / "shards" / f"{self.generation:03d}_{self.first:06d}_{split}.npz"
                info = write_shard(path, spec.layout, part, {**meta, "split": split})
                catalogue.add(info, split, source(self.generation))
        return tally(spec.game.game, traces, len(batch["records"]), time.monotonic() - start)

    def _id(self, number: int) -> int:
        """A 64-bit id of a game, for its records. Whether it is held out is not in it: the shard says so."""
        name = f"{self.folder.name}/{self.generation}/{number}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
