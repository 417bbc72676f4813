"""FENs and UCI moves of many positions at once, without a board object for each: what the readers of tables need.

A FEN costs a few microseconds here; python-chess needs about ten times that to make a board and turn it into a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import chess
import numpy as np
from numpy.typing import ArrayLike, NDArray

from matrixlib.tasks.chess import bitboard
from matrixlib.tasks.chess.bitboard import EMPTY, KING, NO_MOVE, PLANES, POLICY_INDEX, ROOK
from matrixlib.tasks.chess.harvest import blank
from matrixlib.tasks.chess.records import Records, playable

NOT_A_FEN, NOT_A_POSITION, CHESS960 = "not a FEN", "not a position of chess", "Chess960 castling"
LETTERS = frozenset("PNBRQKpnbrqk12345678/")
RUNS = {ord(str(n)): "." * n for n in range(1, 9)}
CLASSES = bytes.maketrans(b"PNBRQKpnbrqk.", bytes(range(13)))  # as White sees them
SWAPPED = bytes.maketrans(b"pnbrqkPNBRQK.", bytes(range(13)))  # as Black does
RIGHTS = {"K": 1, "Q": 2, "k": 4, "q": 8}
SQUARES = {name: square for square, name in enumerate(chess.SQUARE_NAMES)}
PROMOTIONS = {"": 0, "n": 1, "b": 2, "r": 3, "q": 4}
CORNERS = ((7, KING, ROOK, 4), (0, KING, ROOK, 4), (63, KING + 6, ROOK + 6, 60), (56, KING + 6, ROOK + 6, 60))


# Positions


def _read_fen(fen: str) -> tuple[bytes, tuple[int, int, int, int, int]] | str:
    """(classes of the 64 oriented squares, (castling, en-passant file, clock, side, ply)), or what is wrong."""
    fields = fen.split()
    if not 4 <= len(fields) <= 6:
        return NOT_A_FEN
    placement, turn, castling, en_passant, *counters = fields
    ranks = [rank.translate(RUNS) for rank in placement.split("/")]
    if len(ranks) != 8 or any(len(rank) != 8 for rank in ranks) or not LETTERS.issuperset(placement):
        return NOT_A_FEN
    if turn not in ("w", "b") or not all(text.isascii() and text.isdecimal() for text in counters):
        return NOT_A_FEN
    black = turn == "b"
    squares = "".join(ranks if black else ranks[::-1]).encode().translate(SWAPPED if black else CLASSES)
    rights, file = 0, -1
    for letter in castling if castling != "-" else "":
        if letter not in RIGHTS:
            return CHESS960 if letter in "ABCDEFGHabcdefgh" else NOT_A_FEN
        rights |= RIGHTS[letter]
    if black:
        rights = rights >> 2 | (rights & 3) << 2
    if en_passant != "-":
        if en_passant not in SQUARES:
            return NOT_A_FEN
        if en_passant[1] == ("3" if black else "6"):
            file = SQUARES[en_passant] & 7
    clock, full = (int(counters[k]) if len(counters) > k else k for k in range(2))
    return squares, (rights, file, min(clock, 255), int(black), min(max(2 * full - 2, 0) + black, 65535))


def read_fens(fens: Sequence[str], source: str) -> tuple[Records, list[str]]:
    """Records (N,) of FENs with four to six fields, and for each what is wrong with it ("": nothing).

    A FEN that can't be used gives an empty board without a legal move. Castling rights without king and rook in their
    places are dropped, and so is an en-passant square where no capture is legal.
    """
    records = blank(len(fens), source)
    records["pieces"] = EMPTY | EMPTY << 4
    reads = [_read_fen(fen) for fen in fens]
    faults = [read if isinstance(read, str) else "" for read in reads]
    rows = np.flatnonzero([not fault for fault in faults])
    found = [read for read in reads if not isinstance(read, str)]
    classes = np.frombuffer(b"".join(read[0] for read in found), np.uint8).reshape(-1, 64)
    columns = np.array([read[1] for read in found], np.int64).reshape(-1, 5)
    pieces = classes[:, ::2] | classes[:, 1::2] << 4
    good = playable(bitboard.bitboards(pieces))
    for row in rows[~good]:
        faults[row] = NOT_A_POSITION
    rows, pieces, classes, columns = rows[good], pieces[good], classes[good], columns[good]
    records["pieces"][rows] = pieces
    records["castling"][rows] = standing_rights(columns[:, 0], classes)
    records["en_passant"][rows] = bitboard.legal_en_passant(pieces, columns[:, 1])
    for column, name in enumerate(("halfmove", "side", "ply"), start=2):
        records[name][rows] = columns[:, column]
    return records, faults


def standing_rights(castling: NDArray[np.int64], classes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Castling rights (N,) without those whose king or rook is not in its place; classes (N, 64) by oriented square."""
    standing = np.zeros(len(castling), np.uint8)
    for bit, (corner, king, rook, home) in enumerate(CORNERS):
        there = (classes[:, corner] == rook) & (classes[:, home] == king)
        standing |= np.where(there, castling & 1 << bit, 0).astype(np.uint8)
    return standing


# Moves


@dataclass(frozen=True)
class Legal:
    """All legal moves of N records: codes (K,) of `bitboard`, policy indices (K,), ascending in each row, and offsets
    (N + 1,)."""

    moves: NDArray[np.uint16]
    index: NDArray[np.uint16]
    offset: NDArray[np.int64]

    def find(self, rows: ArrayLike, codes: ArrayLike) -> NDArray[np.int64]:
        """Where the moves `codes` (M,) of the rows (M,) stand in `moves`; -1 for one that is not legal."""
        row, code = np.asarray(rows, np.int64), np.asarray(codes, np.int64)
        if not len(self.moves):
            return np.full(len(code), -1, np.int64)
        length = np.diff(self.offset)
        keys = np.repeat(np.arange(len(length)), length) * bitboard.POLICY_SIZE + self.index
        index = indices_of(code)
        place = np.minimum(np.searchsorted(keys, row * bitboard.POLICY_SIZE + index), len(keys) - 1)
        # A queen's promotion and a plain move to the last rank share an index, so the code must be the same too.
        right = (keys[place] == row * bitboard.POLICY_SIZE + index) & (self.moves[place] == code)
        return np.where(right & (index >= 0), place, -1)


def legal_of(records: Records) -> Legal:
    """The legal moves of records (N,)."""
    return Legal(*bitboard.legal_moves(records["pieces"], records["castling"], records["en_passant"]))


def indices_of(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Policy indices (M,) of the moves `codes` (M,); -1 where nothing moves so."""
    s, t, promotion = codes & 63, codes >> 6 & 63, codes >> 12
    aside = t - s - 8
    under = s * PLANES + 64 + (promotion - 1) * 3 + np.where(aside < 0, 1, np.where(aside > 0, 2, 0))
    straight = (s >> 3 == 6) & (t >> 3 == 7) & (np.abs(aside) <= 1)
    index = np.where((promotion >= 1) & (promotion <= 3), under, POLICY_INDEX[s, t])
    return np.where((promotion == 0) | straight & (promotion <= 4), index, -1)


def code_of(uci: str, black: int) -> int:
    """The code of a UCI move as its mover sees the board; NO_MOVE where it is none."""
    try:
        origin, target = SQUARES[uci[:2]], SQUARES[uci[2:4]]
        promotion = PROMOTIONS[uci[4:]]
    except KeyError:
        return NO_MOVE
    flip = 56 if black else 0
    return origin ^ flip | (target ^ flip) << 6 | promotion << 12


def castled(pieces: NDArray[np.uint8], codes: ArrayLike) -> NDArray[np.int64]:
    """The codes (M,) of moves in the positions `pieces` (M, 32), with castling that is written as king takes own rook
    (e1h1) turned into the king's two squares (e1g1)."""
    code = np.asarray(codes, np.int64)
    king = pieces[:, 2] & 15 == KING  # e1
    short = king & (pieces[:, 3] >> 4 == ROOK) & (code == (4 | 7 << 6))
    long = king & (pieces[:, 0] & 15 == ROOK) & (code == (4 | 0 << 6))
    return np.where(short, 4 | 6 << 6, np.where(long, 4 | 2 << 6, code))
