"""Random streams: captured, saved as tensors and JSON, restored."""

import json
import random

import numpy as np
import torch

from matrixlib.engine import rng

CPU = torch.device("cpu")


def draw() -> list[float]:
    return [random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]  # noqa: NPY002


def test_streams_survive_json_and_go_on_where_they_were() -> None:
    rng.restore(rng.seeded(3, CPU), CPU)
    draw()  # leaves half a pair of Gaussians in the two older generators
    streams = rng.capture(CPU)
    expected = draw()
    plain = json.loads(json.dumps(streams.plain()))
    assert all(value.dtype == torch.uint8 for value in streams.tensors().values())
    again = rng.from_saved(streams.tensors(), plain)
    random.seed(0)
    torch.manual_seed(0)
    rng.restore(again, CPU)
    assert draw() == expected


def test_seeding_depends_on_the_seed_alone_and_touches_nothing() -> None:
    one = rng.seeded(7, CPU)
    draw()
    before = rng.capture(CPU)
    two = rng.seeded(7, CPU)
    for streams, same in ((rng.capture(CPU), before), (one, two)):
        assert torch.equal(streams.torch, same.torch)
        assert streams.python == same.python
    assert not torch.equal(one.torch, rng.seeded(8, CPU).torch)
