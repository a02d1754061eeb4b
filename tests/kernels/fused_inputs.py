"""What the tests of the fused kernels share: the device they run on, and poisoned buffers."""

from __future__ import annotations

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
"""The interpreter computes bfloat16 wrongly, so it is tested on a GPU only."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
"""Relative error in L2: summation order at float32, one rounding at bfloat16."""
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A buffer whose unwritten elements show: NaN, or -1 for integers."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype, device=DEVICE)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """L2 norm of the difference over that of ``want``; NaN if anything was left unwritten."""
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))
