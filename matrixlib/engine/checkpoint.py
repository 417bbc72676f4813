"""Checkpoints: folders of safetensors files and one state.json; whole or absent, and never a pickle.

`step_00000500/` holds one `<group>.safetensors` for each group of tensors (model, ema, optimiser, rng, ...)
and `state.json`: schema version, step, UTC time, versions, the SHA-256 and size of each tensor file, and the
caller's state. The last key of state.json is the SHA-256 of all its text before that key, in every schema
version.

A folder is written as `step_00000500.tmp`, each file fsynced, renamed last, the parent fsynced: a folder
without `.tmp` was whole when written, and whatever happened to it since is found by the checksums.

What goes where: every tensor, the random states of torch among them (`torch.get_rng_state()` is a uint8
tensor), goes in a group. The state takes what JSON can hold (tuples come back as lists; NumPy's PCG64 state
and Python's `random.getstate()` are plain numbers); nan and inf are kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError

from matrixlib.engine.metrics import sync_folder, utc_now, write_json

SCHEMA = 1
Tensors = dict[str, dict[str, torch.Tensor]]

_STEP = re.compile(r"step_(\d{8,})")
_NUMBER = re.compile(r"(?:step|best)_(\d{8,})(?:\.replaced)?")
_GROUP = re.compile(r"[a-z][a-z0-9_]*")
_DIGEST = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n\}\n\Z')
_PICKLES = (".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".bin")
_SLACK = 1 << 20  # bytes for state.json and the file system's own needs


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the message says which, why and what to do."""


class DamagedCheckpoint(CheckpointError):
    """One checkpoint is not what was written."""


class NewerCheckpoint(CheckpointError):
    """The checkpoint was written by a newer version of the format; falling back would lose its work."""


class CheckpointWarning(UserWarning):
    """Something about checkpoints that did not stop the run."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint in memory; tensors are on the CPU."""

    step: int
    path: Path
    tensors: Tensors
    state: dict[str, Any]
    time: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Best:
    """The best checkpoint so far by the value given to `mark_best`."""

    step: int
    value: float
    path: Path


class Checkpoints:
    """The checkpoints of one run in `folder`: the newest `keep` (at least 2) and the best.

    Only one process may save at a time (the run's lock sees to it). `messages` collects what a person should
    know; each is also a CheckpointWarning.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        if keep < 2:
            raise ValueError(
                f"checkpoint.keep is {keep}; keep at least 2, because a rollback needs a predecessor"
            )
        self.folder = Path(folder)
        self.keep = keep
        self.messages: list[str] = []
        self._damaged: set[Path] = set()

    def save(
        self, step: int, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: Mapping[str, Any]
    ) -> Path:
        """Write the checkpoint of update `step` and return its folder; it is durable on return.

        Checkpoints beyond `step` belong to a course of training that was left (a rollback, a damaged newest
        one): they are removed, once the new one is durable. Tensors that share memory are stored once for
        each name. Raises CheckpointError if it cannot be written (older checkpoints are untouched), TypeError
        naming a state entry that JSON cannot hold.
        """
        name = f"step_{step:08d}"
        encoded = _encode(state, "state")
        for group in tensors:
            if not _GROUP.fullmatch(group):
                raise ValueError(f"group name '{group}' must be lower-case letters, digits and underscores")
        needed = (
            sum(t.numel() * t.element_size() for group in tensors.values() for t in group.values()) + _SLACK
        )
        temporary = self.folder / f"{name}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            if shutil.disk_usage(self.folder).free < needed:
                raise OSError("not enough free space")
            temporary.mkdir()
            self._write(temporary, step, tensors, encoded)
            final = self.folder / name
            replaced = self.folder / f"{name}.replaced"
            if final.exists():
                os.replace(final, replaced)
            os.replace(temporary, final)
            sync_folder(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(
                temporary, ignore_errors=True
            )  # gives the space back; the error below is what matters
            raise CheckpointError(self._cannot_write(name, needed, error)) from error
        self._damaged.discard(final)
        self._remove(replaced)
        self.discard_after(step)
        self._prune()
        return final

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that verifies, or None where there is none at all.

        A damaged one is named in `messages` and the one before it is used. Raises CheckpointError when every
        checkpoint is damaged, NewerCheckpoint when the newest has a schema that this code does not know.
        """
        damage: list[str] = []
        for path in reversed(self._paths()):
            try:
                found = self.load(path)
            except DamagedCheckpoint as error:
                self._damaged.add(path)
                damage.append(str(error))
                continue
            if damage:
                self._say(f"using {path.name} instead: {'; '.join(damage)}")
            return found
        if damage:
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged: {'; '.join(damage)}. Copy a whole one back "
                f"from a backup, or start a new run (a new `run` name, or remove that folder)"
            )
        return None

    def load(self, path: Path) -> Checkpoint:
        """Read and verify one checkpoint folder.

        Raises DamagedCheckpoint naming the file and its fault, NewerCheckpoint naming both schema versions.
        """
        path = Path(path)
        if path.is_file():
            raise DamagedCheckpoint(
                f"{path.name} is a file; a checkpoint is a folder of safetensors. Pickles are never loaded"
            )
        data = _read_state(path)
        found = _NUMBER.fullmatch(path.name)
        if found and int(found.group(1)) != data["step"]:
            raise DamagedCheckpoint(f"{path.name}: its state.json is of step {data['step']}")
        tensors = {group: _read_group(path, group, entry) for group, entry in data["groups"].items()}
        return Checkpoint(
            data["step"], path, tensors, _decode(data["state"]), data["time"], dict(data["versions"])
        )

    def pick(self, name: str = "newest") -> Checkpoint:
        """`newest`, `best` (the newest where none was marked) or a folder name such as `step_00000500`.

        Raises CheckpointError where it is absent or damaged.
        """
        if name == "best" and (best := self.best) is not None:
            return self.load(best.path)
        if name in ("best", "newest"):
            if (found := self.newest()) is None:
                raise CheckpointError(f"no checkpoint in {self.folder} yet; train this run first")
            return found
        if not (self.folder / name).is_dir():
            known = ", ".join(["best", "newest", *(path.name for path in self._paths())])
            raise CheckpointError(f"no checkpoint '{name}' in {self.folder}; there are: {known}")
        return self.load(self.folder / name)

    @property
    def best(self) -> Best | None:
        """What `mark_best` stored, also by an earlier process; None before that or if its folder is gone."""
        file = self.folder / "best.json"
        if not file.exists():
            return None
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            step, value, name = int(data["step"]), float(data["value"]), str(data["name"])
        except (ValueError, KeyError, TypeError) as error:
            self._say(
                f"{file} cannot be read ({error!r}), so no checkpoint counts as the best; remove the file"
            )
            return None
        path = self.folder / name
        if not path.is_dir():  # a crash came between writing best.json and the renaming
            path = self.folder / f"step_{step:08d}"
        return Best(step, value, path) if path.is_dir() else None

    def mark_best(self, step: int, value: float) -> None:
        """Keep the saved checkpoint of `step` until a better one is marked; `value` must be finite."""
        if not math.isfinite(value):
            raise ValueError(f"step {step} cannot be the best with value {value}")
        name = f"step_{step:08d}"
        if not (self.folder / name).is_dir():
            raise ValueError(
                f"no checkpoint of step {step} in {self.folder}; save it before marking it as best"
            )
        write_json(self.folder / "best.json", {"step": step, "value": float(value), "name": name})

    def discard_after(self, step: int) -> None:
        """Remove checkpoints beyond `step`, as a rollback to it needs; the best stays, no longer as a step to
        resume from (it is renamed `best_...`)."""
        best = self.best
        for path in self._paths():
            if _step(path) <= step:
                continue
            if best is not None and path == best.path:
                name = f"best_{best.step:08d}"
                write_json(self.folder / "best.json", {"step": best.step, "value": best.value, "name": name})
                os.replace(path, self.folder / name)
                sync_folder(self.folder)
            else:
                self._remove(path)

    def _paths(self) -> list[Path]:
        """Folders by step. A `.replaced` one counts where a crash kept its successor from its name."""
        if not self.folder.is_dir():
            return []
        found = {}
        for path in self.folder.iterdir():
            name = path.name.removesuffix(".replaced")
            if (
                _STEP.fullmatch(name)
                and path.is_dir()
                and (path.name == name or not path.with_name(name).exists())
            ):
                found[_step(path)] = path
        return [found[step] for step in sorted(found)]

    def _write(
        self,
        folder: Path,
        step: int,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        state: Any,
    ) -> None:
        groups: dict[str, Any] = {}
        for group, members in tensors.items():
            plain, shared = _own_memory(members)
            if shared:
                names = "; ".join(" = ".join(names) for names in shared)
                self._say_once(f"{group}: tensors that share memory are stored once for each name ({names})")
            file = folder / f"{group}.safetensors"
            safetensors.torch.save_file(plain, file)
            with file.open("rb+") as handle:
                os.fsync(handle.fileno())
                digest = hashlib.file_digest(handle, "sha256").hexdigest()
                size = handle.tell()
            groups[group] = {"sha256": digest, "bytes": size, "tensors": len(plain), "shared": shared}
        data = {
            "schema": SCHEMA,
            "step": step,
            "time": utc_now(),
            "versions": _versions(),
            "groups": groups,
            "state": state,
        }
        with (folder / "state.json").open("wb") as handle:
            handle.write(_seal(data))
            handle.flush()
            os.fsync(handle.fileno())
        sync_folder(folder)

    def _sweep(self) -> None:
        """Remove what a crash left half-written or half-removed; finish or undo a replacement."""
        for path in self.folder.glob("*.tmp"):
            if path.is_dir():
                shutil.rmtree(path)
        for path in self.folder.glob("*.replaced"):
            successor = path.with_name(path.name.removesuffix(".replaced"))
            if successor.exists():
                self._remove(path)
            else:
                os.replace(path, successor)

    def _prune(self) -> None:
        """Keep the newest `keep` and the best. Known damaged ones do not count as kept."""
        best = self.best
        whole = [path for path in self._paths() if path not in self._damaged]
        kept = set(whole[-self.keep :])
        for path in [*self._paths(), *self.folder.glob("best_*")]:
            if path.is_dir() and path not in kept and (best is None or path != best.path):
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Rename before removing, so that a crash half-way leaves no folder that looks like a checkpoint."""
        if not path.exists():
            return
        doomed = path.with_name(f"{path.name}.tmp")
        try:
            os.replace(path, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            self._say(f"old checkpoint {path.name} could not be removed ({error}); it takes up space")

    def _cannot_write(self, name: str, needed: int, error: Exception) -> str:
        try:
            free = f"{shutil.disk_usage(self.folder).free / 1e6:,.1f} MB free"
        except OSError:
            free = "free space unknown"
        paths = self._paths()
        kept = f"{paths[-1].name} is untouched" if paths else "there is no earlier one"
        return (
            f"cannot write checkpoint {name} to {self.folder}: {error}; needs {needed / 1e6:,.1f} MB, "
            f"{free}; {kept}. Make room or make the folder writable, then start the same run again"
        )

    def _say(self, message: str) -> None:
        self.messages.append(message)
        warnings.warn(message, CheckpointWarning, stacklevel=3)

    def _say_once(self, message: str) -> None:
        if message not in self.messages:
            self.messages.append(message)


def _step(path: Path) -> int:
    found = _NUMBER.fullmatch(path.name)
    assert found is not None, path
    return int(found.group(1))


def _own_memory(members: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[list[str]]]:
    """Contiguous CPU tensors, no two in the same memory (safetensors refuses that); names that shared."""
    owners: dict[tuple[str, int], list[str]] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in members.items():
        copy = tensor.detach().to("cpu").contiguous()
        if tensor.numel():
            owner = owners.setdefault((str(tensor.device), tensor.untyped_storage().data_ptr()), [])
            owner.append(name)
            if len(owner) > 1 or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
                copy = copy.clone()
        plain[name] = copy
    return plain, [names for names in owners.values() if len(names) > 1]


def _seal(data: Mapping[str, Any]) -> bytes:
    """JSON whose last key is the digest of all text before it."""
    body = json.dumps(data, allow_nan=False, indent=1).encode().removesuffix(b"\n}")
    return body + b',\n "sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def _read_state(path: Path) -> dict[str, Any]:
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
    data: dict[str, Any] = json.loads(raw)
    if data["schema"] > SCHEMA:
        raise NewerCheckpoint(
            f"{path.name} has checkpoint schema {data['schema']}, written by matrixlib "
            f"{data.get('versions', {}).get('matrixlib', '?')}; this version reads up to schema {SCHEMA}. "
            f"Update matrixlib, or start a new run"
        )
    return data


def _read_group(path: Path, group: str, entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    file = path / f"{group}.safetensors"
    try:
        raw = file.read_bytes()
    except OSError as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise DamagedCheckpoint(f"{path.name}: {file.name} {reason}") from error
    if len(raw) != entry["bytes"]:
        raise DamagedCheckpoint(f"{path.name}: {file.name} has {len(raw)} bytes instead of {entry['bytes']}")
    if hashlib.sha256(raw).hexdigest() != entry["sha256"]:
        raise DamagedCheckpoint(f"{path.name}: {file.name} is not as it was written (checksum)")
    tensors: dict[str, torch.Tensor] = safetensors.torch.load(raw)
    if len(tensors) != entry["tensors"]:
        raise DamagedCheckpoint(
            f"{path.name}: {file.name} holds {len(tensors)} tensors, not {entry['tensors']}"
        )
    return tensors


def _encode(value: Any, where: str) -> Any:
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
        return {key: _encode(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
    hint = "; put it in a group of tensors" if isinstance(value, (torch.Tensor, np.ndarray)) else ""
    raise TypeError(f"{where}: {type(value).__name__} is not a number, string, list or mapping{hint}")


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"$float"}:
            return float(value["$float"])
        return {key: _decode(inner) for key, inner in value.items()}
    return [_decode(inner) for inner in value] if isinstance(value, list) else value


def _versions() -> dict[str, str]:
    try:
        ours = version("matrixlib")
    except PackageNotFoundError:  # run from a source tree that is not installed
        ours = "unknown"
    return {
        "matrixlib": ours,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "safetensors": safetensors.__version__,
    }
