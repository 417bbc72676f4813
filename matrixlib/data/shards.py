"""Shards: uncompressed NPZ files of fixed-size records and ragged members, memory-mapped, with a checksum a block.

``numpy.load`` reads a shard, but copies whole members (also with `mmap_mode`); here each is mapped at its offset in the
zip file. A CRC-32 for every member and block is verified on first use.
"""

import errno
import hashlib
import io
import json
import math
import mmap
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.lib import format as npy

from matrixlib.files import remove_leftovers, write_bytes

BLOCK = 4096  # records in a block
FORMAT = 1  # version of the container; layouts have their own
SPLITS = ("train", "validation")
PROVENANCE = ("source", "generator", "seed", "split")  # required of the writer
OURS = ("format", "task", "version", "layout", "count", "sizes")  # derived from the data
OFFSET = np.dtype("<i8")
ALIGN = 64  # members start at multiples of this, so that mapped arrays are aligned
PADDING_ID = 0xD935  # zip extra field that aligns a member (the id of Android's zipalign)
LOCAL_HEADER = struct.Struct("<4s5H3L2H")
SIZES = 18  # their place in it
HEAD_BYTES = 2**16  # upper bound of a member's headers
LFS_POINTER = b"version https://git-lfs"
SYSTEM = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # the machine refuses: open files, memory
DAMAGED = (EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError, struct.error, tokenize.TokenError)
FOREIGN = (ValueError, KeyError, TypeError, AttributeError, OverflowError, SyntaxError)
REMEDY = "restore the file from a copy, make it again, or quarantine it in the catalogue"

Batch = dict[str, np.ndarray]
Result = TypeVar("Result")


class ShardError(ValueError):
    """The shard cannot be used; names the file, the cause and what to do."""


class DamagedBlock(ShardError):
    """A corrupt block. Attributes: path, block, member."""

    def __init__(self, path: Path | str, block: int, member: str) -> None:
        super().__init__(path, block, member)  # for pickling
        self.path, self.block, self.member = Path(path), block, member

    def __str__(self) -> str:
        return f"{self.path}: block {self.block} of '{self.member}' fails its check (damaged); {REMEDY}"


@dataclass(frozen=True)
class Layout:
    """What a task stores: a structured little-endian record, and ragged groups of members with shared offsets.

    ``ragged`` maps group -> member -> dtype. Group "g" with member "m" has arrays ``g_m`` (K,) and ``g_offset`` (n+1,)
    int64: row i is ``g_m[g_offset[i]:g_offset[i+1]]``.
    """

    task: str
    version: int
    record: np.dtype
    ragged: Mapping[str, Mapping[str, np.dtype]]

    def __post_init__(self) -> None:
        for name, dtype in self.members():
            if dtype.hasobject or dtype.newbyteorder("<") != dtype:
                raise ValueError(f"layout '{self.task}': '{name}' must be little-endian, no objects: {dtype}")

    def members(self) -> Iterator[tuple[str, np.dtype]]:
        """(array name, dtype) in file and ``block_crc`` order; offsets precede their members."""
        yield "records", np.dtype(self.record)
        for group, members in self.ragged.items():
            yield f"{group}_offset", OFFSET
            for member, dtype in members.items():
                yield f"{group}_{member}", np.dtype(dtype)

    def describe(self) -> dict[str, Any]:
        """The layout as JSON data, stored in every shard and compared on opening."""
        ragged = {g: {m: np.dtype(d).str for m, d in members.items()} for g, members in self.ragged.items()}
        record = json.loads(json.dumps(npy.dtype_to_descr(np.dtype(self.record))))
        return {"record": record, "ragged": ragged, "block": BLOCK}


@dataclass(frozen=True)
class ShardInfo:
    """Metadata of one file: record count, size in bytes, SHA-256 (hex), stored meta data."""

    path: Path
    count: int
    bytes: int
    sha256: str
    meta: Mapping[str, Any]


def ragged_rows(offset: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Items of the rows `indices` (B,) of a group: (positions (K,), new offset (B+1,))."""
    return ranges(offset[indices], offset[indices + 1])


def ranges(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(start[0]..stop[0]-1, start[1]..stop[1]-1, ... (K,), offset of each range (B+1,))."""
    offset = np.concatenate([[0], np.cumsum(stop - start)]).astype(OFFSET)
    return np.arange(offset[-1], dtype=OFFSET) + np.repeat(start - offset[:-1], stop - start), offset


def select(batch: Batch, indices: np.ndarray, layout: Layout) -> Batch:
    """Copies of rows `indices` (B,) of a batch, in that order. IndexError outside 0..len-1."""
    indices = np.asarray(indices, np.int64)
    if len(indices) and not (indices.min() >= 0 and indices.max() < len(batch["records"])):
        raise IndexError(f"row outside 0..{len(batch['records']) - 1}: {indices.min()}..{indices.max()}")
    out = {"records": batch["records"][indices]}
    for group, members in layout.ragged.items():
        positions, out[f"{group}_offset"] = ragged_rows(batch[f"{group}_offset"], indices)
        for member in members:
            out[f"{group}_{member}"] = batch[f"{group}_{member}"][positions]
    return out


def concat(batches: Sequence[Batch], layout: Layout) -> Batch:
    """One batch of all rows, in order; empty without batches."""
    out = {"records": np.concatenate([np.empty(0, layout.record), *(b["records"] for b in batches)])}
    for group, members in layout.ragged.items():
        lengths = [np.diff(b[f"{group}_offset"]) for b in batches]
        out[f"{group}_offset"] = np.cumsum(np.concatenate([np.zeros(1, OFFSET), *lengths]), dtype=OFFSET)
        for member, dtype in members.items():
            parts = [b[f"{group}_{member}"] for b in batches]
            out[f"{group}_{member}"] = np.concatenate([np.empty(0, dtype), *parts])
    return out


def check(batch: Batch, layout: Layout) -> None:
    """ValueError unless `batch` has exactly the arrays, dtypes and offsets of `layout`."""
    expected, kinds = dict(layout.members()), {name: array.dtype for name, array in batch.items() if array.ndim == 1}
    if kinds != expected:
        raise ValueError(f"batch has one-dimensional {kinds}, layout '{layout.task}' needs {expected}")
    for group, members in layout.ragged.items():
        offset = batch[f"{group}_offset"]
        if len(offset) != len(batch["records"]) + 1 or offset[0] != 0 or (np.diff(offset) < 0).any():
            raise ValueError(f"'{group}_offset' must rise from 0 and have one entry more than the records")
        for name in (f"{group}_{member}" for member in members):
            if len(batch[name]) != offset[-1]:
                raise ValueError(f"'{name}' has {len(batch[name])} items, its offset says {offset[-1]}")


def file_hash(path: Path | str) -> str:
    """SHA-256 of a file, hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _crc(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)


def _block_parts(batch: Batch, layout: Layout, block: int) -> Iterator[tuple[str, np.ndarray]]:
    """(member, slice of `block`), in layout order, so that an offset is checked before the slices it defines."""
    start, stop = block * BLOCK, min((block + 1) * BLOCK, len(batch["records"]))
    yield "records", batch["records"][start:stop]
    for group, members in layout.ragged.items():
        offset = batch[f"{group}_offset"]
        yield f"{group}_offset", offset[start : stop + 1]
        for member in members:
            yield f"{group}_{member}", batch[f"{group}_{member}"][offset[start] : offset[stop]]


def write_shard(path: Path | str, layout: Layout, batch: Batch, meta: Mapping[str, Any]) -> ShardInfo:
    """Write the result of `pack_shard` atomically, replacing a file of that name."""
    path, data = Path(path), pack_shard(layout, batch, meta)
    remove_leftovers(path)
    write_bytes(path, data)
    return read_info(path)


def pack_shard(layout: Layout, batch: Batch, meta: Mapping[str, Any]) -> bytes:
    """The bytes of a shard, a pure function of data and meta (with created).

    meta: JSON data with source, generator, seed and split ("train" or "validation"); optional created (UTC, ISO 8601;
    default now) and quality (figures for the catalogue). ValueError if the batch is empty or not of this layout.
    """
    check(batch, layout)
    full, file = _full_meta(layout, batch, meta), io.BytesIO()
    text = json.dumps(full, sort_keys=True, allow_nan=False).encode()
    arrays = {name: batch[name] for name, _ in layout.members()}
    blocks = range(-(-len(batch["records"]) // BLOCK))
    columns = [[_crc(part) for _, part in _block_parts(batch, layout, block)] for block in blocks]
    arrays |= {"block_crc": np.array(columns, "<u4").T, "meta": np.frombuffer(text, np.uint8)}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))  # the same bytes at any time
            info.create_version = info.extract_version = zipfile.ZIP64_VERSION  # of any Python
            zip64 = 20  # bytes of the extra field that force_zip64 adds
            start = file.tell() + LOCAL_HEADER.size + len(info.filename) + zip64 + 4
            padding = -start % ALIGN
            info.extra = struct.pack("<HH", PADDING_ID, padding) + bytes(padding)
            with archive.open(info, "w", force_zip64=True) as member:
                npy.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
        headers = [info.header_offset for info in archive.infolist()]
    for start in headers:  # Python before 3.11.4 repeats the sizes that stand in the extra field
        file.seek(start + SIZES)
        file.write(b"\xff" * 8)
    return file.getvalue()


def _full_meta(layout: Layout, batch: Batch, meta: Mapping[str, Any]) -> dict[str, Any]:
    if missing := [key for key in PROVENANCE if key not in meta]:
        raise ValueError(f"shard meta lacks {', '.join(missing)}; say where the data comes from")
    if meta["split"] not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {meta['split']!r}")
    if not len(batch["records"]):
        raise ValueError("a shard needs at least one record")
    created = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    sizes = {group: int(batch[f"{group}_offset"][-1]) for group in layout.ragged}
    ours = {"format": FORMAT, "task": layout.task, "version": layout.version, "layout": layout.describe()}
    ours |= {"count": len(batch["records"]), "sizes": sizes}
    return {"created": created, **meta, **ours}


def read_info(path: Path | str) -> ShardInfo:
    """Metadata of a shard of any layout; hashes the file. Raises ShardError."""
    path = Path(path)
    meta = _read_zip(path, _read_meta)
    return ShardInfo(path, meta["count"], path.stat().st_size, file_hash(path), meta)


def is_shard(path: Path) -> bool:
    """Whether a file claims to be a shard."""
    try:
        _read_zip(path, _read_meta)
    except ShardError:
        return False
    return True


def find_damage(path: Path) -> str:
    """First member with a wrong zip checksum, or "". Raises ShardError."""
    return (_read_zip(path, zipfile.ZipFile.testzip) or "").removesuffix(".npy")


def _read_zip(path: Path, read: Callable[[zipfile.ZipFile], Result]) -> Result:
    """read(open zip file); any fault of the file becomes a ShardError."""
    try:
        with open(path, "rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ShardError(f"{path}: only a Git LFS pointer, not the data; run `git lfs pull`")
        with zipfile.ZipFile(path) as archive:
            return read(archive)
    except ShardError:
        raise
    except FileNotFoundError:
        raise ShardError(f"{path}: no such file; {REMEDY}") from None
    except OSError as error:
        if error.errno in SYSTEM:
            raise  # not the file's fault
        raise ShardError(f"{path}: cannot be read ({error}); {REMEDY}") from error
    except (*DAMAGED, *FOREIGN) as error:
        raise ShardError(f"{path}: truncated, damaged or not a shard ({error}); {REMEDY}") from error


def _stored(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    """Zip entry of a member, which must exist, be uncompressed, and not exceed the file."""
    if f"{name}.npy" not in archive.namelist():
        raise ShardError(f"{archive.filename}: not a shard of ours (no member '{name}'); write it with write_shard")
    info = archive.getinfo(f"{name}.npy")
    if info.compress_type != zipfile.ZIP_STORED:
        raise ShardError(f"{archive.filename}: '{name}' is compressed and cannot be mapped; write it with write_shard")
    if max(info.file_size, info.compress_size) > archive.start_dir:
        raise ShardError(f"{archive.filename}: '{name}' claims to be larger than the file; {REMEDY}")
    return info


def _read_small(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """A whole member, zip checksum verified. ValueError if it claims more than it has."""
    data = archive.read(_stored(archive, name))
    file = io.BytesIO(data)
    shape, _, dtype = _npy_header(file)
    return np.frombuffer(data, dtype, math.prod(shape), file.tell()).reshape(shape)


def _npy_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """(shape, Fortran order, dtype) of an NPY file; leaves it at the first item."""
    header = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
    return header(file)


def _read_meta(archive: zipfile.ZipFile) -> dict[str, Any]:
    """Meta data, type-checked where the catalogue keeps it, with no more rows or items than bytes in the file."""
    meta = json.loads(_read_small(archive, "meta").tobytes())
    if not isinstance(meta, dict) or not {*OURS, *PROVENANCE} <= set(meta):
        raise ShardError(f"{archive.filename}: its meta data is incomplete, so it is not a shard of ours; {REMEDY}")
    if meta["format"] > FORMAT:
        raise ShardError(f"{archive.filename}: shard format {meta['format']} is newer than {FORMAT}; update matrixlib")
    counts = [meta["count"], *meta["sizes"].values()]
    sound = all(isinstance(count, int) and 0 <= count <= archive.start_dir for count in counts) and counts[0] > 0
    sound &= all(isinstance(text, str) and text.isprintable() for text in (meta["task"], meta["source"]))
    if not sound or meta["split"] not in SPLITS or not isinstance(meta.get("quality", {}), dict):
        raise ShardError(f"{archive.filename}: its meta data is none that a shard can have; {REMEDY}")
    return meta


def _check_layout(path: Path | str, meta: Mapping[str, Any], layout: Layout) -> None:
    if meta["task"] != layout.task:
        problem = f"data of task '{meta['task']}', not '{layout.task}'; choose another source"
    elif meta["version"] != layout.version:
        remedy = "make the shards again" if meta["version"] < layout.version else "update matrixlib"
        problem = f"layout version {meta['version']}, this program has {layout.version}; {remedy}"
    elif meta["layout"] != layout.describe():
        problem = f"its fields are not those of layout '{layout.task}'; make the shards again"
    else:
        return
    raise ShardError(f"{path}: {problem}")


def _map_member(archive: zipfile.ZipFile, file: np.ndarray, name: str, dtype: np.dtype, n: int) -> np.ndarray:
    """The stored array `name` (n,) as a view of the mapped `file`."""
    info = _stored(archive, name)
    head = io.BytesIO(file[info.header_offset : info.header_offset + HEAD_BYTES].tobytes())
    fixed = LOCAL_HEADER.unpack(head.read(LOCAL_HEADER.size))
    if fixed[0] != b"PK\x03\x04":
        raise ShardError(f"{archive.filename}: '{name}' is not where the zip directory says; {REMEDY}")
    begin = head.seek(fixed[-2] + fixed[-1], io.SEEK_CUR)
    found = _npy_header(head)
    start = info.header_offset + head.tell()
    stop = start + n * dtype.itemsize
    whole = info.file_size == stop - info.header_offset - begin and stop <= len(file)
    if found != ((n,), False, dtype) or not whole:
        raise ShardError(f"{archive.filename}: '{name}' is not {n} items of {dtype} as its meta data says; {REMEDY}")
    return file[start:stop].view(dtype)


class Shard:
    """A memory-mapped shard; blocks are verified on first use. ShardError if missing, damaged, or of another layout."""

    def __init__(self, path: Path | str, layout: Layout) -> None:
        self.path, self.layout = Path(path), layout
        _read_zip(self.path, self._open)

    def _open(self, archive: zipfile.ZipFile) -> None:
        self.meta: Mapping[str, Any] = _read_meta(archive)
        _check_layout(self.path, self.meta, self.layout)
        with open(self.path, "rb") as opened:
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self.bytes = len(self._map)
        file = np.frombuffer(self._map, np.uint8)
        count = self.meta["count"]
        lengths = {"records": count}
        for group, members in self.layout.ragged.items():
            lengths[f"{group}_offset"] = count + 1
            lengths |= {f"{group}_{member}": self.meta["sizes"][group] for member in members}
        kinds = self.layout.members()
        self.arrays: Batch = {name: _map_member(archive, file, name, dtype, lengths[name]) for name, dtype in kinds}
        self.blocks = -(-count // BLOCK)
        self._crc = _read_small(archive, "block_crc")
        if self._crc.shape != (len(lengths), self.blocks):
            raise ShardError(f"{self.path}: its checksums do not fit its records; {REMEDY}")
        self._checked = np.zeros(self.blocks, bool)

    def __reduce__(self) -> tuple[Any, ...]:
        return Shard, (self.path, self.layout)

    def release(self) -> None:
        """Release mapped pages, so that they do not count as process memory (not on Windows)."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the block checksums: changes with any row, without reading blocks."""
        return hashlib.sha256(self._crc.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.arrays["records"])

    def verify_block(self, block: int) -> None:
        """Verify one block's checksums, once. Raises DamagedBlock."""
        if self._checked[block]:
            return
        for row, (member, part) in enumerate(_block_parts(self.arrays, self.layout, block)):
            sound = _crc(part) == self._crc[row, block]
            if (group := member.removesuffix("_offset")) != member:  # offsets are not trusted, whatever their checksum
                inside = part[0] >= 0 and part[-1] <= self.meta["sizes"][group]
                sound = sound and inside and bool((np.diff(part) >= 0).all())
            if not sound:
                raise DamagedBlock(self.path, block, member)
        self._checked[block] = True

    def gather(self, indices: np.ndarray) -> Batch:
        """Copies of rows `indices` (B,), in that order; O(B). Raises DamagedBlock, IndexError."""
        indices = np.asarray(indices, np.int64)
        for block in np.unique(indices // BLOCK):
            if 0 <= block < self.blocks:  # an index outside is reported by select
                self.verify_block(int(block))
        return select(self.arrays, indices, self.layout)
