"""Checkpoints of a run, written in the background and atomically; which to resume from, and which is best.

`step_00000500/` holds `<group>.safetensors` for each group of tensors (model, ema, optimiser, rng, ...), or
`<group>.safetensors.zst` if compressed, and `state.json`: metadata, whether it was the best, SHA-256 and size of each
tensor file, the caller's state and, as the last key, the SHA-256 of all text before it. No pickle.

Written as `step_00000500.tmp`, fsynced, renamed. A best one that a rollback discards is renamed `best_00000500`.
"""

import functools
import hashlib
import json
import math
import os
import re
import shutil
import time
import warnings
from collections.abc import Mapping
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import zstandard
from safetensors import SafetensorError

from matrixlib.config import CheckpointConfig
from matrixlib.files import FolderError, inode_problem, sync_folder, utc_now, write_bytes
from matrixlib.hardware import machine

SCHEMA = 2
SMALL_BYTES, MAX_RATIO = 16 << 20, 64  # decompression limit for larger groups; weights compress by a tenth
FOLDER = re.compile(r"(step|best)_(\d{8,})")
ROOM_BYTES = 1 << 20  # for state.json and file system overhead
Tensors = dict[str, dict[str, torch.Tensor]]
TensorsLike = Mapping[str, Mapping[str, torch.Tensor]]

_GROUP = re.compile(r"[a-z][a-z0-9_]*")
_DIGEST = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n\}\n\Z')
_versions = functools.cache(machine.versions)  # may run a driver's command


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message says which, why and what to do."""


class UnwritableCheckpoint(CheckpointError, FolderError):
    """No disk space for a checkpoint, or its folder is not writable."""


class DamagedCheckpoint(CheckpointError):
    """A corrupt checkpoint."""


class CheckpointWarning(UserWarning):
    """A checkpoint problem that did not stop the run."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint in memory, tensors on the CPU. sha256: by group, of its file."""

    step: int
    path: Path
    tensors: Tensors
    state: dict[str, Any]
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
    """Write a checkpoint into the empty `folder`, durable on return. tensors: of `host_copies`. mark: of a best one."""
    groups = {group: _write_group(folder, group, members, compress) for group, members in tensors.items()}
    data = {"schema": SCHEMA, "step": step, "time": utc_now(), "versions": _versions(), "best": mark}
    write_bytes(folder / "state.json", _seal(data | {"groups": groups, "state": state}))


def read(path: Path) -> Checkpoint:
    """Read and verify one folder. DamagedCheckpoint names the corrupt file; CheckpointError for an unknown schema."""
    data = read_state(path)
    try:
        tensors = {group: _read_group(path, group, entry) for group, entry in data["groups"].items()}
        digests = {group: str(entry["sha256"]) for group, entry in data["groups"].items()}
        return Checkpoint(data["step"], path, tensors, data["state"], digests)
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path.name}: state.json is malformed ({error!r})") from error


def read_state(path: Path) -> dict[str, Any]:
    """The verified contents of state.json; errors as `read`."""
    try:
        raw = (path / "state.json").read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name}: no state.json that can be read ({error.strerror})") from error
    digest = _DIGEST.search(raw)
    if digest is None or hashlib.sha256(raw[: digest.start()]).hexdigest().encode() != digest.group(1):
        raise DamagedCheckpoint(f"{path.name}: state.json is corrupt (checksum mismatch)")
    try:
        data: dict[str, Any] = json.loads(raw)
        schema, step = int(data["schema"]), int(data["step"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path.name}: state.json is malformed ({error!r})") from error
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
    file = folder / f"{group}.safetensors{'.zst' if compress else ''}"
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


def _read_group(path: Path, group: str, entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    if not _GROUP.fullmatch(group):
        raise DamagedCheckpoint(f"{path.name}: state.json names a file outside of the folder ('{group}')")
    file = path / f"{group}.safetensors{'.zst' if 'unpacked' in entry else ''}"
    where = f"{path.name}: {file.name}"
    try:
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise DamagedCheckpoint(f"{where} has {size} bytes instead of {entry['bytes']}")
        with file.open("rb") as opened:  # bounded: a link may point to an endless device
            raw = opened.read(size)
    except OSError as error:
        raise DamagedCheckpoint(f"{where} cannot be read ({error.strerror})") from error
    if hashlib.sha256(raw).hexdigest() != entry["sha256"]:
        raise DamagedCheckpoint(f"{where} is corrupt (checksum mismatch)")
    try:
        if (unpacked := entry.get("unpacked")) is not None:  # check the size before allocating
            if unpacked > max(SMALL_BYTES, MAX_RATIO * size):
                raise zstandard.ZstdError(f"it claims {unpacked:,} bytes, which no weights of {size:,} bytes have")
            if (claimed := zstandard.get_frame_parameters(raw).content_size) != unpacked:
                raise zstandard.ZstdError(f"the frame claims {claimed} bytes, state.json {unpacked}")
            raw = zstandard.ZstdDecompressor().decompress(raw, allow_extra_data=False)
        return safetensors.torch.load(raw)
    except (zstandard.ZstdError, SafetensorError) as error:
        raise DamagedCheckpoint(f"{where} cannot be decoded ({error})") from error


def _seal(data: Mapping[str, Any]) -> bytes:
    """JSON whose last key is the SHA-256 of all text before it."""
    body = json.dumps(data, indent=1).encode().removesuffix(b"\n}")
    return body + b',\n "sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


class BestCheckpoint(NamedTuple):
    """A checkpoint saved with `best=value`. order: increases with each."""

    step: int
    value: float
    path: Path
    order: int


@dataclass
class CheckpointSchedule:
    """When the next checkpoint is due. step: of the last one, -1 before. by_clock: due by time, not by update."""

    config: CheckpointConfig
    step: int = -1
    by_clock: int = 0
    _at: float = field(default_factory=time.monotonic)

    def due(self, step: int) -> bool:
        """Whether `interval`, `keep_every` or the minutes are reached."""
        intervals = (self.config.interval, self.config.keep_every)
        if any(step // n > max(self.step, 0) // n for n in intervals if n):
            return True
        late = 0 < 60 * self.config.minutes <= time.monotonic() - self._at
        self.by_clock += late
        return late

    def done(self, step: int) -> None:
        self.step, self._at = step, time.monotonic()


class Checkpoints:
    """The checkpoints of one run: the newest `keep` (at least 2), the newest `best` best ones, and every `every`-th
    update (0 = none). compress: zstd level, 0 = off. One process saves at a time; call `join` after the last save."""

    def __init__(self, folder: Path, keep: int, compress: int = 0, *, best: int = 1, every: int = 0) -> None:
        self.folder, self.compress = Path(folder), compress
        self.keep, self.keep_best, self.keep_every = keep, best, every
        self._damaged: set[Path] = set()
        self._thread = futures.ThreadPoolExecutor(1, "checkpoint")  # joined at interpreter exit
        self._pending: futures.Future[None] | None = None

    def save(
        self,
        step: int,
        tensors: TensorsLike,
        state: Mapping[str, Any],
        *,
        best: float | None = None,
        spare: int | None = None,
        wait: bool = False,
    ) -> Path:
        """Save a checkpoint of update `step`; returns its future folder.

        Tensors are copied before return and written by a thread (durable on return if `wait`). best: loss that makes it
        the best. spare: another step to keep. Checkpoints beyond `step` are removed once the new one is durable.
        CheckpointError if writing fails, now or at the next `save` or `join` (older ones are untouched); TypeError or
        ValueError for state that cannot be stored.
        """
        copied = json.loads(json.dumps(state))
        if best is not None and not math.isfinite(best):
            raise ValueError(f"step {step} cannot be the best with value {best}")
        self.join()
        path = self.folder / f"step_{step:08d}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob("*.tmp"):  # interrupted writes or removals
                shutil.rmtree(left)
            path.with_suffix(".tmp").mkdir()
        except OSError as error:
            raise self._cannot_write(step, error) from error
        self._pending = self._thread.submit(self._write, path, host_copies(tensors), copied, best, spare)
        if wait:
            self.join()
        return path

    def require_room(self, needed: int, steps: int) -> None:
        """CheckpointError if the disk cannot hold all checkpoints of `needed` bytes that a run of `steps` updates keeps
        at once. Not checked with compression, as sizes are unknown."""
        self._wait()  # whose files are being renamed
        count = self.keep + self.keep_best + 1 + (steps // self.keep_every if self.keep_every else 0)
        folder = next(path for path in (self.folder, *self.folder.parents) if path.is_dir())
        held = sum(file.stat().st_size for file in self.folder.glob("*/*"))
        missing = count * (needed + ROOM_BYTES) - held - shutil.disk_usage(folder).free
        if missing > 0 and not self.compress:
            raise UnwritableCheckpoint(
                f"the disk of {self.folder} has no room for this run: up to {count} checkpoints of "
                f"{needed / 1e6:,.1f} MB (checkpoint.keep, keep_best, keep_every and the one being written) need "
                f"{missing / 1e6:,.1f} MB more than there are; make room, or keep fewer"
            )

    def join(self) -> None:
        """Wait for the save in flight; raises its CheckpointError, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending, unverified."""
        self._wait()
        return [step_of(path) for path in self._paths()]

    def newest(self, before: int | None = None) -> Checkpoint | None:
        """The newest intact checkpoint (up to step `before`), or None if there is none. Corrupt ones are skipped with a
        warning. CheckpointError if all are corrupt, or for an unknown schema."""
        self._wait()
        damage: list[str] = []
        for path in reversed([path for path in self._paths() if before is None or step_of(path) <= before]):
            try:
                checkpoint = read(path)
            except DamagedCheckpoint as error:
                self._damaged.add(path)
                damage.append(str(error))
                continue
            if damage:
                warnings.warn(f"using {path.name} instead: {'; '.join(damage)}", CheckpointWarning, stacklevel=2)
            return checkpoint
        if damage:
            raise CheckpointError(
                f"every checkpoint in {self.folder} is corrupt: {'; '.join(damage)}. Restore one "
                f"from a backup, or start a new run (a new `run` name, or remove that folder)"
            )
        return None

    def pick(self, name: str = "newest") -> Checkpoint:
        """`newest`, `best` (else the newest), or a name (`step_00000500`). CheckpointError if absent or corrupt."""
        if name == "best" and (best := self.best) is not None:
            return read(best.path)
        if name in ("best", "newest"):
            if (checkpoint := self.newest()) is None:
                raise CheckpointError(f"no checkpoint in {self.folder} yet; train this run first")
            return checkpoint
        self._wait()
        if not (FOLDER.fullmatch(name) and (self.folder / name).is_dir()):
            known = ", ".join(["best", "newest", *(path.name for path in self._paths())])
            raise CheckpointError(f"no checkpoint '{name}' in {self.folder}; there are: {known}")
        return read(self.folder / name)

    @property
    def best(self) -> BestCheckpoint | None:
        """The latest best checkpoint, also of an earlier process; None if there is none."""
        self._wait()
        return next(reversed(self._bests()), None)

    def discard_after(self, step: int) -> None:
        """Remove checkpoints beyond `step` for a rollback; best ones are renamed `best_...`."""
        self._wait()
        self._discard_after(step)

    def _wait(self) -> None:
        """Wait without raising: `save` and `join` raise."""
        if self._pending is not None:
            futures.wait([self._pending])

    # Called by the thread, and by public methods only while it is idle.

    def _write(self, final: Path, tensors: Tensors, state: Any, best: float | None, spare: int | None) -> None:
        temporary, step = final.with_suffix(".tmp"), step_of(final)
        try:
            mark = None
            if best is not None:
                order = max((before.order for before in self._bests()), default=0)
                mark = {"value": float(best), "order": order + 1}
            write(temporary, step, tensors, state, mark, self.compress)
            self._retire(final)  # same step: discarded by a rollback, or corrupt
            os.replace(temporary, final)
            sync_folder(self.folder)
        except (OSError, zstandard.ZstdError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)  # free the space; the error below matters
            raise self._cannot_write(step, error) from error
        self._damaged.discard(final)
        self._discard_after(step)
        self._prune(spare)

    def _bests(self) -> list[BestCheckpoint]:
        """Best checkpoints, oldest mark first."""
        marks = []
        for path in self._paths(("step", "best")):
            try:
                data = read_state(path)
                if mark := data["best"]:
                    marks.append(BestCheckpoint(int(data["step"]), float(mark["value"]), path, int(mark["order"])))
            except (DamagedCheckpoint, KeyError, TypeError, ValueError, OverflowError) as error:
                warnings.warn(f"{path.name} cannot count as the best: {error!r}", CheckpointWarning, stacklevel=2)
        return sorted(marks, key=lambda best: best.order)[-self.keep_best :]

    def _discard_after(self, step: int) -> None:
        for path in reversed(self._paths()):  # newest first, so that a crash leaves no gap
            if step_of(path) > step:
                self._retire(path)

    def _paths(self, kinds: tuple[str, ...] = ("step",)) -> list[Path]:
        """Folders by step, unverified."""
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        named = [path for path in paths if (name := FOLDER.fullmatch(path.name)) and name.group(1) in kinds]
        return sorted((path for path in named if path.is_dir()), key=step_of)

    def _prune(self, spare: int | None) -> None:
        """Keep the newest `keep`, the best, and every `every`-th. Known corrupt ones do not count."""
        whole = [path for path in self._paths() if path not in self._damaged]
        kept = {*whole[-self.keep :], *(best.path for best in self._bests())}
        every = self.keep_every
        kept |= {path for path in whole if step_of(path) == spare or (every and step_of(path) % every == 0)}
        for path in [path for path in self._paths(("step", "best")) if path not in kept]:
            self._remove(path)

    def _retire(self, path: Path) -> None:
        """Remove a discarded checkpoint; a best one is renamed instead."""
        if path not in [best.path for best in self._bests()]:
            self._remove(path)
            return
        name = path.with_name(path.name.replace("step", "best"))
        self._remove(name)  # marked earlier
        os.replace(path, name)
        sync_folder(self.folder)

    def _remove(self, path: Path) -> None:
        """Rename, then remove, so that a crash half-way leaves nothing that looks like a checkpoint."""
        if not path.exists():
            return
        doomed = path.with_name(f"{path.name}.old.tmp")
        try:
            os.replace(path, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            text = f"old checkpoint {path.name} could not be removed ({error}); it takes up space"
            warnings.warn(text, CheckpointWarning, stacklevel=2)

    def _cannot_write(self, step: int, error: Exception) -> CheckpointError:
        paths = self._paths()
        earlier = f"{paths[-1].name} is untouched" if paths else "there is no earlier one"
        problem = inode_problem(self.folder, error) or error
        return UnwritableCheckpoint(
            f"cannot write checkpoint step_{step:08d} to {self.folder}: {problem}; {earlier}. Make room or make the "
            f"folder writable, then start the same run again"
        )
