"""What activation checkpointing of every k-th block saves and costs: bytes kept for the backward pass, and time.

Run from the repository root: ``python tests/bench/bench_activation.py``. Time is that of the processor (user and
system) in one thread, which other programs disturb little. The medians are of updates taken in turn, so that a change
in the machine's speed meets every k alike.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch import Tensor, nn

from matrixlib.config import dump, merge
from matrixlib.tasks import load_config as load
from matrixlib.tasks.chess.model import PLANES, PolicyValueNet

CHANNELS, BLOCKS, ROWS, REPEATS = 96, 12, 64, 9
EVERY = (0, 4, 2, 1)


def build(every: int) -> PolicyValueNet:
    config = load("small").model
    changes = {"channels": CHANNELS, "blocks": BLOCKS, "checkpoint_every": every}
    torch.manual_seed(0)
    return PolicyValueNet(type(config).model_validate(merge(dump(config), changes))).train()


def kept(net: nn.Module, planes: Tensor) -> int:
    """Bytes that autograd holds between the passes, each storage once, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
    saved: list[Tensor] = []

    def pack(value: Tensor) -> Tensor:
        saved.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss(net, planes)
    sizes = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in saved}
    return sum(size for address, size in sizes.items() if address not in weights)


def loss(net: nn.Module, planes: Tensor) -> Tensor:
    out = net(planes)
    return out["policy"].square().mean() + out["value"].square().mean()


def main() -> None:
    torch.set_num_threads(1)
    planes = torch.rand(ROWS, PLANES, 8, 8, generator=torch.Generator().manual_seed(1))
    nets = {every: build(every) for every in EVERY}
    optimisers = {every: torch.optim.AdamW(net.parameters()) for every, net in nets.items()}
    seconds: dict[int, list[float]] = {every: [] for every in EVERY}
    for repeat in range(1 + REPEATS):  # the first warms up
        for every, net in nets.items():
            start = time.process_time()
            optimisers[every].zero_grad()
            loss(net, planes).backward()
            optimisers[every].step()
            if repeat:
                seconds[every].append(time.process_time() - start)
    blocks = len(nets[0].tower)
    print(f"{CHANNELS} channels, {blocks} blocks, {ROWS} rows, fp32, one thread")
    print(f"{'every':>5} {'kept MiB':>9} {'ratio':>6} {'s/update':>9} {'ratio':>6}")
    base = kept(nets[0], planes), statistics.median(seconds[0])
    for every in EVERY:
        size, median = kept(nets[every], planes), statistics.median(seconds[every])
        shares = f"{size / base[0]:>6.2f} {median:>9.3f} {median / base[1]:>6.2f}"
        print(f"{every or 'off':>5} {size / 2**20:>9.1f} {shares}")


if __name__ == "__main__":
    sys.exit(main())
