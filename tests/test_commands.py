"""The commands and the Python of the documents, run as they stand there, only on less."""

import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import chess
import chess.pgn
import pytest
import yaml
import zstandard
from pages import PAGES, ROOT, blocks, lines

from matrixlib.runs.run import open_run
from matrixlib.tasks import load_config as load
from matrixlib.tasks.chess.stockfish.client import EngineError, find_stockfish
from matrixlib.tasks.chess.stockfish.sample import unpack_sample

SMALLER = {  # parameter -> its value in the document -> in the test
    "preset": {"quick": "tiny.yaml", "small": "tiny.yaml", "tictactoe": "demo"},
    "preset_a": {"quick": "tiny.yaml"},
    "preset_b": {"quick": "tiny.yaml"},
    "device": {"mps": "cpu", "cuda": "cpu"},
    "steps": {"1500": "6", "50": "8"},
    "ranks": {"8": "2"},
    "seeds": {"3": "1"},
    "games": {"2000": "1", "40": "2"},
    "games_per_chunk": {"10": "1"},
    "workers": {"8": "1"},
    "generations": {"12": "1"},
    "roll_back_to": {"3": "0"},
    "brief": {"False": "True"},
    "seconds": {"6": "0.2"},
    "sample": {"20000": "200"},
    "out": {"/data/mine": "few"},
}
WORDS = {
    "/data/mine/shards": "made/shards",
    "<run>": "my-run",
    "[16, 64]": "[4]",
    "step_00000500": "step_00000008",
    "simulations=100": "simulations=4",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "--preset small": "--preset tiny.yaml",
}
# What a command begins with that other tests run, or none can
ELSEWHERE = ("make", "pre-commit", ".", "caffeinate", "python")
TINY: dict[str, Any] = {  # over the demo
    "data": {"limit": 1024},
    "model": {"channels": 16, "blocks": 1, "ssl": ["threat", "control"]},
    "train": {"steps": 8, "batch_size": 64},
    "validation": {"interval": 8, "sample": 128, "limit": 1024},
    "checkpoint": {"interval": 8},
    "runtime": {"precision": "fp32", "threads": 1, "channels_last": False},
}


def replaced(text: str) -> str:
    for word, other in WORDS.items():
        text = text.replace(word, other)
    return text


def smaller(line: str) -> str:
    """The command with less to do: SMALLER values, WORDS replaced."""
    words = shlex.split(replaced(line), comments=True)
    for i, word in enumerate(words[:-2]):
        if word == "-p":
            name, value = words[i + 1 : i + 3]
            words[i + 2] = SMALLER.get(name, {}).get(value, value)
            if words[i + 2] == "tiny.yaml" and {"notebooks/cycle.ipynb", "notebooks/sweep.ipynb"} & {*words}:
                words[i + 2] = "demo"
    return " ".join(word if word == "&&" else shlex.quote(word) for word in words)


def random_games(count: int, plies: int) -> list[chess.pgn.Game]:
    """Games of random moves, each with the result 1-0 in its header unless the board says otherwise."""
    games, drawn = [], random.Random(0)
    for _ in range(count):
        board = chess.Board()
        while board.ply() < plies and not board.is_game_over():
            board.push(drawn.choice(list(board.legal_moves)))
        games.append(chess.pgn.Game.from_board(board))
        games[-1].headers["Result"] = board.result() if board.is_game_over() else "1-0"
    return games


def puzzles(games: list[chess.pgn.Game]) -> str:
    """A move of each game as a puzzle in the form of Lichess: the position before the opponent's move, both moves."""
    rows = ["PuzzleId,FEN,Moves,Rating,RatingDeviation,Popularity,NbPlays,Themes,GameUrl"]
    for i, game in enumerate(games):
        board, moves = game.board(), list(game.mainline_moves())
        for move in moves[:20]:
            board.push(move)
        pair = " ".join(move.uci() for move in moves[20:22])
        rows.append(f"{i:05d},{board.fen()},{pair},{800 + 10 * i},80,90,1000,short,https://lichess.org/{i}")
    return "\n".join(rows) + "\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the documents speak of it: notebooks and params, files to bring in, a finished run."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("notebooks", "params", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    games = random_games(80, 40)
    for name, text in {"games.pgn": "\n\n".join(map(str, games)), "lichess_db_puzzle.csv": puzzles(games)}.items():
        (folder / f"{name}.zst").write_bytes(zstandard.compress(text.encode()))
    (folder / "puzzles.csv").write_text(puzzles(games[:20]))
    (folder / "engine_matches.pgn").write_text("\n\n".join(map(str, random_games(3, 20))))
    (folder / "a.epd").write_text("6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - bm Rd8+;\n")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(load("demo", TINY).model_dump(mode="json")))
    # As if Stockfish had made it: a game of it is too few to hold something out
    shutil.copytree(unpack_sample(), folder / "made" / "shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MATRIXLIB_REPORTS", str(folder / "reports"))
        for _ in open_run(str(folder / "tiny.yaml"), "cpu", run="my-run").train():
            pass
    return folder


def run(command: str, folder: Path, typed: str = "") -> str:
    """What it prints. `typed`: its input."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith("JPY_")}
    environment = keep | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{keep['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MATRIXLIB_REPORTS": str(folder / "reports"),
        "MATRIXLIB_DEVICE": "cpu",
    }
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        input=typed,
        cwd=folder,
        env=environment,
        timeout=400,
        check=False,
    )
    # A network that has learned nothing yet fails its verdict; all before that has run then
    judged = "VerdictFailed: " in done.stderr
    assert done.returncode == 0 or judged, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.soak
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page: Path, place: Path) -> None:
    """One after the other, as a reader would.

    In `make test` test_docs.py checks names and parameters, and the notebooks' own tests run them.
    """
    for line in lines([page]):
        if line.split()[0] in ELSEWHERE:
            continue
        command = smaller(line)
        if "sample.ipynb" in command or "engine_elo" in command:
            try:
                find_stockfish()
            except EngineError as error:
                pytest.skip(str(error))
        if line.startswith("matrixlib-uci"):
            output = run(command, place, "uci\nisready\nposition startpos moves e2e4\ngo nodes 8\nquit\n")
            assert "uciok" in output
            assert re.search(r"^bestmove [a-h][1-8]", output, re.MULTILINE)
        else:
            run(command.replace("tiny.yaml", str(place / "tiny.yaml")), place)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks("python", [page])], ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (place / "data" / "mine").exists():  # unless the commands have made it
        shutil.copytree(place / "made" / "shards", place / "data" / "mine")
    monkeypatch.chdir(place)
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(place / "reports"))
    monkeypatch.setenv("MATRIXLIB_DEVICE", "cpu")
    for body in blocks("python", [page]):
        exec(compile(replaced(body), page.name, "exec"), {"__name__": "__main__"})
