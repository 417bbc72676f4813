"""An audit as tables and pictures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any

import chess
import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from matrixlib.data.shards import SPLITS, select
from matrixlib.tasks.chess import plots
from matrixlib.tasks.chess.importers.audit import FAR, Audit, Suspect, columns
from matrixlib.tasks.chess.importers.notation import classes_of
from matrixlib.tasks.chess.keys import hashes_of
from matrixlib.tasks.chess.records import LAYOUT, move_from_index, to_board

ENDGAME = 8  # phase up to which a position counts as an endgame
SHOWN = 3  # examples of each kind
TEXT = 110  # characters of an entry in quarantine that are shown
BOARDS = 6  # drawn of each kind

Distances = Mapping[str, Mapping[str, float]]
Suspects = Mapping[str, Sequence[Suspect]]


def _table(rows: Sequence[Any], columns: Sequence[str]) -> DataFrame:
    """The first column names the rows."""
    return DataFrame(rows, columns=list(columns)).set_index(columns[0])


# What is there


def contents(audit: Audit) -> DataFrame:
    """Records, games, bytes and shards by source and split."""
    rows = []
    for source in sorted({row.source for row in audit.rows}):
        for split in SPLITS:
            used, out = (
                [row for row in rows_of if (row.source, row.split) == (source, split)]
                for rows_of in (audit.healthy, audit.excluded)
            )
            if used or out:
                ids = [audit.games[row.name] for row in used if row.name in audit.games]
                games = len(np.unique(np.concatenate(ids))) if ids else 0
                size = f"{sum(row.bytes for row in used) / 1e6:.1f}"
                records = sum(row.count for row in used)
                rows.append((source, split, f"{records:,}", f"{games:,}", size, len(used), len(out)))
    return _table(rows, ("source", "split", "records", "games", "MB", "shards", "in quarantine"))


def problems(audit: Audit) -> DataFrame:
    """Shards that are not used, blocks that can't be read, and what the catalogue repaired."""
    lines = [("in quarantine", f"{row.name}: {row.reason}") for row in audit.excluded]
    lines += [("unreadable", text) for text in audit.damage]
    lines += [("repaired", text) for text in audit.remarks]
    return _table(lines, ("problem", "where and why"))


def imports(audit: Audit) -> DataFrame:
    """What became of the entries of each file that was imported, a line for each way in which it was read; empty for a
    set that was made here or copied."""
    sums: dict[tuple[str, str], Counter[str]] = {}
    heads = ("entries", "stored", "in quarantine", "left out", "positions")
    for account in audit.accounts:
        options = [option for option, value in account.reader.items() if value is True]
        counts = sums.setdefault((account.file, " ".join([account.source, *options])), Counter())
        numbers = (account.entries, account.stored, len(account.refused), sum(account.skipped.values()))
        counts.update(dict(zip(heads, (*numbers, sum(account.positions.values())), strict=True)))
    rows = [(*key, *(counts[head] for head in heads)) for key, counts in sums.items()]
    return _table(rows, ("file", "kind", *heads))


def quarantine(audit: Audit) -> DataFrame:
    """How many entries were refused for which reason."""
    counts = Counter(entry.reason for account in audit.accounts for entry in account.refused)
    return _table(counts.most_common(), ("reason", "entries"))


def quarantined_entries(audit: Audit) -> DataFrame:
    """The first refused entries of each reason, with details and text."""
    refused = [(account.file, entry) for account in audit.accounts for entry in account.refused]
    rows = []
    for reason in quarantine(audit).index:
        for file, entry in islice((item for item in refused if item[1].reason == reason), SHOWN):
            text = " ".join(entry.text.split())
            text = f"{text[:TEXT]}{' ...' if len(text) > TEXT else ''}"
            rows.append((reason, file, entry.entry, entry.detail, text))
    return _table(rows, ("reason", "file", "entry", "detail", "text"))


def distributions(audit: Audit) -> DataFrame:
    """Figures of the sample, a column for each source."""
    table: dict[str, dict[str, str]] = {}
    for source, part in _by_source(audit).items():
        table[source] = {
            "records": f"{len(part['ply']):,}",
            "pieces on the board": _spread(part["men"]),
            f"endgames (phase <= {ENDGAME} of 24)": _share(part["phase"] <= ENDGAME),
            "half moves played": _spread(part["ply"]),
            "legal moves": _spread(part["moves"]),
            "result known": _share(~np.isnan(part["result"])),
            "White won, drew, lost": _thirds(part["white"]),
            "the side to move won, drew, lost": _thirds(part["result"]),
            "win-draw-loss known": _share(~np.isnan(part["value"])),
            "expected points": _spread(part["value"], 2),
            "policy known": _share(~np.isnan(part["entropy"])),
            "entropy of the policy, nats": _spread(part["entropy"], 2),
        }
    return DataFrame(table)


def _by_source(audit: Audit) -> dict[str, dict[str, np.ndarray]]:
    sources, figures = audit.sources(), columns(audit.batch)
    return {
        str(source): {name: values[sources == source] for name, values in figures.items()}
        for source in np.unique(sources)
    }


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


def openings(audit: Audit, count: int = 8) -> list[Opening]:
    """The commonest pawn structures after 4 to 8 half moves: they tell openings apart in sets without duplicates."""
    records = audit.openings
    if not len(records):
        return []
    squares, black = classes_of(records["pieces"]).reshape(-1, 8, 8), records["side"] == 1
    squares[black] = squares[black][:, ::-1]  # real ranks; classes still ours and theirs
    white, dark = (squares == np.where(black, theirs, 6 - theirs)[:, None, None] for theirs in (6, 0))
    pawns = np.packbits(np.stack([white, dark], 1).reshape(len(records), 128), axis=1)
    keys = hashes_of(records)
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


def openings_table(those: Sequence[Opening]) -> DataFrame:
    """The structures, each with its commonest position."""
    rows = [
        (one.name, one.records, f"{one.share:.1%}", one.times, " ".join(one.board.fen().split()[:2])) for one in those
    ]
    return _table(rows, ("pawns that have moved", "records", "share", "times", "the commonest position"))


def _pawns(packed: np.ndarray) -> str:
    """Squares of the pawns (16,) packed bits that are not where they began: those of White, then those of Black."""
    names = []
    for squares, home in zip(np.unpackbits(packed).reshape(2, 64), (1, 6), strict=True):
        moved = " ".join(chess.SQUARE_NAMES[s] for s in np.flatnonzero(squares) if s // 8 != home)
        lost = 8 - int(squares.sum())
        names.append((moved or "-") + (f" (less {lost})" if lost else ""))
    return " / ".join(names)


# What looks wrong


def outliers(audit: Audit, distances: Distances) -> DataFrame:
    """Shards whose figures are far from those of the others of their source and split."""
    rows = [
        (row.name, row.source, figure, f"{z:+.1f}")
        for row in audit.healthy
        for figure, z in distances.get(row.name, {}).items()
        if abs(z) > FAR
    ]
    return _table(rows, ("shard", "source", "figure", "robust z"))


def doubts(audit: Audit, suspects: Suspects) -> DataFrame:
    """Kinds of doubt with their numbers in the sample."""
    total = len(audit.shard)
    rows = [(kind, len(those), f"{100 * len(those) / total:.2f}%") for kind, those in suspects.items()]
    return _table(rows, ("doubt", "records", "of the sample"))


def doubtful_records(audit: Audit, suspects: Suspects) -> DataFrame:
    """The worst records of each kind with their places."""
    rows = []
    for those in suspects.values():
        for one in those[:SHOWN]:
            fen = to_board(audit.batch["records"][one.record]).fen()
            rows.append((audit.rows[audit.shard[one.record]].name, audit.row[one.record], one.reason, fen))
    return _table(rows, ("shard", "record", "doubt", "position"))


# Pictures


def distributions_figure(audit: Audit) -> Figure:
    """Material, length, result, value and policy of the sample, by source."""
    return plots.distributions_figure(_by_source(audit))


def shards_figure(distances: Distances) -> Figure:
    """How far each shard's figures are from those of the others of its source and split."""
    return plots.distances_figure(distances, FAR)


def openings_figure(those: Sequence[Opening]) -> Figure:
    """The commonest position of each of the first structures."""
    none: dict[str, float] = {}
    shown = [(one.board, none, f"{one.name}: {one.records:,} records ({one.share:.1%})") for one in those]
    return plots.boards_figure({"": shown[:BOARDS]}, columns=BOARDS)


def boards_figure(audit: Audit, suspects: Suspects, seed: int = 0) -> Figure:
    """Boards of random records, and of the most suspicious ones of each kind in turn, with the policy as arrows."""
    rng = np.random.default_rng(seed)
    some = np.sort(rng.permutation(len(audit.shard))[:BOARDS])
    turns = chain.from_iterable(zip_longest(*suspects.values()))
    worst = list(islice({one.record: one for one in turns if one}.values(), BOARDS))
    return plots.boards_figure(
        {
            "random records": [(*_board(audit, int(row)), _facts(audit, int(row))) for row in some],
            "most suspicious records": [(*_board(audit, one.record), one.reason) for one in worst],
        }
    )


def _board(audit: Audit, record: int) -> tuple[chess.Board, dict[str, float]]:
    """The board and the shares of its moves in the policy."""
    board = to_board(audit.batch["records"][record])
    start, stop = audit.batch["policy_offset"][record : record + 2]
    weight = audit.batch["policy_weight"][start:stop].astype(np.float64)
    moves = audit.batch["policy_index"][start:stop]
    some = np.flatnonzero(weight)
    return board, {move_from_index(int(moves[k]), board).uci(): float(weight[k] / weight.sum()) for k in some}


def _facts(audit: Audit, record: int) -> str:
    """Source, value and result of a record in a few words."""
    one = columns(select(audit.batch, np.array([record]), LAYOUT))
    value, result = (
        "unknown" if np.isnan(one[name][0]) else f"{one[name][0]:{form}}"
        for name, form in (("value", "+.2f"), ("result", "+.0f"))
    )
    return f"{audit.rows[audit.shard[record]].source}: value {value}, result {result}"
