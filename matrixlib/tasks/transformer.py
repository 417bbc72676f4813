"""The transformer block that tasks share."""

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm attention and MLP (`inner` wide) with residual connections. norm: makes one of its norms."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = norm(), norm()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, inner), nn.Linear(inner, width)
        self.drop = nn.Dropout(dropout)

    def split(self, x: Tensor) -> Tensor:
        """Queries, keys, values (3, B, heads, L, W / heads) of x (B, L, W)."""
        return cast(Tensor, self.qkv(self.norm1(x))).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        """x (B, L, W) after attention of L queries to the keys, and MLP."""
        drop = self.dropout if self.training else 0.0
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=drop, is_causal=causal)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.outer(nn.functional.gelu(self.inner(self.norm2(x)))))
