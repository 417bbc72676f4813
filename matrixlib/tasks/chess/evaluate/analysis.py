"""One position or one game in detail, by a network and by a search with it, for people to look at."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import chess
import chess.pgn
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from matrixlib.play.evaluator import Evaluator
from matrixlib.play.search import Search
from matrixlib.tasks.chess import plots
from matrixlib.tasks.chess.evaluate.net import Evaluation, Net
from matrixlib.tasks.chess.game import ChessGame, refuse_over
from matrixlib.tasks.chess.records import before, from_boards, move_from_index, reversible
from matrixlib.tasks.chess.uci.protocol import read_position, score_text

SHOWN = 5  # moves


@dataclass(frozen=True)
class Analysis:
    """A position: the network's evaluation, and what a search adds; values are the side to move's.

    visits: UCI -> share. line: principal variation in SAN. plies: to a proven end, 0 where none is.
    """

    board: chess.Board
    network: Evaluation
    value: float
    plies: int
    visits: Mapping[str, float]
    line: tuple[str, ...]
    simulations: int

    def __str__(self) -> str:
        side = "White" if self.board.turn else "Black"
        network = self.network
        wdl = "" if network.wdl is None else ", win {:.0%}, draw {:.0%}, loss {:.0%}".format(*network.wdl)
        return (
            f"{self.board.fen()}\n"
            f"network  {side} {network.value:+.2f}{wdl}; {_moves(network.moves)}\n"
            f"search   {side} {self.value:+.2f}, {score_text(self.value, self.plies)}, {self.simulations} simulations; "
            f"{_moves(self.visits)}\n"
            f"line     {' '.join(self.line)}\n"
        )

    def figure(self) -> Figure:
        """The board with the policy and the visits as arrows, and a map for each self-supervised head."""
        moves = {"policy": self.network.moves, "search": self.visits}
        return plots.position_figure(self.board, moves, maps(self.network))


def maps(evaluation: Evaluation) -> dict[str, NDArray[np.float32]]:
    """Head -> (8, 8) on the real board: a probability, or the likeliest of several classes."""
    return {
        head: chances[0] if len(chances) == 1 else chances.argmax(0).astype(np.float32)
        for head, chances in evaluation.ssl.items()
    }


def _moves(shares: Mapping[str, float]) -> str:
    best = sorted(shares.items(), key=lambda item: -item[1])[:SHOWN]
    return ", ".join(f"{move} {share:.0%}" for move, share in best)


def analyse(net: Net, position: str, simulations: int = 400) -> Analysis:
    """Analyse a position, as `Net.evaluate` takes it. ValueError where it is none, or the game is over there.

    Where a third occurrence could be claimed the game may go on: it is searched as if it were the second.
    """
    board = read_position(position)
    game = ChessGame()
    claim = board.is_repetition(3) and not board.is_fivefold_repetition()
    state = from_boards([board], repetition=1) if claim else from_boards([board])
    refuse_over(game, state)
    search = Search(game, Evaluator(net))
    history = None if claim else game.key(reversible(board))
    search.reset(0, state, history, past=before(board, net.task.history))
    (result,) = search.run(simulations)
    (evaluation,) = net.evaluate_boards([board])
    walk, line = board.copy(), []
    for index in result.line:
        move = move_from_index(index, walk)
        line.append(walk.san(move))
        walk.push(move)
    visits = {
        move_from_index(int(move), board).uci(): float(share)
        for move, share in zip(result.moves, result.policy, strict=True)
        if share > 0
    }
    plies = int(result.plies[result.moves == result.best][0])
    return Analysis(board, evaluation, result.value, plies, visits, tuple(line), result.simulations)


def read_game(path: str | Path) -> list[chess.Board]:
    """The positions of the first game of a PGN file, with its moves. ValueError where there is none."""
    file = Path(path)
    if not os.path.isfile(file):
        raise ValueError(f"no PGN file at '{path}'")
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            game = chess.pgn.read_game(stream)
    except IndexError:  # a variation that ends before it began
        game = None
    if game is None or game.errors or not game.variations:
        raise ValueError(f"'{file.name}' does not start with a game whose moves can be played")
    return [game.board(), *(node.board() for node in game.mainline())]


def along(net: Net, boards: list[chess.Board]) -> NDArray[np.float64]:
    """(N,) expected result for White in each position, by the network alone; a finished game counts as it ended."""
    signs = np.array([1 if board.turn else -1 for board in boards])
    values = signs * net.values(boards).astype(np.float64)
    for i, board in enumerate(boards):
        if board.is_game_over():
            values[i] = {"1-0": 1, "0-1": -1}.get(board.result(), 0)
    return values


def game_figure(net: Net, boards: list[chess.Board]) -> Figure:
    """The expected result for White from move to move."""
    return plots.course_figure(along(net, boards), boards[0].ply())
