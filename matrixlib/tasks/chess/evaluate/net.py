"""A trained network for use: load a run, evaluate positions.

`Net.predict` is the one way to its opinion: for `evaluate`, searches, matches, self-play and UCI.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import chess
import numpy as np
import yaml

from matrixlib import config as configuration
from matrixlib import files
from matrixlib.hardware import runtime as runtimes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from matrixlib.engine.task import Batch
    from matrixlib.play.game import Moves, Offsets, States
    from matrixlib.tasks.chess.task import ChessTask

BATCH = 512  # boards turned into arrays at a time
RECOMPILES = 64
"""Graphs that the compiler keeps of one function: a size of one network each, and all chess networks share theirs. By
itself torch keeps 8 and evaluates the ninth uncompiled without an error."""


@dataclass(frozen=True)
class Evaluation:
    """What a network says of one position, seen from the side to move.

    moves: UCI -> probability, most probable first, all legal moves. wdl: (win, draw, loss), None for a scalar head.
    value: expected result in [-1, 1]. ssl: head -> float array (classes, 8, 8) of probabilities on the real board
    (row 0 = rank 1, column 0 = file a); "ours" in them is the side to move.
    """

    fen: str
    moves: dict[str, float]
    wdl: tuple[float, float, float] | None
    value: float
    ssl: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def best(self) -> str | None:
        """Most probable move in UCI; None where there is no legal move."""
        return next(iter(self.moves), None)


class GameTask(Protocol):
    """What a task adds so that its networks can be asked about positions of a game."""

    def inputs(self, rows: States, index: Moves, offset: Offsets) -> dict[str, np.ndarray]:
        """The arrays that `predict` asks for, of states (B,) and their legal moves (K,) at offsets (B + 1,).

        Among them `policy_index` (B, L): those moves in their order, -1 in other places.
        """
        ...

    def predict(self, model: nn.Module, batch: Batch, heads: frozenset[str] = ...) -> dict[str, torch.Tensor]:
        """`policy` (B, L), log-probabilities of `policy_index`; `value` (B,), the expected result in -1..1."""
        ...


class Network:
    """A network in evaluation mode with its task's encoding, whatever the game.

    serving: how batches are cut, filled and compiled; what the policy says of the device unless given.
    """

    def __init__(
        self,
        model: nn.Module,
        task: GameTask,
        runtime: runtimes.Runtime,
        serving: runtimes.Serving | None = None,
    ) -> None:
        from matrixlib.engine.step import compiled, place

        self.model = place(model, runtime)[0].requires_grad_(False).eval()
        self.task = task
        self.runtime = runtime
        self.serving = serving or runtimes.serving(runtime.device)
        self._compiled = compiled(self.model, dynamic=False) if self.serving.compile else None
        self._tried: set[int] = set()  # sizes of batches that have gone through the compiled network

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(p.numel() for p in self.model.parameters())

    def predict(
        self, batch: dict[str, np.ndarray], heads: frozenset[str] = frozenset()
    ) -> dict[str, np.ndarray]:
        """The task's `predict` of a batch of its `inputs`, at least one row, on the host and in fp32."""
        assert not self.model.training, "the network must be in eval mode"
        count, most = len(batch["policy_index"]), self.serving.sizes[-1]
        starts = range(0, count, most)
        parts = [self._part({n: a[i : i + most] for n, a in batch.items()}, heads) for i in starts]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _part(self, batch: dict[str, np.ndarray], heads: frozenset[str]) -> dict[str, np.ndarray]:
        """What fits in one batch, filled up with copies of its last row; the host waits for the device once."""
        import torch

        from matrixlib.engine.task import to_device

        count = len(batch["policy_index"])
        if self.serving.fill:
            size = next(size for size in self.serving.sizes if size >= count)
            rows = np.minimum(np.arange(size), count - 1)
            batch = {name: array[rows] for name, array in batch.items()}
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        if self.runtime.pin:
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        tensors = to_device(tensors, self.runtime.torch_device)
        with torch.inference_mode(), self.runtime.autocast():
            out = self._said(tensors, heads)
            flat = torch.cat([tensor.float().reshape(len(tensor), -1) for tensor in out.values()], dim=1)
        columns = np.cumsum([tensor[0].numel() for tensor in out.values()])[:-1]
        parts = np.split(flat.cpu().numpy()[:count], columns, axis=1)
        return {
            name: part.reshape(count, *tensor.shape[1:])
            for (name, tensor), part in zip(out.items(), parts, strict=True)
        }

    def _said(self, tensors: dict[str, torch.Tensor], heads: frozenset[str]) -> dict[str, torch.Tensor]:
        """The task's `predict`, compiled where that was decided and works; never for self-supervised heads."""
        if self._compiled is None or heads:
            return self.task.predict(self.model, tensors, heads)
        from torch._dynamo import config as dynamo
        from torch._dynamo.exc import FailOnRecompileLimitHit

        from matrixlib.engine.memory import out_of_memory

        size = len(tensors["policy_index"])
        try:
            with dynamo.patch(recompile_limit=RECOMPILES, fail_on_recompile_limit_hit=True):
                out = self.task.predict(self._compiled, tensors)
            self._tried.add(size)
            return out
        except FailOnRecompileLimitHit as error:
            reason = str(error.__cause__ or error)
        except RuntimeError as error:
            if size in self._tried or out_of_memory(error):
                raise
            reason = str(error)
        reason = " ".join(reason.split())[:200]
        warnings.warn(f"torch.compile failed, going on without it: {reason}", RuntimeWarning, stacklevel=2)
        self._compiled = None
        return self.task.predict(self.model, tensors, heads)


class Net(Network):
    """A network that plays chess."""

    task: ChessTask

    def evaluate(self, positions: str | Sequence[str]) -> list[Evaluation]:
        """Evaluate FENs; raises ValueError naming a bad FEN."""
        from matrixlib.tasks.chess.records import parse_fen

        fens = [positions] if isinstance(positions, str) else list(positions)
        return list(self.evaluate_boards([parse_fen(fen) for fen in fens]))

    def evaluate_boards(self, boards: Sequence[chess.Board]) -> Iterator[Evaluation]:
        """Evaluate boards, in batches of 512."""
        from matrixlib.tasks.chess.records import move_from_index

        heads: frozenset[str] = frozenset(self.task.config.model.ssl)
        for start in range(0, len(boards), BATCH):
            part = boards[start : start + BATCH]
            batch = self._pack(part)
            out = self.predict(batch, heads)
            probability = np.exp(out["policy"])
            for row, board in enumerate(part):
                index = batch["policy_index"][row]
                keep = index >= 0
                order = np.argsort(-probability[row][keep], kind="stable")
                moves = {
                    move_from_index(int(index[keep][k]), board).uci(): float(probability[row][keep][k])
                    for k in order
                }
                wdl = out.get("wdl")
                triple = None if wdl is None else (float(wdl[row, 0]), float(wdl[row, 1]), float(wdl[row, 2]))
                ssl = {head: self._upright(out["ssl/" + head][row], board) for head in sorted(heads)}
                yield Evaluation(board.fen(), moves, triple, float(out["value"][row]), ssl)

    def values(self, boards: Sequence[chess.Board]) -> np.ndarray:
        """Expected results (N,) in [-1, 1] from each side to move, without the policy."""
        parts = [
            self.predict(self._pack(boards[start : start + BATCH]))["value"]
            for start in range(0, len(boards), BATCH)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def _pack(self, boards: Sequence[chess.Board]) -> dict[str, np.ndarray]:
        from matrixlib.tasks.chess import records

        rows = records.from_boards(list(boards))
        return self.task.inputs(rows, *records.legal_indices(rows))

    @staticmethod
    def _upright(maps: np.ndarray, board: chess.Board) -> np.ndarray:
        return maps if board.turn == chess.WHITE else maps[:, ::-1]


def find_run(run: str | Path) -> tuple[Path, str]:
    """(folder, checkpoint) of a run's folder, of its name under reports/, or of a checkpoint's folder in it.

    checkpoint: `best` unless one was named. ValueError where there is no run.
    """
    for folder in (Path(run), files.reports_root() / run):
        if (folder / "config.yaml").exists():
            return folder, "best"
        if (folder / "state.json").exists() and (folder.resolve().parents[1] / "config.yaml").exists():
            return folder.resolve().parents[1], folder.resolve().name
    raise ValueError(
        f"no run at '{run}': expected a folder with config.yaml, such as reports/<run>, or one of its checkpoints"
    )


def load(run: str | Path, checkpoint: str = "", device: str = "auto", compile: bool | str = "auto") -> Net:
    """The network of a run, EMA weights where the run kept them; `run` as `find_run` takes it.

    checkpoint: `best`, `newest` or a folder name such as `step_00000500`; empty: the best, or the one that `run` names.
    compile: torch.compile for policy and value; `auto`: where it was measured to pay.
    Raises ValueError naming the run or checkpoint that is missing or damaged.
    """
    from matrixlib.engine.checkpoint import Checkpoints

    folder, named = find_run(run)
    config = configuration.parse(
        yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")), "config.yaml"
    )
    if not isinstance(config, configuration.ChessConfig):
        raise ValueError(
            f"run '{folder.name}' trains {config.task}, not chess; its own notebook evaluates it"
        )
    from matrixlib.tasks.chess.task import ChessTask

    task = ChessTask(config)
    found = Checkpoints(folder / "checkpoints", config.checkpoint.keep).pick(checkpoint or named)
    model = task.build_model()
    model.load_state_dict(weights(found.tensors), strict=True)
    runtime = _runtime(config, device)
    return Net(model, task, runtime, runtimes.serving(runtime.device, compile))


def _runtime(config: configuration.Config, device: str) -> runtimes.Runtime:
    """The policy's choice for this machine, whatever machine the network was trained on."""
    settings = {
        "device": device,
        "precision": "auto",
        "threads": "auto",
        "channels_last": "auto",
        "compile": False,
    }
    return runtimes.resolve(config.runtime.model_copy(update=settings), config.train, config.data)


def weights(tensors: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors to evaluate with: the moving average where there is one."""
    return tensors["ema"] if tensors.get("ema") else tensors["model"]
