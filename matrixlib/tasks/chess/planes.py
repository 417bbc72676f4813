"""Input planes from packed positions, on the device, and the move tables of each encoding.

`oriented`: board of the side to move, row 0 = its rank 1. `matrix0`: White's board, row 0 = rank 8, White's pieces
first. Uses uint8, int16 and int32 only, which every backend supports, and no copies from the host.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from matrixlib.tasks.chess import bitboard, records

PLANES = 19
CASTLING, EN_PASSANT, HALFMOVE, REPETITION, SIDE, PLY = range(6)  # columns of `state`


def unpack_pieces(pieces: Tensor) -> Tensor:
    """Piece classes (B, 64) uint8 by oriented square, 12 = empty, from nibbles (B, 32) uint8."""
    return torch.stack((pieces & 15, pieces >> 4), dim=2).flatten(1)


def unpack_maps(maps: Tensor) -> Tensor:
    """float32 maps (..., 8, 8) from bit maps (..., 8) uint8: a byte per rank, bit 0 the a-file."""
    files = torch.arange(8, dtype=torch.uint8, device=maps.device)
    return (maps.unsqueeze(-1) >> files & 1).float()


def planes(batch: Mapping[str, Tensor], encoding: str) -> Tensor:
    """Input planes (B, 19, 8, 8) float32 on the device of the batch.

    batch: `pieces` (B, 32) uint8; `state` (B, 6) int16: castling, en_passant, halfmove, repetition, side, ply;
    optionally `hidden` (B, 8) uint8, bit map of squares with zeroed piece planes.

    oriented: 0-5 our P N B R Q K, 6-11 theirs; 12 repetition / 2; 13-16 castling (our K, Q, their K, Q); 17
    the en-passant square; 18 half-move clock / 100.
    matrix0: 0-5 White's, 6-11 Black's; 12 White to move; 13-16 castling (White K, Q, Black K, Q);
    17 min(half-move clock, 99) / 99; 18 min(full move, 199) / 199. No repetition, no en passant.
    """
    pieces, state = batch["pieces"], batch["state"]
    device = pieces.device
    classes = torch.arange(12, dtype=torch.uint8, device=device)
    board = unpack_pieces(pieces).unsqueeze(1).eq(classes[:, None]).float().unflatten(2, (8, 8))
    if "hidden" in batch:
        board = board * (1 - unpack_maps(batch["hidden"])).unsqueeze(1)
    rights = torch.arange(4, dtype=torch.int16, device=device)
    castling = (state[:, CASTLING, None] >> rights & 1).float()
    clock = state[:, HALFMOVE, None].float()
    if encoding == "oriented":
        scalars = [state[:, REPETITION, None].float() / 2, castling, torch.zeros_like(clock), clock / 100]
    else:
        black = state[:, SIDE].ne(0)
        # Row 0 is rank 8: flip White's board; Black's is mirrored already and only swaps colours
        turned = torch.cat([board[:, 6:], board[:, :6]], dim=1)
        board = torch.where(black[:, None, None, None], turned, board.flip(2))
        castling = torch.where(black[:, None], castling.roll(2, dims=1), castling)
        full_move = torch.div(state[:, PLY, None].int() & 0xFFFF, 2, rounding_mode="floor") + 1
        full_move = full_move.float().clamp(max=199) / 199
        scalars = [(~black)[:, None].float(), castling, clock.clamp(max=99) / 99, full_move]
    constant = torch.cat(scalars, dim=1)[:, :, None, None].expand(-1, -1, 8, 8)
    out = torch.cat([board, constant], dim=1)
    if encoding == "oriented":
        out[:, 17, 5] = state[:, EN_PASSANT, None].eq(torch.arange(8, dtype=torch.int16, device=device))
    return out


def move_map(encoding: str) -> Tensor:
    """Table (2, 4672) int64 by side (0 White, 1 Black): oriented policy index -> index of the encoding.

    matrix0: absolute squares, see `records.absolute_index`. oriented: identity.
    """
    identity = np.arange(records.POLICY_SIZE)
    black = records.absolute_index.astype(np.int64) if encoding == "matrix0" else identity
    return torch.from_numpy(np.stack([identity, black]))


def move_keys(encoding: str) -> tuple[Tensor, Tensor]:
    """Moves as (from-square, key) pairs for attention: (`ends` (E,), `place` (4672,)), int64.

    Keys: the 64 to-squares, then the E promotion squares `ends` for each under-promotion (knight, bishop, rook).
    place: position of each policy index in the flattened table (64, 64 + 3 E); 0 for indices that are no move.
    """
    boards = [(np.arange(records.POLICY_SIZE), 0)]  # White's: policy indices, XOR mask of squares
    if encoding == "matrix0":
        boards.append((records.absolute_index.astype(np.int64), 56))
    ends = np.concatenate([np.arange(56, 64) ^ turn for _, turn in boards])
    code = bitboard.POLICY_MOVE.astype(np.int64)
    known, piece, place = code != bitboard.NO_MOVE, code >> 12, np.zeros(len(code), np.int64)
    for number, (index, turn) in enumerate(boards):
        origin, target = code & 63 ^ turn, code >> 6 & 63 ^ turn
        key = np.where(piece > 0, 64 + (piece - 1) * len(ends) + 8 * number + target % 8, target)
        place[index[known]] = (origin * (64 + 3 * len(ends)) + key)[known]
    return torch.from_numpy(ends), torch.from_numpy(place)
