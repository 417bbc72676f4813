"""Merging of duplicate positions of a data set into a new one."""

import json
import os
import shutil
from pathlib import Path
from typing import cast

import numpy as np
from pandas import DataFrame

from matrixlib.data.catalogue import Catalogue
from matrixlib.data.shards import Batch, Shard, concat, ragged_rows, select, write_shard
from matrixlib.files import sync_folder, write_text
from matrixlib.tasks.chess.importers import audit
from matrixlib.tasks.chess.records import LAYOUT, UNKNOWN, WDL_SUM, mirror, position_hashes
from matrixlib.tasks.chess.stockfish.labels import integer_shares, wdl_of_shares

MANIFEST = "merged.json"  # source shards and counts, in the new folder


def deduplicate(folder: Path | str, out: Path | str) -> dict[str, int]:
    """Copy the healthy shards of a folder to `out` with duplicate positions merged, their targets averaged.

    Positions are compared from the side to move, without castling rights also mirrored; duplicates across splits go to
    training. `out` is created atomically and kept if made from the same shards. Returns the numbers of positions, of
    different ones and of those in several sources. Memory: about 40 bytes per position, plus the duplicates.
    ValueError if `out` holds something else, ShardError for a damaged shard.
    """
    folder, out = Path(folder), Path(out)
    rows = sorted(Catalogue(folder, warn=False).shards(), key=lambda row: (row.split != "train", row.name))
    made_of = [[row.name, row.sha256] for row in rows]
    if out.exists():
        facts = json.loads((out / MANIFEST).read_text()) if (out / MANIFEST).is_file() else {}
        if facts.get("made_of") != made_of:
            raise ValueError(f"{out} was not made from the current shards of {folder}: give another, or delete it")
        return dict(facts["counts"])
    # One open shard at a time: there may be more than the limit of open files
    keys = [position_hashes(Shard(row.path, LAYOUT).arrays["records"], mirrored=True) for row in rows]
    shards = np.repeat(np.arange(len(rows)), np.array([row.count for row in rows], np.int64))
    numbers = np.concatenate([np.zeros(0, np.int64), *(np.arange(row.count) for row in rows)])
    table = DataFrame({"key": np.concatenate([np.zeros(0, np.uint64), *keys]), "shard": shards, "row": numbers})
    table = table[table.duplicated("key", keep=False)]
    gathered = [
        Shard(rows[cast(int, shard)].path, LAYOUT).gather(part["row"].to_numpy())
        for shard, part in table.groupby("shard")
    ]
    order = np.argsort(table["key"].to_numpy(), kind="stable")  # by group, in order of the shards
    batch, table = select(concat(gathered, LAYOUT), order, LAYOUT), table.iloc[order]
    group = table["key"].factorize()[0]
    batch, alike = _align_to_first(batch, np.searchsorted(group, group))
    batch, table, group = select(batch, np.flatnonzero(alike), LAYOUT), table[alike], group[alike]
    first = np.unique(group, return_index=True)[1]
    sources = DataFrame({"group": group, "source": batch["records"]["source"]}).groupby("group")["source"].nunique()
    merged, heirs = merge(batch, group), table.iloc[first]
    dropped = np.delete(table[["shard", "row"]].to_numpy(), first, axis=0)
    unfinished = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a killed call
    unfinished.mkdir(parents=True)
    for number, row in enumerate(rows):
        left = np.delete(np.arange(row.count), dropped[dropped[:, 0] == number, 1])
        if not len(left):
            continue
        shard, here = Shard(row.path, LAYOUT), np.flatnonzero(heirs["shard"] == number)
        part = shard.gather(left)
        place = np.searchsorted(left, heirs["row"].to_numpy()[here])
        part["records"][place] = merged["records"][here]
        items, by = (ragged_rows(*it)[0] for it in ((part["policy_offset"], place), (merged["policy_offset"], here)))
        part["policy_weight"][items] = merged["policy_weight"][by]  # same legal moves
        meta = {key: shard.meta[key] for key in ("source", "seed", "split", "created")}
        meta["generator"] = {"merged": row.sha256, "generator": shard.meta["generator"]}
        (unfinished / row.name).parent.mkdir(parents=True, exist_ok=True)
        write_shard(unfinished / row.name, LAYOUT, part, {**meta, "quality": audit.shard_quality(part)})
    before = sum(row.count for row in rows)
    counts = {"positions": before, "different": before - len(dropped), "in several sources": int((sources > 1).sum())}
    write_text(unfinished / MANIFEST, json.dumps({"made_of": made_of, "counts": counts}))
    os.rename(unfinished, out)
    sync_folder(out.parent)
    return counts


def _align_to_first(batch: Batch, first: np.ndarray) -> tuple[Batch, np.ndarray]:
    """Mirror rows to match the first of their group; returns the batch and a mask of matches (hashes may collide)."""
    records = batch["records"]

    def same(left: np.ndarray) -> np.ndarray:
        right = records[first]
        alike: np.ndarray = (left["pieces"] == right["pieces"]).all(axis=1)
        return alike & (left["castling"] == right["castling"]) & (left["en_passant"] == right["en_passant"])

    turned = mirror(batch, ~same(records) & (records["castling"] == 0))
    return turned, same(turned["records"])


def merge(batch: Batch, group: np.ndarray) -> Batch:
    """Merge each group of equal positions into its first row. group: (M,) sorted group numbers.

    Policy and win-draw-loss: means over known ones. Result: kept if all known ones agree; otherwise unknown, and the
    results replace missing win-draw-loss. Repetition and half-move clock: minimum.
    """
    first, offset = np.unique(group, return_index=True)[1], batch["policy_offset"]
    length, own_first = np.diff(offset), np.searchsorted(group, group)
    place = np.arange(len(batch["policy_weight"])) - np.repeat(offset[:-1] - offset[own_first], length)
    total = np.bincount(place, batch["policy_weight"], len(place)).astype(np.int64)
    out = select({**batch, "policy_weight": total}, first, LAYOUT)
    out["policy_weight"] = integer_shares(out["policy_weight"], out["policy_offset"])
    if not len(first):
        return out
    records, old = out["records"], batch["records"]
    result, known = old["result"].astype(np.int64), old["result"] != UNKNOWN
    least = np.minimum.reduceat(np.where(known, result, 9), first)
    most = np.maximum.reduceat(np.where(known, result, -9), first)
    records["result"] = np.where(least == most, least, UNKNOWN)
    shares = old["wdl"].astype(np.int64)
    stands_in = known & ~shares.any(axis=1) & np.repeat(least < most, np.diff([*first, len(group)]))
    shares += WDL_SUM * stands_in[:, None] * ((1 - result)[:, None] == np.arange(3))
    records["wdl"] = wdl_of_shares(np.add.reduceat(shares, first))
    for name in ("repetition", "halfmove"):
        records[name] = np.minimum.reduceat(old[name], first)
    return out
