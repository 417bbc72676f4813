"""A game against a network: interactive in JupyterLab, scripted when headless."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from typing import Any

import chess
import chess.pgn

from matrixlib import progress
from matrixlib.tasks.chess import plots
from matrixlib.tasks.chess.evaluate.net import Evaluation, Net
from matrixlib.tasks.chess.records import move_from_index
from matrixlib.tasks.chess.uci import protocol
from matrixlib.tasks.chess.uci.game_search import GameSearch

SIDES = {"white": chess.WHITE, "black": chess.BLACK}
STATUS = {  # (network to move, search running) -> text, while the game goes on
    (True, True): "the network thinks",
    (True, False): "the network is to move: press search here",
    (False, True): "searching; search here again stops it",
    (False, False): "your move",
}
Chances = tuple[float, float, float]  # White wins, draw, Black wins; sum 1
Page = dict[str, Any]
Show = Callable[[Page], None]


def position_page(board: chess.Board, arrows: Mapping[str, Mapping[str, float]], maps: Mapping[str, Any]) -> Page:
    """A position as page data. arrows: source -> UCI -> probability. maps: head -> (8, 8)."""
    last = board.peek().uci() if board.move_stack else ""
    return {
        "fen": board.fen(),
        "turn": chess.COLOR_NAMES[board.turn],
        "check": board.is_check(),
        "last": [last[:2], last[2:4]] if last else [],
        "arrows": {source: [[move, p] for move, p in moves.items()] for source, moves in arrows.items()},
        "maps": {head: plots.square_colours(head, values) for head, values in maps.items()},
        "keys": {head: plots.colour_legend(head) for head in maps},
    }


def _line(evaluation: Evaluation | None) -> str:
    """The search's principal variation and value as text."""
    if evaluation is None or (result := evaluation.search) is None:
        return ""
    board = evaluation.board
    number, side = f"{board.fullmove_number}{'.' if board.turn else '...'}", chess.COLOR_NAMES[board.turn].capitalize()
    return f"{number} {' '.join(evaluation.line)} ({result.value:+.2f} for {side}, {result.simulations:,} simulations)"


class Session:
    """A game against a network, and the board widgets that show it.

    start: a FEN or UCI position, "" for the initial one. side: the person's, `white` or `black`. simulations, seconds:
    limits of a network's move, 0 for none, not both 0. ValueError for invalid arguments.

    Widgets receive every change as a page and send messages with a `kind` to `handle`. A message first stops the
    search, so only one thread changes the game; closing the last widget stops it too.
    """

    def __init__(
        self,
        net: Net,
        name: str = "network",
        start: str = "",
        side: str = "white",
        simulations: int = 200,
        seconds: float = 0.0,
    ) -> None:
        if not isinstance(net, Net):
            task = net.task.config.task
            raise ValueError(f"'{name}' is a network of {task}, not of chess: give a chess run")
        self.net, self.name = net, name
        self.game_search = GameSearch(net.with_threads(net.runtime.threads))
        self.pages: list[Show] = []
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.limit(simulations, seconds)
        self.new_game(start, side)

    def limit(self, simulations: int, seconds: float) -> None:
        """Set the limits of a network's move; ValueError if both are 0 or one is invalid."""
        if simulations < 0 or seconds < 0 or not (simulations or seconds) or not math.isfinite(seconds):
            raise ValueError(f"simulations and seconds must be finite and not both 0, got {simulations} and {seconds}")
        self.simulations, self.seconds = simulations, seconds

    def new_game(self, start: str = "", side: str = "white") -> None:
        if side not in SIDES:
            raise ValueError(f"side must be white or black, not '{side}'")
        board = protocol.read_position(start or "startpos")
        self.board, self.person, self.resigned = board, SIDES[side], False
        self._first = len(board.move_stack)  # moves before it cannot be taken back
        self.evaluations: dict[int, Evaluation] = {}

    @property
    def ply(self) -> int:
        return len(self.board.move_stack)

    @property
    def result(self) -> tuple[str, str]:
        """(1-0, 0-1, 1/2-1/2 or `*`, reason). Draws need no claim."""
        board = self.board
        if self.resigned:
            return ("0-1" if self.person else "1-0"), "resigned"
        if outcome := board.outcome():
            return outcome.result(), outcome.termination.name.lower().replace("_", " ")
        if board.is_repetition(3):
            return "1/2-1/2", "threefold repetition"
        return ("1/2-1/2", "fifty-move rule") if board.halfmove_clock >= 100 else ("*", "")

    @property
    def over(self) -> bool:
        return self.result[0] != "*"

    @property
    def network_to_move(self) -> bool:
        return not self.over and self.board.turn != self.person

    def play(self, uci: str) -> None:
        """Play the person's move; ValueError for an illegal one and out of turn."""
        if self.over:
            raise ValueError(f"the game is over: {' '.join(self.result)}")
        if self.board.turn != self.person:
            raise ValueError(f"{uci} is out of turn: it is the network's turn")
        self.board.push(protocol.legal_move(self.board, uci))

    def think(self, stop: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """Search the position, reusing the previous tree, and store the result in `evaluation`; None if stopped."""
        if self.over:
            raise ValueError("the game is over: nothing to search")
        evaluation, ply = self.evaluation, self.ply
        deadline = time.monotonic() + self.seconds if self.seconds else math.inf
        self.game_search.set_position(self.board)
        for result, done in self.game_search.run(self.simulations or math.inf, deadline, stop):
            if stop():
                return None
            self.evaluations[ply] = replace(evaluation, search=replace(result, simulations=done))
        return self.evaluations[ply]

    def answer(self) -> chess.Move:
        """Play the search's best move; ValueError without a search and out of turn."""
        result = self.evaluation.search
        if result is None or not self.network_to_move:
            raise ValueError("the network has no move to play")
        self.board.push(move_from_index(result.best, self.board))
        return self.board.peek()

    def take_back(self) -> None:
        """Take back to the person's last move, or to the start."""
        self.resigned = False
        while self.ply > self._first:
            self.board.pop()
            if self.board.turn == self.person:
                break
        self.evaluations = {ply: one for ply, one in self.evaluations.items() if ply <= self.ply}

    @property
    def evaluation(self) -> Evaluation:
        """Evaluation of the position, with the search's result if there is one."""
        return self._evaluate(self.board.copy())  # another thread may play a move meanwhile

    def chance_curve(self) -> list[Chances]:
        """Result probabilities in each position by the network, at the end of a game the result."""
        board = self.board.copy()
        ended: Chances = {"1-0": (1.0, 0.0, 0.0), "0-1": (0.0, 0.0, 1.0)}.get(self.result[0], (0.0, 1.0, 0.0))
        chances = [ended if self.over else self._chances(board.copy())]
        while len(board.move_stack) > self._first:
            board.pop()
            chances.insert(0, self._chances(board.copy()))
        return chances

    def pgn(self) -> str:
        game = chess.pgn.Game.from_board(self.board.copy())
        name = self.name.replace("\\", "\\\\").replace('"', '\\"')  # PGN standard, section 7
        white, black = ("person", name) if self.person else (name, "person")
        headers = {"Event": "A game in a notebook", "Date": f"{date.today():%Y.%m.%d}", "White": white, "Black": black}
        game.headers.update(headers | {"Result": self.result[0]})
        return str(game)

    def _evaluate(self, board: chess.Board) -> Evaluation:
        if (ply := len(board.move_stack)) not in self.evaluations:
            (self.evaluations[ply],) = self.net.evaluate_boards([board])
        return self.evaluations[ply]

    def _chances(self, board: chess.Board) -> Chances:
        evaluation = self._evaluate(board)
        win, draw, loss = evaluation.wdl or ((1 + evaluation.value) / 2, 0.0, (1 - evaluation.value) / 2)
        return (win, draw, loss) if board.turn else (loss, draw, win)

    def show(self, moves: Sequence[str] = ()) -> None:
        """Show a board to play on; headless, play `moves` (UCI) with the network's answers. ValueError: bad move."""
        if not progress.interactive():
            for move in ("", *moves):  # from a start position it may be the network's turn
                if move:
                    self.play(move)
                if self.network_to_move:
                    self.think()
                    self.answer()
            return
        from IPython.display import display

        from matrixlib.tasks.chess.board.widget import BoardWidget

        widget = BoardWidget(self.page(), lambda message: self.handle(message, show))
        show = partial(widget.set_trait, "page")
        display(widget)

    def page(self, thinking: bool = False, problem: str = "") -> Page:
        """The game as page data. problem: error text to show."""
        board, evaluation = self.board, self.evaluation
        visits = dict(sorted(evaluation.visits.items(), key=lambda item: -item[1]))
        latest = evaluation if evaluation.search else self.evaluations.get(self.ply - 1)
        destinations: dict[str, list[str]] = {}
        if not (thinking or self.over or self.network_to_move):
            for name in dict.fromkeys(move.uci()[:4] for move in board.legal_moves):
                destinations.setdefault(name[:2], []).append(name[2:])
        return {
            **position_page(board, {"policy": evaluation.moves, "search": visits}, evaluation.maps),
            "side": chess.COLOR_NAMES[self.person],
            "destinations": destinations,
            "promotions": sorted({move.uci()[:4] for move in board.legal_moves if move.promotion}),
            "thinking": thinking,
            "problem": problem,
            "status": f"{self.result[0]}, {self.result[1]}" if self.over else STATUS[self.network_to_move, thinking],
            "over": self.over,
            "chances": self.chance_curve(),
            "line": _line(latest),
            "pgn": self.pgn(),
            "simulations": self.simulations,
            "seconds": self.seconds,
        }

    def handle(self, message: Mapping[str, Any], show: Show) -> None:
        """Handle a widget's message. show: updates the widget, with the error text of an invalid request."""
        kind, problem, search = message.get("kind"), "", False
        if kind == "closed":
            if show in self.pages:
                self.pages.remove(show)
            if not self.pages and self.stop():
                show(self.page())
            return
        stopped = self.stop()
        try:
            match kind:
                case "open":
                    self.pages.append(show)
                case "move":
                    self.play(str(message["move"]))
                case "new":
                    self.new_game(str(message["start"]), str(message["side"]))
                case "limit":
                    simulations = float(message["simulations"] or 0)
                    if not simulations.is_integer():
                        raise ValueError(f"simulations must be a whole number, not {message['simulations']}")
                    self.limit(int(simulations), float(message["seconds"] or 0))
                case "back":
                    self.take_back()
                case "resign":
                    self.resigned = not self.over or self.resigned
                case "search":
                    search = not self.over and not stopped
                case _:
                    raise ValueError(f"unknown message '{kind}' of the board")
        except ValueError as error:
            problem = str(error)
        search = search or (self.network_to_move and bool(self.pages))
        self._update_pages(self.page(search, problem), show)
        if search:
            self._stop = threading.Event()
            work = partial(self._search_in_background, self._stop, show)
            self._thread = threading.Thread(target=work, name="board", daemon=True)
            self._thread.start()

    def stop(self) -> bool:
        """Stop the search and wait for it, at most one batch; returns whether one was running."""
        thread, self._thread = self._thread, None
        if thread is None or not thread.is_alive():
            return False
        self._stop.set()
        thread.join()
        return True

    def _update_pages(self, page: Page, sender: Show) -> None:
        for show in dict.fromkeys([*self.pages, sender]):
            show(page)

    def _search_in_background(self, stop: threading.Event, sender: Show) -> None:
        problem = "the search failed; see the kernel's log"
        try:
            if self.think(stop.is_set) is not None and self.network_to_move:
                self.answer()
            problem = ""
        finally:
            if not stop.is_set():
                self._update_pages(self.page(False, problem), sender)
