"""Numba-compiled bitboard core: legal moves, make-move, attacks and SSL target maps for whole batches.

Positions are columns of `records.RECORD` on the oriented board, "us" being the side to move; kernels use 12 uint64
bitboards in the order of the classes. A move is a uint16: from | to << 6 | promotion << 12, promotion 0 none, 1 N, 2 B,
3 R, 4 Q; castling is the king's two-square move. Positions must have one king per side, which `records` checks. Kernels
and all they call stay in this file, because numba's cache does not notice changes elsewhere.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeAlias, TypeVar

import chess
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import ArrayLike, NDArray

from matrixlib.hardware.kernels import kernel

U8 = NDArray[np.uint8]
I8 = NDArray[np.int8]
U16 = NDArray[np.uint16]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

# int64 and uint64 scalars inside kernels; Any, as mypy distinguishes NumPy's from Python's
Int: TypeAlias = Any
Bits: TypeAlias = Any
Result = TypeVar("Result")

EMPTY = 12
PLANES = 73
POLICY_SIZE = 64 * PLANES
PAWN, KNIGHT, BISHOP, ROOK, QUEEN, KING = range(6)
ANY_PIECE, CASTLING = 6, 7  # further piece kinds of `replay`'s notation
NO_MOVE = 0xFFFF

# Policy planes 0-55: ray d * 7 + steps - 1; 56-63: knight jumps; 64-72: 64 + piece (N B R) * 3 + direction.
# Steps as (dfile, drank), the rays N S E W NE NW SE SW.
RAYS = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1))
JUMPS = ((-1, -2), (1, -2), (-2, -1), (2, -1), (-2, 1), (2, 1), (-1, 2), (1, 2))
UNDER_FILES = (0, -1, 1)  # direction 0, 1, 2 of an under-promotion: file change


# --- constant tables (plain Python, a few milliseconds) -------------------------------------------


def _walk(square: int, dfile: int, drank: int) -> list[int]:
    file, rank, path = square % 8 + dfile, square // 8 + drank, []
    while 0 <= file < 8 and 0 <= rank < 8:
        path.append(rank * 8 + file)
        file, rank = file + dfile, rank + drank
    return path


def _policy_tables() -> tuple[NDArray[np.int16], U16]:
    """POLICY_INDEX (65536,) by move code, -1 for none, and its inverse POLICY_MOVE (4672,) without queen promotions."""
    index, move = np.full(1 << 16, -1, np.int16), np.full(POLICY_SIZE, NO_MOVE, np.uint16)
    for s in range(64):
        for d, (df, dr) in enumerate(RAYS):
            for steps, target in enumerate(_walk(s, df, dr)):
                index[s | target << 6] = s * PLANES + d * 7 + steps
        for j, (df, dr) in enumerate(JUMPS):
            for target in _walk(s, df, dr)[:1]:
                index[s | target << 6] = s * PLANES + 56 + j
        for direction, df in enumerate(UNDER_FILES if s // 8 == 6 else ()):
            for target in _walk(s, df, 1):
                for piece in range(3):
                    index[s | target << 6 | (piece + 1) << 12] = s * PLANES + 64 + piece * 3 + direction
                index[s | target << 6 | 4 << 12] = index[s | target << 6]
    codes = np.flatnonzero(index[: 4 << 12] >= 0)
    move[index[codes]] = codes
    return index, move


KNIGHT_ATTACKS, KING_ATTACKS = np.array([chess.BB_KNIGHT_ATTACKS, chess.BB_KING_ATTACKS], np.uint64)
# (4, 64): squares above and below each square on its file, rank, diagonal and antidiagonal
UP = ((0, 1), (1, 0), (1, 1), (-1, 1))
LINE_ABOVE = np.array([[sum(1 << t for t in _walk(s, df, dr)) for s in range(64)] for df, dr in UP], np.uint64)
LINE_BELOW = np.array([[sum(1 << t for t in _walk(s, -df, -dr)) for s in range(64)] for df, dr in UP], np.uint64)
# (64, 64): squares strictly between two squares on a line, and that whole line; else 0
BETWEEN = np.array([[chess.between(s, t) for t in range(64)] for s in range(64)], np.uint64)
LINE = np.array([[chess.ray(s, t) for t in range(64)] for s in range(64)], np.uint64)
POLICY_INDEX, POLICY_MOVE = _policy_tables()

_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_NOT_FILE_A = np.uint64(0xFEFEFEFEFEFEFEFE)
_NOT_FILE_H = np.uint64(0x7F7F7F7F7F7F7F7F)
_PAWN_RANKS = np.uint64(0x00FFFFFFFFFFFF00)
_7 = np.uint64(7)
_9 = np.uint64(9)
_SHORT_EMPTY = np.uint64(0x60)  # f1 g1
_LONG_EMPTY = np.uint64(0x0E)  # b1 c1 d1
_SHORT_SAFE = np.uint64(0x70)  # e1 f1 g1
_LONG_SAFE = np.uint64(0x1C)  # c1 d1 e1
_E1, _A1, _H1 = np.uint64(1 << 4), np.uint64(1), np.uint64(1 << 7)


# --- bits -----------------------------------------------------------------------------------------


def _instruction(name: str, result: Any, *options: Any) -> Any:
    """Intrinsic for a 64-bit LLVM instruction."""

    def lower(typing_context: Any, x: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, name)(args[0], *options)

        return result(types.uint64), build

    return intrinsic(lower)


_ctz = _instruction("cttz", types.int64, ir.Constant(ir.IntType(1), 0))  # index of the lowest set bit (64 for 0)
_clz = _instruction("ctlz", types.int64, ir.Constant(ir.IntType(1), 0))  # number of leading zero bits (64 for 0)
_flip = _instruction("bswap", types.uint64)  # the board upside down


@kernel
def _bit(s: Int) -> Bits:
    return _ONE << np.uint64(s)


@kernel
def _several(x: Bits) -> bool:
    return x & (x - _ONE) != _ZERO


@kernel
def _unpack(pieces: U8, bb: U64) -> None:
    """Nibbles (32,) to 12 bitboards; bb[12] gets empty squares and invalid classes."""
    for j in range(13):
        bb[j] = _ZERO
    for byte in range(32):
        low, high = np.int64(pieces[byte]) & 15, np.int64(pieces[byte]) >> 4
        bb[low if low < EMPTY else EMPTY] |= _bit(2 * byte)
        bb[high if high < EMPTY else EMPTY] |= _bit(2 * byte + 1)


@kernel
def _pack(bb: U64, pieces: U8) -> None:
    for byte in range(32):
        pieces[byte] = EMPTY | EMPTY << 4
    for j in range(12):
        rest = bb[j]
        while rest != _ZERO:
            s = _ctz(rest)
            rest &= rest - _ONE
            old = np.int64(pieces[s >> 1])
            pieces[s >> 1] = (old & 0x0F) | j << 4 if s & 1 else (old & 0xF0) | j


def _arguments(pieces: ArrayLike, *columns: tuple[ArrayLike, Any]) -> list[Any]:
    """pieces (N, 32) and columns (N,), C-ordered and writeable, to match the compiled signature."""
    dense = [np.require(array, dtype, ["C", "W"]) for array, dtype in ((pieces, np.uint8), *columns)]
    shapes = [array.shape for array in dense]
    if shapes[0][1:] != (32,) or any(shape != shapes[0][:1] for shape in shapes[1:]):
        raise ValueError(f"pieces must have shape (N, 32) and columns (N,), got {shapes}")
    return dense


def _batched(*dtypes: Any, ragged: Any = ()) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorator: a kernel as a function of pieces (N, 32), columns (N,) of these dtypes, and ragged arrays."""

    def public(function: Callable[..., Result]) -> Callable[..., Result]:
        compiled = kernel(function)

        @wraps(function)
        def call(pieces: ArrayLike, *columns: ArrayLike) -> Result:
            others = [np.require(*it, ["C", "W"]) for it in zip(columns[len(dtypes) :], ragged, strict=True)]
            return compiled(*_arguments(pieces, *zip(columns, dtypes, strict=False)), *others)

        return call

    return public


# --- attacks --------------------------------------------------------------------------------------


@kernel
def _line_attacks(line: Int, s: Int, occupied: Bits) -> Bits:
    """Attacks along one line, up to and including the first piece each way (obstruction difference)."""
    below = LINE_BELOW[line, s]
    above = LINE_ABOVE[line, s]
    upper = above & occupied
    from_lower = _ALL << np.uint64(63 - _clz((below & occupied) | _ONE))
    nearest_upper = upper & (_ZERO - upper)
    return (nearest_upper + nearest_upper + from_lower) & (below | above)


@kernel
def _rook_attacks(s: Int, occupied: Bits) -> Bits:
    return _line_attacks(0, s, occupied) | _line_attacks(1, s, occupied)


@kernel
def _bishop_attacks(s: Int, occupied: Bits) -> Bits:
    return _line_attacks(2, s, occupied) | _line_attacks(3, s, occupied)


@kernel
def _pawn_west(pawns: Bits, up: bool) -> Bits:
    """Squares that pawns (ours go up, theirs down) attack towards the a-file."""
    x = pawns & _NOT_FILE_A
    return x << _7 if up else x >> _9


@kernel
def _pawn_east(pawns: Bits, up: bool) -> Bits:
    x = pawns & _NOT_FILE_H
    return x << _9 if up else x >> _7


@kernel
def _piece_attacks(kind: Int, s: Int, occupied: Bits) -> Bits:
    """Attacks of a piece other than a pawn (kind 1-5)."""
    if kind == KNIGHT:
        return KNIGHT_ATTACKS[s]
    if kind == KING:
        return KING_ATTACKS[s]
    attacks = _ZERO
    if kind != BISHOP:
        attacks |= _rook_attacks(s, occupied)
    if kind != ROOK:
        attacks |= _bishop_attacks(s, occupied)
    return attacks


@kernel
def _attackers(bb: U64, s: Int, occupied: Bits, side: Int) -> Bits:
    """Pieces of a side (0 us, 1 them) that attack square s, pins ignored."""
    o = 6 * side
    origin = _bit(s)
    # Our pawns attack s from the squares that their pawn on s would attack
    pawns = _pawn_west(origin, side == 1) | _pawn_east(origin, side == 1)
    return (
        (pawns & bb[o])
        | (KNIGHT_ATTACKS[s] & bb[o + KNIGHT])
        | (_bishop_attacks(s, occupied) & (bb[o + BISHOP] | bb[o + QUEEN]))
        | (_rook_attacks(s, occupied) & (bb[o + ROOK] | bb[o + QUEEN]))
        | (KING_ATTACKS[s] & bb[o + KING])
    )


@kernel
def _attacked(bb: U64, occupied: Bits, side: Int) -> Bits:
    """Every square that a side attacks."""
    o = 6 * side
    attacks = _pawn_west(bb[o], side == 0) | _pawn_east(bb[o], side == 0)
    for kind in range(1, 6):
        rest = bb[o + kind]
        while rest != _ZERO:
            attacks |= _piece_attacks(kind, _ctz(rest), occupied)
            rest &= rest - _ONE
    return attacks


@kernel
def _occupied(bb: U64, side: Int) -> Bits:
    o = 6 * side
    return bb[o] | bb[o + 1] | bb[o + 2] | bb[o + 3] | bb[o + 4] | bb[o + 5]


@kernel
def _pinned(bb: U64, side: Int) -> Bits:
    """Pieces of a side pinned to their own king."""
    if bb[6 * side + KING] == _ZERO:
        return _ZERO
    king = _ctz(bb[6 * side + KING])
    own = _occupied(bb, side)
    their = _occupied(bb, 1 - side)
    e = 6 - 6 * side
    # Sliders that see the king through our pieces
    snipers = _rook_attacks(king, their) & (bb[e + ROOK] | bb[e + QUEEN])
    snipers |= _bishop_attacks(king, their) & (bb[e + BISHOP] | bb[e + QUEEN])
    pinned = _ZERO
    while snipers != _ZERO:
        blockers = BETWEEN[king, _ctz(snipers)] & own
        snipers &= snipers - _ONE
        if blockers != _ZERO and not _several(blockers):
            pinned |= blockers
    return pinned


# --- legal moves ----------------------------------------------------------------------------------


@kernel
def _en_passant_capturers(bb: U64, file: Int) -> Bits:
    """Our pawns that may legally capture en passant on a file (-1: none)."""
    if file < 0 or bb[KING] == _ZERO:
        return _ZERO
    target, victim = _bit(40 + file), _bit(32 + file)
    occupied = _occupied(bb, 0) | _occupied(bb, 1)
    if bb[6] & victim == _ZERO or occupied & target != _ZERO:
        return _ZERO
    king = _ctz(bb[KING])
    capturers = (_pawn_west(target, False) | _pawn_east(target, False)) & bb[PAWN]
    legal = _ZERO
    while capturers != _ZERO:
        origin = capturers & (_ZERO - capturers)
        capturers ^= origin
        # Two pawns leave a rank, which pin masks miss: test the board after the capture
        after = (occupied ^ origin ^ victim) | target
        if _attackers(bb, king, after, 1) & ~victim == _ZERO:
            legal |= origin
    return legal


@kernel
def _legal(bb: U64, castling: Int, file: Int, moves: U16) -> Int:
    """Write the legal moves in ascending order of from-square; returns their number."""
    if bb[KING] == _ZERO:
        return 0
    n = 0
    king = _ctz(bb[KING])
    own = _occupied(bb, 0)
    their = _occupied(bb, 1)
    occupied = own | their
    danger = _attacked(bb, occupied ^ bb[KING], 1)  # without our king, which cannot block its own escape
    pinned = _pinned(bb, 0)
    en_passant = _en_passant_capturers(bb, file)
    allowed = _ALL
    if danger & bb[KING] != _ZERO:
        checkers = _attackers(bb, king, occupied, 1)
        allowed = _ZERO if _several(checkers) else checkers | BETWEEN[king, _ctz(checkers)]
    rest = own
    while rest != _ZERO:
        s = _ctz(rest)
        origin = rest & (_ZERO - rest)
        rest ^= origin
        mask = allowed
        if pinned & origin != _ZERO:
            mask &= LINE[king, s]
        if origin & bb[PAWN] != _ZERO:
            if origin & _PAWN_RANKS == _ZERO:
                continue
            targets = (_pawn_west(origin, True) | _pawn_east(origin, True)) & their
            if occupied & _bit(s + 8) == _ZERO:
                targets |= _bit(s + 8)
                if s < 16 and occupied & _bit(s + 16) == _ZERO:
                    targets |= _bit(s + 16)
            targets &= mask
            if en_passant & origin != _ZERO:
                targets |= _bit(40 + file)
            while targets != _ZERO:
                move = s | _ctz(targets) << 6
                targets &= targets - _ONE
                if s >= 48:
                    for promotion in range(1, 5):
                        moves[n] = move | promotion << 12
                        n += 1
                else:
                    moves[n] = move
                    n += 1
            continue
        if s == king:
            targets = KING_ATTACKS[s] & ~own & ~danger
            if origin == _E1 and danger & _E1 == _ZERO:
                short = (occupied & _SHORT_EMPTY) | (danger & _SHORT_SAFE) == _ZERO
                long = (occupied & _LONG_EMPTY) | (danger & _LONG_SAFE) == _ZERO
                if castling & 1 and bb[ROOK] & _H1 != _ZERO and short:
                    targets |= _bit(6)
                if castling & 2 and bb[ROOK] & _A1 != _ZERO and long:
                    targets |= _bit(2)
        else:
            targets = _ZERO
            if origin & bb[KNIGHT] != _ZERO:
                targets = KNIGHT_ATTACKS[s]
            if origin & (bb[ROOK] | bb[QUEEN]) != _ZERO:
                targets |= _rook_attacks(s, occupied)
            if origin & (bb[BISHOP] | bb[QUEEN]) != _ZERO:
                targets |= _bishop_attacks(s, occupied)
            targets &= mask & ~own
        while targets != _ZERO:
            moves[n] = s | _ctz(targets) << 6
            n += 1
            targets &= targets - _ONE
    return n


@kernel
def _make(bb: U64, castling: Int, file: Int, clock: Int, move: Int, after: U64) -> tuple[Int, Int, Int]:
    """Make a legal move; writes the next mover's board to `after` (12,), returns castling, en-passant file, clock."""
    s, t, promotion = move & 63, move >> 6 & 63, move >> 12
    origin, target = _bit(s), _bit(t)
    kind = 0
    capture = False
    for j in range(6):
        if bb[j] & origin != _ZERO:
            kind = j
        if bb[6 + j] & target != _ZERO:
            capture = True
        after[6 + j] = bb[j]
        after[j] = bb[6 + j] & ~target
    after[6 + kind] ^= origin
    after[6 + (promotion if promotion > 0 else kind)] |= target
    pushed = -1
    if kind == PAWN:
        if file >= 0 and t == 40 + file and not capture and (t - s) != 8:
            after[PAWN] &= ~_bit(32 + file)
        if t - s == 16:
            pushed = s & 7
    if kind == KING:
        castling &= ~3
        if s == 4 and t == 6:
            after[6 + ROOK] ^= _bit(7) | _bit(5)
        elif s == 4 and t == 2:
            after[6 + ROOK] ^= _bit(0) | _bit(3)
    if s == 7:
        castling &= ~1
    elif s == 0:
        castling &= ~2
    if t == 63:
        castling &= ~4
    elif t == 56:
        castling &= ~8
    for j in range(12):
        after[j] = _flip(after[j])
    if pushed >= 0 and _en_passant_capturers(after, pushed) == _ZERO:
        pushed = -1
    clock = 0 if capture or kind == PAWN else min(clock + 1, 255)
    return (castling & 3) << 2 | castling >> 2, pushed, clock


@kernel
def _sort_moves(moves: U16, keys: U16, n: Int) -> None:
    """Insertion sort by policy index, nearly linear as moves are grouped by from-square."""
    for i in range(n):
        keys[i] = POLICY_INDEX[moves[i]]
    for i in range(1, n):
        key, move = keys[i], moves[i]
        j = i - 1
        while j >= 0 and keys[j] > key:
            keys[j + 1], moves[j + 1] = keys[j], moves[j]
            j -= 1
        keys[j + 1], moves[j + 1] = key, move


@kernel
def _grown(old: U16, used: Int, need: Int) -> U16:
    new = np.empty(max(2 * old.shape[0], used + need), np.uint16)
    for j in range(used):  # numba takes four seconds to compile an assignment to a slice, for the text of its errors
        new[j] = old[j]
    return new


@_batched(np.uint8, np.int8)
def legal_moves(pieces: U8, castling: U8, file: I8) -> tuple[U16, U16, I64]:
    """Legal moves of N positions, ascending by policy index in each.

    pieces (N, 32), castling (N,), en-passant file (N,) -> moves (K,) uint16, policy indices (K,) uint16, offsets
    (N + 1,) int64: position i has [offsets[i]:offsets[i + 1]].
    """
    n = pieces.shape[0]
    moves, indices = np.empty(40 * n + 64, np.uint16), np.empty(40 * n + 64, np.uint16)
    offsets = np.zeros(n + 1, np.int64)
    # Moves have distinct policy indices, so this cannot overflow
    row_moves, row_keys = np.empty(POLICY_SIZE, np.uint16), np.empty(POLICY_SIZE, np.uint16)
    bb = np.empty(13, np.uint64)
    used = 0
    for i in range(n):
        _unpack(pieces[i], bb)
        count = _legal(bb, np.int64(castling[i]), np.int64(file[i]), row_moves)
        _sort_moves(row_moves, row_keys, count)
        if used + count > moves.shape[0]:
            moves, indices = _grown(moves, used, count), _grown(indices, used, count)
        for j in range(count):
            moves[used + j] = row_moves[j]
            indices[used + j] = row_keys[j]
        used += count
        offsets[i + 1] = used
    return moves[:used].copy(), indices[:used].copy(), offsets


@_batched(np.uint8, np.int8, np.uint8, np.uint16)
def make_moves(pieces: U8, castling: U8, file: I8, clock: U8, moves: U16) -> tuple[U8, U8, I8, U8]:
    """Make a legal move (N,) uint16 in each position.

    Returns pieces (N, 32), castling, en-passant file (-1 unless a capture is legal), half-move clock (N,), oriented for
    the next mover.
    """
    n = pieces.shape[0]
    out_pieces, out_castling = np.empty((n, 32), np.uint8), np.empty(n, np.uint8)
    out_file, out_clock = np.empty(n, np.int8), np.empty(n, np.uint8)
    bb, after = np.empty(13, np.uint64), np.empty(12, np.uint64)
    for i in range(n):
        _unpack(pieces[i], bb)
        c, f, h = _make(bb, np.int64(castling[i]), np.int64(file[i]), np.int64(clock[i]), np.int64(moves[i]), after)
        _pack(after, out_pieces[i])
        out_castling[i], out_file[i], out_clock[i] = c, f, h
    return out_pieces, out_castling, out_file, out_clock


# --- whole games ----------------------------------------------------------------------------------


@kernel
def _fits(bb: U64, move: Int, notation: Int, mirrored: Int) -> bool:
    """Whether a legal move matches a notation, see `replay`."""
    s, t, promotion = move & 63, move >> 6 & 63, move >> 12
    kind, target = notation & 7, notation >> 3 & 63
    if kind == CASTLING:
        return s == 4 and t == target and bb[KING] == _E1
    if t != (target ^ mirrored) or promotion != notation >> 17 & 7:
        return False
    if kind == KING and abs(s - t) == 2:
        return False  # castling has its own notation
    if kind <= KING and bb[kind] & _bit(s) == _ZERO:
        return False
    file, rank = notation >> 9 & 15, notation >> 13 & 15
    return (file == 8 or file == s & 7) and (rank == 8 or rank == (s ^ mirrored) >> 3)


@kernel
def _occurrences(pieces: U8, state: I64, since: Int, row: Int) -> int:
    """Number of rows since..row - 1 with the same position and side to move as row."""
    count = 0
    for j in range(row - 2, since - 1, -2):
        if state[j, 0] == state[row, 0] and state[j, 1] == state[row, 1]:
            byte = 0
            while byte < 32 and pieces[j, byte] == pieces[row, byte]:
                byte += 1
            if byte == 32:
                count += 1
    return count


@kernel
def _replay(start_pieces: U8, start: I64, notation: I32, offset: I64) -> Any:
    games, total = start_pieces.shape[0], notation.shape[0]
    # A game's last position is written for counting repetitions, then overwritten
    pieces, state = np.empty((total + 1, 32), np.uint8), np.empty((total + 1, 4), np.int64)
    game_moves, choice = np.empty(total + 1, np.uint16), np.empty(total + 1, np.int64)
    indices, offsets = np.empty(40 * total + 64, np.uint16), np.zeros(total + 1, np.int64)
    ends, end_pieces = np.zeros((games, 4), np.int64), np.empty((games, 32), np.uint8)
    failed, matches = np.full(games, -1, np.int64), np.zeros(games, np.int64)
    row_moves, row_keys = np.empty(POLICY_SIZE, np.uint16), np.empty(POLICY_SIZE, np.uint16)
    bb, after = np.empty(13, np.uint64), np.empty(13, np.uint64)
    row = used = 0
    for g in range(games):
        first_row, first_used, since = row, used, row
        _unpack(start_pieces[g], bb)
        c, f, h = start[g, 0], start[g, 1], start[g, 2]
        mirrored = 56 if start[g, 3] else 0
        for k in range(offset[g], offset[g + 1] + 1):
            _pack(bb, pieces[row])
            state[row, 0], state[row, 1], state[row, 2] = c, f, h
            state[row, 3] = _occurrences(pieces, state, since, row)
            if k == offset[g + 1]:
                end_pieces[g], ends[g] = pieces[row], state[row]
                break
            count = _legal(bb, c, f, row_moves)
            _sort_moves(row_moves, row_keys, count)
            if used + count > indices.shape[0]:
                indices = _grown(indices, used, count)
            fitting, best = 0, 0
            for j in range(count):
                indices[used + j] = row_keys[j]
                if _fits(bb, np.int64(row_moves[j]), np.int64(notation[k]), mirrored):
                    fitting += 1
                    best = j
            if fitting != 1:
                failed[g], matches[g] = k - offset[g], fitting
                row, used = first_row, first_used
                break
            move = np.int64(row_moves[best])
            game_moves[row], choice[row] = move, used + best
            used += count
            row += 1
            offsets[row] = used
            c, f, h = _make(bb, c, f, h, move, after)
            bb, after = after, bb
            mirrored ^= 56
            if h == 0:
                since = row
    moves = game_moves[:row], choice[:row], indices[:used].copy(), offsets[: row + 1]
    return pieces[:row], state[:row], moves, end_pieces, ends, failed, matches


# --- batched queries ------------------------------------------------------------------------------


@_batched()
def bitboards(pieces: U8) -> U64:
    """Bitboards (N, 12) uint64 in the order of the piece classes, from nibbles (N, 32)."""
    out, bb = np.empty((pieces.shape[0], 12), np.uint64), np.empty(13, np.uint64)
    for i in range(pieces.shape[0]):
        _unpack(pieces[i], bb)
        for j in range(12):  # see `_grown`
            out[i, j] = bb[j]
    return out


@kernel
def _pieces_batch(boards: U64) -> U8:
    out = np.empty((boards.shape[0], 32), np.uint8)
    for i in range(boards.shape[0]):
        _pack(boards[i], out[i])
    return out


@_batched(np.int8)
def legal_en_passant(pieces: U8, file: I8) -> I8:
    """En-passant files (N,) int8, set to -1 unless a capture is legal."""
    out, bb = np.empty(pieces.shape[0], np.int8), np.empty(13, np.uint64)
    for i in range(pieces.shape[0]):
        out[i] = -1
        if file[i] >= 0:
            _unpack(pieces[i], bb)
            if _en_passant_capturers(bb, np.int64(file[i])) != _ZERO:
                out[i] = file[i]
    return out


@_batched()
def in_check(pieces: U8) -> NDArray[np.bool_]:
    """Mask (N,): side to move in check."""
    out, bb = np.zeros(pieces.shape[0], np.bool_), np.empty(13, np.uint64)
    for i in range(pieces.shape[0]):
        _unpack(pieces[i], bb)
        if bb[KING] != _ZERO:
            occupied = _occupied(bb, 0) | _occupied(bb, 1)
            out[i] = _attackers(bb, _ctz(bb[KING]), occupied, 1) != _ZERO
    return out


@_batched(np.uint8, np.int8, ragged=(np.int32, np.int64))
def mates(pieces: U8, castling: U8, file: I8, indices: I32, offsets: I64) -> NDArray[np.bool_]:
    """Mask (K,) of mating moves among the legal moves `indices` (K,) with offsets (N + 1,)."""
    out = np.zeros(indices.shape[0], np.bool_)
    bb, after, replies = np.empty(13, np.uint64), np.empty(13, np.uint64), np.empty(POLICY_SIZE, np.uint16)
    for i in range(pieces.shape[0]):
        _unpack(pieces[i], bb)
        for k in range(offsets[i], offsets[i + 1]):
            move = np.int64(POLICY_MOVE[indices[k]])
            if move >> 12 == 0 and move >> 6 >= 56 and bb[PAWN] & _bit(move & 63) != _ZERO:
                move |= 4 << 12
            c, f, _ = _make(bb, np.int64(castling[i]), np.int64(file[i]), 0, move, after)
            occupied = _occupied(after, 0) | _occupied(after, 1)
            check = _attackers(after, _ctz(after[KING]), occupied, 1) != _ZERO
            out[k] = check and _legal(after, c, f, replies) == 0
    return out


# --- SSL targets ----------------------------------------------------------------------------------


@kernel
def _count(c: tuple[Bits, Bits, Bits, Bits, Bits], x: Bits) -> tuple[Bits, Bits, Bits, Bits, Bits]:
    """Add a set to 64 bit-sliced five-bit counters (a square has at most 16 attackers)."""
    c0, c1, c2, c3, c4 = c
    c0, x = c0 ^ x, c0 & x
    c1, x = c1 ^ x, c1 & x
    c2, x = c2 ^ x, c2 & x
    c3, x = c3 ^ x, c3 & x
    return c0, c1, c2, c3, c4 ^ x


@_batched()
def ssl_maps(pieces: U8) -> U64:
    """Self-supervised target maps (N, 5) uint64: threat, pin, fork, control_ours, control_theirs.

    Attacks are python-chess's `attackers_mask` (pins ignored).
    threat: attacked by the opponent. pin: pieces of either side pinned to their king. fork: pieces of either side that
    attack at least two enemy pieces which are the king, worth more (P 1, N 3, B 3, R 5, Q 9) or undefended.
    control_ours, control_theirs: more attackers of ours than of theirs, and the reverse.
    """
    n = pieces.shape[0]
    out, bb = np.empty((n, 5), np.uint64), np.empty(13, np.uint64)
    sets, squares = np.empty((2, 64), np.uint64), np.empty((2, 64), np.int64)
    attacked, own = np.empty(2, np.uint64), np.empty(2, np.uint64)
    starts = np.empty((2, 7), np.int64)
    for i in range(n):
        _unpack(pieces[i], bb)
        own[0], own[1] = _occupied(bb, 0), _occupied(bb, 1)
        occupied = own[0] | own[1]
        ours = theirs = (_ZERO, _ZERO, _ZERO, _ZERO, _ZERO)
        for side in range(2):
            o = 6 * side
            west, east = _pawn_west(bb[o], side == 0), _pawn_east(bb[o], side == 0)
            counts = _count(_count((_ZERO, _ZERO, _ZERO, _ZERO, _ZERO), west), east)
            union = west | east
            m = 0
            for kind in range(1, 6):
                starts[side, kind] = m
                rest = bb[o + kind]
                while rest != _ZERO:
                    s = _ctz(rest)
                    rest &= rest - _ONE
                    attacks = _piece_attacks(kind, s, occupied)
                    counts = _count(counts, attacks)
                    union |= attacks
                    sets[side, m], squares[side, m] = attacks, s
                    m += 1
            starts[side, 6] = m
            attacked[side] = union
            ours, theirs = (counts, theirs) if side == 0 else (ours, counts)
        forks = _ZERO
        for side in range(2):
            e = 6 - 6 * side
            kings = (own[1 - side] & ~attacked[1 - side]) | bb[e + KING]  # undefended, or the king: for every attacker
            queens = kings | bb[e + QUEEN]
            rooks = queens | bb[e + ROOK]
            minors = rooks | bb[e + KNIGHT] | bb[e + BISHOP]
            # Pawns that attack targets on both sides
            forks |= bb[6 * side] & _pawn_east(minors, side == 1) & _pawn_west(minors, side == 1)
            for kind in range(1, 6):
                prey = rooks if kind <= BISHOP else queens if kind == ROOK else kings
                for j in range(starts[side, kind], starts[side, kind + 1]):
                    if _several(sets[side, j] & prey):
                        forks |= _bit(squares[side, j])
        more = less = _ZERO
        same = _ALL
        for bit in range(4, -1, -1):
            a, b = ours[bit], theirs[bit]
            more |= same & a & ~b
            less |= same & b & ~a
            same &= ~(a ^ b)
        out[i, 0] = attacked[1]
        out[i, 1] = _pinned(bb, 0) | _pinned(bb, 1)
        out[i, 2] = forks
        out[i, 3] = more
        out[i, 4] = less
    return out


@kernel
def mirror_policy(indices: U16, weights: U16, offsets: I64, rows: NDArray[np.bool_], table: U16) -> None:
    """Map policy indices of the rows of a mask (B,) through a table (4672,) and sort them, in place."""
    for i in range(rows.shape[0]):
        if not rows[i]:
            continue
        start = offsets[i]
        for k in range(start, offsets[i + 1]):
            key, weight = table[indices[k]], weights[k]
            j = k - 1
            while j >= start and indices[j] > key:
                indices[j + 1], weights[j + 1] = indices[j], weights[j]
                j -= 1
            indices[j + 1], weights[j + 1] = key, weight


def pieces_of(boards: ArrayLike) -> U8:
    """Nibbles (N, 32) uint8 from bitboards (N, 12) uint64; inverse of `bitboards`."""
    dense: U64 = np.require(boards, np.uint64, ["C", "W"])
    if dense.shape[1:] != (12,):
        raise ValueError(f"bitboards must have shape (N, 12), not {dense.shape}")
    return _pieces_batch(dense)


class Replay(NamedTuple):
    """Replayed games: R positions before a move, of G games without the failed ones.

    state, ends: castling rights, en-passant file, half-move clock, earlier occurrences in the game.
    """

    pieces: U8  # (R, 32)
    state: I64  # (R, 4)
    moves: U16  # (R,) move played
    choice: I64  # (R,) its position in `indices`
    indices: U16  # (K,) policy indices of all legal moves, ascending in each position
    offsets: I64  # (R + 1,)
    end_pieces: U8  # (G, 32) last position, undefined for a failed game
    ends: I64  # (G, 4) state of the last position
    failed: I64  # (G,) index of the first unplayable move, -1 for none
    matches: I64  # (G,) legal moves that match it: 0 or several


def replay(pieces: ArrayLike, start: ArrayLike, notation: ArrayLike, offsets: ArrayLike) -> Replay:
    """Replay G games from positions (G, 32) with start (G, 4): castling rights, en-passant file, half-move clock, Black
    to move.

    Game g is notation[offsets[g]:offsets[g + 1]], an int32 per move: kind (0-5 P N B R Q K, 6 any, 7 castling) | target
    square << 3 | origin file << 9 | origin rank << 13 (8 unknown) | promotion << 17 (0 none, 1 N, 2 B, 3 R, 4 Q).
    Squares are White's, except that castling has target 6 or 2 for both colours. A move must match one legal move.
    """
    (boards,), words = _arguments(pieces), np.require(notation, np.int32, ["C", "W"])
    state, bounds = np.require(start, np.int64, ["C", "W"]), np.require(offsets, np.int64, ["C", "W"])
    played, played_state, moves, *ends = _replay(boards, state, words, bounds)
    return Replay(played, played_state, *moves, *ends)
