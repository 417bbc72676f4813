"""The shipped sample set: exact, verified, repaired, and safe when two processes unpack it at once."""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from shipping import SAMPLE_FILE, ship_sample
from test_sample import make_work

from matrixlib.data.shards import Shard
from matrixlib.tasks.chess.importers.audit import faults
from matrixlib.tasks.chess.records import LAYOUT, position_keys
from matrixlib.tasks.chess.stockfish import sample as shipped
from matrixlib.tasks.chess.stockfish.sample import pack, unpack_sample
from matrixlib.tasks.shipped import MANIFEST, damage, read_manifest


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    return make_work(tmp_path_factory.mktemp("random") / "work", 30)


@pytest.fixture(scope="module")
def package(work, tmp_path_factory) -> Path:
    """A folder as the package's sample folder, with a small set."""
    folder = tmp_path_factory.mktemp("package")
    ship_sample(work, folder)
    return folder


def test_it_unpacks_to_what_packing_gives(work, package, tmp_path):
    manifest = read_manifest(package)
    folder = unpack_sample(tmp_path / "cache", package)
    summary = pack(work, tmp_path / "packed")
    packed = sorted((tmp_path / "packed").iterdir())
    assert [path.name for path in packed] == list(manifest["shards"])
    for path in packed:
        assert (folder / path.name).read_bytes() == path.read_bytes()
    assert summary["train"] + summary["validation"] == manifest["positions"]


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", ["flipped", "missing", "half"])
def test_a_damaged_cache_is_repaired(package, tmp_path, harm):
    manifest = read_manifest(package)
    folder = unpack_sample(tmp_path, package)
    victim = folder / next(iter(manifest["shards"]))
    if harm == "flipped":
        flip_a_byte(victim)
    elif harm == "missing":
        victim.unlink()
    else:  # killed in the middle of unpacking
        folder.rename(folder.with_name(folder.name + ".tmp"))
        (folder.with_name(folder.name + ".tmp") / victim.name).unlink()
    assert damage(folder, manifest)
    assert unpack_sample(tmp_path, package) == folder
    assert not damage(folder, manifest)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_damaged_package_is_refused(package, tmp_path):
    broken = tmp_path / "package"
    broken.mkdir()
    for path in package.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    flip_a_byte(broken / SAMPLE_FILE)
    with pytest.raises(ValueError, match=r"sample\.npz\.xz is missing or damaged: install the package again"):
        unpack_sample(tmp_path / "cache", broken)
    (broken / SAMPLE_FILE).unlink()
    with pytest.raises(ValueError, match="missing or damaged"):
        unpack_sample(tmp_path / "cache", broken)
    (broken / MANIFEST).write_text("{")
    with pytest.raises(ValueError, match="manifest cannot be read"):
        unpack_sample(tmp_path / "cache", broken)


def test_two_processes_unpack_at_once(package, tmp_path, forkserver):
    with ProcessPoolExecutor(2, forkserver) as pool:
        folders = set(pool.map(unpack_sample, [tmp_path] * 2, [package] * 2))
    assert folders == set(tmp_path.glob("sample-*"))
    assert not damage(folders.pop(), read_manifest(package))


@pytest.mark.soak
def test_the_shipped_set_is_sound(tmp_path):
    """Unpacked whole: counts, splits by game, no position twice, targets that sum to one; nbval of data.ipynb audits a
    sample of it."""
    manifest = read_manifest(shipped.SAMPLE)
    folder = unpack_sample(tmp_path)
    shards = [Shard(folder / name, LAYOUT) for name in manifest["shards"]]
    keys: set[bytes] = set()
    games: dict[str, set[int]] = {"train": set(), "validation": set()}
    for shard in shards:
        batch = shard.gather(np.arange(len(shard)))
        assert not faults(batch)
        records, offset = batch["records"], batch["policy_offset"]
        games[shard.meta["split"]].update(records["game"].tolist())
        keys.update(position_keys(records))
        assert (np.add.reduceat(batch["policy_weight"].astype(np.int64), offset[:-1]) == 65535).all()
        assert (records["wdl"].astype(np.int64).sum(axis=1) == 65535).all()
        assert shard.path.stat().st_size / len(shard) < 250
    assert len(keys) == manifest["positions"] == sum(len(shard) for shard in shards)
    assert not games["train"] & games["validation"]
    share = len(games["validation"]) / manifest["games"]
    assert 0.03 < share < 0.07
