"""The format of one checkpoint: a folder of safetensors files and one state.json, never a pickle.

`step_00000500/` holds one `<group>.safetensors` for each group of tensors (model, ema, optimiser, rng, ...),
or `<group>.safetensors.zst` where it was compressed, and `state.json`: schema version, step, UTC time,
versions, the mark of a best one, the SHA-256 and size of each tensor file as it lies on the disk, and the
caller's state. The last key of state.json is the SHA-256 of all its text before that key, in every schema
version. Schema 2 added the mark and the compression; schema 1 is still read.

What goes where: every tensor, the random states of torch among them (`torch.get_rng_state()` is a uint8
tensor), goes in a group. The state takes what JSON can hold (tuples come back as lists; NumPy's PCG64 state
and Python's `random.getstate()` are plain numbers); nan and inf are kept.
"""

import functools
import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import zstandard
from safetensors import SafetensorError

from matrixlib.files import FolderError, utc_now, write_bytes
from matrixlib.hardware import backend, machine

SCHEMA = 2
FOLDER = re.compile(r"(?:step|best)_(\d{8,})(?:\.replaced)?")
Tensors = dict[str, dict[str, torch.Tensor]]
TensorsLike = Mapping[str, Mapping[str, torch.Tensor]]

_GROUP = re.compile(r"[a-z][a-z0-9_]*")
_SMALL = 16 << 20  # bytes of a group that does not grow with the model, such as random states
_DIGEST = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n\}\n\Z')
_PICKLES = (".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".bin")
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the message says which, why and what to do."""


class UnwritableCheckpoint(CheckpointError, FolderError):
    """There is no room for a checkpoint, or its folder cannot be written."""


class DamagedCheckpoint(CheckpointError):
    """One checkpoint is not what was written."""


class NewerCheckpoint(CheckpointError):
    """The checkpoint was written by a newer version of the format; falling back would lose its work."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint in memory; tensors are on the CPU. sha256: group -> of the file that its tensors are from."""

    step: int
    path: Path
    tensors: Tensors
    state: dict[str, Any]
    time: str
    versions: dict[str, str]
    sha256: dict[str, str]


def check(tensors: TensorsLike) -> None:
    """Raise ValueError or TypeError naming a group or tensor that cannot be stored."""
    for group, members in tensors.items():
        if not _GROUP.fullmatch(group):
            raise ValueError(f"group name '{group}' must be lower-case letters, digits and underscores")
        for name, tensor in members.items():
            if name == "__metadata__":
                raise ValueError(f"{group}: safetensors keeps the name '{name}' for itself; rename the tensor")
            if tensor.dtype not in _DTYPES or tensor.layout != torch.strided:
                raise TypeError(f"{group}.{name}: a {tensor.layout} tensor of {tensor.dtype} cannot be stored")


def host_copies(
    tensors: TensorsLike, buffers: TensorsLike, warn: Callable[[str], None] = lambda message: None
) -> Tensors:
    """Contiguous copies in host memory, complete on return; each in the buffer of its name where that fits.

    Fresh memory costs a page fault for every 4 kB, more than the copy itself: hence the buffers. Those for
    CUDA are pinned, so that the copies overlap. Where the system refuses that (WSL2, a container's limit) they are
    ordinary memory, which is slower and as good; `warn` says so.
    """
    copies: Tensors = {}
    devices, pin = set(), True
    for group, members in tensors.items():
        copies[group] = {}
        for name, tensor in members.items():
            buffer = buffers.get(group, {}).get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                try:
                    buffer = _empty(tensor, pin and tensor.is_cuda)
                except RuntimeError as error:
                    if not (pin and tensor.is_cuda):
                        raise
                    pin, buffer = False, _empty(tensor, False)
                    reason = str(error).splitlines()[0]
                    warn(f"checkpoints are copied through memory that is not page-locked, more slowly: {reason}")
            copies[group][name] = buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                devices.add(tensor.device)
    for device in devices:
        backend.synchronize(device)
    return copies


def _empty(like: torch.Tensor, pin: bool) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pin)


def write(
    folder: Path, step: int, tensors: Tensors, state: Any, mark: Mapping[str, Any] | None = None, compress: int = 0
) -> None:
    """Fill the empty `folder`; durable on return. `tensors` from host_copies, `state` from encode.

    mark: what makes it a best one, or None. compress: zstd level, 0 = off.
    """
    groups = {group: _write_group(folder, group, members, compress) for group, members in tensors.items()}
    data = {
        "schema": SCHEMA,
        "step": step,
        "time": utc_now(),
        "versions": _versions(),
        "best": mark,
        "groups": groups,
        "state": state,
    }
    write_bytes(folder / "state.json", _seal(data))


def largest_group(model: torch.nn.Module) -> int:
    """Bytes that no group of a checkpoint of this model exceeds: the optimiser's has two tensors for each weight."""
    return 4 * sum(tensor.nbytes for tensor in model.state_dict().values()) + _SMALL


def read(path: Path, largest: int | None = None) -> Checkpoint:
    """Read and verify one checkpoint folder. largest: bytes of a group, above which one that was compressed is not
    unpacked (`largest_group`); None = what it says itself.

    Raises DamagedCheckpoint naming the file and its fault, NewerCheckpoint naming both schema versions.
    """
    if path.is_file():
        raise DamagedCheckpoint(
            f"{path.name} is a file; a checkpoint is a folder of safetensors. Pickles are never loaded"
        )
    data = read_state(path)
    try:
        tensors = {group: _read_group(path, group, entry, largest) for group, entry in data["groups"].items()}
        digests = {group: str(entry["sha256"]) for group, entry in data["groups"].items()}
        state, versions = _decode(data["state"]), dict(data["versions"])
        return Checkpoint(data["step"], path, tensors, state, data["time"], versions, digests)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path.name}: state.json is none of ours ({error!r})") from error


def read_state(path: Path) -> dict[str, Any]:
    """The verified contents of a checkpoint's state.json (`state` as encoded); errors as `read`."""
    file = path / "state.json"
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        foreign = sorted(p.name for p in path.glob("*") if p.suffix in _PICKLES)
        note = f" ({', '.join(foreign)}: pickles are never loaded)" if foreign else ""
        raise DamagedCheckpoint(f"{path.name}: no state.json{note}") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name}: state.json cannot be read ({error})") from error
    digest = _DIGEST.search(raw)
    if digest is None or hashlib.sha256(raw[: digest.start()]).hexdigest().encode() != digest.group(1):
        raise DamagedCheckpoint(f"{path.name}: state.json is not as it was written (checksum)")
    try:
        data: dict[str, Any] = json.loads(raw)
        schema = int(data["schema"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path.name}: state.json is none of ours ({error!r})") from error
    if schema > SCHEMA:
        raise NewerCheckpoint(
            f"{path.name} has checkpoint schema {schema}, written by matrixlib "
            f"{data.get('versions', {}).get('matrixlib', '?')}; this version reads up to schema {SCHEMA}. "
            f"Update matrixlib, or start a new run"
        )
    name = FOLDER.fullmatch(path.name)
    if name and int(name.group(1)) != data.get("step"):
        raise DamagedCheckpoint(f"{path.name}: its state.json is of step {data.get('step')}")
    return data


def encode(value: Any, where: str) -> Any:
    """`value` as standard JSON data; raises TypeError naming what does not fit."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == "$float":
                raise TypeError(f"{where}: key {key!r} does not fit; use strings")
        return {key: encode(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
    hint = "; put it in a group of tensors" if isinstance(value, (torch.Tensor, np.ndarray)) else ""
    raise TypeError(f"{where}: {type(value).__name__} is not a number, string, list or mapping{hint}")


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"$float"}:
            return float(value["$float"])
        return {key: _decode(inner) for key, inner in value.items()}
    return [_decode(inner) for inner in value] if isinstance(value, list) else value


def _write_group(folder: Path, group: str, members: Mapping[str, torch.Tensor], compress: int) -> dict[str, Any]:
    """Write and fsync one file, hashed on its way; its entry in state.json."""
    chunks = list(_safetensors(members))
    unpacked = sum(len(chunk) for chunk in chunks)
    digest, size = hashlib.sha256(), 0
    with (folder / _file_name(group, bool(compress))).open("xb") as file:
        for chunk in _packed(chunks, unpacked, compress) if compress else chunks:
            digest.update(chunk)
            size += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    entry = {"sha256": digest.hexdigest(), "bytes": size, "tensors": len(members)}
    return {**entry, "unpacked": unpacked} if compress else entry


def _packed(chunks: Iterable[bytes | memoryview], size: int, level: int) -> Iterator[bytes]:
    """One zstd frame that says how large its contents are."""
    packer = zstandard.ZstdCompressor(level=level).compressobj(size=size)
    for chunk in chunks:
        yield packer.compress(chunk)
    yield packer.flush()


def _safetensors(members: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The pieces of a safetensors file, without a copy of the tensors (the library makes a whole one in memory
    before it can be compressed). The format: https://github.com/huggingface/safetensors#format"""
    ordered = sorted(members.items(), key=lambda item: (-item[1].element_size(), item[0]))  # keeps alignment
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for _, tensor in ordered:
        if tensor.numel():
            yield tensor.reshape(-1).view(torch.uint8).numpy().data


def _read_group(
    path: Path, group: str, entry: Mapping[str, Any], largest: int | None = None
) -> dict[str, torch.Tensor]:
    if not _GROUP.fullmatch(group):
        raise DamagedCheckpoint(f"{path.name}: state.json names a file outside of the folder ('{group}')")
    file = path / _file_name(group, "unpacked" in entry)
    where = f"{path.name}: {file.name}"
    try:
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise DamagedCheckpoint(f"{where} has {size} bytes instead of {entry['bytes']}")
        with file.open("rb") as opened:  # no more than it has: a link may lead to something without an end
            raw = opened.read(size)
    except OSError as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise DamagedCheckpoint(f"{where} {reason}") from error
    if hashlib.sha256(raw).hexdigest() != entry["sha256"]:
        raise DamagedCheckpoint(f"{where} is not as it was written (checksum)")
    try:
        if "unpacked" in entry:
            raw = _unpack(raw, entry["unpacked"], largest)
        tensors: dict[str, torch.Tensor] = safetensors.torch.load(raw)
    except (zstandard.ZstdError, SafetensorError) as error:
        raise DamagedCheckpoint(f"{where} cannot be decoded ({error})") from error
    if len(tensors) != entry["tensors"]:
        raise DamagedCheckpoint(f"{where} holds {len(tensors)} tensors, not {entry['tensors']}")
    return tensors


def _unpack(raw: bytes, size: int, largest: int | None) -> bytes:
    """Decompress one frame that must say `size` itself, at most `largest`: its memory is bounded before it is taken."""
    if largest is not None and size > largest:
        raise zstandard.ZstdError(f"it claims {size:,} bytes, of which this network needs {largest:,} at most")
    claimed = zstandard.get_frame_parameters(raw).content_size
    if claimed != size:
        raise zstandard.ZstdError(f"the frame claims {claimed} bytes, state.json {size}")
    return zstandard.ZstdDecompressor().decompress(raw, allow_extra_data=False)


def _file_name(group: str, compressed: bool) -> str:
    return f"{group}.safetensors.zst" if compressed else f"{group}.safetensors"


def _seal(data: Mapping[str, Any]) -> bytes:
    """JSON whose last key is the digest of all text before it."""
    body = json.dumps(data, allow_nan=False, indent=1).encode().removesuffix(b"\n}")
    return body + b',\n "sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


_versions = functools.cache(machine.versions)  # which may have to ask the driver's own program
