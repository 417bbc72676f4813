"""Protocol buffers as they lie in a file (https://protobuf.dev/programming-guides/encoding): just enough to read one.

Nothing is copied: what a field holds is a view of the file, so a length that is not there takes no memory.
"""

import struct
from typing import TypeAlias

FIELDS = 4096  # of one message: ten times what the deepest network has
Fields: TypeAlias = "dict[int, list[int | memoryview]]"
"""Number of a field -> what it holds, in the order of the file: an integer (fixed ones by their bits), or bytes."""


def fields(data: memoryview) -> Fields:
    """The fields of a message. ValueError where it is no message, or one of very many fields."""
    out: Fields = {}
    at = count = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind, number = key & 7, key >> 3
        value: int | memoryview
        if kind == 0:
            value, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value = int.from_bytes(_bytes(data, at, size), "little")
            at += size
        elif kind == 2:
            size, at = _varint(data, at)
            value = _bytes(data, at, size)
            at += size
        else:
            raise ValueError(f"a field of the unknown kind {kind} at byte {at}")
        count += 1
        if count > FIELDS:
            raise ValueError(f"more than {FIELDS:,} fields in one message")
        out.setdefault(number, []).append(value)
    return out


def integer(message: Fields, number: int) -> int:
    """An integer field, 0 where it is not set. ValueError where the field is of another kind."""
    value = message.get(number, [0])[-1]
    if not isinstance(value, int):
        raise ValueError(f"field {number} is no number")
    return value


def real(message: Fields, number: int) -> float:
    """A field of 32 bits as a floating-point number; errors as of `integer`."""
    bits = integer(message, number)
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0]


def chunk(message: Fields, number: int) -> memoryview:
    """A field of bytes, empty where it is not set. ValueError where the field is of another kind."""
    value = message.get(number, [memoryview(b"")])[-1]
    if isinstance(value, int):
        raise ValueError(f"field {number} holds a number in place of bytes")
    return value


def message(parent: Fields, number: int) -> Fields:
    """A message within a message, empty where it is not set; errors as of `fields`."""
    return fields(chunk(parent, number))


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """An integer of up to ten bytes, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError(f"a number without an end at byte {at}")


def _bytes(data: memoryview, at: int, size: int) -> memoryview:
    if size > len(data) - at:
        raise ValueError(f"a field of {size:,} bytes where {len(data) - at:,} are left")
    return data[at : at + size]
