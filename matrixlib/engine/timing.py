"""Where the time of a training goes: seconds of each phase of an update, their table, and a word when data is late."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from matrixlib.engine.stats import Stats
from matrixlib.hardware import backend

if TYPE_CHECKING:
    import pandas as pd
    import torch

PHASES = ("wait", "copy", "teacher", "forward", "backward", "read", "optimiser", "validation", "checkpoint")
"""wait: for the loader. copy: host to device. teacher: what a frozen network says of the rows. read: the one host read
of an update, which waits for the device."""
ON_DEVICE = ("copy", "teacher", "forward", "backward", "optimiser")
BETWEEN = ("validation", "checkpoint")
"""Between two updates, and not in their seconds."""
TRACED = 3
"""Updates in a trace."""
STARVED_SHARE, STARVED_UPDATES = 0.2, 100
"""The loader is late when it took this share of so many updates."""
FIRST_UPDATES = 20
"""In these the workers start, and nothing is held against them."""


class Throughput:
    """Rows per second over the last updates: waiting for data counts, validation and checkpoints do not."""

    def __init__(self, window: int = 20) -> None:
        self._updates: deque[tuple[int, float]] = deque(maxlen=window)

    def add(self, rows: int, seconds: float) -> float:
        """Take in one update; the rate over the window."""
        self._updates.append((rows, seconds))
        total = sum(seconds for _, seconds in self._updates)
        return sum(rows for rows, _ in self._updates) / total if total > 0 else 0.0


class Clock:
    """Adds up the seconds of phases. Those that run on a GPU are measured there, by events that are read when the
    device has passed them: nothing is waited for, so they may come one update late. Elsewhere by the host's clock,
    which on MPS sees the launching of work, and the work itself in `read`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}
        self._events: deque[tuple[str, Any, Any]] = deque()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what is done inside the context; not counted if it fails."""
        start = backend.timing_event(self._device) if name in ON_DEVICE else None
        if start is not None:
            stop = backend.timing_event(self._device)
            start.record()
            yield
            stop.record()
            self._events.append((name, start, stop))
        else:
            began = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - began)

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call."""
        while self._events and self._events[0][2].query():
            name, start, stop = self._events.popleft()
            self._add(name, start.elapsed_time(stop) / 1000)
        seconds, self._seconds = self._seconds, {}
        return {name: round(seconds[name], 6) for name in PHASES if name in seconds}

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds


class Starvation:
    """Tells in words when training waits for data. The first updates, in which workers start, do not count."""

    def __init__(self, workers: int, prefetch: int) -> None:
        self._workers, self._prefetch = workers, prefetch
        self._last: deque[tuple[float, float]] = deque(maxlen=STARVED_UPDATES)
        self._first = FIRST_UPDATES  # to come that do not count

    def update(self, waited: float, seconds: float) -> str:
        """Take in one update that took `seconds`, `waited` of them for its batch; a warning or ""."""
        if self._first:
            self._first -= 1
            return ""
        self._last.append((waited, seconds))
        total = sum(seconds for _, seconds in self._last)
        share = sum(late for late, _ in self._last) / total if total else 0.0
        if len(self._last) < STARVED_UPDATES or share <= STARVED_SHARE:
            return ""
        if self._workers:
            remedy = (
                f"raise data.workers (now {self._workers}) or data.prefetch (now {self._prefetch}), and see whether "
                "the disk is the limit"
            )
        else:
            remedy = "data.workers is 0, so batches are made between the updates: 1 would make them meanwhile"
        return f"waiting for data took {share:.0%} of the last {STARVED_UPDATES} updates; {remedy}"


def traced(updates: Iterator[Stats], after: int, path: Path) -> Iterator[Stats]:
    """The same updates; the `TRACED` that follow update `after`, fewer where they end before, are recorded as a Chrome
    trace. after: 0 = none."""
    with contextlib.ExitStack() as stack:
        recorder: torch.profiler.profile | None = None
        for stats in updates:
            yield stats
            if after and stats.step == after:
                import torch  # not at the top: whoever reads times does not need it

                write = partial(torch.profiler.profile.export_chrome_trace, path=str(path))
                recorder = stack.enter_context(torch.profiler.profile(on_trace_ready=write))
            elif recorder is not None and stats.step >= after + TRACED:
                stack.close()
                recorder = None


def phase_seconds(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Seconds of each phase in each row of metrics.jsonl, NaN where it did not happen; `other` is the rest of the
    updates' own time. Saving stands in the row after it, so that after the last update is missing.
    """
    import pandas as pd

    table = []
    for row in rows:
        times, whole = dict(row.get("times", {})), row["seconds"] * row.get("updates", 1)
        inside = _inside({name: times[name] for name in times if name not in BETWEEN}, whole)
        table.append({**times, **inside, "other": max(whole - sum(inside.values()), 0.0)})
    frame = pd.DataFrame(table, index=[row["step"] for row in rows], dtype=float)
    return frame[[name for name in (*PHASES, "other") if name in frame]]


def _inside(times: Mapping[str, float], whole: float) -> dict[str, float]:
    """Seconds of the phases of one update, which are no more than its own, `whole`.

    They are more only where a GPU worked while the host did something else. `read` then is the host's wait for phases
    that are counted themselves, and what is still too much, as the optimiser's work runs on into the next update, is
    subtracted from all alike.
    """
    times = dict(times)
    if "read" in times and sum(times.values()) > whole:
        times["read"] = max(times["read"] - sum(times.get(name, 0.0) for name in ON_DEVICE), 0.0)
    total = sum(times.values())
    return {name: seconds * min(1.0, whole / total) if total else 0.0 for name, seconds in times.items()}


def table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A row for each phase: how often, seconds in all, milliseconds (mean, least, median, 95th percentile, most), share
    of all."""
    import pandas as pd

    frame, updates = phase_seconds(rows), np.array([row.get("updates", 1) for row in rows])
    whole, columns = frame.sum().sum(), {}
    for name in frame:
        happened = frame[name].notna().to_numpy()
        counts = np.ones(happened.sum()) if name in BETWEEN else updates[happened]
        each = 1000 * frame[name].to_numpy()[happened] / counts
        columns[name] = {
            "count": f"{counts.sum():,.0f}",
            "total s": f"{frame[name].sum():.1f}",
            "mean ms": f"{np.average(each, weights=counts):.2f}",
            "min ms": f"{each.min():.2f}",
            "p50 ms": f"{np.percentile(each, 50):.2f}",
            "p95 ms": f"{np.percentile(each, 95):.2f}",
            "max ms": f"{each.max():.2f}",
            "share": f"{frame[name].sum() / whole if whole else 0:.1%}",
        }
    return pd.DataFrame.from_dict(columns, orient="index")


def supply(rows: Sequence[Mapping[str, Any]]) -> str:
    """How the loader's workers kept up, in a line, from rows of metrics.jsonl; "" where there were none."""
    batches = [row["loader"] for row in rows if row.get("loader")]
    if not batches:
        return ""
    ready = [batch["ready"] for batch in batches if "ready" in batch]
    behind = f"; {statistics.median(ready):.0f} (least {min(ready):.0f}) lay ready behind it" if ready else ""
    prepare = statistics.median(batch["prepare"] for batch in batches)
    return f"loader: a worker made a batch in {prepare * 1000:.2f} ms (median){behind}"
