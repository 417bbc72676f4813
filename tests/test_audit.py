"""The audit: counts of a folder of shards, figures by hand, doubtful records, faults named."""

import math
from dataclasses import replace
from pathlib import Path

import chess
import numpy as np
import pytest
from chess_shards import BARE, QUEEN_UP, batch_of, game, write

from matrixlib.data.catalogue import Catalogue
from matrixlib.data.shards import Shard, concat
from matrixlib.tasks.chess.importers import audit as audits
from matrixlib.tasks.chess.importers.audit import FAR, Audit, audit_folder, columns, faulty, suspects
from matrixlib.tasks.chess.importers.import_files import import_files
from matrixlib.tasks.chess.records import LAYOUT

SPANISH = "e4 e5 Nf3 Nc6 Bb5 a6 Ba4 Nf6 O-O Be7"
FENS = [chess.STARTING_FEN, QUEEN_UP, BARE]
WON, LOST = (65535, 0, 0), (0, 0, 65535)


def small(folder: Path) -> Audit:
    """A training game, a puzzle in two shards, of which one is kept out, and a held-out game."""
    write(folder, "a", batch_of(game(SPANISH), game=7))
    write(folder, "b", batch_of([QUEEN_UP, BARE], game=[8, 9]), source="puzzles")
    write(folder, "c", batch_of(game("d4 d5"), game=10), split="validation")
    write(folder, "d", batch_of([QUEEN_UP]), source="puzzles")
    Catalogue(folder).quarantine("d.npz", "one too many")
    return audit_folder(folder)


# Looking


def test_everything_healthy_is_looked_at_with_its_place(tmp_path: Path) -> None:
    found = small(tmp_path)
    assert [(row.name, row.state) for row in found.rows] == [
        ("a.npz", "healthy"),
        ("b.npz", "healthy"),
        ("c.npz", "healthy"),
        ("d.npz", "quarantined"),
    ]
    assert len(found.batch["records"]) == 11 + 2 + 3
    assert sorted(set(found.sources())) == ["pgn", "puzzles"]
    for record, (at, row) in enumerate(zip(found.shard, found.row, strict=True)):
        stored = Shard(found.rows[at].path, LAYOUT).arrays["records"][row]
        assert stored.tobytes() == found.batch["records"][record].tobytes()
    assert {name: ids.tolist() for name, ids in found.games.items()} == {"a.npz": [7], "b.npz": [8, 9], "c.npz": [10]}
    assert sorted(found.openings["ply"].tolist()) == [4, 5, 6, 7, 8]
    assert (found.accounts, found.remarks, found.damage) == ([], [], [])


def test_at_most_so_many_records_of_each_source_and_the_same_for_a_seed(tmp_path: Path) -> None:
    write(tmp_path, "a", batch_of([chess.STARTING_FEN] * 9000, ply=np.arange(9000)))
    write(tmp_path, "b", batch_of([BARE] * 30), source="puzzles")
    one, same, other = (audit_folder(tmp_path, 50), audit_folder(tmp_path, 50), audit_folder(tmp_path, 50, seed=1))
    assert (one.sources() == "pgn").sum() == 50
    assert (one.sources() == "puzzles").sum() == 30
    assert one.row.tolist() == same.row.tolist() != other.row.tolist()
    assert len(set(one.row[one.sources() == "pgn"])) == 50
    assert one.row.max() > 8192, "from every block"


def test_blocks_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "BLOCKS", 1)
    write(tmp_path, "a", batch_of([chess.STARTING_FEN] * 9000, ply=np.arange(9000)))
    found = audit_folder(tmp_path, 500)
    assert len(set(found.row // 4096)) == 1


def test_a_damaged_block_is_named_and_the_rest_is_looked_at(tmp_path: Path) -> None:
    found = small(tmp_path)
    path = tmp_path / "a.npz"
    data = bytearray(path.read_bytes())
    at = data.index(Shard(path, LAYOUT).arrays["records"][3].tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    found = audit_folder(tmp_path)
    assert set(found.shard) == {1, 2}
    assert "a.npz: block 0 of 'records'" in found.damage[0]
    assert any("a.npz: its bytes differ" in line for line in found.damaged())


def test_a_folder_without_healthy_shards_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        audit_folder(tmp_path / "none")
    with pytest.raises(ValueError, match="import something first"):
        audit_folder(tmp_path)
    write(tmp_path / "out", "a", batch_of([BARE]))
    Catalogue(tmp_path / "out").quarantine("a.npz", "wrong colours")
    with pytest.raises(ValueError, match=r"no healthy shard; a\.npz: wrong colours"):
        audit_folder(tmp_path / "out")
    (tmp_path / "refused.pgn").write_text('[Result "1-0"]\n\n1. f3 e5 2. g4 Qh4# 1-0\n')
    import_files(tmp_path / "refused.pgn", tmp_path / "f", workers=1, progress=False)
    with pytest.raises(ValueError, match="result contradicts the board"):
        audit_folder(tmp_path / "f")


# Figures


def test_figures_by_hand() -> None:
    batch = batch_of(FENS, result=[2, 1, -1], wdl=[(0, 0, 0), WON, (13107, 26214, 26214)], ply=[0, 58, 119])
    found = columns(batch)
    assert found["men"].tolist() == [32, 9, 3]
    assert found["phase"].tolist() == [24, 4, 0]
    assert found["balance"].tolist() == [0, 9, -1]
    assert found["moves"].tolist() == [chess.Board(fen).legal_moves.count() for fen in FENS]
    assert found["value"][1:] == pytest.approx([1.0, -0.2])
    assert math.isnan(found["value"][0])
    assert math.isnan(found["result"][0])
    assert found["result"][1:].tolist() == [1, -1]
    assert found["white"][1:].tolist() == [1, 1], "Black is to move in the last one, and lost"
    assert found["entropy"].tolist() == [0, 0, 0]
    bare = columns(batch_of([BARE], weighted=False))
    assert np.isnan(bare["entropy"]).all()


def test_duplicates_count_mirror_images_and_say_what_is_in_both_splits(tmp_path: Path) -> None:
    mirrored = "8/8/3k4/8/8/3K4/3P4/8 b - - 0 60"
    write(tmp_path, "a", batch_of([BARE, mirrored, QUEEN_UP], game=[1, 1, 2]))
    write(tmp_path, "b", batch_of([BARE], game=3), split="validation")
    found = audit_folder(tmp_path)
    assert found.duplicates() == (2, 1)
    assert found.shared_games() == 0
    write(tmp_path, "c", batch_of([chess.STARTING_FEN], game=2), split="validation")
    assert audit_folder(tmp_path).shared_games() == 1


# What looks wrong


def test_suspicious_records_are_found_the_worst_first() -> None:
    batch = batch_of(
        [QUEEN_UP] * 5 + [BARE], result=[1, -1, -1, 2, -1, 1], wdl=[WON, WON, (52428, 13107, 0), LOST, (0, 0, 0), WON]
    )
    found = suspects(batch)
    assert list(found) == ["value against result", "material against value"]
    assert [one.record for one in found["value against result"]] == [1, 2]
    assert found["value against result"][0].reason == "win-draw-loss gives +1.00 points, the game gave -1"
    assert [one.record for one in found["material against value"]] == [3, 4]
    assert [one.reason for one in found["material against value"]] == [
        "material +9 pawns, value -1.00",
        "material +9 pawns, result -1.00",
    ]


def test_moves_without_weight_are_doubtful_only_where_others_have_some() -> None:
    some = concat([batch_of([QUEEN_UP] * 3), batch_of([BARE], weighted=False)], LAYOUT)
    found = suspects(some)
    assert [one.record for one in found["no weight on any move"]] == [3]
    assert suspects(batch_of([BARE] * 3, weighted=False)) == {}


def test_positions_and_moves_against_the_rules_are_counted(tmp_path: Path) -> None:
    batch = batch_of([QUEEN_UP, BARE, QUEEN_UP])
    batch["policy_index"][0] += 1
    batch["records"]["castling"][1] = 1
    write(tmp_path, "a", batch)
    found = audit_folder(tmp_path)
    assert faulty(found.batch) == 2
    assert "the listed moves are not the legal ones" in found.suspects()


def test_the_odd_shard_stands_out(tmp_path: Path) -> None:
    for number in range(10):
        fens = [BARE] * 20 if number == 3 else game(SPANISH)
        write(tmp_path, f"s{number}", batch_of(fens, game=number))
    write(tmp_path, "alone", batch_of([BARE]), source="puzzles")
    found = audit_folder(tmp_path).distances()
    assert len(found) == 10, "one of another source has no others to be compared with"
    far = {name for name, figures in found.items() if any(abs(z) > FAR for z in figures.values())}
    assert far == {"s3.npz"}
    assert found["s3.npz"]["men"] < -FAR
    for row in Catalogue(tmp_path).shards():
        Catalogue(tmp_path).set_quality(row.name, {"men": 40 if row.name == "s5.npz" else 20})
    found = audit_folder(tmp_path).distances()
    assert {name: figures["men"] for name, figures in found.items() if figures["men"]} == {
        "s5.npz": pytest.approx(50)
    }, "the figures of the catalogue come first"


# Accounts


def test_accounts_add_up_unless_somebody_changes_something(tmp_path: Path) -> None:
    (tmp_path / "in.pgn").write_text('[Result "1-0"]\n\n1. f3 e5 2. g4 Qh4# 1-0\n\n[Event "x"]\n\n1. e4 e5 *\n')
    import_files(tmp_path / "in.pgn", tmp_path / "f", workers=1, progress=False)
    found = audit_folder(tmp_path / "f")
    assert found.account_faults() == []
    (account,) = found.accounts
    assert (account.entries, account.stored, len(account.refused)) == (2, 1, 1)
    more = replace(found, accounts=[replace(account, entries=3)])
    assert more.account_faults() == ["in.pgn, step 0: 3 entries, 2 accounted for"]
    lost = replace(found, rows=[])
    assert "not as written" in lost.account_faults()[0]
    less = replace(found, accounts=[replace(account, positions={"train": 1})])
    assert "other numbers of positions" in less.account_faults()[0]


@pytest.mark.parametrize("sample", [0, -5])
def test_a_sample_of_nothing_is_refused(tmp_path: Path, sample: int) -> None:
    with pytest.raises(ValueError, match=f"sample is {sample}; give"):
        audit_folder(tmp_path, sample)


def test_a_seed_below_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seed is -1; give"):
        audit_folder(tmp_path, seed=-1)
