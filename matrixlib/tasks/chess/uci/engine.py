"""A network as a UCI engine on standard input and output: `matrixlib-uci --checkpoint <run>`.

`uciok` comes before torch is loaded; that happens at `isready` or `go`. One thread reads lines, the main thread obeys
them; a search looks at them between two batches, so `stop` and `isready` are answered within one. Mates are shown
where they are proven; `wdl` has the search's expected result and the network's share of draws in the position.
"""

from __future__ import annotations

import argparse
import math
import os
import queue
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import chess
import chess.syzygy
import numpy as np
from numpy.typing import NDArray

from matrixlib.play.evaluator import Evaluator
from matrixlib.play.search import Search, SearchOptions, SearchResult
from matrixlib.play.selfplay import draw_move
from matrixlib.tasks.chess.game import ChessGame, open_tables
from matrixlib.tasks.chess.records import from_boards, move_from_index, policy_index
from matrixlib.tasks.chess.spec import load
from matrixlib.tasks.chess.uci import protocol
from matrixlib.tasks.spec import find_run

if TYPE_CHECKING:
    from matrixlib.tasks.chess.evaluate.net import Net

Lines = queue.SimpleQueue[str | None]
SLICE = 1.0  # seconds between lines about a search
BYTES = 4096  # of memory that a simulation takes, at most


def ranking(found: SearchResult) -> list[int]:
    """Rows of the moves to show, best first: the one to play, then by visits; those never tried are left out."""
    known = ~np.isnan(found.values) | (found.moves == found.best)
    lost = found.values == -1
    order = np.lexsort(
        (found.prior, np.nan_to_num(found.values), found.visits, ~lost, found.moves == found.best)
    )
    return [int(row) for row in order[::-1] if known[row]]


class Engine:
    """A network behind UCI. load: gives the network, called once; lines: what comes in, None at its end; say: where
    answers go."""

    def __init__(
        self,
        name: str,
        load: Callable[[], Net],
        lines: Lines,
        say: Callable[[str], None],
        simulations: int = 0,
    ) -> None:
        self.name, self.load, self.lines, self.say = name, load, lines, say
        self.options = {option.name: option.default for option in protocol.OPTIONS} | {
            "Simulations": str(simulations)
        }
        self.board = chess.Board()
        self.rng = np.random.default_rng()
        self.net: Net | None = None
        self.search: Search | None = None
        self._tables: chess.syzygy.Tablebase | None = None
        self._placed: tuple[str, list[chess.Move]] | None = None  # start and moves of the search's tree
        self._deferred: deque[str | None] = deque()  # lines that came during a search
        self._stop = False

    def serve(self) -> None:
        """Obey lines until `quit` or their end."""
        while True:
            line = self._deferred.popleft() if self._deferred else self.lines.get()
            words = [] if line is None else line.split()
            if line is None or words == ["quit"]:
                return
            if not words:
                continue
            try:
                act = self._understand(words[0], words[1:])
            except ValueError as error:
                self.say(f"info string {' '.join(str(error).split())}")
            else:
                act()

    def _understand(self, word: str, rest: list[str]) -> Callable[[], None]:
        """What a line asks for; ValueError where that cannot be, and nothing has changed."""
        match word:
            case "uci":
                return self._greet
            case "isready":
                return self._ready
            case "position":
                return partial(setattr, self, "board", protocol.parse_position(rest))
            case "go":
                go = protocol.parse_go(rest)
                return partial(
                    self._go, go, [protocol.legal_move(self.board, text) for text in go.searchmoves]
                )
            case "setoption":
                return self._understand_option(" ".join(rest))
            case "ucinewgame":
                return partial(setattr, self, "_placed", None)
            case "stop" | "debug" | "register" | "ponderhit":
                return _nothing
            case _:
                raise ValueError(f"unknown command '{word}'")

    def _understand_option(self, text: str) -> Callable[[], None]:
        found = re.fullmatch(r"name\s+(.+?)(?:\s+value(?:\s+(.*))?)?", text)
        named = {option.name.lower(): option for option in protocol.OPTIONS}
        if found is None or found[1].lower() not in named:
            raise ValueError(f"there is no option in 'setoption {text}'")
        option = named[found[1].lower()]
        value = option.read(found[2] or "")
        tables = open_tables(value) if option.name == "SyzygyPath" and value else None
        return partial(self._set, option.name, value, tables)

    def _set(self, name: str, value: str, tables: chess.syzygy.Tablebase | None) -> None:
        self.options[name] = value
        if name == "SyzygyPath":
            self._tables = tables
        if name in ("SyzygyPath", "Batch", "Threads"):
            self.search = None

    def _greet(self) -> None:
        self.say(f"id name matrixlib {self.name}")
        self.say("id author the authors of matrixlib")
        for option in protocol.OPTIONS:
            self.say(str(option))
        self.say("uciok")

    def _ready(self) -> None:
        self._searcher()
        self.say("readyok")

    def _searcher(self) -> Search:
        """The search, with the network loaded and everything compiled."""
        if self.net is None:
            self.net = self.load()
        if self.search is None:
            most = max((len(name) - 1 for name in self._tables.wdl), default=0) if self._tables else 0
            replace(self.net.runtime, threads=int(self.options["Threads"])).apply()
            options = SearchOptions(leaves=int(self.options["Batch"]))
            self.search = Search(ChessGame(self._tables, most), Evaluator(self.net), options)
            self.search.run(2 * options.leaves)
            self._placed = None
        return self.search

    def _go(self, go: protocol.Go, only: list[chess.Move]) -> None:
        began = time.monotonic()
        self._stop = any(_ends(line) for line in self._deferred)
        board = self.board
        if not any(board.legal_moves):
            self.say(f"info depth 0 score {'mate 0' if board.is_check() else 'cp 0'}")
            self._wait(go)
            self.say("bestmove (none)")
            return
        seconds = protocol.seconds_for(go, board.turn, int(self.options["Move Overhead"]))
        deadline = math.inf if seconds is None else began + seconds
        limit = protocol.simulations_for(go, board.turn, int(self.options["Simulations"]))
        search = self._searcher()
        if not self._place(search, only):
            self.say("info depth 0 score cp 0 string neither side can mate")
            self._wait(go)
            self.say(f"bestmove {next(iter(only or board.legal_moves)).uci()}")
            return
        draws = self._draws(board)
        full = int(self.options["Hash"]) * 2**20 // BYTES
        done, over = 0, False
        while not over:
            pause = min(deadline, time.monotonic() + SLICE)
            target = min(limit, protocol.UNIT << protocol.depth_of(done) + 1)
            (found,) = search.run(int(target) - done, until=partial(self._interrupted, pause))
            done += found.simulations
            seen = int(found.visits.sum())
            over = self._stop or found.proven or done >= limit or seen >= full or time.monotonic() >= deadline
            self._report(search, found, done, time.monotonic() - began, draws, 1000 * seen // full)
        self._wait(go)
        self.say(f"bestmove {self._chosen(found).uci()}")

    def _wait(self, go: protocol.Go) -> None:
        """An infinite search answers only when it is stopped."""
        while go.infinite and not self._stop:
            self._hear(self.lines.get())

    def _interrupted(self, pause: float) -> bool:
        while not self.lines.empty():
            self._hear(self.lines.get())
        return self._stop or time.monotonic() >= pause

    def _hear(self, line: str | None) -> None:
        """A line during a search: `isready` is answered at once, all others are kept in their order.

        What ends a search ends those, too, that wait before it.
        """
        if line is not None and line.split() == ["isready"]:
            self.say("readyok")
        else:
            self._stop = self._stop or _ends(line)
            self._deferred.append(line)

    def _place(self, search: Search, only: list[chess.Move]) -> bool:
        """Put the tree at the board, keeping what is known where it can be; False where the position is dead.

        Where a draw could be claimed the game may go on: it is then searched as if nothing had happened before.
        """
        board, moves = self.board, self.board.move_stack
        start = board.root().fen()
        past = self._placed[1] if self._placed and self._placed[0] == start and not only else None
        if past is not None and moves[: len(past)] == past:
            for i in range(len(past), len(moves)):
                turn = board.turn if (len(moves) - i) % 2 == 0 else not board.turn
                search.advance([0], [policy_index(moves[i], turn)])
        else:
            indices = [policy_index(move, board.turn) for move in only]
            search.reset(0, from_boards([board]), _history(search, board), only=indices)
        self._placed = None if only else (start, list(moves))
        if not _over(search):
            return True
        state = from_boards([board], halfmove=0, repetition=0)
        search.reset(0, state, only=[policy_index(move, board.turn) for move in only])
        self._placed = None
        return not _over(search)

    def _draws(self, board: chess.Board) -> float | None:
        """The network's share of draws, where it is to be shown and the network says one."""
        assert self.net is not None
        if self.options["UCI_ShowWDL"] == "false":
            return None
        (seen,) = self.net.evaluate_boards([board])
        return seen.wdl[1] if seen.wdl else None

    def _report(
        self,
        search: Search,
        found: SearchResult,
        done: int,
        seconds: float,
        draws: float | None,
        fullness: int,
    ) -> None:
        """A line for each variation to show."""
        for rank, row in enumerate(ranking(found)[: int(self.options["MultiPV"])], start=1):
            value, move = float(found.values[row]), int(found.moves[row])
            value = found.value if math.isnan(value) else value
            parts = [
                f"info depth {protocol.depth_of(done)} multipv {rank}",
                f"score {protocol.score_text(value, int(found.plies[row]))}",
            ]
            parts += [] if draws is None else [protocol.wdl_text(value, draws)]
            parts.append(f"nodes {done} nps {int(done / max(seconds, 1e-3))} hashfull {min(fullness, 1000)}")
            parts.append(f"time {int(1000 * seconds)} pv {self._variation(search.line(0, move))}")
            self.say(" ".join(parts))

    def _variation(self, line: Sequence[int]) -> str:
        board = self.board.copy(stack=False)
        moves = []
        for index in line:
            moves.append(move_from_index(index, board))
            board.push(moves[-1])
        return " ".join(move.uci() for move in moves)

    def _chosen(self, found: SearchResult) -> chess.Move:
        temperature = int(self.options["Temperature"]) / 100
        index = draw_move(found, temperature, self.rng) if temperature else found.best
        return move_from_index(index, self.board)


def _nothing() -> None:
    """What `stop` does when nothing is searched."""


def _ends(line: str | None) -> bool:
    """Whether a search is over when this comes."""
    return line is None or line.split() in (["stop"], ["quit"])


def _history(search: Search, board: chess.Board) -> NDArray[np.uint64]:
    """Keys of the positions before, as far back as one of them can come again."""
    walk, past = board.copy(), []
    for _ in range(min(board.halfmove_clock, len(board.move_stack))):
        walk.pop()
        past.append(walk.copy(stack=False))
    return search.game.key(from_boards(past))


def _over(search: Search) -> bool:
    counts = np.diff(search.game.legal(search.states)[1])
    return not np.isnan(search.game.terminal(search.states, counts)).all()


def listen(descriptor: int, lines: Lines) -> None:
    """Pass on the lines of a file descriptor, and None at its end.

    Not by a buffered file: that would wait with its lock held, which breaks the interpreter's exit.
    """
    rest = b""
    while data := os.read(descriptor, 1 << 16):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            lines.put(line.decode(errors="replace"))
    lines.put(rest.decode(errors="replace"))
    lines.put(None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 2 where there is no such run, 1 where its network is of no use."""
    parser = argparse.ArgumentParser(prog="matrixlib-uci", description="A trained network as a UCI engine.")
    parser.add_argument(
        "--checkpoint", required=True, help="a run, its name under reports/, or a checkpoint's folder"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument(
        "--simulations", type=int, default=0, help="most simulations of a move; 0: as the clock allows"
    )
    asked = parser.parse_args(arguments)
    try:
        folder, checkpoint = find_run(asked.checkpoint)
        protocol.OPTIONS[0].read(str(asked.simulations))
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    lines: Lines = queue.SimpleQueue()
    threading.Thread(target=listen, args=(sys.stdin.fileno(), lines), daemon=True).start()
    network = partial(load, folder, checkpoint, asked.device)
    engine = Engine(folder.resolve().name, network, lines, partial(print, flush=True), asked.simulations)
    try:
        engine.serve()
    except ValueError as error:  # of the network: without it there is nothing to go on with
        reason = " ".join(str(error).split())
        print(f"info string {reason}", flush=True)
        print(f"matrixlib-uci: {reason}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # nobody listens any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    return 0
