"""Noise on gradients, which dies away (Neelakantan et al. 2015, https://arxiv.org/abs/1511.06807)."""

from collections.abc import Iterable

import torch
from torch import Tensor

from matrixlib.config import OptimConfig

STREAM = 0x6E6F697365
"""Keeps this stream apart from the others of a run's seed."""


def variance(config: OptimConfig, update: int) -> float:
    """Of the noise of update `update` (0 = first): eta / (1 + t)^gamma."""
    return config.noise / (1 + update) ** config.noise_decay


@torch.no_grad()
def add(gradients: Iterable[Tensor], variance: float, seed: int, update: int) -> None:
    """Add normal noise in place. Its stream is a function of (seed, update): a run that was resumed or rolled back,
    and every process of one that has several, draws the same, and no other stream moves.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for gradient in gradients:
        device = gradient.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed((seed * 0x9E3779B1 + update + STREAM) % 2**63)
        drawn = torch.randn(gradient.shape, generator=generators[device], device=device, dtype=gradient.dtype)
        gradient.add_(drawn, alpha=variance**0.5)
