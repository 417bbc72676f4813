"""Actions on updates from numbers alone; the warnings about them."""

import json
import math
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from matrixlib.config import HealthConfig
from matrixlib.engine.health import Health
from matrixlib.engine.stats import Action, Stats

NAN, INF = math.nan, math.inf
OK, SKIP, ROLLBACK, HALT = Action
GOOD, BAD, HIGH = (1.0, 1.0), (NAN, 1.0), (9.0, 1.0)


def options(**changes: object) -> HealthConfig:
    values = {
        "window": 20,
        "band": 10.0,
        "patience": 3,
        "skips": 3,
        "rollbacks": 1,
        "rate_factor": 0.5,
        "rate_recovery": 10,
        "hooks": False,
    }
    return HealthConfig.model_validate(values | changes)


def stats(update: int = 0, loss: float = 1.0, norm: float = 1.0, **more: Any) -> Stats:
    return Stats(update + 1, loss, norm, main_loss=loss, **more)


def run(health: Health, updates: Iterable[tuple[float, float]]) -> list[Action]:
    return [health.judge(stats(health.updates, loss, norm)) for loss, norm in updates]


def settled(**changes: object) -> Health:
    """After enough good updates for the band to be known."""
    health = Health(options(**changes))
    stream = random.Random(1)
    assert run(health, ((2 + stream.gauss(0, 0.05), 1 + stream.gauss(0, 0.1)) for _ in range(20))) == [OK] * 20
    return health


@pytest.mark.parametrize(
    ("updates", "actions"),
    [
        ([(-3.0, 1e30), (-INF, 0.5), (1.0, INF)], [OK, SKIP, SKIP]),
        ([BAD] * 3, [SKIP, SKIP, ROLLBACK]),
        ([BAD, BAD, GOOD, BAD, BAD], [SKIP, SKIP, OK, SKIP, SKIP]),
        ([BAD, GOOD] * 4, [SKIP, OK] * 4),
        ([GOOD, BAD, BAD, BAD], [OK, SKIP, SKIP, ROLLBACK]),
        ([HIGH] * 9, [OK] * 9),  # no band is known yet: high is not too high
    ],
)
def test_non_finite_updates_in_a_row(updates: list[tuple[float, float]], actions: list[Action]) -> None:
    health = Health(options())
    assert run(health, updates) == actions
    assert health.skipped == sum(action is not OK for action in actions)


def test_the_state_after_a_rollback() -> None:
    """Our counts, the saved bands, and the learning rate cut, which warms back."""
    health, saved = settled(), settled()
    run(health, [HIGH, HIGH, BAD])
    assert health.losses == saved.losses, "outliers do not widen the band"
    assert (health.steady, health.onset) == (False, 20)
    run(health, [(2.0, 1.0), *[HIGH] * 3])
    after = health.rolled_back(16, saved)
    assert (after.skipped, after.rollbacks, after.updates, after.losses) == (1, 1, 27, saved.losses)
    assert [after.rate_scale(u) for u in (16, 21, 26, 999)] == pytest.approx([0.5, 0.75, 1.0, 1.0])
    after.onset = 18
    assert after.rolled_back(16, saved).rate_scale(16) == pytest.approx(0.6 * 0.5), "on top of what was left of it"


@pytest.mark.parametrize(
    ("updates", "actions"),
    [
        ([HIGH] * 3, [OK, OK, ROLLBACK]),
        ([HIGH, HIGH, (2.0, 1.0), HIGH, HIGH], [OK] * 5),  # it came back by itself
        ([(2.0, 80.0)] * 3, [OK, OK, ROLLBACK]),  # the gradient alone
        ([(-50.0, 0.0)] * 9, [OK] * 9),  # the band has no lower edge
        ([HIGH, BAD, HIGH, HIGH], [OK, SKIP, OK, ROLLBACK]),  # a skip in between ends no row
        ([(2.4, 2.0)] * 9, [OK] * 9),  # a little worse is no spike
    ],
)
def test_outliers_in_a_row(updates: list[tuple[float, float]], actions: list[Action]) -> None:
    health = settled()
    assert run(health, updates) == actions
    if ROLLBACK in actions:
        assert "median" in health.last


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), noise=st.floats(0.0, 0.3), slope=st.floats(-0.01, 0.001))
@example(seed=0, noise=0.0, slope=0.001)  # one high gradient norm, in a loss that rises slowly by itself
def test_noise_and_drift_are_no_spike(seed: int, noise: float, slope: float) -> None:
    stream = random.Random(seed)
    health = Health(options(window=50, patience=3))
    updates = [
        (3 * math.exp(slope * i) * (1 + noise * stream.gauss(0, 1)), math.exp(stream.gauss(0, 0.5))) for i in range(300)
    ]
    assert ROLLBACK not in run(health, updates)


def around(level: float, updates: int, seed: int = 2) -> list[tuple[float, float]]:
    stream = random.Random(seed)
    return [(level + stream.gauss(0, 0.05), 1.0) for _ in range(updates)]


@pytest.mark.parametrize(
    ("level", "action"),
    [
        (2.0, OK),
        (1.7, OK),
        (2.03, OK),  # within the noise
        (2.2, ROLLBACK),  # inside the band of the single losses, but not where they were
    ],
)
def test_a_short_spike_is_rolled_back_if_the_loss_settles_worse(level: float, action: Action) -> None:
    health = settled(window=40)
    run(health, around(2.0, 30))
    assert run(health, [HIGH, HIGH]) == [OK, OK]
    assert run(health, around(level, 9, seed=3)) == [OK] * 9
    assert not health.steady, "what comes of it is not known yet"
    assert run(health, around(level, 1)) == [action]
    assert health.steady
    if action is ROLLBACK:
        assert health.onset == 50
        assert "settled at 2.2" in health.last
        unable = settled(window=40, rollbacks=0)
        assert run(unable, [*around(2.0, 30), HIGH, HIGH, *around(2.2, 40)]) == [OK] * 72, "it halts nothing"


def test_gradients_of_the_warm_up_are_not_judged_and_the_share_of_clipped_ones_forgets() -> None:
    health = Health(options())
    for update in range(40):
        norm = 1.0 * 1.3**update  # grows by design
        assert health.judge(stats(update, 2.0, norm, clipped=True, warming_up=True)) is OK
    assert (health.clip_share, health.norms) == (0, [])
    shares = []
    for update in range(40, 1040):
        health.judge(stats(update, 2.0, 1.0, clipped=update < 540))
        shares.append(health.clip_share)
    assert (shares[0], shares[499], shares[749], shares[-1]) == (1, 1, 0.5, 0)


def test_an_overflow_of_the_loss_scale_never_counts_towards_a_rollback() -> None:
    health = Health(options())
    for update in range(50):
        assert health.judge(stats(update, 2.0, INF, finite=False, overflow=True)) is SKIP
    assert (health.overflows, health.skipped, health.nonfinite) == (50, 0, 0)
    assert health.steady
    assert health.overflowed == list(range(50))
    health.judge(stats(149, 2.0, INF, finite=False, overflow=True))
    assert health.overflowed == [149], "one fall in the last 100 updates is normal"
    run(health, [BAD, BAD])
    health.judge(stats(152, 2.0, INF, finite=False, overflow=True))
    assert run(health, [BAD]) == [ROLLBACK], "it does not end a row of others"


def test_rolled_back_too_often_is_halt_with_a_diagnosis() -> None:
    health = settled()
    assert run(health, [HIGH] * 3)[-1] is ROLLBACK
    assert "no checkpoint" in health.diagnosis()
    health = health.rolled_back(16, settled())
    assert run(health, [HIGH] * 3) == [OK, OK, HALT]
    assert "3 updates in a row were far outside" in health.diagnosis()
    assert "rolled back 1 times" in health.diagnosis()


@pytest.mark.parametrize(
    ("onset", "cut_at", "checkpoints", "target"),
    [
        (100, -1, [50, 100, 150], 100),  # the state before the update with index 100
        (99, -1, [50, 100], 50),
        (49, -1, [50, 100], None),
        (120, 100, [50, 100], 50),  # it was there already and no newer one came
        (120, 100, [100], 100),  # nothing older: the learning rate is smaller this time
    ],
)
def test_where_a_rollback_goes(onset: int, cut_at: int, checkpoints: list[int], target: int | None) -> None:
    health = Health(options(), onset=onset, cut_at=cut_at)
    assert health.target(checkpoints) == target


def test_the_state_survives_json() -> None:
    health = settled()
    run(health, [HIGH, BAD])
    data = json.loads(json.dumps(health.to_dict()))
    again = Health.from_dict(health.config, data)
    assert again == health
    assert run(again, [BAD, BAD]) == run(health, [BAD, BAD]) == [SKIP, ROLLBACK]
    data["strange"] = data.pop("rollbacks")
    with pytest.raises(ValueError, match="another version: rollbacks, strange"):
        Health.from_dict(health.config, data)


def test_warnings_in_words() -> None:
    well, ill = Health(options()), Health(options(), last="update 7: loss nan", overflowed=[1, 2, 3])
    assert well.warnings(stats()) == []
    assert "no valid target of plane" in well.warnings(stats(empty=("plane",)))[0]
    skipped = stats(metrics={"class/skipped": 0.3}, counts={"class": 10})
    assert well.warnings(skipped) == ["3 items without a usable target of class were skipped"]
    assert "update 7: loss nan" in ill.warnings(stats(action=SKIP))[0]
    assert "loss scale" in well.warnings(stats(action=SKIP, overflow=True))[0]
    assert "fell 3 times" in ill.warnings(stats(action=SKIP, overflow=True))[1]


@pytest.mark.parametrize(("clipped", "of", "share"), [(99, 99, ""), (10, 100, ""), (11, 100, "11%")])
def test_too_many_clipped_gradients_are_told_with_the_threshold_that_the_run_suggests(
    clipped: int, of: int, share: str
) -> None:
    text = Health(options(), clips=[True] * clipped + [False] * (of - clipped)).clip_warning(1.934, 1.0)
    assert (share in text and "95% of the latest norms are below 1.93" in text) if share else text == ""
