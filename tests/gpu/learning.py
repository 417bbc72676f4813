"""Does it learn on the device what it learns on a CPU, and does a cycle of self-play survive being killed?"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from parts import ROWS, check_that, run_overrides

from matrixlib import files
from matrixlib.config import merge
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.shards import Shard
from matrixlib.hardware.benchmark import Figure, Plan
from matrixlib.runs import cycle_games
from matrixlib.runs.cycle import open_cycle
from matrixlib.runs.cycle_games import read_generations
from matrixlib.runs.fleet import compute
from matrixlib.runs.record import runtime_settings
from matrixlib.runs.run import open_run
from matrixlib.tasks import get_task

STEPS = 13_111
REFERENCE: Mapping[str, tuple[float, float]] = {
    "top1": (0.323, 0.01),
    "top3": (0.586, 0.012),
    "policy_kl": (0.711, 0.02),
    "wdl_accuracy": (0.834, 0.01),
    "value_correlation": (0.900, 0.01),
}
"""Held-out figures of `quick` with AdamW and a convolution for the policy, as it was, after so many updates on two
cores of an EPYC, and how far another run may lie from them: twice what other seeds make."""
MINUTES = 4.0
"""Of the training on a card; with more than that it would be another training's time."""


def learning(plan: Plan) -> Iterator[Figure | str]:
    """`quick` on a card, to as many updates as the CPU's run made, and its held-out figures within noise
    of that one's. On a CPU: a small run with channels_last beside one without.
    """
    if plan.brief:
        losses = []
        for last in (False, True):
            overrides = run_overrides(plan, {"runtime": {"channels_last": last}, "train": {"batch_size": 64}})
            run = open_run("demo", run=f"learning-{last}", steps=30, overrides=overrides)
            updates = list(run.trainer.train())
            validation = updates[-1].validation
            losses.append(validation["loss"])
            check_that(losses[-1] < updates[0].loss, f"the loss went from {updates[0].loss:.3f} to {losses[-1]:.3f}")
        words = f"held-out losses after 30 updates: {losses[0]:.4f}, and {losses[1]:.4f} in the other layout"
        check_that(abs(losses[1] / losses[0] - 1) < 0.01, words)
        yield words
        return
    overrides = {
        "runtime": {**runtime_settings(plan.runtime), "compile": False},
        "train": {"statistics_interval": 1000},
        "optim": {"optimiser": "adamw"},
        "model": {"policy": {"kind": "conv", "rank": 96}},
    }
    run = open_run("quick", run="learning", steps=STEPS, overrides=overrides)
    began = time.monotonic()
    for stats in run.train():
        took = time.monotonic() - began
        if took > 60 * (MINUTES + 2):
            check_that(
                False, f"only {stats.step} of {STEPS} updates in {took / 60:.0f} minutes: nothing can be compared"
            )
    figures = run.summary()["evaluation"]
    yield f"{STEPS} updates in {took / 60:.1f} minutes; {run.summary()['headline']}"
    yield Figure("quick, whole run", run.summary()["positions_per_second"], "positions/s")
    wrong = []
    for name, (expected, noise) in REFERENCE.items():
        check_that(name in figures, f"no held-out figure '{name}' among {', '.join(figures)}")
        if abs(figures[name] - expected) > noise:
            wrong.append(f"{name} {figures[name]:.3f}, on the CPU {expected:.3f} within {noise}")
    check_that(not wrong, "; ".join(wrong))


KILLED_SECONDS = 240.0
GAMES_TARGET = 15.0
"""Self-play games a second of 32 simulations, with an H200 and 16 cores."""


def cycle(plan: Plan) -> Iterator[Figure | str]:
    """Tic-tac-toe with workers, killed in the middle of its games: every game is played and counted once. On a card,
    self-play games of chess a second."""
    folder = files.reports_root() / "played"
    overrides = cycle_overrides(plan)
    # Forked in the dry run, whose process has computed nothing yet: importing torch takes longer than all else there.
    context = multiprocessing.get_context("fork" if plan.brief and hasattr(os, "fork") else "spawn")
    process = context.Process(target=play_cycle, args=(plan.device, overrides, str(files.reports_root())))
    process.start()
    deadline = time.monotonic() + KILLED_SECONDS
    while not counted(folder) and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.join()
    known = counted(folder)
    check_that(known > 0, f"no chunk of games was counted within {KILLED_SECONDS:.0f} s")
    again = open_cycle("tictactoe", plan.device, folder.name, overrides)
    generations = list(again.train())
    games, planned = sum(generation.selfplay.games for generation in generations), again.config.games * len(generations)
    layout = get_task(again.config.network.task).layout
    shards = [Shard(row.path, layout).arrays["records"]["game"] for row in Catalogue(folder / "shards").shards()]
    stored = len(np.unique(np.concatenate(shards)))
    check_that(
        games == stored == planned, f"{planned} games were to be played, {games} are counted, {stored} are stored"
    )
    check_that(all(g.decision for g in generations), "a generation was not decided by its match")
    yield f"killed after {known} chunks; {games} games in {len(generations)} generations, each once"
    if not plan.brief:
        yield from selfplay(plan)


def cycle_overrides(plan: Plan) -> dict[str, Any]:
    """Of the tic-tac-toe cycle: short, with two workers on a card."""
    runtime = {"network": {"runtime": {**runtime_settings(plan.runtime), "compile": False, "threads": 1}}}
    if not plan.brief:
        return merge({"workers": 2, "generations": 2}, runtime)
    training = {"train": {"steps": 5, "batch_size": ROWS}, "validation": {"interval": 5}, "checkpoint": {"interval": 5}}
    small = {
        "generations": 1,
        "games": 60,
        "chunk": 10,
        "match": {"pairs": 4, "batch": 4, "anchor_pairs": 2, "num_simulations": 2},
        "selfplay": {"num_simulations": 2, "parallel": 10},
        "network": {**training, "model": {"width": 16, "layers": 1}},
    }
    return merge(small, runtime)


def play_cycle(device: str, overrides: Mapping[str, Any], root: str) -> None:
    """A process that plays the cycle until it is killed."""
    os.environ["MATRIXLIB_REPORTS"] = root
    files.end_with_parent()
    for _ in open_cycle("tictactoe", device, "played", overrides).train():
        pass


def counted(folder: Path) -> int:
    """Chunks of games of the first generation that are counted so far."""
    generation = read_generations(folder).get(1) if folder.is_dir() else None
    return len(generation.chunks) if generation else 0


def selfplay(plan: Plan) -> Iterator[Figure | str]:
    """Games a second of chess with a fresh `quick` network, as many processes as there are cores."""
    from matrixlib.hardware import machine

    cores = machine.facts().cores
    overrides = {
        "workers": cores,
        "games": 64 * cores,
        "chunk": 64,
        "selfplay": {"num_simulations": 32, "full_share": 1.0, "parallel": 64},
        "network": {"runtime": {**runtime_settings(plan.runtime), "compile": False}},
    }
    opened = open_cycle("quick", plan.device, "selfplay", overrides)
    config = opened.config
    place = (opened.name, config, replace(opened.runtime, threads=1), 1, 0, "2026-01-01T00:00:00Z")
    chunks = {n: cycle_games.Chunk(*place, n, config.chunk) for n in range(0, config.games, config.chunk)}
    stored = cycle_games.weights_of(opened.folder, config, 0)
    began = time.perf_counter()
    tallies = [games.tally for _, games in compute(chunks.items(), [stored], workers=config.workers)]
    rate = sum(tally.games for tally in tallies) / (time.perf_counter() - began)
    plies = sum(tally.plies for tally in tallies) / sum(tally.games for tally in tallies)
    yield Figure(
        f"self-play of chess, {cores} processes", rate, "games/s", GAMES_TARGET, "target on an H200 with 16 cores"
    )
    yield f"self-play: {plies:.0f} plies a game, 32 simulations a move, starting the processes counted"
