"""Replays of Melee: read as they were played, imported with accounts that add up, and damaged ones refused."""

import random
import shutil
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
    for bit, field in (
        (columns.SPEEDS, "speeds"),
        (columns.GROUNDED, "hitstun"),
        (columns.ACTION_FRAME, "action_frame"),
    ):
        unknown = np.isnan(players[field])
        assert unknown.all() if not known & bit else not unknown.any(), field
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


def test_frames_of_which_none_follow_each_other_are_no_game(replays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "last_rows", lambda number: last_rows(number)[::2])
    with pytest.raises(NoGame, match="ends before anybody could act"):
        read(replays / "netplay.slp")


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
    source = tmp_path / "in"
    source.mkdir()
    for name in ("transform", "ics", "netplay", "corrupt", "crazy_name_tags", "falcon_throws", "v3.18"):
        shutil.copy(replays / f"{name}.slp", source)
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
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.npz")}
    again = brought_in(source, tmp_path / "out")
    assert (again.fresh_entries, again.stored) == (0, 3)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.npz")} == before
    assert "training and" in report.text("rows")


def test_the_games_of_people_are_imported_whole(replays: Path, tmp_path: Path) -> None:
    """Frame by frame what ships, where the same six were read and compressed."""
    source = tmp_path / "in"
    source.mkdir()
    for shipped in read_manifest(SAMPLE)["games"]:
        shutil.copy(replays / shipped["file"], source)
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
    source = tmp_path / "in"
    source.mkdir()
    for name, counts in zip(order, ((1, 0), (1, 1)), strict=True):
        shutil.copy(replays / f"{name}.slp", source)
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
    files = [replays / f"{name}.slp" for name in ("transform", "fox_throws", "falcon_throws")]
    source = tmp_path / "in"
    source.mkdir()
    for file in files:
        shutil.copy(file, source)
    import_replays(source, tmp_path / "whole", workers=1, progress=False)
    import_replays(source, tmp_path / "out", workers=1, progress=False, limit=1)
    assert len(list((tmp_path / "out").glob("*.npz"))) < len(list((tmp_path / "whole").glob("*.npz")))
    brought_in(source, tmp_path / "out")
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / name).glob("*.npz")} for name in ("whole", "out"))
    assert one == two


def test_one_of_several_games_is_held_out_though_others_are_damaged(tmp_path: Path, replays: Path) -> None:
    good, bad = replays / "netplay.slp", tmp_path / "bad.slp"
    bad.write_bytes(b"")
    few = [f"{number:064x}" for number in (2**253, 2**254, 2**255)]
    other = replays / "falcon_throws.slp"
    limit = threshold({few[0]: bad, few[1]: good, few[2]: other})
    assert [name <= limit for name in few] == [True, True, False]
    assert few[0] > threshold({few[0]: good, few[1]: bad}), "one alone is trained on"
    assert few[0] > threshold({few[0]: good, few[1]: good}), "and so is one in two recordings"
    assert few[0] > threshold({few[0]: good, few[1]: other}, {1}, held_out=True)
    many = {f"{number * 2**246:064x}": (good, other)[number % 2] for number in range(1024)}
    limit = threshold(many)
    assert sum(name <= limit for name in many) == pytest.approx(102, abs=1)


# Bad input


@pytest.mark.parametrize(
    "harm", ["empty", "text", "header", "half", "tail", "zeros", "png", "pointer", "sizes", "version", "json"]
)
def test_a_damaged_file_is_refused_with_a_reason(replays: Path, tmp_path: Path, harm: str) -> None:
    whole = (replays / "netplay.slp").read_bytes()
    zeros = bytearray(whole)
    zeros[1000:40000] = bytes(39000)
    sizes = bytearray(whole)
    sizes[16] ^= 0xFF
    version = bytearray(whole)
    place = whole.index(b"\x36", 15 + 1 + whole[16])
    version[place + 1 : place + 4] = b"\xff\xff\xff"
    data = {
        "empty": b"",
        "text": b"1. e4 e5",
        "header": whole[:12],
        "half": whole[: len(whole) // 2],
        "tail": whole[:-400],
        "zeros": bytes(zeros),
        "png": b"\x89PNG\r\n\x1a\n" + bytes(200),
        "pointer": b"version https://git-lfs.github.com/spec/v1\n",
        "sizes": bytes(sizes),
        "version": bytes(version),
        "json": b"{}",
    }[harm]
    (tmp_path / "bad.slp").write_bytes(data)
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


def test_a_state_that_cannot_be_is_refused() -> None:
    players = game(10).players
    players["x"][4, 1] = np.nan
    with pytest.raises(ReplayError, match="frame -35: no sound state"):
        replay.check(players, game(10).number)
    players = game(10).players
    players["character"][4, 1] = 200
    with pytest.raises(ReplayError, match="frame -35"):
        replay.check(players, game(10).number)


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
