"""One tile of a projection, and which tiles a number of rows is cut into.

K input width, N output width. In kernels BN weight rows, BM rows of x, BK of the inner dimension. The operands are
swapped, ``tile[BN, BM] = W[BN, BK] @ x[BM, BK].T``: see ``linear``.
"""

from __future__ import annotations

import triton
import triton.language as tl

START = tl.constexpr(512)
"""Inner width that takes as long as a program's beginning and end."""


@triton.jit
def _load_tile(
    source, o_row, last_row, o_k, K, ROWS: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Tile [ROWS, BK] of a matrix [*, K], zero beyond K. Rows beyond the last one are finite or not, but readable."""
    if TMA:
        return source.load([o_row, o_k])
    else:
        i_row = tl.minimum(o_row + tl.arange(0, ROWS), last_row).to(tl.int64)
        i_k = o_k + tl.arange(0, BK)
        p_tile = source + i_row[:, None] * K + i_k[None, :]  # [ROWS, BK]
        if EVEN_K:
            return tl.load(p_tile, eviction_policy=EVICT)
        else:
            return tl.load(p_tile, mask=(i_k < K)[None, :], other=0.0, eviction_policy=EVICT)


@triton.jit
def _x_of(x16, x32, x64, x128, x256, ROWS: tl.constexpr):
    """The source of x whose tiles have that many rows: a descriptor knows its tile."""
    if ROWS <= 32:
        return x16 if ROWS == 16 else x32
    elif ROWS == 64:
        return x64
    else:
        return x128 if ROWS == 128 else x256


@triton.jit
def _accumulate(
    x0, x1, w, o_m, last_m, o_n, o_up, last_n, k_begin, k_end, K,
    BM0: tl.constexpr, BM1: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Sums over k_begin <= k < k_end, each from zero in ascending order: two pieces of x by weight rows n and ``up``.

    What is not asked for (BM1 = 0, not GATED) is returned as unused zeros.
    """
    PIECE1: tl.constexpr = BM1 if BM1 > 0 else BM0
    acc0 = tl.zeros((BN, BM0), tl.float32)
    acc1 = tl.zeros((BN, PIECE1), tl.float32)
    up0 = tl.zeros((BN, BM0), tl.float32)
    up1 = tl.zeros((BN, PIECE1), tl.float32)
    # No slice is empty. Told so, the compiler lets the products of a wide tile overlap.
    tl.assume(k_end > k_begin)
    for o_k in tl.range(k_begin, k_end, BK, num_stages=STAGES):
        b_w = _load_tile(w, o_n, last_n, o_k, K, BN, BK, TMA, EVEN_K, EVICT)  # [BN, BK]
        b_x0 = _load_tile(x0, o_m, last_m, o_k, K, BM0, BK, TMA, EVEN_K, "")  # [BM0, BK]
        acc0 = tl.dot(b_w, b_x0.T, acc0, input_precision="ieee")
        if BM1 > 0:
            b_x1 = _load_tile(x1, o_m + BM0, last_m, o_k, K, BM1, BK, TMA, EVEN_K, "")  # [BM1, BK]
            acc1 = tl.dot(b_w, b_x1.T, acc1, input_precision="ieee")
        if GATED:
            b_up = _load_tile(w, o_up, last_n, o_k, K, BN, BK, TMA, EVEN_K, EVICT)  # [BN, BK]
            up0 = tl.dot(b_up, b_x0.T, up0, input_precision="ieee")
            if BM1 > 0:
                up1 = tl.dot(b_up, b_x1.T, up1, input_precision="ieee")
    return acc0, acc1, up0, up1


@triton.jit
def _end_slice(acc, total, end_k, slice_end, split_k):
    """At the end of a slice of the inner width: adds its sums to the total, and begins the next one's from zero."""
    if end_k == slice_end:
        total += acc
        acc = tl.zeros(acc.shape, tl.float32)
        slice_end += split_k
    return acc, total, slice_end


@triton.jit
def _accumulate_in_turn(
    x0, x1, w, o_m, last_m, o_n, last_n, k_begin, k_end, split_k, K,
    BM0: tl.constexpr, BM1: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Sums over slices of ``split_k`` from k_begin to k_end, each from zero in ascending order, added in order.

    One loop over all slices: with a loop a slice the first tiles of each would be waited for.
    """
    PIECE1: tl.constexpr = BM1 if BM1 > 0 else BM0
    acc0 = tl.zeros((BN, BM0), tl.float32)
    acc1 = tl.zeros((BN, PIECE1), tl.float32)
    total0 = tl.zeros((BN, BM0), tl.float32)
    total1 = tl.zeros((BN, PIECE1), tl.float32)
    tl.assume(k_end > k_begin)
    # Each piece has an end, hence a branch, of its own. With both in one the assembler lets no two products overlap.
    end0 = k_begin + split_k
    end1 = k_begin + split_k
    for o_k in tl.range(k_begin, k_end, BK, num_stages=STAGES):
        b_w = _load_tile(w, o_n, last_n, o_k, K, BN, BK, TMA, EVEN_K, EVICT)  # [BN, BK]
        b_x0 = _load_tile(x0, o_m, last_m, o_k, K, BM0, BK, TMA, EVEN_K, "")  # [BM0, BK]
        acc0 = tl.dot(b_w, b_x0.T, acc0, input_precision="ieee")
        if BM1 > 0:
            b_x1 = _load_tile(x1, o_m + BM0, last_m, o_k, K, BM1, BK, TMA, EVEN_K, "")  # [BM1, BK]
            acc1 = tl.dot(b_w, b_x1.T, acc1, input_precision="ieee")
        # Only now: a branch before the products would make each of them wait for its end.
        acc0, total0, end0 = _end_slice(acc0, total0, o_k + BK, end0, split_k)
        if BM1 > 0:
            acc1, total1, end1 = _end_slice(acc1, total1, o_k + BK, end1, split_k)
    return total0 + acc0, total1 + acc1


@triton.jit
def _store_tile(p_out, b_tile, o_m, end_m, o_n, N, BM: tl.constexpr, BN: tl.constexpr):
    i_m = o_m + tl.arange(0, BM)
    i_n = o_n + tl.arange(0, BN)
    p_tile = p_out + i_m.to(tl.int64)[None, :] * N + i_n[:, None]  # [BN, BM]
    tl.store(p_tile, b_tile.to(p_out.dtype.element_ty), mask=(i_m < end_m)[None, :] & (i_n < N)[:, None])


@triton.jit
def _silu_mul(b_gate, b_up, dtype: tl.constexpr):
    gate = b_gate.to(dtype).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * b_up.to(dtype).to(tl.float32)


@triton.jit
def run_tile(
    x16, x32, x64, x128, x256, w, p_out, o_m, end_m, last_m, o_n, i_split, in_turn, split_k, N, K, part_stride,
    HEIGHT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, SEQUENTIAL: tl.constexpr,
    ROOM: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """One tile of HEIGHT rows from row o_m on, of which those before end_m are stored: a split, or several in turn."""
    BM0: tl.constexpr = 256 if HEIGHT >= 256 else 128 if HEIGHT >= 128 else 64 if HEIGHT >= 64 else 32
    BM1: tl.constexpr = HEIGHT - BM0
    FITTING: tl.constexpr = ROOM // ((HEIGHT + (2 * BN if GATED else BN)) * BK)
    STAGES: tl.constexpr = FITTING if FITTING < 8 else 8
    x0 = _x_of(x16, x32, x64, x128, x256, BM0)
    x1 = _x_of(x16, x32, x64, x128, x256, BM1 if BM1 > 0 else BM0)
    last_n = (2 * N if GATED else N) - 1
    k_begin = i_split * split_k
    if SEQUENTIAL:
        acc0, acc1 = _accumulate_in_turn(
            x0, x1, w, o_m, last_m, o_n, last_n, k_begin, tl.minimum(k_begin + in_turn * split_k, K), split_k, K,
            BM0, BM1, BN, BK, STAGES, TMA, EVEN_K, EVICT,
        )  # fmt: skip
    else:
        acc0, acc1, up0, up1 = _accumulate(
            x0, x1, w, o_m, last_m, o_n, N + o_n, last_n, k_begin, tl.minimum(k_begin + split_k, K), K,
            BM0, BM1, BN, BK, GATED, STAGES, TMA, EVEN_K, EVICT,
        )  # fmt: skip
    if GATED:
        acc0 = _silu_mul(acc0, up0, p_out.dtype.element_ty)
        acc1 = _silu_mul(acc1, up1, p_out.dtype.element_ty)
    p_out += i_split.to(tl.int64) * part_stride
    _store_tile(p_out, acc0, o_m, end_m, o_n, N, BM0, BN)
    if BM1 > 0:
        _store_tile(p_out, acc1, o_m + BM0, end_m, o_n, N, BM1, BN)


@triton.jit
def best_cut(
    rows, columns, K, splits, split_k, side_by_side_rows,
    HEIGHTS: tl.constexpr, COSTS: tl.constexpr, SLOTS: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Height of the row tiles and number of parallel splits that end soonest, ``columns`` tiles of the weight wide.

    Programs run in waves of SLOTS; a step over k of tiles of HEIGHTS[i] rows takes COSTS[i]. Partial sums side by side
    are read once more each, which is taken for an eighth of their time.
    """
    TALL: tl.constexpr = HEIGHTS[len(HEIGHTS) - 1]
    height, parallel = TALL, 1
    best = tl.cdiv(tl.cdiv(rows, TALL) * columns, SLOTS) * COSTS[len(COSTS) - 1] * (K + START)
    for i in tl.static_range(len(HEIGHTS)):
        tiles = tl.cdiv(rows, HEIGHTS[i]) * columns
        cost = tl.cdiv(tiles, SLOTS) * COSTS[i] * (K + START)
        better = (cost < best) & (tiles <= tl.num_programs(0))
        best, height = tl.where(better, cost, best), tl.where(better, HEIGHTS[i], height)
        parallel = tl.where(better, 1, parallel)
        if COUNTED:
            cost = tl.cdiv(tiles * splits, SLOTS) * COSTS[i] * (split_k + START)
            cost += cost // 8
            better = (cost < best) & (tiles * splits <= tl.num_programs(0)) & (rows <= side_by_side_rows)
            best, height = tl.where(better, cost, best), tl.where(better, HEIGHTS[i], height)
            parallel = tl.where(better, splits, parallel)
    return height, parallel
