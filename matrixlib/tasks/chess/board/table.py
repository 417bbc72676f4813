"""A session behind a page: what the page is shown, what it asks for, and the network's thinking on a thread of its own.

A page is told of every change by one mapping of plain values, and sends mappings with a `kind`. Whatever it asks for
ends the thinking first, that of another table of the session, too; so only one thread ever changes the session. A page
that is closed ends that of its own table alone.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import chess

from matrixlib.tasks.chess import plots
from matrixlib.tasks.chess.board.session import Session

Page = dict[str, Any]
STATUS = {  # of a game that goes on: whether the network is to move, and whether there is a search
    (True, True): "the network thinks",
    (True, False): "the network is to move: press search here",
    (False, True): "searching; search here again stops it",
    (False, False): "your move",
}


def position_page(board: chess.Board, arrows: Mapping[str, Mapping[str, float]], maps: Mapping[str, Any]) -> Page:
    """A position as a page shows it. arrows: whose -> UCI -> share, as in `plots.position_figure`; so are maps."""
    last = board.peek() if board.move_stack else None
    return {
        "fen": board.fen(),
        "turn": _side(board.turn),
        "check": board.is_check(),
        "last": [chess.square_name(square) for square in (last.from_square, last.to_square)] if last else [],
        "arrows": {whose: [[move, share] for move, share in moves.items()] for whose, moves in arrows.items()},
        "maps": {head: plots.square_colours(head, values) for head, values in maps.items()},
        "keys": {head: plots.colour_key(head) for head in maps},
    }


def session_page(session: Session, thinking: bool = False, problem: str = "") -> Page:
    """A game as a page shows it."""
    board, thought, latest = session.board, session.thought, session.latest
    result, why = session.result
    promotions = sorted({move.uci()[:4] for move in board.legal_moves if move.promotion})
    return {
        **position_page(
            board, {"policy": session.evaluation.moves, "search": thought.visits if thought else {}}, session.maps()
        ),
        "side": _side(session.person),
        "destinations": {} if thinking else session.destinations(),
        "promotions": promotions,
        "thinking": thinking,
        "problem": problem,
        "status": f"{result}, {why}" if session.over else STATUS[session.network_to_move, thinking],
        "over": session.over,
        "chances": session.course(),
        "line": str(latest or ""),
        "pgn": session.pgn(),
        "simulations": session.simulations,
        "seconds": session.seconds,
    }


def _side(colour: chess.Color) -> str:
    return chess.COLOR_NAMES[colour]


class Table:
    """show: is told how the page is to look; called on the caller's thread and on that of the thinking."""

    def __init__(self, session: Session, show: Callable[[Page], None]) -> None:
        self.session, self.show = session, show
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._pages = 0  # that are open

    def handle(self, message: Mapping[str, Any]) -> None:
        """Do what a page asks for; what cannot be is said on the page."""
        session, problem, search = self.session, "", False
        stopped = self.stop()
        if message.get("kind") == "closed":
            self._pages = max(0, self._pages - 1)
            if not stopped:  # another table may think
                return
        else:
            session.end_thinking()
            session.end_thinking = self._give_way
        try:
            match message.get("kind"):
                case "open":
                    self._pages += 1
                case "closed":
                    pass
                case "move":
                    session.play(str(message["move"]))
                case "new":
                    session.new_game(str(message["start"]), str(message["side"]))
                case "limit":
                    simulations = float(message["simulations"] or 0)
                    if not simulations.is_integer():
                        raise ValueError(f"simulations must be a whole number, not {message['simulations']}")
                    session.limit(int(simulations), float(message["seconds"] or 0))
                case "back":
                    session.take_back()
                case "resign":
                    session.resign()
                case "search":
                    search = not session.over and not stopped
                case other:
                    raise ValueError(f"the board does not know what '{other}' is")
        except ValueError as error:
            problem = str(error)
        search = search or (session.network_to_move and self._pages > 0)
        self.show(session_page(session, search, problem))
        if search:
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._think, args=(self._stop,), name="board", daemon=True)
            self._thread.start()

    def stop(self) -> bool:
        """End the thinking, and whether there was any; comes back when it has ended, which takes one batch."""
        thread, self._thread = self._thread, None
        if thread is None or not thread.is_alive():
            return False
        self._stop.set()
        thread.join()
        return True

    def _give_way(self) -> None:
        """Another table takes over."""
        if self.stop():
            self.show(session_page(self.session))

    def _think(self, stop: threading.Event) -> None:
        problem = "the search broke off; the kernel's log says why"
        try:
            thought = self.session.think(stop.is_set)
            if thought is not None and self.session.network_to_move:
                self.session.answer()
            problem = ""
        finally:
            if not stop.is_set():
                self.show(session_page(self.session, False, problem))
