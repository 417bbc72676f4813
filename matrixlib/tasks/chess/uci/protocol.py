"""UCI as text: the options of our engine, what `go` and `position` say, time for a move, scores.

Depth d stands for 8 * 2^d simulations, in `go` and in what is shown. Scores in centipawns are those at which Lichess
expects the same result, 2 / (1 + exp(-0.00368208 cp)) - 1 (https://lichess.org/page/accuracy).
"""

import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import chess

from matrixlib.tasks.chess.records import from_boards, parse_fen

DEPTH0_SIMULATIONS = 8  # simulations of depth 0
DEFAULT_SIMULATIONS = 800  # simulations of a `go` without any limit
ASSUMED_MOVES_LEFT = 30  # that the clock has to last for
MAX_CLOCK_SHARE = 0.6  # of what the clock shows, for one move
LICHESS_SLOPE = 0.00368208  # of Lichess' formula
MAX_VALUE = 0.9999  # values beyond give no more centipawns
INTEGER_LIMITS = ("nodes", "depth", "mate", "movetime", "wtime", "btime", "winc", "binc", "movestogo")

Value = str | int


@dataclass(frozen=True)
class Option:
    """A setting as `uci` lists it. limits: of a number; other values are texts, those of a check `true` or `false`."""

    name: str
    default: Value
    limits: tuple[int, int] | None = None

    def __str__(self) -> str:
        kind = "spin" if self.limits else "check" if self.default == "false" else "string"
        limits = " min {} max {}".format(*self.limits) if self.limits else ""
        return (
            f"option name {self.name} type {kind} default {'<empty>' if self.default == '' else self.default}{limits}"
        )


OPTIONS = (
    Option("Simulations", 0, (0, 10**9)),  # most of a move; 0: as the clock allows
    Option("Threads", 1, (1, 1024)),  # of one pass on the CPU; two that wait for a busy core are far slower
    Option("MultiPV", 1, (1, 218)),
    Option("UCI_ShowWDL", "false"),
    Option("VerboseMoveStats", "false"),  # a line about each move as a search ends, as Lc0 has it
    Option("Temperature", 0, (0, 1000)),  # hundredths; of the draw among the moves by their visits
    Option("SyzygyPath", ""),
    Option("Move Overhead", 100, (0, 60_000)),  # milliseconds of each move that are lost outside
    Option("Batch", 8, (1, 1024)),  # positions evaluated at once; more is faster on a GPU, worse for a node
    Option("Hash", 1024, (16, 1 << 20)),  # MiB of memory for the tree
)


@dataclass(frozen=True)
class Go:
    """Limits of a search, by their names in `go`, 0 or None where there is none; times in milliseconds."""

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
        """Milliseconds left for the side to move."""
        return self.wtime if turn else self.btime


def parse_option(text: str) -> tuple[str, Value]:
    """Name and value after `setoption`. ValueError where there is no such option, or such a value."""
    match = re.fullmatch(r"name\s+(.+?)(?:\s+value(?:\s+(.*))?)?", text)
    named = [option for option in OPTIONS if match and match[1].lower() == option.name.lower()]
    if not match or not named:
        raise ValueError(f"there is no option in 'setoption {text}'")
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
    """The limits after `go`. ValueError at a number that is none; unknown words, and `ponder`, count for nothing."""
    numbers: dict[str, int] = {}
    moves: list[str] = []
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if word in INTEGER_LIMITS:
            text = rest.popleft() if rest else ""
            if not re.fullmatch(r"-?\d{1,18}", text):
                raise ValueError(f"go {word} needs a number, not '{text}'")
            numbers[word] = max(int(text), 0)  # some programs send a clock that has run out
        elif word == "searchmoves":
            while rest and re.fullmatch(r"[a-h][1-8][a-h][1-8][nbrq]?", rest[0]):
                moves.append(rest.popleft())
    return Go(**numbers, infinite="infinite" in words, searchmoves=tuple(moves))


def read_position(text: str) -> chess.Board:
    """The board of a FEN, of `startpos` or `fen <FEN>`, each perhaps with `moves ...` after it. ValueError where it, or
    a move, is not legal."""
    start, _, moves = text.partition("moves")
    start = start.strip()
    board = chess.Board() if start == "startpos" else parse_fen(start.removeprefix("fen").strip())
    from_boards([board])  # the last word on what can be played
    for move in moves.split():
        board.push(legal_move(board, move))
    return board


def legal_move(board: chess.Board, text: str) -> chess.Move:
    """The move of a UCI text. ValueError where it is not legal."""
    try:
        move = board.parse_uci(str(text))
    except ValueError as error:  # one of the library's own, which notebooks show with all of their lines
        raise ValueError(str(error)) from error
    if not move:  # python-chess lets a null move pass
        raise ValueError(f"a null move is not legal: '{text}' in {board.fen()}")
    return move


def seconds_for(go: Go, turn: chess.Color, overhead: int) -> float | None:
    """Seconds to think; None where time does not limit the search. overhead: ms of each move that are lost outside.

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


def simulations_for(go: Go, turn: chess.Color, most: int) -> float:
    """Simulations at which a search ends, perhaps infinity. most: the option Simulations, 0 none."""
    if go.nodes or go.depth:
        return min(go.nodes or math.inf, DEPTH0_SIMULATIONS << min(go.depth, 60) if go.depth else math.inf)
    if most and not go.infinite:
        return most
    timed = go.movetime is not None or go.clock(turn) is not None
    return math.inf if timed or go.mate or go.infinite else DEFAULT_SIMULATIONS


def depth_of(simulations: int) -> int:
    return max(simulations // DEPTH0_SIMULATIONS, 1).bit_length() - 1


def centipawns(value: float) -> int:
    """Of an expected result in [-1, 1]."""
    value = min(max(value, -MAX_VALUE), MAX_VALUE)
    return round(math.log((1 + value) / (1 - value)) / LICHESS_SLOPE)


def score_text(value: float, plies: int) -> str:
    """`cp` or `mate` of a value for the side to move; plies: to the proven end of the game, 0 where none is."""
    if plies and abs(value) == 1:
        return f"mate {(plies + 1) // 2 * int(value)}"
    return f"cp {centipawns(value)}"


def wdl_text(value: float, draws: float) -> str:
    """Win, draw and loss per mille that have this expected result, and as near as can be this share of draws."""
    draw = round(1000 * min(draws, 1 - abs(value)))
    win = min(round((1000 - draw + 1000 * value) / 2), 1000 - draw)
    return f"wdl {win} {draw} {1000 - draw - win}"
