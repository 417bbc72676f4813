"""Lichess puzzles and EPD suites, solved by the network alone and by search.

Solve rates of the first move and of the whole line, with Wilson 95 % intervals.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import chess
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from matrixlib.play.match import Turn, spread
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.evaluate.strength import network_player
from matrixlib.tasks.chess.game import ChessGame, check_not_over
from matrixlib.tasks.chess.importers import epd
from matrixlib.tasks.chess.importers.notation import open_compressed, read_lines
from matrixlib.tasks.chess.records import PIECE_VALUES, from_boards, move_from_index, parse_fen, positions_before

Solver: TypeAlias = Callable[[Sequence[chess.Board]], list[str | None]]  # boards -> a UCI move each, None without one
Flags = NDArray[np.bool_]
BASELINE = "best capture"
RATING_BANDS = ((1, 1000), (1000, 1500), (1500, 2000), (2000, 4000))
MIN_THEME_PUZZLES = 20  # rarer themes are not listed
MAX_TREES, MAX_SIMULATIONS = 256, 50_000  # of trees searched together
PARTS, FEWEST_TREES = 8, 16  # of puzzles for threads, whatever the number of cores, and trees of a part


@dataclass(frozen=True)
class Puzzle:
    """A position to solve.

    board: after the opponent's set-up move. line: the solution; moves 0, 2, ... are to be found. answers: all solutions
    of an EPD exercise; `line` is one of them. rating: 0 for unknown.
    """

    board: chess.Board
    line: tuple[chess.Move, ...]
    rating: int = 0
    themes: tuple[str, ...] = ()
    answers: frozenset[chess.Move] = frozenset()


def read_puzzles(path: str | Path, limit: int = 0) -> list[Puzzle]:
    """Read Lichess puzzles from a CSV file, plain or compressed: columns FEN (before the set-up move), Moves, Rating,
    optionally Themes. limit: maximum number, 0 for all. ValueError names the file and the invalid line."""
    file = _existing_file(path)
    with open_compressed(file) as stream:
        options: dict[str, Any] = {"dtype": str, "keep_default_na": False, "nrows": limit or None}
        try:
            table = pd.read_csv(stream, encoding="utf-8-sig", encoding_errors="replace", **options)
        except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
            raise ValueError(f"'{file.name}' is no CSV of puzzles ({error}); give a Lichess puzzle CSV") from error
    if missing := {"FEN", "Moves", "Rating"} - set(table):
        raise ValueError(f"'{file.name}' lacks the columns {sorted(missing)}; give a Lichess puzzle CSV")
    themes = table.get("Themes", pd.Series("", table.index))
    puzzles = []
    for number, row in enumerate(zip(table["FEN"], table["Moves"], table["Rating"], themes, strict=True), start=2):
        try:
            puzzles.append(_puzzle(*row))
        except ValueError as error:
            raise ValueError(f"'{file.name}' line {number}: {error}") from None
    if not puzzles:
        raise ValueError(f"'{file.name}' has no puzzle: give a Lichess puzzle CSV")
    return puzzles


def _existing_file(path: str | Path) -> Path:
    if not os.path.isfile(path):
        raise ValueError(f"no puzzle file at '{path}': give the path of a Lichess puzzle CSV or of an EPD suite")
    return Path(path)


def _puzzle(fen: str, moves: str, rating: str, themes: str) -> Puzzle:
    board = parse_fen(fen)
    setup, *answers = moves.split() or [""]
    board.push_uci(setup)
    if not answers:
        raise ValueError("no move to find")
    walk = board.copy()
    line = tuple(walk.push_uci(text) for text in answers)
    return Puzzle(board, line, int(rating), tuple(themes.split()))


def read_epd(path: str | Path) -> list[Puzzle]:
    """Read exercises from an EPD file, plain or compressed: lines with `bm` (best moves) or `am` (moves to avoid); `#`
    starts a comment. ValueError names the file and the invalid line, and a file without exercises."""
    file, puzzles = _existing_file(path), []
    with open_compressed(file) as stream:
        text = [part for line in read_lines(stream) for part in line.decode("utf-8-sig", "replace").splitlines()]
    for number, line in enumerate(text, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            board, operations, _ = epd.parse(line)
            answers = frozenset(epd.best_moves(board, operations))
            if not answers:
                raise ValueError("it has neither bm nor am")
        except ValueError as error:
            raise ValueError(f"'{file.name}' line {number}: {error}") from None
        puzzles.append(Puzzle(board, (next(iter(answers)),), answers=answers))
    if not puzzles:
        raise ValueError(f"'{file.name}' has no exercise: give an EPD file with bm or am")
    return puzzles


def solvers(net: Net, simulations: Sequence[int] = ()) -> dict[str, Solver]:
    """Solvers by name: best capture, policy, one-ply value, and a search per number of simulations."""
    net = net.with_workers()
    fixed: dict[str, Solver] = {
        BASELINE: lambda boards: [best_capture(board) for board in boards],
        "policy": lambda boards: [evaluation.best for evaluation in net.evaluate_boards(boards)],
        "one-ply value": lambda boards: one_ply(net, boards),
    }
    return fixed | {f"search {count}": searcher(net, count) for count in simulations}


def searcher(net: Net, simulations: int) -> Solver:
    """Solver that plays the best move of a search, on all cores. ValueError for a position in which the game is drawn
    by rule."""
    net = net.with_workers()
    play = network_player(net, simulations)
    most = max(1, min(MAX_TREES, MAX_SIMULATIONS // max(simulations, 1)))

    def best(boards: Sequence[chess.Board]) -> list[str]:
        states = from_boards(boards, repetition=0)
        check_not_over(ChessGame(), states)
        keys = [np.zeros(0, np.uint64)] * len(boards)
        past = [positions_before(board, net.task.history) for board in boards]
        found = play(Turn(np.arange(len(boards)), states, keys, past, [()] * len(boards))).moves
        return [move_from_index(int(move), board).uci() for move, board in zip(found, boards, strict=True)]

    def solve(boards: Sequence[chess.Board]) -> list[str | None]:
        live = [i for i, board in enumerate(boards) if any(board.legal_moves)]
        at_once = min(most, max(len(live) // PARTS, FEWEST_TREES)) if net.workers else most
        parts = [[boards[i] for i in live[start : start + at_once]] for start in range(0, len(live), at_once)]
        moves = dict(zip(live, chain.from_iterable(spread(best, parts, net.workers)), strict=True))
        return [moves.get(i) for i in range(len(boards))]

    return solve


def best_capture(board: chess.Board) -> str | None:
    """Capture of the most valuable piece (P1 N3 B3 R5 Q9), ties by UCI text; None without a capture."""
    captures = [
        (-PIECE_VALUES[(board.piece_type_at(move.to_square) or chess.PAWN) - 1], move.uci())
        for move in board.generate_legal_captures()
    ]
    return min(captures)[1] if captures else None


def one_ply(net: Net, boards: Sequence[chess.Board]) -> list[str | None]:
    """Best move of each board by a one-ply search on values; mates and draws by rule are exact."""
    moves = [(i, move) for i, board in enumerate(boards) for move in board.legal_moves]
    children = [_after(boards[i], move) for i, move in moves]
    values = -net.values(children).astype(np.float64)
    best: dict[int, tuple[float, str]] = {}
    for (i, move), after, value in zip(moves, children, values.tolist(), strict=True):
        if outcome := after.outcome():
            value = float(outcome.winner is not None)
        if i not in best or value > best[i][0]:
            best[i] = value, move.uci()
    return [best[i][1] if i in best else None for i in range(len(boards))]


def grade(solver: Solver, puzzles: Sequence[Puzzle]) -> tuple[Flags, Flags]:
    """(first move solved, whole line solved), both (N,). If the solution mates, any mating move is correct."""
    found = np.zeros(len(puzzles), np.int64)  # solved plies of the line
    boards = [puzzle.board.copy() for puzzle in puzzles]  # with the set-up move, for networks with history
    live, ply = list(range(len(puzzles))), 0
    while live:
        moves = solver([boards[i] for i in live])
        live = [i for i, move in zip(live, moves, strict=True) if is_correct(boards[i], puzzles[i], ply, move)]
        ply += 2
        found[live] = ply
        live = [i for i in live if ply < len(puzzles[i].line)]
        for i in live:
            for move in puzzles[i].line[ply - 2 : ply]:
                boards[i].push(move)
    return found > 0, found >= [len(puzzle.line) for puzzle in puzzles]


def is_correct(board: chess.Board, puzzle: Puzzle, ply: int, move: str | None) -> bool:
    """Whether a move is a solution at this ply of the line, or mates as the solution does."""
    if move is None or move == puzzle.line[ply].uci():
        return move is not None
    if puzzle.answers:
        return chess.Move.from_uci(move) in puzzle.answers
    return all(_after(board, one).is_checkmate() for one in (puzzle.line[ply], chess.Move.from_uci(move)))


def _after(board: chess.Board, move: chess.Move) -> chess.Board:
    after = board.copy()
    after.push(move)
    return after


def solve_rates(by: Mapping[str, Solver], puzzles: Sequence[Puzzle]) -> pd.DataFrame:
    """Solve rates in percent with 95 % intervals, a row per solver and group (`all`, rating bands, themes with
    MIN_THEME_PUZZLES)."""
    from scipy.stats import binomtest  # takes a second to import

    results = {name: grade(solver, puzzles) for name, solver in by.items()}
    rows = []
    for group, members in _groups(puzzles).items():
        for name, (first, whole) in results.items():
            row = {"group": group, "solver": name, "puzzles": len(members)}
            for column, hits in (("first move", first[members]), ("whole line", whole[members])):
                ends = binomtest(int(hits.sum()), len(hits)).proportion_ci(method="wilson")
                row |= {column: 100 * hits.mean(), f"{column} low": 100 * ends.low, f"{column} high": 100 * ends.high}
            rows.append(row)
    names = [f"{column}{end}" for column in ("first move", "whole line") for end in ("", " low", " high")]
    return pd.DataFrame(rows, columns=["group", "solver", "puzzles", *names]).set_index(["group", "solver"]).round(1)


def _groups(puzzles: Sequence[Puzzle]) -> dict[str, list[int]]:
    """Name -> indices of the puzzles."""
    groups, themes = {"all": list(range(len(puzzles)))}, defaultdict[str, list[int]](list)
    for low, high in RATING_BANDS:
        groups[f"{low}-{high}"] = [i for i, p in enumerate(puzzles) if low <= p.rating < high]
    for i, puzzle in enumerate(puzzles):
        for theme in puzzle.themes:
            themes[theme].append(i)
    groups |= {theme: members for theme, members in sorted(themes.items()) if len(members) >= MIN_THEME_PUZZLES}
    return {group: members for group, members in groups.items() if members}
