"""Positions with an answer: Lichess puzzles and EPD suites, solved by the network alone and by searches with it.

A solver says a move for each of many boards. Puzzles count twice: their first move, and the whole line, in which every
move of the solver must be found, as the literature has it. Shares come with Wilson's 95 % interval.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, TypeAlias

import chess
import numpy as np
from numpy.typing import NDArray

from matrixlib.play.evaluator import Evaluator
from matrixlib.play.search import Search
from matrixlib.tasks.chess.game import ChessGame, refuse_over
from matrixlib.tasks.chess.importers import epd
from matrixlib.tasks.chess.importers.parsing import opened
from matrixlib.tasks.chess.records import from_boards, move_from_index, parse_fen

if TYPE_CHECKING:
    from matrixlib.tasks.chess.evaluate.net import Net

Solver: TypeAlias = Callable[[Sequence[chess.Board]], list[str | None]]
"""Boards -> the move for each in UCI, None where there is none."""
Flags = NDArray[np.bool_]
BANDS = ((0, 1000), (1000, 1500), (1500, 2000), (2000, 4000))
ANCHORS = """whole lines of 10,000 Lichess puzzles rated 399 to 2867 (arXiv 2402.04494, table 1)
  AlphaZero            policy 56.1%  value 82.0%  400 simulations 95.6%
  Leela Chess Zero T82 policy 88.6%  value 95.9%  400 simulations 99.6%
  transformers without search: 9M parameters 88.9%, 136M 94.5%, 270M 95.4%
"""
LEAST = 20  # puzzles of a theme that is shown
SIMULATIONS = 50_000  # of all trees that are searched at once


@dataclass(frozen=True)
class Puzzle:
    """A position to solve: `board` is after the opponent's set-up move, `line` the solution, whose moves 0, 2, ... are
    to be found."""

    board: chess.Board
    line: tuple[chess.Move, ...]
    rating: int
    themes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exercise:
    """A position of an EPD suite and the moves that solve it."""

    board: chess.Board
    answers: frozenset[chess.Move]


@dataclass(frozen=True)
class Share:
    """So many of so many, with Wilson's interval."""

    hits: int
    of: int

    @property
    def share(self) -> float:
        return self.hits / self.of

    def interval(self) -> tuple[float, float]:
        """Bounds that hold the true share in 95 % of the cases (Wilson 1927)."""
        z = NormalDist().inv_cdf(0.975)
        centre = (self.share + z * z / (2 * self.of)) / (1 + z * z / self.of)
        half = (
            z
            * math.sqrt(self.share * (1 - self.share) / self.of + z * z / (4 * self.of**2))
            / (1 + z * z / self.of)
        )
        return max(centre - half, 0.0), min(centre + half, 1.0)

    def __str__(self) -> str:
        low, high = self.interval()
        return f"{self.share:.1%} [{low:.1%}, {high:.1%}]"


# Files


def read_puzzles(path: str | Path, limit: int = 0) -> list[Puzzle]:
    """Lichess puzzles of a CSV file (columns FEN, Moves, Rating, maybe Themes; FEN is before the set-up move), also
    compressed (.gz, .bz2, .zst).

    limit: the first so many, 0 all. ValueError names the file, and the line of a puzzle that is not legal chess.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no puzzle file at '{path}': give the path of a Lichess puzzle CSV")
    puzzles: list[Puzzle] = []
    with opened(file) as stream:
        reader = csv.DictReader(io.TextIOWrapper(stream, "utf-8-sig", "replace", newline=""))
        missing = {"FEN", "Moves", "Rating"} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(
                f"'{file.name}' lacks the columns {sorted(missing)}; a Lichess puzzle CSV has them"
            )
        for number, row in enumerate(reader, start=2):
            try:
                board = parse_fen(row["FEN"])
                setup, *answers = row["Moves"].split()
                board.push_uci(setup)
                walk, line = board.copy(), []
                for text in answers:
                    line.append(walk.parse_uci(text))
                    walk.push(line[-1])
                if not line:
                    raise ValueError("no move to find")
                themes = tuple((row.get("Themes") or "").split())
                puzzles.append(Puzzle(board, tuple(line), int(row["Rating"]), themes))
            except (ValueError, TypeError, AttributeError) as error:  # the last two: a short row
                raise ValueError(f"'{file.name}' line {number}: {error}") from None
            if limit and len(puzzles) == limit:
                break
    return puzzles


def read_epd(path: str | Path) -> list[Exercise]:
    """Exercises of an EPD file, also a compressed one: lines with `bm` (one of these) or `am` (none of these); `#`
    starts a comment.

    Raises ValueError naming the file, and the line that is not an exercise; also where there is none at all.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no EPD file at '{path}'")
    found = []
    with opened(file) as stream:
        text = stream.read().decode("utf-8-sig", "replace")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            board, operations, _ = epd.parse(line)
            answers = frozenset(epd.best_of(board, operations))
            if not answers:
                raise ValueError("it has neither bm nor am")
        except ValueError as error:
            raise ValueError(f"'{file.name}' line {number}: {error}") from None
        found.append(Exercise(board, answers))
    if not found:
        raise ValueError(f"'{file.name}' has no exercise: give an EPD file with lines that say bm or am")
    return found


# Solvers


def solvers(net: Net, simulations: Sequence[int] = ()) -> dict[str, Solver]:
    """The baseline, the network by itself in two ways, and a search for each number of simulations; by name."""
    found: dict[str, Solver] = {
        "best capture": lambda boards: [best_capture(board) for board in boards],
        "policy": lambda boards: [seen.best for seen in net.evaluate_boards(boards)],
        "one-ply value": lambda boards: one_ply(net, boards),
    }
    return found | {f"search {count}": searcher(net, count) for count in simulations}


def searcher(net: Net, simulations: int) -> Solver:
    """Plays what a search of so many simulations finds. ValueError where the game is drawn by rule."""
    evaluate, game = Evaluator(net), ChessGame()
    at_once = max(1, min(256, SIMULATIONS // max(simulations, 1)))

    def solve(boards: Sequence[chess.Board]) -> list[str | None]:
        moves: dict[int, str] = {}
        live = [i for i, board in enumerate(boards) if any(board.legal_moves)]
        for start in range(0, len(live), at_once):
            part = live[start : start + at_once]
            search = Search(game, evaluate, trees=len(part))
            states = from_boards([boards[i] for i in part])
            refuse_over(game, states)
            for tree in range(len(part)):
                search.reset(tree, states[tree : tree + 1])
            for i, found in zip(part, search.run(simulations), strict=True):
                moves[i] = move_from_index(found.best, boards[i]).uci()
        return [moves.get(i) for i in range(len(boards))]

    return solve


def best_capture(board: chess.Board) -> str | None:
    """The capture of the most valuable piece (P1 N3 B3 R5 Q9), lowest UCI among equals; None without one."""
    worth = {chess.PAWN: 1, chess.KNIGHT: 3, chess.BISHOP: 3, chess.ROOK: 5, chess.QUEEN: 9}
    moves = [
        (-worth.get(board.piece_type_at(m.to_square) or chess.PAWN, 0), m.uci())
        for m in board.generate_legal_captures()
    ]
    return min(moves)[1] if moves else None


def one_ply(net: Net, boards: Sequence[chess.Board]) -> list[str | None]:
    """For each board the move after which the opponent's expected result is lowest; mates and draws by rule exact."""
    children: list[chess.Board] = []
    plans: list[
        list[tuple[str, float | int]]
    ] = []  # a float is an exact value for us, an int a row of `children`
    for board in boards:
        plan: list[tuple[str, float | int]] = []
        for move in board.legal_moves:
            after = board.copy(stack=False)
            after.push(move)
            if after.is_checkmate():
                plan.append((move.uci(), 1.0))
            elif after.is_stalemate() or after.is_insufficient_material():
                plan.append((move.uci(), 0.0))
            else:
                plan.append((move.uci(), len(children)))
                children.append(after)
        plans.append(plan)
    values = net.values(children)
    best: list[str | None] = []
    for plan in plans:
        scored = [(move, v if isinstance(v, float) else -float(values[v])) for move, v in plan]
        best.append(max(scored, key=lambda item: item[1])[0] if scored else None)
    return best


# Results


def attempt(solver: Solver, puzzles: Sequence[Puzzle]) -> tuple[Flags, Flags]:
    """(first move found, whole line found), both (N,). Any move that mates is right where the answer mates."""
    first, whole = np.zeros(len(puzzles), bool), np.zeros(len(puzzles), bool)
    boards = [puzzle.board.copy(stack=False) for puzzle in puzzles]
    live, ply = list(range(len(puzzles))), 0
    while live:
        chosen = solver([boards[i] for i in live])
        live = [
            i for i, move in zip(live, chosen, strict=True) if right(boards[i], puzzles[i].line[ply], move)
        ]
        if ply == 0:
            first[live] = True
        ply += 2
        whole[[i for i in live if ply >= len(puzzles[i].line)]] = True
        live = [i for i in live if ply < len(puzzles[i].line)]
        for i in live:
            for move in puzzles[i].line[ply - 2 : ply]:
                boards[i].push(move)
    return first, whole


def right(board: chess.Board, answer: chess.Move, move: str | None) -> bool:
    """Whether a move is the answer, or mates as the answer does."""
    if move is None:
        return False
    if move == answer.uci():
        return True
    return _mates(board, answer) and _mates(board, chess.Move.from_uci(move))


def _mates(board: chess.Board, move: chess.Move) -> bool:
    after = board.copy(stack=False)
    after.push(move)
    return after.is_checkmate()


def solve(by: Mapping[str, Solver], puzzles: Sequence[Puzzle]) -> dict[str, dict[str, tuple[Share, Share]]]:
    """Solver -> group -> (first moves, whole lines); groups: `all`, bands of rating, themes of LEAST puzzles."""
    groups = _groups(puzzles)
    found = {}
    for name, solver in by.items():
        first, whole = attempt(solver, puzzles)
        found[name] = {
            group: (Share(int(first[rows].sum()), len(rows)), Share(int(whole[rows].sum()), len(rows)))
            for group, rows in groups.items()
        }
    return found


def _groups(puzzles: Sequence[Puzzle]) -> dict[str, list[int]]:
    groups = {"all": list(range(len(puzzles)))}
    for low, high in BANDS:
        groups[f"{low}-{high}"] = [i for i, p in enumerate(puzzles) if low <= p.rating < high]
    themes = sorted({theme for puzzle in puzzles for theme in puzzle.themes})
    for theme in themes:
        rows = [i for i, puzzle in enumerate(puzzles) if theme in puzzle.themes]
        groups |= {theme: rows} if len(rows) >= LEAST else {}
    return {group: rows for group, rows in groups.items() if rows}


def solve_suite(by: Mapping[str, Solver], exercises: Sequence[Exercise]) -> dict[str, Share]:
    """Solver -> how many exercises it solves."""
    found = {}
    for name, solver in by.items():
        moves = solver([exercise.board for exercise in exercises])
        hits = sum(
            move is not None and chess.Move.from_uci(move) in exercise.answers
            for exercise, move in zip(exercises, moves, strict=True)
        )
        found[name] = Share(hits, len(exercises))
    return found


def puzzle_table(found: Mapping[str, Mapping[str, tuple[Share, Share]]]) -> str:
    """Text table of what `solve` found, a line for each group and solver."""
    rows = [("group", "puzzles", "solver", "first move", "whole line")]
    for group in next(iter(found.values()), {}):
        for name, groups in found.items():
            first, whole = groups[group]
            rows.append((group, str(first.of), name, str(first), str(whole)))
    return text_table(rows)


def suite_table(found: Mapping[str, Mapping[str, Share]]) -> str:
    """Text table of suites: name -> what `solve_suite` found."""
    rows = [("suite", "positions", "solver", "solved")]
    for suite, by in found.items():
        rows += [(suite, str(share.of), name, str(share)) for name, share in by.items()]
    return text_table(rows)


def text_table(rows: Iterable[tuple[str, ...]]) -> str:
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    return "".join(line + "\n" for line in lines)
