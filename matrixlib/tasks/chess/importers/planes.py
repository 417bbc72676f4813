"""Readers of training data with planes and policies: Leela Chess Zero's and Matrix0's.

Lc0: the newest of eight positions is read, and the one before for en passant where the format lacks it. From input
format 3 on the canonical transform of positions without castling rights is undone. `ply` is the record's number in its
file, plus 1 where needed to be even for White.

Matrix0: en passant is inferred from `legal_mask`, or else from the policy; repetition is unknown. z becomes the
win-draw-loss with that expectation and the highest draw rate. The split takes a file as one game, so nothing leaks.
"""

import io
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from matrixlib.data.imports import ParseResult, Part
from matrixlib.data.shards import Batch, concat, ragged_rows
from matrixlib.tasks.chess import bitboard
from matrixlib.tasks.chess.importers.notation import LegalMoves, empty_records, legal_moves, valid_castling
from matrixlib.tasks.chess.lc0.moves import MOVES, POLICY_SIZE, move_name
from matrixlib.tasks.chess.records import (
    LAYOUT,
    UNKNOWN,
    Records,
    absolute_index,
    game_id,
    piece_classes,
    to_board,
    valid_positions,
)
from matrixlib.tasks.chess.stockfish.labels import integer_shares, wdl_of_shares

TOLERANCE = 0.01  # of the policy's sum, the range of values, binary planes
Faults = list[tuple[NDArray[np.bool_], str]]  # (mask (N,), fault)


def records_of(boards: NDArray[np.uint64], rights: NDArray[np.int64], source: str, faults: Faults) -> Records:
    """Records (N,) of oriented bitboards (N, 12) with castling rights (N,); appends to `faults`."""
    faults.append((~valid_positions(boards), "not a position of chess"))
    records = empty_records(len(boards), source)
    records["pieces"] = bitboard.pieces_of(boards)
    records["castling"] = valid_castling(rights, records["pieces"])
    faults.append((records["castling"] != rights, "castling without king or rook"))
    return records


def usable_rows(
    entries: ParseResult,
    records: Records,
    legal: LegalMoves,
    shares: NDArray[np.float32],
    faults: Faults,
    detail: Callable[[int, str], str],
    deleted: NDArray[np.bool_] | np.bool_ = np.False_,
) -> Batch:
    """Shard batch of the records (N,) without faults. shares: policy (K,) of their legal moves. Others are quarantined
    for their first fault, or dropped if in the mask `deleted`."""
    reasons = {row: reason for mask, reason in reversed(faults) for row in np.flatnonzero(mask & ~deleted).tolist()}
    for row, reason in reasons.items():
        entries.refuse(row, reason, detail(row, reason), to_board(records[row]).fen())
    good = np.ones(len(records), bool) & ~deleted
    good[list(reasons)] = False
    places, offset = ragged_rows(legal.offset, np.flatnonzero(good))
    weight = integer_shares(np.rint(shares[places] * 1e9).astype(np.int64), offset)
    return LegalMoves(legal.moves[places], legal.index[places], offset).batch(records[good], weight)


# Leela's


LC0_VERSION, KNOWN_VERSIONS = 6, (3, 4, 5, 6, 7)
FORMATS, CANONICAL, ARMAGEDDON = (1, 2, 3, 4, 5), 3, (132, 133)  # input formats; canonical from 3 on
FLIP, MIRROR, TRANSPOSE, TOO_LONG, DELETED = 1, 2, 4, 16, 64  # `flags`
MAX_GAME_BYTES = 64 << 20  # 16 times the longest game of chess
V6 = np.dtype(
    [
        ("version", "<u4"),
        ("input_format", "<u4"),
        ("probabilities", "<f4", POLICY_SIZE),
        # newest first; our P N B R Q K, theirs, repetition; a byte per rank, highest bit the a-file
        ("planes", "u1", (8, 13, 8)),
        # our queen's side, our king's, theirs; from format 2 on a bit mask of the rook's file
        ("castling", "u1", 4),
        # 1: Black to move; from format 3 on a bit mask of the en-passant file
        ("side", "u1"),
        ("rule50", "u1"),
        # 1 flip, 2 mirror, 4 transpose, 16 game too long, 64 deleted, 128 Black to move
        ("flags", "u1"),
        ("unused", "u1"),
        *((name, "<f4") for name in ("root_q", "best_q", "root_d", "best_d")),
        ("moves_left", "V12"),  # of root, best move, game
        *((name, "<f4") for name in ("result_q", "result_d")),
        ("rest", "V40"),
    ]
)
ROOKS = np.array([1, 128, 1, 128], np.uint8)  # `castling` in standard chess: files a and h
REVERSED = np.packbits(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)[:, ::-1])  # bit-reversed bytes

_KINDS = np.arange(8)[:, None]
_TURNED = np.arange(64) ^ np.where(_KINDS & FLIP, 7, 0) ^ np.where(_KINDS & MIRROR, 56, 0)
TRANSFORMS = np.where(_KINDS & TRANSPOSE, (7 - _TURNED % 8) * 8 + 7 - _TURNED // 8, _TURNED)
"""(8, 64): square after each transform: flip files, then ranks, then mirror on the diagonal h1-a8."""


def version_of(data: bytes) -> int:
    """Version of the first record; LC0_VERSION if truncated before it."""
    return int.from_bytes(data[:4], "little") if len(data) >= 4 else LC0_VERSION


def inflate(data: bytes) -> bytes:
    """Decompress a .gz file; a truncated one ends within a record. ValueError beyond MAX_GAME_BYTES."""
    out = b""
    while data:
        stream = zlib.decompressobj(31)
        try:
            out += stream.decompress(data, MAX_GAME_BYTES)
        except zlib.error:
            break
        if stream.unconsumed_tail or len(out) > MAX_GAME_BYTES:
            raise ValueError(f"holds more than {MAX_GAME_BYTES >> 20} MiB: no game")
        if not stream.eof:
            break
        data = stream.unused_data.lstrip(b"\0")  # padding
    return out + b"\0" * (bool(data) and len(out) % V6.itemsize == 0)


def read_lc0_games(path: Path) -> Iterator[bytes]:
    """Data of each game of a file, b"" for other members of a .tar. ValueError for another kind of file."""
    if ".tar" not in path.suffixes and path.suffix != ".tgz":
        data = inflate(path.read_bytes())
        if version_of(data) not in KNOWN_VERSIONS:
            raise ValueError(f"holds no training data of Lc0: its first bytes are {data[:4]!r}")
        yield data
        return
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # the list of members would grow
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None:
                    data = file.read(MAX_GAME_BYTES + 1) if member.name.endswith(".gz") else b""
                    if len(data) > MAX_GAME_BYTES:
                        raise ValueError(f"'{member.name}' in it has more than {MAX_GAME_BYTES >> 20} MiB: no game")
                    yield inflate(data)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ValueError(f"is cut short or no .tar file ({error}): get it again") from error


@dataclass(frozen=True)
class Lc0:
    """Lc0 training data version 6: .gz files of a game each, .tar of those. value: of the root or its best move."""

    source: ClassVar[str] = "lc0"
    value: Literal["root", "best"] = "root"

    def parts(self, path: Path) -> Iterator[Part]:
        first = 0
        try:
            for number, data in enumerate(read_lc0_games(path)):
                yield Part(number, first, data)
                # Records, including a truncated one; at least 1
                first += max(1, -(-len(data) // V6.itemsize)) if version_of(data) == LC0_VERSION else 1
        except ValueError as error:
            raise ValueError(f"{path} {error}") from error

    def read(self, part: Part) -> ParseResult:
        entries, version = ParseResult(part), version_of(part.data)
        if not part.data:
            entries.skipped["not a game"] = 1
        elif version not in KNOWN_VERSIONS:
            entries.refuse(0, "not training data", f"{part.data[:4]!r}", "", 0)
        elif version != LC0_VERSION:
            remedy = "only version 6 is supported: convert it with Lc0's rescorer"
            entries.refuse(0, f"version {version} of the format", remedy, "", 0)
        if not part.data or version != LC0_VERSION:
            return entries.result(concat([], LAYOUT), 1)
        count, rest = divmod(len(part.data), V6.itemsize)
        raw = np.frombuffer(part.data, V6, count)
        faults: Faults = []
        records, transform = leela_records(raw, faults)
        records["result"], records["wdl"] = value_targets(raw, self.value, faults)
        records["game"] = game_id("lc0", part.data)
        share = raw["probabilities"]
        total = np.where(share > 0, share, 0).sum(1, dtype=np.float64)
        faults.append((~np.isfinite(share).all(1) | ~(np.abs(total - 1) <= TOLERANCE), "policy does not sum to 1"))
        legal = legal_moves(records)
        owner = np.repeat(np.arange(count), np.diff(legal.offset))
        number = lc0_indices(legal, records, transform, share)
        listed = share[owner, number]
        both = np.bincount(owner, listed >= 0, count)
        differ = (both != np.diff(legal.offset)) | (both != (share >= 0).sum(1))
        faults.append((differ, "legal moves differ"))

        def detail(row: int, reason: str) -> str:
            if reason != "legal moves differ":
                return f"input format {raw['input_format'][row]}, flags {raw['flags'][row]}"
            names = map(move_name, np.setxor1d(number[owner == row], np.flatnonzero(share[row] >= 0)).tolist())
            return f"(mover's board) in one list only: {', '.join(sorted(names))}"

        deleted = raw["flags"] & DELETED != 0
        entries.skipped["marked for deletion"] = int(deleted.sum())
        batch = usable_rows(entries, records, legal, np.maximum(listed, 0), faults, detail, deleted)
        if rest:
            left = f"it has {rest} of {V6.itemsize} bytes: get the file again"
            entries.refuse(count, "cut short", left, "")
        return entries.result(batch, count + (rest > 0))


def leela_records(raw: NDArray[np.void], faults: Faults) -> tuple[Records, NDArray[np.int64]]:
    """Records (N,) of V6 (N,) without targets, and their transforms; appends to `faults`."""
    kind = raw["input_format"]
    faults.append((raw["version"] != LC0_VERSION, "another version within the file"))
    faults.append((np.isin(kind, ARMAGEDDON), "Armageddon rules"))
    faults.append((~np.isin(kind, (*FORMATS, *ARMAGEDDON)), "unknown input format"))
    canonical = kind >= CANONICAL
    transform = np.where(canonical, raw["flags"] & 7, 0).astype(np.int64)
    bits = np.unpackbits(raw["planes"][:, :2], axis=-1).reshape(-1, 26, 64)
    bits = np.take_along_axis(bits, TRANSFORMS[transform][:, None, :], axis=2)
    boards = np.packbits(bits, axis=-1, bitorder="little").view("<u8")[:, :, 0].astype(np.uint64)
    newest = boards[:, :12]
    turned = (transform & (MIRROR | TRANSPOSE) != 0) & (newest[:, 0] | newest[:, 6] != 0)
    faults.append((turned | (transform != 0) & raw["castling"].any(1), "transform is no symmetry"))
    plain = (raw["castling"] != 0) * ROOKS
    rooks = np.where((kind > 1)[:, None], raw["castling"], plain)
    faults.append(((rooks != plain).any(1), "Chess960 castling"))
    records = records_of(newest, ((plain != 0) * np.array([2, 1, 8, 4])).sum(1), "lc0", faults)
    column = np.where(transform & FLIP, REVERSED[raw["side"]], raw["side"])
    # Formats without en passant: their pawn moved from its second rank to its fourth in the last ply
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


def value_targets(raw: NDArray[np.void], value: str, faults: Faults) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
    """Result (N,) and win-draw-loss (N, 3) in the form of records; appends to `faults`."""
    q, d = raw[f"{value}_q"].astype(np.float64), raw[f"{value}_d"].astype(np.float64)
    wdl = np.stack([(1 - d + q) / 2, d, (1 - d - q) / 2], axis=1)
    good: NDArray[np.bool_] = wdl.min(axis=1) > -TOLERANCE  # False for non-finite values
    faults.append((~good, "value is no probability"))
    wdl = np.clip(np.where(good[:, None], wdl, 1 / 3), 0, 1)
    result, drawn = raw["result_q"], raw["result_d"]
    known = raw["flags"] & TOO_LONG == 0
    sure = np.isin(result, (-1, 0, 1)) & (drawn == (result == 0))
    faults.append((known & ~sure, "result is neither win, draw nor loss"))
    points = np.where(known & sure, np.nan_to_num(result), UNKNOWN).astype(np.int8)
    return points, wdl_of_shares(wdl / wdl.sum(1, keepdims=True))


def lc0_indices(
    legal: LegalMoves, records: Records, transform: NDArray[np.int64], shares: NDArray[np.float32]
) -> NDArray[np.int64]:
    """Lc0 indices (K,) of all legal moves of records (N,). shares (N, 1858) tell how castling is encoded."""
    row = np.repeat(np.arange(len(records)), np.diff(legal.offset))
    code = legal.moves.astype(np.int64)
    s, t, promotion = code & 63, code >> 6 & 63, code >> 12
    turn = transform[row]
    number = MOVES[promotion, TRANSFORMS[turn, s], TRANSFORMS[turn, t]].astype(np.int64)
    castling = (records["pieces"][row, 2] & 15 == bitboard.KING) & (s == 4) & (np.abs(t - s) == 2)
    # King takes rook; older versions encoded the king's two-square move
    onto = MOVES[0, 4, np.where(t == 6, 7, 0)].astype(np.int64)
    return np.where(castling & (shares[row, onto] >= 0), onto, number)


# Matrix0's


ARRAY_NAMES = {  # array -> (accepted names, shape of a row)
    "s": (("s", "states", "positions"), (19, 8, 8)),
    "pi": (("pi", "policy", "policy_targets"), (bitboard.POLICY_SIZE,)),
    "z": (("z", "value", "values", "value_targets"), ()),
    "legal_mask": (("legal_mask",), (bitboard.POLICY_SIZE,)),
}
NEEDED = ("s", "pi", "z")
PART_ROWS = 256  # 6 MB
MIN_LEGAL_SHARE = 0.999  # of the policy
RESULT_BYTES = 4096  # limit of the compressed member with the result


def _arrays_of(path: Path) -> dict[str, NDArray[Any]]:
    """Arrays of a file by the keys of ARRAY_NAMES, with `game` and White's `result`; all checksums are verified."""
    with np.load(path, allow_pickle=False) as archive:
        found: dict[str, NDArray[Any]] = {}
        for array, (names, row) in ARRAY_NAMES.items():
            name = next((name for name in names if name in archive.files), "")
            if not name and array not in NEEDED:
                continue
            if not name:
                raise ValueError(f"it has no array '{array}' (or {', '.join(names[1:])}), only {archive.files}")
            values = archive[name]
            if array == "z" and values.shape[1:] == (1,):
                values = values[:, 0]
            shape = (len(found["s"]) if found else values.shape[0] if values.ndim else 0, *row)
            if values.dtype.kind not in "fiub" or values.shape != shape:
                raise ValueError(f"'{name}' must be numbers of shape {shape}, not {values.dtype} {values.shape}")
            found[array] = values
        info = archive.zip.infolist() if archive.zip else []
        game = game_id("matrix0", repr(sorted((item.filename, item.CRC) for item in info)))
        size = {item.filename: item.file_size for item in info}.get("meta_result.npy", RESULT_BYTES + 1)
        known = archive["meta_result"].reshape(-1) if size <= RESULT_BYTES else np.zeros(0)
    result = int(known[0]) if known.size == 1 and known[0] in (-1, 0, 1) else UNKNOWN
    return found | {"game": np.array(game, np.uint64), "result": np.array(result)}


@dataclass(frozen=True)
class Matrix0Data:
    """Matrix0 NPZ files: planes s (N, 19, 8, 8) of White's board, policy pi (N, 4672), value z (N,)."""

    source: ClassVar[str] = "matrix0"

    def parts(self, path: Path) -> Iterator[Part]:
        try:
            found = _arrays_of(path)
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError) as error:
            raise ValueError(f"{path} is damaged or no Matrix0 training data: {error}") from error
        for number, start in enumerate(range(0, len(found["z"]), PART_ROWS)):
            data = io.BytesIO()
            rows = {name: array[start : start + PART_ROWS] if array.ndim else array for name, array in found.items()}
            np.savez(data, **rows)  # type: ignore[arg-type]
            yield Part(number, start, data.getvalue())

    def read(self, part: Part) -> ParseResult:
        with np.load(io.BytesIO(part.data), allow_pickle=False) as arrays:
            s, pi, z = (arrays[name].astype(np.float32, order="C") for name in NEEDED)
            mask = arrays["legal_mask"] != 0 if "legal_mask" in arrays else None
            game, white = arrays["game"], int(arrays["result"])
        faults: Faults = []
        records = matrix0_records(s, faults)
        black = records["side"] == 1
        pi[black] = pi[black][:, absolute_index]
        if mask is not None:
            mask[black] = mask[black][:, absolute_index]
        files = en_passant_files(records["pieces"], pi > 0 if mask is None else mask)
        records["en_passant"] = bitboard.legal_en_passant(records["pieces"], files)
        records["game"] = game
        if white != UNKNOWN:
            records["result"] = np.where(black, -white, white)
        points = np.clip(np.nan_to_num(z.astype(np.float64)), -1, 1)
        won, lost = np.maximum(points, 0), np.maximum(-points, 0)
        records["wdl"] = wdl_of_shares(np.stack([won, 1 - won - lost, lost], axis=1))
        faults.append((~(np.abs(z) <= 1 + TOLERANCE), "value is not from -1 to 1"))
        faults.append((~(np.isfinite(pi) & (pi >= 0)).all(1), "policy is negative or not finite"))
        total = pi.sum(1, dtype=np.float64)
        faults.append((~(np.abs(total - 1) <= TOLERANCE), "policy does not sum to 1"))
        legal = legal_moves(records)
        owner = np.repeat(np.arange(len(records)), np.diff(legal.offset))
        share = pi[owner, legal.index]
        coverage = np.bincount(owner, share, len(records)) / np.where(total > 0, total, 1)
        faults.append((~(coverage >= MIN_LEGAL_SHARE), "policy on illegal moves"))
        if mask is not None:
            listed = np.bincount(owner, mask[owner, legal.index], len(records))
            faults.append(((listed != np.diff(legal.offset)) | (listed != mask.sum(1)), "legal moves differ"))

        def detail(row: int, reason: str) -> str:
            return f"policy sum {total[row]:.3f}, {coverage[row]:.1%} of it on legal moves, value {z[row]:.3f}"

        entries = ParseResult(part)
        return entries.result(usable_rows(entries, records, legal, share, faults, detail), len(records))


def matrix0_records(s: NDArray[np.float32], faults: Faults) -> Records:
    """Records (N,) of planes (N, 19, 8, 8), without en passant and targets; appends to `faults`."""
    constant = s[:, 12:, 0, 0]  # constant planes
    bits = s[:, :12, ::-1] > 0.5  # row 0 is rank 8
    good = (np.abs(s[:, :12, ::-1] - bits) <= TOLERANCE).all((1, 2, 3))
    good &= (np.abs(constant[:, :5] - (constant[:, :5] > 0.5)) <= TOLERANCE).all(1)
    good &= (np.abs(constant - 0.5) <= 0.51).all(1)
    good &= (s[:, 12:] == constant[:, :, None, None]).all((1, 2, 3))
    faults.append((~good, "planes are not Matrix0's"))
    boards = np.packbits(bits, axis=-1, bitorder="little").reshape(-1, 12, 8).view("<u8")[:, :, 0].astype(np.uint64)
    black = constant[:, 0] < 0.5
    boards[black] = np.roll(boards[black], 6, axis=1).byteswap()
    rights = ((constant[:, 1:5] > 0.5) * [1, 2, 4, 8]).sum(1)
    rights = np.where(black, rights >> 2 | (rights & 3) << 2, rights)
    records = records_of(boards, rights, "matrix0", faults)
    numbers = np.clip(np.nan_to_num(constant[:, 5:]), 0, 1) * [99, 199]
    records["halfmove"], full = np.rint(numbers).astype(np.int64).T
    records["side"] = black
    records["ply"] = np.maximum(2 * full - 2, 0) + black
    return records


def en_passant_files(pieces: NDArray[np.uint8], mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """En-passant files (N,) implied by a mask of moves (N, 4672) on the oriented board, -1 for none."""
    classes = piece_classes(pieces)
    files = np.full(len(pieces), -1, np.int64)
    for origin in range(32, 40):
        for target in (target for target in (origin + 7, origin + 9) if target >> 3 == 5):
            takes = mask[:, bitboard.POLICY_INDEX[origin | target << 6]] & (classes[:, origin] == bitboard.PAWN)
            takes &= (classes[:, target] == bitboard.EMPTY) & (classes[:, target - 8] == bitboard.PAWN + 6)
            files[takes] = target & 7
    return files
