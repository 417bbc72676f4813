"""Replays of Melee: read as they were played, imported with accounts that add up, and damaged ones refused."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from melee_games import game

from matrixlib.data.catalogue import Catalogue
from matrixlib.data.imports import ImportReport, quarantined
from matrixlib.data.shards import Shard
from matrixlib.tasks.melee import columns, importer, replay
from matrixlib.tasks.melee.columns import BUTTONS, FIRST, LAYOUT
from matrixlib.tasks.melee.importer import DAMAGED, import_replays, threshold
from matrixlib.tasks.melee.replay import NoGame, ReplayError, last_rows, read
from matrixlib.tasks.melee.sample_set import SAMPLE, unpack_sample
from matrixlib.tasks.shipped import read_manifest

pytest.importorskip("peppi_py", reason="reads .slp files")


@pytest.fixture(scope="module")
def replays(shared: Path) -> Path:
    folder = shared / "melee"
    if not folder.is_dir():
        pytest.skip("no replays beside the checkout")
    return folder


def folder_of(tmp_path: Path, replays: Path, *names: str) -> Path:
    """A folder of copies of some replays."""
    source = tmp_path / "in"
    source.mkdir(exist_ok=True)
    for name in names:
        shutil.copy(replays / f"{name}.slp", source)
    return source


def contents(folder: Path) -> dict[str, bytes]:
    """The shards of a folder."""
    return {path.name: path.read_bytes() for path in folder.glob("*.npz")}


def brought_in(paths: Path | list[Path], folder: Path) -> ImportReport:
    report = import_replays(paths, folder, workers=1, progress=False)
    assert report.entries == report.stored + sum(report.refused.values()) + sum(report.skipped.values())
    return report


# Reading


def test_of_a_frame_that_was_played_again_the_last_row_counts(replays: Path) -> None:
    assert last_rows(np.array([-123, 1, 2, 3, 2, 3, 4])).tolist() == [0, 1, 4, 5, 6]
    number = read(replays / "ics2.slp").number
    assert number.tolist() == list(range(FIRST, int(number[-1]) + 1))
    assert len(number) == 9519 - (FIRST + 123)


def test_second_characters_and_transformations(replays: Path) -> None:
    climbers = read(replays / "ics2.slp")
    assert set(climbers.follower["character"]) == {11}, "Nana"
    assert set(climbers.whose) == {0}
    assert set(read(replays / "transform.slp").players["character"][:, 1]) == {7, 19}, "Sheik and Zelda"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("v0.1.slp", 0),
        ("nintendont.slp", columns.ACTION_FRAME),
        ("v2.0.slp", columns.ACTION_FRAME | columns.GROUNDED),
        ("falcon_throws.slp", columns.EVERYTHING),
    ],
)
def test_what_a_version_lacks_is_unknown_and_not_zero(replays: Path, name: str, known: int) -> None:
    recorded = read(replays / name)
    assert recorded.known == known
    players = recorded.players
    fields = {columns.SPEEDS: "speeds", columns.GROUNDED: "hitstun", columns.ACTION_FRAME: "action_frame"}
    for bit, field in fields.items():
        assert set(np.isnan(players[field]).flat) == {not known & bit}, field
    assert (players["jumps"] == columns.UNKNOWN).all() == (not known & columns.GROUNDED)
    pair = players["flags"] & (columns.GROUND | columns.AIR)
    assert set(np.unique(pair)) == ({columns.GROUND, columns.AIR} if known & columns.GROUNDED else {0})


@pytest.mark.parametrize(
    ("name", "sticks"), [("joystick_udlr.slp", (0, 1)), ("cstick_udlr.slp", (2, 3)), ("buttons_abxy.slp", ())]
)
def test_each_input_is_read_as_what_it_is(replays: Path, name: str, sticks: tuple[int, ...]) -> None:
    _, frames = replay.parse(replays / name)  # of one player and a computer, which `read` leaves out
    pre = frames.field("ports").field("P1").field("leader").field("pre")
    held = replay.controllers(pre, np.arange(len(frames)))
    moved = np.flatnonzero(np.abs(held["sticks"].astype(int)).max(0) > 60)
    assert moved.tolist() == list(sticks)
    pressed = [button for bit, button in enumerate(BUTTONS) if (held["buttons"] >> bit & 1).any()]
    assert pressed == (["A", "B", "X", "Y"] if not sticks else [])
    if sticks:
        order = [tuple(np.sign(row)) for row in held["sticks"][:, sticks] if np.abs(row.astype(int)).max() > 60]
        assert list(dict.fromkeys(order)) == [(0, 1), (0, -1), (-1, 0), (1, 0)], "up, down, left, right"


@pytest.mark.parametrize(("name", "reason"), [("crazy_name_tags.slp", "4 players"), ("game.slp", "a computer plays")])
def test_other_games_are_told(replays: Path, name: str, reason: str) -> None:
    with pytest.raises(NoGame, match=reason):
        read(replays / name)


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.slp"
    with path.open("wb") as file:
        file.truncate(importer.LARGEST + 1)
    (part,) = importer.Slippi("").parts(path)
    assert part.data == b""
    (entry,) = importer.Slippi("").read(part).refused
    assert "larger than 256 MiB" in entry.detail


# Importing


def test_a_folder_with_everything_in_it(replays: Path, tmp_path: Path) -> None:
    names = ("transform", "ics", "netplay", "corrupt", "crazy_name_tags", "falcon_throws", "v3.18")
    source = folder_of(tmp_path, replays, *names)
    (source / "notes.txt").write_text("not a replay")
    (source / "older").mkdir()
    (source / "older" / "empty.slp").write_bytes(b"")
    shutil.copy(replays / "transform.slp", source / "again.slp")
    report = brought_in(source, tmp_path / "out")
    assert (report.entries, report.stored) == (9, 3)
    assert report.refused == {DAMAGED: 2}
    assert report.skipped == {"4 players": 1, "a computer plays": 2, "stored before": 1}
    refused = {entry.text: entry.entry for _, entry in quarantined(tmp_path / "out")}
    assert refused == {"corrupt.slp": 1, "older/empty.slp": 6}
    rows = Catalogue(tmp_path / "out").shards()
    assert {row.split for row in rows} == {"train", "validation"}
    games = {row.split: set(Shard(row.path, LAYOUT).arrays["records"]["game"].tolist()) for row in rows}
    assert games["train"].isdisjoint(games["validation"])
    before = contents(tmp_path / "out")
    again = brought_in(source, tmp_path / "out")
    assert (again.fresh_entries, again.stored) == (0, 3)
    assert contents(tmp_path / "out") == before
    assert "training and" in report.text("rows")


def test_the_games_of_people_are_imported_whole(replays: Path, tmp_path: Path) -> None:
    """Frame by frame what ships, where the same six were read and compressed."""
    names = (Path(shipped["file"]).stem for shipped in read_manifest(SAMPLE)["games"])
    source = folder_of(tmp_path, replays, *names)
    report = brought_in(source, tmp_path / "out")
    assert (report.entries, report.stored, report.refused, report.skipped) == (6, 6, {}, {})
    rows = Catalogue(tmp_path / "out").shards()
    assert sum(row.count for row in rows) == sum(report.positions.values())
    assert {row.split for row in rows} == {"train", "validation"}
    for folder in (tmp_path / "out", unpack_sample()):
        records = [Shard(path, LAYOUT).arrays["records"] for path in folder.glob("*.npz")]
        assert sum(int(part["own"].sum()) for part in records) == 136476


@pytest.mark.parametrize("order", [("netplay", "fox_throws"), ("fox_throws", "netplay")])
def test_a_folder_that_grows_holds_something_out(replays: Path, tmp_path: Path, order: tuple[str, str]) -> None:
    """The first game alone is trained on, and stays in training whatever comes later."""
    for name, counts in zip(order, ((1, 0), (1, 1)), strict=True):
        source = folder_of(tmp_path, replays, name)
        brought_in(source, tmp_path / "out")
        rows = Catalogue(tmp_path / "out").shards()
        assert tuple(sum(row.split == split for row in rows) for split in ("train", "validation")) == counts
    before = {row.name for row in rows}
    again = brought_in(source, tmp_path / "out")
    assert (again.fresh_entries, {row.name for row in Catalogue(tmp_path / "out").shards()}) == (0, before)


def test_an_import_that_was_cut_off_goes_on_to_the_same_bytes(
    replays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("matrixlib.tasks.melee.importer.STEP", 1)
    source = folder_of(tmp_path, replays, "transform", "fox_throws", "falcon_throws")
    import_replays(source, tmp_path / "whole", workers=1, progress=False)
    import_replays(source, tmp_path / "out", workers=1, progress=False, limit=1)
    assert len(contents(tmp_path / "out")) < len(contents(tmp_path / "whole"))
    brought_in(source, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_one_of_several_games_is_held_out_though_others_are_damaged(tmp_path: Path, replays: Path) -> None:
    good, other, bad = replays / "netplay.slp", replays / "falcon_throws.slp", tmp_path / "bad.slp"
    bad.write_bytes(b"")
    few = [f"{number:064x}" for number in (2**253, 2**254, 2**255)]
    limit = threshold({few[0]: bad, few[1]: good, few[2]: other})
    assert [name <= limit for name in few] == [True, True, False]
    assert few[0] > threshold({few[0]: good, few[1]: bad}), "one alone is trained on"
    assert few[0] > threshold({few[0]: good, few[1]: good}), "and so is one in two recordings"
    assert few[0] > threshold({few[0]: good, few[1]: other}, {1}, held_out=True)
    assert int(threshold({}), 16) / 2**256 == pytest.approx(0.1), "of many, one in ten"


# Bad input


@pytest.mark.parametrize("harm", [lambda whole: b"1. e4 e5", lambda whole: whole[:12], lambda whole: whole[:-400]])
def test_a_damaged_file_is_refused_with_a_reason(replays: Path, tmp_path: Path, harm: Callable[[bytes], bytes]) -> None:
    (tmp_path / "bad.slp").write_bytes(harm((replays / "netplay.slp").read_bytes()))
    with pytest.raises(ReplayError) as refusal:
        read(tmp_path / "bad.slp")
    assert str(refusal.value)


def test_whatever_is_wrong_with_a_file_it_is_refused_or_read(
    replays: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where peppi panics, too: that is no Exception, and ends a program that does not expect it."""
    whole, stream, causes = (replays / "netplay.slp").read_bytes(), random.Random(1), set()
    for _ in range(60):
        data = bytearray(whole)
        place = stream.randrange(15, len(data))
        if stream.random() < 0.5:
            del data[place : place + stream.choice([1, 7, 100])]
        else:
            data[place] ^= 0xFF
        (tmp_path / "bad.slp").write_bytes(data)
        try:
            read(tmp_path / "bad.slp")
        except ReplayError as error:
            causes.add(type(error.__cause__).__name__)
        except NoGame:
            pass
    assert replay.PANIC in causes


@pytest.mark.parametrize("field, value", [("x", np.nan), ("character", 200)])
def test_a_state_that_cannot_be_is_refused(field: str, value: float) -> None:
    played = game(10)
    played.players[field][4, 1] = value
    with pytest.raises(ReplayError, match="frame -35: no sound state"):
        replay.check(played.players, played.number)


def test_paths_without_replays_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "game.pgn").write_text("1. e4")
    for path, problem in (
        ("nowhere", "no such file or folder"),
        ("empty", "no replay"),
        ("game.pgn", r"no replay; a replay's name ends in \.slp"),
        ("x" * 5000, "no such file or folder"),
    ):
        with pytest.raises(ValueError, match=problem):
            import_replays(tmp_path / path, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'matrixlib\[melee\]'"):
        import_replays(tmp_path, tmp_path / "out")
