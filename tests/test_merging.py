"""Positions that are there more than once become one; shards are replaced without a moment in which any is lost."""

from __future__ import annotations

import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import chess
import numpy as np
import pytest

from matrixlib import census, intake, merging
from matrixlib.data.catalogue import NAME, Catalogue, reason_file
from matrixlib.data.shards import Batch, Shard, concat
from matrixlib.intake import take_in
from matrixlib.merging import counts_of, deduplicate
from matrixlib.tasks.chess import inspection
from matrixlib.tasks.chess.packing import keys_of
from matrixlib.tasks.chess.records import LAYOUT, UNKNOWN, from_board, policy_index
from matrixlib.tasks.chess.scores import wdl_of_score

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
    take_in(folder.parent / name, folder, workers=1, progress=False)


def stored(folder: Path) -> tuple[Batch, np.ndarray]:
    """Every healthy position and its count."""
    rows = Catalogue(folder).shards()
    assert not Catalogue(folder).verify()
    batch = concat([Shard(row.path, LAYOUT).gather(np.arange(row.count)) for row in rows], LAYOUT)
    assert inspection.faults(batch) == {}
    return batch, np.concatenate([counts_of(folder, row.name, row.count) for row in rows])


def row_of(batch: Batch, board: chess.Board) -> int:
    (row,) = np.flatnonzero(
        [key == keys_of(np.array([from_board(board)]))[0] for key in keys_of(batch["records"])]
    )
    return int(row)


def moves_of(batch: Batch, row: int, board: chess.Board) -> dict[str, float]:
    """Moves with weight, by name."""
    start, stop = batch["policy_offset"][row : row + 2]
    share = dict(
        zip(batch["policy_index"][start:stop], batch["policy_weight"][start:stop] / 65535, strict=True)
    )
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
    assert wdl == pytest.approx((judged + np.array([0, 0, 1])) / 2, abs=1e-4), (
        "an evaluation, and a lost game's result"
    )


def test_results_that_agree_are_kept(tmp_path: Path) -> None:
    add(tmp_path / "f", GAMES.replace("0-1", "1-0").replace("1/2-1/2", "*"))
    deduplicate(tmp_path / "f")
    batch, _ = stored(tmp_path / "f")
    start = row_of(batch, chess.Board())
    assert batch["records"]["result"][start] == 1
    assert batch["records"]["wdl"][start].sum() == 0


def test_mirror_images_are_one_and_their_moves_are_turned(tmp_path: Path) -> None:
    fens = (
        "4k3/8/8/8/8/8/P7/4K3 w - - 0 1",
        "3k4/8/8/8/8/8/7P/3K4 w - - 0 1",
        "4k3/p7/8/8/8/8/8/4K3 b - - 0 1",
    )
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


def test_sources_and_splits_are_merged_and_training_keeps_the_position(tmp_path: Path, shared: Path) -> None:
    folder = tmp_path / "f"
    take_in([shared / "games" / "engine_matches.pgn"], folder, workers=1, progress=False)
    add(
        folder,
        "".join(
            f"1. {a} {b} *\n\n"
            for a in ("a3", "b3", "c3", "d3", "e3")
            for b in ["a6", "b6", "c6", "d6", "e6"]
        ),
    )
    fen = chess.Board().fen()
    (tmp_path / "a.epd").write_text(f"{' '.join(fen.split()[:4])} bm e4;\n")
    take_in(tmp_path / "a.epd", folder, workers=1, progress=False)
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
    assert take_in(tmp_path / "a.pgn", folder, workers=1, progress=False).fresh_entries == 0
    assert [row.name for row in Catalogue(folder).shards()] == names
    gone = Catalogue(folder).shards(state="quarantined")
    assert gone
    assert all(row.reason.startswith("merged into") for row in gone)
    for path in [folder / NAME, *folder.glob("*.merged")]:  # which the README says may be deleted
        path.unlink()
    assert [row.name for row in Catalogue(folder).shards()] == names
    assert census.account_faults(census.look(folder)) == []
    assert take_in(tmp_path / "a.pgn", folder, workers=1, progress=False).fresh_entries == 0
    assert [row.name for row in Catalogue(folder).shards()] == names


class Stop(BaseException):
    """As if the process had been killed."""


def test_stopped_anywhere_it_ends_in_the_same_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "SHARD", 4)
    add(tmp_path / "whole", GAMES)
    before = deduplicate(tmp_path / "whole").positions
    expected = {path.name: path.read_bytes() for path in (tmp_path / "whole").glob("*.npz")}
    rows = [(row.name, row.quality) for row in Catalogue(tmp_path / "whole").shards()]
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
            for name in ("write_shard", "write_atomically", "_write_counts"):
                patch.setattr(merging, name, stopping(getattr(merging, name)))
            patch.setattr(merging.os, "replace", stopping(merging.os.replace))
            patch.setattr(merging.Path, "unlink", stopping(Path.unlink))
            patch.setattr(Catalogue, "replace", stopping(Catalogue.replace))
            try:
                deduplicate(folder)
                finished = True
            except Stop:
                steps += 1
        seen = intake.quiet_catalogue(folder).shards()  # as by another process
        stems = [merging.SUFFIX.sub("", Path(row.name).stem) for row in seen]
        assert len(set(stems)) == len(stems), "a shard and what it was merged into are both in use"
        assert sum(row.count for row in seen) <= before
        report = deduplicate(folder)
        assert report.left == report.positions or not finished
        assert {path.name: path.read_bytes() for path in folder.glob("*.npz")} == expected
        assert [(row.name, row.quality) for row in Catalogue(folder).shards()] == rows
        assert not (folder / "imports" / "merge.json").exists()
        assert not any(reason_file(row.path).exists() for row in Catalogue(folder).shards())
    assert steps > 10


def stop(*_: Any) -> None:
    raise Stop


def test_an_import_carries_out_what_a_killed_merge_had_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "f"
    add(folder, GAMES)
    before = Catalogue(folder).shards()
    with monkeypatch.context() as patch:
        patch.setattr(Catalogue, "replace", stop)
        with pytest.raises(Stop):
            deduplicate(folder)
    assert intake.quiet_catalogue(folder).shards() == before, "the new shards lie there, and are not used"
    assert take_in(tmp_path / "a.pgn", folder, workers=1, progress=False).fresh_entries == 0
    assert not (folder / "imports" / "merge.json").exists()
    assert all("_m" in row.name for row in Catalogue(folder).shards())
    assert deduplicate(folder).text().endswith("each of them once")


def test_a_plan_whose_new_shard_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "f"
    add(folder, GAMES)
    with monkeypatch.context() as patch:
        patch.setattr(Catalogue, "replace", stop)
        with pytest.raises(Stop):
            deduplicate(folder)
    next(folder.glob("*_m*.npz")).unlink()
    for again in (lambda: deduplicate(folder), lambda: take_in(tmp_path / "a.pgn", folder, progress=False)):
        with pytest.raises(ValueError, match=r"is gone, but .*merge\.json needs it: delete that file"):
            again()
    (folder / "imports" / "merge.json").unlink()
    take_in(tmp_path / "a.pgn", folder, workers=1, progress=False)
    deduplicate(folder)
    assert deduplicate(folder).text().endswith("each of them once")


TWICE = (
    "1. e4 e5 2. Nf3 Nc6 *\n"  # in two files with another game each, the shards of one of which are used up
)
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
    assert take_in(files, folder, workers=1, progress=False).fresh_entries == 2
    assert [(row.name, row.sha256) for row in Catalogue(folder).shards()] == [
        (row.name, row.sha256) for row in rows
    ]
    if not rebuilt:
        assert {path: path.read_bytes() for path in accounts} == accounts
    assert take_in(files, folder, workers=1, progress=False).fresh_entries == 0


@pytest.mark.parametrize("further", [False, True])
def test_a_merged_shard_that_is_lost_is_made_again(tmp_path: Path, further: bool) -> None:
    folder = tmp_path / "f"
    files = two(folder)
    if further:
        add(folder, "1. e4 e5 2. Nf3 Nf6 *", "c.pgn")
        files.append(tmp_path / "c.pgn")
        deduplicate(folder)
    expected = positions(folder)
    assert take_in(files, folder, workers=1, progress=False).fresh_entries == 0
    for row in Catalogue(folder).shards():
        row.path.unlink()
    assert take_in(files, folder, workers=1, progress=False).fresh_entries == len(files)
    assert take_in(files, folder, workers=1, progress=False).fresh_entries == 0
    deduplicate(folder)
    assert positions(folder) == expected


def test_an_unfinished_import_comes_first(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    add(folder, GAMES)
    (account,) = folder.glob("imports/*/part_*.json")
    account.unlink()
    with pytest.raises(ValueError, match="call take_in again first"):
        deduplicate(folder)
    take_in(tmp_path / "a.pgn", folder, workers=1, progress=False)
    deduplicate(folder)


def test_an_empty_folder_has_nothing_to_merge(tmp_path: Path) -> None:
    assert deduplicate(tmp_path / "new").text() == "0 positions, each of them once"


def test_weights_stay_whole() -> None:
    rng = np.random.default_rng(4)
    lengths = rng.integers(0, 9, 400)
    offset = np.concatenate([[0], np.cumsum(lengths)])
    total = np.where(rng.random(offset[-1]) < 0.5, rng.random(offset[-1]) * 1e9, 0)
    whole = merging._whole(total, offset)
    for begin, end in pairwise(offset):
        weights, sums = whole[begin:end].astype(int), total[begin:end]
        assert weights.sum() == (65535 if sums.sum() else 0)
        if sums.sum():
            assert np.abs(weights - sums / sums.sum() * 65535).max() <= 9
            assert (weights[sums == 0] == 0).all()
