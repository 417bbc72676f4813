"""Runs as folders: damaged neighbours are named once and in nobody's way; a damaged run of one's own is named."""

import errno
import io
import json
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cells import run_notebook

from matrixlib import files
from matrixlib.data.catalogue import Catalogue
from matrixlib.engine import folder as folders
from matrixlib.engine.metrics import MetricsLog
from matrixlib.runs import browse, compare, launch, record
from matrixlib.runs import run as runs
from matrixlib.runs.cycle import open_cycle
from matrixlib.runs.cycle_games import CycleError
from matrixlib.tasks import load_config
from matrixlib.tasks.chess.importers.import_files import import_listed
from matrixlib.tasks.chess.stockfish.sample import make_set
from matrixlib.tasks.spec import find_run

WHOLE: dict[str, Any] = {"kind": "train", "preset": "demo", "started": "2026-01-01T00:00:00Z", "runtime": {}}
WHOLE |= {"requested": {"task": "chess"}, "catalogue": ""}


def name_run(preset: str, run: str = "") -> str:
    """The name that `open_run` would use."""
    return record.run_folder(preset, run, load_config(preset)).name


def make(root: Path, name: str, record: str = "", summary: str = "") -> Path:
    """A run's folder with these files; without, those of a whole and complete run."""
    folder = root / name
    folder.mkdir()
    (folder / "run.json").write_text(record or json.dumps(WHOLE))
    (folder / "summary.json").write_text(summary or json.dumps({"complete": True, "steps": 3}))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    return folder


@pytest.fixture(autouse=True)
def named_anew() -> None:
    folders._warn.cache_clear()


@pytest.fixture
def broken(reports: Path) -> list[str]:
    """Names of damaged runs beside each other, in every way."""
    for number, text in enumerate((" ", "{", "[]", "null", '{"requested": []}', "[" * 100_000)):
        make(reports, f"record-{number}", text)
    for number, text in enumerate((" ", '{"complete": tr', "[1]")):
        make(reports, f"summary-{number}", summary=text)
    (make(reports, "latin1") / "run.json").write_bytes(b'{"kind": "\xe9"}')
    folder = make(reports, "a-folder")
    (folder / "summary.json").unlink()
    (folder / "summary.json").mkdir()
    folder = make(reports, "a-pipe")
    (folder / "run.json").unlink()
    os.mkfifo(folder / "run.json")
    return sorted(path.name for path in reports.iterdir())


def test_damaged_neighbours_are_left_out_and_named_once(reports: Path, broken: list[str]) -> None:
    make(reports, "whole")
    with pytest.warns(UserWarning, match="is left out") as caught:
        names = [run.name for run in folders.intact_runs()]
    assert names == ["whole"]
    assert sorted(str(warning.message).split("'")[1] for warning in caught) == broken
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runs.finished_run().name == "whole"
        assert runs.finished_run("whole").name == "whole"
        assert browse.known_runs() == ["whole", "shipped"]
        assert name_run("demo").startswith("demo-")
    with pytest.raises(runs.RunError, match=r"^no complete run 'absent'; complete runs: whole$"):
        runs.finished_run("absent")


@pytest.mark.filterwarnings("ignore:run '")
def test_a_damaged_run_that_is_asked_for_is_named(broken: list[str]) -> None:
    for name in broken:
        with pytest.raises(ValueError, match=rf"{name}.*(restore|move it)"):
            runs.finished_run(name)


def test_an_interrupted_run_is_resumed_beside_damaged_ones_but_not_somebody_elses(reports: Path) -> None:
    requested = load_config("demo").model_dump(mode="json")
    folder = make(reports, "cut", json.dumps({**WHOLE, "requested": requested}))
    (folder / "summary.json").unlink()
    make(reports, "broken", "[]")
    with pytest.warns(UserWarning, match="'broken' is left out"):
        assert name_run("demo") == "cut"
    (folder / "lock").unlink(missing_ok=True)
    (folder / "lock").mkdir()  # as root is refused no file
    assert name_run("demo").startswith("demo-")


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ("", r"'mine' has no run\.json, but metrics\.jsonl and summary\.json: restore"),
        ("[", r"mine/run\.json is not a JSON object"),
        ('{"requested": {}, "runtime": {}}', r"mine/run\.json has no catalogue"),
    ],
)
def test_a_trained_run_that_lost_its_record_is_not_begun_anew(reports: Path, record: str, why: str) -> None:
    folder = make(reports, "mine", record)
    if not record:
        (folder / "run.json").unlink()
    with pytest.raises(ValueError, match=why):
        runs.open_run(run="mine")


@pytest.mark.parametrize("config", [None, b"\xff\xfe", b"[]", b"{" * 5000])
def test_a_run_that_lost_its_configuration_is_not_begun_anew(reports: Path, config: bytes | None) -> None:
    folder = make(reports, "mine")
    (folder / "summary.json").unlink()
    if config is not None:
        (folder / "config.yaml").write_bytes(config)
    with pytest.raises(ValueError, match=r"mine/config\.yaml: .*; restore it from a backup, or take another run"):
        runs.open_run(run="mine")


@pytest.mark.parametrize("name", ["é" * 150, "index.html", "a\nb", "a/b", "..", ".hidden", "\udcff"])
def test_a_name_that_no_folder_can_have_is_refused(reports: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / ".hidden.yaml"
    path.write_text("task: chess\n")
    with pytest.raises(runs.RunError, match=r"which preset and time make, .*; give `run` a name"):
        name_run(str(path))
    assert name_run(str(path), run="mine") == "mine"
    (reports / "index.html").write_text("")
    with pytest.raises(runs.RunError, match=r"^run name "):
        runs.open_run(run=name)
    assert [path.name for path in reports.iterdir()] == ["index.html"]


def test_a_name_belongs_to_one_kind_of_folder(reports: Path) -> None:
    for file in folders.KINDS:
        folder = reports / file
        folder.mkdir()
        (folder / file).touch()
        for other in folders.KINDS:
            problem = folders.name_conflict(file, other)
            assert problem == ("" if other == file else f"is that of {folders.KINDS[file]}: take another")
    for name in ("cycle.yaml", "sweep.yaml", "catalogue.sqlite"):
        with pytest.raises(runs.RunError, match=f"^run name '{name}' is that of a "):
            runs.open_run(run=name)
    for name in ("run.json", "sweep.yaml"):
        with pytest.raises(CycleError, match=f"^cycle name '{name}' is that of a "):
            open_cycle(cycle=name)
    assert [sorted(path.name for path in folder.iterdir()) for folder in sorted(reports.iterdir())] == [
        [name] for name in sorted(folders.KINDS)
    ]


def shell(name: str) -> None:
    """The command; its message as an error."""
    with redirect_stderr(io.StringIO()) as told:
        assert launch.main(["--preset", "demo", "--run", name]) == 2
    raise ValueError(told.getvalue())


GAME = '[Event "x"]\n[Result "1-0"]\n\n1. e4 e5 2. Qh5 Nc6 3. Bc4 Nf6 4. Qxf7# 1-0\n\n'
FILLED: dict[str, Callable[[str, str], Any]] = {
    "run": lambda name, _: runs.open_run(run=name),
    "run of the shell": lambda name, _: shell(name),
    "run of a notebook": lambda name, _: run_notebook("overfit", run=name),
    "sweep": lambda name, _: run_notebook("sweep", sweep=name),
    "cycle": lambda name, _: run_notebook("cycle", cycle=name),
    "training of a cycle": lambda name, _: open_cycle(cycle=name.removesuffix("-001")),
    "comparison": lambda name, _: compare.train_arms({"A": ("demo", {}), "B": ("demo", {})}, run=name[:-3]),
    "data set": lambda _, place: run_notebook("data", paths=f"{place}/../../games.pgn", folder=place),
    "games of Stockfish": lambda _, place: make_set(place),
}
"""What fills a folder of this name below the reports, at this path."""


@pytest.mark.parametrize("kind", FILLED)
def test_a_folder_of_something_else_is_refused_by_name_and_left_alone(reports: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "games.pgn").write_text(GAME)
    name = {"training of a cycle": "mine-001", "comparison": "mine-b0"}.get(kind, "mine")
    for place in (reports / name, reports / name / "pictures"):
        place.mkdir()
        (place / "photo.jpg").write_bytes(b"mine")
    with pytest.raises(ValueError, match=rf"{name}\b.* other files, such as '(photo.jpg|pictures)'"):
        FILLED[kind](name, str(reports / name))
    assert sorted(str(path.relative_to(reports)) for path in reports.rglob("*")) == [
        name,
        f"{name}/photo.jpg",
        f"{name}/pictures",
        f"{name}/pictures/photo.jpg",
    ]


def test_what_a_folder_may_have_before_it_is_filled(reports: Path) -> None:
    """papermill's notebook, locks, a log of the shell, notes, and what a killed start left."""
    for name in ("train.ipynb", "lock", "opening.lock", "out.log", "notes.txt", ".DS_Store", "config.yaml"):
        (reports / "mine").mkdir(exist_ok=True)
        (reports / "mine" / name).write_text("")
    (reports / "mine" / "shards").mkdir()
    assert folders.name_conflict("mine", "run.json") == ""
    assert "such as 'config.yaml'" in folders.name_conflict("mine", "cycle.yaml")
    (reports / "mine" / "config.yaml").unlink()
    assert folders.name_conflict("mine", "cycle.yaml") == folders.name_conflict("mine", "sweep.yaml") == ""
    games = reports / "games"
    games.mkdir()
    for number in range(2):
        (games / f"{number}.pgn").write_text(GAME + number * GAME.replace("Nf6", "a6"))
    import_listed(f"{games}/0.pgn,{games}/1.pgn", games, workers=1)  # beside what is imported
    (games / "catalogue.sqlite").unlink()
    (reports / "2.pgn").write_text(GAME.replace("Nf6", "b6"))
    import_listed(str(reports / "2.pgn"), games, workers=1)  # beside shards, whose catalogue was lost
    assert len(Catalogue(games).shards(state=None)) == 3


@pytest.mark.parametrize("root", ["file/reports", "x" * 5000])
def test_a_reports_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(tmp_path / root))
    with pytest.raises(files.FolderError, match=r" cannot be written: (Not a|File name too).*MATRIXLIB_REPORTS"):
        runs.open_run()


def test_a_full_disk_during_training_is_named(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(log: MetricsLog, row: Mapping[str, Any], always: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(log.path))

    tiny = {"data": {"limit": 512}, "model": {"channels": 16, "blocks": 1}, "train": {"steps": 2, "batch_size": 32}}
    current = runs.open_run(device="cpu", run="full", overrides=tiny)
    monkeypatch.setattr(MetricsLog, "write", full)
    with pytest.raises(files.FolderError, match=r"full cannot be written: No space left on device .*metrics\.jsonl"):
        list(current.train())
    assert not current.lock.is_locked


@pytest.mark.parametrize(
    ("inodes", "says"), [(0, r"no room for more files \(52\.4 MB are free, .* 800 inodes"), (9, "No sp")]
)
def test_a_file_system_without_inodes_is_not_called_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inodes: int, says: str
) -> None:
    disk = SimpleNamespace(f_bavail=12_800, f_frsize=4096, f_files=800, f_favail=inodes)
    monkeypatch.setattr(files.os, "statvfs", lambda _: disk)
    with (
        pytest.raises(files.FolderError, match=f"reports cannot be written: .*{says}"),
        files.writing(tmp_path / "reports"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "", "../reports", "nowhere"], ids=len)
def test_what_is_no_run_is_named(reports: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no run at"):
        find_run(name)
    if name:
        with pytest.raises(runs.RunError, match="no complete run"):
            runs.finished_run(name)
