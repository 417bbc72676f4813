"""Messages of a training: each kind once in an interval, with its count, the same after a resume."""

from matrixlib.engine.messages import Messages, is_decision


def told(messages: Messages, first: int, last: int, end: int = 0) -> list[tuple[int, str]]:
    """A row without a target at every update, and something else at the tenth."""
    lines = []
    for step in range(first, last + 1):
        texts = [f"{step % 3 + 1} items without a usable target of policy were skipped"]
        texts += ["no valid target of plane in this update"] if step == 10 else []
        lines += [(step, text) for text in messages.sift(step, texts, step == end)]
    return lines


def test_a_kind_is_told_once_an_interval_with_its_count_and_at_the_end() -> None:
    assert told(Messages(20), 1, 50, end=50) == [
        (1, "2 items without a usable target of policy were skipped"),
        (10, "no valid target of plane in this update"),
        (21, "1 items without a usable target of policy were skipped (20 times more after update 1)"),
        (41, "3 items without a usable target of policy were skipped (20 times more after update 21)"),
        (50, "3 items without a usable target of policy were skipped (9 times more after update 41)"),
    ]


def test_a_resumed_run_tells_the_same() -> None:
    whole = told(Messages(20), 1, 50)
    for stop in (5, 20, 21, 40):
        first = Messages(20)
        before = told(first, 1, stop)
        again = Messages.from_dict(20, first.to_dict())
        assert before + told(again, stop + 1, 50) == whole


def test_after_a_quiet_interval_a_kind_is_news_again() -> None:
    messages = Messages(20)
    assert [messages.sift(step, [f"loss of update {step}"] if step in (1, 30) else []) for step in (1, 21, 30)] == [
        ["loss of update 1"],
        [],
        ["loss of update 30"],
    ]


def test_what_health_decided_is_known_by_its_first_words() -> None:
    texts = ["update skipped, no weight moved: x", "rolled back to the checkpoint of update 5 (x)", "halted: x"]
    assert all(map(is_decision, texts))
    assert not is_decision("no valid target of plane in this update")
