"""A small UCI client over raw pipes: one process, one thread, no state between questions unless asked for.

python-chess's own client reaches less than half of the positions per second, because it builds boards and
scores for every info line; labelling needs only the last line of each variation.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

MATE = 32000  # a mate in k moves is stored as sign * (MATE - k); every centipawn score is far below
CENTIPAWN_LIMIT = 20000
_FOLDERS = ("/usr/games", "/usr/local/bin", "/usr/local/games", "/opt/homebrew/bin")
_SPIN = re.compile(rb"option name (.+) type spin default -?\d+ min (-?\d+) max (-?\d+)")
_LINE = re.compile(
    rb"multipv (\d+) score (cp|mate) (-?\d+) (?:(?:lower|upper)bound )?(?:wdl (\d+) (\d+) (\d+) )?.* pv (\S+)"
)


class EngineError(RuntimeError):
    """The engine is absent, speaks no UCI, died, or gave no answer in time."""


@dataclass(frozen=True)
class Line:
    """One variation: UCI move, score from the mover's side (see MATE), win-draw-loss per mille or None."""

    move: str
    score: int
    wdl: tuple[int, int, int] | None


def find_stockfish(path: str | Path | None = None) -> Path:
    """Path of the engine: `path` (a file, or a name on PATH) or `stockfish` on PATH and the usual folders.

    Raises EngineError that says how to install it.
    """
    name = "stockfish" if path is None else str(path)
    file = shutil.which(name) or (None if path else shutil.which(name, path=os.pathsep.join(_FOLDERS)))
    if file is None:
        hint = "install it (Debian: `apt install stockfish`, macOS: `brew install stockfish`) or give its path"
        raise EngineError(f"no Stockfish at {name!r}: {hint}")
    return Path(file)


def score_of(kind: bytes | str, value: int) -> int:
    """The integer score of `score cp 31` or `score mate -2`; `mate 0` (the mover is mated) is -MATE."""
    if kind in (b"mate", "mate"):
        return MATE - value if value > 0 else -MATE - value
    return max(-CENTIPAWN_LIMIT, min(CENTIPAWN_LIMIT, value))


def parse_info(lines: list[bytes]) -> list[Line]:
    """The last complete block of variations in `lines` (best first); [] where there is none."""
    block: list[Line] = []
    for line in reversed(lines):
        match = _LINE.search(line)
        if match is None:
            continue
        rank = int(match[1])
        wdl = (int(match[4]), int(match[5]), int(match[6])) if match[4] is not None else None
        block.append(Line(match[7].decode(), score_of(match[2], int(match[3])), wdl))
        if rank == 1:
            return block[::-1]
    return []


class Stockfish:
    """One engine process (Threads 1, small hash, win-draw-loss shown). Use as a context manager.

    options: as the engine names them, such as {"UCI_LimitStrength": True, "UCI_Elo": 1350}. Raises EngineError for one
    with a number that it does not take.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        hash_mb: int = 1,
        timeout: float = 60.0,
        options: Mapping[str, int | bool] | None = None,
    ) -> None:
        self.path = find_stockfish(path)
        self.timeout = timeout
        self.name = ""
        self._multipv = 1
        self._deadline = 0.0  # 0: nothing awaited
        self._late = False
        self._closed = threading.Event()
        try:
            self._process = subprocess.Popen(
                [str(self.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
            )
        except OSError as error:
            raise EngineError(f"{self.path} cannot be started: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._rest = b""
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            self._greet({"Threads": 1, "Hash": hash_mb, "UCI_ShowWDL": True} | dict(options or {}))
        except BaseException:
            self.close()
            raise

    def _greet(self, options: Mapping[str, int | bool]) -> None:
        self._send("uci")
        try:
            lines = self._read_until(b"uciok", min(self.timeout, 10.0))
        except EngineError as error:
            raise EngineError(f"{self.path} does not speak UCI: {error}") from error
        names = [line[8:].decode() for line in lines if line.startswith(b"id name ")]
        self.name = names[0].strip() if names else self.path.name
        if not any(b"name UCI_ShowWDL" in line for line in lines):
            raise EngineError(f"{self.name} has no option UCI_ShowWDL: use Stockfish 12 or newer")
        spins = [match.groups() for match in map(_SPIN.match, lines) if match]
        ranges = {name.decode(): (int(low), int(high)) for name, low, high in spins}
        for option, value in options.items():
            low, high = ranges.get(option, (value, value))
            if not low <= value <= high:
                raise EngineError(f"{self.name} refuses {option} {value}: it takes {low} to {high}")
            self._send(f"setoption name {option} value {str(value).lower()}")
        self.ready()

    def _watch(self) -> None:
        """Kills an engine that exceeds its deadline: the blocking read then ends. Works on every platform."""
        while not self._closed.wait(0.5):
            deadline = self._deadline
            if deadline and time.monotonic() > deadline:
                self._late = True
                self._process.kill()
                return

    def _send(self, text: str) -> None:
        try:
            self._in.write(text.encode() + b"\n")
        except OSError as error:
            raise EngineError(f"{self.name or self.path} has died: {self._why()}") from error

    def _why(self) -> str:
        if self._late:
            return f"it gave no answer within {self.timeout:g} s and was stopped"
        try:
            return f"exit status {self._process.wait(2)}"
        except subprocess.TimeoutExpired:
            return "it closed its pipes"

    def _read_until(self, word: bytes, timeout: float | None = None) -> list[bytes]:
        """Lines up to and with the first that starts with `word`."""
        self._deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        buffer, start = bytearray(b"\n" + self._rest), 0
        try:
            while True:
                at = buffer.find(b"\n" + word, start)
                end = buffer.find(b"\n", at + 1) if at >= 0 else -1
                if end >= 0:
                    break
                start = at if at >= 0 else max(0, len(buffer) - len(word) - 1)
                data = os.read(self._out.fileno(), 1 << 16)
                if not data:
                    raise EngineError(f"no `{word.decode()}` from {self.name or self.path}: {self._why()}")
                buffer += data
        finally:
            self._deadline = 0.0
        self._rest = bytes(buffer[end + 1 :])
        return bytes(buffer[1:end]).split(b"\n")

    def ready(self) -> None:
        """Waits until the engine has done everything that was sent."""
        self._send("isready")
        self._read_until(b"readyok")

    def new_game(self) -> None:
        """Forgets hash and histories: the next search is a pure function of its position and limit."""
        self._send("ucinewgame")

    def search(self, position: str, limit: str, lines: int = 1) -> list[Line]:
        """The `lines` best variations (fewer where there are fewer legal moves), best first.

        `position` as in UCI (`fen ... moves ...` or `startpos ...`), `limit` as after `go` (`depth 4`).
        Raises EngineError where the position has no legal move.
        """
        option = f"setoption name MultiPV value {lines}\n" if lines != self._multipv else ""
        self._multipv = lines
        self._send(f"{option}position {position}\ngo {limit}")
        variations = parse_info(self._read_until(b"bestmove"))
        if not variations:
            raise EngineError(f"{self.name} gives no move in `{position}`: is it legal, and is the game not over?")
        return variations

    def best_move(self, position: str, limit: str) -> str:
        """The move that the engine plays, in UCI; one of limited strength often plays another than its best line's.

        Arguments and errors as of `search`.
        """
        self._send(f"position {position}\ngo {limit}")
        move = self._read_until(b"bestmove")[-1].split()[1].decode()
        if move in ("(none)", "0000"):
            raise EngineError(f"{self.name} gives no move in `{position}`: is it legal, and is the game not over?")
        return move

    def close(self) -> None:
        """Ends the process; safe to call twice."""
        self._closed.set()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._in, self._out):
            try:
                pipe.close()
            except OSError:  # bytes were still on their way to a process that is gone
                continue

    def __enter__(self) -> Stockfish:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
