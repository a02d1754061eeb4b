"""First pass of the LM head: logits of a tile of the vocabulary, reduced to what ``head_decide`` merges.

R rows of a slice, V vocabulary, N tiles of BV tokens, E hidden width, A branches of T positions, J kept tokens.
Weights fill the M side of the tensor cores whatever the number of rows, which only widens N: each element's sum over E,
and each row's sums over a tile, run in the same order in every body (see ``linear_plan``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.fused.head_plan import PIECES, HeadPlan
from kernels.fused.head_scratch import VOCAB_TILE, HeadScratch
from kernels.fused.launch import overlapped, wait_for_inputs
from kernels.fused.layout import HeadRows, Predictions
from kernels.fused.linear_plan import NUM_SMS

LOG2_E = tl.constexpr(1.4426950408889634)
_CLEAR = 256
"""Answers that a program resets at a time: one a thread."""


def logit_tiles(
    hidden_DE: torch.Tensor,
    weight_VE: torch.Tensor,
    rows: HeadRows,
    mask_id: int,
    num_top: int,
    keep: bool,
    start: int,
    scratch: HeadScratch,
    out: Predictions,
    tiles: HeadPlan,
) -> None:
    """Fills ``scratch`` for the slice of rows from ``start`` on: logits where ``keep``, else the tokens of the best.

    The first slice resets the answers.
    """
    (num_rows, width), vocab = hidden_DE.shape, weight_VE.shape[0]
    num_branches, block = out.token_AT.shape
    num_tiles = triton.cdiv(vocab, VOCAB_TILE)
    room = min(scratch.num_rows, num_rows - start)
    x_by_rows: list[object] = [hidden_DE] * len(PIECES)
    weight: object = weight_VE
    if tiles.tma:
        x_by_rows = [TensorDescriptor.from_tensor(hidden_DE, [piece, tiles.tile_k]) for piece in PIECES]
        weight = TensorDescriptor.from_tensor(weight_VE, [VOCAB_TILE, tiles.tile_k])
    programs = min(NUM_SMS, triton.cdiv(room, tiles.heights[-1]) * num_tiles)
    _logit_tiles_kernel[(programs,)](
        *x_by_rows,
        weight,
        weight_VE,
        rows.count_1,
        start + room,
        scratch.logits_RV,
        scratch.best_RN,
        scratch.at_RN,
        scratch.sum_RN,
        scratch.mask_logit_R,
        out.confidence_AT,
        out.top_logprob_ATJ,
        out.invalid_A,
        start,
        num_branches * block if start == 0 else 0,
        num_branches,
        E=width,
        V=vocab,
        MASK=mask_id,
        NUM_TILES=num_tiles,
        KEEP=keep,
        J=num_top,
        CLEAR=_CLEAR,
        HEIGHTS=tiles.heights,
        BV=VOCAB_TILE,
        BK=tiles.tile_k,
        ROOM=tiles.shared // weight_VE.element_size(),
        TMA=tiles.tma,
        FLATTEN=tiles.flatten,
        LINES=tiles.prefetched_lines if weight_VE.is_cuda else 0,
        num_warps=8,
        maxnreg=tiles.max_registers,
        **overlapped(hidden_DE),
    )


@triton.jit
def _prefetch(p_weight, i_tile, E: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, LINES: tl.constexpr):
    """Brings the first LINES lines of a tile's rows from HBM to L2 while something else runs."""
    i_line = tl.arange(0, BV * LINES)
    i_v = tl.minimum(i_tile * BV + i_line // LINES, V - 1)
    p_line = p_weight + i_v.to(tl.int64) * E + i_line % LINES * 64
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [p_line], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _load_rows(source, o_row, last_row, o_k, ROWS: tl.constexpr, BK: tl.constexpr, E: tl.constexpr, TMA: tl.constexpr):
    """Rows [ROWS, BK] of a matrix [*, E], zero beyond E; rows beyond the last one hold anything."""
    if TMA:
        return source.load([o_row, o_k])
    else:
        i_row = tl.minimum(o_row + tl.arange(0, ROWS), last_row)
        i_k = o_k + tl.arange(0, BK)[None, :]
        return tl.load(source + i_row[:, None] * E + i_k, mask=i_k < E, other=0.0)


@triton.jit
def _piece_of(x32, x64, x128, x256, ROWS: tl.constexpr):
    """The source of hidden states whose tiles have that many rows: a descriptor knows its tile."""
    if ROWS <= 32:
        return x32
    elif ROWS == 64:
        return x64
    elif ROWS == 128:
        return x128
    else:
        return x256


@triton.jit(do_not_specialize=["end", "start", "num_answers", "num_branches"])
def _logit_tiles_kernel(
    x32,
    x64,
    x128,
    x256,
    weight,
    p_weight,
    p_count,
    end,
    p_logits,
    p_best,
    p_at,
    p_sum,
    p_mask_logit,
    p_confidence,
    p_logprob,
    p_invalid,
    start,
    num_answers,
    num_branches,
    E: tl.constexpr,
    V: tl.constexpr,
    MASK: tl.constexpr,
    NUM_TILES: tl.constexpr,
    KEEP: tl.constexpr,
    J: tl.constexpr,
    CLEAR: tl.constexpr,
    HEIGHTS: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    ROOM: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    LINES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As many programs as multiprocessors; they deal out the pairs of a vocabulary tile and a row tile.

    Row tiles of one vocabulary tile run side by side, so its weights come from HBM once and else from L2. They are
    equally high, as low as their number allows. ``weight`` and ``x*``: descriptors with TMA, else pointers.
    """
    if LINES > 0:
        _prefetch(p_weight, tl.program_id(0), E, V, BV, LINES)
    wait_for_inputs(OVERLAP)
    # The first slice resets the answers: a launch less. In the others there are none to reset.
    num_values = num_answers * J if J > 1 else num_answers
    for first in tl.range(tl.program_id(0) * CLEAR, num_values, tl.num_programs(0) * CLEAR):
        i_clear = first + tl.arange(0, CLEAR)
        tl.store(p_confidence + i_clear, float("-inf"), mask=i_clear < num_answers)
        tl.store(p_invalid + i_clear, 0, mask=i_clear < num_branches)
        if J > 0:
            tl.store(p_logprob + i_clear, float("-inf"), mask=i_clear < num_values)
    stop = tl.minimum(tl.load(p_count), end)
    tiles_m = tl.cdiv(tl.maximum(stop - start, 0), HEIGHTS[len(HEIGHTS) - 1])
    needed = tl.cdiv(stop - start, tl.maximum(tiles_m, 1))
    for i in tl.static_range(len(HEIGHTS)):
        if (needed > (HEIGHTS[i - 1] if i > 0 else 0)) & (needed <= HEIGHTS[i]):
            _run_tiles(
                x32, x64, x128, x256, weight, p_weight, p_logits, p_best, p_at, p_sum, p_mask_logit, start, stop,
                tiles_m, E, V, MASK, NUM_TILES, KEEP, HEIGHTS[i], BV, BK, ROOM, TMA, FLATTEN, LINES,
            )  # fmt: skip


@triton.jit
def _run_tiles(
    x32,
    x64,
    x128,
    x256,
    weight,
    p_weight,
    p_logits,
    p_best,
    p_at,
    p_sum,
    p_mask_logit,
    start,
    stop,
    tiles_m,
    E: tl.constexpr,
    V: tl.constexpr,
    MASK: tl.constexpr,
    NUM_TILES: tl.constexpr,
    KEEP: tl.constexpr,
    HEIGHT: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    ROOM: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    LINES: tl.constexpr,
):
    BM0: tl.constexpr = 256 if HEIGHT >= 256 else 128 if HEIGHT >= 128 else 64 if HEIGHT >= 64 else 32
    BM1: tl.constexpr = HEIGHT - BM0
    FITTING: tl.constexpr = ROOM // ((HEIGHT + BV) * BK)
    STAGES: tl.constexpr = FITTING if FITTING < 8 else 8
    x0 = _piece_of(x32, x64, x128, x256, BM0)
    x1 = _piece_of(x32, x64, x128, x256, BM1 if BM1 > 0 else BM0)
    for i in tl.range(tl.program_id(0), tiles_m * NUM_TILES, tl.num_programs(0), flatten=FLATTEN, num_stages=STAGES):
        i_tile = i // tiles_m
        first = start + i % tiles_m * HEIGHT
        b_logits0 = tl.zeros([BV, BM0], tl.float32)
        b_logits1 = tl.zeros([BV, BM1 if BM1 > 0 else BM0], tl.float32)
        for o_k in tl.range(0, E, BK, num_stages=STAGES):
            b_w = _load_rows(weight, i_tile * BV, V - 1, o_k, BV, BK, E, TMA)  # [BV, BK]
            b_x0 = _load_rows(x0, first, stop - 1, o_k, BM0, BK, E, TMA)  # [BM0, BK]
            b_logits0 = tl.dot(b_w, b_x0.T, b_logits0, input_precision="ieee")
            if BM1 > 0:
                b_x1 = _load_rows(x1, first + BM0, stop - 1, o_k, BM1, BK, E, TMA)  # [BM1, BK]
                b_logits1 = tl.dot(b_w, b_x1.T, b_logits1, input_precision="ieee")
        if not FLATTEN and LINES > 0:
            _prefetch(p_weight, (i + tl.num_programs(0)) // tiles_m, E, V, BV, LINES)
        if BM0 == 256:  # in halves, else registers spill
            b_half0, b_half1 = tl.split(tl.permute(tl.reshape(b_logits0, [BV, 2, BM0 // 2]), [0, 2, 1]))
            _reduce_tile(
                b_half0, p_logits, p_best, p_at, p_sum, p_mask_logit, start, first, stop, i_tile,
                V, MASK, NUM_TILES, KEEP, BM0 // 2, BV,
            )  # fmt: skip
            _reduce_tile(
                b_half1, p_logits, p_best, p_at, p_sum, p_mask_logit, start, first + BM0 // 2, stop, i_tile,
                V, MASK, NUM_TILES, KEEP, BM0 // 2, BV,
            )  # fmt: skip
        else:
            _reduce_tile(
                b_logits0, p_logits, p_best, p_at, p_sum, p_mask_logit, start, first, stop, i_tile,
                V, MASK, NUM_TILES, KEEP, BM0, BV,
            )  # fmt: skip
        if BM1 > 0:
            _reduce_tile(
                b_logits1, p_logits, p_best, p_at, p_sum, p_mask_logit, start, first + BM0, stop, i_tile,
                V, MASK, NUM_TILES, KEEP, BM1, BV,
            )  # fmt: skip


@triton.jit
def _reduce_tile(
    b_logits,
    p_logits,
    p_best,
    p_at,
    p_sum,
    p_mask_logit,
    start,
    first,
    stop,
    i_tile,
    V: tl.constexpr,
    MASK: tl.constexpr,
    NUM_TILES: tl.constexpr,
    KEEP: tl.constexpr,
    BM: tl.constexpr,
    BV: tl.constexpr,
):
    i_v = i_tile * BV + tl.arange(0, BV)
    i_d = first + tl.arange(0, BM)
    live = i_d < stop
    i_r = i_d - start
    if i_tile == MASK // BV:
        tl.store(p_mask_logit + i_r, tl.sum(tl.where((i_v == MASK)[:, None], b_logits, 0.0), axis=0), mask=live)
    if (i_tile == MASK // BV) | (i_tile == V // BV):
        b_logits = tl.where(((i_v < V) & (i_v != MASK))[:, None], b_logits, float("-inf"))
    if KEEP:
        # [BV, BM] of the transposed array: tokens are contiguous.
        tl.store(p_logits + i_r[None, :] * V + i_v[:, None], b_logits, mask=live[None, :] & (i_v < V)[:, None])
    o_stat = i_r * NUM_TILES + i_tile
    # NaN takes no part in the maximum, but reaches the sum.
    b_best = tl.max(b_logits, axis=0)  # [BM]
    b_best = tl.where(b_best == b_best, b_best, float("-inf"))
    tl.store(p_best + o_stat, b_best, mask=live)
    if not KEEP:
        # Where logits are kept, ``decide_rows`` finds the token in them: a third of the reductions less.
        b_at = tl.min(tl.where(b_logits == b_best[None, :], i_v[:, None], V - 1), axis=0)
        tl.store(p_at + o_stat, b_at, mask=live)
    # A tile of the mask id alone has no finite logit: an offset of 0 makes its sum 0, not NaN.
    b_offset = tl.where(b_best == float("-inf"), 0.0, b_best)
    # exp2 flushes what float32 holds only denormally; exp spends three instructions an element on it.
    tl.store(p_sum + o_stat, tl.sum(tl.exp2((b_logits - b_offset[None, :]) * LOG2_E), axis=0), mask=live)
