"""One block of a shard that lies elsewhere, by ranges of its bytes, checked like a block of a mapped one."""

import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from matrixlib.data.shards import (
    BLOCK,
    OFFSET,
    REMEDY,
    Batch,
    DamagedBlock,
    Layout,
    ShardError,
    array_lengths,
    check_layout,
    crc,
    read_meta,
    read_small,
    rows_of_block,
)

Ranges = Sequence[tuple[int, int]]  # first byte and end
Read = Callable[[Ranges], list[bytes]]


@dataclass(frozen=True)
class Head:
    """What has to be known of a shard before a block of it is read: its meta data, the place of the first byte of each
    array, and the checksums of its blocks, for each member. tag: which bytes the source then had under the name.
    """

    tag: str
    meta: Mapping[str, Any]
    start: Mapping[str, int]
    checksums: Sequence[Sequence[int]]

    def data(self) -> dict[str, Any]:
        """As JSON data; `Head(**data)` is the inverse."""
        return asdict(self)


class End(io.RawIOBase):
    """A file of `size` bytes of which the last ones are known."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data, self._size, self._at = data, size, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        begin = self._at - (self._size - len(self._data))
        if begin < 0:
            raise ValueError("its end is larger than that of any shard of ours")
        part = self._data[begin : begin + size if size >= 0 else None]
        self._at += len(part)
        return part


def read_head(name: str, end: End, layout: Layout, tag: str) -> Head:
    """Of a shard. Raises ShardError, and what zipfile and NumPy raise of a damaged one.

    An array ends where the next member begins, as `write_shard` leaves no gap; of another file no checksum fits.
    """
    with zipfile.ZipFile(end) as archive:
        meta = read_meta(name, archive)
        check_layout(name, meta, layout)
        checksums = read_small(name, archive, "block_crc")
    members = sorted(archive.infolist(), key=lambda info: info.header_offset)
    stops = [*(info.header_offset for info in members[1:]), archive.start_dir]
    stop = {info.filename.removesuffix(".npy"): at for info, at in zip(members, stops, strict=True)}
    lengths = array_lengths(meta, layout)
    start = {member: stop[member] - lengths[member] * dtype.itemsize for member, dtype in layout.members()}
    if min(start.values()) < 0 or checksums.shape != (len(lengths), -(-lengths["records"] // BLOCK)):
        raise ShardError(f"{name}: its checksums do not fit its records; {REMEDY}")
    return Head(tag, meta, start, checksums.tolist())


def read_block(name: str, head: Head, layout: Layout, block: int, read: Read) -> Batch:
    """The rows of a block, as a batch of their own. Raises DamagedBlock. read: what gives the bytes of ranges."""
    first, stop = rows_of_block(block, int(head.meta["count"]))
    dtypes, numbers = dict(layout.members()), {member: i for i, (member, _) in enumerate(layout.members())}

    def arrays(bounds: Mapping[str, tuple[int, int]]) -> Batch:
        """The items between these bounds, each checked."""
        size = {member: dtypes[member].itemsize for member in bounds}
        at = [(head.start[m] + a * size[m], head.start[m] + b * size[m]) for m, (a, b) in bounds.items()]
        parts = {m: np.frombuffer(part, dtypes[m]) for m, part in zip(bounds, read(at), strict=True)}
        for member, part in parts.items():
            if crc(part) != head.checksums[numbers[member]][block]:
                raise DamagedBlock(name, block, member)
        return parts

    offsets = {f"{group}_offset": (first, stop + 1) for group in layout.ragged}
    batch = arrays({"records": (first, stop), **offsets})
    inside: dict[str, tuple[int, int]] = {}
    for group, members in layout.ragged.items():
        offset = batch[f"{group}_offset"]
        if offset[0] < 0 or offset[-1] > head.meta["sizes"][group] or (np.diff(offset) < 0).any():
            raise DamagedBlock(name, block, f"{group}_offset")
        inside |= {f"{group}_{member}": (int(offset[0]), int(offset[-1])) for member in members}
        batch[f"{group}_offset"] = (offset - offset[0]).astype(OFFSET)
    return batch | arrays(inside)
