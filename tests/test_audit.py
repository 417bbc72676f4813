"""A folder of shards as tables: counts, figures by hand, doubtful records, faults named, accounts that add up."""

import math
import re
from dataclasses import replace
from pathlib import Path

import chess
import numpy as np
import pytest
from cells import run_notebook
from chess_shards import BARE, QUEEN_UP, batch_of, game, write

from matrixlib.data import imports
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.shards import Shard
from matrixlib.tasks.chess.importers import audit
from matrixlib.tasks.chess.importers.audit import (
    OUTLIER_Z,
    faults,
    outlier_scores,
    position_statistics,
    sample,
    shard_quality,
)
from matrixlib.tasks.chess.importers.import_files import import_files
from matrixlib.tasks.chess.importers.pgn import Pgn
from matrixlib.tasks.chess.records import LAYOUT, to_board

SPANISH = "e4 e5 Nf3 Nc6 Bb5 a6 Ba4 Nf6 O-O Be7"
FENS = [chess.STARTING_FEN, QUEEN_UP, BARE]
WON, LOST = (65535, 0, 0), (0, 0, 65535)
MATED = '[Event "{}"]\n[Result "1-0"]\n\n1. f3 e5 2. g4 Qh4# 1-0\n\n'


# Looking


def test_everything_healthy_is_looked_at_with_its_place(tmp_path: Path) -> None:
    write(tmp_path, "a", batch_of(game(SPANISH), game=7))
    write(tmp_path, "b", batch_of([QUEEN_UP, BARE], game=[8, 9]), source="puzzles")
    write(tmp_path, "c", batch_of(game("d4 d5"), game=10), split="validation")
    write(tmp_path, "d", batch_of([QUEEN_UP]), source="puzzles")
    Catalogue(tmp_path).quarantine("d.npz", "one too many")
    found = sample(tmp_path)
    counts = {("pgn", "train"): 11, ("pgn", "validation"): 3, ("puzzles", "train"): 2}
    assert found.groupby(["source", "split"]).size().to_dict() == counts
    for one in found.itertuples():
        record = Shard(tmp_path / one.shard, LAYOUT).arrays["records"][one.row]
        board = to_board(record)
        assert board.fen() == one.fen
        assert one.ply == record["ply"]
        assert chess.Move.from_uci(one.best) in board.legal_moves
    assert sample(tmp_path, plies=(4, 8))["ply"].tolist() == [4, 5, 6, 7, 8]
    none = sample(tmp_path, plies=(500, 600))
    assert (len(none), set(none.columns)) == (0, set(found.columns))


def test_at_most_so_many_records_of_each_source_and_the_same_for_a_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a", batch_of([chess.STARTING_FEN] * 9000, ply=np.arange(9000)))
    write(tmp_path, "b", batch_of([BARE] * 30), source="puzzles")
    one, same, other = sample(tmp_path, 50), sample(tmp_path, 50), sample(tmp_path, 50, seed=1)
    assert one["source"].value_counts().to_dict() == {"pgn": 50, "puzzles": 30}
    assert one.equals(same)
    assert not one.equals(other)
    assert one["row"][one["source"] == "pgn"].nunique() == 50
    assert one["row"].max() > 8192, "from every block"
    monkeypatch.setattr(audit, "MAX_BLOCKS", 1)
    assert (sample(tmp_path, 500)["row"][lambda rows: rows > 30] // 4096).nunique() == 1


def test_a_damaged_block_is_left_out_and_its_shard_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a", batch_of(game(SPANISH), game=7))
    write(tmp_path, "b", batch_of(game(SPANISH), game=8))
    assert len(sample(tmp_path)) == 22
    path = tmp_path / "a.npz"
    data = bytearray(path.read_bytes())
    at = data.index(Shard(path, LAYOUT).arrays["records"][3].tobytes())
    data[at] ^= 1
    for content in (data, bytes(20) + data[20:]):  # the second cannot even be opened
        path.write_bytes(content)
        assert set(sample(tmp_path)["shard"]) == {"b.npz"}
        assert "a.npz" in Catalogue(tmp_path).verify()
    monkeypatch.setenv("MATRIXLIB_LIVE", "0")
    shown = run_notebook("data", folder=str(tmp_path))
    assert "FAIL  shards are whole                        a.npz: its bytes differ" in shown.text


def test_a_folder_without_healthy_shards_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        sample(tmp_path / "none")
    with pytest.raises(ValueError, match="import something first"):
        sample(tmp_path)
    write(tmp_path / "out", "a", batch_of([BARE]))
    Catalogue(tmp_path / "out").quarantine("a.npz", "wrong colours")
    with pytest.raises(ValueError, match=r"no healthy shard; a\.npz: wrong colours"):
        sample(tmp_path / "out")
    (tmp_path / "refused.pgn").write_text(MATED)
    import_files(tmp_path / "refused.pgn", tmp_path / "f", workers=1, progress=False)
    with pytest.raises(ValueError, match="result contradicts the board"):
        run_notebook("data", folder=str(tmp_path / "f"))
    for options in ({"count": 0}, {"seed": -1}):
        with pytest.raises(ValueError, match="give a number of records from 1"):
            sample(tmp_path, **options)


# Figures


def test_figures_by_hand(tmp_path: Path) -> None:
    write(tmp_path, "a", batch_of(FENS, result=[2, 1, -1], wdl=[(0, 0, 0), WON, (13107, 26214, 26214)], ply=[0, 58, 9]))
    found = sample(tmp_path)
    assert found["men"].tolist() == [32, 9, 3]
    assert found["moves"].tolist() == [chess.Board(fen).legal_moves.count() for fen in FENS]
    assert found["value"][1:].tolist() == pytest.approx([1.0, -0.2], abs=1e-4)
    assert math.isnan(found["value"][0])
    assert math.isnan(found["result"][0])
    assert found["result"][1:].tolist() == [1, -1]
    assert found["white"][1:].tolist() == [1, 1], "Black is to move in the last one, and lost"
    assert found["entropy"].tolist() == [0, 0, 0]
    assert found["weight"].tolist() == [1, 1, 1]
    write(tmp_path / "bare", "a", batch_of([BARE], weighted=False))
    bare = sample(tmp_path / "bare")
    assert bare["entropy"].isna().all()
    assert bare["weight"].isna().all()
    assert bare["best"].tolist() == [""]


def test_entropy_of_policies() -> None:
    batch = batch_of(FENS * 50)
    rng, weight = np.random.default_rng(0), batch["policy_weight"]
    weight[:] = rng.integers(0, 65536, len(weight)) * (rng.random(len(weight)) < 0.2)
    for row, entropy in zip(
        np.split(weight, batch["policy_offset"][1:-1]), position_statistics(batch)["entropy"], strict=True
    ):
        p = row[row > 0] / row.sum()
        assert entropy == pytest.approx(-(p * np.log(p)).sum() if len(p) else np.nan, abs=1e-9, nan_ok=True)


def test_positions_and_moves_against_the_rules_are_named(tmp_path: Path) -> None:
    batch = batch_of([QUEEN_UP, BARE, QUEEN_UP])
    batch["policy_index"][0] += 1
    batch["records"]["castling"][1] = 1
    assert set(faults(batch)) == {
        "the listed moves are not the legal ones",
        "a castling right without king and rook at home",
    }
    write(tmp_path, "a", batch)
    assert (sample(tmp_path)["fault"] != "").tolist() == [True, True, False]


def test_the_odd_shard_stands_out(tmp_path: Path) -> None:
    assert outlier_scores([]).empty
    for number in range(10):
        batch = batch_of([BARE] * 20 if number == 3 else game(SPANISH), game=number)
        write(tmp_path, f"s{number}", batch, quality=shard_quality(batch))
    write(tmp_path, "alone", batch_of([BARE]), source="puzzles", quality=shard_quality(batch_of([BARE])))
    found = outlier_scores(Catalogue(tmp_path).shards())
    assert len(found) == 10, "one of another source has no others to be compared with"
    assert found.index[(found.abs() > OUTLIER_Z).any(axis=1)].tolist() == ["s3.npz"]
    assert found["men"]["s3.npz"] < -OUTLIER_Z
    for row in Catalogue(tmp_path).shards():
        Catalogue(tmp_path).set_quality(row.name, {"men": 40 if row.name == "s5.npz" else 20})
    found = outlier_scores(Catalogue(tmp_path).shards())
    assert found["men"][found["men"] != 0].to_dict() == {"s5.npz": pytest.approx(50)}


# The notebook


def test_the_notebook_shows_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MATRIXLIB_LIVE", "0")
    folder = tmp_path / "f"
    batch = batch_of([QUEEN_UP] * 5 + [BARE], result=[1, -1, -1, 2, -1, 1], wdl=[WON, WON, WON, LOST, (0, 0, 0), WON])
    write(folder, "a", batch)
    write(folder, "b", batch_of(game("e4 e5 Nf3 Nc6 Bb5"), game=5))
    write(folder, "c", batch_of([BARE], game=5), split="validation")
    write(folder, "d", batch_of([BARE], weighted=False), source="puzzles")
    wrong = batch_of([BARE])
    wrong["policy_index"][0] += 1
    write(folder, "e", wrong, source="epd")
    Catalogue(folder).quarantine("d.npz", "one too many")
    shown = run_notebook("data", folder=str(folder), seed=1)
    lines = [" ".join(line.split()) for line in shown.text.splitlines()]
    assert "value against result 2 0.1429" in lines
    assert "material against value 2 0.1429" in lines
    assert "d.npz puzzles train 1 one too many" in lines
    assert any(line.startswith("e4 / e5 2 2 ") for line in lines), "openings by their pawns, whoever moves"
    assert "2 of 14 records" not in shown.text
    assert "FAIL  positions and moves are legal" in shown.text
    assert "FAIL  split by game                           1 games in both splits" in shown.text
    assert shown.failed


def test_the_notebook_adds_up_accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = tmp_path / "in.pgn", tmp_path / "f"
    path.write_text("".join(map(MATED.format, range(5))) + '[Event "x"]\n\n1. e4 e5 *\n\n[Event "bad"]\n\n1. e5 *\n')
    import_files(path, folder, workers=1, progress=False)
    import_files(path, folder, Pgn(repair=True), workers=1, progress=False)
    logs = imports.import_logs(folder)
    for change, said in (
        ({}, "pass  accounts add up"),
        ({"entries": 8}, "FAIL  accounts add up .*8 entries, 7 accounted for"),
        ({"shards": {"x.npz": ""}}, "FAIL  accounts add up .*x.npz not as written"),
        ({"positions": {"train": 1}}, "FAIL  accounts add up .*its shards hold 2 positions, it says 1"),
    ):
        changed = [replace(log, **change) for log in logs]
        monkeypatch.setattr(imports, "import_logs", lambda _, changed=changed: changed)
        shown = run_notebook("data", folder=str(folder))
        assert re.search(said, shown.text), shown.text
    assert re.search(r"in.pgn +pgn .*\n +pgn repair ", shown.text), shown.text
