"""Data sets elsewhere: the same batches as from a copy, whatever the connection, the source and the cache do."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from s3_server import BUCKET, Line, s3_server, upload
from toy_shards import LAYOUT, META, Toy, toy_batch, toy_shards

from matrixlib.config import DataConfig
from matrixlib.data import remote
from matrixlib.data.catalogue import NAME, Catalogue, CatalogueError, _values
from matrixlib.data.loader import Loader, LoaderError
from matrixlib.data.remote import Remote, RemoteError, download_catalogue, local_path
from matrixlib.data.shards import Shard, ShardError, write_shard
from matrixlib.runs import run as runs
from matrixlib.tasks.chess.importers.audit import sample
from matrixlib.tasks.chess.importers.import_files import data_folder
from matrixlib.tasks.chess.records import LAYOUT as CHESS
from matrixlib.tasks.chess.stockfish.sample import unpack_sample
from matrixlib.tasks.spec import given_folder

fsspec = pytest.importorskip("fsspec")
for package in ("s3fs", "moto", "flask_cors"):
    pytest.importorskip(package)

COUNTS = [9000, 500, 12288]  # 3 + 1 + 3 blocks
GIB = 2**30


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Any, int]]:
    with s3_server() as running:
        yield running


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of toy shards with two sources."""
    folder = tmp_path_factory.mktemp("local")
    infos = toy_shards(folder, COUNTS[:2])
    other = write_shard(folder / "other.npz", LAYOUT, toy_batch(COUNTS[2], 9500, 7), META | {"source": "other"})
    Catalogue(folder).add(*infos, other)
    return folder


@pytest.fixture(scope="module")
def way(server: tuple[Any, int]) -> Iterator[Line]:
    line = Line(server[1])
    yield line
    line.close()


@pytest.fixture
def line(way: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    """The way to the server, a cache of the test's own, and no waiting between tries."""
    options = {"key": "a test", "secret": "a test", "endpoint_url": f"http://127.0.0.1:{way.port}"}
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    monkeypatch.setenv("MATRIXLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "RETRY_SECONDS", (0.0,) * 3)
    way.cut, way.flip, way.down = 0, 0, False
    way.requests.clear()
    return way


@pytest.fixture
def url(server: tuple[Any, int], line: Line, local: Path, request: pytest.FixtureRequest) -> str:
    """The local folder, uploaded for this test."""
    return upload(server[0], local, re.sub(r"\W", "-", request.node.name))


def shards_of(url: str, cache: float = 1.0) -> list[Any]:
    return Catalogue(download_catalogue(url, cache)).shards("train")


def loader(shards: list[Any], **options: Any) -> Loader:
    return Loader(shards, LAYOUT, 256, 3, Toy().prepare, **options)


def batches(loader: Loader, count: int = 20) -> list[bytes]:
    return [b"".join(batch[name].numpy().tobytes() for name in batch) for batch in loader.batches(0, count)]


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def objects(line: Line, end: str = "") -> list[str]:
    """Names of what was got that end so, without sizes that were asked for."""
    names = [request.split()[1].rpartition("/")[2] for request in line.requests if request.startswith("GET")]
    return [name for name in names if name.endswith(end)]


@pytest.mark.parametrize(
    "options",
    [{}, {"window_blocks": 2}, {"limit": 7000}, {"weights": {"other": 1, "made": 3}, "window_blocks": 1}],
    ids=["whole", "windows", "limit", "mixture"],
)
def test_batches_are_those_of_the_local_copy(options: dict[str, Any], local: Path, url: str) -> None:
    expected = batches(loader(Catalogue(local).shards("train"), **options), 60)
    assert batches(loader(shards_of(url), **options), 60) == expected


@pytest.mark.parametrize("kind", ["folder", "http"])
def test_a_shared_folder_and_http_are_read_alike(kind: str, local: Path, url: str, line: Line) -> None:
    place = f"file://{local}" if kind == "folder" else url.replace("s3://", f"http://127.0.0.1:{line.port}/")
    expected = batches(loader(Catalogue(local).shards("train")), 10)
    assert batches(loader(shards_of(place)), 10) == expected


def test_a_cache_that_is_full_is_used_again_and_nothing_comes_twice(local: Path, url: str, line: Line) -> None:
    first = batches(loader(shards_of(url)))
    assert sorted(objects(line, ".npz")) == ["a.npz", "b.npz", "other.npz"]
    line.requests.clear()
    again = loader(shards_of(url))
    line.down = True
    assert batches(again) == first
    assert objects(line, ".npz") == []


@pytest.mark.parametrize("trouble", ["cut", "flip"])
def test_what_goes_wrong_on_the_way_is_asked_for_again(trouble: str, local: Path, url: str, line: Line) -> None:
    """A connection that is cut, and a byte that comes wrong, are no damage."""
    shards, told = shards_of(url), list[Any]()
    setattr(line, trouble, 3 if trouble == "cut" else 1)
    ours = batches(loader(shards, on_damage=lambda *damage: told.append(damage)))
    assert ours == batches(loader(Catalogue(local).shards("train")))
    assert getattr(line, trouble) == 0
    assert told == []


def test_a_shard_that_is_not_what_was_catalogued_is_damaged_as_a_whole(
    server: tuple[Any, int], local: Path, url: str, tmp_path: Path
) -> None:
    """Its rows are replaced as those of a local one that cannot be opened, and it is told once."""
    copy = tmp_path / "copy"
    shutil.copytree(local, copy)
    (copy / "other.npz").write_bytes(bytes((copy / "other.npz").stat().st_size))
    bad = flipped((local / "other.npz").read_bytes(), 80_000)
    server[0].put_object(Bucket=BUCKET, Key=f"{url.rpartition('/')[2]}/other.npz", Body=bad)
    told: dict[str, list[Any]] = {"local": [], "remote": []}
    ours, theirs = (
        batches(loader(shards, on_damage=lambda *damage, of=of: told[of].append(damage[:2])))
        for of, shards in (("local", Catalogue(copy).shards("train")), ("remote", shards_of(url)))
    )
    assert theirs == ours
    assert told["remote"] == told["local"] == [("other.npz", -1)]


def test_a_file_of_another_size_under_the_same_name_ends_the_run(
    server: tuple[Any, int], local: Path, url: str
) -> None:
    shards = shards_of(url)
    key, data = f"{url.rpartition('/')[2]}/{shards[0].name}", (local / shards[0].name).read_bytes()
    for body, says in ((data + b"x", r"has .* bytes, and .* by the catalogue"), (data[:-1], "of .* bytes came")):
        server[0].put_object(Bucket=BUCKET, Key=key, Body=body)
        with pytest.raises(LoaderError, match=says):
            batches(loader(shards))
    server[0].delete_object(Bucket=BUCKET, Key=key)
    with pytest.raises(LoaderError, match="is not there"):
        batches(loader(shards))


def test_the_cache_keeps_its_bound_and_batches_are_the_same(local: Path, url: str, tmp_path: Path) -> None:
    """It holds two of three shards; one that is removed while it is read stays readable."""
    rows = Catalogue(local).shards("train")
    bound = sum(row.bytes for row in rows) - 1
    shards = shards_of(url, bound / GIB)
    shards_of(url)  # another run, with a larger bound of its own
    small, highest = loader(shards, window_blocks=1), 0
    expected = batches(loader(rows, window_blocks=1), 90)
    for i, batch in enumerate(small.batches(0, 90)):
        assert b"".join(array.numpy().tobytes() for array in batch.values()) == expected[i]
        highest = max(highest, sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.npz")))
    assert max(row.bytes for row in rows) < highest <= bound
    with pytest.raises(RemoteError, match=r"data\.window_blocks"):
        loader(shards).check_cache()
    with pytest.raises(LoaderError, match="have to lie in the cache at once"):
        batches(loader(shards_of(url, 1000 / GIB)), 1)


def test_a_rotten_shard_of_the_cache_is_brought_again(local: Path, url: str, tmp_path: Path) -> None:
    shards = shards_of(url)
    expected = batches(loader(shards))
    for i, path in enumerate(sorted((tmp_path / "cache").rglob("*.npz"))):
        data = path.read_bytes()
        path.write_bytes([flipped(data, 2000), data[: len(data) // 2], b""][i % 3])
    assert batches(loader(shards)) == expected


PROGRAM = """
import sys, fsspec
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.remote import download_catalogue, local_path
fsspec.config.conf["s3"] = {"key": "a test", "secret": "a test", "endpoint_url": sys.argv[2]}
rows = Catalogue(download_catalogue(sys.argv[1], 1)).shards("train")
print("ready", flush=True)
sys.stdin.readline()
local_path(rows[0])
"""


def test_a_kill_while_a_shard_comes_leaves_nothing_that_is_believed(url: str, line: Line, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, url, f"http://127.0.0.1:{line.port}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    line.requests.clear()
    line.stall.clear()
    process.stdin.write("go\n")
    process.stdin.flush()
    while not objects(line):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    line.stall.set()
    row = shards_of(url)[0]
    assert list(tmp_path.rglob("*.npz")) == []
    assert local_path(row).read_bytes()
    left = [path for path in (tmp_path / "cache" / "remote" / "shards").iterdir() if path.suffix != ".npz"]
    assert left == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_cache_that_cannot_be_written_says_so(code: int, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    shards = shards_of(url)
    monkeypatch.setattr(Remote, "_download", refuse)
    with pytest.raises(LoaderError, match=rf"cannot be written .*{os.strerror(code)}.*MATRIXLIB_CACHE"):
        batches(loader(shards), 1)


def test_a_connection_that_is_refused_is_not_called_a_missing_file(line: Line) -> None:
    """fsspec raises FileNotFoundError for both."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(RemoteError, match=r"catalogue\.sqlite could not be read in 4 tries \(ClientConnectorError: "):
        download_catalogue(f"http://127.0.0.1:{port}/set", 1)
    with pytest.raises(RemoteError, match=r"catalogue\.sqlite is not there: is the address right"):
        download_catalogue(f"http://127.0.0.1:{line.port}/{BUCKET}/none", 1)


def test_what_a_source_refuses_is_said(
    server: tuple[Any, int], local: Path, url: str, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RemoteError, match=r"s3://none/at-all/catalogue.sqlite is not there"):
        download_catalogue("s3://none/at-all", 1)
    with pytest.raises(RemoteError, match="give s3://"):
        download_catalogue("sss://bucket/folder", 1)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "s3fs", None)
        without.delitem(sys.modules["fsspec.registry"]._registry, "s3")
        with pytest.raises(RemoteError, match=r"matrixlib\[remote\]"):
            download_catalogue("s3://bucket/folder", 1)
    with monkeypatch.context() as without:
        without.setitem(fsspec.config.conf, "s3", {"endpoint_url": f"http://127.0.0.1:{line.port}"})
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            without.delenv(name, raising=False)
        for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
            without.setenv(name, os.devnull)
        without.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with pytest.raises(RemoteError, match="credentials: log in"):
            download_catalogue(url, 1)
    line.down = True
    with pytest.raises(RemoteError, match=r"could not be read in 4 tries .* resumes"):
        download_catalogue(url, 1)
    folder = url.removeprefix("s3:/")
    assert not [request for request in line.requests if folder in request]  # one of the test before may come late


def test_a_catalogue_that_names_nonsense_is_refused(
    server: tuple[Any, int], local: Path, url: str, tmp_path: Path
) -> None:
    key = f"{url.rpartition('/')[2]}/{NAME}"
    nonsense = [{"name": "../x.npz"}, {"name": "remote.json"}, {"sha256": "../../x"}]
    for change in (*nonsense, {"bytes": 2**60}, {"count": 2**40}, {"count": 0}):
        shutil.copy(local / NAME, tmp_path / NAME)
        row = replace(Catalogue(local).shards("train")[0], **change)
        with closing(sqlite3.connect(tmp_path / NAME)) as db, db:
            db.execute("DELETE FROM shards WHERE name = 'a.npz'")
            db.execute(f"INSERT INTO shards VALUES ({', '.join('?' * 10)})", _values(row))
        server[0].put_object(Bucket=BUCKET, Key=key, Body=(tmp_path / NAME).read_bytes())
        with pytest.raises(CatalogueError, match="a row was changed or damaged"):
            shards_of(url)
    server[0].put_object(Bucket=BUCKET, Key=key, Body=b"SQLite format 3\0" + bytes(999))
    with pytest.raises(CatalogueError, match="damaged"):
        shards_of(url)


def test_shards_are_brought_whole_and_checked(server: tuple[Any, int], local: Path, url: str) -> None:
    catalogue = Catalogue(download_catalogue(url, 1))
    assert catalogue.hash() == Catalogue(local).hash()
    assert [local_path(row).read_bytes() for row in catalogue.shards()] == [
        row.path.read_bytes() for row in Catalogue(local).shards()
    ]
    assert catalogue.verify(local_path) == {}
    name = catalogue.shards()[0].name
    local_path(catalogue.shards()[0]).unlink()
    key, data = f"{url.rpartition('/')[2]}/{name}", (local / name).read_bytes()
    server[0].put_object(Bucket=BUCKET, Key=key, Body=flipped(data, 100_000))
    assert "SHA-256" in catalogue.verify(local_path)[name]
    with pytest.raises(ShardError, match="SHA-256"):
        local_path(catalogue.shards()[0])
    catalogue.quarantine(name, "a test")  # in memory alone
    assert len(catalogue.shards()) == 2
    assert len(shards_of(url)) == 3
    assert given_folder(DataConfig(source=url, cache=1)) == catalogue.folder


@pytest.fixture(scope="module")
def positions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chess positions of the sample set: three blocks to train on, and some held out."""
    folder = tmp_path_factory.mktemp("positions")
    for split, count in (("train", 9000), ("validation", 600)):
        shard = Shard(Catalogue(unpack_sample()).shards(split)[0].path, CHESS)
        write_shard(folder / f"{split}.npz", CHESS, shard.gather(np.arange(count)), META | {"split": split})
    Catalogue(folder)
    return folder


def run_of(name: str, source: str, until: int, **data: Any) -> Path:
    overrides = {
        "data": {"limit": 0, "window_blocks": 1, "source": source, **data},
        "model": {"channels": 8, "blocks": 1},
        "train": {"steps": 6, "batch_size": 32, "micro_batch": 32},
        "validation": {"interval": 3, "sample": 64, "limit": 128},
        "checkpoint": {"interval": 2, "keep": 3},
        "runtime": {"device": "cpu", "precision": "fp32", "threads": 1, "channels_last": False},
    }
    with closing(runs.open_run(run=name, overrides=overrides)) as run:
        for stats in run.train():
            if stats.step == until:
                break
    return run.folder


def test_a_run_that_goes_on_is_that_on_a_copy(
    server: tuple[Any, int], line: Line, positions: Path, reports: Path, tmp_path: Path
) -> None:
    url = upload(server[0], positions, "positions")
    copy, ours = run_of("copy", str(positions), 5), run_of("remote", url, 3, cache=0.01)
    shutil.rmtree(tmp_path / "cache" / "remote")
    assert ours == run_of("remote", url, 5, cache=0.02)
    weights = [folder / "checkpoints" / "step_00000004" / "model.safetensors" for folder in (copy, ours)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert objects(line)
    with pytest.raises(RemoteError, match=r"data\.cache is 0\.0005 GiB"):
        run_of("small", url, 1, cache=0.0005, window_blocks=0)


def test_a_set_elsewhere_is_looked_at_and_not_written_to(server: tuple[Any, int], line: Line, positions: Path) -> None:
    url = upload(server[0], positions, "looked-at")
    for bound in (0.75, 0.5):
        download_catalogue(url, bound)
    place = data_folder(url, "")
    assert Remote.open(place).bytes == GIB / 2
    assert Catalogue(place).verify(local_path) == {}
    assert sample(place, 500).equals(sample(positions, 500))


@pytest.mark.soak
@pytest.mark.parametrize("window", [0, 2])
def test_worker_processes_share_one_cache(window: int, local: Path, url: str, line: Line, tmp_path: Path) -> None:
    """Two loaders with two workers each, a bounded cache, and a connection that is cut now and then."""
    rows = Catalogue(local).shards("train")
    expected = batches(loader(rows, window_blocks=window), 400)
    cache = sum(row.bytes for row in rows[:2]) * 1.5 / GIB if window else 1.0
    for _ in range(3):
        shards = shards_of(url, cache)
        line.cut = 3  # as many as one block is tried again
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(batches, loader(shards, window_blocks=window, workers=2), 400) for _ in range(2)]
            assert [one.result() for one in both] == [expected] * 2
        shutil.rmtree(tmp_path / "cache")
