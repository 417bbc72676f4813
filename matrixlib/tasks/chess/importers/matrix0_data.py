"""Reader of Matrix0's training data: NPZ files of planes s (N,19,8,8), policy pi (N,4672) and value z (N,).

The planes are absolute (White's view), without en passant and repetition, so an en-passant capture is taken to be
possible where `legal_mask`, or without one the policy, has it. z is a number from the side to move, made of the result
and the search's value; it is stored as the win-draw-loss with that expectation and as many draws as that allows (at
move 32, Stockfish's own model agrees to 0.005). The result itself is known only in self-play files, which hold one game
and say how it ended (`meta_result`). Files of many games do not say where one ends: a file is one game to the split, so
that nothing leaks.
"""

import io
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from matrixlib.data.entries import ParseResult, Part, Refused
from matrixlib.data.shards import LFS_POINTER, read_npy
from matrixlib.tasks.chess import bitboard
from matrixlib.tasks.chess.importers.notation import classes_of, legal_of, standing_rights
from matrixlib.tasks.chess.importers.parsing import blank
from matrixlib.tasks.chess.keys import game_id
from matrixlib.tasks.chess.records import UNKNOWN, Records, absolute_index, playable, to_board
from matrixlib.tasks.chess.scores import wdl_of_shares

NAMES = {  # array -> its names, and the shape of a row
    "s": (("s", "states", "positions"), (19, 8, 8)),
    "pi": (("pi", "policy", "policy_targets"), (bitboard.POLICY_SIZE,)),
    "z": (("z", "value", "values", "value_targets"), ()),
    "legal_mask": (("legal_mask",), (bitboard.POLICY_SIZE,)),
}
NEEDED = ("s", "pi", "z")
ROWS = 256  # in a part: 6 MB
COVERAGE = 0.999  # share of the policy that must lie on legal moves
RESULT_BYTES = 4096  # of the member with a game's result, at most: it is packed, and might unpack to anything
TOLERANCE = 0.01  # of the policy's sum, of planes that hold 0 or 1, of |z| <= 1


# Files


def _header(file: IO[bytes], name: str, path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an array that a stream starts with, which then stands at its data. ValueError names both."""
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        shape, fortran, dtype = read[npy.read_magic(file)](file)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path}: '{name}' does not begin like an array ({error}): restore the file") from error
    if dtype.hasobject:
        raise ValueError(f"{path}: '{name}' holds Python objects, which are never read")
    if fortran or dtype.kind not in "fiub":
        raise ValueError(f"{path}: '{name}' must be numbers in C order, not {dtype}{' in Fortran order' * fortran}")
    return shape, dtype


def _arrays_of(archive: zipfile.ZipFile, path: Path) -> dict[str, str]:
    """array -> member, for the arrays that are there. ValueError for one that is missing or there twice."""
    there = {name.removesuffix(".npy") for name in archive.namelist()}
    members = {}
    for array, (names, _) in NAMES.items():
        ours = [name for name in names if name in there]
        if len(ours) > 1 or (not ours and array in NEEDED):
            words = f"{', '.join(ours)} at once" if ours else f"no array '{array}' (nor {', '.join(names[1:])})"
            raise ValueError(
                f"{path} holds {words}; there are {', '.join(sorted(there)) or 'none'}: not Matrix0's data"
            )
        if ours:
            members[array] = ours[0]
    return members


def _result_of(archive: zipfile.ZipFile) -> int:
    """The game's result from White's side, 2 unknown."""
    if "meta_result.npy" not in archive.namelist() or archive.getinfo("meta_result.npy").file_size > RESULT_BYTES:
        return 2
    value = read_npy(archive.read("meta_result.npy")).reshape(-1)
    return int(value[0]) if value.size == 1 and value[0] in (-1, 0, 1) else 2


def _rows_of(archive: zipfile.ZipFile, path: Path, stack: ExitStack) -> Iterator[dict[str, NDArray[Any]]]:
    """Rows ROWS by ROWS of all arrays, in lock-step. ValueError names the array that is of another shape."""
    streams, count = {}, None
    for array, member in _arrays_of(archive, path).items():
        file = stack.enter_context(archive.open(f"{member}.npy"))
        shape, dtype = _header(file, member, path)
        row = NAMES[array][1]
        if array == "z" and len(shape) == 2 and shape[1] == 1:
            shape = shape[:1]
        count = shape[0] if count is None and shape else count
        if shape != (count, *row):
            raise ValueError(f"{path}: '{member}' must have shape {('N', *row)} with N = {count}, not {shape}")
        streams[array] = (file, dtype, row)
    for start in range(0, count or 0, ROWS):
        n = min(ROWS, (count or 0) - start)
        arrays = {}
        for array, (file, dtype, row) in streams.items():
            size = n * int(np.prod(row, dtype=np.int64)) * dtype.itemsize
            data = file.read(size)
            if len(data) < size:
                raise ValueError(
                    f"{path}: array '{array}' ends at row {start}, {count} were promised: restore the file"
                )
            arrays[array] = np.frombuffer(data, dtype).reshape(n, *row)
        yield arrays


# Positions

Faults = list[tuple[NDArray[np.bool_], str]]  # masks (N,) of what is wrong, with the reason


def decode(s: NDArray[np.float32], faults: Faults) -> Records:
    """Records (N,) of planes (N, 19, 8, 8), without en passant and targets. What is wrong is added to `faults`."""
    whole = s[:, 12:, 0, 0]  # planes that are the same all over
    bits = s[:, :12, ::-1] > 0.5  # row 0 is rank 8
    binary = (np.abs(s[:, :12, ::-1] - bits) <= TOLERANCE).all((1, 2, 3))
    binary &= (np.abs(whole[:, :5] - (whole[:, :5] > 0.5)) <= TOLERANCE).all(1) & (np.abs(whole - 0.5) <= 0.51).all(1)
    binary &= (s[:, 12:] == whole[:, :, None, None]).all((1, 2, 3))
    faults.append((~binary, "planes are not Matrix0's"))
    boards = np.packbits(bits, axis=-1, bitorder="little").reshape(-1, 12, 8).view("<u8")[:, :, 0].astype(np.uint64)
    black = whole[:, 0] < 0.5
    boards[black] = np.roll(boards[black], 6, axis=1).byteswap()
    faults.append((~playable(boards), "not a position of chess"))
    records = blank(len(s), "matrix0")
    records["pieces"] = bitboard.pieces_of(boards)
    rights = ((whole[:, 1:5] > 0.5) * [1, 2, 4, 8]).sum(1)
    rights = np.where(black, rights >> 2 | (rights & 3) << 2, rights)
    records["castling"] = standing_rights(rights, records["pieces"])
    faults.append((records["castling"] != rights, "castling without king or rook"))
    numbers = np.clip(np.nan_to_num(whole[:, 5:]), 0, 1) * [99, 199]
    records["halfmove"], full = np.rint(numbers).astype(np.int64).T
    records["side"] = black
    records["ply"] = np.maximum(2 * full - 2, 0) + black
    return records


def passed_files(pieces: NDArray[np.uint8], mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The file (N,) on which a move of `mask` (N, 4672, oriented) takes en passant, -1 where none does."""
    classes = classes_of(pieces)
    files = np.full(len(pieces), -1, np.int64)
    for origin in range(32, 40):
        for target in (target for target in (origin + 7, origin + 9) if target >> 3 == 5):
            takes = mask[:, bitboard.POLICY_INDEX[origin, target]] & (classes[:, origin] == bitboard.PAWN)
            takes &= (classes[:, target] == bitboard.EMPTY) & (classes[:, target - 8] == bitboard.PAWN + 6)
            files[takes] = target & 7
    return files


@dataclass(frozen=True)
class Matrix0Data:
    """No options."""

    source: ClassVar[str] = "matrix0"

    def parts(self, path: Path) -> Iterator[Part]:
        with open(path, "rb") as file:
            head = file.read(len(LFS_POINTER))
        if head == LFS_POINTER:
            raise ValueError(f"{path} is only a Git LFS pointer, not the data: run `git lfs pull` in its repository")
        try:
            with ExitStack() as stack:
                archive = stack.enter_context(zipfile.ZipFile(path))
                if damaged := archive.testzip():  # before any row is handed over, not after the last one
                    raise zipfile.BadZipFile(f"'{damaged}' fails its checksum")
                whole = repr(sorted((info.filename, info.CRC) for info in archive.infolist()))
                about = {"game": np.uint64(game_id("matrix0", whole)), "result": np.int8(_result_of(archive))}
                first = 0
                for number, arrays in enumerate(_rows_of(archive, path, stack)):
                    data = io.BytesIO()
                    np.savez(data, **about, **arrays)  # type: ignore[arg-type]
                    yield Part(number, first, data.getvalue())
                    first += len(arrays["z"])
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
            raise ValueError(f"{path} is damaged or no NPZ file ({error}): restore it from a copy") from error

    def read(self, part: Part) -> ParseResult:
        with np.load(io.BytesIO(part.data), allow_pickle=False) as arrays:
            s, pi, z = (arrays[name].astype(np.float32) for name in NEEDED)
            mask = arrays["legal_mask"] != 0 if "legal_mask" in arrays else None
            game, white = arrays["game"], int(arrays["result"])
        faults: Faults = []
        records = decode(s, faults)
        black = records["side"] == 1
        pi[black] = pi[black][:, absolute_index]
        if mask is not None:
            mask[black] = mask[black][:, absolute_index]
        files = passed_files(records["pieces"], pi > 0 if mask is None else mask)
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
        legal = legal_of(records)
        owner = np.repeat(np.arange(len(records)), np.diff(legal.offset))
        share = pi[owner, legal.index]
        coverage = np.bincount(owner, share, len(records)) / np.where(total > 0, total, 1)
        faults.append((~(coverage >= COVERAGE), "policy on illegal moves"))
        if mask is not None:
            listed = np.bincount(owner, mask[owner, legal.index], len(records))
            faults.append(((listed != np.diff(legal.offset)) | (listed != mask.sum(1)), "legal moves differ"))
        refused = []
        reasons = {row: reason for mask, reason in reversed(faults) for row in np.flatnonzero(mask).tolist()}
        for row, reason in sorted(reasons.items()):
            detail = f"sum of the policy {total[row]:.3f}, of it {coverage[row]:.1%} on legal moves, value {z[row]:.3f}"
            refused.append(Refused(part.first + row, reason, detail, 1, to_board(records[row]).fen()))
        good = np.array([row for row in range(len(records)) if row not in reasons], np.int64)
        own, places = legal.rows(good)
        return ParseResult(own.batch_of_shares(records[good], share[places]), len(records), len(good), refused)
