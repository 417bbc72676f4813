"""Leela Chess Zero's training record, version 6: its layout, its positions and values as records.

Positions stand there from the side to move, ranks mirrored for Black as in our own record. Only the newest of the eight
is read, and the one before where the format does not tell the en-passant file otherwise. From format 3 on a position
without castling rights is turned into a canonical one of up to eight, and turned back here.

Nothing says which ply of its game a record is: `ply` counts the records of the file, made even for White. Leela's
repetition plane does not tell one earlier occurrence from several.
"""

import numpy as np
from numpy.typing import NDArray

from matrixlib.tasks.chess import bitboard
from matrixlib.tasks.chess.importers.notation import Legal, standing_rights
from matrixlib.tasks.chess.importers.parsing import blank
from matrixlib.tasks.chess.lc0.moves import MOVES, POLICY
from matrixlib.tasks.chess.records import UNKNOWN, Records, playable
from matrixlib.tasks.chess.scores import wdl_of_shares

VALUES = ("root_q", "best_q", "root_d", "best_d", "root_m", "best_m", "plies_left", "result_q", "result_d")
OTHERS = ("played_q", "played_d", "played_m", "original_q", "original_d", "original_m")
V6 = np.dtype(
    [
        ("version", "<u4"),
        ("input_format", "<u4"),
        ("probabilities", "<f4", POLICY),
        # newest first; ours P N B R Q K, theirs, repetition; a byte is a rank, its highest bit file a
        ("planes", "u1", (8, 13, 8)),
        # our queen's side, our king's, theirs; from format 2 on the rook's file as a bit
        ("castling", "u1", 4),
        # 1: Black to move; from format 3 on the file of en passant as a bit
        ("side", "u1"),
        ("rule50", "u1"),
        # 1 flip, 2 mirror, 4 transpose, 16 game too long, 64 to be deleted, 128 Black to move
        ("flags", "u1"),
        ("unused", "u1"),
        *((name, "<f4") for name in VALUES + OTHERS),
        ("visits", "<u4"),
        ("played", "<u2"),
        ("best", "<u2"),
        ("divergence", "<f4"),
        ("reserved", "<u4"),
    ]
)
FORMATS = (1, 2, 3, 4, 5)
CANONICAL = 3  # formats from here on
ARMAGEDDON = (132, 133)
ROOKS = np.array([1, 128, 1, 128], np.uint8)  # `castling` of standard chess: files a and h
FLIP, MIRROR, TRANSPOSE, TOO_LONG, DELETED = 1, 2, 4, 16, 64  # `flags`
TOLERANCE = 0.01  # of the sum of the policy, and of the bounds of a value


# Moves


def _transforms() -> NDArray[np.int64]:
    """(8, 64): where each square goes by a transform: the files turned, then the ranks, then mirrored in h1-a8."""
    square = np.arange(64)
    rows = []
    for transform in range(8):
        turned = square ^ (7 if transform & FLIP else 0) ^ (56 if transform & MIRROR else 0)
        rows.append((7 - turned % 8) * 8 + 7 - turned // 8 if transform & TRANSPOSE else turned)
    return np.array(rows)


TRANSFORMS = _transforms()
REVERSED = np.packbits(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)[:, ::-1])  # bytes bit by bit


def numbers_of(
    legal: Legal, records: Records, transform: NDArray[np.int64], shares: NDArray[np.float32]
) -> NDArray[np.int64]:
    """Leela's numbers (K,) of all legal moves of records (N,), whose shares (N, 1858) say how castling is written."""
    row = np.repeat(np.arange(len(records)), np.diff(legal.offset))
    code = legal.moves.astype(np.int64)
    s, t, promotion = code & 63, code >> 6 & 63, code >> 12
    turn = transform[row]
    number = MOVES[promotion, TRANSFORMS[turn, s], TRANSFORMS[turn, t]].astype(np.int64)
    castling = (records["pieces"][row, 2] & 15 == bitboard.KING) & (s == 4) & (np.abs(t - s) == 2)
    # King takes rook; older programs wrote the king's own two squares, which no other move of a king can mean.
    onto = MOVES[0, 4, np.where(t == 6, 7, 0)].astype(np.int64)
    return np.where(castling & (shares[row, onto] >= 0), onto, number)


# Positions

Faults = list[tuple[NDArray[np.bool_], str]]  # masks (N,) of what is wrong, with the reason


def decode(raw: NDArray[np.void], faults: Faults) -> tuple[Records, NDArray[np.int64]]:
    """Records (N,) of V6 (N,) without targets, and their transforms. What is wrong is added to `faults`."""
    canonical = raw["input_format"] >= CANONICAL
    transform = np.where(canonical, raw["flags"] & 7, 0).astype(np.int64)
    bits = np.unpackbits(raw["planes"][:, :2], axis=-1).reshape(-1, 26, 64)
    bits = np.take_along_axis(bits, TRANSFORMS[transform][:, None, :], axis=2)
    boards = np.packbits(bits, axis=-1, bitorder="little").view("<u8")[:, :, 0].astype(np.uint64)
    newest = boards[:, :12]
    faults.append((~playable(newest), "not a position of chess"))
    turned = (transform & (MIRROR | TRANSPOSE) != 0) & (newest[:, 0] | newest[:, 6] != 0)
    faults.append((turned | (transform != 0) & raw["castling"].any(1), "transform is no symmetry"))
    plain = (raw["castling"] != 0) * ROOKS
    rooks = np.where((raw["input_format"] > 1)[:, None], raw["castling"], plain)
    faults.append(((rooks != plain).any(1), "Chess960 castling"))
    records = blank(len(raw), "lc0")
    records["pieces"] = bitboard.pieces_of(newest)
    rights = ((plain != 0) * np.array([2, 1, 8, 4])).sum(1)
    records["castling"] = standing_rights(rights, records["pieces"])
    faults.append((records["castling"] != rights, "castling without king or rook"))
    column = np.where(transform & FLIP, REVERSED[raw["side"]], raw["side"])
    # Formats without it: a pawn of theirs that stood on its second rank one ply ago and stands on its fourth now.
    before, now = boards[:, 19], newest[:, 6]
    pushed = (before & ~now) >> np.uint64(48) & (now & ~before) >> np.uint64(32) & np.uint64(255)
    column = np.where(canonical, column, pushed.astype(np.uint8))
    faults.append((np.bitwise_count(column) > 1, "several en-passant files"))
    file = np.where(column != 0, np.log2(np.maximum(column, 1)).astype(np.int64), -1)
    records["en_passant"] = bitboard.legal_en_passant(records["pieces"], file)
    records["halfmove"] = raw["rule50"]
    records["repetition"] = bits[:, 12].any(1)
    records["side"] = np.where(canonical, raw["flags"] >> 7, raw["side"] != 0)
    ply = np.arange(len(raw))
    records["ply"] = np.minimum(ply + (ply % 2 != records["side"]), 65535)
    return records, transform


def values_of(raw: NDArray[np.void], value: str, faults: Faults) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
    """Result (N,) and win-draw-loss (N, 3) as a record has them. What is wrong is added to `faults`."""
    q, d = raw[f"{value}_q"].astype(np.float64), raw[f"{value}_d"].astype(np.float64)
    wdl = np.stack([(1 - d + q) / 2, d, (1 - d - q) / 2], axis=1)
    good: NDArray[np.bool_] = wdl.min(axis=1) > -TOLERANCE  # false for what is not finite
    faults.append((~good, "value is no probability"))
    wdl = np.clip(np.where(good[:, None], wdl, 1 / 3), 0, 1)
    result, drawn = raw["result_q"], raw["result_d"]
    known = raw["flags"] & TOO_LONG == 0
    sure = np.isin(result, (-1, 0, 1)) & (drawn == (result == 0))
    faults.append((known & ~sure, "result is neither win, draw nor loss"))
    whole = np.where(known & sure, np.nan_to_num(result), UNKNOWN).astype(np.int8)
    return whole, wdl_of_shares(wdl / wdl.sum(1, keepdims=True))
