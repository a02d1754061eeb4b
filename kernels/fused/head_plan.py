"""How the LM head's products are cut into tiles: by the room for rows, the width and the dtype.

What a plan may choose cannot change a row's bits (see ``linear_plan``); ``VOCAB_TILE`` and the warps, whose sums run
over a tile's tokens, are no part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PIECES = (32, 64, 128, 256)
"""Rows that one read of hidden states brings."""
FEW_ROWS = 160
"""Launches for no more rows are bound by the bytes of the weights, others by the products."""


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """Tiles of one launch; a program takes a multiprocessor for itself and handles many tiles, one after another."""

    heights: tuple[int, ...]
    """Rows that a row tile may have, ascending: pieces, or sums of two. The device picks by the count."""
    tile_k: int = 64
    shared: int = 208 * 1024
    """Bytes of stages; reductions need the rest of 227 KB."""
    tma: bool = True
    """Tiles come by the tensor memory accelerator."""
    flatten: bool = False
    """Weights of the next tile are on their way during a tile's epilogue. ptxas then runs all products one by one:
    right where HBM is the limit, not where the products are."""
    prefetched_lines: int = 8
    """Lines of 128 bytes of each row of a tile that a program asks for before it waits and, where not ``flatten``,
    before the epilogue of the tile before. 8 are 17 MB for all programs, what HBM brings in 4 us."""
    max_registers: int | None = None
    """A thread's; 208 leave room for the kernel before, beside which the weights are prefetched."""


def plan(room: int, width: int, dtype: torch.dtype) -> HeadPlan:
    """Tiles for at most ``room`` rows of a hidden width."""
    if dtype == torch.float32:
        # One body: the layouts of CUDA cores, and so the order of sums, would differ from height to height.
        return HeadPlan((32,), tile_k=32, shared=80 * 1024, tma=False, prefetched_lines=0)
    tma = width % 8 == 0  # A descriptor's strides are multiples of 16 bytes.
    lines = 8 if width >= 512 else 0
    if room > FEW_ROWS:
        return HeadPlan((64, 128, 192, 256, 288), tma=tma, prefetched_lines=lines)
    heights = (32,) if room <= 32 else (32, 64, 128, 160)
    return HeadPlan(heights, tma=tma, flatten=True, prefetched_lines=lines, max_registers=208)
