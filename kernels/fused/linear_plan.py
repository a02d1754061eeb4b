"""How a projection is cut into tiles: by the shape of its weight, its dtype and the room for rows.

R rows, K input width, N output width (for a gated weight: of gate and of up alone).

What a plan may choose cannot change a row's bits: every output element is one chain of tensor-core instructions in
ascending order of k, 16 at a time, from zero; tile sizes, warps and stages only decide who computes it and when. What
does change bits, the cuts of K, is ``num_splits`` and ``split_width``, and those know neither rows nor plans.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NUM_SMS = 132
"""Multiprocessors of the chip the plans are made for (H100 and H200 SXM). Fixed, so that bits are the same on all."""
SPLIT_UNIT = 128
"""Cuts of K fall on multiples of this, which every ``tile_k`` divides."""
MAX_SPLITS = 4
"""More partial sums would cost their readers more than they give: each is a float32 copy of the output."""
SPLITS = {(1536, 8960): 5}
"""Exceptions by (N, K). 1536 x 8960: 24 tiles of 64, so 5 splits give 120 programs of 28 steps each."""
FEW_ROWS = 320
"""Up to this room a step is one slot: weights are read once or twice, memory is the limit."""
PARALLEL_ROWS = 1536
"""Up to this room splits run in parallel; beyond it the tiles alone fill the chip."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiles of one launch: ``tile_n`` rows of the weight (of gate and of up each) by one of ``heights`` rows of x."""

    heights: tuple[int, ...]
    """Rows of x that one program may take, ascending; the device picks by the count. Each is a power of two from 32 to
    256, or the sum of two different ones (then they are two accumulators over one read of the weight)."""
    tile_n: int
    tile_k: int
    num_warps: int
    shared: int
    """Bytes of shared memory that a program may fill with stages; half of what there is lets two programs reside."""
    tma: bool
    """Tiles come by the tensor memory accelerator instead of by asynchronous copies of 16 bytes."""
    evict_first: bool = False
    """Weights leave the L2 cache first (copies without TMA only)."""
    group: int = 8
    """Row tiles that share a weight tile while it is in the L2 cache."""

    @property
    def tall(self) -> int:
        return self.heights[-1]


HALF, FULL = 108 * 1024, 216 * 1024
"""Shared memory for two programs on a multiprocessor, and for one; the chip has 228 KB, 1 KB a program reserved."""


def num_splits(N: int, K: int, dtype: torch.dtype) -> int:
    """Partial sums of a weight [N, K]: enough for about one program a multiprocessor with 128 weight rows each."""
    if dtype == torch.float32:
        return min(2, -(-K // SPLIT_UNIT))  # For tests alone: it splits too, so that they see what bfloat16 does.
    wanted = min(MAX_SPLITS, max(1, NUM_SMS // -(-N // 128)))
    return min(SPLITS.get((N, K), wanted), -(-K // SPLIT_UNIT))


def split_width(K: int, splits: int) -> int:
    """Width of all slices of K but the last, which may be narrower or empty."""
    return -(-K // (SPLIT_UNIT * splits)) * SPLIT_UNIT


def num_parts(N: int, K: int, dtype: torch.dtype, max_rows: int) -> int:
    """Slices that the output buffer of ``linear_rows`` should have: 1 where rows are many (see there)."""
    return num_splits(N, K, dtype) if max_rows <= PARALLEL_ROWS else 1


def plan(N: int, K: int, dtype: torch.dtype, max_rows: int, *, gated: bool = False, parallel: bool = True) -> Plan:
    """Tiles for a weight [N, K] and at most ``max_rows`` rows; ``gated``: gate and up stacked, N of each.

    ``parallel``: the splits run in parallel; one after another they need a second accumulator, hence lower tiles.
    """
    if dtype == torch.float32:
        return Plan(heights=(32,), tile_n=64, tile_k=32, num_warps=4, shared=HALF, tma=False)
    tma = K % 8 == 0  # A descriptor's strides are multiples of 16 bytes.
    if max_rows <= 32:
        tile_k = 64 if gated else 128
        return Plan(heights=(32,), tile_n=64, tile_k=tile_k, num_warps=4, shared=HALF, tma=tma)
    if max_rows <= FEW_ROWS and gated:
        # 140 to 300 weight tiles: two programs a multiprocessor even out what a whole wave would leave idle.
        return Plan(heights=(32, 64, 96, 128, 160), tile_n=64, tile_k=64, num_warps=8, shared=HALF, tma=tma)
    if max_rows <= FEW_ROWS:
        # At most one program a multiprocessor (``num_splits``), so it takes all rows and all of the memory. 12 or 16
        # weight tiles of 128 would leave half of the chip idle.
        every = (32, 64, 96, 128, 160, 192, 256, 288)
        return Plan(every, tile_n=64 if N <= 2048 else 128, tile_k=64, num_warps=8, shared=FULL, tma=tma)
    # Two accumulators of 128 x 192 are 192 registers a thread; of 128 x 256 they would spill.
    heights = (64, 128, 192, 256) if parallel else (64, 128, 192)
    return Plan(heights, tile_n=64 if gated else 128, tile_k=64, num_warps=8, shared=FULL, tma=tma)
