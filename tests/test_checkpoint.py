"""Checkpoints: their format, saving in the background, crashes at every point, damage, retention, full disks."""

import contextlib
import functools
import itertools
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from matrixlib.config import CheckpointConfig
from matrixlib.engine import checkpoint
from matrixlib.engine.checkpoint import (
    CheckpointError,
    Checkpoints,
    CheckpointSchedule,
    CheckpointWarning,
    DamagedCheckpoint,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


def tensors(seed: int) -> checkpoint.Tensors:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 3, generator=generator)
    return {
        "model": {"weight": weight, "bias": torch.randn(3, generator=generator)},
        "optimiser": {"step": torch.tensor(float(seed)), "exp_avg": weight * 2},
    }


def save(store: Checkpoints, *steps: int, best: float | None = None) -> None:
    for step in steps:
        store.save(step, tensors(step), {"cursor": step}, best=best, wait=True)


def write(folder: Path, tensors: Any, state: Any, compress: int = 0) -> Path:
    """One checkpoint, of step 7."""
    folder.mkdir(parents=True)
    checkpoint.write(folder, 7, checkpoint.host_copies(tensors), state, compress=compress)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def newest_step(folder: Path) -> int:
    """As a fresh process would find it."""
    found = Checkpoints(folder, 2).newest()
    assert torch.equal(found.tensors["model"]["weight"], tensors(found.step)["model"]["weight"])
    assert found.state == {"cursor": found.step}
    return found.step


def best_of(folder: Path) -> tuple[int, float, str]:
    found = Checkpoints(folder, 2).best
    assert torch.equal(checkpoint.read(found.path).tensors["model"]["weight"], tensors(found.step)["model"]["weight"])
    return found.step, found.value, found.path.name


def reseal(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a state.json, with a checksum that fits, as anybody can compute it."""
    data = json.loads((path / "state.json").read_bytes())
    del data["sha256"]
    change(data)
    (path / "state.json").write_bytes(checkpoint._seal(data))


# The format


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_same(found: checkpoint.Tensors, expected: checkpoint.Tensors) -> None:
    assert {g: set(m) for g, m in found.items()} == {g: set(m) for g, m in expected.items()}
    for group, members in expected.items():
        for name, tensor in members.items():
            back = found[group][name]
            assert (back.dtype, back.shape, bits(back)) == (tensor.dtype, tensor.shape, bits(tensor))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
SHAPES = [(), (0,), (3,), (2, 0, 3), (4, 3), (2, 3, 4, 5)]


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=3), st.text(min_size=1), st.sampled_from([0, 1, 3]))
def test_round_trip(room: Path, state: Any, name: str, compress: int) -> None:
    values = [(torch.randn(shape) * 100).to(dtype) for shape in SHAPES for dtype in DTYPES]
    values += [value.mT for value in values if value.ndim > 1]
    base = torch.arange(12.0).reshape(3, 4)
    values += [base, base, base[1], base[:, 2]]  # shared memory is stored for each name
    tensors = {"model": {f"{name}{i}": value for i, value in enumerate(values)}, "ema": {}}
    path = write(Path(tempfile.mkdtemp(dir=room)) / "step_00000007", tensors, state, compress)
    found = checkpoint.read(path)
    assert (found.step, found.path, found.state) == (7, path, state)
    assert_same(found.tensors, tensors)
    if not compress:  # the library reads the files too
        assert_same({"model": safetensors.torch.load_file(path / "model.safetensors")}, {"model": tensors["model"]})


def test_compressed_files_are_smaller_and_named_so(tmp_path: Path) -> None:
    """And a run may begin or end to compress."""
    tensors = {"model": {"w": torch.arange(100_000)}}
    path = write(tmp_path / "a", tensors, {"loss": math.nan}, compress=3)
    file = path / "model.safetensors.zst"
    assert names(path) == ["model.safetensors.zst", "state.json"]
    assert file.stat().st_size < 400_000
    assert_same({"model": safetensors.torch.load(zstandard.decompress(file.read_bytes()))}, tensors)
    for compress in (0, 3, 0):
        save(Checkpoints(tmp_path / "run", 2, compress), 200)
        assert newest_step(tmp_path / "run") == 200


def test_a_newer_schema_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SCHEMA", 7)
    newer = write(tmp_path / "b", {}, {})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"b has checkpoint schema 7, .* reads schema 2: take") as caught:
        checkpoint.read(newer)
    assert not isinstance(caught.value, DamagedCheckpoint), "falling back would lose its work"


def test_what_cannot_be_stored_is_refused_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, 2)
    with pytest.raises(TypeError, match="set is not JSON"):
        store.save(1, {}, {"a": {1, 2}})
    with pytest.raises(TypeError, match="Tensor is not JSON"):
        store.save(1, {}, {"rng": torch.zeros(2)})
    with pytest.raises(ValueError, match="cannot be the best"):
        store.save(1, {}, {}, best=math.nan)
    store.join()
    assert names(tmp_path) == []


# In the background


class Slow:
    """Holds every write until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.started, self.threads = threading.Event(), 0, set[str]()
        write = checkpoint.write

        def wrapped(*args: Any) -> None:
            self.started += 1
            self.threads.add(threading.current_thread().name)
            assert self.go.wait(30)
            write(*args)

        monkeypatch.setattr(checkpoint, "write", wrapped)


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    store = Checkpoints(tmp_path, 2)
    current, state = tensors(1), {"cursor": 1, "list": [1, {"a": 2}]}
    path = store.save(1, current, state)
    assert not path.exists()
    for members in current.values():  # training goes on
        for tensor in members.values():
            tensor.add_(1)
    state["list"][1]["a"] = 3  # type: ignore[index]
    second = threading.Thread(target=store.save, args=(2, tensors(2), {"cursor": 2}))
    second.start()
    second.join(0.3)
    assert (second.is_alive(), slow.started) == (True, 1), "one is in flight"
    slow.go.set()
    second.join()
    assert store.steps() == [1, 2]  # waits for it
    found = checkpoint.read(path)
    assert found.state == {"cursor": 1, "list": [1, {"a": 2}]}
    assert_same(found.tensors, tensors(1))
    assert threading.current_thread().name not in slow.threads
    assert len(slow.threads) == 1


READERS: dict[str, Any] = {
    "best": lambda store: store.best is not None,
    "steps": lambda store: store.steps() == [1],
    "pick": lambda store: store.pick("step_00000001").step == 1,
    "require_room": lambda store: store.require_room(1, 1) is None,  # else it meets files that are being renamed
    "discard_after": lambda store: store.discard_after(0) is None,
}


@pytest.mark.parametrize("reader", READERS)
def test_readers_wait_for_the_save_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    slow = Slow(monkeypatch)
    store = Checkpoints(tmp_path, 2)
    store.save(1, tensors(1), {"cursor": 1}, best=2.0)
    threading.Timer(0.2, slow.go.set).start()
    assert READERS[reader](store)
    assert names(tmp_path) == ["best_00000001" if reader == "discard_after" else "step_00000001"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: no space")])
@pytest.mark.parametrize("where", ["save", "join"])
def test_an_error_of_the_thread_comes_once_at_the_next_save_or_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    store = Checkpoints(tmp_path, 2)
    save(store, 1)

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", fail)
        store.save(2, tensors(2), {"cursor": 2})
        found = store.newest()  # a reader can do with what there is
        assert found.step == 1
        with pytest.raises(CheckpointError, match=r"step_00000002 .* step_00000001 is untouched") as caught:
            _ = store.join() if where == "join" else store.save(3, tensors(3), {"cursor": 3})
    assert caught.value.__cause__ is error
    store.join()
    assert names(tmp_path) == ["step_00000001"]
    save(store, 3)
    assert store.steps() == [1, 3]


def test_a_process_that_ends_with_a_save_in_flight_finishes_it(tmp_path: Path) -> None:
    code = (
        "import pathlib, time, torch; from matrixlib.engine import checkpoint; write = checkpoint.write\n"
        "checkpoint.write = lambda *args: (time.sleep(0.5), write(*args))\n"
        f"checkpoint.Checkpoints(pathlib.Path({str(tmp_path)!r}), 2).save(1, {{'model': {{'w': torch.ones(3)}}}}, {{}})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert Checkpoints(tmp_path, 2).newest().tensors["model"]["w"].tolist() == [1, 1, 1]


# Crashes


class Killed(BaseException):
    """Stands for kill -9: no handler of the code under test may catch it."""


def survives(point: int, work: Callable[[], object]) -> bool:
    """Whether `work` is done before it would touch the disk for the n-th time; else it dies there."""
    calls = itertools.count(1)

    def guard(function: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) > point:
            raise Killed
        return function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        for module, name in ((os, "fsync"), (os, "replace"), (shutil, "rmtree"), (checkpoint, "_write_group")):
            patch.setattr(module, name, functools.partial(guard, getattr(module, name)))
        work()
        return True
    return False


@pytest.mark.parametrize("again", [False, True], ids=["new step", "step saved before"])
@pytest.mark.parametrize("mark", [False, True], ids=["plain", "best"])
def test_a_crash_at_any_point_leaves_a_loadable_checkpoint(tmp_path: Path, again: bool, mark: bool) -> None:
    point, done = 0, False
    while not done:
        folder = tmp_path / f"{point}"
        save(Checkpoints(folder, 2), 200, best=2.0)
        save(Checkpoints(folder, 2), 300 if again else 250)
        save(Checkpoints(folder, 2), 300 if again else 275, best=1.5)
        done = survives(point, functools.partial(save, Checkpoints(folder, 2), 300, best=1.0 if mark else None))
        newest = newest_step(folder)
        assert newest in ((200, 300) if again else (275, 300)), point
        step, value, _ = best_of(folder)
        if not again:  # the mark comes with its checkpoint, and the earlier one stays until then
            assert (step, value) == ((300, 1.0) if mark and newest == 300 else (275, 1.5)), point
        else:
            assert (step, value) in ([(300, 1.0), (300, 1.5)] if mark else [(300, 1.5)]), point
        kept = best_of(folder)[:2]
        save(Checkpoints(folder, 2), 400)  # and the run goes on, with nothing left over
        assert best_of(folder)[:2] == kept
        assert 2 <= len(names(folder)) <= 3
        assert not [name for name in names(folder) if name.endswith(".tmp")]
        point += 1
    assert point >= 10


@pytest.mark.parametrize("step", [100, 200])
def test_a_crash_at_any_point_of_a_rollback(tmp_path: Path, step: int) -> None:
    point, done = 0, False
    while not done:
        folder = tmp_path / f"{point}"
        for saved in (100, 200, 300, 400):
            save(Checkpoints(folder, 4), saved, best={100: 3.0, 300: 2.0}.get(saved))
        done = survives(point, functools.partial(Checkpoints(folder, 4).discard_after, step))
        assert newest_step(folder) >= step
        assert best_of(folder)[:2] == (300, 2.0)
        point += 1
    assert newest_step(folder) == step
    assert best_of(folder)[2] == "best_00000300"


# Damage


@functools.cache
def whole(folder: Path, compress: int) -> Path:
    return write(folder / f"whole{compress}", tensors(1), {"x": 1}, compress)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damage")


@settings(max_examples=300, deadline=None)
@given(data=st.data(), compress=st.sampled_from([0, 3]))
def test_a_flipped_bit_anywhere_and_a_file_cut_short_are_found(room: Path, data: st.DataObject, compress: int) -> None:
    path = whole(room, compress)
    file = data.draw(st.sampled_from(sorted(path.iterdir())))
    raw = file.read_bytes()
    if data.draw(st.integers(0, 9)) == 0:  # or cut short
        broken = bytearray(raw[: data.draw(st.integers(0, len(raw) - 1))])
    else:
        broken = bytearray(raw)
        where = data.draw(st.integers(0, len(raw) * 8 - 1))
        broken[where // 8] ^= 1 << where % 8
    file.write_bytes(broken)
    try:
        with pytest.raises(DamagedCheckpoint, match=file.name):
            checkpoint.read(path)
    finally:
        file.write_bytes(raw)
    assert_same(checkpoint.read(path).tensors, tensors(1))


def test_all_damaged_is_one_line_that_names_each_and_what_to_do(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path, 4), 100, 200, 300, 400)
    (tmp_path / "step_00000100" / "state.json").unlink()
    os.truncate(tmp_path / "step_00000200" / "model.safetensors", 10)
    (tmp_path / "step_00000300" / "optimiser.safetensors").unlink()
    os.replace(tmp_path / "step_00000400", tmp_path / "step_00000450")
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(tmp_path, 2).newest()
    text = str(caught.value)
    assert "\n" not in text
    assert "step_00000100: no state.json" in text
    assert "step_00000200: model.safetensors has 10 bytes" in text
    assert "step_00000300: optimiser.safetensors cannot be read (No such file" in text
    assert "step_00000450: its state.json is of step 400" in text
    assert "start a new run" in text


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was loaded",))


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb())
    save(Checkpoints(tmp_path, 2), 100)
    for name in ("step_00000200", "step_00000300"):
        shutil.copytree(tmp_path / "step_00000100", tmp_path / name)
    (tmp_path / "step_00000200" / "model.safetensors").write_bytes(bomb)
    (tmp_path / "step_00000300" / "state.json").write_bytes(bomb)
    (tmp_path / "step_00000400").mkdir()
    (tmp_path / "step_00000400" / "model.pt").write_bytes(bomb)
    (tmp_path / "step_00000500").write_bytes(bomb)
    with pytest.warns(CheckpointWarning, match=r"using step_00000100 .*step_00000400: no state\.json"):
        assert Checkpoints(tmp_path, 2).newest().step == 100
    with pytest.raises(DamagedCheckpoint, match=r"step_00000500: no state\.json"):
        checkpoint.read(tmp_path / "step_00000500")


def forge(path: Path, raw: bytes, **entry: int) -> None:
    """Put other bytes in the model's place, with checksums that agree."""
    (path / "model.safetensors.zst").write_bytes(raw)
    facts = {"sha256": checkpoint.hashlib.sha256(raw).hexdigest(), "bytes": len(raw), **entry}
    reseal(path, lambda data: data["groups"]["model"].update(facts))


def test_a_frame_is_never_unpacked_beyond_its_recorded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a", tensors(1), {}, compress=1)
    size = checkpoint.read_state(path)["groups"]["model"]["unpacked"]
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28))
    assert len(bomb) < 50_000
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    good = zstandard.ZstdCompressor().compress(bytes(size))
    # A frame that claims `size` bytes and holds more: its header, then the blocks of a larger one.
    larger = zstandard.ZstdCompressor().compress(os.urandom(size + 50))
    header, other = (zstandard.frame_header_size(frame) for frame in (good, larger))
    liar = good[:header] + larger[other:]
    for raw in (silent, good + good, good[:-3], liar, b"no frame at all", b""):
        forge(path, raw)
        with pytest.raises(DamagedCheckpoint, match=r"model\.safetensors\.zst cannot be decoded"):
            checkpoint.read(path)
    forge(path, good)
    with pytest.raises(DamagedCheckpoint, match=r"cannot be decoded"):  # not a safetensors file
        checkpoint.read(path)
    forge(path, bomb)
    monkeypatch.setattr(zstandard, "ZstdDecompressor", pytest.fail)
    with pytest.raises(DamagedCheckpoint, match=rf"claims {1 << 28} bytes, state\.json {size}"):
        checkpoint.read(path)


def test_no_more_is_unpacked_than_weights_can_be(tmp_path: Path) -> None:
    """2 kB that say they are 64 MiB of zeros."""
    bomb = {"model": {"w": torch.zeros(64 << 20, dtype=torch.uint8)}}
    path = write(tmp_path / "step_00000007", bomb, {}, compress=3)
    assert (path / "model.safetensors.zst").stat().st_size < 32_768
    with pytest.raises(DamagedCheckpoint, match=r"claims 67,108,\d+ bytes, which no weights of \d+,\d+ bytes have"):
        checkpoint.read(path)


CHANGES: list[Callable[[dict[str, Any]], object]] = [
    lambda data: data["groups"].update({"../../victim": data["groups"]["model"]}),
    lambda data: data["groups"].update({"zero": data["groups"]["model"] | {"bytes": 0}}),  # of which there is no end
    lambda data: data["groups"]["model"].pop("sha256"),
    lambda data: data.update(schema="new"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_strange_state_is_damage(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = write(tmp_path / "run" / "checkpoints" / "step_00000007", tensors(1), {})
    os.link(path / "model.safetensors", tmp_path / "run" / "victim.safetensors")
    (path / "zero.safetensors").symlink_to("/dev/zero")
    reseal(path, change)
    with pytest.raises(DamagedCheckpoint, match="step_00000007"):
        checkpoint.read(path)


# Retention, best, rollback


def test_newest_and_best_are_kept(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, 2)
    save(store, 100, best=1.5)
    save(store, 200, 300, 400)
    assert names(tmp_path) == ["step_00000100", "step_00000300", "step_00000400"]
    save(store, 500, best=1.25)
    save(store, 600)
    assert names(tmp_path) == ["step_00000500", "step_00000600"]
    again = Checkpoints(tmp_path, 2)  # a resumed run knows the best value
    assert (again.best.step, again.best.value) == (500, 1.25)
    assert again.pick("best").step == 500
    assert again.pick("newest").step == 600
    assert again.pick("step_00000500").step == 500
    with pytest.raises(CheckpointError, match="there are: best, newest, step_00000500, step_00000600"):
        again.pick("step_00000123")
    with pytest.raises(CheckpointError, match=r"no checkpoint '\.\./other/step_00000003'"):
        again.pick("../other/step_00000003")


def test_the_last_bests_and_those_of_every_so_many_updates_are_kept_too(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, 2, best=2, every=400)
    for step, best in {100: 3.0, 200: 2.0, 300: 1.0, 400: None, 500: None, 600: None}.items():
        save(store, step, best=best)
    assert names(tmp_path) == [f"step_00000{step}" for step in (200, 300, 400, 500, 600)]
    assert store.best.step == 300
    store.discard_after(100)  # both bests stay, as networks to use and not to go on from
    assert names(tmp_path) == ["best_00000200", "best_00000300"]
    save(store, 150, best=0.5)
    assert names(tmp_path) == ["best_00000300", "step_00000150"]


def test_when_a_checkpoint_is_due() -> None:
    by_updates = CheckpointSchedule(CheckpointConfig(interval=100, minutes=0, keep_every=250))
    due = [step for step in range(1, 501) if by_updates.due(step) and not by_updates.done(step)]
    assert due == [100, 200, 250, 300, 400, 500]
    late = CheckpointSchedule(CheckpointConfig(interval=100, minutes=1e-9))
    assert late.due(1), "the minutes are over"
    assert (late.due(100), late.by_clock) == (True, 1)
    assert not CheckpointSchedule(CheckpointConfig(interval=100, minutes=10)).due(99)


def test_a_damaged_one_does_not_count_as_kept(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, 2)
    save(store, 100, 200)
    os.truncate(tmp_path / "step_00000200" / "model.safetensors", 10)
    with pytest.warns(CheckpointWarning, match="using step_00000100 instead: step_00000200: model"):
        store.newest()
    save(store, 300)
    assert names(tmp_path) == ["step_00000100", "step_00000300"]


def test_rollback_never_resumes_what_it_left_and_keeps_the_best(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, 3)
    save(store, 100, best=2.0)
    save(store, 200, best=1.0)
    save(store, 300)
    store.discard_after(100)
    assert names(tmp_path) == ["best_00000200", "step_00000100"]
    assert newest_step(tmp_path) == 100
    assert store.pick("best").step == 200
    save(store, 200)  # another network of the same step is not the best
    assert names(tmp_path) == ["best_00000200", "step_00000100", "step_00000200"]
    assert best_of(tmp_path) == (200, 1.0, "best_00000200")
    save(store, 150, best=1.5)  # the mark made last counts, also with a smaller step or a worse value
    assert best_of(tmp_path) == (150, 1.5, "step_00000150")
    assert names(tmp_path) == ["step_00000100", "step_00000150"]
    reseal(tmp_path / "step_00000150", lambda data: data.update(best={"value": "low", "order": 1}))
    with pytest.warns(CheckpointWarning, match="step_00000150 cannot count as the best"):
        assert store.best.step == 100


# Full and read-only disks


def test_room_for_a_whole_run_is_looked_for_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five checkpoints at once: three newest, the best, the one being written; and one kept for good."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage(10**9, 0, 58 * 10**6))
    size = 9 * 10**6
    Checkpoints(tmp_path / "new" / "checkpoints", 3).require_room(size, 1000)
    with pytest.raises(CheckpointError, match=r"no room .* 6 checkpoints of 9\.0 MB .* 2\.3 MB more than"):
        Checkpoints(tmp_path, 3, every=600).require_room(size, 1000)
    Checkpoints(tmp_path, 3, 1, every=600).require_room(size, 1000)  # compressed: nobody knows
    save(Checkpoints(tmp_path, 3), 100)
    (tmp_path / "step_00000100" / "model.safetensors").write_bytes(bytes(3 * 10**6))
    Checkpoints(tmp_path, 3, every=600).require_room(size, 1000)  # what it holds already counts


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint step_00000001 to .*file"):
        Checkpoints(tmp_path / "file" / "checkpoints", 2).save(1, {}, {})
