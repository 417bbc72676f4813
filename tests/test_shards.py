"""Shards: round trip, mapping, checksums, clear errors, and writing that is whole or not at all."""

import io
import json
import mmap
import multiprocessing
import os
import pickle
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_shards import LAYOUT, META, RECORD, same, toy_batch

from matrixlib.data import shards
from matrixlib.data.shards import (
    BLOCK,
    DamagedBlock,
    Layout,
    Shard,
    ShardError,
    check,
    concat,
    file_hash,
    find_damage,
    read_info,
    select,
    write_shard,
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, shards.Batch]:
    """A shard of three blocks, the last of them short."""
    path, batch = tmp_path_factory.mktemp("shard") / "a.npz", toy_batch(2 * BLOCK + 100)
    write_shard(path, LAYOUT, batch, META)
    return path, batch


def bases(array: Any) -> list[object]:
    found: list[object] = []
    while array is not None:
        found.append(array)
        array = array.obj if isinstance(array, memoryview) else getattr(array, "base", None)
    return found


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 60), longest=st.integers(0, 5), seed=st.integers(0, 99), data=st.data())
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, count: int, longest: int, seed: int, data: st.DataObject
) -> None:
    path, batch = tmp_path_factory.mktemp("round") / "a.npz", toy_batch(count, seed=seed, longest=longest)
    write_shard(path, LAYOUT, batch, META)
    shard = Shard(path, LAYOUT)
    assert same(shard.gather(np.arange(count)), batch)
    indices = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=80)), np.int64)
    got = shard.gather(indices)
    check(got, LAYOUT)
    for i, index in enumerate(indices):  # the slow, obvious way
        a, b = batch["target_offset"][index : index + 2]
        c, d = got["target_offset"][i : i + 2]
        assert got["records"][i] == batch["records"][index]
        assert (got["target_index"][c:d] == batch["target_index"][a:b]).all()
        assert (got["target_weight"][c:d] == batch["target_weight"][a:b]).all()


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 50), max_size=5))
def test_concat_undoes_select(cuts: list[int]) -> None:
    batch, edges = toy_batch(50), [0, *sorted(cuts), 50]
    parts = [select(batch, np.arange(a, b), LAYOUT) for a, b in pairwise(edges)]
    assert same(concat(parts, LAYOUT), batch)
    assert len(concat([], LAYOUT)["records"]) == 0


def test_numpy_load_opens_it(written: tuple[Path, shards.Batch]) -> None:
    path, batch = written
    with np.load(path, allow_pickle=False) as archive:
        assert same({name: archive[name] for name in batch}, batch)
        assert archive["block_crc"].shape == (4, 3)
        meta = json.loads(archive["meta"].tobytes())
    assert meta["task"] == "toy"
    assert meta["split"] == "train"
    assert meta["created"] == META["created"]


def test_members_are_mapped_not_read(written: tuple[Path, shards.Batch]) -> None:
    """The trap: np.load(mmap_mode="r") of an NPZ reads whole members and maps none."""
    path, _ = written
    with np.load(path, mmap_mode="r") as archive:
        assert not any(isinstance(base, np.memmap | mmap.mmap) for base in bases(archive["records"]))
    for name, array in Shard(path, LAYOUT).arrays.items():
        assert any(isinstance(base, mmap.mmap) for base in bases(array)), name
        assert not array.flags.writeable
        assert array.ctypes.data % shards.ALIGN == 0, name


def test_same_data_and_meta_same_bytes(tmp_path: Path) -> None:
    one, two = (write_shard(tmp_path / name, LAYOUT, toy_batch(99), META) for name in ("a.npz", "b.npz"))
    assert one.sha256 == two.sha256 == file_hash(one.path)
    assert one.bytes == two.path.stat().st_size
    assert read_info(one.path) == one
    other = write_shard(tmp_path / "c.npz", LAYOUT, toy_batch(99), META | {"seed": 1})
    assert other.sha256 != one.sha256


def test_pickling_carries_no_data(written: tuple[Path, shards.Batch]) -> None:
    data = pickle.dumps(Shard(written[0], LAYOUT))
    assert len(data) < 1000
    shard = pickle.loads(data)  # noqa: S301
    for index in (-1, 2 * BLOCK + 100):
        with pytest.raises(IndexError, match="outside"):
            shard.gather(np.array([0, index]))
    error = pickle.loads(pickle.dumps(DamagedBlock("x.npz", 3, "records")))  # noqa: S301
    assert (error.block, error.member) == (3, "records")
    assert "x.npz: block 3 of 'records'" in str(error)


def flip(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.soak)])
def test_flipped_bits_are_detected_or_change_no_row(tmp_path: Path, count: int) -> None:
    path, batch, detected = tmp_path / "a.npz", toy_batch(BLOCK + 200), 0
    size = write_shard(path, LAYOUT, batch, META).bytes
    rng = np.random.default_rng(7)
    for i in range(count):  # a third each: the first headers, the directory at the end, anywhere
        start, stop = [(0, 600), (size - 4000, size), (0, size)][i % 3]
        bit = int(rng.integers(start * 8, stop * 8))
        flip(path, bit)
        try:
            assert same(Shard(path, LAYOUT).gather(np.arange(len(batch["records"]))), batch), bit
        except ShardError:
            detected += 1
        flip(path, bit)
    assert same(Shard(path, LAYOUT).gather(np.arange(len(batch["records"]))), batch)
    assert detected > count // 3


@pytest.mark.parametrize("member", ["records", "target_index", "target_weight", "target_offset"])
def test_damaged_block_is_named_and_others_still_serve(tmp_path: Path, member: str) -> None:
    path, batch = tmp_path / "a.npz", toy_batch(3 * BLOCK)
    write_shard(path, LAYOUT, batch, META)
    before = Shard(path, LAYOUT)
    array, start = before.arrays[member], BLOCK + 5
    if member in ("target_index", "target_weight"):
        start = int(batch["target_offset"][BLOCK + 5])
    address = array.ctypes.data - before.arrays["records"].ctypes.data + start * array.itemsize
    with zipfile.ZipFile(path) as archive:
        data = path.read_bytes().index(batch["records"][:2].tobytes())
        assert archive.testzip() is None
    flip(path, (data + address) * 8 + 1)
    shard = Shard(path, LAYOUT)
    with pytest.raises(DamagedBlock, match=f"a.npz: block 1 of '{member}'") as error:
        shard.gather(np.array([0, BLOCK, 2 * BLOCK]))
    assert error.value.block == 1
    rest = np.r_[0:BLOCK, 2 * BLOCK : 3 * BLOCK]
    assert same(shard.gather(rest), select(batch, rest, LAYOUT))
    with pytest.raises(DamagedBlock):  # and it is not forgotten
        shard.verify_block(1)
    assert find_damage(path) == member


def test_offsets_that_fall_or_leave_the_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with checksums that agree, offsets are not trusted."""
    monkeypatch.setattr(shards, "check", lambda *_: None)
    for name, values in {"fall": [0, 3, 1, 4], "below": [-1, 1, 2, 4], "above": [0, 9, 9, 4]}.items():
        batch = toy_batch(3, longest=0) | {"target_offset": np.array(values, "<i8")}
        batch |= {member: np.zeros(4, "<u2") for member in ("target_index", "target_weight")}
        write_shard(tmp_path / f"{name}.npz", LAYOUT, batch, META)
        shard = Shard(tmp_path / f"{name}.npz", LAYOUT)
        with pytest.raises(DamagedBlock, match="target_offset"):
            shard.verify_block(0)


@pytest.mark.parametrize("keep", [0, 1, 100, 5000, -1, -30])
def test_truncated(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.npz"
    write_shard(path, LAYOUT, toy_batch(500), META)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ShardError, match=r"a\.npz: .*; .*restore"):
        Shard(path, LAYOUT)


def test_missing_and_pointer(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with pytest.raises(ShardError, match="no such file"):
        Shard(path, LAYOUT)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ShardError, match="git lfs pull"):
        Shard(path, LAYOUT)


def test_foreign_npz(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, planes=np.zeros(3))
    with pytest.raises(ShardError, match="not a shard of ours"):
        Shard(path, LAYOUT)
    write_shard(path, LAYOUT, toy_batch(9), META)
    with np.load(path) as archive:
        arrays = dict(archive)
    np.savez_compressed(path, **arrays)
    with pytest.raises(ShardError, match="compressed"):
        Shard(path, LAYOUT)
    np.savez(path, **arrays)  # any writer of plain NPZ will do
    assert same(Shard(path, LAYOUT).gather(np.arange(9)), toy_batch(9))
    np.savez(path, **arrays | {"target_index": np.array([None, {}], object)})
    with pytest.raises(ShardError, match="'target_index' is not"):
        Shard(path, LAYOUT)
    np.savez(path, **arrays | {"target_index": arrays["target_index"][:-1]})
    with pytest.raises(ShardError, match="'target_index' is not"):
        Shard(path, LAYOUT)


def test_an_array_that_claims_more_than_its_file_takes_no_memory(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.arange(5, dtype=np.uint8))
    claim = array.getvalue().replace(b"(5,), }" + b" " * 12, b"(5000000000000,), }")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("meta.npy", claim)
    with pytest.raises(ShardError, match="buffer is smaller"):
        Shard(tmp_path / "a.npz", LAYOUT)


def test_other_layouts(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    write_shard(path, LAYOUT, toy_batch(9), META)
    for said, *other in (
        ("task 'toy', not 'other'", "other", 1, RECORD, LAYOUT.ragged),
        ("version 1, this program has 2; make the shards again", "toy", 2, RECORD, LAYOUT.ragged),
        ("version 1, this program has 0; update matrixlib", "toy", 0, RECORD, LAYOUT.ragged),
        ("fields are not those", "toy", 1, RECORD, {"target": {"index": np.dtype("<u2")}}),
    ):
        with pytest.raises(ShardError, match=said):
            Shard(path, Layout(*other))  # type: ignore[arg-type]


def test_layout_refuses_objects_and_big_endian() -> None:
    for dtype in ([("a", "O")], [("a", ">u2")]):
        with pytest.raises(ValueError, match="little-endian"):
            Layout("toy", 1, np.dtype(dtype), {})


def test_refuses_what_does_not_fit(tmp_path: Path) -> None:
    path, batch = tmp_path / "a.npz", toy_batch(9)
    bad = {
        "batch has": {k: v for k, v in batch.items() if k != "target_index"},
        "dtype": batch | {"target_index": batch["target_index"].astype(np.int32)},
        "rise": batch | {"target_offset": batch["target_offset"][:-1]},
        "items": batch | {"target_weight": batch["target_weight"][:-1]},
        "at least one": toy_batch(0),
    }
    for message, wrong in bad.items():
        with pytest.raises(ValueError, match=message):
            write_shard(path, LAYOUT, wrong, META)
    with pytest.raises(ValueError, match="lacks source, seed"):
        write_shard(path, LAYOUT, batch, {"generator": "toy", "split": "train"})
    with pytest.raises(ValueError, match="split must be"):
        write_shard(path, LAYOUT, batch, META | {"split": "test"})
    assert list(tmp_path.iterdir()) == []


def _die_before_replace(path: Path) -> None:
    os.replace = lambda *_: os._exit(9)  # type: ignore[assignment]
    write_shard(path, LAYOUT, toy_batch(100), META)


def test_killed_while_writing_leaves_no_shard(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    child = multiprocessing.get_context("spawn").Process(target=_die_before_replace, args=(path,))
    child.start()
    child.join(60)
    assert child.exitcode == 9
    assert not path.exists()
    assert list(tmp_path.glob("*.npz")) == []
    write_shard(path, LAYOUT, toy_batch(100), META)  # the next attempt clears what was left
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]
