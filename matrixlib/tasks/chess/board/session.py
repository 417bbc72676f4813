"""A game of a person against a network: what is on the board, what the network thinks, what has been played.

Nothing here knows of a page or of threads; `table` does.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import chess
import chess.pgn
import numpy as np
from numpy.typing import NDArray

from matrixlib.hardware.openmp import considerate
from matrixlib.play.search import SearchResult
from matrixlib.tasks.chess.evaluate import analysis
from matrixlib.tasks.chess.evaluate.net import Evaluation, Net
from matrixlib.tasks.chess.records import from_boards, move_from_index
from matrixlib.tasks.chess.uci import protocol
from matrixlib.tasks.chess.uci.thinker import Thinker

SIDES = {"white": chess.WHITE, "black": chess.BLACK}
Chances = tuple[float, float, float]
"""White wins, draw, Black wins; sum 1."""


@dataclass(frozen=True)
class Thought:
    """What a search makes of a position.

    turn: the side to move there. visits: UCI -> share of the visits, most first. line: principal variation in SAN, with
    numbers of the moves. value: expected result in [-1, 1] of that side.
    """

    turn: chess.Color

    best: chess.Move
    visits: Mapping[str, float]
    line: str
    value: float
    simulations: int

    def __str__(self) -> str:
        side = "White" if self.turn else "Black"
        return f"{self.line} ({self.value:+.2f} for {side}, {self.simulations:,} simulations)"


class Session:
    """A game from any position.

    net: plays one side. name: of the network, for the PGN. start: a FEN, or a position as UCI has it; empty for that
    of chess. side: `white` or `black`, the person's. simulations, seconds: of each of the network's moves; 0 for no
    limit, not both. ValueError for what is not so, and for a network of something else than chess.
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
        self.thinker = Thinker(net)
        self.end_thinking: Callable[[], None] = lambda: None  # of the table that was asked for something last
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
        from_boards([board.root()])  # refuses what cannot be played
        self.board, self.person, self.resigned = board, SIDES[side], False
        self._first = len(board.move_stack)  # moves before it are not taken back
        self._evaluations: dict[int, Evaluation] = {}
        self._thoughts: dict[int, Thought] = {}

    @property
    def ply(self) -> int:
        """Half moves since the start position."""
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
        if board.halfmove_clock >= 100:
            return "1/2-1/2", "fifty moves without a capture or a pawn's move"
        return "*", ""

    @property
    def over(self) -> bool:
        return self.result[0] != "*"

    @property
    def network_to_move(self) -> bool:
        """Whether the network is to move in a game that goes on."""
        return not self.over and self.board.turn != self.person

    def destinations(self) -> dict[str, list[str]]:
        """Square -> squares that the person may move to; empty where the person is not to move."""
        squares: dict[str, list[str]] = {}
        if not self.over and self.board.turn == self.person:
            for move in self.board.legal_moves:
                there = squares.setdefault(chess.square_name(move.from_square), [])
                if (name := chess.square_name(move.to_square)) not in there:
                    there.append(name)
        return squares

    def play(self, uci: str) -> None:
        """The person's move. ValueError where it is not legal, or not the person's turn."""
        if self.over:
            raise ValueError(f"the game is over: {' '.join(self.result)}")
        if self.board.turn != self.person:
            raise ValueError(f"it is the network's turn, not that of {uci}")
        self.board.push(protocol.legal_move(self.board, uci))

    @considerate()
    def think(self, stop: Callable[[], bool] = lambda: False) -> Thought | None:
        """Search the position, keeping what was thought before; None where it was stopped.

        The game stays as it is; what comes of it is also kept, see `thought`.
        """
        board = self.board
        if not any(board.legal_moves):
            raise ValueError("the game is over: there is nothing to think about")
        deadline = time.monotonic() + self.seconds if self.seconds else math.inf
        if not self.thinker.place(board):  # neither side can mate
            move = next(iter(board.legal_moves))
            self._thoughts[self.ply] = Thought(board.turn, move, {move.uci(): 1.0}, self._san([move]), 0.0, 0)
            return self._thoughts[self.ply]
        for result, done in self.thinker.think(self.simulations or math.inf, deadline, stop):
            if stop():
                return None
            self._thoughts[self.ply] = self._thought(result, done)
        return self._thoughts[self.ply]

    def answer(self) -> chess.Move:
        """Play the move that was thought best; ValueError where nothing was thought."""
        thought = self.thought
        if thought is None or not self.network_to_move:
            raise ValueError("the network has no move to play")
        self.board.push(thought.best)
        return thought.best

    def take_back(self) -> None:
        """Back to where the person chose the last move, or to the beginning."""
        self.resigned = False
        while self.ply > self._first:
            self.board.pop()
            if self.board.turn == self.person:
                break
        self._evaluations = {ply: one for ply, one in self._evaluations.items() if ply <= self.ply}
        self._thoughts = {ply: one for ply, one in self._thoughts.items() if ply <= self.ply}

    def resign(self) -> None:
        """The person gives up."""
        self.resigned = not self.over or self.resigned

    # What the network thinks

    @property
    def evaluation(self) -> Evaluation:
        """The network's at the board."""
        return self._evaluate(self.board.copy())  # an answer may be played meanwhile

    @property
    def thought(self) -> Thought | None:
        """The search's at the board, if there was one."""
        return self._thoughts.get(self.ply)

    @property
    def latest(self) -> Thought | None:
        """The search's at the board, or about the move that led to it."""
        return self.thought or self._thoughts.get(self.ply - 1)

    def maps(self) -> dict[str, NDArray[np.float32]]:
        """Head -> (8, 8) on the real board, see `analysis.maps`."""
        return analysis.maps(self.evaluation)

    def course(self) -> list[Chances]:
        """The chances in each position of the game, by the network; those of a game that is over as it ended."""
        boards, board = [], self.board.copy()
        while True:
            boards.append(board.copy())
            if len(board.move_stack) <= self._first:
                break
            board.pop()
        chances = [self._chances(one) for one in reversed(boards)]
        if self.over:
            chances[-1] = {"1-0": (1.0, 0.0, 0.0), "0-1": (0.0, 0.0, 1.0)}.get(self.result[0], (0.0, 1.0, 0.0))
        return chances

    def pgn(self) -> str:
        """The game."""
        game = chess.pgn.Game.from_board(self.board.copy())
        name = self.name.replace("\\", "\\\\").replace('"', '\\"')  # as the standard of PGN says, section 7
        names = {self.person: "person", not self.person: name}
        game.headers["Event"] = "A game in a notebook"
        game.headers["White"], game.headers["Black"] = names[chess.WHITE], names[chess.BLACK]
        game.headers["Result"] = self.result[0]
        return str(game)

    def _evaluate(self, board: chess.Board) -> Evaluation:
        ply = len(board.move_stack)
        if ply not in self._evaluations:
            (self._evaluations[ply],) = self.net.evaluate_boards([board])
        return self._evaluations[ply]

    def _chances(self, board: chess.Board) -> Chances:
        evaluation = self._evaluate(board)
        wdl = evaluation.wdl or ((1 + evaluation.value) / 2, 0.0, (1 - evaluation.value) / 2)
        return wdl if board.turn else (wdl[2], wdl[1], wdl[0])

    def _thought(self, result: SearchResult, done: int) -> Thought:
        moves = [move_from_index(int(move), self.board).uci() for move in result.moves]
        order = np.argsort(-result.policy, kind="stable")
        visits = {moves[row]: float(result.policy[row]) for row in order if result.policy[row] > 0}
        line = self._san(self.thinker.line(self.board, result.best))
        best = move_from_index(result.best, self.board)
        return Thought(self.board.turn, best, visits, line, result.value, done)

    def _san(self, moves: list[chess.Move]) -> str:
        return self.board.variation_san(moves)
