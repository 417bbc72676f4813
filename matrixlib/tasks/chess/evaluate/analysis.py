"""Analysis of positions and games by network and search, and boards to browse."""

import html
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import chess
import chess.pgn

from matrixlib.data.loader import Loader
from matrixlib.play.search import Evaluator, Search
from matrixlib.tasks.chess import plots
from matrixlib.tasks.chess.evaluate.net import Evaluation, Net
from matrixlib.tasks.chess.game import ChessGame, check_not_over
from matrixlib.tasks.chess.records import from_boards, positions_before, reversible_history
from matrixlib.tasks.chess.task import boards_of
from matrixlib.tasks.chess.uci.game_search import GROWING_BATCH
from matrixlib.tasks.chess.uci.protocol import read_position
from matrixlib.tasks.spec import Check


def analyse(net: Net, position: str, simulations: int = 400) -> Evaluation:
    """Evaluate and search a position; a third occurrence as a second. ValueError if invalid, or the game is over."""
    board = read_position(position)
    game = ChessGame()
    claim = board.is_repetition(3) and not board.is_fivefold_repetition()
    state = from_boards([board], repetition=1) if claim else from_boards([board])
    check_not_over(game, state)
    fast = net.with_threads(net.runtime.threads)
    search = Search(game, Evaluator(fast), GROWING_BATCH, beside=fast.beside, executor=fast.executor)
    history = None if claim else game.key(reversible_history(board))
    search.reset(0, state, history, past=positions_before(board, net.task.history))
    (result,) = search.run(simulations)
    (evaluation,) = net.evaluate_boards([board])
    return replace(evaluation, search=result)


def read_game(path: str | Path) -> list[chess.Board]:
    """Positions of the first game of a PGN file; ValueError without one."""
    file = Path(path)
    if not os.path.isfile(file):
        raise ValueError(f"no PGN file at '{path}'")
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            game = chess.pgn.read_game(stream)
    except IndexError:  # an unbalanced variation
        game = None
    if game is None or game.errors or not game.variations:
        raise ValueError(f"'{file.name}' does not start with a game of legal moves")
    return [game.board(), *(node.board() for node in game.mainline())]


# Boards to look through


@dataclass(frozen=True)
class BoardViewer:
    """Positions to browse (`runs.browse`): boards with a title and the moves of `reference`, e.g. the teacher."""

    positions: tuple[plots.Card, ...]
    reference: str

    def __len__(self) -> int:
        return len(self.positions)

    def figure(self, net: Net, item: int, name: str) -> Any:
        """Boards with the moves of network and `reference` as arrows, and a map for each self-supervised head."""
        position = self.positions[item]
        evaluation = next(net.evaluate_boards([position.board]))
        heading = f"{html.escape(name)}: {position.title}<br>{evaluation.summary}<br>{evaluation.fen}"
        return evaluation.boards({self.reference: position.moves}, heading)

    def board(self, net: Net, item: int, name: str, widget: Any = None) -> Any:
        """The same on the board of `play.ipynb`; a `widget` is changed in place."""
        from matrixlib.tasks.chess.board.session import position_page
        from matrixlib.tasks.chess.board.widget import BoardWidget

        position = self.positions[item]
        evaluation = next(net.evaluate_boards([position.board]))
        moves = {"network": evaluation.moves, self.reference: position.moves}
        words = {"status": f"{name}: {position.title}", "line": evaluation.summary}
        widget = widget or BoardWidget({})
        widget.page = position_page(position.board, moves, evaluation.maps) | words
        return widget

    def check(self, net: Net) -> Check:
        """Check that the policy is a distribution over the legal moves of every position."""
        legal = True
        for one in net.evaluate_boards([position.board for position in self.positions]):
            legal &= set(one.moves) == {move.uci() for move in one.board.legal_moves}
            legal &= not one.moves or abs(sum(one.moves.values()) - 1) < 1e-3
        return "policy over legal moves sums to 1", legal, f"{len(self)} positions"


def game_viewer(path: str | Path) -> BoardViewer:
    """Viewer of the first game of a PGN file with its moves; ValueError without one."""
    boards = read_game(path)
    moves: list[dict[str, float]] = [{board.peek().uci(): 1.0} for board in boards[1:]]
    titles = [f"move {board.fullmove_number} of the game" for board in boards]
    return BoardViewer(tuple(map(plots.Card, boards, titles, [*moves, {}])), "played")


def held_out_viewer(held_out: Loader, count: int) -> BoardViewer:
    """`count` held-out positions, the same for every run of a data set, with the labels' moves."""
    positions: list[plots.Card] = []
    for batch in held_out.sequential(count, sample=count):
        for row, board in enumerate(boards_of(batch)):
            weights = plots.target_moves(batch, row, board)
            shares = {move: weight / sum(weights.values()) for move, weight in weights.items()}
            positions.append(plots.Card(board, f"held-out position {len(positions)}", shares))
    return BoardViewer(tuple(positions), "teacher")
