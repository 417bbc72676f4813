"""UCI engines as players of matches."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import chess
import numpy as np

from matrixlib.play.match import Choice, EngineError, Player, Turn, play_pairs
from matrixlib.tasks.chess.game import ChessGame
from matrixlib.tasks.chess.records import move_from_index, policy_index, to_board
from matrixlib.tasks.chess.stockfish.client import Engine, read_setup
from matrixlib.tasks.chess.uci.protocol import legal_move

HASH_MB = 16  # Stockfish's default
ANSWER_SECONDS = 60  # besides the time that an engine is given


@contextmanager
def running_engine(text: str) -> Iterator[tuple[str, Player]]:
    """Name and player of a UCI engine (see `client.read_setup`) that was asked for a first move; its process ends with
    the context. One thread and a small hash, unless its options say otherwise. ValueError; EngineError."""
    setup = read_setup(text)
    kind, amount = setup.limit.split()
    timeout = ANSWER_SECONDS + (int(amount) / 1000 if kind == "movetime" else 0)
    with Engine(setup.command, {"Threads": 1, "Hash": HASH_MB}, setup.options, timeout) as engine:
        player = engine_player(engine, setup.limit)
        play_pairs(ChessGame(), player, player, ChessGame().initial(1), plies=1)
        yield f"{engine.name} {setup.limit}", player


def engine_player(engine: Engine, limit: str) -> Player:
    """Player of a UCI engine; limit: of `go`. The engine gets the game so far, for repetitions, with an empty hash, as
    it plays many games at a time, one move after the other. EngineError for an illegal move."""
    lock = threading.Lock()

    def play(turn: Turn) -> Choice:
        answers = []
        for state, past, moves in zip(turn.states, turn.past, turn.moves, strict=True):
            board = to_board(past[0] if len(past) else state)
            start = board.fen()
            for index in moves:
                board.push(move_from_index(index, board))
            position = " ".join([f"fen {start}", "moves", *(move.uci() for move in board.move_stack)])
            position = position.removesuffix(" moves")
            with lock:
                engine.new_game()
                answer = engine.best_move(position, limit)
            answers.append(policy_index(engine_move(engine, board, answer), board.turn))
        return Choice(np.array(answers, np.int32))

    return play


def engine_move(engine: Engine, board: chess.Board, answer: str) -> chess.Move:
    """An engine's answer in UCI as a move; EngineError names an illegal one."""
    try:
        return legal_move(board, answer)
    except ValueError as error:
        raise EngineError(f"{engine.name} answers '{answer}' in `fen {board.fen()}`: {error}") from error
