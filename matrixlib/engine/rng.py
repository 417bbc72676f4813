"""Capture and restore the process's random streams: Python, NumPy's global, torch's CPU and device."""

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
    """State of every stream that a model or task may draw from in the main process."""

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: Tensor
    device: Tensor | None

    def tensors(self) -> dict[str, Tensor]:
        """torch's states (uint8 CPU tensors), for a checkpoint's tensors."""
        return {"torch": self.torch} | ({} if self.device is None else {"device": self.device})

    def plain(self) -> dict[str, Any]:
        """The other states as JSON data."""
        inner = self.numpy["state"]
        numpy = {**self.numpy, "state": {"key": inner["key"].tolist(), "pos": int(inner["pos"])}}
        return {"python": self.python, "numpy": numpy}


def from_saved(tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> Streams:
    """Inverse of `Streams.tensors` and `Streams.plain`."""
    version, inner, gauss = plain["python"]
    return Streams((version, tuple(inner), gauss), plain["numpy"], tensors["torch"], tensors.get("device"))


def capture(device: torch.device) -> Streams:
    """The current state; no device synchronisation."""
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the global stream is what is saved
    return Streams(random.getstate(), numpy, torch.get_rng_state(), backend.rng_state(device))


def restore(streams: Streams, device: torch.device) -> None:
    """Set every stream; the device's only if saved on the same kind of device."""
    random.setstate(streams.python)
    np.random.set_state(streams.numpy)  # noqa: NPY002
    torch.set_rng_state(streams.torch)
    if streams.device is not None:
        backend.set_rng_state(device, streams.device)


def seeded(seed: int, device: torch.device) -> Streams:
    """Streams as after seeding; the process's own are unchanged."""
    before = capture(device)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)
    streams = capture(device)
    restore(before, device)
    return streams


def of_rank(seed: int, rank: int, update: int, device: torch.device) -> Streams:
    """Streams of a rank's update, a pure function of these numbers, so nothing is stored."""
    digest = hashlib.blake2b(f"{seed} {rank} {update}".encode(), digest_size=8).digest()
    return seeded(int.from_bytes(digest, "little"), device)
