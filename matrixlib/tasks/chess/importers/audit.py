"""What is checked and measured on chess positions, and an audit of a folder of shards by a sample of each source."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matrixlib.data import stats
from matrixlib.data.account import Account, accounts, quiet_catalogue, replaced_shards
from matrixlib.data.catalogue import NAME, Catalogue, ShardRow
from matrixlib.data.remote import whole
from matrixlib.data.shards import BLOCK, SPLITS, Batch, Shard, ShardError, concat, ragged_rows
from matrixlib.tasks.chess import bitboard
from matrixlib.tasks.chess.importers.notation import classes_of, standing_rights
from matrixlib.tasks.chess.keys import hashes_of, keys_of
from matrixlib.tasks.chess.records import LAYOUT, PIECE_VALUES, UNKNOWN, WDL_SUM, legal_indices, playable

BLOCKS = 64  # blocks of a source that its sample is from: a set of any size is looked at in seconds
MEASURED = 8 * BLOCK  # records of a shard without figures
OPENING = (4, 8)  # plies
MATERIAL = np.array([*PIECE_VALUES, *(-value for value in PIECE_VALUES), 0])  # by class of a square
PHASE = np.array([0, 1, 1, 2, 4, 0] * 2 + [0])  # 24 at the start, 0 where kings and pawns are left
GAP = 1.5  # points between win-draw-loss and result from which on a record is suspicious
AHEAD, LOST = 5, -0.5  # as is one with so many pawns more and so few points
FEW = 8  # shards of a source, below which none is called an outlier
FAR = 6.0  # robust standard deviations
COMPARED = (
    *("policy_mean", "policy_weight_entropy_mean", "policy_weight_entropy_std", "policy_weight_zero"),
    *("men", "ply", "black", "known_result", "known_wdl"),
    *("win", "draw", "loss", "white", "value", "value_gap"),
)

Arrays = dict[str, NDArray[Any]]


# Positions


def faults(batch: Batch) -> dict[str, NDArray[np.bool_]]:
    """What makes positions unfit to be stored: fault -> (n,) bool, for the faults that occur."""
    records = batch["records"]
    total = records["wdl"].sum(axis=1, dtype=np.int64)
    file = bitboard.legal_en_passant(records["pieces"], records["en_passant"])
    standing = standing_rights(records["castling"], records["pieces"])
    masks = {
        "not a position of chess": ~playable(bitboard.bitboards(records["pieces"])),
        "a castling right without king and rook at home": standing != records["castling"],
        "an en-passant file where no capture is legal": file != records["en_passant"],
        "no such result": (records["result"] < -1) | (records["result"] > UNKNOWN),
        "win, draw and loss do not add up": (total != 0) & (total != WDL_SUM),
        "the listed moves are not the legal ones": unlike_legal(batch),
    }
    return {fault: rows for fault, rows in masks.items() if rows.any()}


def faulty(batch: Batch) -> int:
    """Records that no position of chess looks like, or whose list of moves is not that of the rules."""
    return int(np.any([np.zeros(len(batch["records"]), bool), *faults(batch).values()], axis=0).sum())


def unlike_legal(batch: Batch) -> NDArray[np.bool_]:
    """(n,) bool: the listed policy indices are not exactly those of the legal moves, in ascending order."""
    index, offset = legal_indices(batch["records"])
    wrong: NDArray[np.bool_] = np.diff(offset) != np.diff(batch["policy_offset"])
    rows = np.flatnonzero(~wrong)
    legal, bounds = ragged_rows(offset, rows)
    listed, _ = ragged_rows(batch["policy_offset"], rows)
    differs = index[legal] != batch["policy_index"][listed]
    wrong[np.repeat(rows, np.diff(bounds))[differs]] = True
    return wrong


def _points(batch: Batch) -> Arrays:
    """The `columns` that `figures` needs too."""
    records = batch["records"]
    wdl = records["wdl"].astype(np.float64) / WDL_SUM
    result = np.where(records["result"] == UNKNOWN, np.nan, records["result"])
    pieces = records["pieces"]
    return {
        "men": (pieces & 15 != bitboard.EMPTY).sum(1) + (pieces >> 4 != bitboard.EMPTY).sum(1),
        "ply": records["ply"].astype(np.int64),
        "value": np.where(wdl.sum(1) > 0, wdl[:, 0] - wdl[:, 2], np.nan),
        "result": result,
        "white": np.where(records["side"] == 1, -result, result),
    }


def columns(batch: Batch) -> Arrays:
    """Figures (n,) of each position, float, nan where unknown.

    men: pieces on the board. phase: 24 at the start, 0 with kings and pawns alone. balance: material of the side to
    move less the other's, in pawns. moves: legal ones. value: expected points by win-draw-loss, -1 to 1. result: points
    of the side to move; white: White's. entropy: of the policy, nats.
    """
    classes = classes_of(batch["records"]["pieces"])
    entropy, weighted = stats.row_entropy(batch["policy_weight"], batch["policy_offset"])
    return _points(batch) | {
        "phase": PHASE[classes].sum(1),
        "balance": MATERIAL[classes].sum(1),
        "moves": np.diff(batch["policy_offset"]),
        "entropy": np.where(weighted, entropy, np.nan),
    }


def figures(batch: Batch) -> stats.Figures:
    """The quality figures of a shard: those of `data.stats`, and what is particular to chess.

    men: pieces on the board. ply: half moves since the start. black: share with Black to move. known_result and
    known_wdl: shares; win, draw, loss: of the known results, for the side to move; white: White's mean points (-1 to
    1). value: mean expected points by win-draw-loss; value_gap: mean distance from the result, where both are known
    (0 to 2). The weight on legal moves needs no figure: `faults` lets no other move pass.
    """
    records, points = batch["records"], _points(batch)
    value, result = points["value"], points["result"]
    known, valued = ~np.isnan(result), ~np.isnan(value)
    out = {
        "men": points["men"].mean(),
        "ply": records["ply"].mean(),
        "black": records["side"].mean(),
        "known_result": known.mean(),
        "known_wdl": valued.mean(),
    }
    if known.any():
        thirds = (("win", 1), ("draw", 0), ("loss", -1))
        out |= {name: (result[known] == third).mean() for name, third in thirds}
        out["white"] = points["white"][known].mean()
    if valued.any():
        out["value"] = value[valued].mean()
    if (known & valued).any():
        out["value_gap"] = np.abs(value - result)[known & valued].mean()
    general = stats.figures(batch, LAYOUT, keys=hashes_of(records), weight="policy_weight")
    return general | {name: float(number) for name, number in out.items()}


# Shards beside those of their kind


def distances(
    rows: Iterable[ShardRow], quality: Mapping[str, Mapping[str, Any]], names: Iterable[str]
) -> dict[str, dict[str, float]]:
    """name -> figure -> robust z among the figures `quality` (by name) of the other healthy shards of its source and
    split, where those are 8 at least.

    z = (figure - median) / scale, scale = 1.4826 times the median absolute deviation, at least 2 % of the median and
    0.01 (entropies in nats, shares, points).
    """
    kin = {row.name: (row.source, row.split) for row in rows if row.state == "healthy" and row.name in quality}
    out: dict[str, dict[str, float]] = {}
    for name in (name for name in names if name in kin):
        own = quality[name]
        others = [quality[other] for other in kin if other != name and kin[other] == kin[name]]
        for figure in COMPARED:
            values = np.array([it[figure] for it in others if figure in it], np.float64)
            if figure in own and len(values) >= FEW:
                out.setdefault(name, {})[figure] = stats.robust_z(own[figure], values)
    return out


def mark_outliers(catalogue: Catalogue, names: Sequence[str]) -> list[str]:
    """Put what is far off in the figures of these shards into the catalogue beside them ("outliers": figure -> robust
    z). Returns it in words."""
    rows = catalogue.shards()
    quality = {row.name: row.quality for row in rows if row.quality}
    lines = []
    for name, compared in distances(rows, quality, names).items():
        if far := {figure: round(z, 1) for figure, z in compared.items() if abs(z) > FAR}:
            catalogue.set_quality(name, {**quality[name], "outliers": far})
            lines.append(f"{name}: " + ", ".join(f"{figure} (z {z:+.1f})" for figure, z in far.items()))
    return lines


# A folder


@dataclass(frozen=True)
class Suspect:
    """A record of the sample (its number there) that may be wrong, and why."""

    record: int
    reason: str


@dataclass(frozen=True)
class Audit:
    """A folder of shards and a sample of it.

    rows: every shard but those that were merged into others. merged: the names of these. games: ids of the games of
    each healthy one. batch: the sample, at most as many records of each source as were requested; `shard` and `row`
    (n,) say where each is. openings: records of plies 4 to 8 of all blocks that were read. damage: blocks that could
    not be read. remarks: what the catalogue repaired.
    """

    folder: Path
    rows: Sequence[ShardRow]
    merged: frozenset[str]
    games: Mapping[str, NDArray[np.uint64]]
    batch: Batch
    shard: NDArray[np.int64]
    row: NDArray[np.int64]
    openings: NDArray[np.void]
    damage: Sequence[str]
    accounts: Sequence[Account]
    remarks: Sequence[str]

    @property
    def healthy(self) -> list[ShardRow]:
        return [row for row in self.rows if row.state == "healthy"]

    @property
    def excluded(self) -> list[ShardRow]:
        """Shards in quarantine."""
        return [row for row in self.rows if row.state != "healthy"]

    def sources(self) -> NDArray[np.str_]:
        """(n,) source of each record of the sample."""
        return np.array([row.source for row in self.rows])[self.shard]

    def suspects(self) -> dict[str, list[Suspect]]:
        return suspects(self.batch)

    def distances(self) -> dict[str, dict[str, float]]:
        """`distances` of all healthy shards. The figures are those of the import; shards that were not imported are
        measured here, the first 64 of them and of each the first 32,768 records."""
        quality = {row.name: row.quality for row in self.healthy if row.quality}
        for row in [row for row in self.healthy if not row.quality][:BLOCKS]:
            with contextlib.suppress(ShardError):  # `damage` has it
                quality[row.name] = figures(Shard(whole(row), LAYOUT).gather(np.arange(min(row.count, MEASURED))))
        return distances(self.rows, quality, quality)

    def account_faults(self) -> list[str]:
        """Accounts that do not add up, or whose shards are not those of the catalogue; [] where all is well."""
        rows = {row.name: row for row in self.rows}
        lines = []
        for account in self.accounts:
            where = f"{account.file}, step {account.step}"
            counted = account.stored + len(account.refused) + sum(account.skipped.values())
            if counted != account.entries:
                lines.append(f"{where}: {account.entries} entries, {counted} accounted for")
            own = {name: sha256 for name, sha256 in account.shards.items() if name not in self.merged}
            if lost := [name for name, sha in own.items() if name not in rows or rows[name].sha256 != sha]:
                lines.append(f"{where}: {', '.join(lost)} not as written")
            elif len(own) == len(account.shards) and (
                sum(rows[name].count for name in own) != sum(account.positions.values())
            ):
                lines.append(f"{where}: its shards hold other numbers of positions than it says")
        return lines

    def different_openings(self) -> int:
        """Different positions among `openings`."""
        return len(np.unique(hashes_of(self.openings)))

    def shared_games(self) -> int:
        """Games of which positions are in both splits."""
        sides: dict[str, list[NDArray[np.uint64]]] = {split: [np.zeros(0, np.uint64)] for split in SPLITS}
        for row in self.healthy:
            sides[row.split].append(self.games.get(row.name, sides[row.split][0]))
        train, held_out = (np.unique(np.concatenate(ids)) for ids in sides.values())
        return len(np.intersect1d(train, held_out))

    def duplicates(self) -> tuple[int, int]:
        """Records of the sample whose position (mirror images count as equal) came before; positions in both splits."""
        sides: dict[str, set[bytes]] = {split: set() for split in SPLITS}
        for key, at in zip(keys_of(self.batch["records"]), self.shard, strict=True):
            sides[self.rows[at].split].add(key)
        train, held_out = sides.values()
        return len(self.shard) - len(train | held_out), len(train & held_out)

    def damaged(self) -> list[str]:
        """What of the healthy shards is not as it was written; reads every byte of them."""
        broken = Catalogue(self.folder).verify(whole)
        return [*(f"{name}: {problem}" for name, problem in broken.items()), *self.damage]


def audit_folder(folder: Path | str, sample: int = 4000, seed: int = 0) -> Audit:
    """Look at a folder of shards, reading at most `sample` records of each source, from at most 64 blocks of it.

    ValueError for a folder without a healthy shard, and for a sample of nothing.
    """
    if sample < 1:
        raise ValueError(f"sample is {sample}; give the number of records of each source to look at, from 1")
    if seed < 0:
        raise ValueError(f"seed is {seed}; give a whole number from 0")
    folder = Path(folder)
    known = (folder / NAME).is_file()
    catalogue = quiet_catalogue(folder)
    every = catalogue.shards(state=None)
    merged = replaced_shards(every, LAYOUT)
    rows = [row for row in every if row.name not in merged]
    healthy = [row for row in rows if row.state == "healthy"]
    steps = accounts(folder)
    if not healthy:
        reasons = [f"{row.name}: {row.reason}" for row in rows]
        reasons += {entry.reason for account in steps for entry in account.refused}
        raise ValueError(f"{folder} holds no healthy shard; {'; '.join(reasons[:3]) or 'import something first'}")
    rng = np.random.default_rng(seed)
    batches, shards, numbers, openings, damage, games = [], [], [], [], [], {}
    for source in sorted({row.source for row in healthy}):
        for at, block, inside in _sampled_blocks(rows, source, sample, rng):
            try:
                shard = Shard(whole(rows[at]), LAYOUT)
                shard.verify_block(block)
                batches.append(shard.gather(inside))
            except ShardError as error:
                damage.append(str(error))
                continue
            shards.append(np.full(len(inside), at))
            numbers.append(inside)
            records = shard.arrays["records"][block * BLOCK : (block + 1) * BLOCK]
            openings.append(records[(records["ply"] >= OPENING[0]) & (records["ply"] <= OPENING[1])])
    for row in healthy:
        try:
            games[row.name] = np.unique(Shard(whole(row), LAYOUT).arrays["records"]["game"])
        except ShardError as error:
            damage.append(str(error))
    if not batches:
        raise ValueError(f"{folder}: nothing could be read: {damage[0]}")
    return Audit(
        folder,
        rows,
        frozenset(merged),
        games,
        concat(batches, LAYOUT),
        np.concatenate(shards),
        np.concatenate(numbers),
        np.concatenate(openings),
        list(dict.fromkeys(damage)),
        steps,
        catalogue.messages if known else [],  # a catalogue that is made the first time is no repair
    )


def _sampled_blocks(
    rows: Sequence[ShardRow], source: str, sample: int, rng: np.random.Generator
) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """(place of a shard, block, records of it) for a random sample of a source, in order."""
    blocks = [
        (at, block)
        for at, row in enumerate(rows)
        if row.state == "healthy" and row.source == source
        for block in range(-(-row.count // BLOCK))
    ]
    picked = [blocks[k] for k in np.sort(rng.permutation(len(blocks))[:BLOCKS])]
    ends = np.cumsum([min(BLOCK, rows[at].count - block * BLOCK) for at, block in picked])
    records = np.sort(rng.permutation(ends[-1])[:sample])
    parts = np.split(records, np.searchsorted(records, ends[:-1]))
    for (at, block), inside, start in zip(picked, parts, [0, *ends[:-1]], strict=True):
        yield at, block, inside - start + block * BLOCK


def suspects(batch: Batch) -> dict[str, list[Suspect]]:
    """Kind of doubt -> records, the most doubtful first.

    Faults of a position; win-draw-loss at least 1.5 points from the game's result; 5 pawns ahead with a value (the
    result where there is none) of -0.5 or less, or the other way round; no weight on any move, where most have some.
    """
    known = columns(batch)
    value, result, balance = known["value"], known["result"], known["balance"]
    out = {fault: [Suspect(int(row), fault) for row in np.flatnonzero(mask)] for fault, mask in faults(batch).items()}
    gap = np.nan_to_num(np.abs(value - result))
    out["value against result"] = [
        Suspect(row, f"win-draw-loss gives {value[row]:+.2f} points, the game gave {result[row]:+.0f}")
        for row in _greatest(gap, gap >= GAP)
    ]
    points = np.where(np.isnan(value), result, value)
    against = np.nan_to_num(-points * np.sign(balance))
    out["material against value"] = [
        Suspect(
            row, f"material {balance[row]:+d} pawns, {'result' if np.isnan(value[row]) else 'value'} {points[row]:+.2f}"
        )
        for row in _greatest(against * np.abs(balance), (np.abs(balance) >= AHEAD) & (against >= -LOST))
    ]
    bare = np.isnan(known["entropy"])
    if bare.mean() < 0.5:
        out["no weight on any move"] = [
            Suspect(int(row), "no legal move has weight in the policy") for row in np.flatnonzero(bare)
        ]
    return {kind: records for kind, records in out.items() if records}


def _greatest(score: NDArray[Any], where: NDArray[np.bool_]) -> list[int]:
    rows = np.flatnonzero(where)
    return rows[np.argsort(-score[rows], kind="stable")].tolist()
