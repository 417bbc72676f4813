"""Where training time goes: seconds by phase of an update, and a warning when the loader is too slow."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matrixlib.engine.stats import Stats
from matrixlib.hardware import backend

if TYPE_CHECKING:
    import pandas as pd
    import torch

PHASES = ("wait", "copy", "teacher", "forward", "backward", "read", "optimiser", "validation", "strength", "checkpoint")
"""wait: for the loader. copy: host to device. teacher: its forward pass. read: the one host read of an update, which
waits for the device."""
ON_DEVICE = ("copy", "teacher", "forward", "backward", "optimiser")
BETWEEN = ("validation", "strength", "checkpoint")  # between updates, not part of their seconds
TRACED, RATE_UPDATES = 3, 20  # updates in a trace, and for the throughput
STARVED_UPDATES, FIRST_UPDATES = 100, 20  # for the wait for data, without the first (workers start)


class Throughput:
    """Rows/s over recent updates, data wait included; warns when the wait takes more than the share `most`."""

    def __init__(self, workers: int, prefetch: int, most: float = 0.2) -> None:
        self._workers, self._prefetch, self._most, self._count = workers, prefetch, most, 0
        self._updates: deque[tuple[int, float, float]] = deque(maxlen=STARVED_UPDATES)

    def add(self, rows: int, seconds: float, waited: float) -> tuple[float, str]:
        """Record an update that took `seconds`, `waited` of them for its batch; (rows/s, a warning or "")."""
        self._updates.append((rows, seconds, waited))
        self._count += 1
        latest = list(self._updates)[-RATE_UPDATES:]
        total = sum(seconds for _, seconds, _ in latest)
        rate = sum(rows for rows, _, _ in latest) / total if total else 0.0
        late = sum(waited for _, _, waited in self._updates) / (sum(seconds for _, seconds, _ in self._updates) or 1.0)
        if self._count < FIRST_UPDATES + STARVED_UPDATES or late <= self._most:
            return rate, ""
        remedy = f"raise data.workers (now {self._workers}) or data.prefetch (now {self._prefetch})"
        return rate, f"waiting for data took {late:.0%} of the last {STARVED_UPDATES} updates; {remedy}"


class Clock:
    """Seconds by phase: on a GPU by events, possibly one update late; elsewhere by the host clock."""

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._seconds: dict[str, float] = {}
        self._events: deque[tuple[str, Any, Any]] = deque()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the context; not counted if it fails."""
        start = backend.timing_event(self._device) if name in ON_DEVICE else None
        if start is None:
            began = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - began)
            return
        start.record()
        yield
        stop = backend.timing_event(self._device)
        stop.record()
        self._events.append((name, start, stop))

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        while self._events and self._events[0][2].query():
            name, start, stop = self._events.popleft()
            self._add(name, start.elapsed_time(stop) / 1000)
        seconds, self._seconds = self._seconds, {}
        return {name: round(seconds[name], 6) for name in PHASES if name in seconds}

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds


def traced(updates: Iterator[Stats], after: int, path: Path) -> Iterator[Stats]:
    """The same updates; the `TRACED` after update `after` (0 = none) are recorded as a Chrome trace."""
    with contextlib.ExitStack() as stack:
        recording = False
        for stats in updates:
            yield stats
            if after and stats.step == after:
                import torch  # not at the top: whoever reads times does not need it

                write = partial(torch.profiler.profile.export_chrome_trace, path=str(path))
                stack.enter_context(torch.profiler.profile(on_trace_ready=write))
                recording = True
            elif recording and stats.step >= after + TRACED:
                stack.close()
                recording = False


def phase_seconds(rows: Sequence[Mapping[str, Any]]) -> "pd.DataFrame":
    """Seconds of each phase by row of metrics.jsonl, NaN where absent; `other` is the rest of the update. Checkpoints
    appear in the next row. Where a GPU works while the host is elsewhere, `read` waits for phases counted by
    themselves; any excess is removed proportionally."""
    import pandas as pd

    frame = pd.DataFrame([row.get("times", {}) for row in rows], [row["step"] for row in rows], dtype=float)
    whole = pd.Series([row["seconds"] * row.get("updates", 1) for row in rows], frame.index)
    inside = frame.drop(columns=list(BETWEEN), errors="ignore")
    if "read" in inside:
        counted = inside.reindex(columns=list(ON_DEVICE)).sum(axis=1)
        too_long = inside.sum(axis=1) > whole
        inside["read"] = inside["read"].mask(too_long, (inside["read"] - counted).clip(lower=0))
    inside = inside.mul((whole / inside.sum(axis=1)).clip(upper=1).fillna(1), axis=0)
    frame[inside.columns] = inside
    frame["other"] = (whole - inside.sum(axis=1)).clip(lower=0)
    return frame[[name for name in (*PHASES, "other") if name in frame]]
