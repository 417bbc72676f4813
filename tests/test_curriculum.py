"""Curricula: the specification's table, boundaries, thresholds with hysteresis, state, any dimensions."""

import json
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from matrixlib.engine.curriculum import Curriculum, CurriculumConfig, Phase, StagesConfig, phases
from matrixlib.tasks import load_config as load

SIZE = StagesConfig(stages=((3, 5), (3, 8), (3, 12), (3, 16)), fractions=(0.25,) * 4)
MODE = StagesConfig(stages=(("a",), ("a", "b"), ("a", "b", "c")), fractions=(0.5, 0.3, 0.2))
FILL = StagesConfig(stages=((0.5, 0.7), (0.3, 0.5), (0.1, 0.3), (0.0, 0.1)), fractions=(0.25,) * 4)
ALL = {"size": SIZE, "mode": MODE, "fill": FILL}


def first_update(phase: Phase, steps: int) -> int:
    return math.ceil(phase.start * steps)


def config(**changes: Any) -> CurriculumConfig:
    base = {"kind": "fractions", "metric": "term/valid", "up": 0.8, "patience": 2, "down": 0.4, "dwell": 2}
    return CurriculumConfig.model_validate({**base, "longest": 0, **changes})


def adaptive(values: list[float], **changes: Any) -> list[int]:
    """The phase in force after each validation."""
    curriculum = Curriculum(config(kind="adaptive", **changes), {"size": SIZE})
    found = []
    for update, value in enumerate(values):
        curriculum.record({"loss": 0.0, "term": value, "term/valid": value})
        curriculum.advance(update + 1, 100)
        found.append(curriculum.phase)
    return found


def test_the_specifications_table_of_60_epochs() -> None:
    """size and fill change at 15, 30, 45; mode at 30 and 48, where the code of the model for it has it."""
    curriculum = Curriculum(config(), ALL)
    for epoch in range(60):
        curriculum.advance(epoch, 60)
        quarter = epoch // 15
        third = 0 if epoch < 30 else 1 if epoch < 48 else 2
        expected = {"size": SIZE.stages[quarter], "mode": MODE.stages[third], "fill": FILL.stages[quarter]}
        assert curriculum.phases[curriculum.phase].values == expected, epoch
    assert curriculum.history == [(0, 0), (15, 1), (30, 2), (45, 3), (48, 4)]
    spans = curriculum.spans(60)
    assert [(start, stop) for start, stop, _ in spans] == [(0, 15), (15, 30), (30, 45), (45, 48), (48, 60)]
    assert str(spans[1][2]) == "size 3-8, mode a, fill 0.3-0.5"
    assert str(spans[3][2]) == "size 3-16, mode a+b, fill 0.0-0.1"


def test_the_preset_for_a_gpu_has_that_table() -> None:
    given: Any = load("latin_full").curriculum  # type: ignore[attr-defined]
    dimensions = {name: getattr(given, name) for name in ALL}
    for name in ("size", "fill"):
        assert (dimensions[name].stages, dimensions[name].fractions) == (ALL[name].stages, ALL[name].fractions)
    assert [first_update(phase, 60) for phase in phases(dimensions)] == [0, 15, 30, 45, 48]


def test_a_dimension_that_is_switched_off_is_at_its_hardest() -> None:
    section = StagesConfig(enabled=False, fractions=(0.5, 0.5), stages=(1, 2))
    assert [phase.values for phase in phases({"size": section})] == [{"size": 2}]
    on = section.model_copy(update={"enabled": True})
    assert [phase.values for phase in phases({"size": on})] == [{"size": 1}, {"size": 2}]


def test_shares_are_decimal_and_not_binary() -> None:
    tenths = StagesConfig(stages=tuple(range(10)), fractions=(0.1,) * 10)
    assert sum([0.1] * 8) != 0.8  # the trap
    assert [first_update(phase, 10) for phase in phases({"x": tenths})] == list(range(10))
    assert len(phases({"x": tenths, "mode": MODE})) == 10


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 500), st.integers(1, 500))
@example(2, 1)  # a short run leaves phases out
def test_shares_are_a_function_of_the_update_alone(steps: int, start: int) -> None:
    """A run that goes on in the middle is in the phase that one from the beginning would be in."""
    whole, late = Curriculum(config(), ALL), Curriculum(config(), ALL)
    for update in range(start + 1):
        whole.advance(update, steps)
    late.advance(start, steps)
    assert late.phase == whole.phase
    assert whole.history == sorted(whole.history)
    assert len(whole.history) <= 5, "it does not grow without changes"


@pytest.mark.parametrize(
    ("values", "changes", "expected"),
    [
        ([0.9, 0.9, 0.9, 0.9], {}, [0, 1, 1, 2]),
        ([0.9, 0.7, 0.9, 0.9], {}, [0, 0, 0, 1]),  # in a row
        ([0.9] * 4, {"dwell": 4}, [0, 0, 0, 1]),
        ([0.9] * 9, {}, [0, 1, 1, 2, 2, 3, 3, 3, 3]),  # the last phase does not end
        ([0.1] * 9, {}, [0] * 9),  # nothing lies below the first
        ([math.nan] * 5, {}, [0] * 5),
        ([0.5] * 8, {"longest": 3}, [0, 0, 1, 1, 1, 2, 2, 2]),
        ([0.9] * 2 + [0.6] * 50, {}, [0] + [1] * 51),  # between the thresholds nothing happens
        ([3.0, 0.9, 1.0, 1.5, 2.1, 2.2, 0.5], {"metric": "term", "up": 1.0, "down": 2.0}, [0, 0, 1, 1, 1, 0, 0]),
    ],
)
def test_thresholds_need_patience_and_dwell(values: list[float], changes: dict[str, Any], expected: list[int]) -> None:
    assert adaptive(values, **changes) == expected


def test_thresholds_that_would_flap_are_refused() -> None:
    with pytest.raises(ValueError, match="down 1 must be above up 2: 'loss' is a loss"):
        config(metric="loss", up=2.0, down=1.0)


def test_too_hard_a_phase_falls_back_and_never_flaps() -> None:
    good, bad = [0.9] * 2, [0.1] * 2
    found = adaptive([*good, *bad, *good, *good, *bad, *([0.9] * 8)])
    assert found[:8] == [0, 1, 1, 0, 0, 0, 0, 1]  # after one fall it takes 4 good ones
    assert found[8:10] == [1, 0]
    assert found[10:] == [0] * 7 + [1]  # after two, 8
    easy_then_hard = Curriculum(config(kind="adaptive"), {"size": SIZE})
    for update in range(2000):  # a phase that is always too hard is tried ever more rarely
        easy_then_hard.record({"term/valid": 0.1 if easy_then_hard.phase else 0.9})
        easy_then_hard.advance(update + 1, 2000)
    assert len(easy_then_hard.history) < 25


def test_an_unknown_metric_names_the_known() -> None:
    with pytest.raises(ValueError, match="'term/valid' is not measured; there are cell/accuracy"):
        Curriculum(config(kind="adaptive"), {"size": SIZE}).record({"cell/accuracy": 1.0})
    Curriculum(config(), {"size": SIZE}).record({})  # by shares: no metric is needed


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(0, 39))
def test_state_goes_on_where_it_was(values: list[float], cut: int) -> None:
    whole, resumed = (Curriculum(config(kind="adaptive"), ALL) for _ in range(2))
    for update, value in enumerate(values):
        if update == cut % len(values):
            resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        for one in (whole, resumed) if update >= cut % len(values) else (whole,):
            one.record({"term/valid": value})
            one.advance(update + 1, 100)
    assert resumed.state_dict() == whole.state_dict()


def test_a_state_of_other_phases_is_refused() -> None:
    state = Curriculum(config(), {"size": SIZE}).state_dict()
    with pytest.raises(ValueError, match="the curriculum had the phases size 3-5; size 3-8"):
        Curriculum(config(), {"size": SIZE, "mode": MODE}).load_state_dict(state)
