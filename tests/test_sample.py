"""A set made with Stockfish: legal games, targets, splits, duplicates, killed work; python-chess is the oracle."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import chess
import chess.pgn
import numpy as np
import pytest
from cells import run_notebook
from test_stockfish import GREETING, fake_engine

from matrixlib.data.catalogue import Catalogue
from matrixlib.data.shards import Shard
from matrixlib.files import FolderError
from matrixlib.tasks.chess.records import LAYOUT, policy_index, to_board
from matrixlib.tasks.chess.stockfish import labels, sample
from matrixlib.tasks.chess.stockfish.client import EngineError
from matrixlib.tasks.chess.stockfish.labels import Label, level_weights
from matrixlib.tasks.chess.stockfish.sample import (
    GAMES_FILE,
    Parameters,
    game_outcome,
    generate,
    make_set,
    pack,
    position_key,
    read_games,
)

TINY = Parameters(seed=5, nodes=(20, 60), plies=60, keep=0.3, shallow_depth=2, deep_depth=3)
RANDOM = Parameters(seed=3, plies=90)
ENGINE = "Random 1"


# A work folder without an engine


def fake_label(_engine: object, board: chess.Board, *_depths: int) -> Label:
    """A function of the oriented position."""
    ours = board if board.turn else board.mirror()
    rng = random.Random(ours.epd())
    win = rng.randint(0, 1000)
    loss = rng.randint(0, 1000 - win)
    level = [rng.choice([0, 7, 30, labels.NO_WEIGHT]) for _ in ours.legal_moves]
    level[rng.randrange(len(level))] = 0
    return Label((win, 1000 - win - loss, loss), level)


def fake_game(_engine: object, number: int, parameters: Parameters) -> tuple[list[chess.Move], list[int], int, str]:
    rng = random.Random(number // 2)  # every second game repeats the one before: duplicates
    board, moves, seen = chess.Board(), [], Counter[str]()
    mate = iter(["f2f3", "e7e5", "g2g4", "d8h4"] if number % 5 == 0 else [])
    while True:
        seen[position_key(board)] += 1
        end = game_outcome(board, seen[position_key(board)], parameters.plies)
        if end is not None:
            return moves, [0] * len(moves), *end
        moves.append(chess.Move.from_uci(next(mate, rng.choice(list(board.legal_moves)).uci())))
        board.push(moves[-1])


def make_work(folder: Path, count: int) -> Path:
    """A work folder as `generate` leaves it, played and labelled at random."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"format": sample.WORK_FORMAT, "engine": ENGINE, "parameters": {"seed": RANDOM.seed, "plies": RANDOM.plies}}
    if not (folder / sample.FACTS_FILE).exists():
        (folder / sample.FACTS_FILE).write_text(json.dumps(facts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "play_game", fake_game)
        patch.setattr(sample, "label", fake_label)
        made = [sample.make_game(None, number, RANDOM) for number in range(count)]  # type: ignore[arg-type]
    (folder / GAMES_FILE).write_text("".join(json.dumps(game) + "\n" for game in made))
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    return make_work(tmp_path_factory.mktemp("random") / "work", 80)


@pytest.fixture(scope="module")
def packed(work, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    summary = pack(work, folder)
    shards = [Shard(path, LAYOUT) for path in sorted(folder.iterdir())]
    assert summary["shards"] == len(shards) > 0
    assert summary["train"] + summary["validation"] == sum(map(len, shards))
    assert sum(shard.path.stat().st_size for shard in shards) < 250 * sum(map(len, shards))
    return [(shard, shard.gather(np.arange(len(shard)))) for shard in shards]


def boards_of(pgn: str) -> list[chess.Board]:
    """The boards before each move of a game."""
    game = chess.pgn.read_game(io.StringIO(pgn))
    assert game is not None
    assert not game.errors
    return [node.parent.board() for node in game.mainline()]


# Games and labels of the engine itself


@pytest.fixture(scope="module")
def made(stockfish, tmp_path_factory) -> Path:
    """Four games, made in one go."""
    folder = tmp_path_factory.mktemp("work")
    assert generate(folder, 3, TINY, stockfish, workers=2, progress=False, games_per_chunk=2)["new games"] == 4
    return folder


def test_games_are_legal_and_their_results_and_positions_right(made):
    for number, game in enumerate(read_games(made)):
        assert game["game"] == number
        boards = boards_of(game["pgn"])
        last = chess.pgn.read_game(io.StringIO(game["pgn"])).end().board()
        assert not any(board.is_game_over() or board.is_repetition(3) for board in boards)
        outcome = last.outcome(claim_draw=True)
        if game["ending"] == "cap":
            assert (len(boards), game["result"]) == (TINY.plies, 2)
        else:
            assert {True: 1, False: -1, None: 0}[outcome.winner] == game["result"]
        known = {board.fen(en_passant="legal"): board for board in boards}
        for fen, repetition, wdl, level in game["positions"]:
            board = known.pop(fen)  # none is there twice
            assert (sum(wdl), len(level)) == (1000, board.legal_moves.count())
            before = [position_key(one) for one in boards[: board.ply()]]
            assert repetition == min(2, before.count(position_key(board)))
        assert game["positions"]


KILLED = """
from matrixlib.tasks.chess.stockfish.sample import Parameters, generate
if __name__ == "__main__":
    generate({folder!r}, 4, Parameters(**{parameters!r}), {stockfish!r}, workers=1, progress=False, games_per_chunk=1)
"""


@pytest.mark.slow
def test_killed_work_goes_on_to_the_same_bytes(made, stockfish, tmp_path):
    folder, script = tmp_path / "work", tmp_path / "script.py"
    parameters = {name: getattr(TINY, name) for name in Parameters.__dataclass_fields__}
    script.write_text(KILLED.format(folder=str(folder), parameters=parameters, stockfish=str(stockfish)))
    process = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    deadline = time.monotonic() + 60
    while not (folder / GAMES_FILE).exists() or not (folder / GAMES_FILE).stat().st_size:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if os.name == "posix":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
    kept = (folder / GAMES_FILE).read_bytes()
    with open(folder / GAMES_FILE, "ab") as file:
        file.write(b'{"game": 1, "resu')  # half a line
    generate(folder, 4, TINY, stockfish, workers=2, progress=False, games_per_chunk=2)
    whole = (folder / GAMES_FILE).read_bytes()
    assert whole.startswith(kept)
    assert whole == (made / GAMES_FILE).read_bytes()
    assert generate(folder, 4, TINY, stockfish, progress=False)["games"] == 10, "whole chunks"
    assert (folder / GAMES_FILE).read_bytes().startswith(whole)


def test_a_folder_of_other_work_is_refused(made, stockfish):
    with pytest.raises(ValueError, match="use another folder or delete it"):
        generate(made, 4, replace(TINY, seed=6), stockfish, progress=False)


@pytest.mark.soak
def test_any_engine_that_says_its_visits_makes_a_set_and_is_named_with_its_arguments(tmp_path):
    text = f"{sys.executable} -m matrixlib.tasks.chess.uci.engine --checkpoint shipped --device cpu nodes=12"
    tiny = replace(TINY, nodes=(2, 4), plies=6, keep=1.0, keep_first=1.0)
    made = generate(tmp_path, 1, tiny, text, workers=1, progress=False, games_per_chunk=1)
    assert made["engine"].startswith("matrixlib")
    assert made["engine"].endswith(f"({text})")
    (game,) = read_games(tmp_path)
    assert len(game["positions"]) == 6
    with pytest.raises(ValueError, match="was made with"):
        generate(tmp_path, 1, tiny, text.replace("12", "13"), workers=1, progress=False)


def test_without_stockfish_nothing_is_begun(tmp_path):
    with pytest.raises(EngineError, match=r"no Stockfish at 'no/such/engine'.*apt install"):
        generate(tmp_path / "work", 4, TINY, "no/such/engine", progress=False)
    assert not (tmp_path / "work").exists()


LABELLER = """
import chess
board, wdl = chess.Board(), "wdl 300 400 300"
for line in sys.stdin:
    word, _, rest = line.strip().partition(" ")
    if word == "uci":
        print("id name Fake 1\\noption name UCI_ShowWDL type check\\nuciok", flush=True)
    elif word == "isready": print("readyok", flush=True)
    elif word == "position":
        start, _, moves = rest.partition(" moves ")
        board = chess.Board() if start == "startpos" else chess.Board(start.removeprefix("fen "))
        for move in moves.split(): board.push_uci(move)
    elif word == "go":
        {in_a_game}
        for k, move in enumerate(board.legal_moves):
            print(f"info depth 1 multipv {{k + 1}} score cp 0 {{wdl}} pv {{move}}")
        print("bestmove e2e4", flush=True)
"""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("sys.exit(9)", "no `bestmove` from Fake 1 in `position startpos moves .*: exit status 9"),
        (
            "print(f'info score cp 0 {wdl} pv a1h8\\nbestmove a1h8', flush=True); continue",
            "answers 'a1h8' in `fen",
        ),
    ],
)
def test_an_engine_that_fails_later_stops_the_work_and_is_named(tmp_path, fault, message):
    """It labels a first position, and fails in the first game."""
    engine = fake_engine(tmp_path, LABELLER.format(in_a_game=f"if len(board.move_stack) > 9: {fault}"))
    with pytest.raises(EngineError, match=message):
        generate(tmp_path / "work", 4, TINY, engine, workers=2, progress=False)
    assert not (tmp_path / "work" / GAMES_FILE).read_bytes()


def test_an_engine_that_fails_at_once_is_refused_before_anything_is_made(tmp_path):
    for fault, message in (("sys.exit(9)", "exit status 9"), ("print('bestmove a1h8', flush=True)", "gives no move")):
        engine = fake_engine(tmp_path, GREETING.format(go=fault))
        with pytest.raises(EngineError, match=message):
            generate(tmp_path / "work", 4, TINY, engine, progress=False)
        assert not (tmp_path / "work").exists()


# Shards


def test_records_and_targets_are_those_of_the_games_and_labels(work, packed):
    facts: dict[str, tuple[int, int]] = {}
    for game in read_games(work):
        for fen, repetition, *_ in game["positions"]:
            facts.setdefault(fen, (game["result"], repetition))
    found = Counter[int]()
    for _, batch in packed:
        for row, record in enumerate(batch["records"]):
            board = to_board(record)
            result, repetition = facts[board.fen(en_passant="legal")]
            assert record["result"] == (-result if record["side"] and result != 2 else result)
            assert record["repetition"] == repetition
            found[int(record["result"])] += 1
            start, stop = batch["policy_offset"][row : row + 2]
            index = batch["policy_index"][start:stop].tolist()
            assert index == sorted(policy_index(move, board.turn) for move in board.legal_moves)
            wdl, level = fake_label(None, board)
            expected = level_weights(np.array(level), np.array([0, len(level)]))
            assert batch["policy_weight"][start:stop].tolist() == expected.tolist()
            np.testing.assert_allclose(record["wdl"] / 65535, np.array(wdl) / 1000, atol=1e-4)
    assert found[2] > 0
    assert len(found) > 2


def canonical(board: chess.Board) -> str:
    """What python-chess says equal positions share; colours and, without castling rights, sides undone."""
    ours = board if board.turn else board.mirror()
    plain = ours.epd(en_passant="legal")
    if ours.castling_rights:
        return plain
    return min(plain, ours.transform(chess.flip_horizontal).epd(en_passant="legal"))


def test_no_position_twice_and_no_game_in_both_splits(work, packed):
    ids, names = {}, Counter[str]()
    for shard, batch in packed:
        ids.setdefault(shard.meta["split"], set()).update(batch["records"]["game"].tolist())
        names.update(canonical(to_board(record)) for record in batch["records"])
    assert max(names.values()) == 1
    assert set(ids) == {"train", "validation"}
    assert not ids["train"] & ids["validation"]
    assert len(names) < sum(len(game["positions"]) for game in read_games(work)), "the repeated games were found"


def test_packing_again_gives_the_same_bytes_and_never_into_a_folder_with_shards(work, packed, tmp_path):
    pack(work, tmp_path)
    for path, (shard, _) in zip(sorted(tmp_path.iterdir()), packed, strict=True):
        assert path.read_bytes() == shard.path.read_bytes()
        assert shard.meta["generator"]["engine"] == ENGINE
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="holds shards already: give another folder"):
        pack(work, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert len(list((work / "games.pgn").read_text().split("[Event "))) == 81


def test_an_empty_or_damaged_folder_is_refused(work, tmp_path):
    with pytest.raises(ValueError, match="call generate first"):
        pack(tmp_path, tmp_path / "out")
    empty = make_work(tmp_path / "work", 0)
    with pytest.raises(ValueError, match="no finished game"):
        pack(empty, tmp_path / "out")
    (empty / GAMES_FILE).write_text('{"game": 0, "resu\n')
    with pytest.raises(ValueError, match=r"games\.jsonl, line 1 is damaged"):
        pack(empty, tmp_path / "out")


# The whole way


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(folder: Path, games: int, *_: Any, **__: Any) -> dict[str, Any]:
        make_work(folder, games)
        return {"engine": ENGINE, "games": games}

    monkeypatch.setattr(sample, "generate", fake)


def test_made_again_with_more_games_every_shard_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_engine: None
) -> None:
    monkeypatch.setattr(sample, "SHARD_RECORDS", 100)
    (tmp_path / "shards" / "imports").mkdir(parents=True)
    note = tmp_path / "shards" / "imports" / "note.txt"
    note.write_text("mine")
    for count in (10, 20, 20):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made = make_set(str(tmp_path), count)
        rows = Catalogue(tmp_path / "shards").shards(state=None)
        assert {row.state for row in rows} == {"healthy"}
        assert len(rows) == made["shards"] > 2
        assert sum(row.count for row in rows) == made["train"] + made["validation"]
        rows[0].path.unlink()  # what is lost is made again
    assert note.read_text() == "mine"


def test_shards_that_others_made_are_left_alone(tmp_path: Path, no_engine: None) -> None:
    make_set(str(tmp_path / "a"), 5)
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "shards").rename(tmp_path / "b" / "shards")  # of a cycle, or of other games
    before = {path.name: path.read_bytes() for path in (tmp_path / "b" / "shards").glob("*.npz")}
    for _ in range(2):
        with pytest.raises(ValueError, match="work: give another folder as `out`"):
            make_set(str(tmp_path / "b"), 2)
        assert {path.name: path.read_bytes() for path in (tmp_path / "b" / "shards").glob("*.npz")} == before
        facts = make_work(tmp_path / "b" / "work", 1) / sample.FACTS_FILE
        facts.write_text(facts.read_text().replace(ENGINE, "Other 1"))


@pytest.mark.parametrize(
    "options", [{"games": 0}, {"games": -1}, {"workers": 0}, {"seed": -5}, {"nodes": (500, 100)}, {"nodes": (0, 5)}]
)
def test_numbers_that_make_no_set_are_named(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give whole numbers from 1, "):
        make_set(str(tmp_path / "s"), **options)
    assert not (tmp_path / "s").exists()
    with pytest.raises(FolderError, match="cannot be written: File name too long"):
        make_set("x" * 5000)


def test_the_notebook_makes_a_set_with_any_stockfish(stockfish: Path, tmp_path: Path) -> None:
    shown = run_notebook("sample", out=str(tmp_path), games=2, nodes_high=300, stockfish=str(stockfish))
    assert not shown.failed
    assert "pass  every policy target is legal" in shown.text
