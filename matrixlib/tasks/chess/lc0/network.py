"""Lc0's networks: their input planes, and the task to train and use them.

Shapes: B positions, 8 rows (row 0 = rank 1 of the side to move), 8 columns (files); all eight boards are seen from the
current side to move. No copies from the host.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import chess
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matrixlib.engine.task import Batch
from matrixlib.play.game import Past
from matrixlib.tasks.chess import losses
from matrixlib.tasks.chess.config import ChessConfig
from matrixlib.tasks.chess.lc0 import attention
from matrixlib.tasks.chess.lc0.moves import slot_table
from matrixlib.tasks.chess.lc0.weights import CLOCK_SCALE, parse, unpack
from matrixlib.tasks.chess.model import PolicyValueNet
from matrixlib.tasks.chess.planes import CASTLING, EN_PASSANT, HALFMOVE, REPETITION, SIDE, unpack_maps, unpack_pieces
from matrixlib.tasks.chess.records import from_boards
from matrixlib.tasks.chess.task import HISTORY_PLIES, ChessTask, device_table, packed_state

EMPTY = 12
PAWN, KING, THEIR_PAWN = 0, 5, 6


@dataclass(frozen=True)
class Lc0Task(ChessTask):
    """Chess task with `encoding: lc0`. In training the history is that of the rows before each in its shard."""

    @property
    def model_class(self) -> Callable[..., PolicyValueNet]:
        encoders = self.config.model.trunk == "encoder" and self.trunk is None
        return attention.AttentionNet if encoders else PolicyValueNet

    def inputs(
        self, rows: np.ndarray, index: np.ndarray, offset: np.ndarray, past: Past | None = None
    ) -> dict[str, np.ndarray]:
        """`ChessTask.inputs` plus the history, see `planes`."""
        out = super().inputs(rows, index, offset)
        if past is not None and self.history:
            out |= {"past": np.ascontiguousarray(past.states["pieces"]), "past_state": packed_state(past.states)}
            out["known"] = past.known.astype(np.int16)
        return out

    def planes(self, batch: Batch) -> Tensor:
        return planes(batch, self.config.model.history)

    def network_index(self, batch: Batch) -> Tensor:
        return torch.where(batch["policy_index"] != losses.PAD_INDEX, lc0_index(batch), losses.PAD_INDEX)


def open_weights(path: Path | str) -> tuple[Lc0Task, nn.Module]:
    """Task and fp32 network on the CPU from a weight file; `open_file` names what is wrong with one."""
    net = unpack(path)
    options, read = attention.build(net) or parse(net)
    task = Lc0Task(ChessConfig.model_validate({"task": "chess", "model": options}, context={"file": path}))
    if isinstance(read, attention.Body):
        return task, attention.AttentionNet(task.config.model, body=read)
    return task, task.network_with(read)


def planes(batch: Mapping[str, Tensor], history: bool = True) -> Tensor:
    """Input planes float32 on the device of the batch: (B, 112, 8, 8), or without the history (B, 21, 8, 8).

    batch: `pieces` and `state` as in `ChessTask.prepare`; optionally the history, newest first, in the same form and
    each from its own side to move: `past` uint8 (B, H, 32), `past_state` int16 (B, H, 6), `known` int16 (B,) of H;
    optionally `hidden` uint8 (B, 8), squares that look empty, on all boards.

    Per board, newest first: 0-5 our P N B R Q K, 6-11 theirs, 12 repetition. 104-107 castling rights (our queen's side,
    our king's, theirs), 108 Black to move, 109 half-move clock / 100 (weights in files are for Lc0's undivided one),
    111 ones. Unknown boards repeat the oldest one, before its double step if any (Lc0's `fen_only`); before the initial
    position they are empty.
    """
    pieces, state = batch["pieces"][:, None], batch["state"][:, None]
    if "past" in batch:
        pieces, state = torch.cat([pieces, batch["past"]], dim=1), torch.cat([state, batch["past_state"]], dim=1)
        known = batch["known"].long()
    else:
        known = state[:, 0, SIDE].long() * 0
    own = unpack_pieces(pieces.flatten(0, 1)).unflatten(0, pieces.shape[:2])
    sides, repeated = state[:, :, SIDE], state[:, :, REPETITION]
    if history:
        own, sides, repeated = _filled(own, state, known)
    boards = _reorient(state[:, :1, SIDE], own, sides)
    if "hidden" in batch:
        boards = torch.where(unpack_maps(batch["hidden"]).flatten(1)[:, None] > 0, EMPTY, boards)
    classes = torch.arange(EMPTY, dtype=torch.uint8, device=boards.device)
    occupied = boards[:, :, None].eq(classes[:, None]).float()
    whole = repeated.gt(0).float()[:, :, None, None].expand(-1, -1, -1, 64)
    now = state[:, 0]
    bits = torch.arange(4, dtype=torch.int16, device=now.device) ^ 1
    rights = now[:, CASTLING, None] >> bits & 1
    ones, clock = torch.ones_like(rights[:, :1]), now[:, HALFMOVE, None] / CLOCK_SCALE
    scalars = torch.cat([rights, now[:, SIDE, None], clock, 0 * ones, ones], dim=1).float()
    seen = torch.cat([occupied, whole], dim=2).flatten(1, 2)
    return torch.cat([seen, scalars[:, :, None].expand(-1, -1, 64)], dim=1).unflatten(2, (8, 8))


def _filled(own: Tensor, state: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eight boards (B, 8, 64), each from its own side, with sides and repetitions (B, 8), from the known ones."""
    rows = torch.arange(len(own), device=own.device)
    oldest, last = own[rows, known], state[rows, known]
    start = oldest.eq(device_table(_start_position, str(oldest.device))).all(1)
    start &= (last[:, CASTLING] == 15) & (last[:, SIDE] == 0)
    fill = torch.where(start[:, None], EMPTY, _undo_double_step(oldest, last[:, EN_PASSANT, None]))
    missing = torch.arange(1 + HISTORY_PLIES, device=known.device) > known[:, None]
    more = 1 + HISTORY_PLIES - own.shape[1]
    boards = torch.where(missing[:, :, None], fill[:, None], F.pad(own, (0, 0, 0, more)))
    sides = torch.where(missing, last[:, SIDE, None], F.pad(state[:, :, SIDE], (0, more)))
    again = torch.where(start, 0, last[:, REPETITION])[:, None]
    return boards, sides, torch.where(missing, again, F.pad(state[:, :, REPETITION], (0, more)))


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
