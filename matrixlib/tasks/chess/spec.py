"""The task spec of chess: data, evaluation, overfit check, self-play game."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from matrixlib.config import validated
from matrixlib.data.shards import file_hash
from matrixlib.engine.folder import read_run_config
from matrixlib.files import from_home
from matrixlib.tasks import spec as specs
from matrixlib.tasks.chess import bitboard, ssl_targets
from matrixlib.tasks.chess.config import ChessConfig
from matrixlib.tasks.chess.game import ChessGame, by_material, open_tablebases, training_batch
from matrixlib.tasks.chess.records import LAYOUT, SOURCES, position_hashes
from matrixlib.tasks.chess.stockfish.client import find_program
from matrixlib.tasks.chess.stockfish.sample import unpack_sample

if TYPE_CHECKING:
    from torch import Tensor, nn

    from matrixlib.data.catalogue import Catalogue, ShardRow
    from matrixlib.data.loader import Loader
    from matrixlib.data.reader import Sidecars
    from matrixlib.data.shards import Batch
    from matrixlib.engine.network import Network
    from matrixlib.engine.onnx import OnnxFile
    from matrixlib.engine.parts import Parts
    from matrixlib.hardware.runtime import Runtime, Serving
    from matrixlib.play.game import Openings, States, Trace, Values
    from matrixlib.play.match import Player
    from matrixlib.play.selfplay import Judges
    from matrixlib.tasks.chess.distill.teacher import ChessTeacher
    from matrixlib.tasks.chess.evaluate.analysis import BoardViewer
    from matrixlib.tasks.chess.evaluate.net import Net
    from matrixlib.tasks.chess.task import ChessTask


class ChessGameSpec(specs.GameSpec):
    ending = ".pgn"
    game = ChessGame()

    def batch(self, traces: Sequence[Trace], ids: Mapping[int, int]) -> Batch:
        return training_batch(traces, ids, SOURCES["selfplay"])

    def read_openings(self, file: str, plies: int, count: int, seed: int | Sequence[int]) -> Openings:
        from matrixlib.tasks.chess.openings import read_openings

        return read_openings(file, plies, count, seed)

    def engine(self, text: str) -> AbstractContextManager[tuple[str, Player]] | None:
        from matrixlib.tasks.chess.stockfish.player import running_engine

        program, _, rest = text.partition(" ")
        engine = "=" in rest or (rest and find_program(program))
        return running_engine(text) if engine and not os.path.exists(text) else None

    def keys(self, records: np.ndarray) -> np.ndarray:
        return position_hashes(records, mirrored=True)

    def judges(self, syzygy: str = "", material: float = 0) -> Judges:
        judges: dict[str, Callable[[States], Values]] = {}
        if syzygy:
            tables = open_tablebases(from_home(syzygy))
            judges["tables"] = ChessGame(tables, max(len(name) - 1 for name in tables.wdl)).without_clock
        if material:
            judges["material"] = partial(by_material, margin=material)
        return judges


class ChessSpec(specs.TaskSpec[ChessConfig]):
    """Chess: positions with policy, win-draw-loss and game result."""

    name, demo = "chess", "demo"
    config = ChessConfig
    layout = LAYOUT
    objective_options = ("loss.", "teacher.", "model.value.kind", "model.ssl")
    measured_on_options = ("validation.limit",)
    held_out = "about one game in twenty is held out"
    overfit = specs.Overfit(
        overrides={
            "data": {"mirror": False},
            "model": {"droppath": 0.0, "dropout": 0.0, "ssl": [], "value": {"kind": "wdl"}},
            "loss": {"label_smoothing": 0.0, "best_move": False, "policy_temperature": 1.0},
            "teacher": {"network": ""},
        },
        gaps={"policy": 0.05},
        exact=("value/accuracy",),
        inputs=("pieces", "state"),
        labels=("policy_index", "policy_weight", "wdl", "result"),
        needs=lambda config: (
            ""
            if config.loss.policy and config.loss.value and config.model.value.kind == "wdl"
            else "loss.policy and loss.value above 0 and model.value.kind wdl"
        ),
    )
    small = {
        "model": {"channels": 8, "blocks": 1, "policy": {"channels": 8}, "value": {"channels": 8, "hidden": 16}},
        "optim": {"learning_rate": 0.01},
        "train": {"batch_size": 64},
        "runtime": {"precision": "fp32", "threads": 1, "channels_last": False},
    }
    game = ChessGameSpec()
    next_steps = (
        "look into the network with eval.ipynb, ssl.ipynb and browse.ipynb (make lab),\n"
        "      or play against it: matrixlib-uci --checkpoint {run}"
    )

    def with_parts(self, task: Any, parts: Parts) -> ChessTask:
        return replace(task, trunk=parts.trunk, heads=parts.heads, loss_functions=parts.losses)

    def inputs(self, task: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"planes": task.planes(batch)}

    def show(self, task: Any, batch: Mapping[str, Tensor], rows: int) -> Any:
        from matrixlib.tasks.chess.plots import batch_boards

        return batch_boards(batch, rows)

    def task(self, config: ChessConfig) -> ChessTask:
        from matrixlib.tasks.chess.lc0.network import Lc0Task
        from matrixlib.tasks.chess.task import ChessTask

        return Lc0Task(config) if config.model.encoding == "lc0" else ChessTask(config)

    def folder(self, config: ChessConfig) -> Path:
        return unpack_sample() if config.data.source == "sample" else specs.given_folder(config.data, "sample")

    def teacher(self, config: ChessConfig, runtime: Runtime, record: Mapping[str, Any]) -> ChessTeacher | None:
        from matrixlib.hardware.runtime import reuse
        from matrixlib.tasks.chess.distill.teacher import ChessTeacher

        if not config.teacher.network:
            return None
        own = reuse(record["runtime"]) if record else runtime.device
        return ChessTeacher.of(load(config.teacher.network, "", own, False), config)

    def sidecars(self, config: ChessConfig, folder: Path, shards: Sequence[ShardRow], teacher: Any) -> Sidecars | None:
        from matrixlib.tasks.chess.distill import teacher as teachers

        if config.teacher.cache and not isinstance(config.data.source, str):
            raise ValueError("cached teacher outputs need one data set: set teacher.cache to false")
        if not config.teacher.cache or not isinstance(teacher, teachers.ChessTeacher):  # no teacher in a complete run
            return None
        return teachers.sidecars(teacher, self.task(config), folder, shards)

    def training_flops(self, config: ChessConfig) -> float:
        return self.task(config).training_flops()

    def network(self, model: nn.Module, config: ChessConfig, runtime: Runtime, serving: Serving | None = None) -> Net:
        from matrixlib.tasks.chess.evaluate.net import Net

        return Net(model, self.task(config), runtime, serving)

    def open_file(self, path: Path, device: str | Runtime = "auto", compile: bool | str = "auto") -> Net | None:
        from matrixlib.tasks.chess.evaluate.onnx import open_file

        if net := open_file(path, device, compile):
            net.sha256 = file_hash(path)
        return net

    def evaluate(self, net: Any, held_out: Loader, catalogue: Catalogue, sample: int = 0) -> dict[str, Any]:
        from matrixlib.tasks.chess.evaluate import held_out as figures

        def own(rows: Loader) -> dict[str, Any]:
            return figures.held_out(net, rows, sample)

        teacher = net.task.config.teacher.network
        if not teacher:
            return specs.by_source(own, held_out)
        try:
            other = load(teacher, "", net.runtime.device)
            problem = specs.other_weights(f"'{teacher}'", other.sha256, net.lesson, "it taught this network")
        except ValueError as error:
            problem = str(error)
        if problem:
            warnings.warn(f"no comparison with the teacher: {problem}", stacklevel=2)
            return specs.by_source(own, held_out)
        return figures.agreement(net, other, held_out, sample)

    def headline(self, figures: Mapping[str, Any]) -> str:
        base = figures["baselines"]
        value = {"wdl_accuracy": "WDL {:.1%}", "value_correlation": "value correlation {:.2f}"}
        return ", ".join(
            (
                f"top-1 {figures['top1']:.1%} (best capture {base['best_capture_top1']:.1%}, "
                f"uniform {base['uniform_top1']:.1%}), top-3 {figures['top3']:.1%}, KL {figures['policy_kl']:.2f}",
                *(text.format(figures[name]) for name, text in value.items() if name in figures),
            )
        )

    def viewer(self, held_out: Callable[[], Loader], count: int, file: str = "") -> BoardViewer:
        from matrixlib.tasks.chess.evaluate import analysis

        return analysis.game_viewer(file) if file else analysis.held_out_viewer(held_out(), count)

    def export(self, net: Any, path: Path | str) -> OnnxFile:
        from matrixlib.tasks.chess.evaluate.onnx import export

        return export(net, path)

    def ssl_targets(self, task: Any, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {f"ssl_{head}": ssl_targets.head_target(batch, head) for head in task.config.model.ssl}

    def label_problems(self, task: Any, batch: dict[str, np.ndarray]) -> list[str]:
        state, index = batch["state"], batch["policy_index"]
        castling, en_passant = state[:, 0].astype(np.uint8), state[:, 1].astype(np.int8)
        _, legal, offset = bitboard.legal_moves(batch["pieces"], castling, en_passant)
        table = np.zeros((len(state), bitboard.POLICY_SIZE), bool)
        table[np.repeat(np.arange(len(state)), np.diff(offset)), legal] = True
        good = np.take_along_axis(table, np.maximum(index, 0).astype(np.int64), axis=1)
        mass = np.where(good, 0, batch["policy_weight"]).sum(1)
        problem = (
            f"{(mass > 0).sum()} of {len(mass)} positions have policy targets on illegal moves "
            f"(up to {mass.max():.1%}): check the policy encoding of the source"
        )
        return [problem] if mass.any() else []

    def checks(self, figures: Mapping[str, Any]) -> list[specs.Check]:
        base = figures["baselines"]
        top1, better = figures["top1"] > base["uniform_top1"], figures["policy_kl"] < base["uniform_kl"]
        return [
            ("held-out policy better than uniform", better, "KL to the labels below that of a uniform policy"),
            ("held-out moves better than a random legal one", top1, "top-1 accuracy above that of a random move"),
        ]


TASK = ChessSpec()


def load(run: str | Path, checkpoint: str = "", device: str | Runtime = "auto", compile: bool | str = "auto") -> Net:
    """Load the network of a chess run, see `matrixlib.tasks.load`; `device` may be a runtime."""
    from matrixlib.tasks.chess.evaluate.net import Net

    folder, named = specs.find_run(run)
    net: Network | None
    if folder.is_file():
        if (net := TASK.open_file(folder, device, compile)) is None:
            raise ValueError(specs.no_network(folder))
    else:
        data, name = read_run_config(folder)
        if data.get("task") != TASK.name:
            raise ValueError(f"run '{folder.name}' trains {data.get('task')}, not chess")
        net = specs.load_network(TASK, validated(TASK.config, data, name), folder, checkpoint or named, device, compile)
    assert isinstance(net, Net)
    return net
