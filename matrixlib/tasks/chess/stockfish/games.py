"""Games of Stockfish against itself, and the choice of positions in them: pure functions of their arguments."""

from collections import Counter
from dataclasses import dataclass

import chess
import numpy as np

from matrixlib.tasks.chess.stockfish.client import Stockfish


@dataclass(frozen=True)
class Parameters:
    """How games are played, positions chosen and labelled. Every value is stored beside the data."""

    seed: int = 0
    opening_plies: tuple[int, int] = (2, 8)  # plies drawn by score at a high temperature, inclusive
    opening_temperature: float = 40.0  # centipawns
    random_start: float = 0.1  # share of games that start with uniformly random moves instead
    random_plies: tuple[int, int] = (4, 16)
    nodes: tuple[int, int] = (150, 1500)  # log-uniform, drawn for each game and side
    noise: tuple[float, float] = (0.0, 0.08)  # share of random moves, drawn for each game and side
    plies: int = 200  # longer games end with an unknown result
    keep: float = 0.7  # share of the positions that are labelled
    keep_first: float = 0.1  # ... of the first four plies, which many games share
    keep_decided: float = 0.2  # ... where one side is ahead by `decided` centipawns or sees a mate
    decided: int = 700
    shallow_depth: int = 4  # all legal moves
    deep_depth: int = 7  # the best DEEP_LINES moves

    def __post_init__(self) -> None:
        for name in ("opening_plies", "random_plies", "nodes", "noise"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.plies < 1 or not 0 < self.keep <= 1:
            raise ValueError(f"plies is {self.plies} and keep {self.keep}; give plies from 1, and keep between 0 and 1")


@dataclass(frozen=True)
class Game:
    """Moves from the initial position, result from White's side (1, 0, -1, 2 unknown), and how it ended."""

    number: int
    moves: tuple[chess.Move, ...]
    scores: tuple[int, ...]  # of the player before each move, mover's side; the last known one at random moves
    result: int
    ending: str


def position_key(board: chess.Board) -> str:
    """Pieces, side, castling rights and en passant where it is legal: what two equal positions share."""
    return board.epd(en_passant="legal")


def ending_of(board: chess.Board, occurrences: int, cap: int) -> tuple[int, str] | None:
    """(result from White's side, how the game ended), or None while it goes on.

    Mate comes before fifty moves, as in the rules; repetition and fifty moves end the game without a claim.
    """
    if not any(board.generate_legal_moves()):
        if board.is_check():
            return (-1 if board.turn == chess.WHITE else 1), "checkmate"
        return 0, "stalemate"
    if board.is_insufficient_material():
        return 0, "insufficient material"
    if occurrences >= 3:
        return 0, "repetition"
    if board.halfmove_clock >= 100:
        return 0, "fifty moves"
    return (2, "cap") if board.ply() >= cap else None


def draw(rng: np.random.Generator, moves: list[str], scores: np.ndarray, temperature: float) -> str:
    """A move by softmax of its score (centipawns)."""
    weights = np.exp((scores - scores.max()) / temperature)
    return moves[int(rng.choice(len(moves), p=weights / weights.sum()))]


def play_game(engine: Stockfish, number: int, parameters: Parameters) -> Game:
    """One game of Stockfish against itself; a pure function of (parameters, number)."""
    rng = np.random.default_rng([parameters.seed, number])
    uniform = rng.random() < parameters.random_start
    low, high = parameters.random_plies if uniform else parameters.opening_plies
    opening = int(rng.integers(low, high + 1))
    nodes = np.exp(rng.uniform(np.log(parameters.nodes[0]), np.log(parameters.nodes[1]), size=2)).astype(int)
    noise = rng.uniform(*parameters.noise, size=2)
    board = chess.Board()
    moves: list[chess.Move] = []
    scores: list[int] = []
    times = Counter([position_key(board)])
    line, score = "", 0
    engine.new_game()
    while (end := ending_of(board, times[position_key(board)], parameters.plies)) is None:
        ply, side = len(moves), int(board.turn == chess.BLACK)
        position = f"startpos moves{line}" if line else "startpos"
        score = -score
        if ply < opening and not uniform:
            lines = engine.search(position, "nodes 500", 12)
            values = np.array([one.score for one in lines], dtype=float)
            uci = draw(rng, [one.move for one in lines], values, parameters.opening_temperature)
            score = lines[0].score
        elif ply < opening or (blunder := rng.random()) < noise[side] / 4:
            legal = sorted(move.uci() for move in board.legal_moves)
            uci = legal[int(rng.integers(len(legal)))]
        elif blunder < noise[side]:
            lines = engine.search(position, f"nodes {nodes[side]}", 4)
            uci, score = lines[int(rng.integers(len(lines)))].move, lines[0].score
        else:
            lines = engine.search(position, f"nodes {nodes[side]}")
            uci, score = lines[0].move, lines[0].score
        move = chess.Move.from_uci(uci)
        board.push(move)
        times[position_key(board)] += 1
        moves.append(move)
        scores.append(score)
        line += f" {uci}"
    return Game(number, tuple(moves), tuple(scores), *end)


def choose(game: Game, parameters: Parameters) -> np.ndarray:
    """(plies,) bool: which positions before a move are labelled; a pure function of (parameters, game)."""
    rng = np.random.default_rng([parameters.seed, game.number, 1])
    share = np.full(len(game.moves), parameters.keep)
    share[np.abs(np.array(game.scores, dtype=int)) >= parameters.decided] = parameters.keep_decided
    share[:4] = parameters.keep_first
    return rng.random(len(game.moves)) < share
