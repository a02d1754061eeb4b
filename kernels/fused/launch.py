"""Overlapping launches: a kernel starts while the one before it ends, and waits before it touches anything.

Programmatic dependent launch (CUDA programming guide): without it every kernel of a captured step pays the start of its
programs after the end of the last one. Every kernel of ``kernels.fused`` must wait, so that "the kernel before has
ended" implies the same of all kernels before that one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

EARLY = True
"""Whether kernels read before they wait what was written at least two kernels back: lists, maps, the residual stream.

That is complete: a kernel starts only when all programs of the one before have waited themselves. It bypasses the
first-level cache, which may hold what stood there before. It asks for the order of operations that
``specfold.backends.fused_forward`` has, so it is read at every launch.
"""


def overlapped(x: torch.Tensor) -> dict[str, bool]:
    """Keyword arguments of a launch on the device of ``x``."""
    return {"OVERLAP": True, "launch_pdl": True} if x.is_cuda else {"OVERLAP": False}


def early(x: torch.Tensor) -> dict[str, bool]:
    """Keyword argument of a kernel that may read early."""
    return {"EARLY": EARLY and x.is_cuda}


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Goes before the first read or write of anything that another kernel writes or reads; weights may come earlier."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
