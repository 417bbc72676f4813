"""Positions that a folder of shards holds more than once, merged into one: their counts added, their targets averaged.

Equal are positions as `keys.keys_of` says: as the side to move sees them, and where no castling right is left also with
the left-right mirror image. How many entries a position stands for (`COUNT`) is no field of the record, because nothing
that trains or searches asks for it: it lies beside the shard, in `<shard>.counts.npy`, so that merging in several goes
gives what merging at once gives.

All shards that change are written anew into a subfolder, which gets its name, `merged_<hash>`, when it is whole: in
that moment, and not before, the new shards are in use. They say in their meta data which ones they replace; whoever
opens the catalogue next puts those aside, as `.npz.merged` files. The ids of games that a shard lost all positions of
lie in `imports/gone/<shard>.npy`, so that such a game is not imported again.
"""

import hashlib
import io
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from matrixlib.data.account import FOLDER, MERGED, accounts, locked, quiet_catalogue
from matrixlib.data.catalogue import ShardRow
from matrixlib.data.imports import LOST_GAMES
from matrixlib.data.shards import Batch, Shard, concat, ragged_rows, read_npy, select, write_shard
from matrixlib.files import sync_folder, write_bytes
from matrixlib.tasks.chess.importers import audit
from matrixlib.tasks.chess.keys import hashes_of
from matrixlib.tasks.chess.records import LAYOUT, UNKNOWN, WDL_SUM, mirror
from matrixlib.tasks.chess.scores import wdl_of_shares, whole_shares

VERSION = 3  # of what decides about names and bytes
UNFINISHED = "merged.tmp"
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
PREFIX = re.compile(rf"\A({MERGED}[0-9a-f]{{8}}/)+")


@dataclass(frozen=True)
class MergeReport:
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


def deduplicate(folder: Path | str) -> MergeReport:
    """Merge what the healthy shards of a folder hold more than once.

    A position of both splits goes to training, so that validation has none that is trained on. Memory: some 40 bytes
    for each position, and those that are there more than once. Raises ValueError where an import is unfinished,
    DamagedBlock for a damaged shard (quarantine it first), ImportStopped while another process writes the folder.
    """
    folder, start = Path(folder), time.monotonic()
    with locked(folder) as catalogue:
        rows = sorted(catalogue.shards(), key=lambda row: (row.split != "train", row.name))
        _check_imports(folder, rows)
        before = sum(row.count for row in rows)
        merged = _find(folder, rows)
        if merged is None:
            return MergeReport(before, before, 0, 0, time.monotonic() - start)
        shutil.rmtree(folder / UNFINISHED, ignore_errors=True)  # of a call that was killed
        replaced = _write(folder, rows, merged)
        older = sorted(path.name for path in folder.glob(f"{MERGED}*"))
        facts = json.dumps([VERSION, [[row.name, row.sha256] for row in rows], older])
        digest = hashlib.sha256(facts.encode()).hexdigest()[:8]
        os.rename(folder / UNFINISHED, folder / f"{MERGED}{digest}")
        sync_folder(folder)
        quiet_catalogue(folder)
    left = before - len(merged.dropped)
    return MergeReport(before, left, merged.across, replaced, time.monotonic() - start)


def _check_imports(folder: Path, rows: Sequence[ShardRow]) -> None:
    accounted = {name for account in accounts(folder) for name in account.shards}
    for row in rows:
        if IMPORTED.fullmatch(row.name) and row.name not in accounted:
            raise ValueError(f"{row.path} is of an import that was not finished: call import_files again first")


# Counts


def counts_of(row: ShardRow, rows: np.ndarray, batch: Batch) -> np.ndarray:
    """(n,) COUNT of the positions `rows` (n,) of a shard, which are `batch`. ValueError where its file does not fit."""
    path = _counts_file(row.path)
    if not path.is_file():
        return single_counts(batch)
    try:
        counts = read_npy(path.read_bytes())
    except ValueError:
        counts = np.zeros(0)
    if counts.dtype != COUNT or len(counts) != row.count:
        raise ValueError(f"{path} does not fit the {row.count} positions of its shard: delete it, and each counts once")
    return counts[rows]


def single_counts(batch: Batch) -> np.ndarray:
    """(n,) COUNT of positions that were never merged."""
    records = batch["records"]
    valued, known = records["wdl"].any(axis=1), records["result"] != UNKNOWN
    weight = np.append(0, np.cumsum(batch["policy_weight"], dtype=np.int64))
    counts = np.zeros(len(records), COUNT)
    counts["entries"], counts["policies"] = 1, np.diff(weight[batch["policy_offset"]]) > 0
    counts["values"], counts["waiting"] = valued, known & ~valued
    return counts


def _counts_file(shard: Path) -> Path:
    return shard.with_suffix(".counts.npy")


def _save(path: Path, array: np.ndarray) -> None:
    data = io.BytesIO()
    np.save(data, array, allow_pickle=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, data.getvalue())


# What is there more than once


@dataclass(frozen=True)
class _Merge:
    """Positions by number through all shards. remaining: ascending, with the merged `batch` and `counts`. dropped:
    those that are merged into others, ascending; heirs: into which ones. across: how many came from several sources."""

    remaining: np.ndarray
    batch: Batch
    counts: np.ndarray
    dropped: np.ndarray
    heirs: np.ndarray
    across: int


def _starts(rows: Sequence[ShardRow]) -> np.ndarray:
    """(shards + 1,) number of each shard's first position."""
    return np.cumsum([0, *(row.count for row in rows)])


def _firsts(group: np.ndarray) -> np.ndarray:
    """Where each group of a sorted array (m,) begins."""
    return np.flatnonzero(np.append(True, group[1:] != group[:-1])[: len(group)])


def _find(folder: Path, rows: Sequence[ShardRow]) -> _Merge | None:
    """What is there more than once, merged; None where nothing is."""
    # One shard is open at a time: each holds a file, and a folder may have more than a process may open
    members, group = _groups(Shard(row.path, LAYOUT) for row in rows)
    if not len(members):
        return None
    batch, counts = _gather(folder, rows, members)
    batch, alike = _like_first(batch, _firsts(group)[group])
    same = np.flatnonzero(alike)  # a hash of 64 bits may be shared, once in a thousand folders
    batch, members, group = select(batch, same, LAYOUT), members[same], group[same]
    firsts = _firsts(group)
    remaining, dropped = members[firsts], np.delete(members, firsts)
    if not len(dropped):
        return None
    sources = batch["records"]["source"].astype(np.int64)
    across = np.maximum.reduceat(sources, firsts) > np.minimum.reduceat(sources, firsts)
    into = np.repeat(remaining, np.diff([*firsts, len(members)]))
    merged, added = merge(batch, group, counts[same])
    order, falling = np.argsort(remaining), np.argsort(dropped)
    return _Merge(
        remaining[order],
        select(merged, order, LAYOUT),
        added[order],
        dropped[falling],
        np.delete(into, firsts)[falling],
        int(across.sum()),
    )


def _groups(shards: Iterable[Shard]) -> tuple[np.ndarray, np.ndarray]:
    """(members (m,), group (m,)): numbers, through all shards, of the positions that seem to be there more than once,
    group by group, the first of a group first."""
    hashes = (hashes_of(shard.arrays["records"], mirrored=True) for shard in shards)
    keys = np.concatenate([np.zeros(0, np.uint64), *hashes])
    order = np.argsort(keys, kind="stable")
    _, group, sizes = np.unique(keys[order], return_inverse=True, return_counts=True)
    several = sizes[group] > 1
    return order[several], np.unique(group[several], return_inverse=True)[1]


def _gather(folder: Path, rows: Sequence[ShardRow], members: np.ndarray) -> tuple[Batch, np.ndarray]:
    """The positions with these numbers, in that order, and their COUNT."""
    ordered = np.sort(members)
    starts = _starts(rows)
    batches, counts = [], []
    for row, begin, mine in zip(rows, starts, _by_shard(ordered, starts), strict=False):
        if len(mine):
            batches.append(Shard(row.path, LAYOUT).gather(mine - begin))
            counts.append(counts_of(row, mine - begin, batches[-1]))
    back = np.searchsorted(ordered, members)
    return select(concat(batches, LAYOUT), back, LAYOUT), np.concatenate(counts)[back]


def _by_shard(numbers: np.ndarray, starts: np.ndarray) -> list[np.ndarray]:
    """Ascending numbers of positions, shard by shard."""
    return np.split(numbers, np.searchsorted(numbers, starts[1:-1]))


def _like_first(batch: Batch, first: np.ndarray) -> tuple[Batch, np.ndarray]:
    """The batch with each row turned to look like the first of its group, and which rows (m,) do so."""
    records = batch["records"]

    def same(left: np.ndarray) -> np.ndarray:
        right = records[first]
        alike: np.ndarray = (left["pieces"] == right["pieces"]).all(axis=1)
        return alike & (left["castling"] == right["castling"]) & (left["en_passant"] == right["en_passant"])

    turned = mirror(batch, ~same(records) & (records["castling"] == 0))
    length = np.diff(batch["policy_offset"])
    return turned, same(turned["records"]) & (length == length[first])


def merge(batch: Batch, group: np.ndarray, count: np.ndarray) -> tuple[Batch, np.ndarray]:
    """One row for each group (m,) of equal positions, which stand together: that of its first, with the targets of all;
    and its COUNT. count: (m,) COUNT.

    policy and win-draw-loss: means over all entries that have one. Result: that of all that know one, if they agree;
    else unknown, and results stand in for a win-draw-loss that is not known. Repetition and half-move clock: the least.
    """
    first = _firsts(group)
    offset, weight = batch["policy_offset"], batch["policy_weight"].astype(np.float64)
    length = np.diff(offset)
    item_row = np.repeat(np.arange(len(group)), length)
    own_first = np.repeat(first, np.diff([*first, len(group)]))
    place = np.arange(len(weight)) - np.repeat(offset[:-1] - offset[own_first], length)
    total = np.bincount(place, weight * count["policies"][item_row], len(weight))
    out = select({**batch, "policy_weight": total}, first, LAYOUT)
    out["policy_weight"] = whole_shares(out["policy_weight"], out["policy_offset"])
    records, old = out["records"], batch["records"]
    result, known = old["result"].astype(np.int64), old["result"] != UNKNOWN
    least = np.minimum.reduceat(np.where(known, result, 9), first)
    most = np.maximum.reduceat(np.where(known, result, -9), first)
    torn = (least < most) | np.logical_or.reduceat(count["torn"], first)
    records["result"] = np.where((least == most) & ~torn, least, UNKNOWN)
    counted = {name: count[name].astype(np.int64) for name in ("entries", "policies", "values", "waiting")}
    stand_in = np.where(np.repeat(torn, np.diff([*first, len(group)])), counted["waiting"], 0)
    shares = old["wdl"].astype(np.float64) / WDL_SUM * counted["values"][:, None]
    shares += stand_in[:, None] * ((1 - result)[:, None] == np.arange(3))
    sums = np.add.reduceat(shares, first)
    valued = sums.sum(axis=1) > 0
    records["wdl"][valued] = wdl_of_shares(sums[valued])
    for name in ("repetition", "halfmove"):
        records[name] = np.minimum.reduceat(old[name], first)
    counted["values"] += stand_in
    counted["waiting"] -= stand_in
    added = np.zeros(len(first), COUNT)
    added["torn"] = torn
    for name, part in counted.items():
        added[name] = np.minimum(np.add.reduceat(part, first), np.iinfo(np.uint32).max)
    return out, added


# Writing


def _write(folder: Path, rows: Sequence[ShardRow], merged: _Merge) -> int:
    """Write the shards that change anew into the unfinished subfolder, with what they replace. Returns how many are
    replaced."""
    starts = _starts(rows)
    remaining, dropped = _by_shard(merged.remaining, starts), _by_shard(merged.dropped, starts)
    heirs = np.searchsorted(starts, merged.heirs, "right") - 1  # the shard of each
    heirs_of = np.split(heirs, np.searchsorted(merged.dropped, starts[1:-1]))
    replaces: dict[int, set[str]] = {i: set() for i in range(len(rows))}
    changed = [i for i in range(len(rows)) if len(remaining[i]) or len(dropped[i])]
    for i in changed:
        older = Shard(rows[i].path, LAYOUT).meta.get("replaces", [])
        empty = len(dropped[i]) == rows[i].count
        for heir in np.unique(heirs_of[i]) if empty else [i]:
            replaces[int(heir)].update([rows[i].name, *older])
    names = [PREFIX.sub("", row.name) for row in rows]
    times = Counter(names)
    for i in changed:
        name = names[i] if times[names[i]] == 1 else rows[i].name
        at = np.searchsorted(merged.remaining, remaining[i])
        left = np.delete(np.arange(rows[i].count), dropped[i] - starts[i])
        shard = Shard(rows[i].path, LAYOUT)
        batch = shard.gather(left)
        _save_lost_games(folder, rows[i], np.setdiff1d(shard.arrays["records"]["game"], batch["records"]["game"]))
        if not len(left):
            continue
        counts = counts_of(rows[i], left, batch)
        place = np.searchsorted(left, remaining[i] - starts[i])
        counts[place] = merged.counts[at]
        _overwrite(batch, place, select(merged.batch, at, LAYOUT))
        meta = {key: shard.meta[key] for key in ("source", "seed", "split", "created")}
        meta["generator"] = {"merging": VERSION, "of": rows[i].sha256, "generator": shard.meta["generator"]}
        more = {"replaces": sorted(replaces[i]), "quality": audit.figures(batch)}
        target = folder / UNFINISHED / name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_shard(target, LAYOUT, batch, {**meta, **more})
        _save(_counts_file(target), counts)
    return len(changed)


def _overwrite(batch: Batch, rows: np.ndarray, merged: Batch) -> None:
    """Put what was merged in the place of the rows (m,) of a batch; their lists of moves are as long."""
    batch["records"][rows] = merged["records"]
    items, _ = ragged_rows(batch["policy_offset"], rows)
    batch["policy_weight"][items] = merged["policy_weight"]


def _save_lost_games(folder: Path, row: ShardRow, games: np.ndarray) -> None:
    """Remember the games (m,) that a shard has no position of any more, so that they are not imported again."""
    if len(games):
        _save(folder / FOLDER / LOST_GAMES / Path(row.name).with_suffix(".npy"), games)
