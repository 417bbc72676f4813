"""Curricula: the specification's table, boundaries, thresholds with hysteresis, state, any dimensions."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from matrixlib.engine.curriculum import Curriculum, CurriculumConfig, Dimension, Phase, StagesConfig, phases
from matrixlib.tasks import load_config as load

SIZE = Dimension("size", ((3, 5), (3, 8), (3, 12), (3, 16)), (0.25, 0.25, 0.25, 0.25))
MODE = Dimension("mode", (("a",), ("a", "b"), ("a", "b", "c")), (0.5, 0.3, 0.2))
FILL = Dimension("fill", ((0.5, 0.7), (0.3, 0.5), (0.1, 0.3), (0.0, 0.1)), (0.25, 0.25, 0.25, 0.25))
ALL = (SIZE, MODE, FILL)


def first_update(phase: Phase, steps: int) -> int:
    return math.ceil(phase.start * steps)


def config(**changes: Any) -> CurriculumConfig:
    base = {"kind": "fractions", "metric": "term/valid", "up": 0.8, "patience": 2, "down": 0.4, "dwell": 2}
    return CurriculumConfig.model_validate({**base, "longest": 0, **changes})


def adaptive(values: list[float], **changes: Any) -> tuple[Curriculum, list[int]]:
    """The phase in force after each validation."""
    curriculum = Curriculum(config(kind="adaptive", **changes), [SIZE])
    found = []
    for update, value in enumerate(values):
        curriculum.record({"term/valid": value})
        curriculum.advance(update + 1, 100)
        found.append(curriculum.phase)
    return curriculum, found


def test_the_specifications_table_of_60_epochs() -> None:
    """size and fill change at 15, 30, 45; mode at 30 and 48, where the code of the model for it has it."""
    curriculum = Curriculum(config(), ALL)
    for epoch in range(60):
        curriculum.advance(epoch, 60)
        quarter = epoch // 15
        third = 0 if epoch < 30 else 1 if epoch < 48 else 2
        expected = {"size": SIZE.stages[quarter], "mode": MODE.stages[third], "fill": FILL.stages[quarter]}
        assert curriculum.values == expected, epoch
    assert curriculum.history == [(0, 0), (15, 1), (30, 2), (45, 3), (48, 4)]
    assert [first_update(phase, 60) for phase in curriculum.phases] == [0, 15, 30, 45, 48]


def test_the_preset_for_a_gpu_has_that_table() -> None:
    given: Any = load("latin_full").curriculum  # type: ignore[attr-defined]
    dimensions = [Dimension.of(n, getattr(given, n)) for n in ("size", "mode", "fill")]
    assert [(d.stages, d.fractions) for d in dimensions if d.name != "mode"] == [
        (SIZE.stages, SIZE.fractions),
        (FILL.stages, FILL.fractions),
    ]
    assert [first_update(phase, 60) for phase in phases(dimensions)] == [0, 15, 30, 45, 48]


def test_a_dimension_that_is_switched_off_is_at_its_hardest() -> None:
    class Stages(StagesConfig):
        stages: tuple[int, ...]

    section = Stages(enabled=False, fractions=(0.5, 0.5), stages=(1, 2))
    off = Dimension.of("size", section)
    assert [phase.values for phase in phases([off])] == [{"size": 2}]
    on = Dimension.of("size", section.model_copy(update={"enabled": True}))
    assert [phase.values for phase in phases([on])] == [{"size": 1}, {"size": 2}]


def test_shares_are_decimal_and_not_binary() -> None:
    tenths = Dimension("x", tuple(range(10)), (0.1,) * 10)
    assert sum([0.1] * 8) != 0.8  # the trap
    assert [first_update(phase, 10) for phase in phases([tenths])] == list(range(10))
    assert len(phases([tenths, MODE])) == 10


def test_no_dimension_is_one_phase() -> None:
    curriculum = Curriculum(config(), [])
    assert not any(curriculum.advance(update, 10) for update in range(20))
    assert curriculum.values == {}
    assert curriculum.spans(20) == [(0, 20, curriculum.phases[0])]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 500), st.integers(1, 500))
def test_shares_are_a_function_of_the_update_alone(steps: int, start: int) -> None:
    """A run that goes on in the middle is in the phase that one from the beginning would be in."""
    whole, late = Curriculum(config(), ALL), Curriculum(config(), ALL)
    for update in range(start + 1):
        whole.advance(update, steps)
    late.advance(start, steps)
    assert late.phase == whole.phase
    assert whole.history == sorted(whole.history)


def test_short_runs_may_leave_phases_out() -> None:
    curriculum = Curriculum(config(), ALL)
    seen = [curriculum.phase for update in range(2) if curriculum.advance(update, 2) or True]
    assert seen == [0, 2]
    assert curriculum.history == [(0, 0), (1, 2)]


def test_spans_cover_every_update_once() -> None:
    curriculum = Curriculum(config(), ALL)
    for update in range(60):
        curriculum.advance(update, 60)
    spans = curriculum.spans(60)
    assert [(start, stop) for start, stop, _ in spans] == [(0, 15), (15, 30), (30, 45), (45, 48), (48, 60)]
    assert str(spans[1][2]) == "size 3-8, mode a, fill 0.3-0.5"
    assert str(spans[3][2]) == "size 3-16, mode a+b, fill 0.0-0.1"


def test_a_stage_of_weights_reads_as_shares() -> None:
    mix = Dimension("sources", ({"puzzles": 1.0, "games": 3.0}, {}), (0.5, 0.5))
    assert [str(phase) for phase in phases([mix])] == ["sources puzzles 25%, games 75%", "sources all"]


def test_thresholds_need_patience_and_dwell() -> None:
    assert adaptive([0.9, 0.9, 0.9, 0.9])[1] == [0, 1, 1, 2]
    assert adaptive([0.9, 0.7, 0.9, 0.9])[1] == [0, 0, 0, 1]  # in a row
    assert adaptive([0.9] * 4, dwell=4)[1] == [0, 0, 0, 1]
    assert adaptive([0.9] * 20)[1][-1] == 3  # the last phase does not end
    assert adaptive([0.1] * 20)[1] == [0] * 20  # nothing lies below the first
    assert adaptive([math.nan] * 5)[1] == [0] * 5


def test_a_loss_is_better_when_it_is_less() -> None:
    curriculum = Curriculum(config(kind="adaptive", metric="term", up=1.0, down=2.0), [SIZE])
    phases = []
    for update, loss in enumerate([3.0, 0.9, 1.0, 1.5, 2.1, 2.2, 0.5]):
        curriculum.record({"loss": 0.0, "term": loss, "term/valid": 0.0})
        curriculum.advance(update + 1, 100)
        phases.append(curriculum.phase)
    assert phases == [0, 0, 1, 1, 1, 0, 0]
    with pytest.raises(ValueError, match="down 1 must be above up 2: 'loss' is a loss"):
        config(metric="loss", up=2.0, down=1.0)


def test_a_phase_change_waits_for_the_next_update() -> None:
    curriculum = Curriculum(config(kind="adaptive", patience=1, dwell=1), [SIZE])
    curriculum.record({"term/valid": 1.0})
    assert (curriculum.phase, curriculum.values) == (0, {"size": (3, 5)})
    assert curriculum.advance(7, 100)
    assert (curriculum.phase, curriculum.history) == (1, [(0, 0), (7, 1)])
    assert not curriculum.advance(8, 100)


def test_too_hard_a_phase_falls_back_and_never_flaps() -> None:
    good, bad = [0.9] * 2, [0.1] * 2
    curriculum, found = adaptive([*good, *bad, *good, *good, *bad, *([0.9] * 8)])
    assert found[:8] == [0, 1, 1, 0, 0, 0, 0, 1]  # after one fall it takes 4 good ones
    assert found[8:10] == [1, 0]
    assert found[10:] == [0] * 7 + [1]  # after two, 8
    assert len(curriculum.history) == 6
    easy_then_hard = Curriculum(config(kind="adaptive"), [SIZE])
    for update in range(2000):  # a phase that is always too hard is tried ever more rarely
        easy_then_hard.record({"term/valid": 0.1 if easy_then_hard.phase else 0.9})
        easy_then_hard.advance(update + 1, 2000)
    assert len(easy_then_hard.history) < 25
    _, between = adaptive([*good, *([0.6] * 50)])
    assert between == [0] + [1] * 51  # between the thresholds nothing happens


def test_a_phase_may_have_a_longest_stay() -> None:
    assert adaptive([0.5] * 8, longest=3)[1] == [0, 0, 1, 1, 1, 2, 2, 2]


def test_an_unknown_metric_names_the_known() -> None:
    curriculum = Curriculum(config(kind="adaptive"), [SIZE])
    with pytest.raises(ValueError, match="'term/valid' is not measured; there are cell/accuracy"):
        curriculum.record({"cell/accuracy": 1.0})
    Curriculum(config(), [SIZE]).record({})  # by shares: no metric is needed


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.floats(0, 1), max_size=40), st.integers(0, 40))
def test_state_goes_on_where_it_was(values: list[float], cut: int) -> None:
    settings_ = config(kind="adaptive")
    whole = resumed = Curriculum(settings_, ALL)
    for update, value in enumerate(values):
        if update == cut:
            state = json.loads(json.dumps(whole.to_dict()))
            resumed = Curriculum.from_dict(settings_, ALL, state)
            assert resumed is not whole
            assert resumed.to_dict() == whole.to_dict()
        for one in {id(whole): whole, id(resumed): resumed}.values():
            one.record({"term/valid": value})
            one.advance(update + 1, 100)
    assert resumed.to_dict() == whole.to_dict()


def test_the_state_does_not_grow_without_changes() -> None:
    """A history of states that hold the epoch grows with every epoch."""
    curriculum = Curriculum(config(), ALL)
    for update in range(60_000):
        curriculum.advance(update, 60_000)
    assert len(curriculum.history) == 5


def test_a_state_of_other_phases_is_refused() -> None:
    state = Curriculum(config(), [SIZE]).to_dict()
    with pytest.raises(ValueError, match="the curriculum had the phases size 3-5; size 3-8"):
        Curriculum.from_dict(config(), [SIZE, MODE], state)
