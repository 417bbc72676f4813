"""The Python of the documents, run as it stands there, the blocks of a page as cells of a notebook, only on less;
test_docs.py looks at their commands."""

import gzip
import linecache
import random
import shutil
from pathlib import Path
from typing import Any

import chess
import chess.pgn
import pytest
import yaml
import zstandard
from lc0_files import attention_network
from pages import PAGES, blocks

from matrixlib import config
from matrixlib.runs.run import open_run
from matrixlib.tasks.chess.stockfish.sample import unpack_sample

WORDS = {"<run>": "my-run", "simulations=100": "simulations=4", '"demo"': '"tiny.yaml"', "steps=60": "steps=4"}
TINY: dict[str, Any] = {  # over the demo
    "data": {"limit": 1024},
    "model": {"channels": 16, "blocks": 1},
    "train": {"steps": 8, "batch_size": 64},
    "validation": {"interval": 8, "sample": 128, "limit": 1024},
    "runtime": {"precision": "fp32", "threads": 1},
}


def replaced(text: str) -> str:
    for word, other in WORDS.items():
        text = text.replace(word, other)
    return text


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
    """A folder as the documents speak of it: files to bring in, a set of one's own, a finished run."""
    folder = tmp_path_factory.mktemp("place")
    games = random_games(80, 40)
    for name, text in {"games.pgn": "\n\n".join(map(str, games)), "lichess_db_puzzle.csv": puzzles(games)}.items():
        (folder / f"{name}.zst").write_bytes(zstandard.compress(text.encode()))
    (folder / "engine_matches.pgn").write_text("\n\n".join(map(str, random_games(3, 20))))
    tiny, _ = config.read_preset("demo", TINY)
    (folder / "network.pb.gz").write_bytes(gzip.compress(attention_network(7, several=True)))
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny))
    shutil.copytree(unpack_sample(), folder / "data" / "mine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MATRIXLIB_REPORTS", str(folder / "reports"))
        for _ in open_run("demo", "cpu", run="my-run", overrides=TINY).train():
            pass
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if blocks("python", [page])], ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(place / "reports"))
    monkeypatch.setenv("MATRIXLIB_DEVICE", "cpu")
    cells: dict[str, Any] = {"__name__": "__main__"}
    for number, body in enumerate(map(replaced, blocks("python", [page]))):
        name = f"{page.name}:{number}"
        linecache.cache[name] = (len(body), None, body.splitlines(keepends=True), name)  # as IPython does
        exec(compile(body, name, "exec"), cells)
