"""Reader of Leela Chess Zero's training data, version 6: .gz files of one game each, and .tar files of those.

A record has the shares of visits as policy, the value of the search as win-draw-loss, and the game's result. Positions
stand there from the side to move, ranks mirrored for Black as in our own record. Only the newest of the eight is read,
and the one before where the format does not tell the en-passant file otherwise. From format 3 on a position without
castling rights is turned into a canonical one of up to eight, and turned back here.

Nothing says which ply of its game a record is: `ply` counts the records of the file, made even for White. Leela's
repetition plane does not tell one earlier occurrence from several.
"""

import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from matrixlib.data.entries import Entries, ParseResult, Part
from matrixlib.data.shards import concat
from matrixlib.tasks.chess import bitboard
from matrixlib.tasks.chess.importers.notation import Faults, Legal, blank, first_faults, legal_of, standing_rights
from matrixlib.tasks.chess.keys import game_id
from matrixlib.tasks.chess.lc0.moves import MOVES, POLICY, move_name
from matrixlib.tasks.chess.records import LAYOUT, UNKNOWN, Records, playable, to_board
from matrixlib.tasks.chess.scores import wdl_of_shares

VERSION, KNOWN_VERSIONS = 6, (3, 4, 5, 6, 7)
FORMATS, CANONICAL, ARMAGEDDON = (1, 2, 3, 4, 5), 3, (132, 133)  # CANONICAL: formats from here on
FLIP, MIRROR, TRANSPOSE, TOO_LONG, DELETED = 1, 2, 4, 16, 64  # `flags`
TOLERANCE = 0.01  # of the sum of the policy, and of the bounds of a value
LONGEST = 64 << 20  # bytes of a game: sixteen times what any game of chess takes
VALUES = (
    *("root_q", "best_q", "root_d", "best_d", "root_m", "best_m", "plies_left", "result_q", "result_d"),
    *("played_q", "played_d", "played_m", "original_q", "original_d", "original_m"),
)
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
        *((name, "<f4") for name in VALUES),
        ("visits", "<u4"),
        ("played", "<u2"),
        ("best", "<u2"),
        ("divergence", "<f4"),
        ("reserved", "<u4"),
    ]
)
ROOKS = np.array([1, 128, 1, 128], np.uint8)  # `castling` of standard chess: files a and h
REVERSED = np.packbits(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)[:, ::-1])  # bytes bit by bit


def _transforms() -> NDArray[np.int64]:
    """(8, 64): where each square goes by a transform: the files turned, then the ranks, then mirrored in h1-a8."""
    square, transform = np.arange(64), np.arange(8)[:, None]
    turned = square ^ np.where(transform & FLIP, 7, 0) ^ np.where(transform & MIRROR, 56, 0)
    return np.where(transform & TRANSPOSE, (7 - turned % 8) * 8 + 7 - turned // 8, turned)


TRANSFORMS = _transforms()


# Files


def version_of(data: bytes) -> int:
    """The version in the first record; of less than that, the one that could be read."""
    return int.from_bytes(data[:4], "little") if len(data) >= 4 else VERSION


def inflate(data: bytes) -> bytes:
    """What is in a .gz file, as far as it goes. One that is cut short or damaged ends within a record.

    ValueError for more than a game can hold.
    """
    out = b""
    while data:
        stream = zlib.decompressobj(31)
        try:
            out += stream.decompress(data, LONGEST)
        except zlib.error:
            break
        if stream.unconsumed_tail or len(out) > LONGEST:
            raise ValueError(f"holds more than {LONGEST >> 20} MiB, which is no game")
        if not stream.eof:
            break
        data = stream.unused_data.lstrip(b"\0")  # some programs pad
    return out + b"\0" * (bool(data) and len(out) % V6.itemsize == 0)


def games_of(path: Path) -> Iterator[bytes]:
    """The data of each game of a file; nothing for a member of a .tar that is no game. ValueError where it is none."""
    if ".tar" not in path.suffixes and path.suffix != ".tgz":
        data = inflate(path.read_bytes())
        if version_of(data) not in KNOWN_VERSIONS:
            raise ValueError(f"holds no training data of Leela: its first bytes are {data[:4]!r}")
        yield data
        return
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # or the list of all members grows
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None:
                    data = file.read(LONGEST + 1) if member.name.endswith(".gz") else b""
                    if len(data) > LONGEST:
                        raise ValueError(f"'{member.name}' in it has more than {LONGEST >> 20} MiB, which is no game")
                    yield inflate(data)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ValueError(f"is cut short or no .tar file ({error}): restore it from a copy") from error


@dataclass(frozen=True)
class Lc0:
    """value: the search's value of the root, or that of its best move."""

    source: ClassVar[str] = "lc0"
    value: Literal["root", "best"] = "root"

    def parts(self, path: Path) -> Iterator[Part]:
        first = 0
        try:
            for number, data in enumerate(games_of(path)):
                yield Part(number, first, data)
                # Its records, with one that is cut short; 1 if there are none
                first += max(1, -(-len(data) // V6.itemsize)) if version_of(data) == VERSION else 1
        except ValueError as error:
            raise ValueError(f"{path} {error}") from error

    def read(self, part: Part) -> ParseResult:
        entries, version = Entries(part), version_of(part.data)
        if not part.data or version != VERSION:
            if not part.data:
                entries.skipped["not a game"] = 1
            elif version in KNOWN_VERSIONS:
                detail = "only version 6 is read: convert it with Leela's rescorer"
                entries.refuse(0, f"version {version} of the format", detail, "", 0)
            else:
                entries.refuse(0, "not training data", f"{part.data[:4]!r}", "", 0)
            return entries.result(concat([], LAYOUT), 1)
        count, rest = divmod(len(part.data), V6.itemsize)
        raw = np.frombuffer(part.data, V6, count)
        faults: Faults = []
        records, transform = decode(raw, faults)
        records["result"], records["wdl"] = values_of(raw, self.value, faults)
        records["game"] = game_id("lc0", part.data)
        share = raw["probabilities"]
        total = np.where(share > 0, share, 0).sum(1, dtype=np.float64)
        faults.append((~np.isfinite(share).all(1) | ~(np.abs(total - 1) <= TOLERANCE), "policy does not sum to 1"))
        facts = zip(raw["input_format"], raw["flags"], strict=True)
        details = [f"input format {kind}, flags {flags}" for kind, flags in facts]
        reasons = first_faults(faults)
        rows = np.array([row for row in range(count) if row not in reasons], np.int64)
        legal = legal_of(records[rows])
        owner = np.repeat(np.arange(len(rows)), np.diff(legal.offset))
        number = numbers_of(legal, records[rows], transform[rows], share[rows])
        listed = share[rows][owner, number]
        both = np.bincount(owner, listed >= 0, len(rows))
        same = (both == np.diff(legal.offset)) & (both == (share[rows] >= 0).sum(1))
        for item in np.flatnonzero(~same).tolist():
            theirs = np.flatnonzero(share[rows[item]] >= 0)
            names = ", ".join(sorted(map(move_name, np.setxor1d(number[owner == item], theirs).tolist())))
            reasons[int(rows[item])] = "legal moves differ"
            details[rows[item]] = f"(as its mover sees the board) in one list only: {names}"
        deleted = raw["flags"] & DELETED != 0
        for row, reason in reasons.items():
            if not deleted[row]:
                entries.refuse(row, reason, details[row], to_board(records[row]).fen())
        entries.skipped["marked for deletion"] = int(deleted.sum())
        if rest:
            detail = f"{rest} of {V6.itemsize} bytes are there: restore the file from a copy"
            entries.refuse(count, "cut short", detail, "")
        good = same & ~deleted[rows]
        own, places = legal.rows(np.flatnonzero(good))
        batch = own.batch_of_shares(records[rows[good]], np.maximum(listed[places], 0))
        return entries.result(batch, count + (rest > 0))


# Positions


def decode(raw: NDArray[np.void], faults: Faults) -> tuple[Records, NDArray[np.int64]]:
    """Records (N,) of V6 (N,) without targets, and their transforms. What is wrong is added to `faults`."""
    kind = raw["input_format"]
    faults.append((raw["version"] != VERSION, "another version within the file"))
    faults.append((np.isin(kind, ARMAGEDDON), "Armageddon rules"))
    faults.append((~np.isin(kind, (*FORMATS, *ARMAGEDDON)), "unknown input format"))
    canonical = kind >= CANONICAL
    transform = np.where(canonical, raw["flags"] & 7, 0).astype(np.int64)
    bits = np.unpackbits(raw["planes"][:, :2], axis=-1).reshape(-1, 26, 64)
    bits = np.take_along_axis(bits, TRANSFORMS[transform][:, None, :], axis=2)
    boards = np.packbits(bits, axis=-1, bitorder="little").view("<u8")[:, :, 0].astype(np.uint64)
    newest = boards[:, :12]
    faults.append((~playable(newest), "not a position of chess"))
    turned = (transform & (MIRROR | TRANSPOSE) != 0) & (newest[:, 0] | newest[:, 6] != 0)
    faults.append((turned | (transform != 0) & raw["castling"].any(1), "transform is no symmetry"))
    plain = (raw["castling"] != 0) * ROOKS
    rooks = np.where((kind > 1)[:, None], raw["castling"], plain)
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
    points = np.where(known & sure, np.nan_to_num(result), UNKNOWN).astype(np.int8)
    return points, wdl_of_shares(wdl / wdl.sum(1, keepdims=True))


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
