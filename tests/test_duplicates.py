"""Positions that are there more than once become one; shards are replaced without a moment in which any is lost."""

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

from matrixlib.data.account import quiet_catalogue
from matrixlib.data.catalogue import NAME, Catalogue
from matrixlib.data.shards import Batch, Shard, concat, write_shard
from matrixlib.tasks.chess.importers import duplicates
from matrixlib.tasks.chess.importers import import_files as imports
from matrixlib.tasks.chess.importers.audit import audit_folder, faults
from matrixlib.tasks.chess.importers.duplicates import counts_of, deduplicate, single_counts
from matrixlib.tasks.chess.importers.import_files import import_files
from matrixlib.tasks.chess.keys import keys_of
from matrixlib.tasks.chess.records import LAYOUT, RECORD, UNKNOWN, from_boards, policy_index
from matrixlib.tasks.chess.scores import wdl_of_score, wdl_of_shares

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


def stored(folder: Path) -> tuple[Batch, np.ndarray]:
    """Every healthy position and its count."""
    rows = Catalogue(folder).shards()
    assert not Catalogue(folder).verify()
    batch = concat([Shard(row.path, LAYOUT).gather(np.arange(row.count)) for row in rows], LAYOUT)
    assert faults(batch) == {}
    parts = [(row, np.arange(row.count)) for row in rows]
    counts = [counts_of(row, all_, Shard(row.path, LAYOUT).gather(all_)) for row, all_ in parts]
    return batch, np.concatenate(counts)["entries"]


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


def test_counts_are_added_and_targets_averaged(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    add(folder, GAMES)
    before, _ = stored(folder)
    report = deduplicate(folder)
    batch, counts = stored(folder)
    assert len(set(keys_of(batch["records"]))) == len(batch["records"]) == report.left
    assert report.positions == len(before["records"]) == counts.sum() == 14
    assert report.left == len(set(keys_of(before["records"])))
    board = chess.Board()
    start = row_of(batch, board)
    assert counts[start] == 3
    assert moves_of(batch, start, board) == {"e4": 0.667, "Nf3": 0.333}
    assert batch["records"]["result"][start] == UNKNOWN, "the games ended in different ways"
    assert np.round(batch["records"]["wdl"][start] / 65535, 3).tolist() == [0.333, 0.333, 0.333]
    for san in ("e4", "e5", "Nf3", "Nc6"):
        board.push_san(san)
    both = row_of(batch, board)
    assert counts[both] == 2
    assert moves_of(batch, both, board) == {"Bb5": 0.5, "Bc4": 0.5}
    after_e4 = chess.Board()
    after_e4.push_san("e4")
    wdl = batch["records"]["wdl"][row_of(batch, after_e4)] / 65535
    judged = wdl_of_score([-50])[0] / 65535
    assert wdl == pytest.approx((judged + np.array([0, 0, 1])) / 2, abs=1e-4), "an evaluation, and a lost game's result"


def test_results_that_agree_are_kept(tmp_path: Path) -> None:
    add(tmp_path / "f", GAMES.replace("0-1", "1-0").replace("1/2-1/2", "*"))
    deduplicate(tmp_path / "f")
    batch, _ = stored(tmp_path / "f")
    start = row_of(batch, chess.Board())
    assert batch["records"]["result"][start] == 1
    assert batch["records"]["wdl"][start].sum() == 0


def test_mirror_images_are_one_and_their_moves_are_turned(tmp_path: Path) -> None:
    fens = ("4k3/8/8/8/8/8/P7/4K3 w - - 0 1", "3k4/8/8/8/8/8/7P/3K4 w - - 0 1", "4k3/p7/8/8/8/8/8/4K3 b - - 0 1")
    moves = ("Kd2", "Ke2", "Kd7")
    games = [f'[FEN "{fen}"]\n\n{move} *\n\n' for fen, move in zip(fens, moves, strict=True)]
    add(tmp_path / "f", "".join(games))
    deduplicate(tmp_path / "f")
    batch, counts = stored(tmp_path / "f")
    assert counts.tolist() == [3]
    weight = batch["policy_weight"]
    assert weight.max() == 65535, "all three played the same move"


def test_merging_again_weighs_by_what_was_merged_before(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    add(folder, "1. e4 e5 *\n\n1. e4 c5 *\n")
    deduplicate(folder)
    assert deduplicate(folder).text() == "2 positions, each of them once"
    add(folder, "1. d4 d5 *\n", "b.pgn")
    deduplicate(folder)
    batch, counts = stored(folder)
    start = row_of(batch, chess.Board())
    assert counts[start] == 3
    assert moves_of(batch, start, chess.Board()) == {"e4": 0.667, "d4": 0.333}


APART = (
    '[Result "1-0"]\n\n1. e4 1-0\n\n[Result "0-1"]\n\n1. e4 e5 0-1\n\n[Result "0-1"]\n\n1. e4 c5 0-1\n',
    '[Result "1-0"]\n\n1. e4 d6 1-0\n',
)


def test_results_that_disagreed_stay_unknown_and_count_when_merged_again(tmp_path: Path) -> None:
    for number, text in enumerate(APART):
        add(tmp_path / "f", text, f"{number}.pgn")
        deduplicate(tmp_path / "f")
        batch, counts = stored(tmp_path / "f")
        start = row_of(batch, chess.Board())
        assert batch["records"]["result"][start] == UNKNOWN
        shares = ([1 / 3, 0, 2 / 3], [1 / 2, 0, 1 / 2])[number]
        assert batch["records"]["wdl"][start] / 65535 == pytest.approx(shares, abs=1e-4)
        assert counts[start] == 3 + number


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


def merged(parts: list[tuple[Batch, np.ndarray]]) -> tuple[Batch, np.ndarray]:
    whole = concat([batch for batch, _ in parts], LAYOUT)
    return duplicates.merge(whole, np.zeros(len(whole["records"]), int), np.concatenate([count for _, count in parts]))


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from([-1, 0, 1, UNKNOWN]), shares, shares), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    )
)
def test_merging_in_several_goes_gives_what_merging_at_once_gives(goes: list[list[Entry]]) -> None:
    parts = [(batch, single_counts(batch)) for batch in map(same_position, goes)]
    (at_once, count), step = merged(parts), merged(parts[:1])
    for part in parts[1:]:
        step = merged([step, part])
    assert step[1] == count
    assert step[0]["records"]["result"] == at_once["records"]["result"]
    for found, expected in (
        (step[0]["records"]["wdl"], at_once["records"]["wdl"]),
        (step[0]["policy_weight"], at_once["policy_weight"]),
    ):
        np.testing.assert_allclose(found / 65535, expected / 65535, atol=2e-4)


def test_only_entries_that_have_a_target_weigh_in_it() -> None:
    draw, win, silent = ((UNKNOWN, (0, 1, 0), (0, 1, 0)), (UNKNOWN, (1, 0, 0), (1, 0, 0)), (1, (0, 0, 0), (0, 0, 0)))
    first, second = same_position([draw, *[silent] * 9]), same_position([win])
    batch, count = merged([merged([(first, single_counts(first))]), (second, single_counts(second))])
    assert count.tolist() == [(11, 2, 2, 9, False)]
    assert batch["records"]["wdl"][0] / 65535 == pytest.approx([0.5, 0.5, 0], abs=1e-4)
    assert batch["policy_weight"] / 65535 == pytest.approx([0.5, 0.5, 0], abs=1e-4)


def test_a_file_of_counts_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    add(folder, GAMES)
    deduplicate(folder)
    (path,) = folder.glob("merged_*/*.counts.npy")
    whole = np.load(path)
    for counts in (whole[1:], whole["entries"]):
        np.save(path, counts)
        add(folder, "1. e4 *", "b.pgn")
        with pytest.raises(ValueError, match="positions of its shard: delete it"):
            deduplicate(folder)
    path.write_bytes(b"no array")
    with pytest.raises(ValueError, match="positions of its shard: delete it"):
        deduplicate(folder)
    path.unlink()
    deduplicate(folder)


def copies(folder: Path, rows: dict[str, list[int]]) -> None:
    """Shards of these rows each, by name, of which row 0 is the start of the game and row 1 the position after e4."""
    add(folder.parent / "source", "1. e4 e5 *\n")
    (row,) = Catalogue(folder.parent / "source").shards()
    shard = Shard(row.path, LAYOUT)
    meta = {name: shard.meta[name] for name in ("source", "seed", "generator", "split")}
    for name, chosen in rows.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_shard(folder / name, LAYOUT, shard.gather(np.array(chosen)), meta)


def test_shards_of_one_name_in_two_folders_have_counts_of_their_own(tmp_path: Path) -> None:
    copies(tmp_path / "f", {"a/x.npz": [0, 0, 0], "b/x.npz": [1, 1]})
    deduplicate(tmp_path / "f")
    assert stored(tmp_path / "f")[1].tolist() == [3, 2]


def test_a_game_whose_positions_were_all_merged_away_is_not_imported_again(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    files = two(folder)
    _, before = stored(folder)
    (tmp_path / "c.pgn").write_text(f"{TWICE}\n{SECOND}")
    report = import_files(tmp_path / "c.pgn", folder, workers=1, progress=False)
    assert (report.stored, report.skipped) == (0, {"stored before": 2})
    for row in Catalogue(folder).shards():
        row.path.unlink()  # nothing stands for them any more
    import_files(files, folder, workers=1, progress=False)
    deduplicate(folder)
    assert np.array_equal(np.sort(stored(folder)[1]), np.sort(before))


FEW_FILES = """
import resource, sys
from matrixlib.tasks.chess.importers.duplicates import deduplicate

resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
print(deduplicate(sys.argv[1]).left)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of open files to set")
def test_more_shards_than_files_that_may_be_open(tmp_path: Path) -> None:
    copies(tmp_path / "f", {f"{number}.npz": [0, 1] for number in range(50)})
    command = [sys.executable, "-c", FEW_FILES, str(tmp_path / "f")]
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
    before, _ = stored(folder)
    report = deduplicate(folder)
    batch, counts = stored(folder)
    assert report.across == 1
    assert Counter(keys_of(batch["records"])).most_common(1)[0][1] == 1
    assert counts.sum() == len(before["records"])
    start = row_of(batch, chess.Board())
    assert counts[start] == Counter(keys_of(before["records"]))[keys_of(batch["records"][[start]])[0]]
    keys = {
        split: set(keys_of(np.concatenate([Shard(r.path, LAYOUT).arrays["records"] for r in rows])))
        for split in ("train", "validation")
        if (rows := Catalogue(folder).shards(split))
    }
    assert keys_of(batch["records"][[start]])[0] in keys["train"]
    assert not keys["train"] & keys["validation"]


def test_importing_again_adds_nothing_and_a_new_catalogue_finds_no_old_shard(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    add(folder, GAMES)
    deduplicate(folder)
    names = [row.name for row in Catalogue(folder).shards()]
    assert import_files(tmp_path / "a.pgn", folder, workers=1, progress=False).fresh_entries == 0
    assert [row.name for row in Catalogue(folder).shards()] == names
    assert Catalogue(folder).shards(state="quarantined") == []
    for path in [folder / NAME, *folder.glob("*.merged")]:  # which the guide says may be deleted
        path.unlink()
    assert [row.name for row in Catalogue(folder).shards()] == names
    assert audit_folder(folder).account_faults() == []
    assert import_files(tmp_path / "a.pgn", folder, workers=1, progress=False).fresh_entries == 0
    assert [row.name for row in Catalogue(folder).shards()] == names


class Stop(BaseException):
    """As if the process had been killed."""


def test_stopped_anywhere_it_ends_in_the_same_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "SHARD", 4)
    add(tmp_path / "whole", GAMES)
    old = {row.name for row in Catalogue(tmp_path / "whole").shards()}
    deduplicate(tmp_path / "whole")
    expected = {path.name: path.read_bytes() for path in (tmp_path / "whole").rglob("*.npz")}
    rows = [(row.name, row.quality) for row in Catalogue(tmp_path / "whole").shards()]
    new = {name for name, _ in rows}
    assert len(expected) > 1
    steps, finished = 0, False
    while not finished:
        folder = tmp_path / f"stop_{steps}"
        add(folder, GAMES)
        left = [steps]

        def stopping(function: Any, left: list[int] = left) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                if not left[0]:
                    raise Stop
                left[0] -= 1
                return function(*args, **options)

            return call

        with monkeypatch.context() as patch:
            for name in ("write_shard", "write_bytes", "sync_folder", "quiet_catalogue"):
                patch.setattr(duplicates, name, stopping(getattr(duplicates, name)))
            for name in ("rename", "replace"):  # the folder's, and those of the files that are put aside
                patch.setattr(os, name, stopping(getattr(os, name)))
            try:
                deduplicate(folder)
                finished = True
            except Stop:
                steps += 1
        names = {row.name for row in quiet_catalogue(folder).shards()}  # as another process sees it
        assert names in (old, new), "all old shards are in use, or all new ones"
        report = deduplicate(folder)
        assert report.left == report.positions or names == old
        assert {path.name: path.read_bytes() for path in folder.rglob("*.npz")} == expected
        assert [(row.name, row.quality) for row in Catalogue(folder).shards()] == rows
        assert not list(folder.glob("*.tmp"))
    assert steps > 10


TWICE = "1. e4 e5 2. Nf3 Nc6 *\n"  # in two files with another game each, the shards of one of which are used up
SECOND = "1. e4 e5 2. Nf3 Nc6 3. Bb5 *\n"


def two(folder: Path) -> list[Path]:
    """Two files in a folder that was merged."""
    add(folder, SECOND, "a.pgn")
    add(folder, TWICE, "b.pgn")
    assert deduplicate(folder).positions > deduplicate(folder).positions
    return [folder.parent / "a.pgn", folder.parent / "b.pgn"]


def positions(folder: Path) -> int:
    return sum(row.count for row in Catalogue(folder).shards())


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_step_that_is_done_again_does_not_store_what_was_merged(tmp_path: Path, rebuilt: bool) -> None:
    folder = tmp_path / "f"
    files = two(folder)
    rows = Catalogue(folder).shards()
    accounts = {path: path.read_bytes() for path in folder.glob("imports/*/part_*.json")}
    assert len(accounts) == 2
    for path in accounts:
        path.write_bytes(b"damaged")
    if rebuilt:
        (folder / NAME).unlink()
    assert import_files(files, folder, workers=1, progress=False).fresh_entries == 2
    assert [(row.name, row.sha256) for row in Catalogue(folder).shards()] == [(row.name, row.sha256) for row in rows]
    assert audit_folder(folder).account_faults() == []
    assert import_files(files, folder, workers=1, progress=False).fresh_entries == 0


@pytest.mark.parametrize("further", [False, True])
def test_a_merged_shard_that_is_lost_is_made_again(tmp_path: Path, further: bool) -> None:
    folder = tmp_path / "f"
    files = two(folder)
    if further:
        add(folder, "1. e4 e5 2. Nf3 Nf6 *", "c.pgn")
        files.append(tmp_path / "c.pgn")
        deduplicate(folder)
    expected = positions(folder)
    assert import_files(files, folder, workers=1, progress=False).fresh_entries == 0
    for row in Catalogue(folder).shards():
        row.path.unlink()
    assert import_files(files, folder, workers=1, progress=False).fresh_entries == len(files)
    assert import_files(files, folder, workers=1, progress=False).fresh_entries == 0
    deduplicate(folder)
    assert positions(folder) == expected


def test_an_unfinished_import_comes_first(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    add(folder, GAMES)
    (account,) = folder.glob("imports/*/part_*.json")
    account.unlink()
    with pytest.raises(ValueError, match="call import_files again first"):
        deduplicate(folder)
    import_files(tmp_path / "a.pgn", folder, workers=1, progress=False)
    deduplicate(folder)


def test_an_empty_folder_has_nothing_to_merge(tmp_path: Path) -> None:
    assert deduplicate(tmp_path / "new").text() == "0 positions, each of them once"


@pytest.mark.parametrize(
    "name, message", [("counts", "merged by an older version"), ("merge.json", "did not end its merge")]
)
def test_what_an_older_version_merged_takes_no_more(tmp_path: Path, name: str, message: str) -> None:
    add(tmp_path / "d", GAMES)
    (tmp_path / "d" / "imports" / name).mkdir()
    with pytest.raises(ValueError, match=message):
        add(tmp_path / "d", GAMES, "b.pgn")
