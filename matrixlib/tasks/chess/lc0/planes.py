"""From packed positions, with what came before them, to the 112 planes of Leela Chess Zero's networks.

All eight boards are seen from the side that is to move now: its rank 1 is row 0, the files run a to h. Integers are
uint8, int16 and int64, and nothing is copied from the host.
"""

import functools
from collections.abc import Mapping

import chess
import torch
from torch import Tensor

from matrixlib.tasks.chess.lc0.moves import slot_table
from matrixlib.tasks.chess.planes import CASTLING, EN_PASSANT, HALFMOVE, REPETITION, SIDE, unpack_pieces

PAST = 7  # boards before the newest one
EMPTY = 12
PAWN, KING, THEIR_PAWN = 0, 5, 6


def planes(batch: Mapping[str, Tensor]) -> Tensor:
    """Input planes (B, 112, 8, 8) float32 on the device of the batch.

    batch: `pieces` and `state` as for our own networks. With a past also `past` (B, H, 32), `past_state` (B, H, 6), the
    boards before in the same form, the newest first, each seen from its own side to move, and `known` (B,), how many
    of them there are.

    Of each board, the newest first: 0-5 our P N B R Q K, 6-11 theirs, 12 whether it had occurred before. 104-107 the
    rights to castle, queen's side before king's, ours before theirs; 108 Black to move; 109 the half-move clock; 111
    ones. Missing boards are the oldest one again (Lc0's `fen_only`), its pawn put back where an en-passant square tells
    of its double step; after the start of a game they stay empty.
    """
    newest, state = unpack_pieces(batch["pieces"]), batch["state"]
    boards, repeated = newest[:, None], state[:, None, REPETITION]
    oldest, oldest_state = newest, state
    missing = torch.ones(len(newest), PAST, dtype=torch.bool, device=newest.device)
    if "past" in batch:
        past, past_state, known = batch["past"], batch["past_state"], batch["known"].long()
        before = unpack_pieces(past.flatten(0, 1)).unflatten(0, past.shape[:2])
        boards = torch.cat([boards, _seen_from(state[:, None, SIDE], before, past_state[:, :, SIDE])], dim=1)
        repeated = torch.cat([repeated, past_state[:, :, REPETITION]], dim=1)
        rows = torch.arange(len(newest), device=known.device)
        own = torch.cat([newest[:, None], before], dim=1)
        oldest, oldest_state = own[rows, known], torch.cat([state[:, None], past_state], dim=1)[rows, known]
        missing = torch.arange(PAST, device=known.device) >= known[:, None]
    fill = _put_back(oldest, oldest_state[:, EN_PASSANT, None])
    fill = _seen_from(state[:, None, SIDE], fill[:, None], oldest_state[:, None, SIDE])
    start = oldest.eq(_start(str(newest.device))).all(1)
    start &= (oldest_state[:, CASTLING] == 15) & (oldest_state[:, SIDE] == 0)
    fill = torch.where(start[:, None, None], EMPTY, fill)
    again = torch.where(start, 0, oldest_state[:, REPETITION])
    boards = torch.cat([boards, fill.expand(-1, 1 + PAST - boards.shape[1], -1)], dim=1)
    repeated = torch.cat([repeated, again[:, None].expand(-1, 1 + PAST - repeated.shape[1])], dim=1)
    boards = torch.cat([boards[:, :1], torch.where(missing[:, :, None], fill, boards[:, 1:])], dim=1)
    repeated = torch.cat([repeated[:, :1], torch.where(missing, again[:, None], repeated[:, 1:])], dim=1)
    classes = torch.arange(EMPTY, dtype=torch.uint8, device=newest.device)
    pieces = boards[:, :, None].eq(classes[:, None]).float()
    whole = repeated.gt(0).float()[:, :, None, None].expand(-1, -1, -1, 64)
    rights = torch.stack([state[:, CASTLING] >> bit & 1 for bit in (1, 0, 3, 2)], dim=1)
    ones = torch.ones_like(rights[:, :1])
    scalars = torch.cat([rights, state[:, SIDE, None], state[:, HALFMOVE, None], 0 * ones, ones], dim=1).float()
    return torch.cat(
        [torch.cat([pieces, whole], dim=2).flatten(1, 2), scalars[:, :, None].expand(-1, -1, 64)], dim=1
    ).unflatten(2, (8, 8))


def slots(batch: Mapping[str, Tensor]) -> Tensor:
    """Lc0's number (B, L) int64 of each of `policy_index` (B, L), 0 in pads."""
    index = batch["policy_index"].long().clamp(min=0)
    piece = unpack_pieces(batch["pieces"]).gather(1, index // 73)
    kind = piece.eq(PAWN).long() + 2 * piece.eq(KING).long()
    return _slots(str(index.device))[kind, index]


def _seen_from(side: Tensor, boards: Tensor, own: Tensor) -> Tensor:
    """Boards (B, H, 64) that are seen from `own` (B, H), seen from `side` (B, 1)."""
    turned = torch.where(boards == EMPTY, EMPTY, (boards + 6) % 12).unflatten(2, (8, 8)).flip(2).flatten(2)
    return torch.where((side != own)[:, :, None], turned, boards)


def _put_back(boards: Tensor, file: Tensor) -> Tensor:
    """Boards (B, 64) before their pawn's double step on a file (B, 1), which is -1 where there was none."""
    square = torch.arange(64, dtype=torch.int16, device=boards.device)
    stepped = file >= 0
    boards = torch.where(stepped & (square == file + chess.A5), EMPTY, boards)
    return torch.where(stepped & (square == file + chess.A7), THEIR_PAWN, boards)


@functools.cache
def _start(device: str) -> Tensor:
    """Piece classes (64,) uint8 at the start of a game."""
    with torch.inference_mode(False):
        back = [3, 1, 2, 4, 5, 2, 1, 3]
        board = back + [PAWN] * 8 + [EMPTY] * 32 + [THEIR_PAWN] * 8 + [6 + piece for piece in back]
        return torch.tensor(board, dtype=torch.uint8).to(device)


@functools.cache
def _slots(device: str) -> Tensor:
    """`slot_table` on a device, copied there once."""
    with torch.inference_mode(False):
        return torch.from_numpy(slot_table()).to(device)
