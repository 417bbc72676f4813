"""The layout that updates of a network are fastest in on a GPU, by trying: the memory format of its convolutions, and
whether cuDNN looks for the fastest algorithm of each shape.

Neither is known beforehand. Tensor cores want channels last; CUDA's GroupNorm takes and gives channels first
(https://github.com/pytorch/pytorch/issues/111824), so beside it every convolution may turn its input round. What such a
search finds depends on the card, the dtype and the rows of a pass.
"""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch

from matrixlib.config import Config
from matrixlib.engine.memory import out_of_memory
from matrixlib.engine.step import throwaway
from matrixlib.engine.task import Batch, Task
from matrixlib.hardware.runtime import Runtime
from matrixlib.hardware.speed import seconds_of

WARM, TIMED = 3, 7
"""Updates of a trial: the first ones allocate memory and look for algorithms."""
GAIN = 1.03
"""How many times as fast another layout has to be: a smaller difference is noise."""


def choose_layout(task: Task, batch: Batch, runtime: Runtime, config: Config, fixed: bool = False) -> Runtime:
    """The runtime with the fastest layout for updates of `batch` (host tensors), and what was measured in its reasons.

    fixed: the memory format stays as it is, because the user named it.
    """
    return fastest(runtime, lambda candidate: update_seconds(task, batch, candidate, config), fixed)


def fastest(runtime: Runtime, seconds: Callable[[Runtime], float], fixed: bool = False) -> Runtime:
    """As `choose_layout`. seconds(candidate): of one update; an error for want of memory takes a candidate out.
    Candidates are not compiled, which would take long for each.

    The runtime's own layout stays unless another is `GAIN` times as fast, or where no candidate fits.
    """
    formats = [runtime.channels_last] if fixed else [runtime.channels_last, not runtime.channels_last]
    searches = [runtime.benchmark, not runtime.benchmark]
    times: dict[tuple[bool, bool], float] = {}
    for last, search in itertools.product(formats, searches):
        try:
            times[last, search] = seconds(replace(runtime, channels_last=last, benchmark=search, compile=""))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
    own = runtime.channels_last, runtime.benchmark
    best = min(times, key=lambda layout: times[layout], default=own)
    if own in times and times[own] < GAIN * times[best]:
        best = own
    words = [
        f"{1e3 * time:.1f} ms with channels {'last' if last else 'first'}{' and the search' if search else ''}"
        for (last, search), time in times.items()
    ]
    why = f"an update takes {', '.join(words)}, by trying" if words else "nothing could be tried for want of memory"
    if not fixed:
        runtime = runtime.with_choice("channels_last", best[0], why)
    return runtime.with_choice("benchmark", best[1], f"cuDNN's search for algorithms; {why}")


def update_seconds(task: Task, batch: Batch, runtime: Runtime, config: Config) -> float:
    """Median seconds of an update of a throwaway network; random streams and cuDNN's switch are then as before."""
    switch = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = runtime.benchmark
    try:
        with throwaway(task, runtime, config) as step:
            times = [seconds_of(lambda: step(batch), runtime.device) for _ in range(WARM + TIMED)]
            return statistics.median(times[WARM:])
    finally:
        torch.backends.cudnn.benchmark = switch
