"""What a folder of shards holds, by a sample of each source, and what in it looks wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matrixlib.data import stats as quality
from matrixlib.data.catalogue import NAME, Catalogue, ShardRow
from matrixlib.data.shards import BLOCK, SPLITS, Batch, Shard, ShardError, concat
from matrixlib.tasks.chess.importers import import_files as intake
from matrixlib.tasks.chess.importers import inspection
from matrixlib.tasks.chess.importers.notation import classes_of
from matrixlib.tasks.chess.records import LAYOUT, UNKNOWN, WDL_SUM
from matrixlib.tasks.chess.stockfish.packing import keys_of

BLOCKS = 64  # blocks of a source that its sample is from: a set of any size is looked at in seconds
MEASURED = 8 * BLOCK  # records of a shard without figures
OPENING = (4, 8)  # plies
PAWNS = np.array([1, 3, 3, 5, 9, 0, -1, -3, -3, -5, -9, 0, 0])  # what the classes of a square are worth
PHASE = np.array([0, 1, 1, 2, 4, 0] * 2 + [0])  # 24 at the start, 0 where kings and pawns are left
ENDGAME = 8  # phase up to which a position counts as an endgame
GAP = 1.5  # points between win-draw-loss and result from which on a record is suspicious
AHEAD, LOST = 5, -0.5  # as is one with so many pawns more and so few points
SHOWN = 3  # examples of each kind


@dataclass(frozen=True)
class Census:
    """A folder of shards that was looked at.

    rows: every shard, kept out or not. games: ids of the games of each healthy one. batch: the sample, at most as many
    records of each source as were asked for; `shard` and `row` (n,) say where each is. openings: records of plies 4 to
    8 of all blocks that were read. damaged: blocks that could not be read. remarks: what the catalogue repaired.
    """

    folder: Path
    rows: Sequence[ShardRow]
    games: Mapping[str, NDArray[np.uint64]]
    batch: Batch
    shard: NDArray[np.int64]
    row: NDArray[np.int64]
    openings: NDArray[np.void]
    damaged: Sequence[str]
    accounts: Sequence[intake.Account]
    remarks: Sequence[str]

    @property
    def healthy(self) -> list[ShardRow]:
        return [row for row in self.rows if row.state == "healthy"]

    @property
    def kept_out(self) -> list[ShardRow]:
        """Shards in quarantine; those that were merged into others are none, see merging.py."""
        return [
            row for row in self.rows if row.state != "healthy" and not row.reason.startswith(intake.MERGED)
        ]

    def sources(self) -> NDArray[np.str_]:
        """(n,) source of each record of the sample."""
        return np.array([row.source for row in self.rows])[self.shard]


@dataclass(frozen=True)
class Suspect:
    """A record of the sample (its number there) that may be wrong, and why."""

    record: int
    why: str


def look(folder: Path | str, sample: int = 4000, seed: int = 0) -> Census:
    """Look at a folder of shards, reading at most `sample` records of each source, from at most 64 blocks of it.

    ValueError for a folder without a healthy shard.
    """
    known = (Path(folder) / NAME).is_file()
    catalogue = intake.quiet_catalogue(Path(folder))
    rows = catalogue.shards(state=None)
    healthy = [row for row in rows if row.state == "healthy"]
    accounts = intake.accounts(folder)
    if not healthy:
        out = [f"{row.name}: {row.reason}" for row in rows]
        out += {entry.reason for account in accounts for entry in account.refused}
        raise ValueError(
            f"{folder} holds no healthy shard; {'; '.join(out[:SHOWN]) or 'import something first'}"
        )
    rng = np.random.default_rng(seed)
    batches, shards, numbers, openings, damaged, games = [], [], [], [], [], {}
    for source in sorted({row.source for row in healthy}):
        for at, block, inside in _chosen(rows, source, sample, rng):
            try:
                shard = Shard(rows[at].path, LAYOUT)
                shard.verify_block(block)
                batches.append(shard.gather(inside))
            except ShardError as error:
                damaged.append(str(error))
                continue
            shards.append(np.full(len(inside), at))
            numbers.append(inside)
            read = shard.arrays["records"][block * BLOCK : (block + 1) * BLOCK]
            openings.append(read[(read["ply"] >= OPENING[0]) & (read["ply"] <= OPENING[1])])
    for row in healthy:
        try:
            games[row.name] = np.unique(Shard(row.path, LAYOUT).arrays["records"]["game"])
        except ShardError as error:
            damaged.append(str(error))
    if not batches:
        raise ValueError(f"{folder}: nothing could be read: {damaged[0]}")
    return Census(
        Path(folder),
        rows,
        games,
        concat(batches, LAYOUT),
        np.concatenate(shards),
        np.concatenate(numbers),
        np.concatenate(openings),
        list(dict.fromkeys(damaged)),
        accounts,
        catalogue.messages if known else [],  # a catalogue that is made the first time is no repair
    )


def _chosen(
    rows: Sequence[ShardRow], source: str, sample: int, rng: np.random.Generator
) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """(place of a shard, block, records of it) for a random sample of a source, in order."""
    blocks = [
        (at, block)
        for at, row in enumerate(rows)
        if row.state == "healthy" and row.source == source
        for block in range(-(-row.count // BLOCK))
    ]
    kept = [blocks[k] for k in np.sort(rng.permutation(len(blocks))[:BLOCKS])]
    ends = np.cumsum([min(BLOCK, rows[at].count - block * BLOCK) for at, block in kept])
    chosen = np.sort(rng.permutation(ends[-1])[:sample])
    parts = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
    for (at, block), inside, start in zip(kept, parts, [0, *ends[:-1]], strict=True):
        yield at, block, inside - start + block * BLOCK


def columns(batch: Batch) -> dict[str, NDArray[Any]]:
    """Figures (n,) of each position, float, nan where unknown.

    men: pieces on the board. phase: 24 at the start, 0 with kings and pawns alone. balance: material of the side to
    move less the other's, in pawns. moves: legal ones. value: expected points by win-draw-loss, -1 to 1. result: points
    of the side to move; white: White's. entropy: of the policy, nats.
    """
    records = batch["records"]
    classes = classes_of(records["pieces"])
    wdl = records["wdl"].astype(np.float64) / WDL_SUM
    result = np.where(records["result"] == UNKNOWN, np.nan, records["result"])
    entropy, weighted = quality.row_entropy(batch["policy_weight"], batch["policy_offset"])
    return {
        "men": (classes != len(PAWNS) - 1).sum(1),
        "phase": PHASE[classes].sum(1),
        "ply": records["ply"].astype(np.int64),
        "balance": PAWNS[classes].sum(1),
        "moves": np.diff(batch["policy_offset"]),
        "value": np.where(wdl.sum(1) > 0, wdl[:, 0] - wdl[:, 2], np.nan),
        "result": result,
        "white": np.where(records["side"] == 1, -result, result),
        "entropy": np.where(weighted, entropy, np.nan),
    }


def suspects(batch: Batch) -> dict[str, list[Suspect]]:
    """Kind of doubt -> records, the most doubtful first.

    Faults of a position; win-draw-loss at least 1.5 points from the game's result; 5 pawns ahead with a value (the
    result where there is none) of -0.5 or less, or the other way round; no weight on any move, where most have some.
    """
    found = columns(batch)
    value, result, balance = found["value"], found["result"], found["balance"]
    out = {
        fault: [Suspect(int(row), fault) for row in np.flatnonzero(mask)]
        for fault, mask in inspection.faults(batch).items()
    }
    gap = np.nan_to_num(np.abs(value - result))
    out["value against result"] = [
        Suspect(row, f"win-draw-loss gives {value[row]:+.2f} points, the game gave {result[row]:+.0f}")
        for row in _worst(gap, gap >= GAP)
    ]
    points = np.where(np.isnan(value), result, value)
    against = np.nan_to_num(-points * np.sign(balance))
    out["material against value"] = [
        Suspect(
            row,
            f"material {balance[row]:+d} pawns, {'value' if value[row] == value[row] else 'result'} "
            f"{points[row]:+.2f}",
        )
        for row in _worst(against * np.abs(balance), (np.abs(balance) >= AHEAD) & (against >= -LOST))
    ]
    bare = np.isnan(found["entropy"])
    if bare.mean() < 0.5:
        out["no weight on any move"] = [
            Suspect(int(row), "no legal move has weight in the policy") for row in np.flatnonzero(bare)
        ]
    return {kind: records for kind, records in out.items() if records}


def _worst(score: NDArray[Any], where: NDArray[np.bool_]) -> list[int]:
    rows = np.flatnonzero(where)
    return rows[np.argsort(-score[rows], kind="stable")].tolist()


def distances(found: Census) -> dict[str, dict[str, float]]:
    """Healthy shard -> figure -> robust z among the shards of its source and split, where those are 8 others at least.

    The figures are those of the import; shards that were not imported are measured here, the first 64 of them and of
    each the first 32,768 records.
    """
    figures = {row.name: row.quality for row in found.healthy if row.quality}
    for row in [row for row in found.healthy if not row.quality][:BLOCKS]:
        with contextlib.suppress(ShardError):  # `look` has said it
            begin = np.arange(min(row.count, MEASURED))
            figures[row.name] = intake.figures(Shard(row.path, LAYOUT).gather(begin))
    kin = {row.name: (row.source, row.split) for row in found.rows}
    out: dict[str, dict[str, float]] = {}
    for name, own in figures.items():
        others = [it for other, it in figures.items() if other != name and kin[other] == kin[name]]
        for figure in intake.COMPARED:
            values = np.array([it[figure] for it in others if figure in it], np.float64)
            if figure in own and len(values) >= intake.FEW:
                out.setdefault(name, {})[figure] = quality.robust_z(own[figure], values)
    return out


def account_faults(found: Census) -> list[str]:
    """Accounts that do not add up, or whose shards are not those of the catalogue; [] where all is well."""
    rows = {row.name: row for row in found.rows}
    said = []
    for account in found.accounts:
        where = f"{account.file}, step {account.step}"
        counted = account.stored + len(account.refused) + sum(account.skipped.values())
        if counted != account.entries:
            said.append(f"{where}: {account.entries} entries, {counted} accounted for")
        if lost := [
            name
            for name, sha in account.shards.items()
            if not (
                rows[name].sha256 == sha if name in rows else intake.is_stood_for(name, found.folder, rows)
            )
        ]:
            said.append(f"{where}: {', '.join(lost)} not as written")
        elif set(account.shards) <= set(rows) and (
            sum(rows[name].count for name in account.shards) != sum(account.positions.values())
        ):
            said.append(f"{where}: its shards hold other numbers of positions than it says")
    return said


def shared_games(found: Census) -> int:
    """Games of which positions are in both splits."""
    sides: dict[str, list[NDArray[np.uint64]]] = {split: [np.zeros(0, np.uint64)] for split in SPLITS}
    for row in found.healthy:
        sides[row.split].append(found.games.get(row.name, sides[row.split][0]))
    train, held = (np.unique(np.concatenate(ids)) for ids in sides.values())
    return len(np.intersect1d(train, held))


def duplicates(found: Census) -> tuple[int, int]:
    """Records of the sample whose position (mirror images count as equal) came before; positions in both splits."""
    sides: dict[str, set[bytes]] = {split: set() for split in SPLITS}
    for key, at in zip(keys_of(found.batch["records"]), found.shard, strict=True):
        sides[found.rows[at].split].add(key)
    train, held = sides.values()
    return len(found.shard) - len(train | held), len(train & held)


def damaged(found: Census) -> list[str]:
    """What of the healthy shards is not as it was written; reads every byte of them."""
    broken = Catalogue(found.folder).verify()
    return [*(f"{name}: {why}" for name, why in broken.items()), *found.damaged]


def faulty(found: Census) -> int:
    """Records of the sample that no position of chess looks like, or whose list of moves is not that of the rules."""
    return int(
        np.logical_or.reduce(
            [np.zeros(len(found.shard), bool), *inspection.faults(found.batch).values()]
        ).sum()
    )
