"""Lc0's weight files (`.pb.gz`), read and written: a gzipped protocol buffer `Net`, without generated code.

Read here: residual networks with or without squeeze-and-excitation, ReLU or Mish, classical, convolutional or attention
policy, scalar or win-draw-loss value, moves-left head or none. Shapes follow from the lengths of arrays. Attention
bodies: `attention`.
Format: https://github.com/LeelaChessZero/lczero-common/blob/master/proto/net.proto
"""

import gzip
import io
import operator
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from matrixlib.files import write_bytes
from matrixlib.tasks.chess.config import Lc0Activation, ModelConfig, lc0_changes
from matrixlib.tasks.chess.model import LC0_PLANES, PolicyValueNet

CLOCK, CLOCK_SCALE = 109, 100  # plane of the half-move clock, and its divisor in our planes
NOW = (*range(13), *range(104, LC0_PLANES))  # planes of a network without history
MAGIC = b"\x0d\xc0\x01\0\0"
EPS = 1e-5
MAX_BYTES = 1 << 30  # decompressed
MAX_FIELDS = 1 << 16  # of a message
LINEAR16 = 1
POLICIES = {"dense": 1, "conv": 2, "attention": 3}
ATTENTION = {"embed": 4, "query": 17, "key": 19}  # fields of the weights of its policy
HEADS = (("value_head", 6, 7, 9), ("moves_left_head", 12, 13, 15))  # fields of their layers
FORMATS = {  # name -> (field, supported values)
    "input": (1, (0, 1)),
    "network": (3, (0, 1, 2, 3, 4, 6, 7, 134)),  # residual, 3 and 4 with specified heads; then with attention bodies
    "policy": (4, (0, 1, 2, 3)),
    "value": (5, (0, 1, 2)),
    "moves_left": (6, (0, 1)),
    "activation": (7, (0, 1)),
    **{name: (field, range(9)) for name, field in (("smolgen_activation", 8), ("ffn_activation", 9))},
    "input_embedding": (10, (0, 1, 2)),
}
FORMAT_NAMES = {
    ("network", 5): "an embedded ONNX file",
    ("input", 2): "112 planes with castling by files",
    **{("input", number): "canonical planes" for number in (3, 4, 5)},
}

Arrays = dict[str, NDArray[np.float64]]


def unpack(path: Path | str) -> "Message":
    """The message `Net` of a file; ValueError for a damaged one."""
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
    return Message(memoryview(data))


class Message:
    """A protocol buffer (https://protobuf.dev/programming-guides/encoding); ValueError if invalid, TypeError for a
    field of another type. fields: number -> integers, or views of bytes, so that a claimed length takes no memory.
    From a dict: fields with messages as dicts and layers as tensors; a list for a repeated field.
    """

    def __init__(self, data: memoryview | dict[int, Any]) -> None:
        self.fields: dict[int, list[Any]] = {}
        if isinstance(data, dict):
            self.fields |= {number: value if isinstance(value, list) else [value] for number, value in data.items()}
            return
        at = count = 0
        while at < len(data):
            if (count := count + 1) > MAX_FIELDS:
                raise ValueError(f"a message of more than {MAX_FIELDS:,} fields")
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
        part = self.fields.get(number, [b""])[place]
        return Message(part if isinstance(part, dict) else memoryview(part))


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """(integer of up to ten bytes, its end)."""
    value = 0
    for place, byte in enumerate(data[at : at + 10]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise ValueError(f"an unterminated integer at byte {at}")


def parse(net: Message) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(options of `model`, tensors) of a residual network; ValueError for a damaged or unsupported one. A batch norm
    that is folded into its convolution is read as one that changes nothing, with `num_batches_tracked` 0."""
    form = check_format(net.message(4))
    weights = net.message(10)
    if not weights.fields:
        raise ValueError("it has no weights")
    arrays = _normed("stem.conv", "stem.norm", weights.message(1), LC0_PLANES, 3)
    filters, blocks = len(arrays["stem.norm.bias"]), len(weights.fields.get(2, []))
    for number in range(blocks):
        block, name = weights.message(2, number), f"tower.{number}"
        for k in (0, 1):
            arrays |= _normed(f"{name}.convs.{k}", f"{name}.norms.{k}", block.message(1 + k), filters, 3)
        if (se := block.message(3)).fields:
            arrays |= _dense(f"{name}.se.reduce", se, 1) | _dense(f"{name}.se.expand", se, 3)
    policy, heads = ("policy_head.input.conv", "policy_head.input.norm"), HEADS[: 1 + form["moves_left"]]
    if form["policy"] == 2:
        arrays |= _normed(*policy, weights.message(11), filters, 3)
        arrays |= _plain("policy_head.planes", weights.message(3), len(arrays["policy_head.input.norm.bias"]), 3)
    elif form["policy"] == 3:
        if 21 in weights.fields:
            raise ValueError("unsupported: encoders in its policy")
        for name, field in ATTENTION.items():
            arrays |= _dense(f"policy_head.pairs.{name}", weights, field)
        arrays["policy_head.pairs.pieces.weight"] = read_layer("pieces", weights, 22).reshape(4, -1)
    else:
        arrays |= _normed(*policy, weights.message(3), filters, 1) | _dense("policy_head.dense", weights, 4)
    for head, conv, first, last in heads:
        arrays |= _normed(f"{head}.input.conv", f"{head}.input.norm", weights.message(conv), filters, 1)
        arrays |= _dense(f"{head}.fc1", weights, first) | _dense(f"{head}.fc3", weights, last)
    if bad := [name for name, array in arrays.items() if not np.isfinite(array).all()]:
        raise ValueError(f"{bad[0]} has values that are not finite")
    arrays["stem.conv.weight"][:, CLOCK] *= CLOCK_SCALE
    seen = arrays["stem.conv.weight"][:, 13:104].any()
    if not seen:
        arrays["stem.conv.weight"] = arrays["stem.conv.weight"][:, NOW]
    width = {name.removesuffix(".bias"): array.size for name, array in arrays.items()}
    sizes = {head: {"channels": width[f"{head}.input.norm"], "hidden": width[f"{head}.fc1"]} for head, *_ in heads}
    kind = {0: "dense"} | {number: name for name, number in POLICIES.items()}
    activation = "mish" if form["activation"] else "relu"
    options = {
        "encoding": "lc0",
        "history": bool(seen),
        "channels": filters,
        "blocks": blocks,
        "preact": False,
        "activation": activation,
        "norm": {"blocks": "batch", "stem_heads": "batch"},
        "se_ratio": width.get("tower.0.se.reduce", 0) / filters,
        "policy": {
            "kind": kind[form["policy"]],
            "channels": width.get(policy[1]) or width["policy_head.pairs.embed"],
            **({"rank": width["policy_head.pairs.key"]} if form["policy"] == 3 else {}),
        },
        "value": sizes["value_head"]
        | {"kind": "wdl" if width["value_head.fc3"] == 3 else "scalar", "activation": activation},
        "moves_left": sizes.get("moves_left_head", {}),
        "ssl": [],
    }
    tensors = {name: torch.from_numpy(array.astype(np.float32)) for name, array in arrays.items()}
    counters = {n: tensor.long() for n, tensor in tensors.items() if n.endswith("num_batches_tracked")}
    return options, tensors | counters


def check_format(message: Message) -> dict[str, int]:
    """The network format by the names of `FORMATS`. ValueError for an unsupported one."""
    form, encoding = message.message(2), message.integer(1)
    found = {name: form.integer(field) for name, (field, _) in FORMATS.items()}
    if found["network"] < 3:  # older than the choice of heads
        found |= {"policy": 1, "value": 1}
    bad = [
        FORMAT_NAMES.get(one, "{} format {}".format(*one)) for one in found.items() if one[1] not in FORMATS[one[0]][1]
    ]
    if bad := bad + [f"weights in encoding {encoding}"] * (encoding not in (0, LINEAR16)):
        raise ValueError(
            f"unsupported: {', '.join(bad)}; supported are residual networks and attention bodies with 112 classical "
            "planes, a classical, convolutional or attention policy and 16-bit weights"
        )
    return found


def _convolution(name: str, block: Message, inputs: int, kernel: int) -> tuple[NDArray[np.float64], Arrays]:
    """Weights of a convolution, and its batch norm (with the bias) by the names of torch."""
    weights, *parts = (read_layer(name, block, number) for number in range(1, 7))
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
    norm = {
        "weight": gamma,
        "bias": beta,
        "running_mean": mean - bias,
        "running_var": np.where(variance + EPS > 0, variance, np.nan),  # named by `parse`
        "num_batches_tracked": np.array(float(len(parts[1]) > 0)),
    }
    return weights.reshape(outputs, inputs, kernel, kernel), norm


def _normed(conv: str, norm: str, block: Message, inputs: int, kernel: int) -> Arrays:
    """A convolution and its batch norm."""
    weights, parts = _convolution(conv, block, inputs, kernel)
    return {f"{conv}.weight": weights, **{f"{norm}.{name}": array for name, array in parts.items()}}


def _plain(name: str, block: Message, inputs: int, kernel: int) -> Arrays:
    """A convolution with folded batch norm."""
    weights, norm = _convolution(name, block, inputs, kernel)
    scale = norm["weight"] / np.sqrt(norm["running_var"] + EPS)
    bias = norm["bias"] - scale * norm["running_mean"]
    return {f"{name}.weight": weights * scale[:, None, None, None], f"{name}.bias": bias}


def _dense(name: str, message: Message, field: int) -> Arrays:
    """A dense layer: weights in a field, biases in the next."""
    weights, bias = read_layer(name, message, field), read_layer(name, message, field + 1)
    if not len(bias) or len(weights) % len(bias):
        raise ValueError(f"{name} has {len(weights):,} weights for {len(bias):,} biases")
    return {f"{name}.weight": weights.reshape(len(bias), -1), f"{name}.bias": bias}


def read_layer(name: str, message: Message, number: int) -> NDArray[np.float64]:
    """Values of a layer, empty if absent: 16-bit integers scaled to [min, max]."""
    layer = message.message(number)
    if layer.integer(4) not in (0, LINEAR16):
        raise ValueError(f"{name} has encoding {layer.integer(4)}; only 16-bit linear weights are supported")
    low, high = (np.frombuffer(layer.chunk(bound) or bytes(4), "<f4")[0] for bound in (1, 2))
    with np.errstate(all="ignore"):  # what is not finite is named by `parse`
        values = np.frombuffer(layer.chunk(3), "<u2").astype(np.float32) / np.float32(65535) * (high - low) + low
    return values.astype(np.float64)


def write(model: nn.Module, path: Path | str, updates: int = 0) -> str:
    """Write a network, trained by so many `updates`, as a weight file, and say so. ValueError for a network that Lc0
    cannot run, with the options to train with, and for a path that cannot be written."""
    if not isinstance(model, PolicyValueNet) or model.own_trunk is not None:
        raise ValueError("Lc0 has no weight files for an own trunk or an ONNX file")
    if changes := lc0_changes(model.config):
        raise ValueError(f"Lc0 cannot run this network: train one with {changes} (preset lc0_quick)")
    if not os.path.basename(path).endswith(".pb.gz"):
        raise ValueError(f"{path}: the name of a weight file must end in .pb.gz")
    if bad := [name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()]:
        raise ValueError(f"Lc0 cannot run this network: {bad[0]} is not finite")
    data = gzip.compress(_net(model, updates), mtime=0)
    try:
        write_bytes(Path(path), data)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from error
    left = [f"ssl_{name}" for name in model.config.ssl] + list(model.own_heads)
    return f"wrote {path}, {len(data) / 1e6:.1f} MB" + (f", without the heads {', '.join(left)}" if left else "")


def _net(model: PolicyValueNet, updates: int) -> bytes:
    """The message `Net` of a network."""
    arrays, config = {name: one.cpu().double().numpy() for name, one in model.state_dict().items()}, model.config
    encoders = config.trunk == "encoder"
    weights = _encoders(config, arrays, cast(Any, model).places) if encoders else _residual(config, arrays)
    attention = encoders or config.activation == "mish" or config.policy.kind == "attention"
    least = _message((1, 0), (2, 31 if encoders else 29 if attention else 21), (3, 0))  # version of Lc0
    form = _message((1, LINEAR16), (2, _message(*form_of(config).items())))
    return MAGIC[:5] + _message((3, least), (4, form), (5, _message((1, updates))), (10, _message(*weights)))


def form_of(config: ModelConfig) -> dict[int, int]:
    """The message `NetworkFormat` of a network."""
    wdl, options, names = 1 + (config.value.kind == "wdl"), config.encoder, get_args(Lc0Activation)
    form = {1: 1, 2: wdl, 3: 4 if config.se_ratio else 3, 4: POLICIES[config.policy.kind], 5: wdl}
    form |= {6: int(config.moves_left.channels > 0), 7: int(config.activation == "mish")}
    if config.trunk == "encoder":
        activations = (names.index(name) for name in (options.smolgen_activation, options.ffn_activation))
        form |= {3: 7, **dict(enumerate(activations, 8)), 10: 1 + (options.dense > 0)}
    return form


def _encoders(config: ModelConfig, arrays: Arrays, places: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """Fields of the weights of an attention body. places: as of `AttentionNet`."""
    root: dict[tuple[int, int], Any] = {(28, -1): config.encoder.heads}
    for name, place in places.items():
        message = root
        for step in place[:-1]:
            message = message.setdefault(step, {})
        message[place[-1]] = _all_planes(config, arrays[name]) if name == "stem.embed.0.weight" else arrays[name]

    def fields(message: dict[tuple[int, int], Any]) -> list[tuple[int, Any]]:
        return [(n, _message(*fields(one)) if isinstance(one, dict) else one) for (n, _), one in message.items()]

    return fields(root)


def _all_planes(config: ModelConfig, weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights (C, 112 + N, ...) for all of Lc0's planes and N further inputs, from those of the network's planes."""
    missing = 0 if config.history else LC0_PLANES - len(NOW)
    out = np.zeros((len(weight), weight.shape[1] + missing, *weight.shape[2:]))
    out[:, [*NOW, *range(LC0_PLANES, out.shape[1])] if missing else slice(None)] = weight
    out[:, CLOCK] /= CLOCK_SCALE
    return out


def _residual(config: ModelConfig, arrays: Arrays) -> list[tuple[int, Any]]:
    """Fields of the weights of a residual network."""

    def normed(conv: str, norm: str) -> bytes:
        """ConvBlock scaled to outputs of variance 1, as 16 bits for all variances of a layer would be too few."""
        deviation = np.sqrt(arrays[f"{norm}.running_var"] + EPS)
        weight = arrays[f"{conv}.weight"] / deviation[:, None, None, None]
        weight = _all_planes(config, weight) if conv == "stem.conv" else weight
        mean, variance = arrays[f"{norm}.running_mean"] / deviation, np.full(len(weight), 1 - EPS)
        layers = (weight, None, mean, variance, arrays[f"{norm}.weight"], arrays[f"{norm}.bias"])
        return _message(*((k, layer) for k, layer in enumerate(layers, 1) if layer is not None))

    def layers(name: str, field: int) -> list[tuple[int, Any]]:
        return [(field, arrays[f"{name}.weight"]), (field + 1, arrays[f"{name}.bias"])]

    weights: list[tuple[int, Any]] = [(1, normed("stem.conv", "stem.norm"))]
    for number in range(config.blocks):
        name = f"tower.{number}"
        block: list[tuple[int, Any]] = [(1 + k, normed(f"{name}.convs.{k}", f"{name}.norms.{k}")) for k in (0, 1)]
        if config.se_ratio:
            block.append((3, _message(*layers(f"{name}.se.reduce", 1), *layers(f"{name}.se.expand", 3))))
        weights.append((2, _message(*block)))
    kind = config.policy.kind
    if kind == "attention":
        weights += [layer for name, field in ATTENTION.items() for layer in layers(f"policy_head.pairs.{name}", field)]
        weights.append((22, arrays["policy_head.pairs.pieces.weight"]))
    else:
        policy = normed("policy_head.input.conv", "policy_head.input.norm")
        weights.append((11 if kind == "conv" else 3, policy))
        last = layers("policy_head.planes", 1) if kind == "conv" else layers("policy_head.dense", 4)
        weights += [(3, _message(*last))] if kind == "conv" else last
    for head, conv, first, final in HEADS[: 1 + (config.moves_left.channels > 0)]:
        weights.append((conv, normed(f"{head}.input.conv", f"{head}.input.norm")))
        weights += [*layers(f"{head}.fc1", first), *layers(f"{head}.fc3", final)]
    return weights


def _message(*fields: tuple[int, Any]) -> bytes:
    """A message of numbers, messages (bytes) and layers (arrays)."""
    out = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            out += _number(number << 3) + _number(value)
        else:
            data = value if isinstance(value, bytes) else _packed(value)
            out += _number(number << 3 | 2) + _number(len(data)) + data
    return bytes(out)


def _packed(values: NDArray[np.float64]) -> bytes:
    """A layer of 16-bit integers from least to greatest; with zeros on a grid whose step 32,768 is exactly 0."""
    low, span = values.min(), np.ptp(values) or 1.0
    if not values.all():
        span = 2.0 ** np.ceil(np.log2(2.0001 * np.abs(values).max() or 1.0))
        low = -float(np.float32(32768) / np.float32(65535)) * span
    steps = np.rint((values - low) / span * 65535).astype("<u2").tobytes()
    return b"\x0d" + struct.pack("<f", low) + b"\x15" + struct.pack("<f", low + span) + _message((3, steps))


def _number(value: int) -> bytes:
    """A varint."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
