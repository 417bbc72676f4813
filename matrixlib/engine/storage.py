"""The format of one checkpoint: a folder of safetensors files and one state.json, never a pickle.

`step_00000500/` holds one `<group>.safetensors` for each group of tensors (model, ema, optimiser, rng, ...), or
`<group>.safetensors.zst` where it was compressed, and `state.json`: schema version, step, UTC time, versions, the mark
of a best one, the SHA-256 and size of each tensor file as it lies on the disk, and the caller's state. The last key of
state.json is the SHA-256 of all its text before that key.

Every tensor, the random states of torch among them, goes in a group. The state takes what JSON can hold, nan and inf
too (tuples come back as lists).
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import zstandard
from safetensors import SafetensorError

from matrixlib.files import FolderError, utc_now, write_bytes
from matrixlib.hardware import machine

SCHEMA = 2
SMALL_GROUP_BYTES = 16 << 20  # of a group that does not grow with the model, such as random states
FOLDER = re.compile(r"(step|best)_(\d{8,})")
Tensors = dict[str, dict[str, torch.Tensor]]
TensorsLike = Mapping[str, Mapping[str, torch.Tensor]]

_GROUP = re.compile(r"[a-z][a-z0-9_]*")
_DIGEST = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n\}\n\Z')
_PICKLES = (".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".bin")
_versions = functools.cache(machine.versions)  # which may have to ask the driver's own program


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the message says which, why and what to do."""


class UnwritableCheckpoint(CheckpointError, FolderError):
    """There is no room for a checkpoint, or its folder cannot be written."""


class DamagedCheckpoint(CheckpointError):
    """One checkpoint is not what was written."""


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


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(folder.name.partition("_")[2])


def host_copies(tensors: TensorsLike) -> Tensors:
    """Contiguous copies in host memory, complete on return."""
    options: dict[str, Any] = {"copy": True, "memory_format": torch.contiguous_format}
    return {
        group: {name: tensor.detach().to("cpu", **options) for name, tensor in members.items()}
        for group, members in tensors.items()
    }


def write(
    folder: Path, step: int, tensors: Tensors, state: Any, mark: Mapping[str, Any] | None = None, compress: int = 0
) -> None:
    """Fill the empty `folder`; durable on return. `tensors` from host_copies.

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
    return 4 * sum(tensor.nbytes for tensor in model.state_dict().values()) + SMALL_GROUP_BYTES


def read(path: Path, largest: int | None = None) -> Checkpoint:
    """Read and verify one checkpoint folder. largest: bytes of a group, above which one that was compressed is not
    unpacked (`largest_group`); None = what it says itself.

    Raises DamagedCheckpoint naming the file and its fault, CheckpointError for a schema that this code does not know.
    """
    data = read_state(path)
    try:
        tensors = {group: _read_group(path, group, entry, largest) for group, entry in data["groups"].items()}
        digests = {group: str(entry["sha256"]) for group, entry in data["groups"].items()}
        versions = dict(data["versions"])
        return Checkpoint(data["step"], path, tensors, data["state"], data["time"], versions, digests)
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path.name}: state.json is none of ours ({error!r})") from error


def read_state(path: Path) -> dict[str, Any]:
    """The verified contents of a checkpoint's state.json; errors as `read`."""
    file = path / "state.json"
    try:
        raw = file.read_bytes()
    except OSError as error:
        foreign = sorted(p.name for p in (path, *path.glob("*")) if p.suffix in _PICKLES)
        note = f"; {', '.join(foreign)}: pickles are never loaded" if foreign else ""
        raise DamagedCheckpoint(f"{path.name}: no state.json that can be read ({error.strerror}{note})") from error
    digest = _DIGEST.search(raw)
    if digest is None or hashlib.sha256(raw[: digest.start()]).hexdigest().encode() != digest.group(1):
        raise DamagedCheckpoint(f"{path.name}: state.json is not as it was written (checksum)")
    try:
        data: dict[str, Any] = json.loads(raw)
        schema, step = int(data["schema"]), int(data["step"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path.name}: state.json is none of ours ({error!r})") from error
    if schema != SCHEMA:
        version = data.get("versions", {}).get("matrixlib", "?")
        raise CheckpointError(
            f"{path.name} has checkpoint schema {schema}, written by matrixlib {version}, and this version reads "
            f"schema {SCHEMA}: take that version of matrixlib, or start a new run"
        )
    if FOLDER.fullmatch(path.name) and step_of(path) != step:
        raise DamagedCheckpoint(f"{path.name}: its state.json is of step {step}")
    return data


def _write_group(folder: Path, group: str, members: dict[str, torch.Tensor], compress: int) -> dict[str, Any]:
    """Write and fsync one file; its entry in state.json."""
    file = folder / _file_name(group, bool(compress))
    entry: dict[str, Any] = {"tensors": len(members)}
    if compress:
        raw = safetensors.torch.save(members)
        entry["unpacked"] = len(raw)
        file.write_bytes(zstandard.compress(raw, compress))
    else:
        safetensors.torch.save_file(members, file)
    with file.open("rb+") as written:
        os.fsync(written.fileno())
        return {"sha256": hashlib.file_digest(written, "sha256").hexdigest(), "bytes": file.stat().st_size, **entry}


def _read_group(path: Path, group: str, entry: Mapping[str, Any], largest: int | None) -> dict[str, torch.Tensor]:
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
        raise DamagedCheckpoint(f"{where} cannot be read ({error.strerror})") from error
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
    body = json.dumps(data, indent=1).encode().removesuffix(b"\n}")
    return body + b',\n "sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'
