"""The latin notebook's targets, by made-up rates."""

from dataclasses import replace
from typing import Any

import pytest

from matrixlib.tasks.latin.rates import Rate, targets

RATE = Rate(4, "standard", (0.5, 0.7), 100, 0.8, 0.85, 0.93, 0.4, 1.0, 1.0, 1.0, 1.0)
EMPTY = replace(RATE, fill=(0.0, 0.0), exact=None, iterative=0.98, iterative_baseline=0.95)


def figures(*rates: Rate) -> dict[str, Any]:
    return {"rates": [rate.to_dict() for rate in rates]}


@pytest.mark.parametrize(
    "rate, name, passed",
    [
        (RATE, "size 4 in one pass", True),  # 94 %
        (replace(RATE, valid=0.76), "size 4 in one pass", False),  # 89 %
        (replace(RATE, size=5, valid=0.6), "size 5 in one pass", True),  # 71 %
        (replace(RATE, size=5, valid=0.59), "size 5 in one pass", False),
        (EMPTY, "size 4 from the empty grid", True),
        (replace(EMPTY, iterative=0.95), "size 4 from the empty grid", False),  # no better than without
        (replace(EMPTY, iterative=1.0, iterative_baseline=1.0), "size 4 from the empty grid", True),  # no room
    ],
)
def test_targets(rate: Rate, name: str, passed: bool) -> None:
    ((title, holds, _),) = targets(figures(rate))
    assert (title, holds) == (name, passed)


def test_other_kinds_have_no_target() -> None:
    """Size 3 has twelve squares: it is reported, not gated."""
    others = (replace(RATE, size=3), replace(RATE, mode="negative"), replace(RATE, fill=(0.3, 0.5)))
    assert targets(figures(*others, replace(RATE, exact=None))) == []
