"""Asking for weights before they are needed.

BN weight rows, N output width (gated weights: of gate and of up each), K input width.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch_tile(
    p_weight, o_n, k_begin, N, K, DEPTH: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """Asks for DEPTH of the inner width of a weight tile to come to the L2 cache: one request a thread."""
    ROWS: tl.constexpr = 2 * BN if GATED else BN
    PIECES_A_ROW: tl.constexpr = THREADS // ROWS
    WIDTH: tl.constexpr = DEPTH // PIECES_A_ROW
    i = tl.arange(0, THREADS)
    i_n = i // PIECES_A_ROW % BN
    i_row = tl.minimum(o_n + i_n, N - 1) + i // (PIECES_A_ROW * BN) * N
    i_k = tl.minimum(k_begin + i % PIECES_A_ROW * WIDTH, K - WIDTH)
    p = p_weight + i_row.to(tl.int64) * K + i_k
    num_bytes = WIDTH * (p_weight.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [p.to(tl.int64), i * 0 + num_bytes],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
