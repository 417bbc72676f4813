"""Boards to look through: held-out positions with the teacher's moves, or a game, and what a network says of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chess
from matplotlib.figure import Figure

from matrixlib.data.loader import Loader
from matrixlib.tasks.chess import plots
from matrixlib.tasks.chess.evaluate import analysis
from matrixlib.tasks.chess.evaluate.net import Evaluation, Net
from matrixlib.tasks.chess.records import move_from_index
from matrixlib.tasks.chess.task import boards_of
from matrixlib.tasks.spec import Check

MOVES = 4  # named in a title


@dataclass(frozen=True)
class Position:
    """A board with its title, and the moves of somebody else there: who, and UCI -> share of the moves."""

    board: chess.Board
    title: str
    who: str
    moves: Mapping[str, float]


@dataclass(frozen=True)
class BoardViewer:
    """Positions one after the other, as `runs.browse` shows them."""

    positions: tuple[Position, ...]

    def __len__(self) -> int:
        return len(self.positions)

    def figure(self, net: Net, item: int) -> Figure:
        """The board with the network's moves as arrows, beside it somebody else's, and a map for each head."""
        position = self.positions[item]
        (evaluation,) = net.evaluate_boards([position.board])
        moves = {"network": evaluation.moves, position.who: position.moves}
        figure = plots.position_figure(position.board, moves, analysis.maps(evaluation))
        words = describe(evaluation, position.board)
        figure.suptitle(f"{position.title}\n{words}\n{position.board.fen()}", fontsize=11)
        return figure

    def board(self, net: Net, item: int, widget: Any = None) -> Any:
        """The same on the board of `play.ipynb`."""
        from matrixlib.tasks.chess.board.session import position_page
        from matrixlib.tasks.chess.board.widget import BoardWidget

        position = self.positions[item]
        (evaluation,) = net.evaluate_boards([position.board])
        moves = {"network": evaluation.moves, position.who: position.moves}
        words = {"status": position.title, "line": describe(evaluation, position.board)}
        page = position_page(position.board, moves, analysis.maps(evaluation)) | words
        if widget is None:
            return BoardWidget(page)
        widget.page = page
        return widget

    def check(self, net: Net) -> Check:
        """Whether the network's policy is one over the legal moves of every position."""
        legal = True
        evaluations = net.evaluate_boards([position.board for position in self.positions])
        for evaluation, position in zip(evaluations, self.positions, strict=True):
            moves = evaluation.moves
            legal &= set(moves) == {move.uci() for move in position.board.legal_moves}
            legal &= not moves or abs(sum(moves.values()) - 1) < 1e-3
        return "the policy is one over the legal moves", legal, f"{len(self)} positions"


def game_viewer(path: str | Path) -> BoardViewer:
    """The positions of the first game of a PGN file, with its moves. ValueError where there is none."""
    boards = analysis.read_game(path)
    moves: list[dict[str, float]] = [{board.peek().uci(): 1.0} for board in boards[1:]]
    return BoardViewer(
        tuple(
            Position(board, f"move {board.fullmove_number} of the game", "played", shares)
            for board, shares in zip(boards, [*moves, {}], strict=True)
        )
    )


def held_out_viewer(held_out: Loader, count: int) -> BoardViewer:
    """The same `count` held-out positions for every run of a data set, with the teacher's moves."""
    positions: list[Position] = []
    for batch in held_out.sequential(count, sample=count):
        index, weight = batch["policy_index"].numpy(), batch["policy_weight"].numpy()
        for row, board in enumerate(boards_of(batch)):
            known = (index[row] >= 0) & (weight[row] > 0)
            total = weight[row][known].sum()
            shares = {
                move_from_index(int(move), board).uci(): float(share / total)
                for move, share in zip(index[row][known], weight[row][known], strict=True)
            }
            positions.append(Position(board, f"held-out position {len(positions)}", "teacher", shares))
    return BoardViewer(tuple(positions))


def describe(evaluation: Evaluation, board: chess.Board) -> str:
    """The network's opinion in a line."""
    side = "White" if board.turn else "Black"
    wdl = evaluation.wdl
    chances = "" if wdl is None else "win {:.0%}, draw {:.0%}, loss {:.0%}; ".format(*wdl)
    moves = ", ".join(f"{move} {share:.0%}" for move, share in list(evaluation.moves.items())[:MOVES])
    return f"{side} to move, {evaluation.value:+.2f}: {chances}{moves or 'the game is over'}"
