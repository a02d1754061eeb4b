"""RMSNorm over rows of hidden states."""

from __future__ import annotations

import torch

from kernels.linear import pad_rows


def rms_norm(x_RE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``; the mean in float32, the product in the dtype of ``x``. [R, E]."""
    num_rows = x_RE.shape[0]
    x = pad_rows(x_RE)
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return (weight_E * normed.to(x_RE.dtype))[:num_rows]
