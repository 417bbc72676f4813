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
    kinds = message(
        (1, inputs),
        (3, network_format),
        (4, policy),
        (5, value),
        (6, form.get("moves_left", 0)),
        (7, form.get("activation", 0)),
    )
    layout = message((1, form.get("encoding", 1)), (2, kinds))
    return b"\x0d" + struct.pack("<I", 0x1C0) + message((4, layout), (10, message(*weights.items(), *blocks)))


def save(path: Path, data: bytes) -> Path:
    path.write_bytes(gzip.compress(data))
    return path


def attention_network(
    network_format: int = 6,
    embedding: int = 1,
    smolgen: bool = True,
    several: bool = False,
    value: int = 2,
    form: Mapping[int, int] | None = None,
    changed: Mapping[str, Any] | None = None,
) -> bytes:
    """The message of a network with an attention body and random weights: 3 encoders of 32 channels, 4 heads.

    embedding: 1 PE_MAP, 2 PE_DENSE. several: heads by name. form: further fields of the format. changed: layers by name
    in place of the random ones, and lists of further fields of `weights` and `mha`.
    """
    rng, other = np.random.default_rng(1), dict(changed or {})
    width, inner, hidden, gen, extra = 32, 24, 16, 6, 5 if embedding == 2 else 64

    def dense(name: str, field: int, inputs: int, outputs: int, scale: float = 1.0) -> list[tuple[int, Any]]:
        weight, bias = rng.normal(size=(outputs, inputs)) * scale / inputs**0.5, 0.3 * rng.normal(size=outputs)
        if name == "ip_emb":  # the half-move clock goes up to 100
            weight[:, 109] /= 30
        if name == "ip1_val":  # what all squares have in common would drown the rest
            weight -= np.tile(weight.reshape(outputs, 64, -1).mean(1), 64)
        return [(field, other.get(f"{name}_w", weight)), (field + 1, other.get(f"{name}_b", bias * min(1, scale)))]

    def norm(field: int, outputs: int, scale: float = 1.0) -> list[tuple[int, Any]]:
        return [(field + k, scale * (1 - k + 0.3 * rng.normal(size=outputs))) for k in (0, 1)]

    def ffn(inner: int) -> bytes:
        return message(*dense("dense1", 1, width, inner, 10), *dense("dense2", 3, inner, width, 0.1))

    def encoder() -> bytes:  # of a stream so small that the epsilon of its norms counts
        parts = [*dense("q", 1, width, inner, 15), *dense("k", 3, width, inner, 15), *dense("v", 5, width, inner, 10)]
        parts += dense("dense", 7, inner, width, 0.1)
        if smolgen:
            smol = [(1, other.get("compress_w", rng.normal(size=4 * width))), *dense("smol1", 2, 64 * 4, hidden)]
            smol += [*norm(4, hidden), *dense("smol2", 6, hidden, 4 * gen), *norm(8, 4 * gen)]
            parts.append((9, message(*smol)))
        mha = message(*parts, *other.get("mha", []))
        return message((1, mha), *norm(2, width, 0.1), (4, ffn(40)), *norm(5, width, 0.1))

    def policy(embed: int, query: int, key: int, pieces: int) -> list[tuple[int, Any]]:
        parts = dense("ip_pol", embed, width, 20, 10) if embed else []
        parts += [*dense("ip2_pol", query, 20, inner, 4), *dense("ip3_pol", key, 20, inner, 4)]
        return [*parts, (pieces, rng.normal(size=4 * inner) / inner**0.5)]

    def values(*fields: int) -> list[tuple[int, Any]]:
        parts = [*dense("ip_val", fields[0], width, 8, 10), *dense("ip1_val", fields[1], 64 * 8, 128, 3)]
        return [*parts, *dense("ip2_val", fields[2], 128, 3 if value == 2 else 1, 2)]

    weights = [*dense("ip_emb", 25, 112 + extra, width, 0.3), (28, other.get("headcount", 4))]
    if embedding == 2:
        weights += [*dense("preproc", 37, 64 * 12, 64 * extra, 5), *norm(39, width, 0.1)]
        weights += [(41, ffn(48)), *norm(42, width, 0.1)]
    weights += [(33, 1 + 0.3 * rng.normal(size=64 * width)), (34, 0.03 * rng.normal(size=64 * width))]
    weights += [(27, encoder()) for _ in range(3)]
    if smolgen:
        weights.append((35, other.get("smolgen_w", rng.normal(size=64 * 64 * gen) / gen**0.5)))
    if several:  # of the policies one has an embedding of its own
        heads = [(k, message(*policy(int(k == 4), 3, 5, 7))) for k in (3, 4, 5, 6)]
        weights.append((45, message(*dense("ip_pol", 1, width, 20, 10), *heads)))
        weights.append((44, message(*((k, message(*values(1, 3, 5))) for k in (1, 2, 3)))))
    else:
        weights += policy(4, 17, 19, 22) + values(29, 7, 9)
    kinds = {1: 1, 2: value, 3: network_format, 4: 3, 5: value, 10: embedding, **(form or {})}
    layout = message((1, 1), (2, message(*kinds.items())))
    weights += other.get("weights", [])
    return b"\x0d" + struct.pack("<I", 0x1C0) + message((4, layout), (10, message(*weights)))
