"""What a census found, as tables and pictures for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Any

import chess
import numpy as np

from matrixlib.data.shards import SPLITS, select
from matrixlib.tasks.chess.importers.census import (
    ENDGAME,
    OPENING,
    SHOWN,
    Census,
    Suspect,
    columns,
    duplicates,
)
from matrixlib.tasks.chess.importers.import_files import FAR
from matrixlib.tasks.chess.importers.inspection import position_keys
from matrixlib.tasks.chess.importers.notation import classes_of
from matrixlib.tasks.chess.records import LAYOUT, move_from_index, to_board

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXT = 110  # characters of an entry in quarantine that are shown
BOARDS = 6  # drawn of each kind


def table(rows: Iterable[Sequence[Any]]) -> str:
    """Aligned text; the first row is the head, numbers stand on the right, the last column is free."""
    cells = [
        [f"{cell:,}" if isinstance(cell, int | np.integer) else str(cell) for cell in row] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [
        all(cell[:1] in "+-0123456789" for cell in column[1:] if cell) for column in zip(*cells, strict=True)
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    )


# What is there


def contents(found: Census) -> str:
    """Records, games, bytes and shards by source and split, and the shards that are kept out."""
    rows: list[Sequence[Any]] = [("source", "split", "records", "games", "MB", "shards", "kept out")]
    for source in sorted({row.source for row in found.rows}):
        for split in SPLITS:
            used, out = (
                [row for row in rows_of if (row.source, row.split) == (source, split)]
                for rows_of in (found.healthy, found.kept_out)
            )
            if used or out:
                ids = [found.games[row.name] for row in used if row.name in found.games]
                games = len(np.unique(np.concatenate(ids))) if ids else 0
                size = f"{sum(row.bytes for row in used) / 1e6:.1f}"
                rows.append((source, split, sum(row.count for row in used), games, size, len(used), len(out)))
    lines = [table(rows)]
    lines += [f"kept out: {row.name}: {row.reason}" for row in found.kept_out]
    lines += [f"unreadable: {damage}" for damage in found.damaged]
    return "\n".join([*lines, *found.remarks])


def imports(found: Census) -> str:
    """What became of the entries of each file that was imported, a line for each way in which it was read."""
    if not found.accounts:
        return "no account: the set was made here or copied, not imported"
    sums: dict[tuple[str, str], Counter[str]] = {}
    for account in found.accounts:
        chosen = [option for option, value in account.reader.items() if value is True]
        counts = sums.setdefault((account.file, " ".join([account.source, *chosen])), Counter())
        counts.update(entries=account.entries, stored=account.stored, quarantine=len(account.refused))
        counts.update(
            {"left out": sum(account.skipped.values()), "positions": sum(account.positions.values())}
        )
    heads = ("entries", "stored", "quarantine", "left out", "positions")
    return table(
        [("file", "kind", *heads), *((*key, *(counts[h] for h in heads)) for key, counts in sums.items())]
    )


def quarantine(found: Census) -> str:
    """Reasons for which entries were refused, with their numbers, and the first entries of each."""
    held = [(account.file, entry) for account in found.accounts for entry in account.refused]
    if not held:
        return "nothing is in quarantine"
    counts = Counter(entry.reason for _, entry in held)
    lines = [table([("reason", "entries"), *counts.most_common()]), ""]
    for reason, _ in counts.most_common():
        for file, entry in islice((item for item in held if item[1].reason == reason), SHOWN):
            lines.append(f"{file}, entry {entry.entry}: {reason}: {entry.detail}")
            text = " ".join(entry.text.split())
            lines.append(f"    {text[:TEXT]}{' ...' if len(text) > TEXT else ''}")
    return "\n".join(lines)


def distributions(found: Census) -> str:
    """Figures of the sample by source; the last lines are the duplicates in it."""
    sources, figures = found.sources(), columns(found.batch)
    rows: list[Sequence[str]] = [("in the sample", *np.unique(sources))]
    parts = [{name: values[sources == source] for name, values in figures.items()} for source in rows[0][1:]]
    rows += [
        ("records", *(f"{len(part['ply']):,}" for part in parts)),
        ("pieces on the board", *(_spread(part["men"]) for part in parts)),
        (f"endgames (phase <= {ENDGAME} of 24)", *(_share(part["phase"] <= ENDGAME) for part in parts)),
        ("half moves played", *(_spread(part["ply"]) for part in parts)),
        ("legal moves", *(_spread(part["moves"]) for part in parts)),
        ("result known", *(_share(~np.isnan(part["result"])) for part in parts)),
        ("  White won, drew, lost", *(_thirds(part["white"]) for part in parts)),
        ("  the side to move won, drew, lost", *(_thirds(part["result"]) for part in parts)),
        ("win-draw-loss known", *(_share(~np.isnan(part["value"])) for part in parts)),
        ("  expected points", *(_spread(part["value"], 2) for part in parts)),
        ("policy known", *(_share(~np.isnan(part["entropy"])) for part in parts)),
        ("  entropy, nats", *(_spread(part["entropy"], 2) for part in parts)),
    ]
    again, both = duplicates(found)
    said = f"{again:,} of {len(sources):,} records repeat a position of the sample"
    return f"{table(rows)}\n{said}; {both:,} positions are in both splits"


def _spread(values: np.ndarray, digits: int = 1) -> str:
    known = values[~np.isnan(values)]
    return f"{known.mean():.{digits}f} ± {known.std():.{digits}f}" if len(known) else "-"


def _share(mask: np.ndarray) -> str:
    return f"{100 * mask.mean():.1f}%"


def _thirds(points: np.ndarray) -> str:
    known = points[~np.isnan(points)]
    return ", ".join(f"{100 * (known == p).mean():.0f}%" for p in (1, 0, -1)) if len(known) else "-"


# Openings


@dataclass(frozen=True)
class Opening:
    """A pawn structure after 4 to 8 half moves: its name, records, share of all such records, its commonest position
    and how often that is there."""

    name: str
    records: int
    share: float
    board: chess.Board
    times: int


def openings(found: Census, count: int = 8) -> list[Opening]:
    """The commonest pawn structures after 4 to 8 half moves: they tell openings apart in sets without duplicates."""
    records = found.openings
    if not len(records):
        return []
    squares, black = classes_of(records["pieces"]).reshape(-1, 8, 8), records["side"] == 1
    squares[black] = squares[black][:, ::-1]  # real ranks; classes still ours and theirs
    white, dark = (squares == np.where(black, theirs, 6 - theirs)[:, None, None] for theirs in (6, 0))
    pawns = np.packbits(np.stack([white, dark], 1).reshape(len(records), 128), axis=1)
    keys = position_keys(records)
    kinds, kind, numbers = np.unique(pawns, axis=0, return_inverse=True, return_counts=True)
    out = []
    for best in np.lexsort((np.arange(len(kinds)), -numbers))[:count]:
        inside = np.flatnonzero(kind == best)
        _, first, times = np.unique(keys[inside], return_index=True, return_counts=True)
        most = int(np.lexsort((first, -times))[0])
        board = to_board(records[inside[first[most]]])
        number = int(numbers[best])
        out.append(Opening(_pawns(kinds[best]), number, number / len(records), board, int(times[most])))
    return out


def openings_table(found: Census, those: Sequence[Opening]) -> str:
    """The structures as text, and how many different positions there are."""
    head = ("pawns that have moved", "records", "share", "times", "the commonest position")
    rows = [
        (one.name, one.records, f"{one.share:.1%}", one.times, " ".join(one.board.fen().split()[:2]))
        for one in those
    ]
    different = len(np.unique(position_keys(found.openings)))
    said = f"{len(found.openings):,} records after {OPENING[0]} to {OPENING[1]} half moves"
    return f"{said}, {different:,} different positions\n{table([head, *rows]) if rows else ''}".rstrip()


def _pawns(packed: np.ndarray) -> str:
    """Squares of the pawns (16,) packed bits that are not where they began: those of White, then those of Black."""
    names = []
    for squares, home in zip(np.unpackbits(packed).reshape(2, 64), (1, 6), strict=True):
        moved = " ".join(chess.SQUARE_NAMES[s] for s in np.flatnonzero(squares) if s // 8 != home)
        lost = 8 - int(squares.sum())
        names.append((moved or "-") + (f" (less {lost})" if lost else ""))
    return " / ".join(names)


# What looks wrong


def outliers(found: Census, compared: Mapping[str, Mapping[str, float]]) -> str:
    """Shards whose figures are far from those of the others of their source and split."""
    far = [
        (row.name, row.source, figure, f"{z:+.1f}")
        for row in found.healthy
        for figure, z in compared.get(row.name, {}).items()
        if abs(z) > FAR
    ]
    said = f"{len(compared)} of {len(found.healthy)} shards have enough others to compare them with"
    none = f"none of their figures is more than {FAR:g} robust standard deviations away"
    shown = table([("shard", "source", "figure", "robust z"), *far]) if far else none
    return f"{said}\n{shown}" if compared else said


def doubts(found: Census, suspected: Mapping[str, Sequence[Suspect]]) -> str:
    """Kinds of doubt with their numbers in the sample, and the worst records of each with their places."""
    rows: list[Sequence[Any]] = [("doubt", "records", "of the sample")]
    lines = []
    total = len(found.shard)
    for kind, those in suspected.items():
        rows.append((kind, len(those), f"{100 * len(those) / total:.2f}%"))
        for one in those[:SHOWN]:
            name = found.rows[found.shard[one.record]].name
            lines.append(f"{name}, record {found.row[one.record]}: {one.why}")
            lines.append(f"    {to_board(found.batch['records'][one.record]).fen()}")
    return "\n".join([table(rows), "", *lines]) if lines else "no record of the sample is suspicious"


# Pictures


def distributions_figure(found: Census) -> Figure:
    """Material, length, result, value and policy of the sample, by source."""
    from matrixlib.tasks.chess import plots

    sources, figures = found.sources(), columns(found.batch)
    return plots.distributions_figure(
        {
            str(source): {name: values[sources == source] for name, values in figures.items()}
            for source in np.unique(sources)
        }
    )


def shards_figure(compared: Mapping[str, Mapping[str, float]]) -> Figure:
    """How far each shard's figures are from those of its kin."""
    from matrixlib.tasks.chess import plots

    return plots.distances_figure(compared, FAR)


def openings_figure(those: Sequence[Opening]) -> Figure:
    """The commonest position of each of the first structures."""
    from matrixlib.tasks.chess import plots

    none: dict[str, float] = {}
    shown = [(one.board, none, f"{one.name}: {one.records:,} records ({one.share:.1%})") for one in those]
    return plots.boards_figure({"": shown[:BOARDS]}, columns=BOARDS)


def boards_figure(found: Census, suspected: Mapping[str, Sequence[Suspect]], seed: int = 0) -> Figure:
    """Boards of random records, and of the most suspicious ones of each kind in turn, with the policy as arrows."""
    from matrixlib.tasks.chess import plots

    rng = np.random.default_rng(seed)
    some = np.sort(rng.permutation(len(found.shard))[:BOARDS])
    turns = chain.from_iterable(zip_longest(*suspected.values()))
    worst = list(islice({one.record: one for one in turns if one}.values(), BOARDS))
    return plots.boards_figure(
        {
            "random records": [(*_shown(found, int(row)), _facts(found, int(row))) for row in some],
            "most suspicious records": [(*_shown(found, one.record), one.why) for one in worst],
        }
    )


def _shown(found: Census, record: int) -> tuple[chess.Board, dict[str, float]]:
    """The board and the shares of its moves in the policy."""
    board = to_board(found.batch["records"][record])
    start, stop = found.batch["policy_offset"][record : record + 2]
    weight = found.batch["policy_weight"][start:stop].astype(np.float64)
    moves = found.batch["policy_index"][start:stop]
    some = np.flatnonzero(weight)
    return board, {move_from_index(int(moves[k]), board).uci(): float(weight[k] / weight.sum()) for k in some}


def _facts(found: Census, record: int) -> str:
    """Source, value and result of a record in a few words."""
    source = found.rows[found.shard[record]].source
    one = columns(select(found.batch, np.array([record]), LAYOUT))
    value = "unknown" if np.isnan(one["value"][0]) else f"{one['value'][0]:+.2f}"
    result = "unknown" if np.isnan(one["result"][0]) else f"{one['result'][0]:+.0f}"
    return f"{source}: value {value}, result {result}"
