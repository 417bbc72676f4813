"""Search along a game with tree reuse, for UCI and the notebook's board."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import chess
import numpy as np

from matrixlib.play.search import Evaluator, Search, SearchOptions, SearchResult
from matrixlib.tasks.chess import records
from matrixlib.tasks.chess.game import ChessGame
from matrixlib.tasks.chess.uci import protocol

if TYPE_CHECKING:
    from matrixlib.tasks.chess.evaluate.net import Net

GROWING_BATCH = SearchOptions(most_leaves=64)
REPORT_SECONDS = 1.0  # maximum time between two results of a search
MOST_SIMULATIONS = 1 << 30  # visits are counted in 32 bits


class GameSearch:
    """A search tree that is reused from move to move."""

    def __init__(self, net: Net, game: ChessGame | None = None, options: SearchOptions | None = None) -> None:
        self.net = net
        self.search = Search(
            game or ChessGame(), Evaluator(net), options or GROWING_BATCH, beside=net.beside, executor=net.executor
        )
        self.game_line: tuple[str, list[chess.Move]] | None = None  # start FEN and moves of the tree's game

    def set_position(self, board: chess.Board, only: Sequence[chess.Move] = ()) -> bool:
        """Set the position, reusing the tree if it contains it; False for a dead position.

        only: moves to consider, default all. Claimable draws are searched on: a third occurrence like a second, and a
        half-move clock of 100 like 0.
        """
        search, moves, seen = self.search, board.move_stack, records.positions_before(board, self.net.task.history)
        start, indices = board.root().fen(), [records.policy_index(move, board.turn) for move in only]
        past = self.game_line[1] if self.game_line and self.game_line[0] == start and not only else None
        if past is not None and moves[: len(past)] == past:
            for i in range(len(past), len(moves)):
                turn = board.turn if (len(moves) - i) % 2 == 0 else not board.turn
                search.advance([0], [records.policy_index(moves[i], turn)])
        else:
            state = records.from_boards([board])
            search.reset(0, state, search.game.key(records.reversible_history(board)), only=indices, past=seen)
        self.game_line = None if only else (start, list(moves))
        if not self._is_terminal():
            return True
        state = records.from_boards([board], repetition=int(board.is_repetition(2)))
        state["halfmove"] %= 100
        search.reset(0, state, only=indices, past=seen)
        self.game_line = None
        return not self._is_terminal()

    def _is_terminal(self) -> bool:
        game, states = self.search.game, self.search.states
        return not np.isnan(game.terminal(states, np.diff(game.legal(states)[1]))).all()

    def run(
        self, limit: float, deadline: float, stop: Callable[[], bool], capacity: float = np.inf
    ) -> Iterator[tuple[SearchResult, int]]:
        """Search the position; yields (result, simulations so far) when simulations double and every REPORT_SECONDS,
        unless simulations alone limit it: then the result does not depend on the clock.

        limit: simulations, may be inf. deadline: in time.monotonic(). stop: polled between batches. capacity: memory of
        the tree in bytes; beyond it the least visited nodes are pruned.
        """
        search, limit = self.search, min(limit, MOST_SIMULATIONS)
        every = math.inf if limit < MOST_SIMULATIONS and deadline == math.inf else REPORT_SECONDS
        done, pause, over = 0, deadline, False

        def due() -> bool:
            return stop() or time.monotonic() >= pause or search.bytes >= capacity

        while not over:
            pause = min(deadline, time.monotonic() + every)
            target = min(limit, protocol.DEPTH0_SIMULATIONS << protocol.depth_from_simulations(done) + 1)
            (result,) = search.run(int(target) - done, until=due)
            done += result.simulations
            over = stop() or result.proven or done >= limit or time.monotonic() >= deadline
            yield result, done
            if search.bytes >= capacity:
                search.trim()

    def line(self, board: chess.Board, move: int) -> list[chess.Move]:
        """Principal variation from a move (policy index) of the position that was set."""
        walk, moves = board.copy(stack=False), []
        for index in self.search.line(0, move):
            moves.append(records.move_from_index(index, walk))
            walk.push(moves[-1])
        return moves
