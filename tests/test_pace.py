"""The pace of a run: a trial that a busy moment does not fool, words about slow updates, an end moved exactly."""

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_run import TINY
from test_trainer import build, equal, killed, settings, weights

from matrixlib.config import OptimConfig
from matrixlib.engine import metrics, pace
from matrixlib.engine.pace import Pace, Plan, fit, trial
from matrixlib.engine.schedule import Schedule
from matrixlib.hardware.load import Usage
from matrixlib.hardware.runtime import Runtime
from matrixlib.runs import run as runs

LOOK = Pace.look
RUNTIME = Runtime("cpu", "fp32", False, False, False, False, 2, 0, 2, 64, ())
BUSY = Usage(30.0, 2, 1.0, 1.0, 0.0, 0.0, 0, 3.0)


class Watch:
    """A clock that is set forward by hand, and a run whose updates it times."""

    def __init__(self, plan: Plan, steps: int, config: OptimConfig | None = None) -> None:
        self.now, self.step = 100.0, 0
        self.pace = Pace(plan, Schedule.of(config or OptimConfig(), steps), RUNTIME, lambda: self.now)

    def train(self, updates: int, seconds: float, besides: float = 0.0) -> list[str]:
        """So many updates, fewer where the run ends before; messages."""
        messages: list[str] = []
        for _ in range(updates):
            if self.step >= self.pace.steps:
                break
            self.now += seconds + besides
            self.step += 1
            messages += self.pace.look(self.step, seconds)
        return messages


@pytest.fixture(autouse=True)
def _busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Usage, "since", lambda *_, **__: BUSY)


# Schedule


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@given(bends=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 200)), max_size=3))
def test_a_bent_schedule_makes_no_jump_and_ends_where_it_was_to(kind: str, bends: list[tuple[int, int]]) -> None:
    config = OptimConfig(warmup_steps=20, schedule=kind)  # type: ignore[arg-type]
    plain = Schedule.of(config, 100)
    schedule, update = plain, 0
    for after, length in bends:
        update += after
        if update >= schedule.end - 1:
            break
        bent = schedule.bend(update, update + length)
        assert bent(update) == pytest.approx(schedule(update)) or length == 1
        assert [bent(i) for i in range(update)] == [schedule(i) for i in range(update)]
        schedule = bent
    assert schedule(schedule.end - 1) == plain(99)
    places = [schedule.place(i) for i in range(schedule.end)]
    assert all(low < high for low, high in pairwise(places))
    assert places[-1] == 99


def test_a_schedule_that_was_not_bent_is_the_same_bits() -> None:
    schedule = Schedule.of(OptimConfig(warmup_steps=20), 100)
    assert [schedule.place(i) for i in range(120)] == list(range(120))


def test_a_bend_after_a_rollback_to_before_an_earlier_one_makes_no_jump() -> None:
    first = Schedule.of(OptimConfig(warmup_steps=20), 100).bend(60, 80)
    again = first.bend(40, 70)
    rates = [again(i) for i in range(70)]
    assert rates[:41] == [first(i) for i in range(41)]
    assert max(abs(high - low) for low, high in pairwise(rates[40:])) < 0.05 * first.peak
    assert rates[-1] == first(79)


# Trial


def timed(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> tuple[float, int, list[float]]:
    """What a trial says where update i takes seconds(i); updates made, pauses."""
    now, made, pauses = 0.0, 0, list[float]()

    def update(i: int) -> None:
        nonlocal now, made
        assert i == made
        now += seconds(i)
        made += 1

    def took(work: Callable[[], object]) -> float:
        before = now
        work()
        return now - before

    monkeypatch.setattr(pace, "seconds_of", took)
    monkeypatch.setattr(pace, "time", SimpleNamespace(sleep=pauses.append))
    return trial(update), made, pauses


@pytest.mark.parametrize(("seconds", "minutes", "steps"), [(0.5, 2.0, 218), (60.0, 0.05, pace.SHORTEST)])
def test_steps_fit_the_minutes_and_a_slow_machine_makes_a_short_run(
    monkeypatch: pytest.MonkeyPatch, seconds: float, minutes: float, steps: int
) -> None:
    update, made, _ = timed(monkeypatch, lambda i: seconds)
    assert fit(minutes, update) == steps
    assert made <= pace.WARM_UPDATES + 15
    assert made == pace.WARM_UPDATES + 1 or seconds < 1, "one update of a minute is enough"


@pytest.mark.parametrize(("spread", "most"), [(0.0, 64), (0.01, 64), (0.3, 304)])
def test_steady_updates_are_timed_briefly_and_unsteady_ones_longer(
    monkeypatch: pytest.MonkeyPatch, spread: float, most: int
) -> None:
    rng = np.random.default_rng(0)
    update, made, pauses = timed(monkeypatch, lambda i: 0.01 * math.exp(spread * rng.standard_normal()))
    assert update == pytest.approx(0.01, rel=max(spread / 3, 0.01))
    assert made <= most
    assert not pauses


def test_a_busy_moment_does_not_fool_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two seconds are five times as slow: more pieces are timed, with pauses, until most are quiet."""
    update, _, pauses = timed(monkeypatch, lambda i: 0.1 if i < 25 else 0.02)
    assert update == pytest.approx(0.02)
    assert pauses


# Slow updates


def test_slow_updates_are_told_after_half_a_minute_with_cause_and_time_left() -> None:
    run = Watch(Plan(update=0.2), 2000)
    assert run.train(100, 0.21) == []
    assert run.train(40, 0.6) == []  # 24 seconds
    (text,) = run.train(300, 0.6)
    assert text.startswith(
        "updates take 600 ms in place of 200 ms: other processes use 1.0 of 2 processors (load 3.0, "
    )
    assert "this process had 50% of the time of its 2 threads); " in text
    assert text.endswith(" left")
    assert run.pace.slow.startswith("updates take 600 ms in place of 200 ms")
    (text,) = run.train(100, 0.2)
    assert text.startswith("updates take 200 ms again; ")
    assert run.pace.slow == ""


def test_a_slow_moment_is_not_told() -> None:
    run = Watch(Plan(update=0.2), 2000)
    for _ in range(4):
        assert run.train(30, 0.6) == []
        assert run.train(60, 0.2) == []


def test_without_a_trial_the_first_updates_are_the_plan() -> None:
    run = Watch(Plan(), 5000)
    assert run.train(200, 0.1) == []
    (text,) = run.train(200, 0.5)
    assert "updates take 500 ms in place of 100 ms" in text


# The end


def test_the_number_of_updates_is_looked_at_again_once() -> None:
    """The trial fell into a busy moment: 1,000 updates of 0.5 s. They take 0.2 s, so more fit into the time."""
    plan = Plan(update=0.5, seconds=550, refit=True)
    run = Watch(plan, 1000, OptimConfig(warmup_steps=50))
    assert run.train(99, 0.2) == []
    (text,) = run.train(1, 0.2)
    assert text.startswith("the run ends after 2,509 updates in place of 1,000: updates take ")
    assert run.train(400, 0.3) == [], "and no second time"
    assert run.pace.steps == 2509


@pytest.mark.parametrize("plan", [Plan(update=0.2, seconds=220, refit=True), Plan(update=0.4, seconds=220)])
def test_a_number_of_updates_that_fits_or_was_asked_for_stays(plan: Plan) -> None:
    run = Watch(plan, 1000)
    assert run.train(1000, 0.2) == []
    assert run.pace.steps == 1000


@given(slow=st.floats(0.25, 3.0), at=st.integers(1, 2500))
def test_a_promise_is_kept(slow: float, at: int) -> None:
    """Ten minutes stay ten minutes, whenever updates become slower, and the learning rate comes to its end."""
    run = Watch(Plan(update=0.2, seconds=600, promise=True), 2700, OptimConfig(warmup_steps=300))
    run.train(at, 0.2)
    run.train(10_000, slow, besides=0.01)
    assert run.step == run.pace.steps
    assert run.now - 100.0 <= 600 * (1 + pace.LATE) + pace.PIECE + 4 * slow
    assert run.pace.schedule(run.step - 1) == pytest.approx(0.003 * 0.05)


def test_a_busy_moment_does_not_cut_a_run_that_is_to_be_on_time() -> None:
    run = Watch(Plan(update=0.2, seconds=600, promise=True), 2700)
    run.train(600, 0.2)
    assert run.train(10, 1.0) + run.train(10_000, 0.2) == []
    assert run.step == 2700


def test_a_run_that_is_to_be_on_time_takes_its_updates_back_once_they_are_fast_again() -> None:
    """Two slow minutes cost the updates that do not fit into them, and those alone."""
    run = Watch(Plan(update=0.2, seconds=600, promise=True), 2700, OptimConfig(warmup_steps=300))
    run.train(600, 0.2)
    assert any("in place of 2,700" in text for text in run.train(120, 1.0))
    assert run.pace.steps < 1500
    rates = [run.pace.schedule(i) for i in range(run.step)]
    run.train(10_000, 0.2)
    assert 2300 < run.step == run.pace.steps
    assert [run.pace.schedule(i) for i in range(len(rates))] == rates
    assert 540 < run.now - 100.0 <= 600 * (1 + pace.LATE)
    assert run.pace.schedule(run.step - 1) == pytest.approx(0.003 * 0.05)


def test_a_promise_leaves_a_run_that_is_on_time_alone() -> None:
    run = Watch(Plan(update=0.2, seconds=600, promise=True), 2700)
    assert run.train(2700, 0.2, besides=0.01) == []
    assert run.pace.steps == 2700


def test_the_state_goes_on_exactly_and_other_steps_forget_the_bends() -> None:
    plan = Plan(update=0.2, seconds=300, promise=True)
    run = Watch(plan, 2000)
    run.train(600, 0.3)
    assert run.pace.schedule.bends
    state = json.loads(json.dumps(run.pace.to_dict()))
    again, other = Watch(plan, 2000), Watch(plan, 3000)
    for resumed in (again, other):
        resumed.pace.restore(state)
        resumed.step = run.step
    assert again.pace.schedule == run.pace.schedule
    assert again.pace.to_dict() == run.pace.to_dict()
    assert other.pace.steps == 3000
    assert again.train(10_000, 0.3) == run.train(10_000, 0.3)


def test_time_between_two_processes_does_not_count() -> None:
    run = Watch(Plan(update=0.2, seconds=600, promise=True), 2700)
    run.train(100, 0.2)
    run.now += 5000
    run.pace.start()
    assert run.train(200, 0.2) == []
    assert run.pace.to_dict()["elapsed"] == pytest.approx(60)


def test_a_run_whose_end_was_moved_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the move, which a checkpoint of its own keeps: nothing has to be decided anew, by another clock."""
    for end in (8, 20):
        monkeypatch.setattr(Pace, "look", moves_to(end))
        whole = build(tmp_path / f"whole_{end}")
        rates = [stats.learning_rate for stats in whole.train()]
        config = settings().optim
        assert len(rates) == end
        assert rates[-1] == pytest.approx(config.learning_rate * config.final_fraction)
        assert metrics.read(whole.metrics.path)[-1]["validation"]["kind"] == "full", "as at every end"
        trainer = build(tmp_path / f"killed_{end}")
        updates = trainer.train()
        next(stats for stats in updates if stats.step == 4)
        folder = killed(trainer, updates, tmp_path / f"copy_{end}")
        monkeypatch.setattr(Pace, "look", lambda *_: [])
        resumed = build(folder)
        assert (resumed.resume(), resumed.steps) == (4, end)
        assert [stats.steps for stats in resumed.train()] == [end] * (end - 4)
        assert equal(weights(resumed), weights(whole))


@pytest.mark.usefixtures("drawn")
def test_a_run_that_ended_on_time_is_complete_unless_more_is_asked_for(
    reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its report says that its updates were slow."""
    monkeypatch.setattr(Pace, "look", moves_to(8))
    for name, value in {"PIECE": 0.0, "PIECE_UPDATES": 1, "LASTING": 0.0}.items():
        monkeypatch.setattr(pace, name, value)
    current = runs.open_run(run="short", overrides=TINY)
    current.update_seconds = 1e-6
    with pytest.warns(UserWarning, match="updates take .* in place of 1.0 µs: other processes use 1.0 of 2 processors"):
        assert [stats.step for stats in current.train()] == list(range(1, 9))
    report = (current.folder / "report.html").read_text(encoding="utf-8")
    assert "in place of 1.0 µs: other processes use 1.0 of 2 processors" in report
    assert "the run ends after 8 updates in place of 12" in report
    assert (current.steps, current.summary()["steps"], current.summary()["planned_steps"]) == (8, 8, 12)
    for steps, complete in ((0, True), (20, False)):
        again = runs.open_run(run="short", steps=steps, overrides=TINY)
        assert again.complete is complete
        again.close()
    assert again.trainer.steps == 20


def moves_to(end: int) -> Callable[[Pace, int, float], list[str]]:
    """A `Pace.look` that also moves the end of the run after update 4."""

    def look(self: Pace, step: int, seconds: float) -> list[str]:
        move = step == 4 and not self.schedule.bends
        return [*LOOK(self, step, seconds), *([self._bend(step, end, "so that it does")] if move else [])]

    return look
