"""Positions that a folder of shards holds more than once, merged into one: their counts added, their targets averaged.

Equal are positions as `packing.keys_of` says: seen from the side to move, and where no castling right is left also with
the left-right mirror image. What a position stands for (`COUNT`) is no field of the record, because nothing that
trains or searches asks for it, and a field would make every shard there is unreadable: it lies beside the shards, in
`imports/counts/<shard>.npy`, so that merging in several goes gives what merging at once gives. The ids of games that a
shard lost all positions of lie in `imports/gone/<shard>.npy`, so that such a game is not imported again.

Shards are replaced by others, never changed: the new ones are written aside, then a plan says which stands for which,
then it is carried out. Killed before the plan is there, nothing has happened; after it, the next call of this or of
`intake.take_in` carries it out. Until the new shards are in use, the old ones are, and never both.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from matrixlib.data.catalogue import ShardRow
from matrixlib.data.shards import Batch, Shard, concat, select, write_shard
from matrixlib.tasks.chess.importers import inspection
from matrixlib.tasks.chess.importers.import_files import (
    FOLDER,
    GONE,
    PLAN,
    STAGED,
    ImportStopped,
    accounts,
    carry_out,
    quiet_catalogue,
)
from matrixlib.tasks.chess.records import LAYOUT, UNKNOWN, WDL_SUM, mirror, mirror_pieces
from matrixlib.tasks.chess.scores import wdl_of_shares
from matrixlib.tasks.chess.stockfish.generator import write_atomically

MERGING = 2  # version of what decides about names and bytes
COUNTS = "counts"
COUNT = np.dtype(
    [
        ("entries", "<u4"),  # that the position stands for
        ("policies", "<u4"),  # ... of these, with a policy
        ("values", "<u4"),  # ... whose win-draw-loss, or the result in its place, is in the mean
        ("waiting", "<u4"),  # ... without one, whose result will be in its place once results disagree
        ("torn", "?"),  # whether results disagreed
    ]
)
IMPORTED = re.compile(r"[a-z0-9]+_[0-9a-f]{12}_\d{6}_(train|validation)_\d+\.npz")
SUFFIX = re.compile(r"_m[0-9a-f]{8}\Z")


@dataclass(frozen=True)
class Merged:
    """positions: before; left: after; across: positions that were in several sources; shards: replaced ones."""

    positions: int
    left: int
    across: int
    shards: int
    seconds: float

    def text(self) -> str:
        """One line for people."""
        if self.left == self.positions:
            return f"{self.positions:,} positions, each of them once"
        return (
            f"{self.positions:,} positions are {self.left:,} different ones, {self.across:,} of them from several "
            f"sources; {self.shards} shards replaced in {self.seconds:.1f} s"
        )


def counts_of(folder: Path, row: ShardRow, rows: np.ndarray, batch: Batch) -> np.ndarray:
    """(n,) COUNT of the positions `rows` (n,) of a shard, which are `batch`. ValueError where its file does not fit."""
    path = _beside(folder, COUNTS, row.name)
    if not path.is_file():
        return _single(batch)
    counts = np.load(path, allow_pickle=False)
    if counts.dtype != COUNT or len(counts) != row.count:
        raise ValueError(
            f"{path} does not fit the {row.count} positions of its shard: delete it, and each counts once"
        )
    chosen: np.ndarray = counts[rows]
    return chosen


def _single(batch: Batch) -> np.ndarray:
    """(n,) COUNT of positions that were never merged."""
    records = batch["records"]
    valued, known = records["wdl"].any(axis=1), records["result"] != UNKNOWN
    weight = np.append(0, np.cumsum(batch["policy_weight"], dtype=np.int64))
    counts = np.zeros(len(records), COUNT)
    counts["entries"], counts["policies"] = 1, np.diff(weight[batch["policy_offset"]]) > 0
    counts["values"], counts["waiting"] = valued, known & ~valued
    return counts


def _beside(folder: Path, kind: str, name: str) -> Path:
    """The file of a kind about a shard, which may lie in a subfolder."""
    return folder / FOLDER / kind / Path(name).with_suffix(".npy")


def deduplicate(folder: Path | str) -> Merged:
    """Merge what the healthy shards of a folder hold more than once.

    A position of both splits goes to training, so that validation has none that is trained on. Memory: some 40 bytes
    for each position, and those that are there more than once. Raises ValueError where an import is unfinished,
    DamagedBlock for a damaged shard (quarantine it first), ImportStopped while another process writes the folder.
    """
    folder = Path(folder)
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    try:
        with FileLock(folder / FOLDER / "lock", timeout=0):
            catalogue = quiet_catalogue(folder)
            carry_out(catalogue)
            shutil.rmtree(
                folder / FOLDER / STAGED, ignore_errors=True
            )  # of a call that was killed before its plan
            rows = sorted(catalogue.shards(), key=lambda row: (row.split != "train", row.name))
            _check_imports(folder, rows)
            found = plan(folder, rows)
            carry_out(catalogue)
    except Timeout as error:
        raise ImportStopped(f"an import into {folder} is running; wait until it has ended") from error
    return Merged(*found, time.monotonic() - start)


def _check_imports(folder: Path, rows: Sequence[ShardRow]) -> None:
    accounted = {name for account in accounts(folder) for name in account.shards}
    for row in rows:
        if IMPORTED.fullmatch(row.name) and row.name not in accounted:
            raise ValueError(f"{row.path} is of an import that was not finished: call take_in again first")


# What is there more than once


def duplicates(shards: Iterable[Shard]) -> tuple[np.ndarray, np.ndarray]:
    """(members (m,), group (m,)): numbers, through all shards, of the positions that seem to be there more than once,
    group by group, the first of a group first."""
    keys = np.concatenate([np.zeros(0, np.uint64), *(_keys(shard.arrays["records"]) for shard in shards)])
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    group = np.cumsum(np.append(False, ordered[1:] != ordered[:-1])[: len(ordered)])
    several = np.bincount(group)[group] > 1 if len(group) else np.zeros(0, bool)
    return order[several], np.unique(group[several], return_inverse=True)[1]


def _keys(records: np.ndarray) -> np.ndarray:
    """(n,) u8 that a position and its mirror image share where they are equal."""
    image = records.copy()
    image["pieces"] = mirror_pieces(records["pieces"])
    file = records["en_passant"]
    image["en_passant"] = np.where(file >= 0, 7 - file, file)
    plain, mirrored = inspection.position_keys(records), inspection.position_keys(image)
    return np.where(records["castling"] == 0, np.minimum(plain, mirrored), plain)


def _gather(
    folder: Path, rows: Sequence[ShardRow], starts: np.ndarray, members: np.ndarray
) -> tuple[Batch, np.ndarray]:
    """The positions with these numbers, in that order, and their COUNT."""
    ordered = np.sort(members)
    batches, counts = [], []
    for row, begin in zip(rows, starts, strict=False):
        mine = ordered[(ordered >= begin) & (ordered < begin + row.count)] - begin
        if len(mine):
            batches.append(Shard(row.path, LAYOUT).gather(mine))
            counts.append(counts_of(folder, row, mine, batches[-1]))
    back = np.searchsorted(ordered, members)
    return select(concat(batches, LAYOUT), back, LAYOUT), np.concatenate(counts)[back]


def _like_first(batch: Batch, first: np.ndarray) -> tuple[Batch, np.ndarray]:
    """The batch with each row turned to look like the first of its group, and which rows (m,) do so."""
    records = batch["records"]

    def same(left: np.ndarray) -> np.ndarray:
        right = left[first]
        boards = (left["pieces"] == right["pieces"]).all(axis=1)
        equal: np.ndarray = (
            boards & (left["castling"] == right["castling"]) & (left["en_passant"] == right["en_passant"])
        )
        return equal

    turn = ~same(records) & (records["castling"] == 0)
    turned = mirror(batch, turn)
    # Compared with the first as it is: a group's first is like itself and was never turned.
    alike = same(turned["records"])
    length = np.diff(batch["policy_offset"])
    return turned, alike & (length == length[first])


# Merging


def merge(batch: Batch, group: np.ndarray, count: np.ndarray) -> tuple[Batch, np.ndarray]:
    """One row for each group (m,) of equal positions, which stand together: that of its first, with the targets of all;
    and its COUNT. count: (m,) COUNT.

    policy and win-draw-loss: means over all entries that have one. Result: that of all that know one, if they agree;
    else unknown, and results stand in for a win-draw-loss that is not known. Repetition and half-move clock: the least.
    """
    first = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
    offset, weight = batch["policy_offset"], batch["policy_weight"].astype(np.float64)
    length = np.diff(offset)
    item_row = np.repeat(np.arange(len(group)), length)
    place = np.arange(len(weight)) - np.repeat(offset[:-1], length) + np.repeat(offset[first[group]], length)
    total = np.bincount(place, weight * count["policies"][item_row], len(weight))
    out = select({**batch, "policy_weight": total}, first, LAYOUT)
    out["policy_weight"] = _whole(out["policy_weight"], out["policy_offset"])
    records, old = out["records"], batch["records"]
    result, known = old["result"].astype(np.int64), old["result"] != UNKNOWN
    least = np.minimum.reduceat(np.where(known, result, 9), first)
    most = np.maximum.reduceat(np.where(known, result, -9), first)
    torn = (least < most) | np.logical_or.reduceat(count["torn"], first)
    records["result"] = np.where((least == most) & ~torn, least, UNKNOWN)
    counted = {name: count[name].astype(np.int64) for name in ("entries", "policies", "values", "waiting")}
    stand_in = np.where(torn[group], counted["waiting"], 0)
    shares = old["wdl"].astype(np.float64) / WDL_SUM * counted["values"][:, None]
    shares += stand_in[:, None] * ((1 - result)[:, None] == np.arange(3))
    sums = np.add.reduceat(shares, first)
    weights = sums.sum(axis=1, keepdims=True)
    valued = weights[:, 0] > 0
    records["wdl"][valued] = wdl_of_shares(sums[valued] / weights[valued])
    for name in ("repetition", "halfmove"):
        records[name] = np.minimum.reduceat(old[name], first)
    counted["values"] += stand_in
    counted["waiting"] -= stand_in
    added = np.zeros(len(first), COUNT)
    added["torn"] = torn
    for name, part in counted.items():
        added[name] = np.minimum(np.add.reduceat(part, first), np.iinfo(np.uint32).max)
    return out, added


def _whole(total: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Sums (K,) of rows `offset` as u2 that sum to 65535 in each row, the greatest gets the rest; 0 stays 0."""
    row = np.repeat(np.arange(len(offset) - 1), np.diff(offset))
    sums = np.bincount(row, total, len(offset) - 1)
    some = np.flatnonzero(total)
    whole = np.zeros(len(total), np.int64)
    whole[some] = np.floor(total[some] / sums[row[some]] * WDL_SUM + 1e-9)
    # Of each row with weight the first of its greatest: sort by row, then falling weight
    order = some[np.lexsort((some, -total[some], row[some]))]
    greatest = order[np.unique(row[order], return_index=True)[1]]
    whole[greatest] += WDL_SUM - np.bincount(row, whole, len(offset) - 1).astype(np.int64)[row[greatest]]
    return whole.astype("<u2")


def plan(folder: Path, rows: Sequence[ShardRow]) -> tuple[int, int, int, int]:
    """Write the shards that are to stand for others, and the plan. Returns positions before and after, those of
    several sources, shards to be replaced."""
    starts = np.cumsum([0, *(row.count for row in rows)])
    # One shard is open at a time: each holds a file, and a folder may have more than a process may open
    members, group = duplicates(Shard(row.path, LAYOUT) for row in rows)
    positions = int(starts[-1])
    if not len(members):
        return positions, positions, 0, 0
    batch, count = _gather(folder, rows, starts, members)
    first = np.flatnonzero(np.append(True, group[1:] != group[:-1]))[group]
    batch, alike = _like_first(batch, first)
    chosen = np.flatnonzero(alike)  # a key of 64 bits may lie, once in a thousand folders
    batch, members, group = select(batch, chosen, LAYOUT), members[chosen], group[chosen]
    merged, added = merge(batch, group, count[chosen])
    firsts = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
    kept, dropped = members[firsts], np.delete(members, firsts)
    if not len(dropped):
        return positions, positions, 0, 0
    sources = batch["records"]["source"].astype(np.int64)
    across = np.maximum.reduceat(sources, firsts) > np.minimum.reduceat(sources, firsts)
    facts = json.dumps([MERGING, [[row.name, row.sha256] for row in rows]])
    digest = hashlib.sha256(facts.encode()).hexdigest()[:8]
    staged = folder / FOLDER / STAGED
    replaced: dict[str, list[str]] = {}
    names = [f"{SUFFIX.sub('', row.name.removesuffix('.npz'))}_m{digest}.npz" for row in rows]
    keeper = np.searchsorted(starts, kept, "right") - 1  # row of each position that is kept
    heirs = keeper[np.delete(group, firsts)]  # ... for each that is dropped
    order = np.argsort(kept)
    for row, name, begin in zip(rows, names, starts, strict=False):
        here = slice(*np.searchsorted(kept[order], (begin, begin + row.count)))
        source = order[here]  # rows of `merged`
        mine = kept[source]
        lost = (dropped >= begin) & (dropped < begin + row.count)
        gone = dropped[lost] - begin
        if not len(gone) and not len(mine):
            continue
        rows_left = np.delete(np.arange(row.count), gone)
        replaced[row.name] = [name] if len(rows_left) else [names[heir] for heir in np.unique(heirs[lost])]
        shard = Shard(row.path, LAYOUT)
        left = shard.gather(rows_left)
        games = np.setdiff1d(shard.arrays["records"]["game"][gone], left["records"]["game"])
        if len(games):
            _save(_beside(folder, GONE, row.name), games)
        if not len(rows_left):
            continue
        at = np.searchsorted(rows_left, mine - begin)
        own = counts_of(folder, row, rows_left, left)
        own[at] = added[source]
        _overwrite(left, at, merged, source)
        meta = {key: shard.meta[key] for key in ("source", "seed", "split", "created")}
        generator = {"merging": MERGING, "of": row.sha256, "generator": shard.meta["generator"]}
        target = staged / f"{name}.new"
        target.parent.mkdir(parents=True, exist_ok=True)
        write_shard(target, LAYOUT, left, {**meta, "generator": generator})
        _save(_beside(folder, COUNTS, name), own)
    text = json.dumps({"replaced": replaced}, sort_keys=True)
    write_atomically(folder / FOLDER / PLAN, text.encode())
    return positions, positions - len(dropped), int(across.sum()), len(replaced)


def _overwrite(batch: Batch, at: np.ndarray, merged: Batch, rows: np.ndarray) -> None:
    """Put rows of `merged` in the place of the rows `at` of a batch; their lists of moves are as long."""
    batch["records"][at] = merged["records"][rows]
    piece = select(merged, rows, LAYOUT)
    length = np.diff(piece["policy_offset"])
    begin = np.repeat(batch["policy_offset"][at] - piece["policy_offset"][:-1], length)
    target = np.arange(len(piece["policy_weight"])) + begin
    batch["policy_weight"][target] = piece["policy_weight"]


def _save(path: Path, array: np.ndarray) -> None:
    """Written whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        np.save(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
