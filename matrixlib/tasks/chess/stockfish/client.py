"""A minimal UCI client over pipes.

python-chess's client labels half as many positions per second, because it parses every info line.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from matrixlib.files import from_home
from matrixlib.play.match import EngineError

MATE = 32000  # a mate in k moves is the score sign * (MATE - k)
CENTIPAWN_LIMIT = 10000
_FOLDERS = ("/usr/games", "/usr/local/bin", "/usr/local/games", "/opt/homebrew/bin")
_LIMIT = re.compile(r"(nodes|depth|movetime)=[1-9]\d*")
_OPTION = re.compile(r"option name (.+?) type (.*)")
_SCORE, _MOVE = re.compile(r"\bscore (cp|mate) (-?\d+)"), re.compile(r"\bpv (\S+)")
_NUMBER, _WDL = re.compile(r"\bmultipv (\d+)"), re.compile(r"\bwdl (\d+) (\d+) (\d+)\b")
_VISITS = re.compile(r"info string ([a-h][1-8]\w+) .*?\bN: *(\d+)")
Option = int | bool | str


class Line(NamedTuple):
    """One variation: first move (UCI), score for the side to move (see MATE), win-draw-loss per mille or None."""

    move: str
    score: int
    wdl: tuple[int, int, int] | None


def find_program(name: str) -> str | None:
    """Path of a program: a file, or a name on PATH or in the usual folders; None if there is none."""
    npm = name.endswith(".js") and os.path.isfile(name)  # the npm package `stockfish`
    return name if npm else shutil.which(name) or shutil.which(name, path=os.pathsep.join(_FOLDERS))


def score_of(kind: str, value: int) -> int:
    """Score of `score cp 31` (clipped to CENTIPAWN_LIMIT) or `score mate -2`; `mate 0` is -MATE."""
    value = max(-CENTIPAWN_LIMIT, min(CENTIPAWN_LIMIT, value))
    if kind == "mate":
        return MATE - value if value > 0 else -MATE - value
    return value


def parse_info(lines: list[str]) -> list[Line]:
    """The last complete set of variations in info lines, best first; [] for none."""
    block: list[Line] = []
    for line in reversed(lines):
        score, move, number, wdl = (one.search(line) for one in (_SCORE, _MOVE, _NUMBER, _WDL))  # in any order
        if score is None or move is None or line.startswith("info string"):
            continue
        shares = (int(wdl[1]), int(wdl[2]), int(wdl[3])) if wdl else None
        block.append(Line(move[1], score_of(score[1], int(score[2])), shares))
        if number is None or number[1] == "1":
            return block[::-1]
    return []


def nearest_value(announced: str, value: Option) -> Option:
    """Clip a number to the range announced as "spin default 1 min 1 max 256"; engines ignore others."""
    bounds = re.search(r"^spin .*min (-?\d+) max (-?\d+)", announced)
    whole = bounds is not None and isinstance(value, int)
    return max(int(bounds[1]), min(int(bounds[2]), value)) if bounds and whole else value


def takes(announced: str, value: Option) -> bool:
    """Whether a value is of the announced kind and range."""
    kind, text = announced.partition(" ")[0], str(value).lower() if isinstance(value, bool) else str(value)
    if kind == "spin":
        return isinstance(value, int) and nearest_value(announced, value) == value
    if kind == "combo":
        return f" var {text} " in f"{announced} "
    return kind == "string" or (kind == "check" and text in ("true", "false"))


class EngineSetup(NamedTuple):
    """How an engine is run: program and arguments, what `go` is told at each move, UCI options."""

    command: tuple[str, ...]
    limit: str
    options: dict[str, Option]


def read_setup(text: str, limited: bool = True) -> EngineSetup:
    """`program [argument ...] nodes=500 [Name=value ...]` with `depth=8` or `movetime=100` (ms) in place of nodes;
    words with spaces in quotes, as in a shell. limited: whether a limit is needed. ValueError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"engine {text!r}: {error}") from error
    (at, *more) = [i for i, word in enumerate(words) if _LIMIT.fullmatch(word)] or [0 if limited else len(words)]
    options = [word.partition("=") for word in words[at + 1 :]]
    if not at or more or not all(name and equals for name, equals, _ in options):
        raise ValueError(
            f"engine {text!r}: {'' if at else 'no limit is understood; '}give a program and its arguments, one "
            "limit of a move (nodes=500, depth=8, or movetime=100 in milliseconds), then UCI options (Hash=16)"
        )
    values = {name: int(value) if re.fullmatch(r"-?\d+", value) else value for name, _, value in options}
    limit = " ".join(words[at : at + 1]).replace("=", " ")
    program = str(from_home(words[0]))
    return EngineSetup((find_program(program) or program, *words[1:at]), limit, values)


class Engine:
    """The process of a UCI engine; a context manager.

    command: program and arguments; a `.js` file runs in `node`. timeout: seconds per answer. own: UCI options for
    engines that have them, clipped to their range; options: others that it must take, else EngineError.
    """

    def __init__(
        self,
        command: Sequence[str],
        own: Mapping[str, Option],
        options: Mapping[str, Option] | None = None,
        timeout: float = 60.0,
    ) -> None:
        self.timeout, self.name = timeout, Path(command[0]).name
        self.announced: dict[str, str] = {}  # option -> "spin default 1 min 1 max 256"
        command = [*(["node"] if Path(command[0]).suffix == ".js" else []), *command]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=null, encoding="utf-8", errors="replace", bufsize=1
            )
        except OSError as error:
            raise EngineError(f"{' '.join(command)} cannot be started ({error.strerror}): give its path") from error
        try:
            self._greet(own, options or {})
        except BaseException:
            self.close()
            raise

    def _greet(self, own: Mapping[str, Option], asked: Mapping[str, Option]) -> None:
        try:
            lines = self._ask("uci", "uciok", min(self.timeout, 30.0))  # node may need over 10
        except EngineError as error:
            raise EngineError(f"{self.name} does not speak UCI: {error}") from error
        self.name = next((line[8:].strip() for line in lines if line.startswith("id name ")), self.name)
        self.announced = {match[1]: match[2] for match in filter(None, map(_OPTION.match, lines))}
        for name, value in asked.items():
            announced = self.announced.get(name, "no such option")
            if not takes(announced, value):
                raise EngineError(f"{self.name} refuses {name} {value}: it has {announced}")
        commands = []
        for name, value in {**own, **asked}.items():
            if name in self.announced:
                taken = nearest_value(self.announced[name], value)
                text = str(taken).lower() if isinstance(taken, bool) else taken
                commands.append(f"setoption name {name} value {text}\n")
        self._ask(f"{''.join(commands)}isready", "readyok")

    def _ask(self, text: str, word: str, timeout: float | None = None) -> list[str]:
        """Send a command, read lines up to the first that starts with `word`; on timeout the engine is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timeout, begun = timeout or self.timeout, time.monotonic()
        timer = threading.Timer(timeout, self._process.kill)
        timer.daemon = True
        timer.start()
        lines: list[str] = []
        try:
            self._process.stdin.write(f"{text}\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                lines.append(line.rstrip())
                if line.startswith(word):
                    return lines
            why = f"exit status {self._process.wait(2)}"
        except (OSError, subprocess.TimeoutExpired) as error:
            why = f"it has died ({error})"
        finally:
            timer.cancel()
        if time.monotonic() - begun >= timeout:
            why = f"it gave no answer within {timeout:g} s and was stopped"
        at = next((f" in `{line}`" for line in text.splitlines() if line.startswith("position ")), "")
        raise EngineError(f"no `{word}` from {self.name}{at}: {why}")

    def new_game(self) -> None:
        """Clear hash and history, so that the next search depends only on position and limit."""
        self._ask("ucinewgame\nisready", "readyok")

    def search(self, position: str, limit: str, lines: int = 1) -> list[Line]:
        """The `lines` best variations, best first. position, limit: arguments of UCI's `position` and `go`. EngineError
        for a position without legal moves."""
        taken = nearest_value(self.announced.get("MultiPV", ""), lines)
        command = f"setoption name MultiPV value {taken}\nposition {position}\ngo {limit}"
        if variations := parse_info(self._ask(command, "bestmove")):
            return variations
        raise self._no_move(position)

    def best_move(self, position: str, limit: str) -> str:
        """The move that the engine plays; at limited strength often not that of its best line. See `search`."""
        move = self._ask(f"position {position}\ngo {limit}", "bestmove")[-1].partition(" ")[2].partition(" ")[0]
        if move in ("(none)", "0000"):
            raise self._no_move(position)
        return move

    def visits(self, position: str, limit: str) -> tuple[Line, dict[str, int]]:
        """The best variation of a tree search with VerboseMoveStats, and the visits of each move."""
        lines = self._ask(f"position {position}\ngo {limit}", "bestmove")
        for best in parse_info(lines):
            return best, {found[1]: int(found[2]) for found in map(_VISITS.match, lines) if found}
        raise self._no_move(position)

    def _no_move(self, position: str) -> EngineError:
        return EngineError(f"{self.name} gives no move in `{position}`: is it legal, and is the game not over?")

    def close(self) -> None:
        """End the process; safe to call twice."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):  # unsent bytes to an ended process
            self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stockfish(Engine):
    """A Stockfish process with one thread, a small hash and win-draw-loss if it has that; or another engine.

    text: its path, or a text as for `read_setup`. A tree search such as Lc0 needs a limit in nodes: its labels are its
    visits. options: e.g. {"UCI_LimitStrength": True, "UCI_Elo": 1350}. title: its name, or with the text.
    """

    def __init__(
        self,
        text: str | Path | None = None,
        hash_mb: int = 1,
        timeout: float = 60.0,
        options: Mapping[str, Option] | None = None,
    ) -> None:
        name = str(text or "stockfish")
        command, self.limit, given = read_setup(shlex.quote(name) if os.path.isfile(name) else name, limited=False)
        own = {"Threads": 1, "Hash": hash_mb, "UCI_ShowWDL": True, "VerboseMoveStats": True}
        if find_program(command[0]) is None:
            hint = "install it (Debian: `apt install stockfish`, macOS: `brew install stockfish`) or give its path"
            raise EngineError(f"no Stockfish at {name!r}: {hint}")
        super().__init__(command, own, {**given, **(options or {})}, timeout)
        tree = "VerboseMoveStats" in self.announced
        rule = "its visits: end its text with nodes=800" if tree else f"depth: leave out '{self.limit}'"
        problem = "" if self.limit.partition(" ")[0] == ("nodes" if tree else "") else f"labels positions by {rule}"
        if problem:
            self.close()
            raise EngineError(f"{self.name} {problem}")
        self.title = f"{self.name} ({name})" if command[1:] or self.limit else self.name
