"""Reading networks of Matrix0 (github.com/lukifer23/Matrix0): its options and its checkpoints.

Loading is strict: every key of the file is used exactly once or is a listed alias, and every parameter and
buffer of ours is filled. The outputs of its network are reproduced to float error.
"""

import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from matrixlib.tasks.chess.blocks import SQUARES
from matrixlib.tasks.chess.config import AttentionConfig, ModelConfig, NormConfig, PolicyHeadConfig, ValueHeadConfig
from matrixlib.tasks.chess.model import MOVES, PLANES, PolicyValueNet

DEFAULTS: dict[str, Any] = {  # of Matrix0's NetConfig
    "planes": PLANES,
    "channels": 160,
    "blocks": 14,
    "policy_size": MOVES,
    "se": True,
    "se_ratio": 0.25,
    "attention": True,
    "attention_heads": 8,
    "attention_unmasked_mix": 0.2,
    "attention_relbias": True,
    "attention_every_k": 3,
    "chess_features": True,
    "self_supervised": True,
    "piece_square_tables": True,
    "wdl": False,
    "policy_factor_rank": 0,
    "norm": "batch",
    "activation": "relu",
    "preact": False,
    "droppath": 0.0,
    "aux_policy_from_square": False,
    "aux_policy_move_type": False,
    "enable_visual": False,
    "ssl_tasks": ["piece"],
}
IGNORED = frozenset(  # of no effect on the network at the commits that this module reads
    {"visual_encoder_channels", "ssl_curriculum", "ssrl_tasks", "enable_llm_tutor", "llm_model_path"}
)
PUBLISHED: dict[str, Any] = {
    "preact": True,
    "activation": "silu",
    "attention_unmasked_mix": 0.2,
    "attention_heads": 20,
    "droppath": 0.1,
}
"""Of its published network: what shapes do not show, for files that do not say it either."""
SCHEMAS = ("model_ema", "model", "model_state_dict")
"""Where weights stand in a checkpoint, best first; Matrix0's training and matches read them in this order."""
ALIASES = {"ssl_head.": "ssl_piece_head."}
"""Keys that repeat the tensors of other keys."""
POLICY_CHANNELS = 64
PREFIXES = ("_orig_mod.", "module.")
"""Put before every key by torch.compile and DataParallel."""
COUNTER = "num_batches_tracked"
NAMES = (  # our name -> its name, first match wins
    (r"stem\.conv\.", "stem.0."),
    (r"stem\.norm\.", "stem.1."),
    (r"features\.square_(conv|norm)\.", r"chess_features.pst_\1."),
    (r"features\.neighbour_(conv|norm)\.", r"chess_features.interaction_\1."),
    (r"features\.", "chess_features."),
    (r"tower\.(\d+)\.convs\.0\.", r"tower.\1.conv1."),
    (r"tower\.(\d+)\.convs\.1\.", r"tower.\1.conv2."),
    (r"tower\.(\d+)\.norms\.0\.", r"tower.\1.bn1."),
    (r"tower\.(\d+)\.norms\.1\.", r"tower.\1.bn2."),
    (r"tower\.(\d+)\.se\.reduce\.", r"tower.\1.se_fc1."),
    (r"tower\.(\d+)\.se\.expand\.", r"tower.\1.se_fc2."),
    (r"tower\.(\d+)\.bias", r"tower.\1.rel_bias"),
    (r"policy_head\.input\.conv\.", "policy_head.0."),
    (r"policy_head\.input\.norm\.", "policy_head.1."),
    (r"policy_head\.reduce\.", "policy_fc1."),
    (r"policy_head\.expand\.", "policy_fc2."),
    (r"policy_head\.dense\.", "policy_fc."),
    (r"policy_head\.logit_norm\.", "policy_fc_norm."),
    (r"value_head\.input\.conv\.", "value_head.0."),
    (r"value_head\.input\.norm\.", "value_head.1."),
    (r"value_head\.fc([123])\.", r"value_fc\1."),
    (r"ssl_heads\.piece\.input\.conv\.", "ssl_piece_head.0."),
    (r"ssl_heads\.piece\.input\.norm\.", "ssl_piece_head.1."),
    (r"ssl_heads\.piece\.out\.", "ssl_piece_head.3."),
    (r"auxiliary\.(\w+)\.input\.conv\.", r"aux_\1.0."),
    (r"auxiliary\.(\w+)\.input\.norm\.", r"aux_\1.1."),
    (r"auxiliary\.(\w+)\.out\.", r"aux_\1.3."),
)
POINTWISE = re.compile(r"tower\.\d+\.(qkv|proj)\.weight")  # 1x1 convolutions there, linear layers here


@dataclass(frozen=True)
class LoadReport:
    """What `load_matrix0` did. `used`: its key -> our name; `aliases`: its keys that repeat another; `keys`:
    all keys of the file's state dict; `schema`: where they stood; `messages`: what a person should know.
    """

    schema: str
    keys: int
    used: Mapping[str, str]
    aliases: tuple[str, ...]
    messages: tuple[str, ...]


def matrix0_config(netconfig: Mapping[str, Any]) -> ModelConfig:
    """Our options for a NetConfig of Matrix0 (missing fields have its defaults).

    Its blocks never read `norm` (BatchNorm always) and use momentum 0.9; its mix of 1 or more means masked attention
    alone, 0 or less unmasked alone. Raises ValueError naming unknown fields and options that we do not have.
    """
    if unknown := sorted(set(netconfig) - set(DEFAULTS) - IGNORED):
        raise ValueError(f"unknown fields of Matrix0's NetConfig: {', '.join(unknown)}")
    options = DEFAULTS | {key: value for key, value in netconfig.items() if key not in IGNORED}
    supported: dict[str, Any] = {"planes": PLANES, "policy_size": MOVES, "wdl": False, "enable_visual": False}
    if options["chess_features"]:
        supported["piece_square_tables"] = True
    if options["self_supervised"]:
        options["ssl_tasks"] = list(options["ssl_tasks"])
        supported["ssl_tasks"] = ["piece"]
    if bad := [f"{k} {options[k]!r} (only {value!r})" for k, value in supported.items() if options[k] != value]:
        raise ValueError(f"options of Matrix0's network that are not supported: {', '.join(bad)}")
    if options["aux_policy_from_square"] != options["aux_policy_move_type"]:
        raise ValueError("aux_policy_from_square and aux_policy_move_type must both be on or both off")
    mix, rank, channels = (options["attention_unmasked_mix"], options["policy_factor_rank"], options["channels"])
    return ModelConfig(
        encoding="matrix0",
        channels=channels,
        blocks=options["blocks"],
        block="basic",
        bottleneck=2,
        preact=options["preact"],
        activation=options["activation"],
        norm=NormConfig(blocks="batch", stem_heads=options["norm"], momentum=0.9),
        se_ratio=options["se_ratio"] if options["se"] else 0.0,
        droppath=options["droppath"],
        dropout=0.1,
        chess_features=options["chess_features"],
        attention=AttentionConfig(
            every=options["attention_every_k"] if options["attention"] else 0,
            heads=options["attention_heads"],
            bias=options["attention_relbias"],
            mask=mix > 0,
            unmasked_mix=mix if 0 < mix < 1 else 0.0,
            norm="post",
        ),
        policy=PolicyHeadConfig(
            kind="factored" if rank else "dense",
            channels=POLICY_CHANNELS,
            rank=max(1, rank),
            clamp=5.0,
            logit_norm=True,
        ),
        value=ValueHeadConfig(kind="scalar", pool="flatten", channels=64, hidden=channels, activation="relu"),
        ssl=("piece",) if options["self_supervised"] else (),
        ssl_trunk=True,
        auxiliary=options["aux_policy_from_square"],
        checkpoint_every=0,
    )


def matrix0_name(name: str) -> str:
    """Matrix0's key for a parameter or buffer of ours (unchanged where both agree)."""
    for pattern, replacement in NAMES:
        new, hits = re.subn(rf"^{pattern}", replacement, name)
        if hits:
            return new
    return name


def load_matrix0(source: str | os.PathLike[str] | Mapping[str, Any], model: PolicyValueNet) -> LoadReport:
    """Fill `model` in place from a checkpoint of Matrix0: a file, or the dict that it holds.

    Of several sets of weights the first of SCHEMAS is taken; a dict of tensors is taken as it is. Averaged weights
    (`model_ema`) lack BatchNorm's batch counters, which then come from the raw weights beside them. Files are read with
    `weights_only=True`: nothing in them is executed. Raises ValueError naming missing, surplus, misshapen and
    non-finite keys, aliases that differ, and files that hold no weights; the model is untouched then.
    """
    data = source if isinstance(source, Mapping) else read_checkpoint(source)
    schema, state, messages = _choose(data)
    count = len(state)
    own = model.state_dict()
    names = {matrix0_name(name): name for name in own}
    assert len(names) == len(own), "two of our names map to one key"
    aliases, problems = _take_aliases(state)
    if schema == "model_ema":
        messages += _add_counters(state, names, data)
    problems += _listed("missing", [key for key in names if key not in state])
    problems += _listed("not known to this network", [key for key in state if key not in names])
    loaded, shapes, odd = {}, [], []
    for key in names.keys() & state.keys():
        name, tensor = names[key], state[key]
        shape = tuple(own[name].shape)
        expected = (*shape, 1, 1) if POINTWISE.fullmatch(name) else shape
        if tuple(tensor.shape) != expected:
            shapes.append(f"{key} {tuple(tensor.shape)}, expected {expected}")
        elif not torch.isfinite(tensor).all():
            odd.append(key)
        else:
            loaded[name] = tensor.reshape(shape)
    problems += _listed("of another shape", sorted(shapes)) + _listed("with values that are not finite", sorted(odd))
    if problems:
        hint = _hint(state, names)
        raise ValueError(f"this checkpoint's {schema} does not fit the network: {'; '.join(problems)}{hint}")
    model.load_state_dict(loaded, strict=True)
    return LoadReport(schema, count, names, tuple(aliases), tuple(messages))


def _numbers() -> list[Any]:
    """What torch's safe unpickler must know to read a numpy number, under numpy 2's and numpy 1's names."""
    scalar = np.float64(0).__reduce__()[0]
    kinds = [type(np.dtype(kind)) for kind in (np.float64, np.float32, np.int64)]
    return [scalar, (scalar, "numpy.core.multiarray.scalar"), np.dtype, *kinds]


def config_of(data: Mapping[str, Any]) -> tuple[ModelConfig, list[str]]:
    """Our options for the network of a checkpoint's dict: from the shapes of its weights, from its `config` where that
    is Matrix0's, and for the rest as the published network has it, which the messages name.

    Raises ValueError as `matrix0_config` does, and where there are no weights of Matrix0.
    """
    _, state, _ = _choose(data)
    if "stem.0.weight" not in state:
        raise ValueError("these are no weights of Matrix0's network: its first layer, stem.0.weight, is missing")
    stored: dict[str, Any] = {}
    for section in (data.get("config"), data.get("model_config")):
        if isinstance(section, Mapping):
            stored = {key: value for key, value in section.items() if key in DEFAULTS} | stored
    shapes = _shapes(state)
    unknown = {key: value for key, value in PUBLISHED.items() if key not in stored and key not in shapes}
    if not shapes["attention"]:
        unknown = {key: value for key, value in unknown.items() if not key.startswith("attention")}
    listed = ", ".join(f"{key} {value}" for key, value in unknown.items())
    messages = [f"the file does not say how it was configured; as in Matrix0's own: {listed}"] if unknown else []
    return matrix0_config(PUBLISHED | stored | shapes), messages


def _shapes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the shapes of weights say of a NetConfig."""
    stem = tuple(state["stem.0.weight"].shape)
    channels = stem[0] if stem else 0
    _expect("stem.0.weight", stem, (channels, PLANES, 3, 3))
    numbers = {kind: sorted(_tower(state, kind)) for kind in ("conv1", "qkv", "se_fc1")}
    for number in numbers["conv1"]:  # here and below: before a network of these sizes takes memory
        key = f"tower.{number}.conv1.weight"
        _expect(key, tuple(state[key].shape), (channels, channels, 3, 3))
    rank = _width(state, "policy_fc1.weight", POLICY_CHANNELS * SQUARES) if "policy_fc1.weight" in state else 0
    shapes: dict[str, Any] = {
        "channels": channels,
        "blocks": len(numbers["conv1"]),
        "norm": "batch" if "stem.1.running_mean" in state else "group",
        "chess_features": any(key.startswith("chess_features.") for key in state),
        "attention": bool(numbers["qkv"]),
        "se": bool(numbers["se_fc1"]),
        "self_supervised": any(key.startswith(("ssl_head.", "ssl_piece_head.")) for key in state),
        "policy_factor_rank": rank,
        "aux_policy_from_square": "aux_from_square.0.weight" in state,
        "aux_policy_move_type": "aux_move_type.0.weight" in state,
    }
    if numbers["qkv"]:
        first = numbers["qkv"][0]
        bias = state.get(f"tower.{first}.rel_bias")
        shapes |= {"attention_every_k": max(1, first), "attention_relbias": bias is not None}
        if bias is not None and bias.ndim == 4:
            shapes["attention_heads"] = bias.shape[1]
    if numbers["se_fc1"]:
        width = {_width(state, f"tower.{number}.se_fc1.weight", channels) for number in numbers["conv1"]}.pop()
        ratio = DEFAULTS["se_ratio"]
        shapes["se_ratio"] = ratio if max(8, int(channels * ratio)) == width else (width + 0.5) / channels
    return shapes


def _width(state: Mapping[str, Tensor], key: str, inputs: int) -> int:
    """Outputs of a linear layer."""
    shape = tuple(state[key].shape) if key in state else ()
    _expect(key, shape, (*shape[:1], inputs))
    return shape[0]


def _expect(key: str, shape: tuple[int, ...], need: tuple[int, ...]) -> None:
    if shape != need or not all(shape):
        raise ValueError(f"{key} is of the shape {shape}, not {need}")


def _tower(state: Mapping[str, Tensor], part: str) -> set[int]:
    """Numbers of the tower's members that have a part."""
    matches = (re.fullmatch(rf"tower\.(\d+)\.{part}\.weight", key) for key in state)
    return {int(match[1]) for match in matches if match}


def read_checkpoint(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The dict in a file, for `config_of` and `load_matrix0`; numpy numbers (Matrix0's scheduler leaves some) are
    allowed beside tensors. ValueError where it holds anything else, is damaged or cannot be read."""
    try:
        with open(path, "rb") as file:
            packed = file.read(4) == b"PK\3\4" and any(
                member.compress_type != zipfile.ZIP_STORED for member in zipfile.ZipFile(file).infolist()
            )
        if packed:  # torch never packs, and would unpack a thousand times the file into memory
            raise ValueError("its parts are compressed")
        with torch.serialization.safe_globals(_numbers()):
            data = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{Path(path).name} holds more than tensors and numbers, so it is not read: {reason}"
        ) from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None
    except Exception as error:  # noqa: BLE001 - bytes that are no torch file raise whatever the reader trips over
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{Path(path).name} is no whole torch file: {reason}") from None
    if not isinstance(data, Mapping):
        raise ValueError(f"{Path(path).name} holds a {type(data).__name__}, not a dict of weights")
    return data


def _choose(data: Mapping[str, Any]) -> tuple[str, dict[str, Tensor], list[str]]:
    """(where, weights without wrappers' prefixes, messages) by the precedence of SCHEMAS."""
    present = [key for key in SCHEMAS if isinstance(data.get(key), Mapping) and data[key]]
    messages = []
    if present:
        schema, weights = present[0], data[present[0]]
        if present[1:]:
            messages.append(f"took {schema}; the file also holds {', '.join(present[1:])}")
    elif data and all(isinstance(value, Tensor) for value in data.values()):
        schema, weights = "state dict", data
    else:
        held = ", ".join(sorted(map(str, data))[:8]) or "nothing"
        raise ValueError(f"no weights found: expected {', '.join(SCHEMAS)} or a dict of tensors; the file holds {held}")
    if bad := [str(key) for key, value in weights.items() if not isinstance(value, Tensor)]:
        raise ValueError(f"{schema} holds more than tensors: {', '.join(bad[:8])}")
    state = {str(key): value for key, value in weights.items()}
    if bad := [key for key, value in state.items() if not _whole(value)]:
        raise ValueError(f"{schema} has tensors of more numbers than the file holds: {', '.join(bad[:8])}")
    while prefix := next((p for p in PREFIXES if all(key.startswith(p) for key in state)), None):
        state = {key.removeprefix(prefix): value for key, value in state.items()}
        messages.append(f"removed the prefix '{prefix}' that a wrapper had put before every key")
    return schema, state, messages


def _whole(tensor: Tensor) -> bool:
    """Whether every number of a tensor is stored: a view that repeats one number may claim any size."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _take_aliases(state: dict[str, Tensor]) -> tuple[list[str], list[str]]:
    """(aliases removed from `state`, problems): an alias must equal the tensor that it repeats."""
    aliases, different = [], []
    for alias, original in ALIASES.items():
        for key in [key for key in state if key.startswith(alias)]:
            twin = state.get(original + key.removeprefix(alias))
            if twin is None:
                continue  # stays in and is reported as unknown
            if not torch.equal(state.pop(key), twin):
                different.append(f"{key} and {original}{key.removeprefix(alias)}")
            aliases.append(key)
    return aliases, _listed("repeated with other values", different)


def _add_counters(state: dict[str, Tensor], names: Mapping[str, str], data: Mapping[str, Any]) -> list[str]:
    """BatchNorm's batch counters for averaged weights, from the raw weights where the file has them, else zero.

    With the fixed momentum that we use nothing reads them.
    """
    absent = [key for key in names if key.endswith(COUNTER) and key not in state]
    if not absent:
        return []
    others = {key: value for key, value in data.items() if key in SCHEMAS and key != "model_ema"}
    raw = _choose(others)[1] if any(isinstance(value, Mapping) and value for value in others.values()) else {}
    state |= {key: raw.get(key, torch.zeros((), dtype=torch.int64)) for key in absent}
    where = "the raw weights" if all(key in raw for key in absent) else "zero: the file has none"
    return [f"{len(absent)} batch counters, which averaged weights lack, are from {where}"]


def _listed(what: str, keys: list[str]) -> list[str]:
    more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
    return [f"{len(keys)} {what} ({', '.join(keys[:8])}{more})"] if keys else []


def _hint(state: Mapping[str, Tensor], names: Mapping[str, str]) -> str:
    """What else the file may be, from keys that other versions of Matrix0's network have (or lack)."""
    if any("policy_logit_scale" in key or key.startswith("value_gate") for key in state):
        return ". It is of Matrix0's network of 27 August 2025 or after, which is another network"
    if any(key.startswith("policy_conv_") for key in state):
        return ". It is of Matrix0's network of before 22 August 2025, 20:00, which has another policy branch"
    means = [key for key in names if key.startswith("tower.") and key.endswith("running_mean")]
    if means and not any(key in state for key in means):
        return ". Its blocks have GroupNorm: build the network with norm.blocks 'group'"
    return ""
