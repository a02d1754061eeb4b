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
PARALLEL_ROWS = 320
"""Up to this room splits run in parallel. Beyond it the tiles alone nearly fill the chip, and what parallel splits
still win is less than their readers lose: the gate reads all partial sums of every position."""
PREFETCH = 8 << 20
"""Bytes of weights that a launch asks for before it waits: what memory delivers in about two microseconds, while the
gate or the attention before still runs. The second-level cache holds 50 MB."""
PIECES = (16, 32, 64, 128, 256)
"""Rows of x in one instruction's tile."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiles of one launch: ``tile_n`` rows of the weight (of gate and of up each) by one of ``heights`` rows of x."""

    heights: tuple[int, ...]
    """Rows of x that one program may take, ascending; the device picks by the count. Each is a power of two from 32 to
    256, or that and a smaller one from 16 on (then they are two accumulators over one read of the weight)."""
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
    prefetch: int = 0
    """Bytes of the weight to ask for before waiting for x (with TMA only)."""

    @property
    def tall(self) -> int:
        return self.heights[-1]


HALF, FULL = 108 * 1024, 216 * 1024
"""Shared memory for two programs on a multiprocessor, and for one; the chip has 228 KB, 1 KB a program reserved."""


def num_splits(N: int, K: int, dtype: torch.dtype) -> int:
    """Partial sums of a weight [N, K]: enough for about one program a multiprocessor with 128 weight rows each.

    Output projections of wide models: two. They run over every position, all of whose partial sums the gate reads
    again, its parent's too: that costs more than the last few percent of the product.
    """
    if dtype == torch.float32:
        return -(-K // split_width(K, 2))  # For tests alone: it splits too, so that they see what bfloat16 does.
    is_wide_output = 3072 <= N <= K < 2 * N
    wanted = 2 if is_wide_output else min(MAX_SPLITS, max(1, NUM_SMS // -(-N // 128)))
    return -(-K // split_width(K, SPLITS.get((N, K), wanted)))


def split_width(K: int, splits: int) -> int:
    """Width of all slices of K but the last, which may be narrower; not empty for what ``num_splits`` returns."""
    return -(-K // (SPLIT_UNIT * splits)) * SPLIT_UNIT


def num_parts(N: int, K: int, dtype: torch.dtype, max_rows: int) -> int:
    """Slices that the output buffer of ``linear_rows`` should have: 1 where rows are many (see there)."""
    return num_splits(N, K, dtype) if max_rows <= PARALLEL_ROWS else 1


def plan(N: int, K: int, dtype: torch.dtype, max_rows: int, *, gated: bool = False, parallel: bool = True) -> Plan:
    """Tiles for a weight [N, K] and at most ``max_rows`` rows; ``gated``: gate and up stacked, N of each.

    ``parallel``: the splits run in parallel; one after another they need a second accumulator, hence narrower tiles.
    """
    if dtype == torch.float32:
        return Plan(heights=(32,), tile_n=64, tile_k=32, num_warps=4, shared=HALF, tma=False)
    tma = K % 8 == 0  # A descriptor's strides are multiples of 16 bytes.
    # The kernel before the down projection reads weights itself: memory does not idle, and what came early would have
    # left the cache again.
    prefetch = PREFETCH if gated or K < 2 * N else 0
    if max_rows <= 32:
        tile_k = 64 if gated else 128
        return Plan((32,), tile_n=64, tile_k=tile_k, num_warps=4, shared=HALF, tma=tma, prefetch=prefetch)
    if max_rows <= FEW_ROWS:
        # Two programs of one warp group on a multiprocessor: one multiplies while the other waits. 80 rows serve nine
        # branches that are 85% folded, 144 twice over nine that are not.
        every = (32, 64, 80, 96, 128, 144, 160)
        return Plan(every, tile_n=64, tile_k=64, num_warps=4, shared=HALF, tma=tma, prefetch=prefetch)
    if gated:
        return Plan((64, 96, 128), tile_n=64, tile_k=64, num_warps=8, shared=HALF, tma=tma, prefetch=prefetch)
    if parallel:
        return Plan((64, 96, 128), tile_n=128, tile_k=64, num_warps=8, shared=HALF, tma=tma, prefetch=prefetch)
    heights = (64, 128, 192, 256)
    return Plan(heights, tile_n=64, tile_k=64, num_warps=8, shared=FULL, tma=tma, prefetch=prefetch)


def prefetch_depth(tiles: Plan, columns: int, width: int, gated: bool) -> int:
    """How much of the inner width, ``width`` in a program, each of ``columns`` programs should ask for: bfloat16."""
    rows = (2 if gated else 1) * tiles.tile_n
    if not tiles.tma or rows > 32 * tiles.num_warps:
        return 0
    return min(tiles.prefetch // (2 * rows * columns), width) // 64 * 64
