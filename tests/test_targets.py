"""Targets of the self-supervised heads: each is cast as its own loss needs it, and what cannot be is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chess_task import ALL_SSL, positions, rng, stored, task, tensors
from torch import Tensor

from matrixlib.tasks.chess import targets
from matrixlib.tasks.chess.config import SSL_CHANNELS

DTYPES = [torch.uint8, torch.int16, torch.int64, torch.float16, torch.float32, torch.float64]


def classes(head: str, seed: int = 0, rows: int = 3) -> Tensor:
    top = max(2, SSL_CHANNELS[head])
    return torch.from_numpy(np.random.default_rng(seed).integers(0, top, (rows, 8, 8)))


def one_hot(value: Tensor, count: int) -> Tensor:
    return torch.nn.functional.one_hot(value, count).permute(0, 3, 1, 2)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(ALL_SSL), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 99))
def test_classes_and_one_hots_of_every_dtype_give_the_same(
    head: str, dtype: torch.dtype, planes: bool, seed: int
) -> None:
    """R154: whole numbers destroy nothing that is whole; a map of 0 and 1 stays a map of floats."""
    wanted, count = classes(head, seed), SSL_CHANNELS[head]
    value = wanted if not planes else wanted[:, None] if count == 1 else one_hot(wanted, count)
    found = targets.cast(head, value.to(dtype))
    assert found.shape == (3, 8, 8)
    assert found.dtype == (torch.float32 if count == 1 else torch.int64)
    assert torch.equal(found.long(), wanted)


def test_bool_maps_are_maps() -> None:
    assert torch.equal(targets.cast("pin", classes("pin") == 1), classes("pin").float())


def zeroed(value: Tensor) -> Tensor:
    value = value.clone()
    value[1, :, 3, 3] = 0
    return value


@pytest.mark.parametrize(
    "head, value, words",
    [
        (
            "piece",
            zeroed(one_hot(classes("piece"), 13)),
            "not exactly one class",
        ),  # its argmax is a pawn (R156)
        ("piece", one_hot(classes("piece"), 13)[:, :12], "shape"),
        ("piece", classes("piece")[:, None], "shape"),
        ("piece", classes("piece") + 1, "0 to 12"),
        ("piece", one_hot(classes("piece"), 13) * 2, "0 to 1"),
        ("threat", classes("threat") * 0.5, "fractions"),
        ("threat", classes("threat") + 1, "0 to 1"),
        ("threat", classes("threat") / 0.0, "none"),
        ("control", classes("control") - 1, "signed map needs 1 added"),
        ("pin", one_hot(classes("pin"), 2), "shape"),
        ("fork", [[0.0]], "of type list"),
    ],
)
def test_what_cannot_be_cast_is_named(head: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"'{head}'.*{words}"):
        targets.cast(head, value)


def test_a_bare_tensor_is_the_piece_target() -> None:
    """The piece-only format of R156."""
    found = targets.cast_all(one_hot(classes("piece"), 13), ["piece"])
    assert found.keys() == {"piece"}
    assert torch.equal(found["piece"], classes("piece"))


@pytest.mark.parametrize(
    "value, words",
    [
        ({"piece": classes("piece"), "treat": classes("threat")}, "'treat'.*did you mean 'threat'"),
        ({"control": classes("control")}, "no head for.*model.ssl"),
        (np.zeros((3, 8, 8)), "mapping head -> tensor, not of type ndarray"),
        ({"piece": classes("piece", rows=4)}, "4 positions, the batch has 3"),
    ],
)
def test_targets_that_do_not_fit_the_network_are_named(value: Any, words: str) -> None:
    batch = {"pieces": torch.zeros(3, 32, dtype=torch.uint8)}
    with pytest.raises(ValueError, match=words):
        targets.given(batch, value, ["piece", "threat"])


def test_given_targets_stand_before_ours() -> None:
    """Ours given back change nothing; others change the loss of their head alone."""
    chess_task = task()
    batch = tensors(chess_task.prepare(stored(positions(8)), rng()))
    model, terms = chess_task.build_model().eval(), frozenset(chess_task.weights)
    ours = {head: targets.target(batch, head) for head in ALL_SSL}
    with torch.no_grad():
        plain, _ = chess_task.losses(model, batch, terms)
        same, _ = chess_task.losses(model, targets.given(batch, ours, ALL_SSL), terms)
        other, _ = chess_task.losses(model, targets.given(batch, {"pin": 1 - ours["pin"]}, ALL_SSL), terms)
    assert plain == same
    assert {term for term in terms if plain[term] != other[term]} == {"ssl_pin"}
    bounds = chess_task.bounds(targets.given(batch, {"pin": 1 - ours["pin"]}, ALL_SSL))
    assert bounds["ssl_pin"] > chess_task.bounds(batch)["ssl_pin"]  # ones count more than zeros


def test_given_targets_are_cut_with_the_batch() -> None:
    """They have the leading dimension of every other array, so micro-batches take their part of them."""
    from matrixlib.engine.task import slice_batch

    batch = targets.given({"pieces": torch.zeros(3, 32, dtype=torch.uint8)}, classes("piece"), ["piece"])
    assert torch.equal(targets.target(slice_batch(batch, 1, 3), "piece"), classes("piece")[1:])
