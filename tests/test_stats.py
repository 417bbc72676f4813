"""One update's stats as a row of metrics.jsonl; quantiles of gradient norms."""

import json

from matrixlib.engine.stats import Action, Stats, norm_quantiles


def test_a_row_has_the_keys_of_the_log_and_leaves_out_what_an_update_has_not() -> None:
    stats = Stats(1, 1.5, 2.0, micro_step=2, losses={"a": 1.5}, action=Action.SKIP, counts={"a": 3}, detail="x")
    assert json.loads(json.dumps(stats.row())) == {
        "step": 1,
        "loss": 1.5,
        "grad_norm": 2.0,
        "micro_step": 2,
        "losses": {"a": 1.5},
        "metrics": {},
        "learning_rate": 0.0,
        "clip_share": 0.0,
        "verdict": "skip",
        "skipped": 0,
        "overflows": 0,
        "rollbacks": 0,
        "seconds": 0.0,
        "throughput": 0.0,
        "times": {},
    }


def test_quantiles_of_gradient_norms() -> None:
    assert norm_quantiles([]) == {}
    assert norm_quantiles([float(value) for value in range(100, 0, -1)]) == {"median": 50.5, "p95": 95.0}
