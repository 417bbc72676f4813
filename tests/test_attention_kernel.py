"""Matrix0's attention as a kernel, run by Triton's interpreter: the values and gradients of separate operations."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from matrixlib.tasks.chess import attention
from matrixlib.tasks.chess.blocks import board_mask

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton comes with torch's builds for CUDA", allow_module_level=True)

MIX, SCALE, LIMIT = 0.2, 0.25, attention.SCORE_LIMIT
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run in a process of its own")
if INTERPRETED:
    from matrixlib.tasks.chess import attention_kernel
    from matrixlib.tasks.chess.attention_kernel import attend


@pytest.mark.skipif(INTERPRETED, reason="is that process")
def test_the_rest_in_a_process_of_its_own() -> None:
    """Triton reads the variable as it is imported, which torch may have done here already."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    root = Path(__file__).resolve().parents[1]
    ended = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=root, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout


def inputs(size: float, width: int = 16, heads: int = 2) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    qkv, bias = torch.randn(3, 64, 3, heads, width) * size, torch.randn(1, heads, 64, 64)
    return qkv.requires_grad_(), bias.requires_grad_()


def expected(qkv: Tensor, bias: Tensor | None, keep: Tensor | float = 1.0) -> Tensor:
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    shares = attention.separate(query @ key.transpose(-2, -1), bias, board_mask(), SCALE, MIX)
    return (shares * keep @ value).transpose(1, 2).flatten(2)


@interpreted
@pytest.mark.parametrize("size", [1.0, 12.0])  # with the larger ones scores are clamped
@pytest.mark.parametrize("biased", [True, False])
def test_the_kernel_gives_values_and_gradients_of_separate_operations(
    monkeypatch: pytest.MonkeyPatch, size: float, biased: bool
) -> None:
    monkeypatch.setattr(attention_kernel, "CHUNKS", 2)  # of three positions
    qkv, bias = inputs(size)
    given, leaves = (bias, [qkv, bias]) if biased else (None, [qkv])
    result, other = attend(qkv, given, board_mask(), SCALE, MIX, LIMIT, 0.0), expected(qkv, given)
    torch.testing.assert_close(result, other)
    weights = torch.randn_like(other)
    for new, old in zip(
        torch.autograd.grad(result, leaves, weights), torch.autograd.grad(other, leaves, weights), strict=True
    ):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5 * float(old.abs().max()))


@interpreted
def test_dropped_shares_follow_the_seed_and_have_no_gradient() -> None:
    qkv, bias = inputs(1.0, width=64)
    with torch.no_grad():
        qkv[:, :, 2] = torch.eye(64)[:, None]  # the values say which share is which

    def dropped() -> Tensor:
        return attend(qkv, bias, board_mask(), SCALE, MIX, LIMIT, 0.25)

    torch.manual_seed(1)
    result = dropped()
    torch.manual_seed(1)
    assert torch.equal(result, dropped())
    assert not torch.equal(result, dropped())
    keep = (result != 0).unflatten(2, (2, 64)).transpose(1, 2)
    assert keep.float().mean() == pytest.approx(0.75, abs=0.01)
    assert not torch.equal(keep[0], keep[1])
    other = expected(qkv, bias, keep / 0.75)
    torch.testing.assert_close(result, other)
    weights = torch.randn_like(other)
    for new, old in zip(
        torch.autograd.grad(result, [qkv, bias], weights), torch.autograd.grad(other, [qkv, bias], weights), strict=True
    ):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5 * float(old.abs().max()))


@interpreted
def test_a_score_that_is_not_finite_is_not_hidden() -> None:
    qkv, bias = inputs(1.0)
    with torch.no_grad():
        bias[0, 1, 3, 4] = torch.nan
    result = attend(qkv, bias, board_mask(), SCALE, MIX, LIMIT, 0.0).unflatten(2, (2, 16))
    assert result[:, 3, 1].isnan().all()
    assert result[:, 3, 0].isfinite().all()


@interpreted
def test_no_row_is_no_error() -> None:
    qkv = torch.zeros(0, 64, 3, 2, 16, requires_grad=True)
    result = attend(qkv, None, board_mask(), SCALE, MIX, LIMIT, 0.0)
    result.sum().backward()
    assert qkv.grad.shape == qkv.shape


@interpreted
def test_a_kernel_that_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried on a GPU before the kernel is used there."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    device = torch.device("cpu")
    assert attention._difference(attend, device, torch.float32, 2, 16) == ""
    assert attention._difference(attend, device, torch.float16, 2, 16) == ""  # the interpreter has no products in bf16

    def wrong(qkv: Tensor, *others: object) -> Tensor:
        return attend(qkv.flip(1), *others)

    assert "values on a card are off" in attention._difference(wrong, device, torch.float32, 2, 16)
