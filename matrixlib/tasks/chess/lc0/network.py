"""Lc0's residual networks, their 112 input planes, and the task to use them.

Shapes: B positions, 112 planes, 8 rows (row 0 = rank 1 of the side to move), 8 columns (files); all eight boards are
seen from the current side to move. No copies from the host.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import chess
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matrixlib.engine.task import Batch
from matrixlib.play.game import Past
from matrixlib.tasks.chess import losses
from matrixlib.tasks.chess.blocks import SQUARES
from matrixlib.tasks.chess.config import ChessConfig
from matrixlib.tasks.chess.lc0.moves import CONV_PLANES, POLICY_SIZE, plane_table, slot_table
from matrixlib.tasks.chess.lc0.weights import PLANES, Arrays, read
from matrixlib.tasks.chess.model import DEFAULT_HEADS, PolicyValueNet
from matrixlib.tasks.chess.planes import CASTLING, EN_PASSANT, HALFMOVE, REPETITION, SIDE, unpack_pieces
from matrixlib.tasks.chess.records import from_boards
from matrixlib.tasks.chess.task import ChessTask, device_table, packed_state

HISTORY_PLIES = 7
EMPTY = 12
PAWN, KING, THEIR_PAWN = 0, 5, 6


class Block(nn.Module):
    """Residual block with squeeze-and-excitation (scale and shift per channel)."""

    def __init__(self, filters: int, units: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(filters, filters, 3, padding=1)
        self.conv2 = nn.Conv2d(filters, filters, 3, padding=1)
        self.reduce = nn.Linear(filters, units) if units else None
        self.expand = nn.Linear(units, 2 * filters) if units else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.conv1(x)))
        if self.reduce is None or self.expand is None:
            return F.relu(x + y)
        scale, shift = self.expand(F.relu(self.reduce(y.mean((2, 3)))))[:, :, None, None].chunk(2, dim=1)
        return F.relu(torch.addcmul(x + shift, scale.sigmoid(), y))


class Lc0Network(nn.Module):
    """A network from the arrays of a weight file; ValueError for inconsistent shapes."""

    order: Tensor

    def __init__(self, arrays: Arrays) -> None:
        super().__init__()
        width = {name.removesuffix(".bias"): len(array) for name, array in arrays.items() if name.endswith(".bias")}
        filters, blocks = width["input"], sum(name.endswith("conv1") for name in width)
        self.wdl, self.conv_policy = width["value2"] == 3, "policy1" in width
        with torch.device("meta"):  # a file may claim sizes that do not fit in memory
            self.input = nn.Conv2d(PLANES, filters, 3, padding=1)
            self.tower = nn.ModuleList(Block(filters, width.get("tower.0.reduce", 0)) for _ in range(blocks))
            if self.conv_policy:
                self.policy1 = nn.Conv2d(filters, width["policy1"], 3, padding=1)
                self.policy = nn.Conv2d(width["policy1"], CONV_PLANES, 3, padding=1)
            else:
                self.policy = nn.Conv2d(filters, width["policy"], 1)
                self.moves = nn.Linear(width["policy"] * SQUARES, POLICY_SIZE)
            self.value = nn.Conv2d(filters, width["value"], 1)
            self.value1 = nn.Linear(width["value"] * SQUARES, width["value1"])
            self.value2 = nn.Linear(width["value1"], 3 if self.wdl else 1)
        self.register_buffer("order", torch.from_numpy(plane_table()), persistent=False)
        try:
            self.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()}, assign=True)
        except RuntimeError as error:
            raise ValueError(" ".join(str(error).split())) from None

    def forward(self, planes: Tensor, heads: frozenset[str] | None = None) -> dict[str, Any]:
        """Outputs that `heads` names, default the first two: "policy" fp32 logits (B, 1858); "value" fp32 win-draw-loss
        logits (B, 3) or values (B,) in [-1, 1]; "stream": input of the first block and output of each (B, C, 8, 8).
        """
        names = DEFAULT_HEADS if heads is None else heads
        x = F.relu(self.input(planes))
        out: dict[str, Any] = {"stream": [x]} if "stream" in names else {}
        for block in self.tower:
            x = block(x)
            if "stream" in names:
                out["stream"].append(x)
        if "policy" in names:
            if self.conv_policy:
                out["policy"] = self.policy(F.relu(self.policy1(x))).flatten(1).float()[:, self.order]
            else:
                out["policy"] = self.moves(F.relu(self.policy(x)).flatten(1)).float()
        if "value" in names:
            value = self.value2(F.relu(self.value1(F.relu(self.value(x)).flatten(1)))).float()
            out["value"] = value if self.wdl else torch.tanh(value).squeeze(1)
        return out


@dataclass(frozen=True)
class Lc0Task(ChessTask):
    """Chess task of an Lc0 network, with seven positions of history; for inference only."""

    input_planes: ClassVar[int] = PLANES
    history: ClassVar[int] = HISTORY_PLIES

    def inputs(
        self, rows: np.ndarray, index: np.ndarray, offset: np.ndarray, past: Past | None = None
    ) -> dict[str, np.ndarray]:
        """`ChessTask.inputs` plus the history, see `planes`."""
        out = super().inputs(rows, index, offset)
        if past is not None:
            out |= {"past": np.ascontiguousarray(past.states["pieces"]), "past_state": packed_state(past.states)}
            out["known"] = past.known.astype(np.int16)
        return out

    def build_model(self) -> PolicyValueNet:
        raise ValueError("Lc0 networks are read from weight files and cannot be trained")

    def planes(self, batch: Batch) -> Tensor:
        return planes(batch)

    def forward(self, model: nn.Module, batch: Batch, terms: frozenset[str]) -> dict[str, Any]:
        return model(self.planes(batch), terms)

    def network_index(self, batch: Batch) -> Tensor:
        return torch.where(batch["policy_index"] != losses.PAD_INDEX, lc0_index(batch), losses.PAD_INDEX)


def open_weights(path: Path | str) -> tuple[Lc0Task, Lc0Network]:
    """Task and fp32 network on the CPU from a weight file; ValueError for a damaged or unsupported file."""
    try:
        network = Lc0Network(read(path))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{Path(path).name} cannot be read as an Lc0 network: {error}") from None
    kind = "wdl" if network.wdl else "scalar"
    config = ChessConfig.model_validate({"task": "chess", "model": {"ssl": [], "value": {"kind": kind}}})
    return Lc0Task(config), network


def planes(batch: Mapping[str, Tensor]) -> Tensor:
    """Input planes (B, 112, 8, 8) float32 on the device of the batch.

    batch: `pieces` and `state` as in `ChessTask.prepare`; optionally the history, newest first, in the same form and
    each from its own side to move: `past` uint8 (B, H, 32), `past_state` int16 (B, H, 6), `known` int16 (B,) of H.

    Per board, newest first: 0-5 our P N B R Q K, 6-11 theirs, 12 repetition. 104-107 castling rights (our queen's side,
    our king's, theirs), 108 Black to move, 109 half-move clock, 111 ones. Unknown boards repeat the oldest one, before
    its double step if any (Lc0's `fen_only`); before the initial position they are empty.
    """
    pieces, state = batch["pieces"][:, None], batch["state"][:, None]
    if "past" in batch:
        pieces, state = torch.cat([pieces, batch["past"]], dim=1), torch.cat([state, batch["past_state"]], dim=1)
        known = batch["known"].long()
    else:
        known = state[:, 0, SIDE].long() * 0
    rows, side = torch.arange(len(pieces), device=pieces.device), state[:, :1, SIDE]
    own = unpack_pieces(pieces.flatten(0, 1)).unflatten(0, pieces.shape[:2])
    boards, repeated = _reorient(side, own, state[:, :, SIDE]), state[:, :, REPETITION]
    oldest, last = own[rows, known], state[rows, known]
    start = oldest.eq(device_table(_start_position, str(oldest.device))).all(1)
    start &= (last[:, CASTLING] == 15) & (last[:, SIDE] == 0)
    fill = _reorient(side, _undo_double_step(oldest, last[:, EN_PASSANT, None])[:, None], last[:, None, SIDE])
    fill, again = torch.where(start[:, None, None], EMPTY, fill), torch.where(start, 0, last[:, REPETITION])[:, None]
    missing = torch.arange(1 + HISTORY_PLIES, device=known.device) > known[:, None]
    more = 1 + HISTORY_PLIES - boards.shape[1]
    boards = torch.where(missing[:, :, None], fill, F.pad(boards, (0, 0, 0, more)))
    repeated = torch.where(missing, again, F.pad(repeated, (0, more)))
    classes = torch.arange(EMPTY, dtype=torch.uint8, device=boards.device)
    occupied = boards[:, :, None].eq(classes[:, None]).float()
    whole = repeated.gt(0).float()[:, :, None, None].expand(-1, -1, -1, 64)
    now = state[:, 0]
    rights = torch.stack([now[:, CASTLING] >> bit & 1 for bit in (1, 0, 3, 2)], dim=1)
    ones = torch.ones_like(rights[:, :1])
    scalars = torch.cat([rights, now[:, SIDE, None], now[:, HALFMOVE, None], 0 * ones, ones], dim=1).float()
    history = torch.cat([occupied, whole], dim=2).flatten(1, 2)
    return torch.cat([history, scalars[:, :, None].expand(-1, -1, 64)], dim=1).unflatten(2, (8, 8))


def lc0_index(batch: Mapping[str, Tensor]) -> Tensor:
    """Lc0 move indices (B, L) int64 of `policy_index` (B, L), arbitrary in pads."""
    index = batch["policy_index"].long().clamp(min=0)
    piece = unpack_pieces(batch["pieces"]).gather(1, index // 73)
    kind = piece.eq(PAWN).long() + 2 * piece.eq(KING).long()
    return device_table(slot_table, str(index.device))[kind, index]


def _reorient(side: Tensor, boards: Tensor, own: Tensor) -> Tensor:
    """Boards (B, H, 64) from the view of `own` (B, H) to that of `side` (B, 1)."""
    turned = torch.where(boards == EMPTY, EMPTY, (boards + 6) % 12).unflatten(2, (8, 8)).flip(2).flatten(2)
    return torch.where((side != own)[:, :, None], turned, boards)


def _undo_double_step(boards: Tensor, file: Tensor) -> Tensor:
    """Boards (B, 64) before the double step of a pawn on `file` (B, 1), -1 for none."""
    square = torch.arange(64, dtype=torch.int16, device=boards.device)
    stepped = file >= 0
    boards = torch.where(stepped & (square == file + chess.A5), EMPTY, boards)
    return torch.where(stepped & (square == file + chess.A7), THEIR_PAWN, boards)


def _start_position() -> Tensor:
    """Piece classes (64,) uint8 of the initial position."""
    return unpack_pieces(torch.from_numpy(from_boards([chess.Board()])["pieces"].copy()))[0]
