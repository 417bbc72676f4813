"""The teacher's outputs beside the shards: what comes back, what they are of, and what survives kills and damage."""

import multiprocessing
import random
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chess_shards import batch_of, write
from networks import random_net
from test_chess_task import MANY_MOVES, positions
from test_distill import STUDENT, sharpened, teacher, trained

from matrixlib.data.catalogue import Catalogue
from matrixlib.data.reader import Sidecars
from matrixlib.data.shards import Shard, ShardError
from matrixlib.engine.task import Batch
from matrixlib.runs.run import Run, open_run
from matrixlib.tasks import load_config
from matrixlib.tasks.chess import records
from matrixlib.tasks.chess.distill import losses as soft
from matrixlib.tasks.chess.distill.teacher import ChessTeacher, sidecars
from matrixlib.tasks.chess.task import ChessTask


def rows_of(fens: list[str]) -> dict[str, np.ndarray]:
    batch = batch_of(fens, wdl=21845, result=0)
    weight = np.random.default_rng(0).integers(1, 9, len(batch["policy_index"]))
    return {**batch, "policy_weight": weight.astype("<u2")}


@pytest.fixture(scope="module")
def fens() -> list[str]:
    """Random positions, the one with 218 moves, and some without castling rights."""
    return [MANY_MOVES, *(board.fen() for board in positions(60, seed=4)), "8/P7/4k3/8/1p6/4K3/P3P3/8 w - - 0 60"]


@pytest.fixture
def folder(tmp_path: Path, fens: list[str]) -> Path:
    """A data set of two shards."""
    data = tmp_path / "data"
    big = [fens[k % len(fens)] for k in range(5000)]  # two blocks
    infos = [write(data, "a", rows_of(big)), write(data, "b", rows_of(fens), split="validation")]
    Catalogue(data).add(*infos)
    return data


def teacher_of(sha256: str = "ab" * 32, **model: Any) -> ChessTeacher:
    return ChessTeacher(sharpened(random_net(**model)), load_config("demo").teacher, sha256)  # type: ignore[attr-defined]


__all__ = ["teacher"]  # a fixture
TASK = ChessTask(load_config("demo", STUDENT))  # type: ignore[arg-type]


def make(folder: Path, teacher: ChessTeacher, split: str | None = None) -> dict[str, Path]:
    return dict(sidecars(teacher, TASK, folder, Catalogue(folder).shards(split)).paths)


def stored_records(path: Path) -> np.ndarray:
    return Shard(path, soft.LAYOUT).arrays["records"]


def prepared(rows: dict[str, np.ndarray], plain: bool = True) -> Batch:
    prepare = TASK.prepare_plain if plain else TASK.prepare
    return {name: torch.from_numpy(array) for name, array in prepare(rows, np.random.default_rng(0)).items()}


def log_p(batch: Batch) -> np.ndarray:
    ones = torch.ones(len(batch["pieces"]))
    return soft.softened(batch["teacher_policy"], batch["policy_index"], ones).numpy()


def test_what_is_stored_comes_back(folder: Path, fens: list[str]) -> None:
    teacher = teacher_of()
    side = stored_records(make(folder, teacher, "validation")["b.npz"])
    batch = prepared({**rows_of(fens), "sidecar": side})
    asked = teacher.query(batch)
    assert torch.equal(teacher(batch, 0.5)["teacher_policy"], batch["teacher_policy"]), "and is not asked for again"
    few = batch["policy_index"].ge(0).sum(1).numpy() <= soft.KEPT_MOVES
    assert 0 < few.sum() < len(few)
    ours, theirs = log_p(batch), log_p({**batch, **asked})
    np.testing.assert_allclose(ours[few], theirs[few], atol=0.02)  # float16 of about -10
    mass = np.abs(np.exp(ours) - np.exp(theirs)).sum(1) / 2
    assert mass[few].max() < 0.002
    assert mass.max() < 0.3, "moves beyond the 32nd share the rest alike"
    np.testing.assert_allclose(batch["teacher_wdl"].numpy(), asked["teacher_wdl"].numpy(), atol=1e-3)
    assert soft.RECORD.itemsize == 104


def test_mirrored_rows_get_the_mirrored_policy(folder: Path, fens: list[str]) -> None:
    side = stored_records(make(folder, teacher_of(), "validation")["b.npz"])
    rows = {**rows_of(fens), "sidecar": side}
    plain, mirrored = ({k: v.numpy() for k, v in prepared(rows, way).items()} for way in (True, False))
    moved = (plain["pieces"] != mirrored["pieces"]).any(1)
    assert moved.sum() >= 3
    for row in range(len(moved)):
        table = {int(i): p for i, p in zip(plain["policy_index"][row], plain["teacher_policy"][row], strict=True)}
        for index, value in zip(mirrored["policy_index"][row], mirrored["teacher_policy"][row], strict=True):
            own = int(records.mirror_index[index]) if moved[row] and index >= 0 else int(index)
            assert table[own] == value


def test_another_teacher_and_a_changed_shard_are_noticed(folder: Path, fens: list[str]) -> None:
    teacher, held_out = teacher_of(), partial(make, folder, split="validation")
    paths = held_out(teacher)
    before = {name: path.read_bytes() for name, path in paths.items()}
    times = {path: path.stat().st_mtime_ns for path in paths.values()}
    assert {path: path.stat().st_mtime_ns for path in held_out(teacher).values()} == times, "made once"
    paths["b.npz"].write_bytes(before["b.npz"][:-40])
    assert held_out(teacher)["b.npz"].read_bytes() == before["b.npz"], "one that cannot be opened is made anew"
    other = held_out(teacher_of("cd" * 32, channels=8))
    assert other["b.npz"] != paths["b.npz"]
    assert other["b.npz"].read_bytes() != before["b.npz"]
    catalogue = Catalogue(folder)
    catalogue.add(write(folder, "b", rows_of(fens[::-1]), split="validation"))
    assert held_out(teacher)["b.npz"].read_bytes() != before["b.npz"]
    write(folder, "b", rows_of(fens), split="validation")  # behind the catalogue's back, of the same size
    with pytest.raises(ShardError, match="changed since it was catalogued"):
        held_out(teacher)


def _making(folder: Path) -> None:
    make(folder, teacher_of())


def killed(folder: Path, wait: float) -> bool:
    """Whether a process that makes the cache was killed after so many seconds, rather than done."""
    process = multiprocessing.get_context("spawn").Process(target=_making, args=(folder,))
    process.start()
    while process.is_alive() and not (folder / f"teacher-{'ab' * 8}" / "lock").exists():
        time.sleep(0.001)
    time.sleep(wait)
    running = process.is_alive()
    process.kill()
    process.join()
    return running


@pytest.mark.soak
def test_killed_at_random_moments_it_ends_with_the_same_bytes(folder: Path) -> None:
    torch.set_num_threads(1)
    began = time.monotonic()
    expected = {name: path.read_bytes() for name, path in make(folder, teacher_of()).items()}
    seconds, rng, kills = time.monotonic() - began, random.Random(0), 0
    for _ in range(20):
        for path in (folder / f"teacher-{'ab' * 8}").iterdir():
            path.unlink()
        kills += killed(folder, rng.uniform(0, seconds))
        assert {name: path.read_bytes() for name, path in make(folder, teacher_of()).items()} == expected
    assert kills >= 10, "the others were done before"


def student(folder: Path, teacher: str, **options: Any) -> Run:
    data = {"source": str(folder), "workers": 0, "limit": 0}
    changes = {**STUDENT, "data": data, "teacher": {"network": teacher, **options}}
    return open_run("demo", run=f"student-{len(options)}", steps=9, overrides=changes)


def test_training_reads_the_cache_and_asks_nobody(
    folder: Path, teacher: str, monkeypatch: pytest.MonkeyPatch, reports: Path
) -> None:
    """A file that is damaged meanwhile is named, and not its shard, and recomputed when the run is opened again. As of
    shards no block is read before its rows are, so that opening costs nothing.
    """
    with closing(student(folder, teacher)) as run:
        live = trained(run, 3)
    with closing(student(folder, teacher, cache=True)) as run, monkeypatch.context() as patched:
        patched.setattr(ChessTeacher, "query", None)
        cached = trained(run, 3)
    ours, theirs = ([row["losses"]["teacher_policy"] for row in rows] for rows in (cached, live))
    assert ours == pytest.approx(theirs, rel=0.1), "float16, 32 moves, and mirrored rows"
    (path,) = folder.glob("teacher-*/a.npz.outputs")
    before = path.read_bytes()
    raw = bytearray(before)
    raw[4500 * soft.RECORD.itemsize] ^= 1
    path.write_bytes(raw)
    with closing(student(folder, teacher, cache=True)) as run:
        assert path.read_bytes() == raw
        with pytest.warns(UserWarning, match=r"shard a\.npz, block 1: what belongs to it in ") as warned:
            trained(run, 1)
        (text,) = [str(one.message) for one in warned if "damaged" in str(one.message)]
        assert f"{path} is damaged, and recomputed when the run is opened again; its rows are replaced" in text
    with closing(student(folder, teacher, cache=True)):
        assert path.read_bytes() == before
        assert not Sidecars.note(path).exists()
