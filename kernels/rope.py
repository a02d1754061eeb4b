"""Rotary position embedding, half-rotation layout. R rows, N heads, D head width."""

from __future__ import annotations

import torch


def apply_rope(x_RND: torch.Tensor, cos_RD: torch.Tensor, sin_RD: torch.Tensor) -> torch.Tensor:
    """Rotates each head: ``x * cos + (-x2, x1) * sin`` with x1, x2 the halves of the head. [R, N, D]."""
    first, second = x_RND.chunk(2, dim=-1)
    return x_RND * cos_RD[:, None] + torch.cat((-second, first), dim=-1) * sin_RD[:, None]
