"""Chunks: games are legal and their results right, positions are theirs, and killed work goes on."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import chess
import numpy as np
import pytest

from matrixlib.tasks.chess.stockfish import generator as sources
from matrixlib.tasks.chess.stockfish.client import EngineError
from matrixlib.tasks.chess.stockfish.games import ENDINGS, Parameters, position_key
from matrixlib.tasks.chess.stockfish.generator import generate
from matrixlib.tasks.chess.stockfish.labels import oriented

TINY = Parameters(seed=5, games_per_chunk=2, nodes=(20, 60), plies=60, keep=0.3, shallow_depth=2, deep_depth=3)


@pytest.fixture(scope="module")
def work(stockfish, tmp_path_factory) -> Path:
    """Four games in two chunks, made in one go."""
    folder = tmp_path_factory.mktemp("work")
    summary = generate(folder, 4, TINY, stockfish, workers=2, progress=False)
    chunks = [chunk for _, chunk in sources.chunks(folder)]
    assert sum(len(chunk["result"]) for chunk in chunks) == summary["games"] == 4
    assert sum(len(chunk["ply"]) for chunk in chunks) == summary["positions"] > 0
    return folder


def decoded(chunk: dict[str, np.ndarray], game: int) -> list[chess.Move]:
    start, stop = chunk["move_offset"][game : game + 2]
    codes = [int(code) for code in chunk["moves"][start:stop]]
    return [chess.Move(code & 63, code >> 6 & 63, code >> 12 or None) for code in codes]


def test_games_are_legal_and_their_results_right(work):
    for _, chunk in sources.chunks(work):
        for game, (result, ending) in enumerate(zip(chunk["result"], chunk["ending"], strict=True)):
            board, moves = chess.Board(), decoded(chunk, game)
            for move in moves:
                assert not board.is_game_over()
                assert not board.is_repetition(3)
                assert board.halfmove_clock < 100
                assert move in board.legal_moves
                board.push(move)
            outcome = board.outcome(claim_draw=False)
            if outcome is not None:
                assert ENDINGS[ending].replace(" ", "_") == outcome.termination.name.lower()
                assert {True: 1, False: -1, None: 0}[outcome.winner] == result
            elif ENDINGS[ending] == "cap":
                assert (len(moves), result) == (TINY.plies, 2)
            else:
                assert board.is_repetition(3) or board.halfmove_clock == 100
                assert result == 0


def test_positions_are_those_of_the_game(work):
    for _, chunk in sources.chunks(work):
        for row, (game, ply) in enumerate(zip(chunk["game"], chunk["ply"], strict=True)):
            board, seen = chess.Board(), Counter[str]()
            for move in decoded(chunk, game)[:ply]:
                seen[position_key(board)] += 1
                board.push(move)
            assert chunk["repetition"][row] == min(seen[position_key(board)], 2)
            assert chunk["halfmove"][row] == board.halfmove_clock
            assert chunk["side"][row] == (not board.turn)
            codes = chunk["legal"][chunk["legal_offset"][row] : chunk["legal_offset"][row + 1]]
            ours = oriented(board)
            assert sorted(codes) == sorted(sources.move_code(move.uci()) for move in ours.legal_moves)


KILLED = """
from matrixlib.tasks.chess.stockfish.games import Parameters
from matrixlib.tasks.chess.stockfish.generator import generate
if __name__ == "__main__":
    generate({folder!r}, 4, Parameters(**{parameters!r}), {stockfish!r}, workers=1, progress=False)
"""


def test_killed_work_goes_on_to_the_same_bytes(work, stockfish, tmp_path):
    folder, script = tmp_path / "work", tmp_path / "script.py"
    parameters = {name: getattr(TINY, name) for name in Parameters.__dataclass_fields__}
    script.write_text(KILLED.format(folder=str(folder), parameters=parameters, stockfish=str(stockfish)))
    process = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    deadline = time.monotonic() + 60
    while not sources.chunk_path(folder, 0).exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if os.name == "posix":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
    written = sources.chunk_path(folder, 0).stat().st_mtime_ns
    (folder / "chunk_000001.npz.123.tmp").write_bytes(b"half a chunk")
    generate(folder, 4, TINY, stockfish, workers=2, progress=False)
    assert sources.chunk_path(folder, 0).stat().st_mtime_ns == written
    names = sorted(path.name for path in work.iterdir())
    assert sorted(path.name for path in folder.iterdir()) == names
    for name in names:
        assert (folder / name).read_bytes() == (work / name).read_bytes()
    again = generate(folder, 4, TINY, stockfish, progress=False)
    assert (again["games"], again["positions"]) == (0, 0)


def test_a_folder_of_other_work_is_refused(work, stockfish):
    with pytest.raises(ValueError, match="use another folder or delete it"):
        generate(work, 4, replace(TINY, seed=6), stockfish, progress=False)


def test_a_damaged_chunk_is_named(work, tmp_path):
    path = tmp_path / "chunk_000000.npz"
    path.write_bytes(sources.chunk_path(work, 0).read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"chunk_000000.npz is damaged.*generate again"):
        list(sources.chunks(tmp_path))


def test_without_stockfish_nothing_is_begun(tmp_path):
    with pytest.raises(EngineError, match="no Stockfish"):
        generate(tmp_path / "work", 4, TINY, "no/such/engine", progress=False)
    assert not (tmp_path / "work").exists()


def test_a_worker_that_fails_stops_the_work(stockfish, tmp_path, monkeypatch):
    wrapper = tmp_path / "engine"
    if os.name != "posix":
        pytest.skip("the failing engine is a shell script")
    # Speaks UCI to the first process, which asks for its name, and dies at the first search.
    wrapper.write_text(
        f"#!{sys.executable}\nimport sys\nfor line in sys.stdin:\n    word = line.strip()\n"
        '    if word == "uci": print("id name Fake\\noption name UCI_ShowWDL type check\\nuciok", flush=True)\n'
        '    if word == "isready": print("readyok", flush=True)\n'
        '    if word.startswith("go"): sys.exit(9)\n'
    )
    wrapper.chmod(0o755)
    with pytest.raises(EngineError, match="exit status 9"):
        generate(tmp_path / "work", 4, TINY, wrapper, workers=2, progress=False)
    assert not list((tmp_path / "work").glob("chunk_*.npz"))
