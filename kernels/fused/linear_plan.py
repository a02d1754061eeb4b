"""How a projection is cut into tiles: by the shape of its weight, its dtype and the room for rows.

R rows, K input width, N output width (for a gated weight: of gate and of up alone).

What a plan may choose cannot change a row's bits: every output element is one chain of tensor-core instructions in
ascending order of k, 16 at a time, from zero; tile sizes, warps and stages only decide who computes it and when. What
does change bits, the cuts of K, is ``num_splits`` and ``split_width``, and those know neither rows nor plans.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.fused.layout import Parts

NUM_SMS = 132
"""Multiprocessors of the chip the plans are made for (H100 and H200 SXM). Fixed, so that bits are the same on all."""
SPLIT_UNIT = 128
"""Cuts of K fall on multiples of this, which every ``tile_k`` divides."""
MAX_SPLITS = 4
"""More partial sums would cost their readers more than they give: each is a float32 copy of the output."""
SPLITS = {(1536, 8960): 5, (5120, 5120): 3, (5120, 16384): 3}
"""Exceptions by (N, K), whose tiles then fill the chip evenly: 24 of 64 times 5, 40 of 128 times 3."""
PARALLEL_ROWS = 320
"""Up to this room a step is one slot: weights are read once or twice, memory is the limit, and splits always run in
parallel. Beyond it the number of rows decides: tiles may fill the chip alone, and the gate reads all partial sums of
every position."""
SIDE_BY_SIDE_ROWS = 640
"""Beyond ``PARALLEL_ROWS``, most rows whose partial sums may stand side by side; more fill the chip anyway."""
PREFETCH = 8 << 20
"""Bytes of weights that a launch asks for before it waits: what memory delivers in about two microseconds, while the
gate or the attention before still runs. The second-level cache holds 50 MB."""
SHORT_SLICE = 512
"""Slices of K up to this width, if several, end so often that two programs on a multiprocessor are faster than one of
twice the size: one multiplies while the other adds its sums up, begins or stores."""
SHORT_GATED = 2048
"""The same for the inner width of gate and up: at 1536 two are up to 6% faster, at 4096 up to 12% slower."""
COSTS = (44, 57, 90)
"""Tenths of a nanosecond that a step over k takes on an H200: tiles of 128 weight rows by 64, 128, 192 rows of x, one
on each multiprocessor. 96 rows, in two pieces, would take 63: more than 128 in one."""
PAIR_COSTS = (70, 97)
"""The same for 64 and 96 rows, two on each multiprocessor."""
GATED_COSTS = (71, 108)
"""Gate and up, 128 rows of each by 64 and 128 rows of x. 192 would take 164, hence more a row, and all registers."""
GATED_PAIR_COSTS = (64, 95, 124)
"""Gate and up, 64 rows of each by 64, 128 and 160 rows, two on each multiprocessor. 96 would take 89, 144 would 110."""
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
    slots: int = 0
    """Programs that run at a time; the device then picks the height that fills them best. 0: the lowest that will do.
    """
    costs: tuple[int, ...] = ()
    """What a step over k takes by height where all slots are in use, in any unit. Empty: see ``step_costs``."""

    @property
    def tall(self) -> int:
        return self.heights[-1]

    @property
    def step_costs(self) -> tuple[int, ...]:
        """Where nothing was measured about as much as the tile's rows, and its weights for 32 more."""
        return self.costs or tuple(height + 32 for height in self.heights)


THIRD, HALF, FULL = 72 * 1024, 108 * 1024, 216 * 1024
"""Shared memory for three programs on a multiprocessor, for two and for one; it has 228 KB, 1 KB a program reserved."""


def num_splits(N: int, K: int, dtype: torch.dtype) -> int:
    """Partial sums of a weight [N, K]: enough for about one program a multiprocessor with 128 weight rows each.

    Output and down projections of wide models: two. The gate reads all partial sums of every position, and of its
    parent's too: that costs more than the last few percent of the product.
    """
    if dtype == torch.float32:
        return -(-K // split_width(K, 2))  # For tests alone: it splits too, so that they see what bfloat16 does.
    if (N, K) in SPLITS:
        wanted = SPLITS[N, K]
    elif 3072 <= N <= K:
        wanted = 2
    else:
        wanted = min(MAX_SPLITS, max(1, NUM_SMS // -(-N // 128)))
    return -(-K // split_width(K, wanted))


def split_width(K: int, splits: int) -> int:
    """Width of all slices of K but the last, which may be narrower; not empty for what ``num_splits`` returns."""
    return -(-K // (SPLIT_UNIT * splits)) * SPLIT_UNIT


def part_rows(max_rows: int) -> int:
    """Rows from one partial sum to the next in a buffer for ``max_rows`` rows."""
    return max_rows if max_rows <= PARALLEL_ROWS else min(SIDE_BY_SIDE_ROWS, max_rows)


def parts_size(N: int, K: int, dtype: torch.dtype, max_rows: int) -> int:
    """Elements of a buffer for the partial sums of a weight [N, K] and at most that many rows."""
    splits = num_splits(N, K, dtype)
    return ((splits - 1) * part_rows(max_rows) + max_rows) * N


def make_parts(buffer: torch.Tensor, used_1: torch.Tensor, N: int, K: int, dtype: torch.dtype, max_rows: int) -> Parts:
    """Places in a float32 buffer of at least ``parts_size``; ``used_1`` is used where the number of rows decides.

    Sums that are counted lie ``SIDE_BY_SIDE_ROWS`` apart: one sum of more rows reaches into the next one's place.
    """
    splits = num_splits(N, K, dtype)
    values = buffer.as_strided((splits, max_rows, N), (part_rows(max_rows) * N, N, 1))
    return Parts(values, used_1 if splits > 1 and max_rows > PARALLEL_ROWS else None)


def plan(N: int, K: int, dtype: torch.dtype, max_rows: int, *, gated: bool = False) -> Plan:
    """Tiles for a weight [N, K] and at most ``max_rows`` rows; ``gated``: gate and up stacked, N of each."""
    if dtype == torch.float32:
        slots = NUM_SMS if max_rows > PARALLEL_ROWS else 0
        return Plan(heights=(32,), tile_n=64, tile_k=32, num_warps=4, shared=HALF, tma=False, slots=slots)
    tma = K % 8 == 0  # A descriptor's strides are multiples of 16 bytes.
    # The kernel before the down projection reads weights itself: memory does not idle, and what came early would have
    # left the cache again.
    prefetch = PREFETCH if gated or K < 2 * N else 0
    splits = 1 if gated else num_splits(N, K, dtype)
    # A long inner width and at most a program a multiprocessor: all of its memory for one deep pipeline.
    is_deep = not gated and K >= 2 * N and -(-N // 64) * splits <= NUM_SMS
    # Two programs a multiprocessor would leave a few tiles to come after all others.
    has_rest = gated and 2 * NUM_SMS < -(-N // 64) <= 3 * NUM_SMS
    shared = FULL if is_deep else HALF
    if max_rows <= 32:
        shared = THIRD if has_rest else shared
        tile_k = 64 if gated else 128
        return Plan((32,), tile_n=64, tile_k=tile_k, num_warps=4, shared=shared, tma=tma, prefetch=prefetch)
    # Else two programs of one warp group on a multiprocessor: one multiplies while the other waits. 80 rows serve nine
    # branches that are 85% folded, 144 twice or 288 once nine that are not.
    heights = (32, 64, 80, 96, 128, 144, 160)
    few = Plan(heights, tile_n=64, tile_k=64, num_warps=4, shared=shared, tma=tma, prefetch=prefetch)
    if max_rows <= PARALLEL_ROWS:
        # Tiles of 128 by 288 that nearly fill the chip read least, and weights once.
        is_wide = not gated and not is_deep and 4 * NUM_SMS <= 5 * -(-N // 128) * splits <= 5 * NUM_SMS
        if is_wide:
            return replace(few, heights=(*heights, 288), tile_n=128, num_warps=8, shared=FULL)
        if has_rest:
            return replace(few, shared=FULL)
        return replace(few, heights=(*heights, 288)) if is_deep else few
    in_pairs = K <= SHORT_GATED if gated else splits > 1 and split_width(K, splits) <= SHORT_SLICE
    return _of_many_rows(gated, tma, in_pairs)


def _of_many_rows(gated: bool, tma: bool, in_pairs: bool) -> Plan:
    """Tiles whose heights the number of rows decides; ``in_pairs``: two programs reside on a multiprocessor."""
    alone = Plan((64, 128), tile_n=128, tile_k=64, num_warps=8, shared=FULL, tma=tma, slots=NUM_SMS)
    paired = replace(alone, shared=HALF, slots=2 * NUM_SMS)
    if gated and in_pairs:
        return replace(paired, heights=(64, 128, 160), tile_n=64, num_warps=4, costs=GATED_PAIR_COSTS)
    if gated:
        return replace(alone, costs=GATED_COSTS)
    if in_pairs:
        return replace(paired, heights=(64, 96), costs=PAIR_COSTS)
    return replace(alone, heights=(64, 128, 192), costs=COSTS)


def prefetch_depth(tiles: Plan, columns: int, width: int, gated: bool) -> int:
    """How much of the inner width, ``width`` in a program, each of ``columns`` programs should ask for: bfloat16."""
    rows = (2 if gated else 1) * tiles.tile_n
    if not tiles.tma or rows > 32 * tiles.num_warps:
        return 0
    return min(tiles.prefetch // (2 * rows * columns), width) // 64 * 64
