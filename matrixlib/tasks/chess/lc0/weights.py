"""Weight files of Leela Chess Zero (`.pb.gz`): a gzip of the message `Net`, read without code of its own.

Residual networks are read, with and without squeeze-and-excitation, with a classical or convolutional policy and a
scalar or win-draw-loss value; a moves-left head is passed over. The file has no shapes: they follow from lengths.
The format: https://github.com/LeelaChessZero/lczero-common/blob/master/proto/net.proto
"""

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from matrixlib.tasks.chess.lc0 import wire
from matrixlib.tasks.chess.lc0.moves import CONV_PLANES, POLICY

PLANES = 112
MAGIC = 0x1C0
EPS = 1e-5
GZIP = b"\x1f\x8b"
MOST_BYTES = 1 << 30  # of what a file unpacks to
MOST_RATIO = 64  # of unpacked to packed bytes: 16-bit weights hardly shrink
PIECE = 1 << 20  # bytes unpacked at a time

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
    except ValueError as error:
        raise ValueError(f"{path.name} is no network of Lc0 that can be read: {error}") from None


def unpack(data: bytes) -> bytes:
    """What a .gz file holds; other data as they are. ValueError where it is damaged or far too large."""
    if not data.startswith(GZIP):
        return data
    most = min(MOST_BYTES, MOST_RATIO * len(data) + PIECE)
    stream, out, rest = zlib.decompressobj(31), bytearray(), data
    while not stream.eof:
        try:
            part = stream.decompress(rest, PIECE)
        except zlib.error as error:
            raise ValueError(f"the gzip file is damaged ({error}); get it again") from None
        rest = stream.unconsumed_tail
        if not part and not rest and not stream.eof:
            raise ValueError("the gzip file is cut short; get it again")
        out += part
        if len(out) > most:
            raise ValueError(f"it unpacks to more than {most >> 20} MiB, which no network does")
    return bytes(out)


def parse(data: bytes) -> Lc0Weights:
    """The network in a message `Net`. ValueError says what is wrong, or what is not supported."""
    net = wire.fields(memoryview(data))
    if wire.integer(net, 1) != MAGIC:
        raise ValueError("it does not start as a weight file of Lc0 does")
    network, conv_policy, wdl = _format(wire.message(net, 4))
    weights = wire.message(net, 10)
    if not weights:
        raise ValueError("it has no weights")
    reader = _Reader()
    filters = reader.convolution("input", wire.message(weights, 1), PLANES, 3)
    blocks, units = weights.get(2, []), 0
    for number, block in enumerate(blocks):
        if isinstance(block, int):
            raise ValueError(f"residual block {number} is a number")
        parts = wire.fields(block)
        for layer, field in (("conv1", 1), ("conv2", 2)):
            width = reader.convolution(f"tower.{number}.{layer}", wire.message(parts, field), filters, 3)
            _same(f"filters of tower.{number}.{layer}", width, filters)
        if network in (SE, SE_HEADS):
            se = wire.message(parts, 3)
            width = reader.dense(f"tower.{number}.reduce", se, (1, 2), filters)
            units = units or width
            _same(f"outputs of tower.{number}.reduce", width, units)
            _same(
                f"outputs of tower.{number}.expand",
                reader.dense(f"tower.{number}.expand", se, (3, 4), units),
                2 * filters,
            )
    if conv_policy:
        width = reader.convolution("policy1", wire.message(weights, 11), filters, 3)
        planes = reader.convolution("policy", wire.message(weights, 3), width, 3)
        _same("policy planes", planes, CONV_PLANES)
    else:
        width = reader.convolution("policy", wire.message(weights, 3), filters, 1)
        _same("moves", reader.dense("moves", weights, (4, 5), 64 * width), POLICY)
    value = reader.convolution("value", wire.message(weights, 6), filters, 1)
    hidden = reader.dense("value1", weights, (7, 8), 64 * value)
    _same("outputs of the value head", reader.dense("value2", weights, (9, 10), hidden), 3 if wdl else 1)
    return Lc0Weights(reader.arrays, filters, len(blocks), units, conv_policy, width, value, hidden, wdl)


def _format(message: wire.Fields) -> tuple[int, bool, bool]:
    """(network, convolutional policy, win-draw-loss); ValueError names what is not supported."""
    if wire.integer(message, 1) not in (0, LINEAR16):
        raise ValueError(f"weights in encoding {wire.integer(message, 1)} are not supported, only 16-bit linear ones")
    form = wire.message(message, 2)
    inputs, network, policy, value, activation = (wire.integer(form, number) for number in (1, 3, 4, 5, 7))
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

    def convolution(self, name: str, block: wire.Fields, inputs: int, kernel: int) -> int:
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

    def dense(self, name: str, message: wire.Fields, fields: tuple[int, int], inputs: int) -> int:
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


def _layer(name: str, message: wire.Fields, number: int) -> NDArray[np.float64]:
    """The numbers of a layer, none where it is not there: 16-bit steps from the least to the greatest."""
    layer = wire.message(message, number)
    if wire.integer(layer, 4) not in (0, LINEAR16):
        raise ValueError(f"{name} is in encoding {wire.integer(layer, 4)}: not supported, only 16-bit linear weights")
    params = wire.chunk(layer, 3)
    if len(params) % 2:
        raise ValueError(f"{name} ends within a number")
    low, high = np.float32(wire.real(layer, 1)), np.float32(wire.real(layer, 2))
    with np.errstate(all="ignore"):  # what is not finite is named by `_keep`
        values = np.frombuffer(params, "<u2").astype(np.float32) / np.float32(65535) * (high - low) + low
    return values.astype(np.float64)


def _same(what: str, have: int, need: int) -> None:
    if have != need:
        raise ValueError(f"{have:,} {what} in place of {need:,}")
