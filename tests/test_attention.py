"""Matrix0's attention shares: one operation on the CPU says what the separate ones say."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from matrixlib.tasks.chess import attention
from matrixlib.tasks.chess.attention import MASKED_SCORE, SCORE_LIMIT, blended
from matrixlib.tasks.chess.blocks import board_mask

MIX, SCALE = 0.2, 0.25


def plain(scores: Tensor, bias: Tensor | None, mask: Tensor, scale: float = SCALE) -> Tensor:
    """The same shares as two softmaxes."""
    x = scores * scale if bias is None else scores * scale + bias
    x = x.clamp(-SCORE_LIMIT, SCORE_LIMIT)
    return torch.lerp(x.masked_fill(~mask, MASKED_SCORE).softmax(-1), x.softmax(-1), MIX)


def shares(scores: Tensor, bias: Tensor | None, mask: Tensor, dropout: float = 0.0) -> Tensor:
    return blended(scores, bias, mask, SCALE, MIX, SCORE_LIMIT, dropout, scores.dtype)


def inputs(rows: int = 5, size: float = 10.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    scores, bias = torch.randn(rows, 3, 64, 64, dtype=dtype) * size, torch.randn(1, 3, 64, 64, dtype=dtype)
    return scores.requires_grad_(), bias.requires_grad_()


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("piece", [1, 2 * 3 * 64 * 64, 2**18])  # one row at a time, a last piece that is short, all
@pytest.mark.parametrize("size", [10.0, 300.0])  # with the larger ones scores are clamped
@pytest.mark.parametrize("biased", [True, False])
def test_values_and_gradients_are_those_of_two_softmaxes(
    monkeypatch: pytest.MonkeyPatch, piece: int, size: float, biased: bool, host: bool
) -> None:
    monkeypatch.setattr(attention, "PIECE" if host else "DEVICE_PIECE", piece)
    monkeypatch.setattr(attention, "_on_host", lambda scores: host)  # as on a GPU
    scores, bias = inputs(size=size)
    mask, given = board_mask(), bias if biased else None
    expected, result = plain(scores, given, mask), shares(scores, given, mask)
    torch.testing.assert_close(result, expected)
    if size > 100:
        assert (scores * SCALE).abs().max() > SCORE_LIMIT
    leaves = [scores, bias] if biased else [scores]
    weights = torch.randn_like(expected)
    for new, old in zip(
        torch.autograd.grad(result, leaves, weights), torch.autograd.grad(expected, leaves, weights), strict=True
    ):
        torch.testing.assert_close(new, old)


def test_scores_at_the_limits_stay_finite_in_fp32() -> None:
    scores, bias = inputs(size=1e4, dtype=torch.float32)
    result = shares(scores, bias, board_mask())
    result.square().sum().backward()
    assert result.isfinite().all()
    assert scores.grad.isfinite().all()
    torch.testing.assert_close(result.sum(-1), torch.ones(5, 3, 64))


def test_a_score_that_is_not_finite_is_not_hidden() -> None:
    scores, bias = inputs()
    with torch.no_grad():
        scores[2, 1, 3, 4] = torch.nan
    assert shares(scores, bias, board_mask())[2, 1, 3].isnan().any()


@pytest.mark.parametrize("biased", [True, False])
def test_shares_of_half_precision_are_computed_in_fp32(biased: bool) -> None:
    scores, bias = inputs(dtype=torch.float32)
    low, given, scale = scores.detach().bfloat16(), bias if biased else None, 0.3
    result = blended(low, given, board_mask(), scale, MIX, SCORE_LIMIT, 0.0, torch.float32)
    torch.testing.assert_close(result, plain(low.float(), given, board_mask(), scale))
    half = blended(low, given, board_mask(), scale, MIX, SCORE_LIMIT, 0.0, torch.bfloat16)
    assert torch.equal(half, result.bfloat16())


def test_a_dropout_that_is_next_to_nothing_leaves_out_nothing() -> None:
    scores, bias = inputs()
    assert torch.equal(shares(scores, bias, board_mask(), 1e-6), shares(scores, bias, board_mask()))


@pytest.mark.parametrize("host", [True, False])
def test_dropout_keeps_the_mean_and_follows_the_seed(monkeypatch: pytest.MonkeyPatch, host: bool) -> None:
    monkeypatch.setattr(attention, "_on_host", lambda scores: host)
    scores, bias = inputs(rows=64, size=1.0, dtype=torch.float32)
    torch.manual_seed(1)
    first = shares(scores, bias, board_mask(), 0.1)
    torch.manual_seed(1)
    assert torch.equal(first, shares(scores, bias, board_mask(), 0.1))
    assert not torch.equal(first, shares(scores, bias, board_mask(), 0.1))
    whole = shares(scores, bias, board_mask())
    gone = first == 0
    assert gone.float().mean().item() == pytest.approx(0.1, abs=0.002)
    torch.testing.assert_close(first[~gone], (whole / 0.9)[~gone], rtol=1e-4, atol=0)
    assert gone.any(-1).float().mean() > 0.99  # spread over the rows


@pytest.mark.parametrize("host", [True, False])
def test_the_gradient_of_dropped_shares_is_that_of_their_mask(monkeypatch: pytest.MonkeyPatch, host: bool) -> None:
    monkeypatch.setattr(attention, "_on_host", lambda scores: host)
    scores, bias = inputs()
    weights = torch.randn(scores.shape, dtype=scores.dtype)
    torch.manual_seed(2)
    result = shares(scores, bias, board_mask(), 0.3)
    kept, gain = (result != 0).double(), 2**16 / round(0.7 * 2**16)
    expected = plain(scores, bias, board_mask()) * kept * gain
    for new, old in zip(
        torch.autograd.grad(result, [scores, bias], weights),
        torch.autograd.grad(expected, [scores, bias], weights),
        strict=True,
    ):
        torch.testing.assert_close(new, old)


@pytest.mark.parametrize("mix", [0.0, MIX, 1.0])
def test_scores_are_not_rounded_to_half_precision(mix: float) -> None:
    """Scores of 30 to 40 would be off by up to an eighth in bf16, and shares by as many per cent as they differ."""
    torch.manual_seed(0)
    qkv = (torch.randn(2, 64, 3, 2, 16) * 3).bfloat16()
    expected = attention.clamped(qkv.float(), None, board_mask(), mix, 0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = attention.clamped(qkv, None, board_mask(), mix, 0.0)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), expected, rtol=0.01, atol=0.01 * float(expected.abs().max()))


def test_no_row_is_no_error() -> None:
    assert shares(torch.zeros(0, 3, 64, 64), None, board_mask()).shape == (0, 3, 64, 64)


def test_a_trial_of_the_kernel_inside_of_a_recomputed_block_disturbs_nothing() -> None:
    """A run that goes on makes its first forward pass in such a block."""

    def block(x: Tensor) -> Tensor:
        assert not attention._difference(attention._separate_attention, x.device, torch.float32, 1, 16)
        return x.square()

    x = torch.ones(3, requires_grad=True)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
