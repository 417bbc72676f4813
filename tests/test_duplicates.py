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
from hypothesis import given, settings
from hypothesis import strategies as st

from matrixlib.data.catalogue import Catalogue
from matrixlib.data.shards import Batch, Shard, concat, write_shard
from matrixlib.tasks.chess.importers import duplicates
from matrixlib.tasks.chess.importers import import_files as imports
from matrixlib.tasks.chess.importers.audit import faults
from matrixlib.tasks.chess.importers.duplicates import deduplicate
from matrixlib.tasks.chess.importers.import_files import import_files
from matrixlib.tasks.chess.records import LAYOUT, RECORD, UNKNOWN, from_boards, keys_of, policy_index
from matrixlib.tasks.chess.stockfish.labels import wdl_of_shares

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
    (row,) = np.flatnonzero(
        [key == keys_of(np.array([from_boards([board])[0]]))[0] for key in keys_of(batch["records"])]
    )
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
    assert len(set(keys_of(batch["records"]))) == len(batch["records"]) == len(set(keys_of(before["records"])))
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


Entry = tuple[int, tuple[int, int, int], tuple[int, int, int]]
shares = st.tuples(*[st.integers(0, 9)] * 3)


def same_position(entries: list[Entry]) -> Batch:
    """Rows of one position with three moves: result, shares of win-draw-loss and of the moves, unknown where all 0."""
    records = np.zeros(len(entries), RECORD)
    weight = np.zeros((len(entries), 3), "<u2")
    for row, (result, wdl, policy) in enumerate(entries):
        records["result"][row] = result
        for target, parts in ((records["wdl"], wdl), (weight, policy)):
            if sum(parts):
                target[row] = wdl_of_shares(np.array([parts]) / sum(parts))[0]
    index = np.tile(np.arange(3, dtype="<u2"), len(entries))
    offset = 3 * np.arange(len(entries) + 1)
    return {"records": records, "policy_offset": offset, "policy_index": index, "policy_weight": weight.ravel()}


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.sampled_from([-1, 0, 1, UNKNOWN]), shares, shares), min_size=1, max_size=6))
def test_only_entries_that_have_a_target_weigh_in_it(entries: list[Entry]) -> None:
    batch = same_position(entries)
    found = duplicates.merge(batch, np.zeros(len(entries), int))
    results = {result for result, _, _ in entries if result != UNKNOWN}
    values = [np.array(wdl) / sum(wdl) for _, wdl, _ in entries if sum(wdl)]
    if len(results) > 1:  # each that has no win-draw-loss of its own stands for one
        values += [np.eye(3)[1 - result] for result, wdl, _ in entries if result != UNKNOWN and not sum(wdl)]
    policies = [np.array(policy) / sum(policy) for _, _, policy in entries if sum(policy)]
    assert found["records"]["result"].tolist() == [results.pop() if len(results) == 1 else UNKNOWN]
    for made, parts in ((found["records"]["wdl"][0], values), (found["policy_weight"], policies)):
        np.testing.assert_allclose(made / 65535, np.mean(parts, axis=0) if parts else np.zeros(3), atol=2e-4)


def copies(folder: Path, rows: dict[str, list[int]]) -> None:
    """Shards of these rows each, by name, of which row 0 is the start of the game and row 1 the position after e4."""
    add(folder.parent / "source", "1. e4 e5 *\n")
    (row,) = Catalogue(folder.parent / "source").shards()
    shard = Shard(row.path, LAYOUT)
    meta = {name: shard.meta[name] for name in ("source", "seed", "generator", "split")}
    for name, chosen in rows.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_shard(folder / name, LAYOUT, shard.gather(np.array(chosen)), meta)


FEW_FILES = """
import resource, sys
from matrixlib.tasks.chess.importers.duplicates import deduplicate

resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
print(deduplicate(sys.argv[1], sys.argv[2])["different"])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of open files to set")
def test_more_shards_than_files_that_may_be_open(tmp_path: Path) -> None:
    copies(tmp_path / "f", {f"{number}.npz": [0, 1] for number in range(50)})
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
    assert Counter(keys_of(batch["records"])).most_common(1)[0][1] == 1
    assert set(keys_of(batch["records"])) == set(keys_of(stored(folder)["records"]))
    start = row_of(batch, chess.Board())
    keys = {
        split: set(keys_of(np.concatenate([Shard(r.path, LAYOUT).arrays["records"] for r in rows])))
        for split in ("train", "validation")
        if (rows := Catalogue(tmp_path / "out").shards(split))
    }
    assert keys_of(batch["records"][[start]])[0] in keys["train"]
    assert not keys["train"] & keys["validation"]


class Stop(BaseException):
    """As if the process had been killed."""


def test_stopped_anywhere_it_ends_in_the_same_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "SHARD", 4)
    add(tmp_path / "f", GAMES)
    old = {path.name: path.read_bytes() for path in (tmp_path / "f").glob("*.npz")}
    deduplicate(tmp_path / "f", tmp_path / "whole")
    expected = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert len(expected) > 2
    for steps in range(len(expected)):
        left = iter(range(steps))

        def write(*args: Any, left: Any = left, **options: Any) -> Any:
            if next(left, None) is None:
                raise Stop
            return write_shard(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(duplicates, "write_shard", write)
            patch.setattr(duplicates, "write_text", write)
            with pytest.raises(Stop):
                deduplicate(tmp_path / "f", tmp_path / "out")
        assert not (tmp_path / "out").exists()
    counts = deduplicate(tmp_path / "f", tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == expected
    assert not (tmp_path / "out.tmp").exists()
    assert deduplicate(tmp_path / "f", tmp_path / "out") == counts, "done already"
    assert {path.name: path.read_bytes() for path in (tmp_path / "f").glob("*.npz")} == old
    add(tmp_path / "f", "1. e4 *", "b.pgn")
    with pytest.raises(ValueError, match=r"was not made of what .* holds now"):
        deduplicate(tmp_path / "f", tmp_path / "out")
