"""Reader of Lc0 weight files (`.pb.gz`): a gzipped protocol buffer `Net`, parsed without generated code.

Supported: residual networks with or without squeeze-and-excitation, classical or convolutional policy, scalar or
win-draw-loss value; a moves-left head is ignored. Shapes follow from the lengths of the arrays.
Format: https://github.com/LeelaChessZero/lczero-common/blob/master/proto/net.proto
"""

import gzip
import io
import operator
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PLANES = 112
MAGIC = b"\x0d\xc0\x01\0\0"
EPS = 1e-5
MAX_BYTES = 1 << 30  # decompressed
LINEAR16 = 1
FORMATS = {  # name -> (field, supported values)
    "input": (1, (0, 1)),
    "network": (3, (0, 1, 2, 3, 4)),  # with and without squeeze-and-excitation; 3 and 4 specify the heads
    "policy": (4, (0, 1, 2)),
    "value": (5, (0, 1, 2)),
    "activation": (7, (0,)),
}
FORMAT_NAMES = {
    ("network", 5): "an embedded ONNX file",
    ("network", 6): "an attention body",
    ("network", 7): "an attention body with several heads",
    ("input", 2): "112 planes with castling by files",
    **{("input", number): "canonical planes" for number in (3, 4, 5)},
    ("policy", 3): "an attention policy",
    ("activation", 1): "Mish activations",
}

Arrays = dict[str, NDArray[np.float32]]


def read(path: Path | str) -> Arrays:
    """Arrays of a network by the names of `network.Lc0Network`; ValueError for a damaged or unsupported file."""
    data = Path(path).read_bytes()
    if data.startswith(b"\x1f\x8b"):
        try:
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(MAX_BYTES + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"the gzip file is damaged or cut short ({error}); get it again") from None
    if len(data) > MAX_BYTES:
        raise ValueError(f"it unpacks to more than {MAX_BYTES >> 20} MiB")
    if not data.startswith(MAGIC):
        raise ValueError("it has no header of an Lc0 weight file")
    return parse(Message(memoryview(data)))


class Message:
    """A protocol buffer (https://protobuf.dev/programming-guides/encoding); ValueError if invalid, TypeError for a
    field of another type. fields: number -> integers, or views of bytes, so that a claimed length takes no memory.
    """

    def __init__(self, data: memoryview) -> None:
        self.fields: dict[int, list[Any]] = {}
        at = 0
        while at < len(data):
            key, at = _varint(data, at)
            kind = key & 7
            if kind not in (0, 1, 2, 5):
                raise ValueError(f"unknown wire type {kind} before byte {at}")
            value, at = _varint(data, at) if kind in (0, 2) else (8 if kind == 1 else 4, at)
            end = at if kind == 0 else at + value
            if end > len(data):
                raise ValueError(f"a field that ends {end - len(data):,} bytes after its message")
            self.fields.setdefault(key >> 3, []).append(data[at:end] if kind else value)
            at = end

    def integer(self, number: int) -> int:
        """An integer field, default 0."""
        return operator.index(self.fields.get(number, [0])[-1])

    def chunk(self, number: int, place: int = -1) -> memoryview:
        """A bytes field, default empty. place: index in a repeated field."""
        return memoryview(self.fields.get(number, [b""])[place])

    def message(self, number: int, place: int = -1) -> "Message":
        """A nested message, default empty."""
        return Message(self.chunk(number, place))


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """(integer of up to ten bytes, its end)."""
    value = 0
    for place, byte in enumerate(data[at : at + 10]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise ValueError(f"an unterminated integer at byte {at}")


def parse(net: Message) -> Arrays:
    """Arrays of a message `Net`, see `read`."""
    policy = _check_format(net.message(4))
    weights = net.message(10)
    if not weights.fields:
        raise ValueError("it has no weights")
    arrays = _convolution("input", weights.message(1), PLANES, 3)
    filters = len(arrays["input.bias"])
    for number in range(len(weights.fields.get(2, []))):
        block, name = weights.message(2, number), f"tower.{number}"
        arrays |= _convolution(f"{name}.conv1", block.message(1), filters, 3)
        arrays |= _convolution(f"{name}.conv2", block.message(2), filters, 3)
        if block.message(3).fields:
            arrays |= _dense(f"{name}.reduce", block.message(3), 1) | _dense(f"{name}.expand", block.message(3), 3)
    if policy == 2:
        arrays |= _convolution("policy1", weights.message(11), filters, 3)
        arrays |= _convolution("policy", weights.message(3), len(arrays["policy1.bias"]), 3)
    else:
        arrays |= _convolution("policy", weights.message(3), filters, 1) | _dense("moves", weights, 4)
    arrays |= _convolution("value", weights.message(6), filters, 1)
    arrays |= _dense("value1", weights, 7) | _dense("value2", weights, 9)
    if bad := [name for name, array in arrays.items() if not np.isfinite(array).all()]:
        raise ValueError(f"{bad[0]} has values that are not finite")
    return arrays


def _check_format(message: Message) -> int:
    """Check the network format; returns the policy format. ValueError for an unsupported one."""
    form, encoding = message.message(2), message.integer(1)
    found = {name: form.integer(field) for name, (field, _) in FORMATS.items()}
    if found["network"] < 3:  # older than the choice of heads
        found |= {"policy": 1, "value": 1}
    bad = [
        FORMAT_NAMES.get(one, "{} format {}".format(*one)) for one in found.items() if one[1] not in FORMATS[one[0]][1]
    ]
    if bad := bad + [f"weights in encoding {encoding}"] * (encoding not in (0, LINEAR16)):
        raise ValueError(
            f"unsupported: {', '.join(bad)}; supported are residual networks with 112 classical planes, ReLU, a "
            "classical or convolutional policy and 16-bit weights"
        )
    return found["policy"]


def _convolution(name: str, block: Message, inputs: int, kernel: int) -> Arrays:
    """A convolution with folded batch norm."""
    weights, *parts = (_layer(name, block, number) for number in range(1, 7))
    outputs, rest = divmod(len(weights), inputs * kernel * kernel)
    if rest or not outputs:
        raise ValueError(f"{name} has {len(weights):,} weights, not a multiple of {inputs} x {kernel} x {kernel}")
    if any(len(part) not in (0, outputs) for part in parts):
        raise ValueError(f"{name} has biases or a batch norm that do not match its {outputs:,} outputs")
    # Lc0 calls the variances `bn_stddivs`.
    bias, mean, variance, gamma, beta = (
        part if len(part) else np.full(outputs, default)
        for part, default in zip(parts, (0.0, 0.0, 1 - EPS, 1.0, 0.0), strict=True)
    )
    with np.errstate(invalid="ignore", divide="ignore"):  # what is not finite is named by `parse`
        scale = gamma / np.sqrt(variance + EPS)
    folded = weights.reshape(outputs, -1) * scale[:, None]
    return {
        f"{name}.weight": folded.reshape(outputs, inputs, kernel, kernel).astype(np.float32),
        f"{name}.bias": (beta - scale * (mean - bias)).astype(np.float32),
    }


def _dense(name: str, message: Message, field: int) -> Arrays:
    """A dense layer: weights in a field, biases in the next."""
    weights, bias = _layer(name, message, field), _layer(name, message, field + 1)
    if not len(bias) or len(weights) % len(bias):
        raise ValueError(f"{name} has {len(weights):,} weights for {len(bias):,} biases")
    return {
        f"{name}.weight": weights.reshape(len(bias), -1).astype(np.float32),
        f"{name}.bias": bias.astype(np.float32),
    }


def _layer(name: str, message: Message, number: int) -> NDArray[np.float64]:
    """Values of a layer, empty if absent: 16-bit integers scaled to [min, max]."""
    layer = message.message(number)
    if layer.integer(4) not in (0, LINEAR16):
        raise ValueError(f"{name} has encoding {layer.integer(4)}; only 16-bit linear weights are supported")
    low, high = (np.frombuffer(layer.chunk(bound) or bytes(4), "<f4")[0] for bound in (1, 2))
    with np.errstate(all="ignore"):  # what is not finite is named by `parse`
        values = np.frombuffer(layer.chunk(3), "<u2").astype(np.float32) / np.float32(65535) * (high - low) + low
    return values.astype(np.float64)
