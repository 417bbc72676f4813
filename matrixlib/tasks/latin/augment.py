"""Isotopism on the device: rows, columns and digits of each square permuted, each sample from a key of its own.

The stream of a sample depends on its key alone, not on the batch, the worker or the device: it is integer
arithmetic, the same on all of them.
"""

import functools

import torch
from torch import Tensor

from matrixlib.tasks.latin.pool import HELD_OUT, PRIME, hash_weights

_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # SplitMix64, signed
_LARGEST = 2**62  # above every score; not the type's greatest, with which MPS fills up what it sorts
NO_KEY = 0  # the square stays as it is


def random_scores(key: Tensor, count: int) -> Tensor:
    """(B, count) int64 random numbers of 0..2**62-1 from keys (B,): SplitMix64 (Steele et al. 2014)."""
    z = key[:, None] + _GOLDEN * torch.arange(1, count + 1, device=key.device)
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return _shifted(z ^ _shifted(z, 31), 2)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's copies the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def permutations(key: Tensor, size: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three permutations (B, side) of 0..size-1, the places from `size` on left alone; the identity for NO_KEY."""
    places = torch.arange(side, device=key.device)
    scores = random_scores(key, 3 * 16).unflatten(1, (3, 16))[:, :, :side]
    scores = torch.where((key == NO_KEY)[:, None, None], places, scores)
    scores = torch.where(places >= size[:, None, None], _LARGEST, scores)
    order = scores.argsort(dim=2, stable=True)
    return order[:, 0], order[:, 1], order[:, 2]


def isotope(square: Tensor, size: Tensor, key: Tensor) -> Tensor:
    """Squares (B, N, N) int64 of digit indices, permuted by their keys (B,) inside their size.

    A square that would become a held-out one stays as it is.
    """
    side = square.shape[-1]
    rows, columns, digits = permutations(key, size, side)
    moved = square.gather(1, rows[:, :, None].expand(-1, -1, side))
    moved = moved.gather(2, columns[:, None, :].expand(-1, side, -1))
    moved = digits.gather(1, moved.flatten(1)).view_as(square)
    moved = moved * inside(size, side)
    return torch.where(held_out(moved)[:, None, None], square, moved)


def inside(size: Tensor, side: int) -> Tensor:
    """(B, side, side) bool: cells of the grid."""
    places = torch.arange(side, device=size.device) < size[:, None]
    return places[:, :, None] & places[:, None, :]


def held_out(square: Tensor) -> Tensor:
    """(B,) bool; the same as `pool.held_out`, for tensors (B, N, N) int64."""
    side = square.shape[-1]
    total = (square * _weights(str(square.device))[:side, :side]).sum((1, 2))
    return total % PRIME % HELD_OUT == 0


@functools.cache
def _weights(device: str) -> Tensor:
    with torch.inference_mode(False):
        return torch.from_numpy(hash_weights()).to(device)
