"""Random streams of a process, captured and restored: Python, NumPy's global one, torch's CPU and device ones."""

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from matrixlib.hardware import backend


@dataclass(frozen=True)
class Streams:
    """State of every stream that a model or a task could draw from in the main process."""

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: Tensor
    device: Tensor | None

    def tensors(self) -> dict[str, Tensor]:
        """The torch part (uint8 tensors on the CPU), for a checkpoint's tensors."""
        return {"torch": self.torch} | ({} if self.device is None else {"device": self.device})

    def plain(self) -> dict[str, Any]:
        """The other part as JSON data."""
        inner = self.numpy["state"]
        numpy = {**self.numpy, "state": {"key": inner["key"].tolist(), "pos": int(inner["pos"])}}
        return {"python": self.python, "numpy": numpy}


def from_saved(tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> Streams:
    """Inverse of `Streams.tensors` and `Streams.plain`."""
    version, inner, gauss = plain["python"]
    return Streams((version, tuple(inner), gauss), plain["numpy"], tensors["torch"], tensors.get("device"))


def capture(device: torch.device) -> Streams:
    """The present state; waits for no device."""
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the global stream is what is saved
    return Streams(random.getstate(), numpy, torch.get_rng_state(), backend.rng_state(device))


def restore(streams: Streams, device: torch.device) -> None:
    """Set every stream. The device's own is left alone where the saved state comes from another kind."""
    random.setstate(streams.python)
    np.random.set_state(streams.numpy)  # noqa: NPY002
    torch.set_rng_state(streams.torch)
    if streams.device is not None:
        backend.set_rng_state(device, streams.device)


def seeded(seed: int, device: torch.device) -> Streams:
    """Streams as they are right after seeding; the process's own streams are left as they were."""
    before = capture(device)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)
    streams = capture(device)
    restore(before, device)
    return streams


def of_rank(seed: int, rank: int, update: int, device: torch.device) -> Streams:
    """Streams of a rank's update: functions of these numbers alone, so that nothing of them has to be stored."""
    digest = hashlib.blake2b(f"{seed} {rank} {update}".encode(), digest_size=8).digest()
    return seeded(int.from_bytes(digest, "little"), device)
