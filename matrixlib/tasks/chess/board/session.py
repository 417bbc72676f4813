"""A game of a person against a network: on boards in JupyterLab, by given moves everywhere else."""

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
STATUS = {  # of a game that goes on: whether the network is to move, and whether there is a search
    (True, True): "the network thinks",
    (True, False): "the network is to move: press search here",
    (False, True): "searching; search here again stops it",
    (False, False): "your move",
}
Chances = tuple[float, float, float]
"""White wins, draw, Black wins; sum 1."""
Page = dict[str, Any]
Show = Callable[[Page], None]


def position_page(board: chess.Board, arrows: Mapping[str, Mapping[str, float]], maps: Mapping[str, Any]) -> Page:
    """A position as a page shows it. arrows: whose -> UCI -> share. maps: head -> (8, 8)."""
    last = board.peek().uci() if board.move_stack else ""
    return {
        "fen": board.fen(),
        "turn": chess.COLOR_NAMES[board.turn],
        "check": board.is_check(),
        "last": [last[:2], last[2:4]] if last else [],
        "arrows": {whose: [[move, share] for move, share in moves.items()] for whose, moves in arrows.items()},
        "maps": {head: plots.square_colours(head, values) for head, values in maps.items()},
        "keys": {head: plots.colour_legend(head) for head in maps},
    }


def _line(evaluation: Evaluation | None) -> str:
    """What the search expects, in a line."""
    if evaluation is None or (result := evaluation.search) is None:
        return ""
    board = evaluation.board
    number, side = f"{board.fullmove_number}{'.' if board.turn else '...'}", chess.COLOR_NAMES[board.turn].capitalize()
    return f"{number} {' '.join(evaluation.line)} ({result.value:+.2f} for {side}, {result.simulations:,} simulations)"


class Session:
    """A game from any position, and the pages that show it.

    start: a FEN, or a position as UCI has it; empty for that of chess. side: `white` or `black`, the person's.
    simulations, seconds: of each of the network's moves; 0 for no limit, not both. ValueError for what is not so.

    A page is told of every change, and sends mappings with a `kind` to `handle`. Whatever it asks for ends the search
    first, so only one thread ever changes the game; so does the last page closed.
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
            raise ValueError(f"'{name}' is a network of {task}, and this is a game of chess: give a run of chess")
        self.net, self.name = net, name
        self.game_search = GameSearch(net)
        self.pages: list[Show] = []
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.limit(simulations, seconds)
        self.new_game(start, side)

    def limit(self, simulations: int, seconds: float) -> None:
        """How long the network thinks about a move."""
        if simulations < 0 or seconds < 0 or not (simulations or seconds) or not math.isfinite(seconds):
            raise ValueError(f"a move takes a number of simulations or of seconds, not {simulations} and {seconds}")
        self.simulations, self.seconds = simulations, seconds

    def new_game(self, start: str = "", side: str = "white") -> None:
        """Begin again, from any position."""
        if side not in SIDES:
            raise ValueError(f"side must be white or black, not '{side}'")
        board = protocol.read_position(start or "startpos")
        self.board, self.person, self.resigned = board, SIDES[side], False
        self._first = len(board.move_stack)  # moves before it are not taken back
        self.evaluations: dict[int, Evaluation] = {}

    @property
    def ply(self) -> int:
        return len(self.board.move_stack)

    @property
    def result(self) -> tuple[str, str]:
        """(1-0, 0-1 or 1/2-1/2, and why); `*` while the game goes on. Where a draw can be claimed it is one."""
        board = self.board
        if self.resigned:
            return ("0-1" if self.person else "1-0"), "resigned"
        if outcome := board.outcome():
            return outcome.result(), outcome.termination.name.lower().replace("_", " ")
        if board.is_repetition(3):
            return "1/2-1/2", "the position occurred three times"
        fifty = "fifty moves without a capture or a pawn's move"
        return ("1/2-1/2", fifty) if board.halfmove_clock >= 100 else ("*", "")

    @property
    def over(self) -> bool:
        return self.result[0] != "*"

    @property
    def network_to_move(self) -> bool:
        return not self.over and self.board.turn != self.person

    def play(self, uci: str) -> None:
        """The person's move. ValueError where it is not legal, or not the person's turn."""
        if self.over:
            raise ValueError(f"the game is over: {' '.join(self.result)}")
        if self.board.turn != self.person:
            raise ValueError(f"it is the network's turn, not that of {uci}")
        self.board.push(protocol.legal_move(self.board, uci))

    def think(self, stop: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """Search the position, going on from the tree of the move before; None where it was stopped. What comes of it
        is kept, see `evaluation`."""
        if self.over:
            raise ValueError("the game is over: there is nothing to think about")
        evaluation, ply = self.evaluation, self.ply
        deadline = time.monotonic() + self.seconds if self.seconds else math.inf
        self.game_search.set_position(self.board)
        for result, done in self.game_search.run(self.simulations or math.inf, deadline, stop):
            if stop():
                return None
            self.evaluations[ply] = replace(evaluation, search=replace(result, simulations=done))
        return self.evaluations[ply]

    def answer(self) -> chess.Move:
        """Play the move that the search found best; ValueError where there was none."""
        result = self.evaluation.search
        if result is None or not self.network_to_move:
            raise ValueError("the network has no move to play")
        self.board.push(move_from_index(result.best, self.board))
        return self.board.peek()

    def take_back(self) -> None:
        """Back to where the person chose the last move, or to the beginning."""
        self.resigned = False
        while self.ply > self._first:
            self.board.pop()
            if self.board.turn == self.person:
                break
        self.evaluations = {ply: one for ply, one in self.evaluations.items() if ply <= self.ply}

    @property
    def evaluation(self) -> Evaluation:
        """The network's at the board, with the search's where there was one."""
        return self._evaluate(self.board.copy())  # an answer may be played meanwhile

    def chance_curve(self) -> list[Chances]:
        """The chances in each position of the game, by the network; those of a game that is over as it ended."""
        board = self.board.copy()
        ended: Chances = {"1-0": (1.0, 0.0, 0.0), "0-1": (0.0, 0.0, 1.0)}.get(self.result[0], (0.0, 1.0, 0.0))
        chances = [ended if self.over else self._chances(board.copy())]
        while len(board.move_stack) > self._first:
            board.pop()
            chances.insert(0, self._chances(board.copy()))
        return chances

    def pgn(self) -> str:
        game = chess.pgn.Game.from_board(self.board.copy())
        name = self.name.replace("\\", "\\\\").replace('"', '\\"')  # as the standard of PGN says, section 7
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
        """Show a board to play on; headless the network answers each of `moves` (UCI), or ValueError names it."""
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

        widget = BoardWidget(self.page(), lambda message: self.handle(message, told))
        told = partial(widget.set_trait, "page")
        display(widget)

    def page(self, thinking: bool = False, problem: str = "") -> Page:
        """The game as a page shows it."""
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

    def handle(self, message: Mapping[str, Any], told: Show) -> None:
        """Do what a page, which `told` tells of changes, asks for; what cannot be is said on it."""
        kind, problem, search = message.get("kind"), "", False
        if kind == "closed":
            if told in self.pages:
                self.pages.remove(told)
            if not self.pages and self.stop():
                told(self.page())
            return
        stopped = self.stop()
        try:
            match kind:
                case "open":
                    self.pages.append(told)
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
                    raise ValueError(f"the board does not know what '{kind}' is")
        except ValueError as error:
            problem = str(error)
        search = search or (self.network_to_move and bool(self.pages))
        self._tell(self.page(search, problem), told)
        if search:
            self._stop = threading.Event()
            work = partial(self._search_in_background, self._stop, told)
            self._thread = threading.Thread(target=work, name="board", daemon=True)
            self._thread.start()

    def stop(self) -> bool:
        """End the search, and whether there was one; comes back when it has ended, which takes one batch."""
        thread, self._thread = self._thread, None
        if thread is None or not thread.is_alive():
            return False
        self._stop.set()
        thread.join()
        return True

    def _tell(self, page: Page, asker: Show) -> None:
        for told in dict.fromkeys([*self.pages, asker]):
            told(page)

    def _search_in_background(self, stop: threading.Event, asker: Show) -> None:
        problem = "the search broke off; the kernel's log says why"
        try:
            if self.think(stop.is_set) is not None and self.network_to_move:
                self.answer()
            problem = ""
        finally:
            if not stop.is_set():
                self._tell(self.page(False, problem), asker)
