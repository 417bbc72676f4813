"""Data of Melee: what ships and how rare each button is; replays read as they were played, imported, or refused."""

import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from melee_games import game
from melee_sample import encode

from matrixlib.config import ConfigError, validated
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.imports import ImportReport, quarantined
from matrixlib.data.shards import Shard, write_shard
from matrixlib.runs.run import open_run
from matrixlib.tasks.melee import columns, importer, replay
from matrixlib.tasks.melee.columns import BUTTONS, CONTROLLER, FIRST, LAYOUT
from matrixlib.tasks.melee.config import MeleeConfig
from matrixlib.tasks.melee.controller import HEADS
from matrixlib.tasks.melee.importer import DAMAGED, SAMPLE, decode, import_replays, threshold, unpack_sample
from matrixlib.tasks.melee.replay import NoGame, ReplayError, last_rows, read
from matrixlib.tasks.melee.spec import TASK
from matrixlib.tasks.melee.windows import figures, stretches
from matrixlib.tasks.shipped import read_manifest


def config(**data: Any) -> MeleeConfig:
    return MeleeConfig.model_validate({"task": "melee", "data": data})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The sample set as a folder of one's own."""
    copied = shutil.copytree(unpack_sample(), tmp_path / "set")
    return Path(copied)


def test_what_ships_is_whole_small_licensed_and_split_by_game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing was unpacked before: a cache hid a manifest that no longer fitted its shards."""
    monkeypatch.setenv("MATRIXLIB_CACHE", str(tmp_path))
    manifest, licence = read_manifest(SAMPLE), (SAMPLE / "LICENSE").read_text()
    assert sum(file.stat().st_size for file in SAMPLE.iterdir()) < 3_000_000
    assert "MIT License" in licence
    assert all(Path(shipped["file"]).stem in licence for shipped in manifest["games"])
    games = decode((SAMPLE / manifest["file"]).read_bytes())
    (again,) = decode(encode(games[4:5]))
    for name, value in vars(games[4]).items():  # bytes, as some of it is NaN
        assert np.asarray(getattr(again, name)).tobytes() == np.asarray(value).tobytes(), name
    split = {
        name: Shard(unpack_sample() / f"sample_{name}.npz", LAYOUT).arrays["records"]
        for name in ("train", "validation")
    }
    ids = {name: set(records["game"].tolist()) for name, records in split.items()}
    assert ids["train"].isdisjoint(ids["validation"])
    assert sum(int(records["own"].sum()) for records in split.values()) == sum(2 * len(game.number) for game in games)


# Rates


def held_buttons(folder: Path, rows: int) -> tuple[int, list[int]]:
    """Own frames of the first rows of the training shard, and how often each button is pressed in them, by hand."""
    shard = Shard(folder / "sample_train.npz", LAYOUT)
    pressed, frames = np.zeros(8, np.int64), 0
    for begin, own in zip(shard.arrays["frame_offset"], shard.arrays["records"]["own"][:rows].tolist(), strict=False):
        held = shard.arrays["frame_state"]["controller"]["buttons"][begin : begin + own]
        pressed += np.unpackbits(held[:, None], axis=1, bitorder="little").sum(0, dtype=np.int64)
        frames += own
    return frames, pressed.tolist()


def test_rates_are_those_of_the_rows_in_use(folder: Path) -> None:
    whole, part = TASK.statistics(config(source=str(folder))), TASK.statistics(config(source=str(folder), limit=100))
    assert whole is not None
    assert part is not None
    for counted, rows in ((whole, 1882), (part, 100)):
        assert (counted.frames, counted.held[:8]) == held_buttons(folder, rows)
        assert [sum(counted.held[head.logits]) for head in HEADS[1:]] == [counted.frames] * 5
    assert whole.weights() != part.weights()


def test_rates_are_made_again_where_the_split_changes(folder: Path, tmp_path: Path) -> None:
    before, other = TASK.statistics(config(source=str(folder))), tmp_path / "other"
    other.mkdir()
    for split, name in (("train", "validation"), ("validation", "train")):
        _move(folder / f"sample_{name}.npz", other / f"sample_{split}.npz", split)
    after = TASK.statistics(config(source=str(other)))
    assert before is not None
    assert after is not None
    assert (before.frames, after.frames) == (112572, 23904)
    Catalogue(other).quarantine("sample_train.npz", "by hand")
    assert TASK.statistics(config(source=str(other))) is None
    assert TASK.statistics(config(source=str(tmp_path / "nowhere"))) is None


def _move(path: Path, to: Path, split: str) -> None:
    shard = Shard(path, LAYOUT)
    own = ("source", "generator", "seed", "created", "quality")
    batch = shard.gather(np.arange(len(shard)))
    write_shard(to, LAYOUT, batch, {**{name: shard.meta[name] for name in own}, "split": split})


def test_the_odd_shard_is_marked_within_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that nobody touches is odd among players, and usual in a source of such games."""
    pytest.importorskip("peppi_py", reason="an import asks for it")
    nobody = {"controllers": np.zeros(100, (CONTROLLER, 2))}
    about = {"generator": "test", "seed": 0, "split": "train"}
    for number in range(20):
        played = game(100, number, **(nobody if number == 4 or number > 9 else {}))
        batch = stretches(played, False)
        meta = about | {"source": "slippi" if number < 10 else "still", "quality": figures(batch)}
        write_shard(tmp_path / f"s{number:02}.npz", LAYOUT, batch, meta)
    (tmp_path / "a.slp").write_bytes(b"no replay")
    monkeypatch.setattr(importer, "import_each", lambda jobs, folder, storage, **others: storage)
    storage: Any = import_replays(tmp_path / "a.slp", tmp_path / "new", workers=1, progress=False)
    catalogue = Catalogue(tmp_path)
    (line,) = storage.outliers(catalogue, [row.name for row in catalogue.shards()])
    assert line.startswith("s04.npz: A (z -"), "and every other button"
    marked = {
        row.name: set(row.quality["outliers"]) for row in Catalogue(tmp_path).shards() if "outliers" in row.quality
    }
    assert marked == {"s04.npz": {*BUTTONS, *(head.name for head in HEADS[1:])}}


# Bad input


TINY = {"model": {"width": 8, "embedding": 4, "head_width": 4}, "runtime": {"precision": "fp32", "threads": 1}}


def test_a_delay_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="delay runs from the least to the greatest"):
        validated(MeleeConfig, {"task": "melee", "data": {"delay": [4, 2]}}, "mine")


@pytest.mark.filterwarnings("ignore:.*quarantined")
def test_data_that_cannot_be_trained_on_are_refused(folder: Path, reports: Path) -> None:
    (folder / "sample_validation.npz").unlink()
    problem = "holds nothing out, .*; add data: about one replay in ten is held out, and of several"
    for source, text in ((folder / "nowhere", "is no folder; use 'sample' or a folder of shards"), (folder, problem)):
        with pytest.raises(ValueError, match=text):
            list(open_run("melee_demo", "cpu", overrides={**TINY, "data": {"source": str(source)}}).train())


@pytest.fixture(scope="module")
def replays(shared: Path) -> Path:
    pytest.importorskip("peppi_py", reason="reads .slp files")
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
    assert set(climbers.follower["state"]["character"]) == {11}, "Nana"
    assert set(climbers.follower["whose"]) == {0}
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


def test_whatever_is_wrong_with_a_file_it_is_refused_or_read(
    replays: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where peppi panics, too: that is no Exception, and ends a program that does not expect it."""
    whole, stream, causes = (replays / "netplay.slp").read_bytes(), random.Random(1), dict[str, str]()
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
            causes[type(error.__cause__).__name__] = str(error)
        except NoGame:
            pass
    assert replay.PANIC in causes
    assert all(causes.values())


@pytest.mark.parametrize("field, value", [("x", np.nan), ("character", 200)])
def test_a_state_that_cannot_be_is_refused(field: str, value: float) -> None:
    played = game(10)
    played.players[field][4, 1] = value
    with pytest.raises(ReplayError, match="frame -35: no sound state"):
        replay.check(played.players, played.number)


@pytest.mark.parametrize(
    "path, problem", [("nowhere", "no such file"), ("empty", "no replay"), ("game.pgn", r"name ends in \.slp")]
)
def test_paths_without_replays_are_refused(tmp_path: Path, path: str, problem: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "game.pgn").write_text("1. e4")
    with pytest.raises(ValueError, match=problem):
        import_replays(tmp_path / path, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_a_missing_reader_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peppi_py._peppi", None)
    (tmp_path / "a.slp").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pip install 'matrixlib\[melee\]'"):
        import_replays(tmp_path, tmp_path / "out")
