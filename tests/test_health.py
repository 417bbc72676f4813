"""Verdicts on updates from numbers alone."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from matrixlib.engine.health import Health, Verdict

NAN, INF = math.nan, math.inf
OK, SKIP, HALT = Verdict.OK, Verdict.SKIP, Verdict.HALT
GOOD, BAD = (1.0, 1.0, True), (NAN, 1.0, True)


@pytest.mark.parametrize(
    ("loss", "norm", "finite", "verdict"),
    [
        (1.0, 0.5, True, OK),
        (0.0, 0.0, True, OK),
        (-3.0, 1e30, True, OK),
        (NAN, 0.5, True, SKIP),
        (INF, 0.5, True, SKIP),
        (-INF, 0.5, True, SKIP),
        (1.0, NAN, True, SKIP),
        (1.0, INF, True, SKIP),
        (1.0, 0.5, False, SKIP),  # inf - inf in two terms, say
    ],
)
def test_one_update(loss: float, norm: float, finite: bool, verdict: Verdict) -> None:
    health = Health()
    assert health.judge(loss, norm, finite) is verdict
    assert health.skipped == (verdict is SKIP)
    assert health.updates == 1


@pytest.mark.parametrize(
    ("updates", "verdicts"),
    [
        ([BAD] * 3, [SKIP, SKIP, HALT]),
        ([BAD, BAD, GOOD, BAD, BAD], [SKIP, SKIP, OK, SKIP, SKIP]),
        ([BAD, GOOD] * 4, [SKIP, OK] * 4),
        ([GOOD, BAD, BAD, BAD, BAD], [OK, SKIP, SKIP, HALT, HALT]),
    ],
)
def test_only_skips_in_a_row_halt(updates: list[tuple[float, float, bool]], verdicts: list[Verdict]) -> None:
    health = Health(limit=3)
    assert [health.judge(*update) for update in updates] == verdicts
    assert health.skipped == sum(verdict is not OK for verdict in verdicts)


def test_overflow_of_the_loss_scale_counts_apart_and_never_halts() -> None:
    health = Health(limit=2)
    assert [health.judge(1.0, INF, overflow=True) for _ in range(5)] == [SKIP] * 5
    assert (health.overflows, health.skipped, health.consecutive) == (5, 0, 0)


def test_clip_share_leaves_out_warm_up_and_skipped_updates() -> None:
    health = Health()
    assert health.clip_share == 0
    for _ in range(10):
        health.judge(1.0, 9.0, clipped=True, warming_up=True)
    for clipped in (True, False, False, False):
        health.judge(1.0, 1.0, clipped=clipped)
    health.judge(1.0, INF, clipped=True)
    assert health.clip_share == pytest.approx(0.25)


def test_diagnosis_names_the_culprit_and_what_to_do() -> None:
    health = Health(limit=1)
    health.judge(NAN, NAN, detail="not finite: loss of value")
    text = health.diagnosis()
    assert "loss of value" in text
    assert "nan" in text
    assert "optim.learning_rate" in text


def test_state_survives_json() -> None:
    health = Health(limit=4)
    for update in (GOOD, BAD, BAD):
        health.judge(*update, clipped=True)
    again = Health.from_dict(json.loads(json.dumps(health.to_dict())))
    assert again == health
    assert [again.judge(*BAD), again.judge(*BAD)] == [SKIP, HALT]
    with pytest.raises(ValueError, match="limit"):
        Health.from_dict({key: value for key, value in health.to_dict().items() if key != "limit"})


def test_loads_no_torch() -> None:
    code = "import sys, matrixlib.engine.health; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
