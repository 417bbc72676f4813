"""Positions with an answer: Lichess puzzles and EPD suites, solved by the network alone and by searches with it.

A solver gives a move for each of many boards. Puzzles count twice: their first move, and the whole line, in which every
move of the solver must be found, as the literature has it. Shares come with Wilson's 95 % interval.
"""

import csv
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import chess
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from matrixlib.hardware.openmp import considerate
from matrixlib.play.elo import share_interval
from matrixlib.play.evaluator import Evaluator
from matrixlib.play.search import Search
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.game import ChessGame, refuse_over
from matrixlib.tasks.chess.importers import epd
from matrixlib.tasks.chess.importers.parsing import opened, text_lines
from matrixlib.tasks.chess.records import PIECE_VALUES, before, from_boards, move_from_index, parse_fen

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
        return share_interval(self.share, self.of)

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
    if not os.path.isfile(file):
        raise ValueError(f"no puzzle file at '{path}': give the path of a Lichess puzzle CSV")
    try:
        return _puzzles(file, limit)
    except csv.Error as error:
        raise ValueError(f"'{file.name}' is no CSV of puzzles ({error}); a Lichess puzzle CSV is one") from error


def _puzzles(file: Path, limit: int) -> list[Puzzle]:
    puzzles: list[Puzzle] = []
    with opened(file) as stream:
        decoded = (line.decode("utf-8-sig", "replace") for line in text_lines(stream))
        reader = csv.DictReader(decoded)
        missing = {"FEN", "Moves", "Rating"} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"'{file.name}' lacks the columns {sorted(missing)}; a Lichess puzzle CSV has them")
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
    if not os.path.isfile(file):
        raise ValueError(f"no EPD file at '{path}'")
    exercises = []
    with opened(file) as stream:
        text = [part for line in text_lines(stream) for part in line.decode("utf-8-sig", "replace").splitlines()]
    for number, line in enumerate(text, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            board, operations, _ = epd.parse(line)
            answers = frozenset(epd.best_of(board, operations))
            if not answers:
                raise ValueError("it has neither bm nor am")
        except ValueError as error:
            raise ValueError(f"'{file.name}' line {number}: {error}") from None
        exercises.append(Exercise(board, answers))
    if not exercises:
        raise ValueError(f"'{file.name}' has no exercise: give an EPD file with lines that say bm or am")
    return exercises


# Solvers


def solvers(net: Net, simulations: Sequence[int] = ()) -> dict[str, Solver]:
    """The baseline, the network by itself in two ways, and a search for each number of simulations; by name."""
    fixed: dict[str, Solver] = {
        "best capture": lambda boards: [best_capture(board) for board in boards],
        "policy": lambda boards: [evaluation.best for evaluation in net.evaluate_boards(boards)],
        "one-ply value": lambda boards: one_ply(net, boards),
    }
    return fixed | {f"search {count}": searcher(net, count) for count in simulations}


def searcher(net: Net, simulations: int) -> Solver:
    """Plays the best move of a search with so many simulations. ValueError where the game is drawn by rule."""
    evaluate, game = Evaluator(net), ChessGame()
    at_once = max(1, min(256, SIMULATIONS // max(simulations, 1)))

    def solve(boards: Sequence[chess.Board]) -> list[str | None]:
        moves: dict[int, str] = {}
        live = [i for i, board in enumerate(boards) if any(board.legal_moves)]
        for start in range(0, len(live), at_once):
            part = live[start : start + at_once]
            search = Search(game, evaluate, trees=len(part))
            states = from_boards([boards[i] for i in part], repetition=0)
            refuse_over(game, states)
            for tree in range(len(part)):
                past = before(boards[part[tree]], net.task.history)
                search.reset(tree, states[tree : tree + 1], past=past)
            for i, result in zip(part, search.run(simulations), strict=True):
                moves[i] = move_from_index(result.best, boards[i]).uci()
        return [moves.get(i) for i in range(len(boards))]

    return solve


def best_capture(board: chess.Board) -> str | None:
    """The capture of the most valuable piece (P1 N3 B3 R5 Q9), lowest UCI among equals; None without one."""
    captures = [
        (-PIECE_VALUES[(board.piece_type_at(move.to_square) or chess.PAWN) - 1], move.uci())
        for move in board.generate_legal_captures()
    ]
    return min(captures)[1] if captures else None


def one_ply(net: Net, boards: Sequence[chess.Board]) -> list[str | None]:
    """For each board the move after which the opponent's expected result is lowest; mates and draws by rule exact."""
    moves = [(i, move) for i, board in enumerate(boards) for move in board.legal_moves]
    children = [_after(boards[i], move) for i, move in moves]
    values = -net.values(children).astype(np.float64)
    best: dict[int, tuple[float, str]] = {}
    for (i, move), after, value in zip(moves, children, values.tolist(), strict=True):
        if after.is_checkmate():
            value = 1.0
        elif after.is_stalemate() or after.is_insufficient_material():
            value = 0.0
        if i not in best or value > best[i][0]:
            best[i] = value, move.uci()
    return [best[i][1] if i in best else None for i in range(len(boards))]


# Results


def attempt(solver: Solver, puzzles: Sequence[Puzzle]) -> tuple[Flags, Flags]:
    """(first move found, whole line found), both (N,). Any move that mates is right where the answer mates."""
    first, whole = np.zeros(len(puzzles), bool), np.zeros(len(puzzles), bool)
    boards = [puzzle.board.copy() for puzzle in puzzles]  # with the set-up move, which some networks look at
    live, ply = list(range(len(puzzles))), 0
    while live:
        moves = solver([boards[i] for i in live])
        live = [i for i, move in zip(live, moves, strict=True) if right(boards[i], puzzles[i].line[ply], move)]
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
    if move is None or move == answer.uci():
        return move is not None
    return all(_after(board, one).is_checkmate() for one in (answer, chess.Move.from_uci(move)))


def _after(board: chess.Board, move: chess.Move) -> chess.Board:
    after = board.copy()
    after.push(move)
    return after


@considerate()
def solve(by: Mapping[str, Solver], puzzles: Sequence[Puzzle]) -> pd.DataFrame:
    """A row for each group and solver: puzzles, and the `Share` of first moves and whole lines.

    Groups: `all`, bands of rating, themes of LEAST puzzles.
    """
    results = {name: attempt(solver, puzzles) for name, solver in by.items()}
    rows = [
        (group, len(members), name, *(Share(int(right[members].sum()), len(members)) for right in result))
        for group, members in _groups(puzzles).items()
        for name, result in results.items()
    ]
    frame = pd.DataFrame(rows, columns=["group", "puzzles", "solver", "first move", "whole line"])
    return frame.set_index("group").rename_axis(None)


def _groups(puzzles: Sequence[Puzzle]) -> dict[str, list[int]]:
    """Name -> indices of the puzzles."""
    groups = {"all": list(range(len(puzzles)))}
    for low, high in BANDS:
        groups[f"{low}-{high}"] = [i for i, p in enumerate(puzzles) if low <= p.rating < high]
    for theme in sorted({theme for puzzle in puzzles for theme in puzzle.themes}):
        members = [i for i, puzzle in enumerate(puzzles) if theme in puzzle.themes]
        groups |= {theme: members} if len(members) >= LEAST else {}
    return {group: members for group, members in groups.items() if members}


@considerate()
def solve_suites(by: Mapping[str, Solver], suites: Mapping[str, Sequence[Exercise]]) -> pd.DataFrame:
    """A row for each suite and solver: positions, and the `Share` of those that it solves."""
    rows = []
    for suite, exercises in suites.items():
        for name, solver in by.items():
            moves = solver([exercise.board for exercise in exercises])
            hits = sum(
                move is not None and chess.Move.from_uci(move) in exercise.answers
                for exercise, move in zip(exercises, moves, strict=True)
            )
            rows.append((suite, len(exercises), name, Share(hits, len(exercises))))
    frame = pd.DataFrame(rows, columns=["suite", "positions", "solver", "solved"])
    return frame.set_index("suite").rename_axis(None)
