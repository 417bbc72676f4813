"""When the self-supervised terms take part."""

import json

import pytest

from matrixlib.config import GatingConfig
from matrixlib.engine.gating import Gate, LeftOut


def gate(warmup: int = 0, freeze: int = 0, seconds: float = 0.0) -> Gate:
    return Gate(GatingConfig(warmup_steps=warmup, freeze_steps=freeze, seconds=seconds))


def test_the_warm_up_rises_and_never_starts_at_zero() -> None:
    assert [gate(warmup=4).factor(u) for u in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert gate().factor(0) == 1


def test_frozen_for_some_updates_and_back_at_full_weight() -> None:
    found = gate(freeze=3)
    assert found.freeze(10)
    assert [found.factor(u) for u in range(11, 16)] == [0, 0, 0, 1, 1]
    assert not found.freeze(12), "instability while frozen makes it longer and is no new freeze"
    assert [found.factor(u) for u in range(13, 17)] == [0, 0, 0, 1]


def test_without_freeze_steps_nothing_is_frozen() -> None:
    found = gate()
    assert not found.freeze(10)
    assert found.factor(11) == 1


@pytest.mark.parametrize(
    ("seconds", "row", "rows"),
    [(0.0, 9.0, 64), (1.0, 0.0, 64), (1.0, 0.001, 64), (1.0, 0.02, 48), (1.0, 0.5, 8), (0.3, 0.01, 24)],
)
def test_rows_within_the_time_limit_are_whole_micro_batches(seconds: float, row: float, rows: int) -> None:
    found = gate(seconds=seconds)
    found.took(row * 64, 64)
    assert found.rows(64, 8) == rows


def test_the_state_survives_json() -> None:
    found = gate(warmup=3, freeze=5)
    found.freeze(7)
    assert Gate.from_dict(found.config, json.loads(json.dumps(found.to_dict()))) == found


def test_rows_that_a_time_limit_leaves_out_are_told_at_the_first_and_for_each_interval() -> None:
    count = LeftOut(interval=4)
    told = [count.add(left_out, 100) for left_out in (0, 30, 20, 10, 0, 0, 0, 0, 5)]
    assert [bool(texts) for texts in told] == [False, True, False, True, False, False, False, False, False]
    assert told[1] == ["gating.seconds left 30 of 200 rows without the self-supervised terms; 30 so far"]
    assert told[3] == ["gating.seconds left 30 of 200 rows without the self-supervised terms; 60 so far"]


def test_what_earlier_runs_counted_is_passed_over() -> None:
    assert Gate.from_dict(GatingConfig(), {"frozen_until": 7, "row_seconds": 0.5, "freezes": 2}).frozen_until == 7
