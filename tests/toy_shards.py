"""A toy layout with no game in it, and shards of it, for the tests of the data package."""

import io
import json
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from matrixlib.data.shards import BLOCK, FORMAT, Batch, Layout, ShardInfo, write_shard

RECORD = np.dtype([("row", "<i8"), ("pixels", "u1", (5,)), ("label", "<u2")])
LAYOUT = Layout("toy", 1, RECORD, {"target": {"index": np.dtype("<u2"), "weight": np.dtype("<u2")}})
META = {"source": "made", "generator": "toy", "seed": 0, "split": "train", "created": "2026-01-02T03:04:05Z"}


def toy_batch(count: int, first: int = 0, seed: int = 0, longest: int = 6) -> Batch:
    """`count` rows; "row" numbers them from `first`, so that a test sees which ones came."""
    rng = np.random.default_rng(seed)
    records = np.zeros(count, RECORD)
    records["row"] = np.arange(first, first + count)
    records["pixels"] = rng.integers(0, 256, (count, 5))
    records["label"] = rng.integers(0, 65536, count)
    offset = np.concatenate([[0], np.cumsum(rng.integers(0, longest + 1, count))]).astype("<i8")
    index, weight = rng.integers(0, 65536, (2, int(offset[-1]))).astype("<u2")
    return {"records": records, "target_offset": offset, "target_index": index, "target_weight": weight}


def toy_shards(folder: Path, counts: list[int], **meta: Any) -> list[ShardInfo]:
    """Shards a.npz, b.npz ... whose rows are numbered through."""
    starts = np.concatenate([[0], np.cumsum(counts)])
    return [
        write_shard(folder / f"{chr(97 + i)}.npz", LAYOUT, toy_batch(n, int(starts[i]), seed=i), META | meta)
        for i, n in enumerate(counts)
    ]


def sparse_shard(path: Path, count: int, layout: Layout = LAYOUT) -> ShardInfo:
    """A shard of `count` rows of zeros without ragged items, which takes next to no room on the disk: only the
    headers are written. Its SHA-256 is not that of the file, and the zip checksums are not right either."""
    blocks = np.full(-(-count // BLOCK), BLOCK)
    blocks[-1] = count - BLOCK * (len(blocks) - 1)
    columns, sparse = [], []
    for name, dtype in layout.members():
        is_offset = name.endswith("_offset")
        ragged = not is_offset and name != "records"
        sizes = {int(rows): zlib.crc32(bytes((int(rows) + is_offset) * dtype.itemsize)) for rows in set(blocks)}
        columns.append([0 if ragged else sizes[int(rows)] for rows in blocks])
        sparse.append((name, dtype, 0 if ragged else count + is_offset))
    groups = dict.fromkeys(layout.ragged, 0)
    meta = {**META, "format": FORMAT, "task": layout.task, "version": layout.version}
    meta |= {"layout": layout.describe(), "count": count, "sizes": groups}
    text = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    with open(path, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in (("block_crc", np.array(columns, "<u4")), ("meta", text)):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                npy.write_array(member, array, allow_pickle=False)
        for name, dtype, rows in sparse:
            header = io.BytesIO()
            described = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (rows,)}
            npy.write_array_header_1_0(header, described)
            info = zipfile.ZipInfo(f"{name}.npy")
            info.header_offset, info.CRC = file.tell(), 0
            info.file_size = info.compress_size = len(header.getvalue()) + rows * dtype.itemsize
            file.write(info.FileHeader(zip64=True) + header.getvalue())
            file.truncate(file.tell() + rows * dtype.itemsize)
            archive.start_dir = file.seek(0, os.SEEK_END)
            archive.filelist.append(info)
            archive.NameToInfo[info.filename] = info
    return ShardInfo(path, count, path.stat().st_size, "0" * 64, meta)


def same(left: Batch, right: Batch) -> bool:
    """Equal names, dtypes and bytes."""
    return left.keys() == right.keys() and all(
        left[k].dtype == right[k].dtype and left[k].tobytes() == right[k].tobytes() for k in left
    )


@dataclass(frozen=True)
class Toy:
    """A task's `prepare`: rows, a random draw for each, and the sum of the ragged member."""

    fail_at: int = -1
    pid_file: str = ""

    def prepare(self, batch: Batch, rng: np.random.Generator) -> dict[str, np.ndarray]:
        rows = batch["records"]["row"].astype(np.int64)
        if self.fail_at in rows:
            raise KeyError(f"label of row {self.fail_at}")
        if self.pid_file:
            mine = Path(f"{self.pid_file}.{os.getpid()}")
            mine.write_text(str(os.getpid()))
            os.replace(mine, self.pid_file)
        running = np.concatenate([[0], np.cumsum(batch["target_weight"].astype(np.int64))])
        sums = running[batch["target_offset"]]
        noise = rng.random((len(rows), 3), np.float32)
        return {"row": rows, "noise": noise, "sum": np.diff(sums), "pixels": batch["records"]["pixels"]}


def process(batch: Batch, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The process in which this runs, and its threads: a batch that is not a function of its number."""
    import torch  # the tests of shards and catalogue need none

    facts = {"process": os.getpid(), "threads": torch.get_num_threads()}
    return {name: np.full(len(batch["records"]), fact) for name, fact in facts.items()}
