"""Matrix0's attention as one Triton kernel for CUDA GPUs: no score leaves the chip.

A program works on the S x S scores of one head of one position, which fit into registers. Read and written are queries,
keys, values and what is made of them, 4 * S * D numbers a head; separate operations carry each of their results, S * S
fp32 numbers a head, through the GPU's memory and keep eight for the backward pass, which here makes the scores anew.

Triton comes with torch's builds for CUDA. On a CPU its interpreter runs the same kernels (TRITON_INTERPRET=1), for
tests. Formulas: attention.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

WIDTHS = (16, 32, 64)
"""Numbers of a head that a program's products take."""
OLDEST = (8, 0)
"""Compute capability from which on the kernel is used: Ampere, whose tensor cores take bf16."""
CHUNKS = 64
"""Parts of a batch that sum the bias's gradient by themselves, so that it is the same in each run."""


def attend(
    qkv: Tensor, bias: Tensor | None, mask: Tensor, scale: float, mix: float, limit: float, dropout: float
) -> Tensor:
    """(B, S, H * D) from queries, keys and values (B, S, 3, H, D), contiguous, S a power of two and D one of `WIDTHS`.

    Arguments as `attention.blended`'s; products in the precision of `qkv`, the rest in fp32. Differentiable once.
    """
    return _Attend.apply(qkv, bias, mask, scale, mix, limit, dropout)


class _Attend(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, bias: Tensor | None, mask: Tensor, scale: float, mix: float, limit: float, dropout: float
    ) -> Tensor:
        batch, squares, _, heads, width = qkv.shape
        out = qkv.new_empty(batch, squares, heads * width)
        near = mask.to(torch.int8)
        # Drawn on the device, from the stream that is saved with a run; nothing is read back.
        seed = torch.zeros(1, dtype=torch.int64, device=qkv.device)
        if dropout:
            seed.random_()
        ctx.save_for_backward(qkv, bias, near, seed)
        ctx.options = _options(qkv, bias, scale, mix, limit, dropout)
        if batch:
            _forward[(batch * heads,)](qkv, bias, near, seed, out, heads, **ctx.options, num_warps=4)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        qkv, bias, near, seed = ctx.saved_tensors
        batch, squares, _, heads, _ = qkv.shape
        of_qkv = torch.empty_like(qkv)
        chunks = max(1, min(batch, CHUNKS))
        of_bias = qkv.new_zeros(chunks, heads, squares, squares, dtype=torch.float32) if bias is not None else None
        if batch:
            grid = (heads, chunks)
            gradient = gradient.to(qkv.dtype).contiguous()
            _backward[grid](qkv, bias, near, seed, gradient, of_qkv, of_bias, heads, batch, **ctx.options, num_warps=8)
        if bias is not None:
            assert of_bias is not None
            of_bias = of_bias.sum(0, keepdim=True).to(bias.dtype)
        return of_qkv, of_bias, None, None, None, None, None


def _options(
    qkv: Tensor, bias: Tensor | None, scale: float, mix: float, limit: float, dropout: float
) -> dict[str, Any]:
    """What both kernels take by name. `leaves`: of 2^31 random numbers those that leave a share out."""
    exact = qkv.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    return {
        "scale": scale,
        "mix": mix,
        "limit": limit,
        "leaves": round(dropout * 2**31),
        "gain": 1 / (1 - dropout),
        "BIASED": bias is not None,
        "DROPS": dropout > 0,
        "PRECISION": "ieee" if exact else "tf32",
        "SQUARES": qkv.shape[1],
        "WIDTH": qkv.shape[4],
    }


@triton.jit
def _exp(q, k, bias, head, scale, limit, BIASED: tl.constexpr, PRECISION: tl.constexpr, SQUARES: tl.constexpr):
    """(exp of the clamped scores, whether a score lies within the limits), both (S, S). NaN stays NaN."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if BIASED:
        row, column = tl.arange(0, SQUARES)[:, None], tl.arange(0, SQUARES)[None, :]
        scores += tl.load(bias + head * SQUARES * SQUARES + row * SQUARES + column).to(tl.float32)
    clamped = tl.where(scores > limit, limit, tl.where(scores < -limit, -limit, scores))
    return tl.exp(clamped), clamped == scores


@triton.jit
def _stays(seed, pair, leaves, SQUARES: tl.constexpr):
    """(S, S) bool: shares that dropout leaves in; four from each number of the counter-based generator."""
    row, column = tl.arange(0, SQUARES)[:, None], tl.arange(0, SQUARES // 4)[None, :]
    a, b, c, d = tl.randint4x(tl.load(seed) + pair, row * (SQUARES // 4) + column)
    numbers = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (SQUARES, SQUARES))
    return (numbers & 0x7FFFFFFF).to(tl.int32) >= leaves


@triton.jit
def _forward(
    qkv,
    bias,
    near,
    seed,
    out,
    heads,
    scale,
    mix,
    limit,
    leaves,
    gain,
    BIASED: tl.constexpr,
    DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
    SQUARES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    pair = tl.program_id(0)
    place, head = (pair // heads).to(tl.int64), pair % heads
    row, column = tl.arange(0, SQUARES)[:, None], tl.arange(0, SQUARES)[None, :]
    number = tl.arange(0, WIDTH)[None, :]
    own = row * heads * WIDTH + head * WIDTH + number  # of (S, H, D)
    of_all = (place * SQUARES + row) * 3 * heads * WIDTH + head * WIDTH + number  # of (B, S, 3, H, D)
    q = tl.load(qkv + of_all)
    k = tl.load(qkv + of_all + heads * WIDTH)
    v = tl.load(qkv + of_all + 2 * heads * WIDTH)
    e, _ = _exp(q, k, bias, head, scale, limit, BIASED, PRECISION, SQUARES)
    masked = e * tl.load(near + row * SQUARES + column).to(tl.float32)
    a = (1 - mix) / tl.sum(masked, 1)
    b = mix / tl.sum(e, 1)
    shares = masked * a[:, None] + e * b[:, None]
    if DROPS:
        shares = tl.where(_stays(seed, pair, leaves, SQUARES), shares * gain, 0.0)
    mixed = tl.dot(shares.to(v.dtype), v, input_precision=PRECISION)
    tl.store(out + place * SQUARES * heads * WIDTH + own, mixed.to(v.dtype))


@triton.jit
def _backward(
    qkv,
    bias,
    near,
    seed,
    gradient,
    of_qkv,
    of_bias,
    heads,
    batch,
    scale,
    mix,
    limit,
    leaves,
    gain,
    BIASED: tl.constexpr,
    DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
    SQUARES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One head of every n-th position, n the number of chunks."""
    head, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row, column = tl.arange(0, SQUARES)[:, None], tl.arange(0, SQUARES)[None, :]
    number = tl.arange(0, WIDTH)[None, :]
    own = row * heads * WIDTH + head * WIDTH + number
    squares = tl.load(near + row * SQUARES + column).to(tl.float32)
    sums = tl.zeros((SQUARES, SQUARES), tl.float32)
    for position in range(chunk, batch, chunks):
        place = tl.cast(position, tl.int64)
        of_all = (place * SQUARES + row) * 3 * heads * WIDTH + head * WIDTH + number
        q = tl.load(qkv + of_all)
        k = tl.load(qkv + of_all + heads * WIDTH)
        v = tl.load(qkv + of_all + 2 * heads * WIDTH)
        g = tl.load(gradient + place * SQUARES * heads * WIDTH + own)
        e, within = _exp(q, k, bias, head, scale, limit, BIASED, PRECISION, SQUARES)
        masked = e * squares
        masked = masked / tl.sum(masked, 1)[:, None]  # the softmax over the mask's squares
        e = e / tl.sum(e, 1)[:, None]  # and over all
        shares = (1 - mix) * masked + mix * e
        of_shares = tl.dot(g, tl.trans(v), input_precision=PRECISION)
        if DROPS:
            stays = _stays(seed, position * heads + head, leaves, SQUARES)
            shares = tl.where(stays, shares * gain, 0.0)
            of_shares = tl.where(stays, of_shares * gain, 0.0)
        of_v = tl.dot(tl.trans(shares.to(g.dtype)), g, input_precision=PRECISION)
        # p * (g - sum(p * g)), the gradient of a softmax p, once for each of the two
        of_scores = (1 - mix) * masked * (of_shares - tl.sum(masked * of_shares, 1)[:, None])
        of_scores += mix * e * (of_shares - tl.sum(e * of_shares, 1)[:, None])
        of_scores = tl.where(within, of_scores, 0.0)
        sums += of_scores
        low = (of_scores * scale).to(q.dtype)
        of_q = tl.dot(low, k, input_precision=PRECISION)
        of_k = tl.dot(tl.trans(low), q, input_precision=PRECISION)
        tl.store(of_qkv + of_all, of_q.to(q.dtype))
        tl.store(of_qkv + of_all + heads * WIDTH, of_k.to(q.dtype))
        tl.store(of_qkv + of_all + 2 * heads * WIDTH, of_v.to(q.dtype))
    if BIASED:
        chunk_sums = of_bias + (chunk.to(tl.int64) * heads + head) * SQUARES * SQUARES
        tl.store(chunk_sums + row * SQUARES + column, sums)
