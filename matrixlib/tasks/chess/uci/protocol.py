"""The UCI protocol: options, parsing of `go` and `position`, time management, scores.

Depth d means 8 * 2^d simulations. Centipawns follow Lichess' model of the expected result,
2 / (1 + exp(-0.00368208 cp)) - 1 (https://lichess.org/page/accuracy).
"""

import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import chess

from matrixlib.tasks.chess.records import parse_fen

DEPTH0_SIMULATIONS = 8
DEFAULT_SIMULATIONS = 800  # for `go` without limits
ASSUMED_MOVES_LEFT = 30  # for a clock without `movestogo`
MAX_CLOCK_SHARE = 0.6  # of the remaining time, for one move
LICHESS_SLOPE = 0.00368208  # per centipawn
MAX_VALUE = 0.9999  # larger values are clipped for centipawns
INTEGER_LIMITS = ("nodes", "depth", "mate", "movetime", "wtime", "btime", "winc", "binc", "movestogo")

Value = str | int


@dataclass(frozen=True)
class Option:
    """A UCI option. limits: of a spin option; the values of others are text, of a check option `true` or `false`."""

    name: str
    default: Value
    limits: tuple[int, int] | None = None

    def __str__(self) -> str:
        kind = "spin" if self.limits else "check" if self.default == "false" else "string"
        limits = " min {} max {}".format(*self.limits) if self.limits else ""
        default = "<empty>" if self.default == "" else self.default
        return f"option name {self.name} type {kind} default {default}{limits}"


OPTIONS = (
    Option("Simulations", 0, (0, 10**9)),  # per move; 0: as the clock allows
    Option("Threads", 0, (0, 1024)),  # of the network; 0: as many as this machine has cores for it
    Option("MultiPV", 1, (1, 218)),
    Option("UCI_ShowWDL", "false"),
    Option("VerboseMoveStats", "false"),  # a line per move after a search, as in Lc0
    Option("Temperature", 0, (0, 1000)),  # hundredths; for sampling the move by visits
    Option("SyzygyPath", ""),
    Option("Move Overhead", 100, (0, 60_000)),  # milliseconds per move
    Option("Batch", 8, (1, 1024)),  # leaves per batch; more is faster on a GPU but weaker per node
    Option("MaxBatch", 64, (1, 1024)),  # as the tree grows; at most Batch: always Batch
    Option("Hash", 1024, (16, 1 << 20)),  # MiB for the tree
    Option("PolicyHead", "vanilla"),  # of Lc0 networks with several, by Lc0's names
    Option("ValueHead", "winner"),
)


@dataclass(frozen=True)
class Go:
    """Parameters of `go` by their UCI names, 0 or None if absent; times in milliseconds."""

    nodes: int = 0
    depth: int = 0
    mate: int = 0
    movetime: int | None = None
    wtime: int | None = None
    btime: int | None = None
    winc: int = 0
    binc: int = 0
    movestogo: int = 0
    infinite: bool = False
    searchmoves: tuple[str, ...] = ()

    def clock(self, turn: chess.Color) -> int | None:
        """Remaining time of the side to move, ms."""
        return self.wtime if turn else self.btime


def parse_option(text: str) -> tuple[str, Value]:
    """Parse name and value after `setoption`; ValueError for an unknown option and a bad value."""
    match = re.fullmatch(r"name\s+(.+?)(?:\s+value(?:\s+(.*))?)?", text)
    named = [option for option in OPTIONS if match and match[1].lower() == option.name.lower()]
    if not match or not named:
        raise ValueError(f"unknown option in 'setoption {text}'")
    option, value = named[0], match[2] or ""
    if option.limits:
        low, high = option.limits
        if not re.fullmatch(r"-?\d{1,18}", value) or not low <= int(value) <= high:
            raise ValueError(f"{option.name} must be a number from {low} to {high}, not '{value}'")
        return option.name, int(value)
    if option.default == "false" and value not in ("true", "false"):
        raise ValueError(f"{option.name} must be true or false, not '{value}'")
    return option.name, "" if value == "<empty>" else value


def parse_go(words: Sequence[str]) -> Go:
    """Parse the limits after `go`; ValueError for a bad number. Unknown words and `ponder` are ignored."""
    numbers: dict[str, int] = {}
    moves: list[str] = []
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if word in INTEGER_LIMITS:
            text = rest.popleft() if rest else ""
            if not re.fullmatch(r"-?\d{1,18}", text):
                raise ValueError(f"go {word} needs a number, not '{text}'")
            numbers[word] = max(int(text), 0)  # some GUIs send a negative clock
        elif word == "searchmoves":
            while rest and re.fullmatch(r"[a-h][1-8][a-h][1-8][nbrq]?", rest[0]):
                moves.append(rest.popleft())
    return Go(**numbers, infinite="infinite" in words, searchmoves=tuple(moves))


def read_position(text: str) -> chess.Board:
    """Parse `startpos`, `fen <FEN>` or a bare FEN, then optionally `moves ...`; ValueError for what is illegal."""
    start, _, moves = text.partition("moves")
    start = start.strip()
    board = chess.Board() if start == "startpos" else parse_fen(start.removeprefix("fen").strip())
    for move in moves.split():
        board.push(legal_move(board, move))
    return board


def legal_move(board: chess.Board, text: str) -> chess.Move:
    """Parse a UCI move; ValueError for an illegal one."""
    try:
        move = board.parse_uci(str(text))
    except ValueError as error:  # a plain ValueError, as notebooks show subclasses with their traceback
        raise ValueError(str(error)) from error
    if not move:  # python-chess accepts null moves
        raise ValueError(f"a null move is not legal: '{text}' in {board.fen()}")
    return move


def seconds_for(go: Go, turn: chess.Color, overhead: int) -> float | None:
    """Seconds for a move, None without a time limit. overhead: ms to subtract.

    By the clock: an equal share per move left plus 3/4 of the increment, at most MAX_CLOCK_SHARE of it.
    """
    left = go.clock(turn) if go.movetime is None else go.movetime
    if go.infinite or left is None:
        return None
    left = max(left - overhead, 0)
    if go.movetime is not None:
        return left / 1000
    share = left / (go.movestogo or ASSUMED_MOVES_LEFT) + 0.75 * (go.winc if turn else go.binc)
    return min(share, MAX_CLOCK_SHARE * left) / 1000


def simulations_for(go: Go, turn: chess.Color, limit: int) -> float:
    """Maximum simulations of a search, may be inf. limit: the option Simulations, 0 for none."""
    if go.nodes or go.depth:
        return min(go.nodes or math.inf, DEPTH0_SIMULATIONS << min(go.depth, 60) if go.depth else math.inf)
    if limit and not go.infinite:
        return limit
    timed = go.movetime is not None or go.clock(turn) is not None
    return math.inf if timed or go.mate or go.infinite else DEFAULT_SIMULATIONS


def depth_from_simulations(simulations: int) -> int:
    return max(simulations // DEPTH0_SIMULATIONS, 1).bit_length() - 1


def centipawns(value: float) -> int:
    """Centipawns of an expected result in [-1, 1]."""
    value = min(max(value, -MAX_VALUE), MAX_VALUE)
    return round(math.log((1 + value) / (1 - value)) / LICHESS_SLOPE)


def score_text(value: float, plies: int) -> str:
    """UCI score of a value of the side to move. plies: to the proven end of the game, 0 if unproven."""
    if plies and abs(value) == 1:
        return f"mate {(plies + 1) // 2 * int(value)}"
    return f"cp {centipawns(value)}"


def wdl_text(value: float, draws: float) -> str:
    """UCI `wdl` (per mille) with this expected result, and this draw rate as far as possible."""
    draw = round(1000 * min(draws, 1 - abs(value)))
    win = min(round((1000 - draw + 1000 * value) / 2), 1000 - draw)
    return f"wdl {win} {draw} {1000 - draw - win}"
