"""Positions that are there more than once become one, in a new folder that appears when it is whole."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import chess
import numpy as np
import pytest
from chess_shards import BARE, QUEEN_UP, batch_of, write

from matrixlib.data.catalogue import Catalogue
from matrixlib.data.shards import Batch, Shard, concat, write_shard
from matrixlib.tasks.chess.importers import duplicates
from matrixlib.tasks.chess.importers import import_files as imports
from matrixlib.tasks.chess.importers.audit import faults
from matrixlib.tasks.chess.importers.duplicates import deduplicate
from matrixlib.tasks.chess.importers.import_files import import_files
from matrixlib.tasks.chess.records import LAYOUT, UNKNOWN, from_boards, policy_index, position_hashes, position_keys

GAMES = """[Result "1-0"]

1. e4 e5 2. Nf3 Nc6 3. Bb5 1-0

[Result "0-1"]

1. Nf3 Nc6 2. e4 e5 3. Bc4 0-1

[Result "1/2-1/2"]

1. e4 {[%eval 0.5]} e5 2. Nf3 d6 1/2-1/2
"""


def add(folder: Path, text: str, name: str = "a.pgn") -> None:
    folder.mkdir(exist_ok=True)
    (folder.parent / name).write_text(text)
    os.utime(folder.parent / name, (10**9, 10**9))  # it is in the shards as the time of their making
    import_files(folder.parent / name, folder, workers=1, progress=False)


def stored(folder: Path) -> Batch:
    """Every healthy position."""
    rows = Catalogue(folder).shards()
    assert not Catalogue(folder).verify()
    batch = concat([Shard(row.path, LAYOUT).gather(np.arange(row.count)) for row in rows], LAYOUT)
    assert faults(batch) == {}
    return batch


def row_of(batch: Batch, board: chess.Board) -> int:
    (row,) = np.flatnonzero(position_hashes(batch["records"]) == position_hashes(from_boards([board])))
    return int(row)


def moves_of(batch: Batch, row: int, board: chess.Board) -> dict[str, float]:
    """Moves with weight, by name."""
    start, stop = batch["policy_offset"][row : row + 2]
    share = dict(zip(batch["policy_index"][start:stop], batch["policy_weight"][start:stop] / 65535, strict=True))
    found = {board.san(move): share[policy_index(move, board.turn)] for move in board.legal_moves}
    return {name: round(float(weight), 3) for name, weight in found.items() if weight}


def test_targets_are_averaged(tmp_path: Path) -> None:
    add(tmp_path / "f", GAMES)
    before = stored(tmp_path / "f")
    counts = deduplicate(tmp_path / "f", tmp_path / "out")
    batch = stored(tmp_path / "out")
    assert (
        len(set(position_keys(batch["records"]))) == len(batch["records"]) == len(set(position_keys(before["records"])))
    )
    assert counts == {"positions": 14, "different": len(batch["records"]), "in several sources": 0}
    board = chess.Board()
    start = row_of(batch, board)
    assert moves_of(batch, start, board) == {"e4": 0.667, "Nf3": 0.333}
    assert batch["records"]["result"][start] == UNKNOWN, "the games ended in different ways"
    assert np.round(batch["records"]["wdl"][start] / 65535, 3).tolist() == [0.333, 0.333, 0.333]
    for san in ("e4", "e5", "Nf3", "Nc6"):
        board.push_san(san)
    both = row_of(batch, board)
    assert moves_of(batch, both, board) == {"Bb5": 0.5, "Bc4": 0.5}


def test_mirror_images_are_one_and_their_moves_are_turned(tmp_path: Path) -> None:
    fens = ("4k3/8/8/8/8/8/P7/4K3 w - - 0 1", "3k4/8/8/8/8/8/7P/3K4 w - - 0 1", "4k3/p7/8/8/8/8/8/4K3 b - - 0 1")
    moves = ("Kd2", "Ke2", "Kd7")
    games = [f'[FEN "{fen}"]\n\n{move} *\n\n' for fen, move in zip(fens, moves, strict=True)]
    add(tmp_path / "f", "".join(games))
    assert deduplicate(tmp_path / "f", tmp_path / "out")["different"] == 1
    assert stored(tmp_path / "out")["policy_weight"].max() == 65535, "all three played the same move"


FEW_FILES = """
import resource, sys
from matrixlib.tasks.chess.importers.duplicates import deduplicate

resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
print(deduplicate(sys.argv[1], sys.argv[2])["different"])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of open files to set")
def test_more_shards_than_files_that_may_be_open(tmp_path: Path) -> None:
    for number in range(50):
        write(tmp_path / "f", f"{number}", batch_of([QUEEN_UP, BARE], game=number))
    command = [sys.executable, "-c", FEW_FILES, str(tmp_path / "f"), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2"], done.stderr


def test_sources_and_splits_are_merged_and_training_keeps_the_position(tmp_path: Path, shared: Path) -> None:
    folder = tmp_path / "f"
    import_files([shared / "games" / "engine_matches.pgn"], folder, workers=1, progress=False)
    add(
        folder,
        "".join(f"1. {a} {b} *\n\n" for a in ("a3", "b3", "c3", "d3", "e3") for b in ["a6", "b6", "c6", "d6", "e6"]),
    )
    fen = chess.Board().fen()
    (tmp_path / "a.epd").write_text(f"{' '.join(fen.split()[:4])} bm e4;\n")
    import_files(tmp_path / "a.epd", folder, workers=1, progress=False)
    assert deduplicate(folder, tmp_path / "out")["in several sources"] == 1
    batch = stored(tmp_path / "out")
    assert Counter(position_keys(batch["records"])).most_common(1)[0][1] == 1
    assert set(position_keys(batch["records"])) == set(position_keys(stored(folder)["records"]))
    start = row_of(batch, chess.Board())
    keys = {
        split: set(position_keys(np.concatenate([Shard(r.path, LAYOUT).arrays["records"] for r in rows])))
        for split in ("train", "validation")
        if (rows := Catalogue(tmp_path / "out").shards(split))
    }
    assert position_keys(batch["records"][[start]])[0] in keys["train"]
    assert not keys["train"] & keys["validation"]


WON, HALF, LOST, NONE = (65535, 0, 0), (32768, 0, 32767), (0, 0, 65535), (0, 0, 0)


@pytest.mark.parametrize(
    ("results", "wdl", "result", "expected"),
    [
        ([1, 1], [NONE, NONE], 1, NONE),  # the result tells it
        ([1, -1], [NONE, NONE], UNKNOWN, HALF),  # each game stands in for what is not known
        ([1, UNKNOWN], [NONE, LOST], 1, LOST),  # an entry without a target does not weigh in it
        ([1, -1], [LOST, NONE], UNKNOWN, LOST),
        ([UNKNOWN, 1], [LOST, WON], 1, HALF),
    ],
)
def test_only_entries_that_have_a_target_weigh_in_it(results: Any, wdl: Any, result: int, expected: Any) -> None:
    batch = batch_of([BARE, BARE], result=results, wdl=wdl)
    batch["policy_weight"][batch["policy_offset"][1] :] = 0
    found = duplicates.merge(batch, np.zeros(2, int))
    assert found["records"]["result"].tolist() == [result]
    np.testing.assert_allclose(found["records"]["wdl"][0].astype(int), expected, atol=2)
    assert found["policy_weight"].tolist() == batch["policy_weight"][: batch["policy_offset"][1]].tolist()


class Stop(BaseException):
    """As if the process had been killed."""


def test_stopped_anywhere_it_ends_in_the_same_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "SHARD_RECORDS", 4)
    add(tmp_path / "f", GAMES)
    old = {path.name: path.read_bytes() for path in (tmp_path / "f").glob("*.npz")}
    deduplicate(tmp_path / "f", tmp_path / "whole")
    expected = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert len(expected) > 2
    for steps in range(len(expected)):
        left = iter(range(steps))

        def stopping(*args: Any, left: Any = left, **options: Any) -> Any:
            if next(left, None) is None:
                raise Stop
            return write_shard(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(duplicates, "write_shard", stopping)
            patch.setattr(duplicates, "write_text", stopping)
            with pytest.raises(Stop):
                deduplicate(tmp_path / "f", tmp_path / "out")
        assert not (tmp_path / "out").exists()
    counts = deduplicate(tmp_path / "f", tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == expected
    assert not (tmp_path / "out.tmp").exists()
    assert deduplicate(tmp_path / "f", tmp_path / "out") == counts, "done already"
    assert {path.name: path.read_bytes() for path in (tmp_path / "f").glob("*.npz")} == old
    add(tmp_path / "f", "1. e4 *", "b.pgn")
    with pytest.raises(ValueError, match=r"was not made from the current shards"):
        deduplicate(tmp_path / "f", tmp_path / "out")
