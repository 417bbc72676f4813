"""Imports: counts that add up, nothing twice, nothing lost by kill -9, and a quarantine to look at."""

import os
import random
import signal
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from matrixlib.data import imports as common
from matrixlib.data.catalogue import NAME, Catalogue
from matrixlib.data.imports import LOCK, ImportReport, ImportStopped, ParseResult, Part, import_logs, quarantined
from matrixlib.data.shards import LFS_POINTER, Shard
from matrixlib.files import FolderError
from matrixlib.tasks.chess.importers import import_files as imports
from matrixlib.tasks.chess.importers import pgn
from matrixlib.tasks.chess.importers.audit import sample
from matrixlib.tasks.chess.importers.import_files import import_files, import_listed
from matrixlib.tasks.chess.importers.pgn import CONTRADICTED, Pgn
from matrixlib.tasks.chess.records import LAYOUT, in_validation


def import_small(path: Path, folder: Path, workers: int) -> None:
    """In a process of its own: an import in many steps; `done` holds the report."""
    pgn.PART_GAMES, imports.STEP_POSITIONS, imports.SHARD_RECORDS, common.ALONE_SECONDS = 20, 1200, 500, 0
    text = import_files(path, folder, workers=workers, progress=False).text()
    (folder / "done").write_text(text)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and shards of a few hundred positions."""
    monkeypatch.setattr("matrixlib.tasks.chess.importers.pgn.PART_GAMES", 20)
    monkeypatch.setattr(imports, "STEP_POSITIONS", 1200)
    monkeypatch.setattr(imports, "SHARD_RECORDS", 500)
    monkeypatch.setattr(common, "ALONE_SECONDS", 0)


def test_a_reader_that_miscounts_is_an_error_and_no_assertion() -> None:
    games = Pgn().read(Part(3, 0, b"1. e4 e5 *\n", "a.pgn"))
    for entries, rows in ((2, games.rows), (1, games.rows + 1)):
        with pytest.raises(
            ValueError, match=f"a.pgn, part 3, is miscounted: {entries} entries, 1 accounted for, with 2"
        ):
            ParseResult(games.part).result(games.batch, entries, 1, rows)


@pytest.fixture
def matches(shared: Path) -> Path:
    return shared / "games" / "engine_matches.pgn"


@pytest.fixture
def masters(shared: Path) -> Path:
    return shared / "games" / "masters.pgn"


def run(paths: Any, folder: Path, **options: Any) -> ImportReport:
    report = import_files(paths, folder, workers=options.pop("workers", 1), progress=False, **options)
    assert report.entries == report.stored + sum(report.refused.values()) + sum(report.skipped.values())
    rows = Catalogue(folder).shards()
    assert not Catalogue(folder).verify()
    assert set(report.shards) <= {row.name for row in rows}
    return report


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.npz"))}


def records(folder: Path) -> np.ndarray:
    return np.concatenate([Shard(path, LAYOUT).arrays["records"] for path in sorted(folder.glob("*.npz"))])


def line_games(count: int, length: int = 30, seed: int = 1) -> str:
    """Games of knight moves, all different."""
    rng = random.Random(seed)
    trips = ("Nf3 Nf6 Ng1 Ng8", "Nc3 Nc6 Nb1 Nb8", "Nf3 Nc6 Ng1 Nb8")
    openings = ["a4 a5", "b4 b5", "c4 c5", "h4 h5", "g4 g5", "a3 a6", "h3 h6", "f3 f6"]
    texts = []
    for number in range(count):
        moves = " ".join(rng.choices(trips, k=length // 4)).split()[: rng.randrange(8, length)]
        texts.append(f'[Event "{number}"]\n[Result "*"]\n\n{rng.choice(openings)} {" ".join(moves)} *\n\n')
    return "".join(texts)


# What goes in


def test_real_games_are_stored_refused_or_left_out(matches: Path, tmp_path: Path) -> None:
    report = run(matches, tmp_path)
    assert (report.entries, report.stored) == (125, 42)
    assert report.refused == {CONTRADICTED: 83}
    assert report.skipped == {}
    found = records(tmp_path)
    assert len(found) == sum(report.positions.values())
    assert len(np.unique(found["game"])) == 42
    for row in Catalogue(tmp_path).shards():
        inside = Shard(row.path, LAYOUT).arrays["records"]
        assert (in_validation(inside) == (row.split == "validation")).all()
        assert row.source == "pgn"
        assert row.quality["records"] == len(inside)
        assert row.quality["policy_weight_entropy_mean"] == 0
    assert "83 result contradicts the board" in report.text()
    assert "125 entries: 42 stored, 83 in quarantine, 0 left out" in report.text()


def test_the_quarantine_holds_the_games_and_they_can_be_imported_again(matches: Path, tmp_path: Path) -> None:
    run(matches, tmp_path / "a")
    held = quarantined(tmp_path / "a")
    assert len(held) == 83
    assert {name for name, _ in held} == {"engine_matches.pgn"}
    text = "".join(entry.text for _, entry in held)
    assert text.count("[Event ") == 83
    assert [entry.entry for _, entry in held] == sorted(entry.entry for _, entry in held)
    (tmp_path / "mended.pgn").write_text(text)
    before = len(records(tmp_path / "a"))
    report = run(tmp_path / "mended.pgn", tmp_path / "a", reader=Pgn(repair=True))
    assert report.stored + report.skipped.get("stored before", 0) == 83
    assert report.warned == {CONTRADICTED + ": taken from the board": 83}
    assert len(records(tmp_path / "a")) == before + sum(report.positions.values())
    assert report.refused == {}


@pytest.mark.parametrize(
    ("name", "entries", "source"),
    [("lichess_dev.csv", 5000, "puzzles"), ("bk24.epd", 24, "epd"), ("kaufman25.epd", 26, "epd")],
)
def test_other_kinds_go_the_same_way(shared: Path, tmp_path: Path, name: str, entries: int, source: str) -> None:
    report = run(shared / "puzzles" / name, tmp_path)
    assert report.entries == entries
    assert report.stored > 0.9 * entries
    assert {row.source for row in Catalogue(tmp_path).shards()} == {source}
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*.*s*")}
    again = run(shared / "puzzles" / name, tmp_path)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*.*s*")} == before
    assert (again.fresh_entries, again.entries, again.stored) == (0, report.entries, report.stored)
    assert "nothing new" in again.text()


def test_several_files_and_a_folder_of_files(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / f"{number}.pgn").write_text(line_games(5, seed=number) + "1. e4 e4 *\n")
    report = run(sorted((tmp_path / "in").iterdir()), tmp_path / "f")
    assert report.entries == 18
    assert len(import_logs(tmp_path / "f")) == 3
    whole = run(tmp_path / "in", tmp_path / "g")
    assert (whole.entries, whole.stored, whole.refused) == (report.entries, report.stored, report.refused)
    assert len(import_logs(tmp_path / "g")) == 1
    assert run(tmp_path / "in", tmp_path / "g").fresh_entries == 0
    assert run(tmp_path / "in", tmp_path / "f").stored == 0, "the same games"


def test_steps_and_workers_do_not_change_what_is_stored(masters: Path, tmp_path: Path, small: None) -> None:
    with open(masters, "rb") as file:
        texts = [tags + moves for (tags, moves), _ in zip(pgn.split_games(file), range(140), strict=False)]
    (tmp_path / "some.pgn").write_bytes(b"".join(texts))
    report = run(tmp_path / "some.pgn", tmp_path / "one")
    assert (report.entries, report.stored, report.skipped) == (140, 137, {"no moves": 3})
    assert len(import_logs(tmp_path / "one")) > 3
    assert {log.last for log in import_logs(tmp_path / "one")[:-1]} == {False}
    sizes = [row.count for row in Catalogue(tmp_path / "one").shards("train")]
    assert min(sizes[:-1]) > 250
    assert max(sizes) < 1000
    stored = records(tmp_path / "one")
    run(tmp_path / "some.pgn", tmp_path / "two", workers=2)
    assert shards(tmp_path / "two") == shards(tmp_path / "one")
    assert len(np.unique(stored["game"])) == 137


def test_limit_stops_at_a_step_and_another_call_goes_on(tmp_path: Path, small: None) -> None:
    (tmp_path / "a.pgn").write_text(line_games(300))
    part = run(tmp_path / "a.pgn", tmp_path / "f", limit=1000)
    assert 1000 <= sum(part.positions.values()) < 3000
    again = run(tmp_path / "a.pgn", tmp_path / "f", limit=1000)
    assert again.fresh_entries == 0
    rest = run(tmp_path / "a.pgn", tmp_path / "f")
    assert rest.entries == 300
    assert rest.fresh_entries == 300 - part.entries
    run(tmp_path / "a.pgn", tmp_path / "g")
    assert shards(tmp_path / "f") == shards(tmp_path / "g")


# Kill and damage


SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("workers", "kills"), [(1, 2), pytest.param(2, 10, marks=SOAK), pytest.param(1, 100, marks=SOAK)]
)
def test_killed_anywhere_it_ends_in_the_same_bytes(tmp_path: Path, forkserver: Any, workers: int, kills: int) -> None:
    path, whole = tmp_path / "a.pgn", tmp_path / "whole"
    path.write_text(line_games(300, 60))
    first = forkserver.Process(target=import_small, args=(path, whole, 1))
    first.start()
    first.join()
    assert first.exitcode == 0
    expected = shards(whole)
    assert len(expected) > 10
    stream, killed, round_ = random.Random(kills), 0, 0
    while killed < kills:
        round_ += 1
        folder = tmp_path / f"killed_{round_}"
        while not (folder / "done").exists():
            there = len(list(folder.glob("*.npz")))
            process = forkserver.Process(target=import_small, args=(path, folder, workers))
            process.start()
            goal = there + stream.randrange(1, len(expected) // 3)  # in the middle, at any moment of a step
            while killed < kills and process.is_alive() and len(list(folder.glob("*.npz"))) < goal:
                time.sleep(0.0005)
            if killed < kills and process.is_alive():
                time.sleep(stream.uniform(0, 0.03))
                process.kill()
                killed += 1
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL)
        assert shards(folder) == expected
        assert import_logs(folder) == import_logs(whole)
        rows = [(row.name, row.sha256, row.quality) for row in Catalogue(folder).shards()]
        assert rows == [(row.name, row.sha256, row.quality) for row in Catalogue(whole).shards()]
        assert not list(folder.rglob("*.tmp"))
        assert (folder / "done").read_text().startswith("300 entries")


@pytest.mark.parametrize("damage", ["no log", "empty log", "no shard", "shard cut", "bit flipped"])
def test_what_is_lost_is_made_again(tmp_path: Path, small: None, damage: str) -> None:
    (tmp_path / "a.pgn").write_text(line_games(300))
    run(tmp_path / "a.pgn", tmp_path / "f")
    before, told = shards(tmp_path / "f"), import_logs(tmp_path / "f")
    assert len(told) > 2
    lost = tmp_path / "f" / list(before)[2]
    whole = lost.read_bytes()
    if damage.endswith("log"):
        change = "DELETE FROM imports" if damage == "no log" else "UPDATE imports SET data = '{}'"
        with sqlite3.connect(tmp_path / "f" / NAME) as db:
            db.execute(f"{change} WHERE step = 1")
        db.close()
    elif damage == "no shard":
        lost.unlink()
    else:
        flipped = bytes([*whole[:200], whole[200] ^ 1, *whole[201:]])
        lost.write_bytes(whole[:1000] if damage == "shard cut" else flipped)
    report = run(tmp_path / "a.pgn", tmp_path / "f")
    assert report.entries == 300
    assert not damage.endswith("log") or report.fresh_entries == 300 - told[0].entries
    assert shards(tmp_path / "f") == before
    assert import_logs(tmp_path / "f") == told
    assert all(row.state == "healthy" for row in Catalogue(tmp_path / "f").shards(state=None))


def test_a_step_that_is_done_again_with_less_leaves_nothing_of_the_first_time(tmp_path: Path, small: None) -> None:
    folder, games = tmp_path / "f", line_games(60)
    (tmp_path / "a.pgn").write_text(games)
    (tmp_path / "b.pgn").write_text("\n" + games)
    run(tmp_path / "a.pgn", folder)
    before = records(folder)
    for path in [folder / NAME, *folder.glob("*_train_0.npz")]:
        path.unlink()  # as if the process had been killed: no log, a shard not in its place yet
    assert run(tmp_path / "b.pgn", folder).stored
    run(tmp_path / "a.pgn", folder)
    assert np.array_equal(np.sort(records(folder)["game"]), np.sort(before["game"]))
    told = {name for log in import_logs(folder) for name in log.shards}
    assert {row.name for row in Catalogue(folder).shards(state=None)} == told
    assert {path.name for path in folder.glob("*.npz")} == told


@dataclass(frozen=True)
class Deadly:
    """A reader whose worker dies at the third part; and one that hands over positions that are none."""

    illegal: bool = False

    @property
    def source(self) -> str:
        return "pgn"

    def parts(self, path: Path) -> Iterator[Part]:
        yield from Pgn().parts(path)

    def read(self, part: Part) -> ParseResult:
        result = Pgn().read(part)
        if part.number == 2 and not self.illegal:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.illegal:
            result.batch["records"]["castling"] = 0
        return result


def test_a_dead_worker_stops_the_import_with_a_reason(tmp_path: Path, small: None, monkeypatch: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "a.pgn").write_text(line_games(100))
    with pytest.raises(ImportStopped, match="a worker process died"):
        import_files(tmp_path / "a.pgn", tmp_path / "f", reader=Deadly(), workers=2, progress=False)


def test_positions_that_are_none_are_not_stored(tmp_path: Path) -> None:
    (tmp_path / "a.pgn").write_text(line_games(3) + "1. e4 e5 2. Nf3 Nc6 3. Bc4 Bc5 4. O-O *\n")
    with pytest.raises(ValueError, match="the listed moves are not the legal ones"):
        run(tmp_path / "a.pgn", tmp_path / "f", reader=Deadly(illegal=True))
    assert not shards(tmp_path / "f")


def test_two_imports_into_a_folder_do_not_mix(tmp_path: Path) -> None:
    from filelock import FileLock

    (tmp_path / "a.pgn").write_text("1. e4 *\n")
    (tmp_path / "f").mkdir()
    with FileLock(tmp_path / "f" / LOCK), pytest.raises(ImportStopped, match="another import"):
        run(tmp_path / "a.pgn", tmp_path / "f")
    assert run(tmp_path / "a.pgn", tmp_path / "f").stored == 1


# Errors for people


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("missing.pgn", None, "no such file"),
        ("empty.pgn", b"", "is empty"),
        ("blank.pgn", b"\n\n \n", "holds nothing that Pgn could read"),
        ("pointer.pgn", LFS_POINTER + b".github.com/spec/v1\noid sha256:1\nsize 5\n", "git lfs pull"),
        ("games.xyz", b"1. e4 *", r"unknown kind of file; known: \.pgn, \.csv"),
        ("games.pgn.gz", b"1. e4 *", "damaged or cut short"),
        ("x.tar.zst", b"\x28\xb5\x2f\xfd", "decompress it to x.tar first"),
        ("x.npz.gz", b"\x1f\x8b\x08", "decompress it to x.npz first"),
        ("games.pgn", b"nothing of the kind\n", "holds no PGN games"),
    ],
)
def test_files_that_cannot_be_imported_are_named(tmp_path: Path, name: str, content: bytes | None, what: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=what) as caught:
        run(tmp_path / name, tmp_path / "f")
    assert name in str(caught.value)


# What comes out


def test_an_outlier_is_said_and_marked(tmp_path: Path, small: None) -> None:
    (tmp_path / "usual.pgn").write_text(line_games(400))
    assert run(tmp_path / "usual.pgn", tmp_path / "f").outliers == []
    fen = '[FEN "8/8/4k3/8/8/4K3/4P3/8 w - - 0 1"]\n'
    endings = "".join(f"{fen}\n{'Kd3 Kd5 Ke3 Ke5 ' * n} Kf3 *\n\n" for n in range(1, 40))
    (tmp_path / "odd.pgn").write_text(endings)
    report = run(tmp_path / "odd.pgn", tmp_path / "f")
    assert any("men" in outlier for outlier in report.outliers)
    marked = [row.name for row in Catalogue(tmp_path / "f").shards() if "outliers" in row.quality]
    assert marked == [outlier.split(":")[0] for outlier in report.outliers]
    assert all(row.state == "healthy" for row in Catalogue(tmp_path / "f").shards())


# As the notebook asks for it

MATED = '[Result "1-0"]\n\n1. f3 e5 2. g4 Qh4# 1-0\n\n'


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    path = tmp_path / "games.pgn"
    path.write_text(MATED + '[Event "x"]\n\n1. e4 e5 2. Nf3 *\n\n')
    return path


def test_several_files_are_imported_each_by_its_reader(listed: Path, tmp_path: Path) -> None:
    (tmp_path / "suite.epd").write_text("6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - bm Rd8+;\n")
    folder = tmp_path / "f"
    text = import_listed(f"{listed}, {tmp_path / 'suite.epd'},", folder, workers=1)
    assert text.startswith("games.pgn (pgn)\n2 entries: 1 stored, 1 in quarantine, 0 left out\n")
    assert "\n\nsuite.epd (epd)\n1 entries: 1 stored" in text
    assert {row.source for row in Catalogue(folder).shards()} == {"pgn", "epd"}
    assert "nothing new" in import_listed(str(listed), folder, workers=1)
    again = import_listed(str(listed), folder, repair=True, workers=1)
    assert "2 entries: 1 stored, 0 in quarantine, 1 left out" in again
    assert "stored before" in again


def test_a_kind_is_named_for_files_whose_ending_says_nothing(listed: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.pgn: no such file"):  # before the first is read
        import_listed(f"{listed},{tmp_path / 'nowhere.pgn'}", tmp_path / "f")
    assert import_listed(" , ", tmp_path / "f") == ""
    assert not (tmp_path / "f").exists()
    odd = listed.rename(tmp_path / "games.txt")
    with pytest.raises(ValueError, match="unknown kind of file"):
        import_listed(str(odd), tmp_path / "f")
    assert "1 stored" in import_listed(str(odd), tmp_path / "f", kind="pgn", workers=1)
    with pytest.raises(ValueError, match=r"unknown kind 'pgm', did you mean 'pgn'.*known: auto, pgn"):
        import_listed(str(odd), tmp_path / "f", kind="pgm")
    with pytest.raises(ValueError, match="no such file"):
        import_listed("x" * 5000, tmp_path / "f")
    with pytest.raises(FolderError, match=r"games\.txt cannot be written: Not a directory"):
        import_listed(str(odd), odd / "f", kind="pgn", workers=1)
    for options in ({"workers": -3}, {"limit": -1}):
        with pytest.raises(ValueError, match="give whole numbers from 0"):
            import_listed(str(odd), tmp_path / "f", kind="pgn", **options)


def test_a_folder_that_was_looked_at_or_imported_into_itself_is_imported(listed: Path, tmp_path: Path) -> None:
    """What a folder of shards holds of its own is no source."""
    with pytest.raises(ValueError, match="no healthy shard"):
        sample(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["games.pgn"]
    first = import_listed(str(tmp_path), tmp_path, workers=1)
    assert "1 stored, 1 in quarantine" in first
    Catalogue(tmp_path).quarantine(Catalogue(tmp_path).shards()[0].name, "dull")
    assert "nothing new" in import_listed(str(tmp_path), tmp_path, workers=1)
