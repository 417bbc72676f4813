"""Diagnoses of made-up heads: each mistake is named, and a head that is fine or merely young is not accused."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import chess
import numpy as np
import pytest
from cells import definitions
from positions import hard_positions, random_positions

from matrixlib.tasks.chess.evaluate import oracle

CELLS = definitions("ssl")
HeadOutput: Any = CELLS["HeadOutput"]
BOARDS = (*hard_positions(), *random_positions(1000, 5))
ROWS = len(BOARDS)
MISTAKES = CELLS["alternatives"](BOARDS)
ORACLE = [oracle.maps(board) for board in BOARDS]
EXACT = {head: np.stack([one[head] for one in ORACLE]) for head in MISTAKES}
CONTENT = EXACT["piece"]
EVERYWHERE = np.ones((ROWS, 8, 8), bool)
SURE = {"threat": 0.97, "control": 0.97, "piece": 0.97, "pin": 0.9995, "fork": 0.9995}
CLASSES = {"threat": 2, "control": 3, "piece": 13, "pin": 2, "fork": 2}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def head_output(head: str, probability: np.ndarray, squares: np.ndarray = EVERYWHERE) -> HeadOutput:
    """A head that says `probability` (N, c, 8, 8) of the boards."""
    log_p = np.log(np.maximum(probability, 1e-12)).astype(np.float32)
    content = np.where(squares, oracle.EMPTY, CONTENT) if head == "piece" else CONTENT
    return HeadOutput(log_p, EXACT[head], squares, content.astype(np.uint8))


def probabilities(value: np.ndarray, sure: float, classes: int = 2) -> np.ndarray:
    """Probabilities of a head that gives about `sure` to the classes (N, 8, 8), the rest to the others."""
    one_hot = np.eye(classes)[value].transpose(0, 3, 1, 2)
    share = sure + rng().uniform(-0.5, 0.5, value.shape)[:, None] * (1 - sure)
    return np.asarray(one_hot * share + (1 - one_hot) * (1 - share) / (classes - 1))


def maps(p: np.ndarray) -> np.ndarray:
    return np.stack([1 - p, p], axis=1)


class Diagnosis(NamedTuple):
    word: str
    reason: str
    figures: dict[str, Any] | None


def diagnose(output: HeadOutput, mistakes: Mapping[str, np.ndarray]) -> Diagnosis:
    figures = CELLS["knowledge"](output)
    return Diagnosis(*CELLS["diagnose"](output, figures, mistakes), figures)


def diagnosis(head: str, probability: np.ndarray, squares: np.ndarray = EVERYWHERE) -> Diagnosis:
    return diagnose(head_output(head, probability, squares), MISTAKES[head])


def hidden() -> np.ndarray:
    return rng(7).random((ROWS, 8, 8)) < 0.3


@pytest.mark.parametrize("head, name", [(head, name) for head in EXACT for name in ("", *MISTAKES[head])])
def test_each_mistake_is_named(head: str, name: str) -> None:
    squares = hidden() if head == "piece" else EVERYWHERE
    said = MISTAKES[head][name] if name else EXACT[head]
    one = diagnosis(head, probabilities(said, SURE[head], CLASSES[head]), squares)
    assert one.word == {"": "learning", CELLS["COPY"]: "trivial"}.get(name, "harmful"), one.reason
    assert name in one.reason


def test_a_head_that_says_the_base_rate_is_dead() -> None:
    exact = EXACT["threat"]
    one = diagnosis("threat", maps(np.clip(exact.mean() + rng(1).normal(0, 0.01, exact.shape), 0.01, 0.99)))
    assert (one.word, one.reason[:8]) == ("dead", "it saves")
    assert diagnosis("threat", maps(np.full(exact.shape, 0.5))).reason == "it says the same of every position"
    empty = diagnosis("piece", probabilities(np.full((ROWS, 8, 8), oracle.EMPTY), 0.7, 13), hidden())
    assert empty.word == "dead", "it copies the hidden squares as they look, and most are empty"


def test_a_head_that_is_as_good_as_a_table_is_trivial() -> None:
    """Of what stands on which square: it saves a fifth of the entropy of threats, and no network is needed for it."""
    exact = EXACT["threat"]
    one = diagnosis("threat", CELLS["square_table"](head_output("threat", maps(np.full(exact.shape, 0.5))), exact))
    assert one.word == "trivial"
    assert "a table of what stands on which square does as well" in one.reason


def test_a_head_that_is_sure_of_it_too_little_or_too_much_still_learns() -> None:
    """Positive weights shift a young head's probabilities; that is bad calibration, and no ignorance."""
    exact = EXACT["pin"]
    odds = math.log(1e-3) + 8 * exact + rng(2).normal(0, 0.7, exact.shape)
    for slope, offset in ((1, 0), (1, 4), (0.4, 0), (2.5, -1)):
        one = diagnosis("pin", maps(1 / (1 + np.exp(-(slope * odds + offset)))))
        assert one.word == "learning", (slope, offset, one.reason)
        assert one.figures["AP"] > 0.9
    both = EXACT["threat"] & MISTAKES["threat"][CELLS["BACKWARDS"]]  # attacked however pawns attack
    assert diagnosis("threat", probabilities(both, 0.9)).word == "learning", "it has not learned pawns yet"


def test_what_says_too_little_is_undecided() -> None:
    """Few squares of the rarer class, a class that never occurs, and no square at all."""
    some, never = EXACT["fork"][:40], np.zeros((ROWS, 8, 8), np.uint8)
    p = np.where(some == 1, 0.9, 0.001 + rng().random(some.shape) / 1e4)
    few = HeadOutput(np.log(maps(p)).astype(np.float32), some, EVERYWHERE[:40], CONTENT[:40])
    p = 0.01 + rng().random(never.shape) / 100
    absent = diagnose(HeadOutput(np.log(maps(p)).astype(np.float32), never, EVERYWHERE, CONTENT), {})
    idle = diagnosis("piece", probabilities(EXACT["piece"], 0.9, 13), EVERYWHERE & False)
    assert {diagnose(few, {}).word, absent.word, idle.word} == {"undecided"}
    assert math.isnan(absent.figures["AP"])
    assert (idle.reason, idle.figures) == ("it is asked about no square (see data.hidden_squares)", None)


def test_figures_are_those_of_their_definitions() -> None:
    truth = np.zeros((ROWS, 8, 8), np.uint8)
    truth[:, 0, :2] = 1  # 2 of 64 squares
    p = np.full((ROWS, 8, 8), 0.05)
    p[:, 0, 0], p[:, 0, 2] = 0.8, 0.7
    p[:, 0, 1] = 0.06
    p[:, 7, 7] += np.linspace(0, 0.001, ROWS)
    head = HeadOutput(np.log(maps(p)).astype(np.float32), truth, EVERYWHERE, CONTENT)
    one = diagnose(head, {})
    row = one.figures
    assert [row[name] for name in ("precision", "recall", "F1")] == [0.5, 0.5, 0.5]
    assert row["rate [%]"] == 100 * 2 / 64
    assert row["uniform"] == math.log(2)
    assert row["prior"] == pytest.approx(-(2 * math.log(2 / 64) + 62 * math.log(62 / 64)) / 64)
    assert row["loss"] == pytest.approx(-np.where(truth == 1, np.log(p), np.log(1 - p)).mean(), rel=1e-5)
    # Half of the ones come first, then as many zeros, then the other half: precision 1, and 2 of 3.
    assert row["AP"] == pytest.approx((1 + 2 / 3) / 2)
    said_wrong = (abs(0.8 - 1) + abs(0.7 - 0)) / 64 + abs((0.06 + 61 * 0.05) / 62 - 1 / 62) * 62 / 64
    assert row["ECE"] == pytest.approx(said_wrong, abs=1e-3)


def test_mistaken_targets_are_what_their_names_say() -> None:
    """Matrix0's pawns, seen from both sides; test_ssl_targets.py holds the exact targets against the fast core."""
    alternatives, copy = CELLS["alternatives"], CELLS["COPY"]
    for fen in ("4k3/8/8/8/4p3/8/8/4K3 w - - 0 1", "4k3/8/8/4P3/8/8/8/4K3 b - - 0 1"):
        board = chess.Board(fen)
        exact, backwards = (oracle.maps(board, wrong)["threat"] for wrong in (False, True))
        assert set(zip(*np.nonzero(exact != backwards), strict=True)) == {(2, 3), (2, 5), (4, 3), (4, 5)}
        assert exact[2, 3]
        assert backwards[4, 3]
    named = alternatives([chess.Board()])
    assert named["fork"][copy].sum() == 32
    assert named["control"][copy][0, :, 0].tolist() == [2, 2, 1, 1, 1, 1, 0, 0]
    assert set(alternatives([chess.Board("4k3/8/8/8/8/8/8/4K3 w - - 0 1")])["pin"]) == {copy}, "others differ nowhere"
