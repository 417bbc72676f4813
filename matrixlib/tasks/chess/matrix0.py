"""Matrix0 (github.com/lukifer23/Matrix0): import of its network options and checkpoints.

Loading is strict: every key of the file is used once or is a known alias, and every parameter is filled.
"""

import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from matrixlib.tasks.chess.config import AttentionConfig, ModelConfig, NormConfig, PolicyHeadConfig, ValueHeadConfig
from matrixlib.tasks.chess.model import MOVES, PLANES

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
IGNORED_FIELDS = frozenset(  # without effect on the network
    {"visual_encoder_channels", "ssl_curriculum", "ssrl_tasks", "enable_llm_tutor", "llm_model_path"}
)
PUBLISHED_OPTIONS: dict[str, Any] = {  # of the published network, for files that do not store their options
    "preact": True,
    "activation": "silu",
    "attention_unmasked_mix": 0.2,
    "attention_heads": 20,
    "droppath": 0.1,
}
WEIGHT_KEYS = ("model_ema", "model", "model_state_dict")  # keys of the weights in a checkpoint, in Matrix0's order
ALIAS_PREFIX, ORIGINAL_PREFIX = "ssl_head.", "ssl_piece_head."  # keys with this prefix repeat other tensors
WRAPPERS = r"^((_orig_mod|module)\.)+"  # prefixes of torch.compile and DataParallel
KEY_RENAMES = (  # our key -> Matrix0's, applied in order
    (r"^stem\.conv", "stem.0"),
    (r"^stem\.norm", "stem.1"),
    (r"\.input\.conv", ".0"),
    (r"\.input\.norm", ".1"),
    (r"\.out\.", ".3."),
    (r"^ssl_heads\.piece", "ssl_piece_head"),
    (r"^auxiliary\.", "aux_"),
    (r"^features", "chess_features"),
    (r"\.square_", ".pst_"),
    (r"\.neighbour_", ".interaction_"),
    (r"\.convs\.0", ".conv1"),
    (r"\.convs\.1", ".conv2"),
    (r"\.norms\.0", ".bn1"),
    (r"\.norms\.1", ".bn2"),
    (r"\.se\.reduce", ".se_fc1"),
    (r"\.se\.expand", ".se_fc2"),
    (r"^(tower\.\d+)\.bias", r"\1.rel_bias"),
    (r"^policy_head\.reduce", "policy_fc1"),
    (r"^policy_head\.expand", "policy_fc2"),
    (r"^policy_head\.dense", "policy_fc"),
    (r"^policy_head\.logit_norm", "policy_fc_norm"),
    (r"^value_head\.fc", "value_fc"),
)
POINTWISE = re.compile(r"tower\.\d+\.(qkv|proj)\.weight")  # 1x1 convolutions there, linear layers here


def matrix0_config(netconfig: Mapping[str, Any]) -> ModelConfig:
    """Model options for a NetConfig of Matrix0, missing fields by its defaults; ValueError names unknown fields and
    unsupported values. In Matrix0 `norm` does not apply to blocks (always BatchNorm, momentum 0.9), and an unmasked mix
    of 1 or more means only masked attention, 0 or less only unmasked."""
    if unknown := sorted(set(netconfig) - set(DEFAULTS) - IGNORED_FIELDS):
        raise ValueError(f"unknown fields of Matrix0's NetConfig: {', '.join(unknown)}")
    options = DEFAULTS | {key: value for key, value in netconfig.items() if key not in IGNORED_FIELDS}
    supported: dict[str, Any] = {"planes": PLANES, "policy_size": MOVES, "wdl": False, "enable_visual": False}
    supported["aux_policy_move_type"] = options["aux_policy_from_square"]
    if options["chess_features"]:
        supported["piece_square_tables"] = True
    if options["self_supervised"]:
        options["ssl_tasks"] = list(options["ssl_tasks"])
        supported["ssl_tasks"] = ["piece"]
    if bad := [f"{k} {options[k]!r} (only {value!r})" for k, value in supported.items() if options[k] != value]:
        raise ValueError(f"options of Matrix0's network that are not supported: {', '.join(bad)}")
    mix, rank, channels = options["attention_unmasked_mix"], options["policy_factor_rank"], options["channels"]
    return ModelConfig(
        encoding="matrix0",
        channels=channels,
        blocks=options["blocks"],
        block="basic",
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
            kind="factored" if rank else "dense", channels=64, rank=max(1, rank), clamp=5.0, logit_norm=True
        ),
        value=ValueHeadConfig(kind="scalar", pool="flatten", channels=64, hidden=channels, activation="relu"),
        ssl=("piece",) if options["self_supervised"] else (),
        auxiliary=options["aux_policy_from_square"],
    )


def matrix0_name(name: str) -> str:
    for pattern, replacement in KEY_RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def convert_weights(data: Mapping[str, Any], own: Iterable[str]) -> dict[str, Tensor]:
    """Weights of a checkpoint's dict under our keys. own: our state-dict keys.

    Unknown keys are kept, so that loading refuses them; BatchNorm counters, which averaged weights lack, may be absent.
    ValueError for values that are not finite and for a dict without weights.
    """
    state = _find_weights(data)
    names = {matrix0_name(name): name for name in own}
    for key in [key for key in state if key.startswith(ALIAS_PREFIX)]:
        twin = state.get(key.replace(ALIAS_PREFIX, ORIGINAL_PREFIX))
        if twin is not None and torch.equal(state[key], twin):
            del state[key]
    if bad := [key for key, tensor in state.items() if not torch.isfinite(tensor).all()]:
        raise ValueError(f"values that are not finite: {', '.join(bad[:8])}")
    loaded = {names.get(key, key): tensor for key, tensor in state.items()}
    return {name: tensor.flatten(1) if POINTWISE.fullmatch(name) else tensor for name, tensor in loaded.items()}


def infer_config(data: Mapping[str, Any]) -> tuple[ModelConfig, str]:
    """Model options of a checkpoint's dict, and a message naming those that had to be assumed ("" for none).

    Taken from the shapes of the weights, its stored config, then PUBLISHED_OPTIONS. ValueError as `matrix0_config`.
    """
    state = _find_weights(data)
    if "stem.0.weight" not in state:
        raise ValueError("not a Matrix0 network: stem.0.weight, its first layer, is missing")
    sections = [data.get(name) for name in ("model_config", "config")]
    stored = {k: v for part in sections if isinstance(part, Mapping) for k, v in part.items() if k in DEFAULTS}
    shapes = _options_from_shapes(state)
    missing = PUBLISHED_OPTIONS.keys() - stored.keys() - shapes.keys()
    unknown = [k for k in PUBLISHED_OPTIONS if k in missing and (shapes["attention"] or k[:9] != "attention")]
    listed = ", ".join(f"{key} {PUBLISHED_OPTIONS[key]}" for key in unknown)
    message = f"the file stores no configuration; assumed as in Matrix0's published network: {listed}"
    return matrix0_config(PUBLISHED_OPTIONS | stored | shapes), message if unknown else ""


def _options_from_shapes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """NetConfig fields that follow from the shapes of the weights."""
    found = [re.fullmatch(r"tower\.(\d+)\.(conv1|qkv|se_fc1)\.weight", key) for key in state]
    numbers = {kind: sorted(int(m[1]) for m in found if m and m[2] == kind) for kind in ("conv1", "qkv", "se_fc1")}
    channels = state["stem.0.weight"].shape[0]
    shapes: dict[str, Any] = {
        "channels": channels,
        "blocks": len(numbers["conv1"]),
        "norm": "batch" if "stem.1.running_mean" in state else "group",
        "chess_features": "chess_features.position_encoding" in state,
        "attention": bool(numbers["qkv"]),
        "se": bool(numbers["se_fc1"]),
        "self_supervised": any(key.startswith((ALIAS_PREFIX, ORIGINAL_PREFIX)) for key in state),
        "policy_factor_rank": len(state.get("policy_fc1.weight", ())),
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
        width, ratio = state[f"tower.{numbers['se_fc1'][0]}.se_fc1.weight"].shape[0], DEFAULTS["se_ratio"]
        shapes["se_ratio"] = ratio if max(8, int(channels * ratio)) == width else (width + 0.5) / channels
    return shapes


def read_checkpoint(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Load a checkpoint's dict of tensors and numbers, for `infer_config` and `convert_weights`.

    NumPy scalars are allowed: Matrix0's scheduler stores some. ValueError for any other content and a damaged file.
    """
    scalar: Any = np.float64(0).__reduce__()[0]
    name = Path(path).name
    numbers = [type(np.dtype(kind)) for kind in (np.float64, np.float32, np.int64)]
    try:
        with open(path, "rb") as file:  # torch never compresses; a zip bomb would fill the memory
            if file.read(4) == b"PK\3\4" and any(part.compress_type for part in zipfile.ZipFile(file).infolist()):
                raise ValueError("it is compressed")
        with torch.serialization.safe_globals([scalar, (scalar, "numpy.core.multiarray.scalar"), np.dtype, *numbers]):
            data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - damaged files raise anything
        # torch advises to load anything, which would run code from the file
        reason = "" if isinstance(error, pickle.UnpicklingError) else f": {error}".partition("\n")[0]
        raise ValueError(f"{name} is damaged or holds more than tensors and numbers{reason}") from None
    if not isinstance(data, Mapping):
        raise ValueError(f"{name} holds a {type(data).__name__}, not a dict of weights")
    return data


def _is_stored(value: object) -> bool:
    """Whether it is a tensor with storage for all its elements; an expanded view may claim any size."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _find_weights(data: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights, the first of WEIGHT_KEYS or the dict itself, without prefixes of wrappers."""
    weights = next((data[key] for key in WEIGHT_KEYS if isinstance(data.get(key), Mapping) and data[key]), data)
    bad = sorted(str(key) for key, value in weights.items() if not _is_stored(value))
    if bad or not weights:
        held = ", ".join(bad[:8]) or "nothing"
        raise ValueError(f"no weights found: expected {', '.join(WEIGHT_KEYS)} or a dict of tensors, got {held}")
    return {re.sub(WRAPPERS, "", str(key)): value for key, value in weights.items()}
