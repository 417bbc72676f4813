"""Players of matches: searches with a network, one that takes what it can, UCI engines."""

from itertools import pairwise

import chess
import numpy as np

from matrixlib.play.evaluator import Evaluator
from matrixlib.play.match import Choice, Player, Turn, random_player, search_player
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.game import ChessGame
from matrixlib.tasks.chess.records import captured_value, policy_index, to_board
from matrixlib.tasks.chess.stockfish.client import Stockfish


def network_player(net: Net, simulations: int) -> Player:
    """Plays the best move of a search with the network, without noise; 0 simulations: the most probable move."""
    return search_player(ChessGame(), Evaluator(net), simulations)


def capture_player(seed: int) -> Player:
    """Takes the most valuable piece on offer (P1 N3 B3 R5 Q9, the first move among equals), else plays any move."""
    game = ChessGame()
    anything = random_player(game, seed)

    def play(turn: Turn) -> Choice:
        moves, offsets = game.legal(turn.states)
        pieces = np.repeat(turn.states["pieces"], np.diff(offsets), axis=0)
        gain = captured_value(pieces, moves[:, None])[:, 0]
        best = [start + gain[start:end].argmax() for start, end in pairwise(offsets)]
        return Choice(np.where(gain[best] > 0, moves[best], anything(turn).moves))

    return play


def engine_player(engine: Stockfish, nodes: int) -> Player:
    """Plays the moves of a UCI engine that searches so many nodes for each, as clocks say little on a shared machine.

    The engine is told positions without the moves that led there, as a new game each, so it sees no repetitions.
    """

    def play(turn: Turn) -> Choice:
        moves = []
        for state in turn.states:
            board = to_board(state)
            engine.new_game()
            move = chess.Move.from_uci(engine.best_move(f"fen {board.fen()}", f"nodes {nodes}"))
            moves.append(policy_index(move, board.turn))
        return Choice(np.array(moves, np.int32))

    return play
