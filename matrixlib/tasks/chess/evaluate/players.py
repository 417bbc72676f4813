"""A trained network as the evaluator of a search, and players for matches: networks, engines, fixed ones.

An `Evaluator` is all that search, self-play and matches need of a network: give it to `play.search.Search`,
`play.selfplay.play_games` or `play.match.search_player`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import chess.engine
import numpy as np

from matrixlib.play.evaluator import Evaluator
from matrixlib.play.match import Choice, Player, Turn, random_player, search_player
from matrixlib.play.search import SearchOptions
from matrixlib.tasks.chess.game import ChessGame
from matrixlib.tasks.chess.records import policy_index, to_board
from matrixlib.tasks.chess.stockfish.client import EngineError, find_stockfish

if TYPE_CHECKING:
    from matrixlib.tasks.chess.evaluate.net import Net


def network_player(
    net: Net, simulations: int, options: SearchOptions | None = None, game: ChessGame | None = None
) -> Player:
    """Plays what a search with the network finds, without noise; 0 simulations: the most probable move.

    game: with endgame tables, or the rules alone.
    """
    return search_player(game or ChessGame(), Evaluator(net), simulations, options)


def load_player(
    run: str | Path,
    simulations: int,
    checkpoint: str = "",
    device: str = "auto",
    options: SearchOptions | None = None,
) -> Player:
    """`network_player` of a run, a run's name or a checkpoint's folder; errors as of `net.load`."""
    from matrixlib.tasks.chess.spec import load

    return network_player(load(run, checkpoint, device), simulations, options)


def capture_player(seed: int) -> Player:
    """Takes the most valuable piece on offer (P1 N3 B3 R5 Q9, the first move among equals), else plays any move."""
    from matrixlib.tasks.chess.evaluate.held_out import captured_value

    game = ChessGame()
    anything = random_player(game, seed)

    def play(turn: Turn) -> Choice:
        moves, offsets = game.legal(turn.states)
        pieces = np.repeat(turn.states["pieces"], np.diff(offsets), axis=0)
        gain = captured_value(pieces, moves[:, None])[:, 0]
        chosen = anything(turn).moves.copy()
        for i in range(len(turn.states)):
            best = offsets[i] + int(gain[offsets[i] : offsets[i + 1]].argmax())
            if gain[best] > 0:
                chosen[i] = moves[best]
        return Choice(chosen)

    return play


class EnginePlayer:
    """A UCI engine as a player, to be closed after use: `with EnginePlayer("", 1000) as player: ...`.

    path: of the engine, empty for Stockfish. nodes: of each move, as clocks say little on a shared machine. options:
    as the engine names them, such as {"UCI_LimitStrength": True, "UCI_Elo": 1350}. The engine is told positions without
    the moves that led there, as a new game each, so it sees no repetitions. Raises EngineError without such an engine.
    """

    def __init__(self, path: str, nodes: int, options: Mapping[str, str | int | bool] | None = None) -> None:
        self.nodes = nodes
        self.engine = chess.engine.SimpleEngine.popen_uci(str(find_stockfish(path or None)))
        try:
            alone = {"Threads": 1} if "Threads" in self.engine.options else {}
            self.engine.configure({**alone, **(options or {})})
        except chess.engine.EngineError as error:
            self.close()
            raise EngineError(f"{path} refuses its options: {error}") from None

    def __call__(self, turn: Turn) -> Choice:
        """The engine's moves."""
        moves = []
        for state in turn.states:
            board = to_board(state)
            played = self.engine.play(board, chess.engine.Limit(nodes=self.nodes), game=object())
            assert played.move is not None
            moves.append(policy_index(played.move, board.turn))
        return Choice(np.array(moves, np.int32))

    def close(self) -> None:
        """Ends the engine."""
        self.engine.close()

    def __enter__(self) -> EnginePlayer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
