"""The format of one checkpoint: round trip, compression, and every kind of damage."""

import functools
import json
import math
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from matrixlib.engine.storage import CheckpointError, DamagedCheckpoint

from matrixlib.engine import storage

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


def write(folder: Path, tensors: Any, state: Any, compress: int = 0, **more: Any) -> Path:
    folder.mkdir(parents=True)
    storage.write(folder, 7, storage.host_copies(tensors), state, compress=compress, **more)
    return folder


def small() -> storage.Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        "model": {"weight": torch.randn(5, 3, generator=generator), "flag": torch.tensor([True, False])},
        "optimiser": {"step": torch.tensor(3.0), "exp_avg": torch.randn(5, 3, generator=generator)},
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_same(found: storage.Tensors, expected: storage.Tensors) -> None:
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
TENSOR = st.tuples(
    st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4), st.integers(0, 2**31), st.booleans()
)


def make(spec: tuple[torch.dtype, list[int], int, bool]) -> torch.Tensor:
    dtype, shape, seed, transpose = spec
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 100).to(dtype)
    return tensor.mT if transpose and tensor.ndim > 1 else tensor


@settings(max_examples=60, deadline=None)
@given(
    specs=st.dictionaries(
        st.sampled_from(["model", "ema", "optimiser"]), st.dictionaries(st.text(min_size=1), TENSOR, max_size=3)
    ),
    state=st.dictionaries(st.text(), JSON, max_size=3),
    compress=st.sampled_from([0, 1, 3]),
)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, specs: Any, state: Any, compress: int) -> None:
    tensors = {group: {name: make(spec) for name, spec in members.items()} for group, members in specs.items()}
    path = write(tmp_path_factory.mktemp("run") / "step_00000007", tensors, state, compress)
    found = storage.read(path)
    assert (found.step, found.path, found.state) == (7, path, state)
    assert_same(found.tensors, tensors)
    if not compress:  # the library reads the files too
        for group, members in tensors.items():
            assert_same({group: safetensors.torch.load_file(path / f"{group}.safetensors")}, {group: members})


def test_random_states_and_numbers_that_are_not_finite_come_back(tmp_path: Path) -> None:
    numpy_rng, python_rng, torch_rng = (np.random.default_rng(5), random.Random(5), torch.Generator().manual_seed(5))
    state = {
        "numpy": numpy_rng.bit_generator.state,
        "python": python_rng.getstate(),
        "best": math.inf,
        "loss": [math.nan],
    }
    state = json.loads(json.dumps(state))
    path = write(tmp_path / "a", {"rng": {"cpu": torch_rng.get_state()}}, state)
    expected = numpy_rng.random(), python_rng.random(), torch.rand(1, generator=torch_rng).item()
    found = storage.read(path)
    numpy_rng.bit_generator.state = found.state["numpy"]
    version, words, gauss = found.state["python"]
    python_rng.setstate((version, tuple(words), gauss))
    torch_rng.set_state(found.tensors["rng"]["cpu"])
    assert (numpy_rng.random(), python_rng.random(), torch.rand(1, generator=torch_rng).item()) == expected
    assert found.state["best"] == math.inf
    assert math.isnan(found.state["loss"][0])


def test_compressed_files_are_smaller_and_named_so(tmp_path: Path) -> None:
    tensors = {"model": {"w": torch.arange(100_000)}}
    path = write(tmp_path / "a", tensors, {}, compress=3)
    file = path / "model.safetensors.zst"
    assert sorted(p.name for p in path.iterdir()) == ["model.safetensors.zst", "state.json"]
    assert file.stat().st_size < 400_000
    assert_same({"model": safetensors.torch.load(zstandard.decompress(file.read_bytes()))}, tensors)


def test_a_newer_schema_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "SCHEMA", 7)
    newer = write(tmp_path / "b", {}, {})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"b has checkpoint schema 7, .* reads schema 2: take") as caught:
        storage.read(newer)
    assert not isinstance(caught.value, DamagedCheckpoint), "falling back would lose its work"


# Damage


@functools.cache
def whole(folder: Path, compress: int) -> Path:
    return write(folder / f"whole{compress}", small(), {"x": 1}, compress)


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
            storage.read(path)
    finally:
        file.write_bytes(raw)
    assert_same(storage.read(path).tensors, small())


def forge(path: Path, raw: bytes, **entry: int) -> None:
    """Put other bytes in the model's place, with checksums that agree."""
    (path / "model.safetensors.zst").write_bytes(raw)
    data = storage.read_state(path)
    del data["sha256"]
    data["groups"]["model"] |= {"sha256": storage.hashlib.sha256(raw).hexdigest(), "bytes": len(raw), **entry}
    (path / "state.json").write_bytes(storage._seal(data))


def test_a_frame_is_never_unpacked_beyond_its_recorded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a", small(), {}, compress=1)
    size = storage.read_state(path)["groups"]["model"]["unpacked"]
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
            storage.read(path)
    forge(path, good)
    with pytest.raises(DamagedCheckpoint, match=r"cannot be decoded"):  # not a safetensors file
        storage.read(path)
    forge(path, bomb)
    monkeypatch.setattr(zstandard, "ZstdDecompressor", pytest.fail)
    with pytest.raises(DamagedCheckpoint, match=rf"claims {1 << 28} bytes, state\.json {size}"):
        storage.read(path)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was loaded",))


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb())
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.pt").write_bytes(bomb)
    (tmp_path / "loose.pt").write_bytes(bomb)
    with pytest.raises(DamagedCheckpoint, match=r"no state\.json .* model\.pt: pickles are never loaded\)"):
        storage.read(tmp_path / "foreign")
    with pytest.raises(DamagedCheckpoint, match=r"loose\.pt: pickles are never loaded"):
        storage.read(tmp_path / "loose.pt")
    path = write(tmp_path / "a", small(), {})
    for name in ("model.safetensors", "state.json"):
        (path / name).write_bytes(bomb)
        with pytest.raises(DamagedCheckpoint, match=name):
            storage.read(path)


# What somebody else may have put into a checkpoint: its checksums fit, as anybody can compute them


def reseal(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((path / "state.json").read_bytes())
    del data["sha256"]
    change(data)
    (path / "state.json").write_bytes(storage._seal(data))


def test_no_more_is_unpacked_than_weights_can_be(tmp_path: Path) -> None:
    """8 kB that say they are 256 MiB of zeros."""
    model = torch.nn.Linear(64, 64)
    bomb = {"model": {"w": torch.zeros(256 << 20, dtype=torch.uint8)}}
    path = write(tmp_path / "step_00000007", bomb, {}, compress=3)
    assert (path / "model.safetensors.zst").stat().st_size < 32_768
    with pytest.raises(DamagedCheckpoint, match=r"claims 268,435,\d+ bytes, of which this network needs 16,\d+,\d+ at"):
        storage.read(path, storage.largest_group(model))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["groups"].update({"../../victim": data["groups"]["model"]}),
        lambda data: data["groups"]["model"].pop("sha256"),
        lambda data: data.update(groups=[]),
        lambda data: data.pop("state"),
        lambda data: data.update(schema="new"),
        lambda data: data.pop("schema"),
        lambda data: data.pop("step"),
    ],
)
def test_a_strange_state_is_damage(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = write(tmp_path / "run" / "checkpoints" / "step_00000007", small(), {})
    os.link(path / "model.safetensors", tmp_path / "run" / "victim.safetensors")
    reseal(path, change)
    with pytest.raises(DamagedCheckpoint, match="step_00000007"):
        storage.read(path)


def test_a_file_without_an_end_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "step_00000007", small(), {})
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to("/dev/zero")
    reseal(path, lambda data: data["groups"]["model"].update(bytes=0))
    with pytest.raises(DamagedCheckpoint, match="checksum"):
        storage.read(path)
