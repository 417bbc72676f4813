"""Backups of a run: a lost folder is restored and resumes with the same bits, whatever happens in between."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from s3_server import BUCKET, Line, s3_server
from saved import assert_same
from test_run import TINY

from matrixlib.data import remote
from matrixlib.engine import metrics
from matrixlib.runs import backup as backups
from matrixlib.runs import run as runs
from matrixlib.runs.backup import BackupError, main, restore

STEPS, SAVED = 12, 4


def opened(place: Any, name: str = "lost", **checkpoint: Any) -> runs.Run:
    kept = {"backup": str(place), "interval": SAVED, **checkpoint}
    return runs.open_run(run=name, overrides=TINY | {"checkpoint": kept, "train": {**TINY["train"], "steps": STEPS}})


def trained(run: runs.Run, updates: int | None = None) -> None:
    """Its next updates; all without a number."""
    with contextlib.closing(run.train()) as stats:
        for _ in itertools.islice(stats, updates):
            pass
    assert run.complete or updates


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a backup that nothing stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MATRIXLIB_REPORTS", str(tmp_path_factory.mktemp("whole")))
        run = opened("", "whole")
        trained(run)
    return run.folder


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backups, "LOOK_SECONDS", 0.0)


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("stop", "killed"), [(6, False), (6, True), (None, False)])
def test_a_lost_run_is_restored_and_goes_on_with_the_same_bits(
    whole: Path, reports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int | None, killed: bool
) -> None:
    run = opened(tmp_path / "safe")
    if killed:  # no copy at the end
        monkeypatch.setattr(backups.Backup, "end", backups.Backup._problem)
    trained(run, stop)
    before = tree(run.folder)
    shutil.rmtree(run.folder)
    assert main([str(tmp_path / "safe" / "lost")]) == 0
    if not killed:
        assert tree(reports / "lost") == {name: data for name, data in before.items() if name not in backups.LEFT_OUT}
    trained(opened(tmp_path / "safe"))
    assert_same(whole, reports / "lost")
    losses = [[row["loss"] for row in metrics.read(run / "metrics.jsonl")] for run in (whole, reports / "lost")]
    assert losses[0] == losses[1]


@pytest.mark.usefixtures("eager")
def test_a_copy_has_only_what_the_run_has(reports: Path, tmp_path: Path) -> None:
    run = opened(tmp_path / "safe")
    trained(run)
    place = tmp_path / "safe" / "lost"
    manifest = json.loads((place / "manifest.json").read_text())
    assert {name for name, _ in manifest["files"].values()} | {"manifest.json"} == {p.name for p in place.iterdir()}
    kept = {path.name for path in (run.folder / "checkpoints").iterdir()}
    assert {name.split("/")[1] for name in manifest["files"] if name.startswith("checkpoints/")} == kept
    assert "data_catalogue.sqlite" in manifest["files"]


def test_another_run_of_that_name_is_not_replaced(reports: Path, tmp_path: Path) -> None:
    trained(opened(tmp_path), 3)
    before = tree(tmp_path / "lost")
    shutil.rmtree(reports / "lost")
    manifest = tmp_path / "lost" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"started": "2', '"started": "1'))
    with pytest.raises(BackupError, match=r"has another run of this name.*restore it"):
        next(opened(tmp_path).train())
    assert tree(tmp_path / "lost").keys() == before.keys()


def test_a_place_that_cannot_be_written_is_said_before_the_first_update(reports: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(BackupError, match="cannot hold a backup"):
        next(opened(tmp_path / "file").train())
    with pytest.raises(ValueError, match="nowhere://"):
        next(opened("nowhere://there").train())


@pytest.mark.usefixtures("eager")
def test_a_place_that_goes_away_costs_a_warning_and_no_update(reports: Path, tmp_path: Path) -> None:
    run = opened(tmp_path / "safe")
    updates = run.train()
    next(updates)
    shutil.rmtree(tmp_path / "safe")
    (tmp_path / "safe").write_text("unmounted")
    with pytest.warns(UserWarning, match="backup is not up to date"):
        assert len(list(updates)) == STEPS - 1
    assert run.complete


def test_what_is_damaged_there_is_refused_and_what_came_is_used(
    reports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened(tmp_path)
    trained(run, 5)
    before = tree(run.folder)
    shutil.rmtree(run.folder)
    place = tmp_path / "lost"
    files = json.loads((place / "manifest.json").read_text())["files"]
    broken = place / files["run.json"][0]
    whole = broken.read_bytes()
    broken.write_bytes(whole[:-1] + b"?")
    with pytest.raises(BackupError, match=r"run\.json is damaged"):
        restore(str(place))
    broken.unlink()
    with pytest.raises(ValueError, match="is not there"):
        restore(str(place))
    assert not (reports / "lost").exists()
    broken.write_bytes(whole)
    read, asked = backups._Place.read, []
    monkeypatch.setattr(backups._Place, "read", lambda self, name, size: asked.append(name) or read(self, name, size))
    assert tree(restore(str(place))) == {n: d for n, d in before.items() if n not in backups.LEFT_OUT}
    assert files["run.json"][0] in asked
    assert files["config.yaml"][0] not in asked, "it had been brought by the first try"
    with pytest.raises(BackupError, match="exists: move it"):
        restore(str(place))


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        ("no JSON", "is damaged"),
        ("[]", "is damaged"),
        ("{}", "no backup of a run"),
        ('{"run": "r", "files": {"../x": ["ab", 1]}}', "outside of the run"),
        ('{"run": "r", "files": {"/x": ["ab", 1]}}', "outside of the run"),
        ('{"run": "r", "files": {"a": ["../secret", 6]}}', "SHA-256"),
        ('{"run": "../r", "files": {}}', "plain folder name"),
        ('{"run": "r", "files": {"a": 3}}', "no backup of a run"),
    ],
)
def test_a_hostile_manifest_is_refused(reports: Path, tmp_path: Path, manifest: str, problem: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "there" / "manifest.json").write_text(manifest)
    with pytest.raises(BackupError, match=problem):
        restore(str(tmp_path / "there"))
    assert not any(reports.iterdir())


def test_no_backup_is_one_line(reports: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert re.fullmatch(r".*no backup of a run.*\n", capsys.readouterr().err)


def test_s3_holds_one_too(reports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    for package in ("s3fs", "moto", "flask_cors"):
        pytest.importorskip(package)
    with s3_server() as (_, port):
        line = Line(port)
        options = {"key": "a test", "secret": "a test", "endpoint_url": f"http://127.0.0.1:{line.port}"}
        monkeypatch.setitem(fsspec.config.conf, "s3", options)
        monkeypatch.setattr(remote, "RETRY_SECONDS", (0.0,) * 3)
        try:
            run = opened(f"s3://{BUCKET}/safe")
            trained(run, 5)
            before = tree(run.folder)
            shutil.rmtree(run.folder)
            folder = restore(f"s3://{BUCKET}/safe/lost")
            assert tree(folder) == {name: data for name, data in before.items() if name not in backups.LEFT_OUT}
        finally:
            line.close()
