"""The pace of a run: is it as planned, what slows it down, and where it ends if it is to be on time."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from matrixlib.engine.distributed import Ranks
from matrixlib.engine.schedule import Schedule
from matrixlib.hardware.load import Clocks, Usage
from matrixlib.hardware.runtime import Runtime
from matrixlib.hardware.speed import seconds_of
from matrixlib.progress import duration

WARM_UPDATES, LEAST_UPDATES, MOST_UPDATES, TRIAL_SECONDS = 4, 20, 100, 6.0
"""Updates before a run that are not timed, bounds of those of a piece that are, and seconds of pieces that agree."""
PIECES, MOST_PIECES, AGREE, PAUSE = 3, 7, 1.2, 1.0
"""Pieces of a trial; at most so many, with seconds between them, where the medians differ by more than this factor."""
PRECISE = 0.02
"""A piece ends when its median is known to this share of it."""
SHORTEST = 20
"""Updates of a run, where they are slow."""
BESIDES = 1.1
"""A run's update in timed ones: moving average, metrics, validation, checkpoints."""
SLOW, WELL = 2.0, 1.5
"""Times the planned time of an update from which it is slow, and up to which it is as planned again."""
LASTING = 30.0
"""Seconds of slow updates before anything is said, or the end of the run is moved."""
PIECE, PIECE_UPDATES = 5.0, 3
"""Seconds, and updates, of the pieces whose medians are looked at."""
AGAIN = 600.0
"""Seconds between two messages of one slow stretch."""
EARLY, OFF = 0.1, 0.1
"""Share of the updates after which their number is looked at again, and by how much it must be wrong to be changed."""
LATE = 0.02
"""Share of the time by which a run may be late before a promise bends its schedule."""
PART = 0.25
"""Share of the time left that may pass before a promise answers to another pace, where `LASTING` is longer."""


def trial(update: Callable[[int], object]) -> float:
    """Median seconds of an update. update(i): makes update i of a throwaway step.

    It is the median of several pieces, and of more with pauses between them where they differ: a moment in which the
    machine is busy with something else is a piece or two, not the result.
    """
    for i in range(WARM_UPDATES):  # kernels are compiled and memory is claimed
        update(i)
    medians: list[float] = []
    count, spent = WARM_UPDATES, 0.0
    while len(medians) < MOST_PIECES:
        times: list[float] = []
        while len(times) < MOST_UPDATES and sum(times) <= TRIAL_SECONDS / PIECES and not _settled(times):
            times.append(seconds_of(partial(update, count)))
            count += 1
        medians.append(statistics.median(times))
        spent += sum(times)
        differ = max(medians) > AGREE * min(medians)
        if (len(medians) >= PIECES and not differ) or spent > (2 if differ else 1) * TRIAL_SECONDS:
            break
        if differ:
            time.sleep(PAUSE)
    return statistics.median(medians)


def fit(minutes: float, update: float) -> int:
    """Updates that fit, when one by itself takes `update` seconds."""
    return max(SHORTEST, int(minutes * 60 / (BESIDES * update)))


def _settled(times: Sequence[float]) -> bool:
    """Whether the median is known well enough: the 95 % interval of order statistics, n / 2 -+ sqrt(n)."""
    count = len(times)
    if count < LEAST_UPDATES:
        return False
    ordered, half = sorted(times), math.ceil(math.sqrt(count))
    low, high = ordered[count // 2 - half], ordered[count // 2 + half]
    return high - low <= 2 * PRECISE * ordered[count // 2]


def _latest(pieces: list[tuple[float, float]], since: float) -> list[tuple[float, float]]:
    """Those of the pieces, in order of their beginnings, of which a part lies after `since`."""
    return [piece for i, piece in enumerate(pieces) if i + 1 == len(pieces) or pieces[i + 1][0] > since]


@dataclass(frozen=True)
class Plan:
    """What a run is to take. update: seconds of an update that a trial gave; None: what the first ones take. seconds:
    of the whole training. refit: the number of updates came from the trial, so it is looked at once more. promise: the
    schedule is ended early where it would take longer than `seconds`."""

    update: float | None = None
    seconds: float = float("inf")
    refit: bool = False
    promise: bool = False


class Pace:
    """Watches the updates of a run; moves the end of its schedule where the plan says so.

    Attributes: schedule (as bent so far), slow (what is to be said of the pace at present, "" while it is as planned).
    The time that counts is that of training, validation and saving, not that between two processes of a run.
    """

    def __init__(
        self, plan: Plan, schedule: Schedule, runtime: Runtime, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Nothing has been trained yet."""
        self.plan, self.schedule, self.slow = plan, schedule, ""
        self._threads, self._clock = runtime.cpu_threads, clock
        self._planned = plan.update
        self._refit = plan.refit
        self._elapsed = self._before = 0.0  # seconds of the run; those of other processes
        self._last = clock()
        self._updates = 0.0  # seconds of the updates of this process
        self._recent = deque[float](maxlen=LEAST_UPDATES * 25)
        self._piece: list[float] = []
        self._piece_began = self._last
        self._pieces: list[tuple[float, float]] = []  # when each piece of the last `LASTING` began, and its median
        self._since: tuple[float, Clocks] | None = None  # when the updates became slow, and the clocks soon after
        self._said = -AGAIN
        self._bent = -LASTING

    @property
    def steps(self) -> int:
        """Updates of the whole run."""
        return self.schedule.end

    def start(self) -> None:
        """Time that counts begins now: nothing was trained since the last update."""
        self._last = self._piece_began = self._clock()
        self._piece, self._pieces, self._since = [], [], None

    def look(self, step: int, seconds: float) -> list[str]:
        """Take in the update that made `step`, which took `seconds`; messages. May move the end of the schedule."""
        now = self._clock()
        self._elapsed += now - self._last
        self._last = now
        self._updates += seconds
        self._recent.append(seconds)
        self._piece.append(seconds)
        messages = self._fit_again(step)
        if now - self._piece_began < PIECE or len(self._piece) < PIECE_UPDATES:
            return messages
        median, began = statistics.median(self._piece), self._piece_began
        self._piece, self._piece_began = [], now
        self._pieces = _latest([*self._pieces, (began, median)], now - LASTING)
        if self._planned is None and len(self._recent) >= WARM_UPDATES + LEAST_UPDATES:
            self._planned = statistics.median(list(self._recent)[WARM_UPDATES:])
        messages += self._keep_promise(step, now)
        return messages + self._compare(step, median, began, now)

    def agree(self, ranks: Ranks, seconds: float) -> float:
        """Take over where rank 0 has moved the end; its seconds of the last update."""
        seconds, bends = ranks.same((seconds, self.schedule.bends))
        self.schedule = replace(self.schedule, bends=tuple((update, end) for update, end in bends))
        return seconds

    def to_dict(self) -> dict[str, Any]:
        """State for the checkpoint."""
        return {
            "steps": self.schedule.steps,
            "bends": [list(bend) for bend in self.schedule.bends],
            "elapsed": self._elapsed,
            "planned": self._planned,
            "refit": self._refit,
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Go on from `to_dict`; the bends count only for the number of updates that they were bends of."""
        self._elapsed = data["elapsed"]
        self._before = self._elapsed
        self._planned = self.plan.update or data["planned"]
        if data["steps"] == self.schedule.steps:
            bends = tuple((update, end) for update, end in data["bends"])
            self.schedule = replace(self.schedule, bends=bends)
            self._refit = self.plan.refit and data["refit"]

    def _whole(self, update: float) -> float:
        """Seconds of an update with all that hangs on it, of one that takes `update` by itself."""
        spent = self._elapsed - self._before
        return update * max(1.0, spent / self._updates if self._updates else BESIDES)

    def _fit_again(self, step: int) -> list[str]:
        """Once, when the run knows its updates: as many as fit, where that is another number than the trial gave."""
        early = max(self.schedule.warmup, int(EARLY * self.steps))
        if not self._refit or step < early or len(self._recent) < LEAST_UPDATES or step >= self.steps - 1:
            return []
        self._refit = False
        each = BESIDES * statistics.median(self._recent)
        end = step + max(LEAST_UPDATES, int((self.plan.seconds - self._elapsed) / each))
        if abs(end - self.steps) <= OFF * self.steps:
            return []
        return [self._bend(step, end, f"updates take {duration(each)}, which the trial before the run did not see")]

    def _keep_promise(self, step: int, now: float) -> list[str]:
        """Move the end of the schedule to where the time is over, if it would come later; and back towards where it
        was, if updates are fast again. A busy moment moves nothing."""
        left = self.plan.seconds - self._elapsed
        rest = min(left, self._left(step, self._pieces[-1][1]))
        lasting = min(LASTING, max(PIECE, PART * rest))
        pieces = _latest(self._pieces, now - lasting)
        if not self.plan.promise or now - max(self._bent, pieces[0][0]) < lasting or step >= self.steps - 1:
            return []
        each = self._whole(statistics.median(median for _, median in pieces))
        late = (self.steps - step) * each - left
        if -max(LATE * self.plan.seconds, OFF * left) <= late <= LATE * self.plan.seconds:
            return []
        most = max([self.schedule.steps, *(end for _, end in self.schedule.bends)])
        end = min(most, step + max(1, int(left / each)))
        if end == self.steps:
            return []
        self._bent = now
        return [self._bend(step, end, f"updates take {duration(each)}, and train.minutes is kept")]

    def _bend(self, step: int, end: int, why: str) -> str:
        before = self.steps
        self.schedule = self.schedule.bend(step, end)
        return f"the run ends after {end:,} updates in place of {before:,}: {why}; the learning rate decays until then"

    def _compare(self, step: int, median: float, began: float, now: float) -> list[str]:
        """Whether updates are slow, and for how long."""
        if self._planned is None:
            return []
        if median < SLOW * self._planned and (not self.slow or median <= WELL * self._planned):
            self._since = None
            if not self.slow:
                return []
            self.slow, self._said = "", -AGAIN
            return [f"updates take {duration(median)} again; {duration(self._left(step, median))} left"]
        if self._since is None:
            self._since = began, Clocks.now(children=True)
        since, clocks = self._since
        if now - since < LASTING:
            return []
        usage = Usage.since(clocks, children=True)
        self.slow = (
            f"updates take {duration(median)} in place of {duration(self._planned)}: {usage.words(self._threads)}; "
            f"{duration(self._left(step, median))} left"
        )
        if now - self._said < AGAIN:
            return []
        self._said = now
        return [self.slow]

    def _left(self, step: int, update: float) -> float:
        """Seconds to the end of the run."""
        return (self.steps - step) * self._whole(update)
