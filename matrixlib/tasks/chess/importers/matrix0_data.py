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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from matrixlib.data.entries import Entries, ParseResult, Part
from matrixlib.tasks.chess import bitboard
from matrixlib.tasks.chess.importers.notation import Faults, blank, classes_of, first_faults, legal_of, standing_rights
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


def _arrays_of(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file by our names for them, with `game` and `result`, the game's from White's side (2 unknown).

    Every byte is checked. ValueError says what is missing, there twice, or of another kind or shape.
    """
    with np.load(path, allow_pickle=False) as archive:
        found: dict[str, NDArray[Any]] = {}
        for array, (names, row) in NAMES.items():
            ours = [name for name in names if name in archive.files]
            if len(ours) > 1 or (not ours and array in NEEDED):
                words = f"{', '.join(ours)} at once" if ours else f"no array '{array}' (nor {', '.join(names[1:])})"
                raise ValueError(f"it holds {words}; there are {', '.join(archive.files)}")
            for name in ours:
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
    """No options."""

    source: ClassVar[str] = "matrix0"

    def parts(self, path: Path) -> Iterator[Part]:
        try:
            found = _arrays_of(path)
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError) as error:
            raise ValueError(f"{path} is damaged or no NPZ file of Matrix0's data: {error}") from error
        for number, start in enumerate(range(0, len(found["z"]), ROWS)):
            data = io.BytesIO()
            rows = {name: array[start : start + ROWS] if array.ndim else array for name, array in found.items()}
            np.savez(data, **rows)  # type: ignore[arg-type]
            yield Part(number, start, data.getvalue())

    def read(self, part: Part) -> ParseResult:
        with np.load(io.BytesIO(part.data), allow_pickle=False) as arrays:
            s, pi, z = (arrays[name].astype(np.float32, order="C") for name in NEEDED)
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
        entries, reasons = Entries(part), first_faults(faults)
        for row, reason in reasons.items():
            detail = f"sum of the policy {total[row]:.3f}, of it {coverage[row]:.1%} on legal moves, value {z[row]:.3f}"
            entries.refuse(row, reason, detail, to_board(records[row]).fen())
        good = np.array([row for row in range(len(records)) if row not in reasons], np.int64)
        own, places = legal.rows(good)
        return entries.result(own.batch_of_shares(records[good], share[places]), len(records))


# Positions


def decode(s: NDArray[np.float32], faults: Faults) -> Records:
    """Records (N,) of planes (N, 19, 8, 8), without en passant and targets. What is wrong is added to `faults`."""
    constant = s[:, 12:, 0, 0]  # planes of one value each
    bits = s[:, :12, ::-1] > 0.5  # row 0 is rank 8
    good = (np.abs(s[:, :12, ::-1] - bits) <= TOLERANCE).all((1, 2, 3))
    good &= (np.abs(constant[:, :5] - (constant[:, :5] > 0.5)) <= TOLERANCE).all(1)
    good &= (np.abs(constant - 0.5) <= 0.51).all(1)
    good &= (s[:, 12:] == constant[:, :, None, None]).all((1, 2, 3))
    faults.append((~good, "planes are not Matrix0's"))
    boards = np.packbits(bits, axis=-1, bitorder="little").reshape(-1, 12, 8).view("<u8")[:, :, 0].astype(np.uint64)
    black = constant[:, 0] < 0.5
    boards[black] = np.roll(boards[black], 6, axis=1).byteswap()
    faults.append((~playable(boards), "not a position of chess"))
    records = blank(len(s), "matrix0")
    records["pieces"] = bitboard.pieces_of(boards)
    rights = ((constant[:, 1:5] > 0.5) * [1, 2, 4, 8]).sum(1)
    rights = np.where(black, rights >> 2 | (rights & 3) << 2, rights)
    records["castling"] = standing_rights(rights, records["pieces"])
    faults.append((records["castling"] != rights, "castling without king or rook"))
    numbers = np.clip(np.nan_to_num(constant[:, 5:]), 0, 1) * [99, 199]
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
            takes = mask[:, bitboard.POLICY_INDEX[origin | target << 6]] & (classes[:, origin] == bitboard.PAWN)
            takes &= (classes[:, target] == bitboard.EMPTY) & (classes[:, target - 8] == bitboard.PAWN + 6)
            files[takes] = target & 7
    return files
