"""Matrix0's attention: scores clamped, the softmax over the squares of a mask blended with that over all, dropout.

Clamp, softmaxes, blend and dropout are one operation, worked through in pieces: on the CPU they stay in the processor's
cache, on a GPU they bound what is held beside the one fp32 array that the backward pass needs, where the separate
operations hold eight. On a CUDA GPU one kernel (attention_kernel.py) makes all of it, the products with queries, keys
and values too, and holds no score at all.

The two softmaxes differ by the mask alone, so exp is taken once: with e = exp(clamped score), m the mask (0 or 1),
Z = sum_j e_j and M = sum_j m_j e_j the blend is e * ((1 - mix) * m / M + mix / Z). Scores are clamped, so no maximum
has to be taken off first. Measured on one core at 32 positions, 20 heads: 17 ms forward and backward, 39 ms as separate
operations, 13 of them torch's random numbers for dropout.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

PIECE = 2**18
"""Scores worked on at once: 1 MiB in fp32, which a few buffers of fit into a core's second-level cache."""
DEVICE_PIECE = 2**25
"""The same on a GPU: 128 MiB, so that its thousands of cores are busy with each."""
AGREEMENT = 0.05  # of the kernel with separate operations, as a share of the largest number: far above bf16's rounding
SQUARES = 64
SCORE_LIMIT = 50.0  # Matrix0's clamp of attention scores
MASKED_SCORE = -1e4  # finite in float16, and far below every score


def in_fp32(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """function(*tensors) in fp32 where autocast would compute, and round the result, in half precision."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return function(*tensors)
    with torch.autocast(device, enabled=False):
        return function(*(tensor.float() for tensor in tensors))


def clamped(qkv: Tensor, bias: Tensor | None, mask: Tensor | None, mix: float, dropout: float) -> Tensor:
    """Attention of S squares in H heads, (B, S, H * D), from queries, keys and values (B, S, 3, H, D).

    bias: (1, H, S, S), added to the scores. mask: (S, S) bool, True where a square may be looked at; None: everywhere.
    mix: share of the softmax over all squares where there is a mask. dropout: probability that a share is left out.
    Scores and shares are fp32 under autocast too.
    """
    blend = mask is not None and 0 < mix < 1
    if torch.compiler.is_compiling() or qkv.is_meta:  # the compiler fuses them itself
        blend = False
    scale = qkv.shape[-1] ** -0.5
    if blend and qkv.is_cuda and (kernel := _kernel(qkv.device, qkv.dtype, *qkv.shape[3:])):
        return kernel(qkv.contiguous(), bias, mask, scale, mix, SCORE_LIMIT, dropout)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    scores = in_fp32(torch.matmul, query, key.transpose(-2, -1))
    if blend:
        assert mask is not None
        shares = blended(scores, bias, mask, scale, mix, SCORE_LIMIT, dropout, value.dtype)
    else:
        shares = F.dropout(separate(scores, bias, mask, scale, mix), dropout).to(value.dtype)
    return (shares @ value).transpose(1, 2).flatten(2)


@functools.cache
def _kernel(device: torch.device, dtype: torch.dtype, heads: int, width: int) -> Callable[..., Tensor] | None:
    """`attention_kernel.attend` for such heads on a CUDA device, tried there once; None where it cannot be had."""
    try:
        from matrixlib.tasks.chess import attention_kernel
    except ImportError:  # Triton comes with torch's builds for CUDA, but not for every system
        return None
    if width not in attention_kernel.WIDTHS or torch.cuda.get_device_capability(device) < attention_kernel.OLDEST:
        return None
    try:
        problem = _difference(attention_kernel.attend, device, dtype, heads, width)
    except Exception as error:  # noqa: BLE001 - whatever compiler or driver raise is told, and there is another way
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    if problem:
        warnings.warn(f"attention goes on without its kernel, slower: {problem}", stacklevel=2)
    return None if problem else attention_kernel.attend


def _difference(attend: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, heads: int, width: int) -> str:
    """What is wrong with a kernel's values and gradients beside those of the separate operations in fp32; "" where they
    agree. It draws from a random stream of its own, keeps its activations even where the block around it is recomputed,
    and waits for the device.
    """
    generator = torch.Generator(device).manual_seed(0)
    mask = torch.rand(SQUARES, SQUARES, generator=generator, device=device).lt(0.5).fill_diagonal_(True)
    kept = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False), kept:
        qkv = torch.randn(3, SQUARES, 3, heads, width, generator=generator, device=device).to(dtype)
        bias = torch.randn(1, heads, SQUARES, SQUARES, generator=generator, device=device)
        weights = torch.randn(3, SQUARES, heads * width, generator=generator, device=device).to(dtype)
        results = []
        for function, kind in ((attend, dtype), (_separate_attention, torch.float32)):
            inputs, extra = qkv.to(kind, copy=True).requires_grad_(), bias.clone().requires_grad_()
            out = function(inputs, extra, mask, width**-0.5, 0.2, SCORE_LIMIT, 0.0)
            results.append([out.detach(), *torch.autograd.grad(out, (inputs, extra), weights.to(kind))])
    for name, new, old in zip(("values", "gradient", "gradient of the bias"), *results, strict=True):
        error = float((new.float() - old).abs().max() / old.abs().max())
        if not error <= AGREEMENT:
            return f"its {name} on {torch.cuda.get_device_name(device)} are off by {error:.1%}"
    return ""


def _separate_attention(
    qkv: Tensor, bias: Tensor | None, mask: Tensor, scale: float, mix: float, limit: float, dropout: float
) -> Tensor:
    """As `attention_kernel.attend`, by separate operations."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    shares = F.dropout(separate(query @ key.transpose(-2, -1), bias, mask, scale, mix), dropout).to(value.dtype)
    return (shares @ value).transpose(1, 2).flatten(2)


def separate(scores: Tensor, bias: Tensor | None, mask: Tensor | None, scale: float, mix: float) -> Tensor:
    """Shares (B, H, S, S) in fp32, without dropout, by an operation for each thing; arguments as `blended`'s."""
    scores = scores.float() * scale
    if bias is not None:
        scores = scores + bias
    scores = scores.clamp(-SCORE_LIMIT, SCORE_LIMIT)
    if mask is None or mix == 1:
        return scores.softmax(-1)
    shares = scores.masked_fill(~mask, MASKED_SCORE).softmax(-1)
    return torch.lerp(shares, scores.softmax(-1), mix) if mix > 0 else shares


def blended(
    scores: Tensor,
    bias: Tensor | None,
    mask: Tensor,
    scale: float,
    mix: float,
    limit: float,
    dropout: float,
    dtype: torch.dtype,
) -> Tensor:
    """Shares (B, H, S, S) in `dtype` of scores (B, H, S, S) times `scale` plus `bias` (1, H, S, S), clamped to +-limit.

    mask: (S, S) bool, one True in every row at least. mix: share of the softmax over all columns, in (0, 1); the rest
    is that over the mask's. limit: at most 80, so that exp stays finite in fp32. dropout: probability that a share is
    left out, the others growing by as much; exact to 2^-17. Differentiable once. Nothing waits for a GPU.
    """
    return _Blend.apply(scores, bias, mask, scale, mix, limit, dropout, dtype)


class _Blend(Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        bias: Tensor | None,
        mask: Tensor,
        scale: float,
        mix: float,
        limit: float,
        dropout: float,
        dtype: torch.dtype,
    ) -> Tensor:
        wide = torch.promote_types(scores.dtype, torch.float32)
        keep, gain = _keep(scores, dropout)
        exp = scores.new_empty(scores.shape, dtype=wide)
        near, whole = (scores.new_empty(*scores.shape[:-1], 1, dtype=wide) for _ in range(2))
        shares = scores.new_empty(scores.shape, dtype=dtype)
        clamped, near_squares = not _on_host(scores), mask.to(wide)
        for piece in _pieces(scores):
            e = exp[piece]
            piece_scores = scores[piece].to(wide)  # `out` alone would not widen what is computed in
            if bias is None:
                torch.mul(piece_scores, scale, out=e)
            else:
                torch.add(bias, piece_scores, alpha=scale, out=e)
            if not clamped:  # what lies within the limits is left as it is, and spares the backward pass a look
                low, high = e.aminmax()
                clamped = not (-limit <= low and high <= limit)
            if clamped:
                e.clamp_(-limit, limit)
            torch.sum(e.exp_(), -1, keepdim=True, out=whole[piece])
            w = e * near_squares
            torch.sum(w, -1, keepdim=True, out=near[piece])
            w.mul_((1 - mix) * gain / near[piece]).addcmul_(e, mix * gain / whole[piece])
            shares[piece] = w if keep is None else w.mul_(keep[piece])
        ctx.save_for_backward(exp, near, whole, mask, keep)
        ctx.options = scale, mix, limit if clamped else math.inf, gain, scores.dtype, bias is not None
        return shares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        exp, near, whole, mask, keep = ctx.saved_tensors
        scale, mix, limit, gain, dtype, biased = ctx.options
        of_scores = torch.empty(exp.shape, dtype=dtype)
        of_bias = exp.new_zeros(1, *exp.shape[1:])
        near_squares = mask.to(exp.dtype)
        edges = exp.new_full((2,), limit)  # no list of numbers, whose copy to a GPU would wait for it
        edges[0].neg_()
        edges.exp_()
        for piece in _pieces(exp):
            e, n, w = exp[piece], near[piece], whole[piece]
            all_ = e * gradient[piece]
            if keep is not None:
                all_.mul_(keep[piece])
            masked, masked_e = all_ * near_squares, e * near_squares
            a, b = (1 - mix) * gain / n, mix * gain / w
            # the softmax's gradient e / Z * (g - sum(e * g) / Z), once for each of the two
            of_n, of_w = masked.sum(-1, keepdim=True) / n, all_.sum(-1, keepdim=True) / w
            d = masked.mul_(a).addcmul_(masked_e, -a * of_n).addcmul_(all_, b).addcmul_(e, -b * of_w)
            if limit < math.inf:
                d.masked_fill_((e <= edges[0]) | (e >= edges[1]), 0.0)
            if biased:
                of_bias += d.sum(0, keepdim=True)
            torch.mul(d, scale, out=of_scores[piece])
        return of_scores, of_bias if biased else None, None, None, None, None, None, None


def _on_host(scores: Tensor) -> bool:
    """Whether a number may be read back in the middle: a GPU would be waited for."""
    return scores.is_cpu


def _pieces(scores: Tensor) -> Iterator[slice]:
    """Ranges of rows of (B, ...) with about `PIECE` elements."""
    size = PIECE if _on_host(scores) else DEVICE_PIECE
    rows = max(1, size // max(1, scores[0].numel())) if len(scores) else 1
    return (slice(start, start + rows) for start in range(0, len(scores), rows))


def _keep(scores: Tensor, dropout: float) -> tuple[Tensor | None, float]:
    """(bool of the scores' shape, True where a share stays; factor on these). On the CPU four from each 64-bit random
    number of torch's stream, which takes a third of the time of its `bernoulli_`.
    """
    stays = max(1, round((1 - dropout) * 2**16))
    if stays >= 2**16:  # none is left out, to 2^-17; and 2^15 is no int16 to compare with
        return None, 1.0
    count, gain = scores.numel(), 2**16 / stays
    if _on_host(scores):
        numbers = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
        return (numbers[:count] < stays - 2**15).view(scores.shape), gain
    keep = scores.new_empty(scores.shape, dtype=torch.bool)
    for piece in _pieces(scores):
        torch.lt(torch.rand(keep[piece].shape, device=scores.device), 1 / gain, out=keep[piece])
    return keep, gain
