"""Blocks of the chess network: normalisation, residual blocks, attention over the 64 squares.

Shapes: B positions, C trunk channels, 8 rows, 8 columns. Every block maps (B, C, 8, 8) to the same shape.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from matrixlib.hardware import backend
from matrixlib.tasks.chess.bitboard import BETWEEN
from matrixlib.tasks.chess.config import ModelConfig

SQUARES = 64
SCORE_LIMIT = 50.0  # clamp of attention scores in Matrix0
MASKED_SCORE = -1e4  # finite in float16, and far below every score
LINE_WEIGHT = 11 / 32  # exact in bf16 and TF32; a sum over eight squares is about as large as the summands
GROUP_CHANNELS = 16  # per GroupNorm group, as in Matrix0

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu, "mish": F.mish}


def in_fp32(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """function(*tensors) in fp32, whatever autocast would use."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return function(*tensors)
    with torch.autocast(device, enabled=False):
        return function(*(tensor.float() for tensor in tensors))


def board_mask() -> Tensor:
    """Attention mask (64, 64): squares one queen, knight or king move apart, and the square itself."""
    square = torch.arange(SQUARES)
    rows = (square[:, None] // 8 - square[None, :] // 8).abs()
    columns = (square[:, None] % 8 - square[None, :] % 8).abs()
    return (rows == 0) | (columns == 0) | (rows == columns) | (rows * columns == 2)


class OpenLines(nn.Module):
    """Planes (B, C, 8, 8) -> two matrices (B, 64, 64): LINE_WEIGHT where a rook, or a bishop, on the one square would
    see the other, and 0 elsewhere; the pieces are the first 12 planes."""

    between: Tensor
    aligned: Tensor

    def __init__(self) -> None:
        super().__init__()
        square = np.arange(SQUARES)
        rows, columns = (abs(part[:, None] - part) for part in (square // 8, square % 8))
        aligned = np.stack([(rows == 0) ^ (columns == 0), (rows == columns) & (rows > 0)]).reshape(2, -1)
        between = (BETWEEN.reshape(-1, 1) >> square.astype(np.uint64) & 1).astype(np.float32)
        self.register_buffer("aligned", torch.from_numpy(LINE_WEIGHT * aligned).float(), persistent=False)
        self.register_buffer("between", torch.from_numpy(-LINE_WEIGHT * between), persistent=False)

    @torch.no_grad()
    def forward(self, planes: Tensor) -> list[Tensor]:
        pieces = planes[:, :12].sum(1).flatten(1)
        # One piece between two squares takes all of the weight, further ones are cut off at 0
        seen = (F.linear(pieces, self.between, line).clamp(min=0) for line in self.aligned)
        return [line.unflatten(1, (SQUARES, SQUARES)) for line in seen]


def along_lines(x: Tensor, channels: int, lines: Sequence[Tensor]) -> Tensor:
    """x (B, C, 8, 8), of which the first `channels` channels are replaced by their sums over the squares that each
    square sees along ranks and files, and as many by sums along diagonals. lines: of `OpenLines`."""
    rest = x.shape[1] - channels * len(lines)
    *seen, others = x.flatten(2).transpose(1, 2).split([channels] * len(lines) + [rest], dim=2)
    seen = [torch.bmm(line, part) for line, part in zip(lines, seen, strict=True)]
    out = torch.cat([*seen, others], dim=2).transpose(1, 2).unflatten(2, (8, 8))
    return out.contiguous() if x.is_contiguous() else out  # keep the memory format


class GroupNorm(nn.GroupNorm):
    """Without torch's check of the batch size in Python, which takes as long as the kernel for one position."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


def make_norm(kind: str, channels: int, momentum: float) -> nn.Module:
    """BatchNorm2d, or GroupNorm in groups of about 16 channels; ValueError for channels that they do not divide.
    momentum: weight of the new batch."""
    if kind == "batch":
        return nn.BatchNorm2d(channels, momentum=momentum)
    groups = max(1, channels // GROUP_CHANNELS)
    if channels % groups:
        raise ValueError(
            f"GroupNorm: {groups} groups do not divide {channels} channels; use widths that are multiples of "
            f"{GROUP_CHANNELS}, or below {2 * GROUP_CHANNELS}"
        )
    return GroupNorm(groups, channels)


def checkpointed(block: nn.Module, x: Tensor, *inputs: Any) -> Tensor:
    """Activation checkpointing: keep only the inputs and recompute the block in the backward pass."""
    if torch.compiler.is_compiling():  # handles side effects of the recomputation itself
        return checkpoint(block, x, *inputs, use_reentrant=False)
    norms = [module for module in block.modules() if isinstance(module, nn.BatchNorm2d)]
    stream = None if backend.replays_rng(x.device) else backend.rng_state(x.device)
    contexts = lambda: (nullcontext(), _recomputation(norms, x.device, stream))  # noqa: E731
    return checkpoint(block, x, *inputs, use_reentrant=False, context_fn=contexts)


@contextmanager
def _recomputation(norms: list[nn.BatchNorm2d], device: torch.device, stream: Tensor | None) -> Iterator[None]:
    """Context of a recomputation: BatchNorm statistics stay. stream: RNG state to restore if torch does not."""
    # momentum 0 keeps the statistics bit-exact; `track_running_stats` would change what autograd saves
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    after = None if stream is None else backend.rng_state(device)
    if stream is not None:
        backend.set_rng_state(device, stream)
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, counter) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, counter
        if after is not None:
            backend.set_rng_state(device, after)


class ConvNorm(nn.Module):
    """Convolution without bias, normalisation, activation: (B, inputs, 8, 8) -> (B, outputs, 8, 8)."""

    def __init__(self, config: ModelConfig, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        self.norm = make_norm(config.norm.stem_heads, outputs, config.norm.momentum)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(self.conv(x)))


class ChessFeatures(nn.Module):
    """Matrix0's position encoding and two residual convolutions with ReLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, norm = config.channels, partial(make_norm, config.norm.blocks, momentum=config.norm.momentum)
        self.position_encoding = nn.Parameter(torch.randn(1, width, 8, 8) * 0.1)
        self.square_conv = nn.Conv2d(width, width, 1, bias=False)
        self.square_norm = norm(width)
        self.neighbour_conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.neighbour_norm = norm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position_encoding
        x = x + F.relu(self.square_norm(self.square_conv(x)))
        return x + F.relu(self.neighbour_norm(self.neighbour_conv(x)))


class SqueezeExcite(nn.Module):
    """Squeeze-and-excitation with an fp32 sigmoid: at least 8 hidden units, as in Matrix0, or Lc0's with a `shift`."""

    def __init__(self, channels: int, ratio: float, activation: Activation, shift: bool = False) -> None:
        super().__init__()
        hidden = max(1, round(channels * ratio)) if shift else max(8, int(channels * ratio))
        self.reduce = nn.Linear(channels, hidden)
        self.expand = nn.Linear(hidden, channels * (1 + shift))
        self.activation, self.shift = activation, shift

    def forward(self, x: Tensor) -> Tensor:
        # Its backward pass is a quarter faster on the CPU than that of x.mean((2, 3))
        pooled = F.adaptive_avg_pool2d(x, 1).flatten(1)
        gate = self.expand(self.activation(self.reduce(pooled)))[:, :, None, None]
        if self.shift:
            gate, shift = gate.chunk(2, dim=1)
            return x * torch.sigmoid(gate.float()).to(x.dtype) + shift
        return x * torch.sigmoid(gate.float()).to(x.dtype)


class DropPath(nn.Module):
    """Stochastic depth: drop a sample's residual branch with probability `rate` in training."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return branch
        keep = torch.rand(branch.shape[0], *[1] * (branch.dim() - 1), device=branch.device) >= self.rate
        return branch * (keep.to(branch.dtype) / (1.0 - self.rate))


class ResidualBlock(nn.Module):
    """3x3-3x3 (`basic`), 3x3-1x1 without a norm between (`light`) or 1x1-3x3-1x1 (`bottleneck`) with
    squeeze-and-excitation; ValueError for an empty bottleneck.

    `preact`: x + SE(conv(act(norm(...)))); otherwise conv-norm-act with an activation after the sum. With `lines` the
    last convolution sees some channels `along_lines`.
    """

    def __init__(self, config: ModelConfig, drop: float) -> None:
        super().__init__()
        width, inner = config.channels, config.channels // config.bottleneck
        if inner == 0 and config.block == "bottleneck":
            raise ValueError(f"bottleneck {config.bottleneck} leaves no channel of {width}; use at most {width}")
        shapes = [(width, width, 3), (width, width, 1 if config.block == "light" else 3)]
        if config.block == "bottleneck":
            shapes = [(width, inner, 1), (inner, inner, 3), (inner, width, 1)]
        self.preact, self.lines = config.preact, config.lines
        self.convs = nn.ModuleList(nn.Conv2d(a, b, size, padding=size // 2, bias=False) for a, b, size in shapes)
        self.norms = nn.ModuleList(
            make_norm(config.norm.blocks, a if config.preact else b, config.norm.momentum) for a, b, _ in shapes
        )
        if config.block == "light":
            self.norms[1 if config.preact else 0] = nn.Identity()
        self.activation = ACTIVATIONS[config.activation]
        lc0 = config.encoding == "lc0"
        self.se = SqueezeExcite(config.channels, config.se_ratio, self.activation, lc0) if config.se_ratio else None
        self.drop = DropPath(drop)

    def forward(self, x: Tensor, lines: Sequence[Tensor] = ()) -> Tensor:
        branch = x
        for k, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True), start=1):
            if self.preact:
                branch = self.activation(norm(branch))
            elif k > 1:
                branch = self.activation(branch)
            if lines and k == len(self.convs):
                branch = along_lines(branch, self.lines, lines)
            branch = conv(branch) if self.preact else norm(conv(branch))
        if self.se is not None:
            branch = self.se(branch)
        x = x + (self.drop(branch) if self.training else branch)
        return x if self.preact else self.activation(x)


class AttentionBlock(nn.Module):
    """Self-attention over the 64 squares.

    `pre`: x + proj(attention(LayerNorm(x))). `post`, Matrix0's: LayerNorm(x + proj(attention(x))) with scores clamped
    to +-50. `unmasked_mix`: weight of unmasked attention when `mask` is on.
    """

    mask: Tensor | None

    def __init__(self, config: ModelConfig, drop: float) -> None:
        super().__init__()
        width, options = config.channels, config.attention
        self.heads, self.post, self.mix = options.heads, options.norm == "post", options.unmasked_mix
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(1, options.heads, SQUARES, SQUARES)) if options.bias else None
        masked = options.mask and options.unmasked_mix < 1
        self.register_buffer("mask", board_mask() if masked else None, persistent=False)
        self.dropout = config.dropout
        self.drop = DropPath(drop)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        mixed = self.mixed(tokens).transpose(1, 2).reshape(tokens.shape)
        branch = self.drop(self.proj(mixed))
        if not self.post:
            return x + branch.transpose(1, 2).unflatten(2, (8, 8))
        out = self.norm(tokens + branch).transpose(1, 2).unflatten(2, (8, 8))
        return out.contiguous() if x.is_contiguous() else out  # keep the memory format

    def mixed(self, tokens: Tensor, values: Tensor | None = None) -> Tensor:
        """Weights times values (B, heads, 64, ...), by default those of the tokens (B, 64, C)."""
        qkv = self.qkv(tokens if self.post else self.norm(tokens)).view(tokens.shape[0], SQUARES, 3, self.heads, -1)
        query, key, own = qkv.permute(2, 0, 3, 1, 4)
        attend = self._attend_clamped if self.post else self._attend
        return attend(query, key, own if values is None else values)

    def _attend_clamped(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Unfused attention in fp32: clamped scores and a mix of two softmaxes."""
        scores = in_fp32(torch.matmul, query.float() * query.shape[-1] ** -0.5, key.transpose(-2, -1))
        scores = (scores if self.bias is None else scores + self.bias).clamp(-SCORE_LIMIT, SCORE_LIMIT)
        if self.mask is None:
            weights = scores.softmax(-1)
        else:
            weights = scores.masked_fill(~self.mask, MASKED_SCORE).softmax(-1)
            weights = torch.lerp(weights, scores.softmax(-1), self.mix) if self.mix > 0 else weights
        return F.dropout(weights, self.dropout, self.training).to(value.dtype) @ value

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attend = partial(F.scaled_dot_product_attention, dropout_p=self.dropout if self.training else 0.0)
        bias = None if self.bias is None else self.bias.to(query.dtype)
        if self.mask is None:
            return attend(query, key, value, attn_mask=bias)
        near = self.mask if bias is None else bias.masked_fill(~self.mask, MASKED_SCORE)
        masked = attend(query, key, value, attn_mask=near)
        if self.mix == 0:
            return masked
        return torch.lerp(masked, attend(query, key, value, attn_mask=bias), self.mix)
