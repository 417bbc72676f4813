"""Weight files of Leela Chess Zero (`.pb.gz`): a gzip of the message `Net`, read without code of its own.

Residual networks are read, with and without squeeze-and-excitation, with a classical or convolutional policy and a
scalar or win-draw-loss value; a moves-left head is passed over. The file has no shapes: they follow from lengths.
The format: https://github.com/LeelaChessZero/lczero-common/blob/master/proto/net.proto
"""

import gzip
import io
import operator
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from matrixlib.tasks.chess.lc0.moves import CONV_PLANES, POLICY

PLANES = 112
MAGIC = 0x1C0
EPS = 1e-5
GZIP = b"\x1f\x8b"
MOST_BYTES = 1 << 30  # of what a file unpacks to
MOST_RATIO = 64  # of unpacked to packed bytes: 16-bit weights hardly shrink
MOST_FIELDS = 4096  # of one message: ten times what the deepest network has

CLASSICAL, SE, CLASSICAL_HEADS, SE_HEADS = range(1, 5)  # `network`
NETWORKS = {5: "an ONNX file in a shell", 6: "an attention body", 7: "an attention body with several heads"}
INPUTS = {2: "112 planes with castling by files", 3: "canonical planes", 4: "canonical planes", 5: "canonical planes"}
POLICIES = {3: "an attention policy"}
LINEAR16 = 1

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Lc0Weights:
    """The arrays of a network by the names of `network.Lc0Network`, and what they make.

    units: of the squeeze-and-excitation, 0 without one. conv_policy: convolutional or classical. wdl: win-draw-loss or
    scalar value. hidden: width of the value head's inner layer.
    """

    arrays: dict[str, Array]
    filters: int
    blocks: int
    units: int
    conv_policy: bool
    policy_filters: int
    value_filters: int
    hidden: int
    wdl: bool


def read(path: Path | str) -> Lc0Weights:
    """Read a weight file. ValueError names the file and what is wrong with it, or what is not supported."""
    path = Path(path)
    try:
        return parse(unpack(path.read_bytes()))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path.name} is no network of Lc0 that can be read: {error}") from None


def unpack(data: bytes) -> bytes:
    """What a .gz file holds; other data as they are. ValueError where it is damaged or far too large."""
    if not data.startswith(GZIP):
        return data
    most = min(MOST_BYTES, MOST_RATIO * len(data) + (1 << 20))
    try:
        out = gzip.GzipFile(fileobj=io.BytesIO(data)).read(most + 1)
    except EOFError:
        raise ValueError("the gzip file is cut short; get it again") from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"the gzip file is damaged ({error}); get it again") from None
    if len(out) > most:
        raise ValueError(f"it unpacks to more than {most >> 20} MiB, which no network does")
    return out


class Message:
    """A message of protocol buffers as it lies in a file (https://protobuf.dev/programming-guides/encoding).

    fields: number -> what stands there, in the order of the file: an integer (fixed ones by their bits), or a view of
    the bytes, so a length that is not there takes no memory. ValueError where it is no message.
    """

    def __init__(self, data: memoryview) -> None:
        self.fields: dict[int, list[int | memoryview]] = {}
        self._data, self._at = data, 0
        count = 0
        while self._at < len(data):
            key = self._varint()
            kind = key & 7
            if kind in (1, 5):
                held: int | memoryview = int.from_bytes(self._bytes(8 if kind == 1 else 4), "little")
            elif kind == 2:
                held = self._bytes(self._varint())
            elif kind == 0:
                held = self._varint()
            else:
                raise ValueError(f"a field of the unknown kind {kind} at byte {self._at}")
            count += 1
            if count > MOST_FIELDS:
                raise ValueError(f"more than {MOST_FIELDS:,} fields in one message")
            self.fields.setdefault(key >> 3, []).append(held)

    def integer(self, number: int) -> int:
        """An integer field, 0 where it is not set. TypeError where the field is of another kind, as below."""
        return operator.index(self.fields.get(number, [0])[-1])  # type: ignore[arg-type]

    def real(self, number: int) -> float:
        """A field of 32 bits as a floating-point number."""
        return struct.unpack("<f", struct.pack("<I", self.integer(number) & 0xFFFFFFFF))[0]

    def chunk(self, number: int, place: int = -1) -> memoryview:
        """A field of bytes, empty where it is not set; place: of several."""
        return memoryview(self.fields.get(number, [b""])[place])  # type: ignore[arg-type]

    def message(self, number: int, place: int = -1) -> "Message":
        """A message within it, empty where it is not set."""
        return Message(self.chunk(number, place))

    def _varint(self) -> int:
        """An integer of up to ten bytes."""
        value, begin = 0, self._at
        for byte in self._data[begin : begin + 10]:
            value |= (byte & 127) << 7 * (self._at - begin)
            self._at += 1
            if byte < 128:
                return value
        raise ValueError(f"a number without an end at byte {self._at}")

    def _bytes(self, size: int) -> memoryview:
        if size > len(self._data) - self._at:
            raise ValueError(f"a field of {size:,} bytes where {len(self._data) - self._at:,} are left")
        self._at += size
        return self._data[self._at - size : self._at]


def parse(data: bytes) -> Lc0Weights:
    """The network in a message `Net`. ValueError says what is wrong, or what is not supported."""
    net = Message(memoryview(data))
    if net.integer(1) != MAGIC:
        raise ValueError("it does not start as a weight file of Lc0 does")
    network, conv_policy, wdl = _format(net.message(4))
    weights = net.message(10)
    if not weights.fields:
        raise ValueError("it has no weights")
    reader = _Reader()
    filters = reader.convolution("input", weights.message(1), PLANES, 3)
    blocks, units = len(weights.fields.get(2, [])), 0
    for number in range(blocks):
        parts = weights.message(2, number)
        for layer, field in (("conv1", 1), ("conv2", 2)):
            width = reader.convolution(f"tower.{number}.{layer}", parts.message(field), filters, 3)
            _same(f"filters of tower.{number}.{layer}", width, filters)
        if network in (SE, SE_HEADS):
            se = parts.message(3)
            width = reader.dense(f"tower.{number}.reduce", se, (1, 2), filters)
            units = units or width
            _same(f"outputs of tower.{number}.reduce", width, units)
            _same(
                f"outputs of tower.{number}.expand",
                reader.dense(f"tower.{number}.expand", se, (3, 4), units),
                2 * filters,
            )
    if conv_policy:
        width = reader.convolution("policy1", weights.message(11), filters, 3)
        planes = reader.convolution("policy", weights.message(3), width, 3)
        _same("policy planes", planes, CONV_PLANES)
    else:
        width = reader.convolution("policy", weights.message(3), filters, 1)
        _same("moves", reader.dense("moves", weights, (4, 5), 64 * width), POLICY)
    value = reader.convolution("value", weights.message(6), filters, 1)
    hidden = reader.dense("value1", weights, (7, 8), 64 * value)
    _same("outputs of the value head", reader.dense("value2", weights, (9, 10), hidden), 3 if wdl else 1)
    return Lc0Weights(reader.arrays, filters, blocks, units, conv_policy, width, value, hidden, wdl)


def _format(message: Message) -> tuple[int, bool, bool]:
    """(network, convolutional policy, win-draw-loss); ValueError names what is not supported."""
    if message.integer(1) not in (0, LINEAR16):
        raise ValueError(f"weights in encoding {message.integer(1)} are not supported, only 16-bit linear ones")
    form = message.message(2)
    inputs, network, policy, value, activation = (form.integer(number) for number in (1, 3, 4, 5, 7))
    network = network or CLASSICAL
    problems = []
    if network not in (CLASSICAL, SE, CLASSICAL_HEADS, SE_HEADS):
        problems.append(NETWORKS.get(network, f"network format {network}"))
    if network in (CLASSICAL, SE):  # from before there were several heads
        policy, value = 1, 1
    if policy not in (0, 1, 2):
        problems.append(POLICIES.get(policy, f"policy format {policy}"))
    if value not in (0, 1, 2):
        problems.append(f"value format {value}")
    if inputs not in (0, 1):
        problems.append(INPUTS.get(inputs, f"input format {inputs}"))
    if activation:
        problems.append("Mish activations" if activation == 1 else f"activation {activation}")
    if problems:
        raise ValueError(
            f"it has {', '.join(problems)}: not supported. Residual networks with 112 classical planes, "
            "ReLU and a classical or convolutional policy are"
        )
    return network, policy == 2, value == 2


class _Reader:
    """Layers of a file, by name and in the shapes that their lengths say."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}

    def convolution(self, name: str, block: Message, inputs: int, kernel: int) -> int:
        """Read a convolution, with its batch norm folded into it; returns its outputs."""
        weights, bias, mean, variance, gamma, beta = (_layer(name, block, number) for number in range(1, 7))
        area = inputs * kernel * kernel
        outputs, rest = divmod(len(weights), area)
        if rest or not outputs:
            raise ValueError(f"{name} has {len(weights):,} weights, no multiple of {inputs} x {kernel} x {kernel}")
        for part, array in (("biases", bias), ("means", mean), ("variances", variance), ("gammas", gamma)):
            _same(f"{part} of {name}", len(array) or outputs, outputs)
        _same(f"betas of {name}", len(beta) or outputs, outputs)
        # Lc0 calls the variances `bn_stddivs`.
        variance = variance if len(variance) else np.full(outputs, 1 - EPS)
        if not (variance > -EPS).all():
            raise ValueError(f"{name} has a negative variance")
        scale = (gamma if len(gamma) else np.ones(outputs)) / np.sqrt(variance + EPS)
        shift = (mean if len(mean) else 0.0) - (bias if len(bias) else 0.0)
        folded = (beta if len(beta) else 0.0) - scale * shift
        self._keep(
            f"{name}.weight", (weights.reshape(outputs, area) * scale[:, None]), (outputs, inputs, kernel, kernel)
        )
        self._keep(f"{name}.bias", np.broadcast_to(folded, outputs), (outputs,))
        return outputs

    def dense(self, name: str, message: Message, fields: tuple[int, int], inputs: int) -> int:
        """Read a dense layer (weights and biases in two fields); returns its outputs."""
        weights, bias = (_layer(name, message, number) for number in fields)
        if not len(bias) or len(weights) != inputs * len(bias):
            raise ValueError(f"{name} has {len(weights):,} weights and {len(bias):,} biases for {inputs:,} inputs")
        self._keep(f"{name}.weight", weights, (len(bias), inputs))
        self._keep(f"{name}.bias", bias, (len(bias),))
        return len(bias)

    def _keep(self, name: str, values: NDArray[np.float64], shape: tuple[int, ...]) -> None:
        array = values.astype(np.float32).reshape(shape)
        if not np.isfinite(array).all():
            raise ValueError(f"{name} has values that are not finite")
        self.arrays[name] = array


def _layer(name: str, message: Message, number: int) -> NDArray[np.float64]:
    """The numbers of a layer, none where it is not there: 16-bit steps from the least to the greatest."""
    layer = message.message(number)
    if layer.integer(4) not in (0, LINEAR16):
        raise ValueError(f"{name} is in encoding {layer.integer(4)}: not supported, only 16-bit linear weights")
    params = layer.chunk(3)
    if len(params) % 2:
        raise ValueError(f"{name} ends within a number")
    low, high = np.float32(layer.real(1)), np.float32(layer.real(2))
    with np.errstate(all="ignore"):  # what is not finite is named by `_keep`
        values = np.frombuffer(params, "<u2").astype(np.float32) / np.float32(65535) * (high - low) + low
    return values.astype(np.float64)


def _same(what: str, have: int, need: int) -> None:
    if have != need:
        raise ValueError(f"{have:,} {what} in place of {need:,}")
