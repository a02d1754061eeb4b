"""Projections over compacted rows.

R rows, K input width, N output width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROW_TILE = 32
"""Rows are padded to a multiple of this before a GEMM.

A CPU BLAS picks other kernels below about 16 rows, and element-wise loops treat the last, partly filled vector
apart; on whole tiles a row's bits depend neither on the number of rows nor on its place (single thread).
"""


def pad_rows(x_RK: torch.Tensor) -> torch.Tensor:
    """Rows of zeros added until their number is a multiple of ``ROW_TILE``; at least one tile."""
    missing = -x_RK.shape[0] % ROW_TILE if x_RK.shape[0] else ROW_TILE
    return F.pad(x_RK, (0, 0, 0, missing)) if missing else x_RK


def linear_rows(x_RK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` whose rows do not depend on one another, [R, N]."""
    return F.linear(pad_rows(x_RK), weight_NK, bias_N)[: x_RK.shape[0]]


def swiglu_rows(x_RE: torch.Tensor, gate_up_2IE: torch.Tensor, down_EI: torch.Tensor) -> torch.Tensor:
    """SwiGLU feed-forward ``down(silu(gate(x)) * up(x))`` on rows, [R, E]; gate and up stand stacked in one weight."""
    num_rows = x_RE.shape[0]
    gate, up = F.linear(pad_rows(x_RE), gate_up_2IE).chunk(2, dim=-1)
    # Contiguous copies keep every element on the vectorised path, so its bits do not depend on its neighbours.
    hidden = F.silu(gate.contiguous()) * up
    return F.linear(hidden, down_EI)[:num_rows]
