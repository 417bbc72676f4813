"""Weight files of Lc0 made up for tests: messages, and small networks whose parts can be given."""

import gzip
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def field(number: int, value: int | bytes) -> bytes:
    """A field: a number, or bytes with their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def layer(values: Any) -> bytes:
    """Numbers as 16-bit steps from the least to the greatest."""
    array = np.asarray(values, np.float64).reshape(-1)
    low, high = float(array.min()), float(array.max())
    steps = np.rint((array - low) / (high - low or 1) * 65535).astype("<u2")
    bounds = b"\x0d" + struct.pack("<f", low) + b"\x15" + struct.pack("<f", high)
    return bounds + field(3, steps.tobytes())


def message(*parts: tuple[int, Any]) -> bytes:
    """A message of layers (arrays), messages (bytes) and numbers."""
    return b"".join(field(n, part if isinstance(part, int | bytes) else layer(part)) for n, part in parts)


def network(
    network_format: int = 4,
    policy: int = 2,
    value: int = 2,
    inputs: int = 1,
    filters: int = 4,
    units: int = 2,
    seed: int = 0,
    parts: Mapping[int, Any] | None = None,
    further: tuple[int, ...] = (),
    **form: int,
) -> bytes:
    """The message of a small network with random weights. parts: fields of its weights in place of the random ones.

    further: units of the blocks after the first.
    """
    rng = np.random.default_rng(seed)

    def conv(outputs: int, area: int) -> bytes:
        return message((1, rng.normal(size=outputs * area) / area**0.5), (2, rng.normal(size=outputs)))

    def dense(outputs: int, width: int) -> tuple[Any, Any]:
        return rng.normal(size=outputs * width) / width**0.5, rng.normal(size=outputs)

    def block(units: int) -> bytes:
        layers: list[tuple[int, Any]] = [(1, conv(filters, 9 * filters)), (2, conv(filters, 9 * filters))]
        if network_format in (2, 4):
            (w1, b1), (w2, b2) = dense(units, filters), dense(2 * filters, units)
            layers.append((3, message((1, w1), (2, b1), (3, w2), (4, b2))))
        return message(*layers)

    first = block(units)
    weights: dict[int, Any] = {1: conv(filters, 9 * 112), 2: first, 6: conv(2, filters)}
    weights[7], weights[8] = dense(5, 128)
    weights[9], weights[10] = dense(3 if value == 2 else 1, 5)
    if policy == 2:
        weights |= {11: conv(filters, 9 * filters), 3: conv(80, 9 * filters)}
    else:
        weights[3] = conv(2, filters)
        weights[4], weights[5] = dense(1858, 128)
    weights |= parts or {}
    blocks = [(2, block(width)) for width in further]
    kinds = message((1, inputs), (3, network_format), (4, policy), (5, value), (7, form.get("activation", 0)))
    layout = message((1, form.get("encoding", 1)), (2, kinds))
    return b"\x0d" + struct.pack("<I", 0x1C0) + message((4, layout), (10, message(*weights.items(), *blocks)))


def save(path: Path, data: bytes) -> Path:
    path.write_bytes(gzip.compress(data))
    return path
