"""A small UCI client over pipes, without state between searches unless asked for.

python-chess's own labels half as many positions a second: it builds boards and scores for every info line.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

MATE = 32000  # a mate in k moves is stored as sign * (MATE - k); every centipawn score is far below
CENTIPAWN_LIMIT = 10000
_FOLDERS = ("/usr/games", "/usr/local/bin", "/usr/local/games", "/opt/homebrew/bin")
_OPTION = re.compile(r"option name (.+?) type (.*)")
_LINE = re.compile(
    r"multipv (\d+) score (cp|mate) (-?\d+) (?:(?:lower|upper)bound )?(?:wdl (\d+) (\d+) (\d+) )?.* pv (\S+)"
)
Option = int | bool | str


class EngineError(RuntimeError):
    """The engine is absent, speaks no UCI, lacks an option, died, or gave no answer in time."""


class Line(NamedTuple):
    """One variation: UCI move, score from the mover's side (see MATE), win-draw-loss per mille or None."""

    move: str
    score: int
    wdl: tuple[int, int, int] | None


def find_stockfish(path: str | Path | None = None) -> Path:
    """Path of the engine: `path` (a file, or a name on PATH) or `stockfish` on PATH and the usual folders.

    Raises EngineError that says how to install it.
    """
    name = str(path or "stockfish")
    if name.endswith(".js") and Path(name).is_file():  # the npm package `stockfish`
        return Path(name)
    file = shutil.which(name) or (None if path else shutil.which(name, path=os.pathsep.join(_FOLDERS)))
    if file is None:
        hint = "install it (Debian: `apt install stockfish`, macOS: `brew install stockfish`) or give its path"
        raise EngineError(f"no Stockfish at {name!r}: {hint}")
    return Path(file)


def score_of(kind: str, value: int) -> int:
    """The integer score of `score cp 31` or `score mate -2`, cut to 10,000; `mate 0` (the mover is mated) is -MATE."""
    value = max(-CENTIPAWN_LIMIT, min(CENTIPAWN_LIMIT, value))
    if kind == "mate":
        return MATE - value if value > 0 else -MATE - value
    return value


def parse_info(lines: list[str]) -> list[Line]:
    """The last complete block of variations in `lines` (best first); [] where there is none."""
    block: list[Line] = []
    for match in filter(None, map(_LINE.search, reversed(lines))):
        wdl = (int(match[4]), int(match[5]), int(match[6])) if match[4] else None
        block.append(Line(match[7], score_of(match[2], int(match[3])), wdl))
        if match[1] == "1":
            return block[::-1]
    return []


def nearest_value(announced: str, value: Option) -> Option:
    """The nearest value that an option takes, announced as "spin default 1 min 1 max 256": engines ignore others."""
    bounds = re.search(r"^spin .*min (-?\d+) max (-?\d+)", announced)
    return max(int(bounds[1]), min(int(bounds[2]), int(value))) if bounds else value


class Stockfish:
    """One engine process (Threads 1, small hash, win-draw-loss shown). Use as a context manager.

    path: see `find_stockfish`; a `.js` file is run by `node`. timeout: seconds for any answer. options: as the engine
    names them, such as {"UCI_LimitStrength": True, "UCI_Elo": 1350}; EngineError for one, or a value, that it does not
    take.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        hash_mb: int = 1,
        timeout: float = 60.0,
        options: Mapping[str, Option] | None = None,
    ) -> None:
        self.path, self.timeout = find_stockfish(path), timeout
        self.name = self.path.name
        self.announced: dict[str, str] = {}  # option -> "spin default 1 min 1 max 256"
        command = [*(["node"] if self.path.suffix == ".js" else []), str(self.path)]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True, bufsize=1)
        except OSError as error:
            raise EngineError(f"{' '.join(command)} cannot be started: {error}") from error
        try:
            self._greet({"Threads": 1, "Hash": hash_mb, "UCI_ShowWDL": True}, options or {})
        except BaseException:
            self.close()
            raise

    def _greet(self, own: Mapping[str, Option], asked: Mapping[str, Option]) -> None:
        try:
            lines = self._ask("uci", "uciok", min(self.timeout, 10.0))
        except EngineError as error:
            raise EngineError(f"{self.path} does not speak UCI: {error}") from error
        self.name = next((line[8:].strip() for line in lines if line.startswith("id name ")), self.name)
        self.announced = {match[1]: match[2] for match in filter(None, map(_OPTION.match, lines))}
        if "UCI_ShowWDL" not in self.announced:
            raise EngineError(f"{self.name} has no option UCI_ShowWDL: use Stockfish 12 or newer")
        commands = []
        for name, value in {**own, **asked}.items():
            announced = self.announced.get(name, "no such option")
            taken = nearest_value(announced, value)
            if name in asked and (name not in self.announced or taken != value):
                raise EngineError(f"{self.name} refuses {name} {value}: it has {announced}")
            text = str(taken).lower() if isinstance(taken, bool) else taken
            commands.append(f"setoption name {name} value {text}\n")
        self._ask(f"{''.join(commands)}isready", "readyok")

    def _ask(self, text: str, word: str, timeout: float | None = None) -> list[str]:
        """Send a command; the lines up to and with the first that starts with `word`. An engine that is late is killed,
        so that the blocking read ends."""
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
        raise EngineError(f"no `{word}` from {self.name}: {why}")

    def new_game(self) -> None:
        """Forget hash and histories: the next search is a pure function of its position and limit."""
        self._ask("ucinewgame\nisready", "readyok")

    def search(self, position: str, limit: str, lines: int = 1) -> list[Line]:
        """The `lines` best variations, best first; `position` and `limit` as UCI has them after these words and `go`.
        Raises EngineError where the position has no legal move."""
        taken = nearest_value(self.announced.get("MultiPV", ""), lines)
        command = f"setoption name MultiPV value {taken}\nposition {position}\ngo {limit}"
        if variations := parse_info(self._ask(command, "bestmove")):
            return variations
        raise self._no_move(position)

    def best_move(self, position: str, limit: str) -> str:
        """The move that the engine plays, often another than its best line's at limited strength; see `search`."""
        move = self._ask(f"position {position}\ngo {limit}", "bestmove")[-1].split()[1]
        if move in ("(none)", "0000"):
            raise self._no_move(position)
        return move

    def _no_move(self, position: str) -> EngineError:
        return EngineError(f"{self.name} gives no move in `{position}`: is it legal, and is the game not over?")

    def close(self) -> None:
        """End the process; safe to call twice."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):  # bytes were still on their way to a process that is gone
            self._process.communicate()

    def __enter__(self) -> Stockfish:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
