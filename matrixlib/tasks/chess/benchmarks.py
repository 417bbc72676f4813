"""What `make bench` measures of chess: inference, self-supervised targets, search."""

import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from matrixlib import config as configuration
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader
from matrixlib.hardware.benchmark import Figure, Plan, Workload
from matrixlib.hardware.speed import copy_rate, turns
from matrixlib.play.game import uniform
from matrixlib.play.search import Search, SearchOptions
from matrixlib.tasks.chess import ssl_targets
from matrixlib.tasks.chess.config import ChessConfig
from matrixlib.tasks.chess.evaluate import onnx, throughput
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.game import ChessGame
from matrixlib.tasks.chess.records import LAYOUT
from matrixlib.tasks.chess.sample_set import unpack_sample
from matrixlib.tasks.chess.task import ChessTask

LARGE = "matrix0_53m"


def inference(plan: Plan) -> Iterator[Figure]:
    """Positions a second that a network evaluates for searches and matches, by what evaluates it and by batch."""
    presets = (
        {"demo": (1, 16)}
        if plan.brief
        else {"quick": throughput.SIZES, LARGE: (32,) if plan.device == "cpu" else (256, 1024)}
    )
    for preset, sizes in presets.items():
        task = ChessTask(_config(preset))
        net = Net(task.build_model(), task, plan.runtime)
        with tempfile.TemporaryDirectory() as folder:
            nets = {f"torch {plan.runtime.dtype}": net}
            if preset == "quick":  # for the large one that takes minutes
                nets = onnx.engines(net, Path(folder), plan.compile)
            for engine, rows, rate, limit in throughput.measure(nets, sizes, plan.seconds / 4).values.tolist():
                of = f"{engine.split()[-1]} products" if limit > 0 else ""
                yield Figure(f"{preset}, {engine}, {rows} at once", rate, "positions/s", limit if of else None, of)


def targets(plan: Plan) -> Iterator[Figure]:
    """Positions a second whose self-supervised targets one core makes, all heads together."""
    records = _records(32_768)
    seconds = turns({"targets": lambda: ssl_targets.targets(records)}, plan.seconds / 4)["targets"]
    size = records["pieces"][0].nbytes + 40  # 40 bytes of maps come out
    limit = copy_rate() / size
    yield Figure("all five heads", len(records) / seconds, "positions/s", limit, "copying their bytes once")


def search(plan: Plan) -> Iterator[Figure]:
    """Simulations a second of one core with an evaluator that costs nothing."""
    game = ChessGame()
    trees = 64 if plan.brief else 256
    states = _records(1024)
    states = states[np.isnan(game.terminal(states, np.diff(game.legal(states)[1])))][:trees]
    legal = turns({"legal": lambda: game.legal(states)}, plan.seconds / 10)["legal"]
    simulations = 16 if plan.brief else 200

    def run(leaves: int) -> None:
        tree = Search(game, uniform, SearchOptions(leaves=leaves), len(states))
        for number in range(len(states)):
            tree.reset(number, states[number : number + 1])
        tree.run(simulations)

    for leaves in (1, 8):
        seconds = turns({"search": partial(run, leaves)}, plan.seconds / 3)["search"]
        name = f"{trees} trees, {leaves} {'leaf' if leaves == 1 else 'leaves'} of each at once"
        rate = simulations * len(states) / seconds
        yield Figure(name, rate, "simulations/s", len(states) / legal, "their legal moves alone")


BENCHMARKS: Mapping[str, Workload] = {"inference": inference, "targets": targets, "search": search}


def _config(preset: str) -> ChessConfig:
    data, name = configuration.read_preset(preset)
    return configuration.validated(ChessConfig, data, name)


def _records(rows: int) -> np.ndarray:
    """Positions of the sample set, in the order in which a training of the quick preset has them."""
    config = _config("quick")
    shards = Catalogue(unpack_sample()).shards("train")
    return Loader(shards, LAYOUT, rows, config.seed, ChessTask(config).prepare).records(0)["records"]
