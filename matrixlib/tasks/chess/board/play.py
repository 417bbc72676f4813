"""A game in a notebook: on a board in JupyterLab, by given moves everywhere else."""

import io
from collections.abc import Sequence

import chess.pgn
from matplotlib.figure import Figure

from matrixlib import progress
from matrixlib.tasks.chess import plots
from matrixlib.tasks.chess.board.session import Session
from matrixlib.tasks.spec import Check


def play(session: Session, moves: Sequence[str] = ()) -> None:
    """Show a board to play on; headless the network answers each of `moves` (UCI) of the person.

    ValueError for a move that is not legal.
    """
    if not progress.interactive():
        for move in (None, *moves):  # from a start position it may be the network's turn
            if move is not None:
                session.play(move)
            if session.network_to_move:
                session.think()
                session.answer()
        return
    from IPython.display import display

    from matrixlib.tasks.chess.board.table import Table, session_page
    from matrixlib.tasks.chess.board.widget import BoardWidget

    table = Table(session, lambda page: widget.set_trait("page", page))
    widget = BoardWidget(session_page(session), table.handle)
    display(widget)


def checks(session: Session) -> list[Check]:
    """What must hold of a game: name, whether it does, details."""
    game = chess.pgn.read_game(io.StringIO(session.pgn()))
    assert game is not None
    same = not game.errors and game.end().board().fen() == session.board.fen()
    whole = all(abs(sum(chances) - 1) < 1e-3 for chances in session.course())
    return [
        ("the game can be read back from its PGN", same, f"{session.ply} half moves"),
        ("the chances of every position make one", whole, f"{len(session.course())} positions"),
    ]


def figure(session: Session) -> Figure:
    """The board as it stands, with the arrows of policy and search, and a map for each self-supervised head."""
    moves = {"policy": session.evaluation.moves}
    if session.thought is not None:
        moves["search"] = dict(session.thought.visits)
    return plots.position_figure(session.board, moves, session.maps())


def chances_figure(session: Session) -> Figure:
    """Win, draw and loss over the game."""
    return plots.chances_figure(session.course())
