"""A search that follows a game: for UCI, and for the board of a notebook."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import chess
import numpy as np

from matrixlib.play.search import Evaluator, Search, SearchOptions, SearchResult
from matrixlib.tasks.chess.game import ChessGame
from matrixlib.tasks.chess.records import (
    from_boards,
    move_from_index,
    policy_index,
    positions_before,
    reversible_history,
)
from matrixlib.tasks.chess.uci import protocol

if TYPE_CHECKING:
    from matrixlib.tasks.chess.evaluate.net import Net

REPORT_SECONDS = 1.0  # seconds between two looks at a search


class GameSearch:
    """One tree, which keeps from move to move what it knows."""

    def __init__(self, net: Net, game: ChessGame | None = None, options: SearchOptions | None = None) -> None:
        self.net = net
        self.search = Search(game or ChessGame(), Evaluator(net), options or SearchOptions())
        self.game_line: tuple[str, list[chess.Move]] | None = None  # start and moves of the game in the tree

    def set_position(self, board: chess.Board, only: Sequence[chess.Move] = ()) -> bool:
        """Put the tree at a board, keeping what is known where it can be; False where the position is dead.

        only: the moves to consider, all unless given. Where a draw could be claimed the game may go on: a third
        occurrence is searched as a second, and a clock that has run out as one that has just begun.
        """
        search, moves, seen = self.search, board.move_stack, positions_before(board, self.net.task.history)
        start, indices = board.root().fen(), [policy_index(move, board.turn) for move in only]
        past = self.game_line[1] if self.game_line and self.game_line[0] == start and not only else None
        if past is not None and moves[: len(past)] == past:
            for i in range(len(past), len(moves)):
                turn = board.turn if (len(moves) - i) % 2 == 0 else not board.turn
                search.advance([0], [policy_index(moves[i], turn)])
        else:
            state = from_boards([board])
            search.reset(0, state, search.game.key(reversible_history(board)), only=indices, past=seen)
        self.game_line = None if only else (start, list(moves))
        if not self._is_terminal():
            return True
        state = from_boards([board], repetition=int(board.is_repetition(2)))
        state["halfmove"] %= 100
        search.reset(0, state, only=indices, past=seen)
        self.game_line = None
        return not self._is_terminal()

    def _is_terminal(self) -> bool:
        game, states = self.search.game, self.search.states
        return not np.isnan(game.terminal(states, np.diff(game.legal(states)[1]))).all()

    def run(
        self, most: float, deadline: float, stop: Callable[[], bool], capacity: float = np.inf
    ) -> Iterator[tuple[SearchResult, int]]:
        """Search the placed position: what is known at least every second and each time the simulations have doubled,
        and how many there were. most: simulations, perhaps infinite. deadline: of time.monotonic(). stop: called
        between batches. capacity: bytes of memory; a tree that takes more forgets what was visited least."""
        search = self.search
        done, pause, over = 0, deadline, False

        def due() -> bool:
            return stop() or time.monotonic() >= pause or search.bytes >= capacity

        while not over:
            pause = min(deadline, time.monotonic() + REPORT_SECONDS)
            target = min(most, protocol.DEPTH0_SIMULATIONS << protocol.depth_of(done) + 1)
            (result,) = search.run(int(target) - done, until=due)
            done += result.simulations
            over = stop() or result.proven or done >= most or time.monotonic() >= deadline
            yield result, done
            if search.bytes >= capacity:
                search.trim()

    def line(self, board: chess.Board, move: int) -> list[chess.Move]:
        """The principal variation from a move (policy index) of the board that was placed."""
        walk, moves = board.copy(stack=False), []
        for index in self.search.line(0, move):
            moves.append(move_from_index(index, walk))
            walk.push(moves[-1])
        return moves
