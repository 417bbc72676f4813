"""UCI engine on standard input and output: `matrixlib-uci`, or `matrixlib-uci --checkpoint <run>`.

`uciok` is sent before torch is loaded. One thread reads lines, the main thread handles them, during a search between
two batches. `wdl` combines the search's expected result with the network's draw rate.
"""

from __future__ import annotations

import argparse
import math
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import chess
import chess.syzygy
import numpy as np

from matrixlib.engine.folder import newest_complete
from matrixlib.files import SHIPPED
from matrixlib.hardware.machine import set_waiting_policy
from matrixlib.play.search import SearchOptions, SearchResult
from matrixlib.play.selfplay import draw_move
from matrixlib.tasks.chess.game import ChessGame, open_tablebases
from matrixlib.tasks.chess.records import move_from_index
from matrixlib.tasks.chess.spec import load
from matrixlib.tasks.chess.uci import protocol
from matrixlib.tasks.chess.uci.game_search import GameSearch
from matrixlib.tasks.spec import find_run

if TYPE_CHECKING:
    from matrixlib.tasks.chess.evaluate.net import Net

Lines = queue.SimpleQueue[str | None]
MIB = 2**20
MAX_LINE_BYTES = 1 << 17  # the rest is cut off; a game of 10,000 moves has 50,000


def ranking(result: SearchResult) -> list[int]:
    """Rows of the moves for MultiPV, the best move first, then by visits; unvisited moves are omitted."""
    best = result.moves == result.best
    known = ~np.isnan(result.values) | best
    order = np.lexsort((result.prior, np.nan_to_num(result.values), result.visits, result.values != -1, best))
    return [int(row) for row in order[::-1] if known[row]]


def read_lines(descriptor: int, lines: Lines) -> None:
    """Queue the lines of a file descriptor, then None. A buffered file's lock would break the interpreter's exit."""
    rest = b""
    while data := os.read(descriptor, 1 << 16):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            lines.put(line.decode(errors="replace"))
        rest = rest[:MAX_LINE_BYTES]
    lines.put(rest.decode(errors="replace"))
    lines.put(None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; exit status 2 for an unknown run, 1 for a network that cannot be loaded."""
    parser = argparse.ArgumentParser(prog="matrixlib-uci", description="A trained network as a UCI engine.")
    parser.add_argument(
        "--checkpoint",
        default="",
        help="run, name under reports/, checkpoint folder or network file; default: the newest finished chess run, "
        "else `shipped`, the network of the package",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--simulations", type=int, default=0, help="most simulations per move; 0: as the clock allows")
    flags = parser.parse_args(arguments)
    set_waiting_policy()
    try:
        folder, checkpoint = find_run(flags.checkpoint or newest_complete("chess") or SHIPPED)
        protocol.parse_option(f"name Simulations value {flags.simulations}")
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    lines: Lines = queue.SimpleQueue()
    threading.Thread(target=read_lines, args=(sys.stdin.fileno(), lines), daemon=True).start()
    network = partial(load, folder, checkpoint, flags.device)
    engine = Engine(folder.resolve().name, network, lines, partial(print, flush=True), flags.simulations)
    try:
        engine.serve()
    except ValueError as error:  # the network cannot be loaded
        reason = " ".join(str(error).split())
        print(f"info string {reason}", flush=True)
        print(f"matrixlib-uci: {reason}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the GUI is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    return 0


def _ends_search(line: str | None) -> bool:
    return line is None or line.split() in (["stop"], ["quit"])


class Engine:
    """A UCI engine. load: loads the network, called once. lines: input, None at its end. send: writes one line."""

    def __init__(
        self, name: str, load: Callable[[], Net], lines: Lines, send: Callable[[str], None], simulations: int = 0
    ) -> None:
        self.name, self.load, self.lines, self.send = name, load, lines, send
        self.options = {option.name: option.default for option in protocol.OPTIONS} | {"Simulations": simulations}
        self.board = chess.Board()
        self.rng = np.random.default_rng()
        self.net: Net | None = None
        self.game_search: GameSearch | None = None
        self._tables: chess.syzygy.Tablebase | None = None
        self._deferred: deque[str | None] = deque()  # lines received during a search
        self._stop = False

    def serve(self) -> None:
        """Handle lines until `quit` or their end."""
        while True:
            line = self._deferred.popleft() if self._deferred else self.lines.get()
            if line is None or line.split() == ["quit"]:
                return
            try:
                run = self._handle(line.split())
            except ValueError as error:
                self.send(f"info string {' '.join(str(error).split())}")
            else:
                run()

    def _handle(self, words: list[str]) -> Callable[[], object]:
        """Handle a line; returns what needs the network as a function, since its errors are not those of the line."""
        match words:
            case ["uci", *_]:
                return self._identify
            case ["isready", *_]:
                return self._ready
            case ["go", *rest]:
                go = protocol.parse_go(rest)
                return partial(self._go, go, [protocol.legal_move(self.board, move) for move in go.searchmoves])
            case ["position", *rest]:
                self.board = protocol.read_position(" ".join(rest))
            case ["setoption", *rest]:
                option, value = protocol.parse_option(" ".join(rest))
                if option == "SyzygyPath":
                    self._tables = open_tablebases(str(value)) if value else None
                self.options[option] = value
                if option in ("SyzygyPath", "Batch", "MaxBatch", "Threads", "PolicyHead", "ValueHead"):
                    self.game_search = None
            case ["ucinewgame", *_]:
                if self.game_search is not None:
                    self.game_search.game_line = None
            case [word, *_] if word not in ("stop", "debug", "register", "ponderhit"):
                raise ValueError(f"unknown command '{word}'")
        return lambda: None

    def _integer(self, option: str) -> int:
        return int(self.options[option])

    def _identify(self) -> None:
        names = f"id name matrixlib {self.name}", "id author the authors of matrixlib"
        for line in (*names, *map(str, protocol.OPTIONS), "uciok"):
            self.send(line)

    def _ready(self) -> None:
        self._load_search()
        self.send("readyok")

    def _load_search(self) -> GameSearch:
        """The search, with the network loaded and compiled."""
        if self.net is None:
            self.net = self.load()
        if self.game_search is None:
            self._choose_heads(self.net)
            men = max((len(name) - 1 for name in self._tables.wdl), default=0) if self._tables else 0
            net = self.net.with_threads(self._integer("Threads") or self.net.runtime.threads)
            options = SearchOptions(leaves=self._integer("Batch"), most_leaves=self._integer("MaxBatch"))
            self.game_search = GameSearch(net, ChessGame(self._tables, men), options)
            self.game_search.search.run(2 * options.leaves)
            self.game_search.search.trim()
        return self.game_search

    def _choose_heads(self, net: Net) -> None:
        """Use the heads of the options; says which ones the network has not, and keeps those before."""
        heads, choose = (self.options["PolicyHead"], self.options["ValueHead"]), getattr(net.model, "choose", None)
        try:
            if choose is not None:
                choose(*heads)
            elif heads != ("vanilla", "winner"):
                raise ValueError("PolicyHead and ValueHead are for Lc0 networks with several; this one has one of each")
        except ValueError as error:
            self.send(f"info string {error}")

    def _go(self, go: protocol.Go, only: list[chess.Move]) -> None:
        began = time.monotonic()
        self._stop = any(_ends_search(line) for line in self._deferred)
        board = self.board
        if not any(board.legal_moves):
            self.send(f"info depth 0 score {'mate 0' if board.is_check() else 'cp 0'}")
            return self._answer(go, "(none)")
        seconds = protocol.seconds_for(go, board.turn, self._integer("Move Overhead"))
        deadline = math.inf if seconds is None else began + seconds
        limit = protocol.simulations_for(go, board.turn, self._integer("Simulations"))
        search = self._load_search()
        if not search.set_position(board, only):
            self.send("info depth 0 score cp 0 string neither side can mate")
            return self._answer(go, next(iter(only or board.legal_moves)).uci())
        draws, capacity = None, self._integer("Hash") * MIB
        if self.options["UCI_ShowWDL"] == "true":
            (evaluation,) = search.net.evaluate_boards([board])
            draws = evaluation.wdl[1] if evaluation.wdl else None
        for result, done in search.run(limit, deadline, self._interrupted, capacity):
            seconds = time.monotonic() - began
            progress = (
                f"nodes {done} nps {int(done / max(seconds, 1e-3))} "
                f"hashfull {min(1000 * search.search.bytes // capacity, 1000)} time {int(1000 * seconds)}"
            )
            self._report(search, result, done, draws, progress)
        if self.options["VerboseMoveStats"] == "true":
            self._report_moves(result)
        temperature = self._integer("Temperature") / 100
        move = draw_move(result, temperature, self.rng) if temperature else result.best
        self._answer(go, move_from_index(move, board).uci())

    def _answer(self, go: protocol.Go, move: str) -> None:
        """Send `bestmove`, for an infinite search only after `stop`."""
        while go.infinite and not self._stop:
            self._handle_during_search(self.lines.get())
        self.send(f"bestmove {move}")

    def _interrupted(self) -> bool:
        while not self.lines.empty():
            self._handle_during_search(self.lines.get())
        return self._stop

    def _handle_during_search(self, line: str | None) -> None:
        """Handle a line during a search: `isready` at once, others later; `stop` and `quit` end the search."""
        if line is not None and line.split() == ["isready"]:
            self.send("readyok")
        else:
            self._stop = self._stop or _ends_search(line)
            self._deferred.append(line)

    def _report_moves(self, result: SearchResult) -> None:
        """Send visits N, policy P and expected result Q of each legal move, least likely first, and of the position."""
        values = np.where(np.isnan(result.values), result.value, result.values)
        for row in np.argsort(result.prior, kind="stable"):
            move = move_from_index(int(result.moves[row]), self.board).uci()
            numbers = f"N: {result.visits[row]} (P: {100 * result.prior[row]:.4f}%) (Q: {values[row]:.5f})"
            self.send(f"info string {move} {numbers}")
        self.send(f"info string node N: {result.visits.sum()} (P: 100.0000%) (Q: {result.value:.5f})")

    def _report(self, search: GameSearch, result: SearchResult, done: int, draws: float | None, progress: str) -> None:
        for rank, row in enumerate(ranking(result)[: self._integer("MultiPV")], start=1):
            value = float(result.value if np.isnan(result.values[row]) else result.values[row])
            score = protocol.score_text(value, int(result.plies[row]))
            wdl = "" if draws is None else f"{protocol.wdl_text(value, draws)} "
            moves = search.line(self.board, int(result.moves[row]))
            self.send(
                f"info depth {protocol.depth_from_simulations(done)} multipv {rank} score {score} {wdl}{progress} "
                f"pv {' '.join(move.uci() for move in moves)}"
            )


if __name__ == "__main__":
    sys.exit(main())
