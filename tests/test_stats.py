"""One update's stats as a row of metrics.jsonl, their messages and their rate limit; quantiles of gradient norms."""

import copy
import json

from matrixlib.engine.stats import Action, Event, Message, RateLimiter, Stats, from_row, norm_quantiles


def test_a_row_has_the_keys_of_the_log_and_leaves_out_what_an_update_has_not() -> None:
    stats = Stats(1, 1.5, 2.0, micro_step=2, losses={"a": 1.5}, action=Action.SKIP, counts={"a": 3}, detail="x")
    row = json.loads(json.dumps(stats.row()))
    assert (row["step"], row["loss"], row["losses"], row["verdict"]) == (1, 1.5, {"a": 1.5}, "skip")
    assert not row.keys() & {"counts", "detail", "main_loss", "validation", "messages", "events", "phase"}


def test_quantiles_of_gradient_norms() -> None:
    assert norm_quantiles([]) == {}
    assert norm_quantiles([float(value) for value in range(100, 0, -1)]) == {"median": 50.5, "p95": 95.0}


def test_messages_keep_their_events_in_a_row_and_in_another_process() -> None:
    told = Message(Event.NO_TARGET, "no valid target of plane in this update", "plane")
    stats = Stats(3, 1.0, 1.0, messages=(told,))
    row = json.loads(json.dumps(stats.row()))
    assert (row["messages"], row["events"]) == ([str(told)], ["no_target"])
    assert from_row(row).messages[0].event is Event.NO_TARGET
    again = copy.deepcopy(told)  # by the way of pickle
    assert (again, again.event, again.subject) == (told, told.event, "plane")


def filtered(limiter: RateLimiter, first: int, last: int) -> list[tuple[int, str]]:
    """A row without a target at every update, and something else at the tenth."""
    lines = []
    for step in range(first, last + 1):
        messages = [Message(Event.UNUSABLE_TARGETS, f"{step % 3 + 1} items skipped", "policy")]
        messages += [Message(Event.NO_TARGET, "no valid target")] if step == 10 else []
        lines += [(step, str(message)) for message in limiter.filter(step, messages)]
    return lines


def test_a_kind_is_told_once_an_interval_with_its_count() -> None:
    assert filtered(RateLimiter(20), 1, 50) == [
        (1, "2 items skipped"),
        (10, "no valid target"),
        (21, "1 items skipped (19 more since update 1)"),
        (41, "3 items skipped (19 more since update 21)"),
    ]


def test_a_resumed_run_tells_the_same() -> None:
    whole = filtered(RateLimiter(20), 1, 50)
    for stop in (5, 20, 21, 40):
        first = RateLimiter(20)
        before = filtered(first, 1, stop)
        again = RateLimiter.from_dict(20, json.loads(json.dumps(first.to_dict())))
        assert before + filtered(again, stop + 1, 50) == whole


def test_after_a_quiet_interval_a_kind_is_news_again_and_subjects_are_kept_apart() -> None:
    limiter = RateLimiter(20)
    loss, other = Message(Event.VALIDATION, "loss"), Message(Event.VALIDATION, "loss", "value")
    assert [limiter.filter(step, [loss] if step in (1, 30) else []) for step in (1, 21, 30)] == [[loss], [], [loss]]
    assert limiter.filter(31, [loss, other]) == [other]
