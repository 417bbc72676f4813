"""The loader: the order, the same batches whatever the workers, damage, and errors that say what happened."""

import os
import re
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_shards import LAYOUT, META, Toy, process, toy_batch, toy_shards

from matrixlib.data import loader as loader_module
from matrixlib.data import reader as reader_module
from matrixlib.data.catalogue import Catalogue, ShardRow
from matrixlib.data.loader import Loader, Prepare, WorkerBatch, Workers, WorkerTraceback
from matrixlib.data.order import generator, merge_ranges
from matrixlib.data.reader import WHOLE, LoaderError, kept_rows
from matrixlib.data.shards import BLOCK, Batch, write_shard

COUNTS = [BLOCK + 900, 700, 2 * BLOCK + 5]
N = sum(COUNTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards")
    toy_shards(path, COUNTS)
    return path


def open_loader(data: Path | list[ShardRow], size: int = 1000, seed: int = 3, **chosen: Any) -> Loader:
    """A loader of a folder, or of rows of its catalogue, with the toy's `prepare`."""
    rows = Catalogue(data).shards() if isinstance(data, Path) else data
    return Loader(rows, LAYOUT, size, seed, chosen.pop("prepare", Toy().prepare), **chosen)


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        np.asarray(left[k]).tobytes() == np.asarray(right[k]).tobytes() for k in left
    )


def rows_of(loader: Loader, batches: range) -> np.ndarray:
    return np.concatenate([loader.batch(i)["row"] for i in batches])


@pytest.mark.parametrize("window", [0, 1, 2, 3, 100])
@pytest.mark.parametrize("size", [997, 2048])
def test_every_row_exactly_once_per_epoch(folder: Path, window: int, size: int) -> None:
    loader = open_loader(folder, size, window_blocks=window)
    assert loader.count == N
    assert loader.per_epoch == -(-N // size)
    stream = rows_of(loader, range(-(-3 * N // size)))
    epochs = [stream[e * N : (e + 1) * N] for e in range(3)]
    for epoch in epochs:
        assert (np.sort(epoch) == np.arange(N)).all()
    assert (epochs[0] != epochs[1]).any()
    other = rows_of(open_loader(folder, size, seed=4, window_blocks=window), range(3))
    assert (other != stream[: 3 * size]).any()
    phase = rows_of(open_loader(folder, size, phase=1, window_blocks=window), range(3))
    assert (phase != stream[: 3 * size]).any()


def test_window_reads_few_blocks_at_a_time(folder: Path) -> None:
    """A batch touches the blocks of a window or two; without a window it touches most blocks."""
    starts = np.concatenate([np.arange(a, a + n, BLOCK) for a, n in zip([0, 4996, 5696], COUNTS, strict=True)])
    narrow = open_loader(folder, 256, window_blocks=1).batch(2)["row"]
    wide = open_loader(folder, 256).batch(2)["row"]
    assert len(np.unique(np.searchsorted(starts, narrow, side="right"))) <= 2
    assert len(np.unique(np.searchsorted(starts, wide, side="right"))) >= 4
    assert (np.diff(narrow) < 0).sum() > 100  # and is shuffled inside


@settings(max_examples=100, deadline=None)
@given(
    shards=st.lists(st.tuples(st.integers(1, 50), st.sampled_from("abc")), min_size=1, max_size=8),
    limit=st.integers(0, 300),
)
def test_limit_takes_the_same_share_of_every_source(shards: list[tuple[int, str]], limit: int) -> None:
    counts, sources = zip(*shards, strict=True)
    kept, total = kept_rows(counts, sources, limit), sum(counts)
    assert sum(kept) == min(limit or total, total)
    for source in set(sources):
        own = [(k, n) for k, n, s in zip(kept, counts, sources, strict=True) if s == source]
        rows, have = map(sum, zip(*own, strict=True))
        assert abs(rows - sum(kept) * have / total) < 1
        before = np.cumsum([0, *(n for _, n in own)])
        expected = [min(max(rows - start, 0), n) for start, (_, n) in zip(before, own, strict=False)]
        assert [k for k, _ in own] == expected, "the first rows of a source"


def two_sources(folder: Path) -> list[ShardRow]:
    """Rows 0 to 5,999 of source "one" in two shards, one on either side of the 600 rows of source "two"."""
    for name, first, count, source in (("a", 0, 4000, "one"), ("b", 6000, 600, "two"), ("c", 4000, 2000, "one")):
        write_shard(folder / f"{name}.npz", LAYOUT, toy_batch(count, first), META | {"source": source})
    return Catalogue(folder).shards("train")


@pytest.mark.parametrize("window", [0, 1])
def test_weights_decide_about_each_batch_and_rows_come_round_in_each_source(tmp_path: Path, window: int) -> None:
    rows = two_sources(tmp_path)
    weights = {"one": 3.0, "two": 1.0}
    loader = open_loader(rows, 200, weights=weights, window_blocks=window)
    assert loader.count == 6600
    batches = [loader.batch(i)["row"] for i in range(40)]
    assert {int((batch >= 6000).sum()) for batch in batches} == {50}
    small = np.concatenate([batch[batch >= 6000] for batch in batches])
    for turn in range(3):
        assert (np.sort(small[turn * 600 : turn * 600 + 600]) == np.arange(6000, 6600)).all()
    large = np.concatenate([batch[batch < 6000] for batch in batches])
    assert (np.sort(large) == np.arange(6000)).all()
    assert open_loader(rows, 200, weights={"two": 1.0}).count == 600
    with pytest.raises(LoaderError, match="no healthy shard of source 'three'"):
        open_loader(rows, 200, weights={"one": 1, "three": 1})
    with pytest.raises(LoaderError, match="limit 1 leaves no row of source 'one'"):
        open_loader(rows, 200, weights={"one": 1, "two": 1}, limit=1)


def backwards(batch: Batch, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Views that torch cannot take as they are."""
    return {name: array[::-1] for name, array in Toy().prepare(batch, rng).items()}


def test_arrays_follow_their_rows(folder: Path) -> None:
    """Records and ragged members stay together across shards and shuffling, and views become contiguous."""
    whole = [toy_batch(n, seed=i) for i, n in enumerate(COUNTS)]
    slices = [(b["target_weight"], a, z) for b in whole for a, z in pairwise(b["target_offset"])]
    sums = np.array([weight[a:z].sum(dtype=np.int64) for weight, a, z in slices])
    pixels = np.concatenate([b["records"]["pixels"] for b in whole])
    batch = open_loader(folder, prepare=backwards).batch(5)
    assert (batch["sum"] == sums[batch["row"]]).all()
    assert (batch["pixels"] == pixels[batch["row"]]).all()
    assert all(array.flags.c_contiguous for array in batch.values())


RANGES = st.tuples(st.integers(0, 40), st.integers(1, 10)).map(lambda pair: (pair[0], sum(pair)))


@settings(max_examples=80, deadline=None)
@given(st.lists(RANGES, max_size=6))
def test_skipped_batches_are_left_out(folder: Path, skip: list[tuple[int, int]]) -> None:
    left = [i for i in range(100) if not any(a <= i < b for a, b in skip)]
    plain = open_loader(folder, 10)
    loader = plain.skipping(skip)
    assert [loader.unskipped_index(i) for i in range(30)] == left[:30]
    assert equal(loader.batch(7), plain.batch(left[7])), "and nothing else changes"
    with pytest.raises(ValueError, match="cannot skip"):
        merge_ranges([(3, 3)])


def test_random_streams_differ_and_repeat(folder: Path) -> None:
    """A generator held by the dataset would repeat in every worker and every epoch."""
    loader = open_loader(folder, 64, limit=64)
    noise = [loader.batch(i)["noise"].tobytes() for i in range(6)]  # each batch is one epoch
    assert len(set(noise)) == 6
    assert open_loader(folder, 64, limit=64).batch(4)["noise"].tobytes() == noise[4]
    assert open_loader(folder, 64, limit=64, phase=1).batch(4)["noise"].tobytes() != noise[4]
    assert open_loader(folder, 64, limit=64, seed=9).batch(4)["noise"].tobytes() != noise[4]
    assert generator(1, 2).random() == generator(1, 2).random() != generator(2, 1).random()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_same_bits_with_any_workers_and_from_any_start(folder: Path) -> None:
    count, skip = 9, ((4, 6),)
    reference = [open_loader(folder, skip=skip).batch(i) for i in range(count)]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for workers in (0, 1, 2, 4):
        loader = open_loader(folder, skip=skip, workers=workers)
        got = list(loader.batches(0, count))
        assert len(got) == count
        assert all(equal(a, b) for a, b in zip(got, reference, strict=True)), workers
    assert torch.equal(torch.get_rng_state(), before)  # the model's stream is not drawn from
    loader = open_loader(folder, skip=skip)
    for start in range(count):  # stop anywhere, go on
        assert all(equal(a, b) for a, b in zip(loader.batches(start), reference[start:], strict=False))
    workers_on = open_loader(folder, skip=skip, workers=1).batches(5)  # endless
    assert all(equal(a, b) for a, b in zip(islice(workers_on, 4), reference[5:], strict=True))


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "with batches that it has made ahead"])
@pytest.mark.slow
def test_killed_workers_are_started_again_and_no_batch_changes(folder: Path, tmp_path: Path, ahead: bool) -> None:
    """Batches that were made ahead lie in memory that only the worker could have handed over."""
    pid_file, said = tmp_path / "pid", list[str]()
    loader = open_loader(
        folder,
        workers=1 if ahead else 2,
        prefetch=2 if ahead else 1,
        prepare=Toy(pid_file=str(pid_file)).prepare,
        skip=[(3, 5)],
        on_loss=said.append,
    )
    iterator = loader.batches(2)
    got = [next(iterator)]
    first = int(pid_file.read_text())
    time.sleep(ahead)
    os.kill(first, signal.SIGKILL)
    while len(got) < 10 or not said:  # the other may make many before anybody sees that this one is gone
        got.append(next(iterator))
    whole = open_loader(folder, skip=[(3, 5)]).batches(2, 2 + len(got))
    assert all(equal(a, b) for a, b in zip(got, whole, strict=True))
    assert len(said) == 1
    assert re.search(r"started again at batch \d+, as one was gone; was it killed", said[0])
    assert int(pid_file.read_text()) != first
    iterator.close()  # type: ignore[attr-defined]


def test_workers_that_are_killed_too_often_are_an_error_not_a_hang(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "MAX_RESTARTS", 0)
    pid_file = tmp_path / "pid"
    iterator = open_loader(folder, workers=1, prefetch=1, prepare=Toy(pid_file=str(pid_file)).prepare).batches(0)
    next(iterator)
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    with pytest.raises(LoaderError, match=r"never came, as a worker was gone; was it killed.*fewer workers"):
        list(islice(iterator, 10))


def hang_once(flag: str, prepare: Prepare, batch: Batch, rng: np.random.Generator) -> Any:
    """`prepare`, but the first call of all, which says whose it is, does not end."""
    if not Path(flag).exists():
        Path(flag).write_text(str(os.getpid()))
        time.sleep(3600)
    return prepare(batch, rng)


def test_a_worker_that_hangs_is_ended_and_started_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag, said = tmp_path / "flag", list[str]()

    class Patient(Workers):
        """Starts of workers may take any time."""

        def take(self, timeout: float) -> WorkerBatch:
            until = time.monotonic() + 300
            while not flag.exists():
                assert time.monotonic() < until, "no worker has started"
                assert not self.futures[0].done(), f"it never came to a batch: {self.futures[0].exception()}"
                time.sleep(0.01)
            return super().take(0.0 if said else timeout)

    monkeypatch.setattr(loader_module, "Workers", Patient)
    prepare = partial(hang_once, str(flag), Toy().prepare)
    loader = open_loader(folder, workers=1, prefetch=1, prepare=prepare, timeout=2.0, on_loss=said.append)
    got = list(loader.batches(0, 6))
    assert all(equal(a, b) for a, b in zip(got, open_loader(folder).batches(0, 6), strict=True))
    assert "as one gave nothing for 2 s; is the disk slow, or data.timeout too short? use fewer workers" in said[0]
    assert loader.prefetch_stats()["prepare"] > 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(flag.read_text()), 0)


def test_workers_are_tried_before_they_are_needed(folder: Path) -> None:
    assert open_loader(folder).try_workers() == "", "there are none"
    assert open_loader(folder, 64, workers=1).try_workers() == ""
    stranger = open_loader(folder, 64, workers=1, prepare=process)
    assert "differs" in stranger.try_workers()
    assert {batch["threads"].unique().item() for batch in stranger.batches(0, 1)} == {1}
    offset = 5  # a cell's own function is sent by value
    local = open_loader(folder, 64, workers=1, prepare=lambda batch, rng: {"row": batch["records"]["row"] + offset})
    assert local.try_workers() == ""
    lock = threading.Lock()
    unsendable = open_loader(folder, 64, workers=1, prepare=lambda batch, rng: {"lock": lock})
    assert "cannot be sent" in unsendable.try_workers()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="page-locks memory")
def test_without_page_locked_memory_batches_come_all_the_same(folder: Path) -> None:
    said: list[str] = []
    got = list(open_loader(folder, pin=True, on_loss=said.append).batches(0, 3))
    assert all(equal(a, b) for a, b in zip(got, open_loader(folder).batches(0, 3), strict=True))
    assert len(said) == 1
    assert "not page-locked" in said[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_error_in_prepare_surfaces_with_its_cause(folder: Path, workers: int) -> None:
    fail_at = int(open_loader(folder).batch(3)["row"][7])
    iterator = open_loader(folder, workers=workers, prepare=Toy(fail_at).prepare).batches(2)
    next(iterator)
    with pytest.raises(LoaderError, match=f"batch 3 could not be made: KeyError: 'label of row {fail_at}'") as error:
        next(iterator)
    assert isinstance(error.value.__cause__, WorkerTraceback)
    assert "in prepare" in str(error.value.__cause__)


@pytest.mark.parametrize(
    "bad, message",
    [
        (lambda b: b["records"]["label"], "uint16"),
        (lambda b: [1.0] * len(b["records"]), "list"),
        (lambda b: b["target_weight"].astype(np.float32), "first size must be 10"),
    ],
)
def test_prepare_must_return_what_torch_can_slice(folder: Path, bad: Callable[[Batch], Any], message: str) -> None:
    with pytest.raises(LoaderError, match=message):
        open_loader(folder, 10, prepare=lambda b, rng: {"x": bad(b)}).batch(0)


def test_closing_ends_the_workers(folder: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    iterator = open_loader(folder, workers=1, prepare=Toy(pid_file=str(pid_file)).prepare).batches(0)
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 20
    while psutil.pid_exists(int(pid_file.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def damage(path: Path, *rows: int) -> None:
    """Flip a bit in these records of a shard."""
    with np.load(path) as archive:
        data, begin = bytearray(path.read_bytes()), archive["records"][:3].tobytes()
    for row in rows:
        data[data.index(begin) + row * LAYOUT.record.itemsize + 9] ^= 4
    path.write_bytes(data)


def test_damaged_blocks_are_replaced_alike_by_all(tmp_path: Path) -> None:
    """Blocks: a has 0, 1 (short); b has 0 (short); c has 0, 1, 2 (short). Bad: a/1, b/0, c/2."""
    toy_shards(tmp_path, COUNTS)
    rows = Catalogue(tmp_path).shards()
    for name, row in (("a", BLOCK + 10), ("b", 3), ("c", 2 * BLOCK + 1)):
        damage(tmp_path / f"{name}.npz", row)
    told: list[list[tuple[str, int]]] = []
    streams = []
    for workers in (0, 2):
        found: list[tuple[str, int]] = []
        loader = open_loader(rows, workers=workers, on_damage=lambda *facts, f=found: f.append(facts[:2]))
        assert loader.count == N
        streams.append(list(loader.batches(0, loader.per_epoch)))
        told.append(found)
    assert all(equal(a, b) for a, b in zip(*streams, strict=True))
    for found in told:
        assert sorted(found) == [("a.npz", 1), ("b.npz", 0), ("c.npz", 2)]
    got = np.concatenate([batch["row"].numpy() for batch in streams[0]])[:N]
    bad = np.r_[BLOCK : COUNTS[0] + 700, N - 5 : N]
    assert not np.isin(got, bad).any()
    repeats = np.bincount(got, minlength=N)
    assert repeats.max() <= 3  # spread over the next block, not one row again and again
    expected = np.ones(N, int)
    expected[bad] = 0
    expected[5696 : 5696 + 900] += 1  # rows of a/1 become those of c/0
    expected[5696 : 5696 + 700] += 1  # and those of b/0 too
    expected[:5] += 1  # c/2 wraps around to a/0
    assert (repeats == expected).all()


@pytest.mark.parametrize("limit", [0, 6000])
def test_rows_come_with_the_rows_before_them_in_their_shard(tmp_path: Path, limit: int) -> None:
    """Across blocks, not across shards; not of the damaged blocks a/0 and c/1, of which only rows after them tell."""
    toy_shards(tmp_path, COUNTS)
    rows, before = Catalogue(tmp_path).shards(), 7
    damage(tmp_path / "a.npz", BLOCK - 1)
    if not limit:
        damage(tmp_path / "c.npz", BLOCK + 10)
    ends = np.cumsum([0, *COUNTS])

    def lines(batch: Batch, rng: np.random.Generator) -> dict[str, np.ndarray]:
        told = np.concatenate([batch["records"][:, None], batch["before"]], axis=1)
        return {"row": told["row"], "pixels": told["pixels"]}

    streams = []
    for workers in (0, 2):
        loader = open_loader(rows, workers=workers, prepare=lines, before=before, limit=limit)
        streams.append(list(loader.batches(0, loader.per_epoch)))
    assert all(equal(a, b) for a, b in zip(*streams, strict=True))
    got, pixels = (np.concatenate([batch[name].numpy() for batch in streams[0]]) for name in ("row", "pixels"))
    bad = np.r_[0:BLOCK] if limit else np.r_[0:BLOCK, ends[2] + BLOCK : ends[2] + 2 * BLOCK]
    starts = np.r_[ends[:3], bad + 1]  # rows with nothing readable before them
    wanted = got[:, :1] - np.arange(before + 1)
    starts = np.sort(starts)
    known = wanted >= starts[np.searchsorted(starts, got[:, :1], side="right") - 1]
    assert not np.isin(got[:, 0], bad).any()
    assert (got == np.where(known, wanted, 0)).all()
    truth = np.concatenate([toy_batch(n, int(ends[i]), seed=i)["records"]["pixels"] for i, n in enumerate(COUNTS)])
    assert (pixels == np.where(known[..., None], truth[np.maximum(wanted, 0)], 0)).all()
    assert (known.sum(1) < before + 1).sum() >= (2 if limit else 3) * before
    after = np.arange(N) == BLOCK  # alone, so that nothing else finds the damage before it
    (batch,) = open_loader(rows, prepare=lines, before=before).only(after).sequential(1)
    assert batch["row"].tolist() == [[BLOCK, *[0] * before]]


def test_looking_at_records_reads_no_rows_before_them_and_no_targets(tmp_path: Path) -> None:
    count = BLOCK + 900
    write_shard(tmp_path / "a.npz", LAYOUT, toy_batch(count, longest=600), META)
    rows = Catalogue(tmp_path).shards()
    damage(tmp_path / "a.npz", BLOCK + 10)
    loader = open_loader(rows, before=100)
    tracemalloc.start()
    found = loader.of_records(lambda records: records["row"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.tolist() == [*range(BLOCK), *range(900)]
    assert peak < 300 * count, "a row has 15 bytes, 1,200 of targets, and 1,500 before it"


def test_nothing_sound_left(tmp_path: Path) -> None:
    toy_shards(tmp_path, [100])
    rows = Catalogue(tmp_path).shards()
    damage(tmp_path / "a.npz", 0)
    with pytest.raises(LoaderError, match="all 1 blocks are damaged"):
        open_loader(rows).batch(0)
    with pytest.raises(LoaderError, match="no healthy shard"):
        open_loader([])


@pytest.mark.parametrize("flips", [60, pytest.param(1000, marks=pytest.mark.soak)])
def test_flipped_bits_never_reach_a_batch(tmp_path: Path, flips: int) -> None:
    """Detected, or every batch is equal bit for bit; where rows are replaced, they are rows of the data."""
    path = tmp_path / "a.npz"
    toy_shards(tmp_path, [BLOCK + 50, 60])
    shards = Catalogue(tmp_path).shards()

    def batches(**chosen: Any) -> list[dict[str, np.ndarray]]:
        loader = open_loader(shards, 1403, **chosen)
        return [loader.batch(i) for i in range(3)]  # just more than an epoch: every row

    def rows(batches: list[dict[str, np.ndarray]]) -> set[Any]:
        names = ("row", "sum", "pixels")
        columns = [[value.tobytes() for batch in batches for value in batch[name]] for name in names]
        return set(zip(*columns, strict=True))

    clean, whole, rng, detected = batches(), path.read_bytes(), np.random.default_rng(11), 0
    for bit in rng.integers(0, len(whole) * 8, flips):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << int(bit % 8)
        path.write_bytes(data)
        found: list[Any] = []
        got = batches(on_damage=lambda *facts, f=found: f.append(facts))
        if found:
            detected += 1
            assert rows(got) <= rows(clean), bit
        else:
            assert all(equal(a, b) for a, b in zip(got, clean, strict=True)), bit
    assert detected > flips / 2


def test_a_shard_that_cannot_be_opened_is_replaced_like_damaged_blocks(tmp_path: Path) -> None:
    """Its header is bad or it has gone since the catalogue was read: training goes on, and it is said once."""
    toy_shards(tmp_path, [300, 200, 300])
    rows = Catalogue(tmp_path).shards("train")
    (tmp_path / "a.npz").write_bytes(b"PK" + bytes((tmp_path / "a.npz").stat().st_size - 2))
    (tmp_path / "c.npz").unlink()
    found: list[tuple[str, int]] = []
    loader = open_loader(rows, 100, on_damage=lambda *facts: found.append(facts[:2]))
    got = rows_of(loader, range(8))
    assert set(got.tolist()) == set(range(300, 500))
    assert sorted(found) == [("a.npz", WHOLE), ("c.npz", WHOLE)]
    with_workers = open_loader(rows, 100, workers=1)
    assert all(equal(a, loader.batch(i)) for i, a in enumerate(with_workers.batches(0, 3)))
    (tmp_path / "b.npz").unlink()
    with pytest.raises(LoaderError, match=r"all 3 blocks are damaged, the last one: .*no such file"):
        open_loader(rows, 100).batch(0)


@pytest.mark.parametrize("window", [0, 1])
def test_a_damaged_block_of_a_source_is_replaced_by_rows_of_it(tmp_path: Path, window: int) -> None:
    """Else one flipped bit would overturn the weights."""
    rows = two_sources(tmp_path)
    damage(tmp_path / "a.npz", 6)
    weights = {"one": 3.0, "two": 1.0}
    loader = open_loader(rows, 200, weights=weights, window_blocks=window)
    batches = [loader.batch(i)["row"] for i in range(40)]
    assert {int((batch >= 6000).sum()) for batch in batches} == {50}
    assert min(int(batch.min()) for batch in batches) >= 4000
    (tmp_path / "b.npz").unlink()
    with pytest.raises(LoaderError, match="all 1 blocks of source 'two' are damaged"):
        open_loader(rows, 200, weights=weights).batch(0)


def test_a_file_that_changes_after_its_check_is_replaced_and_no_wild_pointer(tmp_path: Path) -> None:
    toy_shards(tmp_path, [300, 200])
    said: list[str] = []
    loader = open_loader(tmp_path, 100, 0, on_damage=lambda name, block, why: said.append(why))
    rows_of(loader, range(5))  # every block has been checked
    offsets = toy_batch(300)["target_offset"]
    with open(tmp_path / "a.npz", "r+b") as file:
        data = file.read()
        file.seek(data.index(offsets.tobytes()) + 8 * 100)
        file.write(np.array([2**40, -(2**40)], "<i8").tobytes())
    got = rows_of(loader, range(5, 10))
    assert len(said) == 1
    assert "target_offset" in said[0]
    assert got.min() >= 300


def read_epoch(folder: Path, soft: int, hard: int, answer: Path) -> None:
    """In a process of its own, with these limits of open files: the different rows of an epoch, or its error."""
    import resource  # Windows has none, and no forkserver

    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard or resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    found: list[Any] = []
    try:
        loader = open_loader(folder, 100, on_damage=lambda *facts: found.append(facts))
        answer.write_text(f"{len(np.unique(rows_of(loader, range(loader.per_epoch))))} rows, {len(found)} damaged")
    except LoaderError as error:
        answer.write_text(str(error))


def test_too_few_open_files_are_no_damage(tmp_path: Path, forkserver: Any) -> None:
    """Each open shard holds a file: a soft limit is raised, and a hard one is no damage."""
    for i in range(150):
        write_shard(tmp_path / f"{i:03d}.npz", LAYOUT, toy_batch(4, 4 * i), META)

    def limited(soft: int, hard: int) -> str:
        process = forkserver.Process(target=read_epoch, args=(tmp_path, soft, hard, tmp_path / "answer"))
        process.start()
        process.join()
        return (tmp_path / "answer").read_text()

    assert limited(100, 0) == "600 rows, 0 damaged"
    assert re.search("npz cannot be opened: .*Too many open files.*; raise the limit", limited(100, 120))


def read_much(folder: Path, answer: Path) -> None:
    """In a process of its own: the memory before and after all of a folder has been read, of which 4 MB may stay."""
    reader_module.RESIDENT_BYTES = 2**22
    loader = open_loader(folder, 4096)
    rows_of(loader, range(2))
    before = psutil.Process().memory_info().rss
    rows_of(loader, range(2, loader.per_epoch))
    answer.write_text(str(psutil.Process().memory_info().rss - before))


def test_memory_does_not_grow_with_the_data(tmp_path: Path, forkserver: Any) -> None:
    """Pages of the files included."""
    toy_shards(tmp_path, [400_000] * 4)
    process = forkserver.Process(target=read_much, args=(tmp_path, tmp_path / "answer"))
    process.start()
    process.join()
    size = sum(path.stat().st_size for path in tmp_path.glob("*.npz"))
    assert size > 50e6
    assert int((tmp_path / "answer").read_text()) < size / 3


def test_sequential(folder: Path) -> None:
    loader = open_loader(folder)
    batches = list(loader.sequential(4000))
    assert [len(batch["row"]) for batch in batches] == [4000, 4000, 4000, N - 12000]
    assert (np.concatenate([batch["row"] for batch in batches]) == np.arange(N)).all()
    again = list(loader.sequential(4000))
    assert all(equal(a, b) for a, b in zip(batches, again, strict=True))
    assert not torch.equal(batches[0]["noise"], batches[1]["noise"])


def test_a_long_pass_over_rows_is_made_by_the_workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = list(open_loader(folder).sequential(4000))
    alone = open_loader(folder, workers=1)
    assert all(equal(a, b) for a, b in zip(alone.sequential(4000), here, strict=True))
    assert alone.prefetch_stats() == {}, "not worth starting workers"
    monkeypatch.setattr(loader_module, "MIN_WORKER_BATCHES", 4)
    assert len(alone.sequential(4000)) == 4
    assert all(equal(a, b) for a, b in zip(alone.sequential(4000), here, strict=True))
    assert alone.prefetch_stats()["prepare"] > 0


def test_sequential_sample(folder: Path) -> None:
    def sample(size: int, **chosen: Any) -> np.ndarray:
        return np.concatenate([b["row"] for b in open_loader(folder, **chosen).sequential(64, size)])

    chosen = sample(500)
    assert len(np.unique(chosen)) == 500
    assert (np.diff(chosen) > 0).all()
    assert chosen.max() > N - N / 20  # from everywhere, not the first ones
    assert (sample(500) == chosen).all()
    assert (sample(500, phase=2) == chosen).all()  # comparable over phases
    assert not np.array_equal(sample(500, seed=8), chosen)
    assert len(sample(N + 10)) == N
