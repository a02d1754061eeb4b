"""The LM head: logits of compact rows to the chosen token, its confidence and the top J, streaming over the vocabulary.

D head rows, E hidden width, V vocabulary, N tiles of the vocabulary, J kept tokens, A branches of T positions.
A slice of rows takes two launches (up to four where tokens are drawn): ``_logit_tiles`` multiplies and reduces each
vocabulary tile, ``decide_rows`` merges the tiles of a row in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fused.head_decide import decide_rows
from kernels.fused.head_scratch import VOCAB_TILE, HeadScratch
from kernels.fused.layout import HeadRows, Predictions, Sampling
from kernels.fused.sampling import draw_reference, draw_rows
from kernels.linear import linear_rows


def head_rows(
    hidden_DE: torch.Tensor,
    weight_VE: torch.Tensor,
    rows: HeadRows,
    sampling: Sampling,
    mask_id: int,
    num_top: int,
    plain_confidence: bool,
    sampled: bool,
    limited: bool,
    scratch: HeadScratch,
    out: Predictions,
) -> None:
    """Decides a token for each of the first ``rows.count`` rows of normed hidden states and scatters the answers.

    Logits are float32, never rounded. Greedy rows take the largest, the lowest token of equals; where ``sampled``,
    rows with a temperature above 0 that are not marked greedy take the largest under Gumbel noise; where ``limited``,
    inside top-k and top-p. Confidence of a drawn token: its plain softmax probability where ``plain_confidence``, else
    its probability after temperature, top-k and top-p. The mask id counts in the softmax, but is never chosen nor kept.
    ``out``: confidence, the log-probabilities and ``invalid`` are reset here; other answers are left where no row asks.
    """
    num_rows, width = hidden_DE.shape
    vocab = weight_VE.shape[0]
    assert all(x.is_contiguous() for x in (hidden_DE, weight_VE, out.top_token_ATJ, out.top_logprob_ATJ))
    assert num_top < vocab
    num_branches, block = out.token_AT.shape
    num_tiles = triton.cdiv(vocab, VOCAB_TILE)
    exact = weight_VE.dtype == torch.float32
    # One body for float32: its CUDA-core layouts, and so the order of sums, would differ from size to size.
    row_tile = 32 if exact else 128
    grid = (triton.cdiv(min(scratch.num_rows, num_rows), row_tile), num_tiles)
    clear = triton.next_power_of_2(triton.cdiv(num_branches * block * max(num_top, 1), grid[0] * grid[1]))
    assert scratch.num_rows * max(vocab, num_tiles) < 2**31
    for start in range(0, num_rows, scratch.num_rows):
        _logit_tiles[grid](
            hidden_DE,
            weight_VE,
            rows.count_1,
            min(start + scratch.num_rows, num_rows),
            scratch.logits_RV,
            scratch.best_RN,
            scratch.at_RN,
            scratch.sum_RN,
            scratch.mask_logit_R,
            out.confidence_AT,
            out.top_logprob_ATJ,
            out.invalid_A,
            start,
            E=width,
            V=vocab,
            MASK=mask_id,
            NUM_TILES=num_tiles,
            KEEP=num_top > 0 or sampled,
            NUM_AT=num_branches * block if start == 0 else 0,
            NUM_A=num_branches,
            J=num_top,
            CLEAR=clear,
            ROW_TILE=row_tile,
            BV=VOCAB_TILE,
            BK=32 if exact else 64,
            num_warps=8,
            # Two programs an SM: one's epilogue hides behind the other's products. What spills does so in the epilogue.
            maxnreg=128,
        )
        if sampled:
            draw_rows(rows, sampling, start, vocab, plain_confidence, limited, scratch)
        decide_rows[(min(scratch.num_rows, num_rows - start),)](
            rows.count_1,
            rows.target_D,
            rows.slot_D,
            rows.greedy_D,
            sampling.temperature_S,
            scratch.logits_RV,
            scratch.best_RN,
            scratch.at_RN,
            scratch.sum_RN,
            scratch.mask_logit_R,
            scratch.value_RC,
            scratch.token_RC,
            scratch.mass_RC,
            out.token_AT,
            out.confidence_AT,
            out.top_token_ATJ,
            out.top_logprob_ATJ,
            out.next_AT,
            out.invalid_A,
            start,
            V=vocab,
            NUM_TILES=num_tiles,
            NT=triton.next_power_of_2(num_tiles),
            NUM_AT=num_branches * block,
            T=block,
            J=num_top,
            JP=triton.next_power_of_2(max(num_top, 1)),
            C=scratch.value_RC.shape[1],
            SAMPLED=sampled,
            PLAIN=plain_confidence,
            BV=VOCAB_TILE,
            num_warps=4,
        )


def head_rows_reference(
    hidden_DE: torch.Tensor,
    weight_VE: torch.Tensor,
    rows: HeadRows,
    sampling: Sampling,
    mask_id: int,
    num_top: int,
    plain_confidence: bool,
    sampled: bool,
    limited: bool,
    scratch: HeadScratch,
    out: Predictions,
) -> None:
    """``head_rows`` in plain torch. Of ``scratch`` only the number of rows is used."""
    out.confidence_AT.fill_(-torch.inf)
    out.top_logprob_ATJ.fill_(-torch.inf)
    out.invalid_A.zero_()
    num_at, block = out.token_AT.numel(), out.token_AT.shape[1]
    count, weight_VE = int(rows.count_1), weight_VE.float()
    for start in range(0, count, scratch.num_rows):
        at = slice(start, min(start + scratch.num_rows, count))
        logits_RV = linear_rows(hidden_DE[at].float(), weight_VE)
        total_R = logits_RV.logsumexp(-1)
        logits_RV[:, mask_id] = -torch.inf
        top_RJ, token_RJ = (x[:, : max(num_top, 1)] for x in logits_RV.sort(dim=-1, descending=True, stable=True))
        token_R, confidence_R = token_RJ[:, 0].clone(), (top_RJ[:, 0] - total_R).exp()
        if sampled:
            draw_reference(logits_RV, total_R, rows, sampling, at, plain_confidence, limited, token_R, confidence_R)
        target_R = rows.target_D[at].long()
        out.invalid_A[target_R[~total_R.isfinite()] % num_at // block] = 1
        here, after = target_R < num_at, target_R >= num_at
        target = target_R[here]
        out.token_AT.view(-1)[target] = token_R[here]
        out.confidence_AT.view(-1)[target] = confidence_R[here]
        if num_top:
            out.top_token_ATJ.view(num_at, num_top)[target] = token_RJ[here]
            out.top_logprob_ATJ.view(num_at, num_top)[target] = (top_RJ - total_R[:, None])[here]
        out.next_AT.view(-1)[target_R[after] - num_at] = token_R[after]


@triton.jit
def _logit_tiles(
    p_hidden,
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
    E: tl.constexpr,
    V: tl.constexpr,
    MASK: tl.constexpr,
    NUM_TILES: tl.constexpr,
    KEEP: tl.constexpr,
    NUM_AT: tl.constexpr,
    NUM_A: tl.constexpr,
    J: tl.constexpr,
    CLEAR: tl.constexpr,
    ROW_TILE: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
):
    """Row tiles of one vocabulary tile run side by side, so its weights come from HBM once and else from L2."""
    i_tile = tl.program_id(1)
    if NUM_AT > 0:  # the first slice resets the answers: a launch less
        i_clear = (i_tile * tl.num_programs(0) + tl.program_id(0)) * CLEAR + tl.arange(0, CLEAR)
        tl.store(p_confidence + i_clear, float("-inf"), mask=i_clear < NUM_AT)
        tl.store(p_invalid + i_clear, 0, mask=i_clear < NUM_A)
        if J > 0:
            tl.store(p_logprob + i_clear, float("-inf"), mask=i_clear < NUM_AT * J)
    first = start + tl.program_id(0) * ROW_TILE
    stop = tl.minimum(tl.load(p_count), end)
    left = stop - first
    if left <= 0:
        return
    # Weights fill the M side of the tensor cores whatever the number of rows, which only widens N: each element's sum
    # over E, and each row's sums over the tile, run in the same order in all three bodies.
    if ROW_TILE == 32 or left <= 32:
        _logit_tile(
            p_hidden, p_weight, p_logits, p_best, p_at, p_sum, p_mask_logit, start, first, stop, i_tile,
            E, V, MASK, NUM_TILES, KEEP, 32, BV, BK, 4,
        )  # fmt: skip
    elif left <= 64:
        _logit_tile(
            p_hidden, p_weight, p_logits, p_best, p_at, p_sum, p_mask_logit, start, first, stop, i_tile,
            E, V, MASK, NUM_TILES, KEEP, 64, BV, BK, 4,
        )  # fmt: skip
    else:
        _logit_tile(
            p_hidden, p_weight, p_logits, p_best, p_at, p_sum, p_mask_logit, start, first, stop, i_tile,
            E, V, MASK, NUM_TILES, KEEP, 128, BV, BK, 3,
        )  # fmt: skip


@triton.jit
def _logit_tile(
    p_hidden,
    p_weight,
    p_logits,
    p_best,
    p_at,
    p_sum,
    p_mask_logit,
    start,
    first,
    stop,
    i_tile,
    E: tl.constexpr,
    V: tl.constexpr,
    MASK: tl.constexpr,
    NUM_TILES: tl.constexpr,
    KEEP: tl.constexpr,
    BM: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_v = i_tile * BV + tl.arange(0, BV)
    i_d = first + tl.arange(0, BM)
    live = i_d < stop
    o_w = tl.minimum(i_v, V - 1)[:, None] * E
    o_x = tl.minimum(i_d, stop - 1)[:, None] * E
    b_logits = tl.zeros([BV, BM], tl.float32)
    for o_k in tl.range(0, E, BK, num_stages=STAGES):
        i_k = o_k + tl.arange(0, BK)[None, :]
        if E % BK == 0:
            b_w = tl.load(p_weight + o_w + i_k)  # [BV, BK]
            b_x = tl.load(p_hidden + o_x + i_k)  # [BM, BK]
        else:
            b_w = tl.load(p_weight + o_w + i_k, mask=i_k < E, other=0.0)
            b_x = tl.load(p_hidden + o_x + i_k, mask=i_k < E, other=0.0)
        b_logits = tl.dot(b_w, tl.trans(b_x), b_logits, input_precision="ieee")
    i_r = i_d - start
    if i_tile == MASK // BV:
        tl.store(p_mask_logit + i_r, tl.sum(tl.where((i_v == MASK)[:, None], b_logits, 0.0), axis=0), mask=live)
    b_logits = tl.where(((i_v < V) & (i_v != MASK))[:, None], b_logits, float("-inf"))
    if KEEP:
        # [BV, BM] of the transposed array: tokens are contiguous.
        tl.store(p_logits + i_r[None, :] * V + i_v[:, None], b_logits, mask=live[None, :] & (i_v < V)[:, None])
    o_stat = i_r * NUM_TILES + i_tile
    # NaN takes no part in the maximum, whose token must be one, but reaches the sum. Two plain reductions for maximum
    # and token need half the registers of one that carries both.
    b_best = tl.max(tl.where(b_logits == b_logits, b_logits, float("-inf")), axis=0)  # [BM]
    tl.store(p_best + o_stat, b_best, mask=live)
    b_at = tl.min(tl.where(b_logits == b_best[None, :], i_v[:, None], V - 1), axis=0)
    tl.store(p_at + o_stat, b_at, mask=live)
    # A tile of the mask id alone has no finite logit: an offset of 0 makes its sum 0, not NaN.
    b_offset = tl.where(b_best == float("-inf"), 0.0, b_best)
    tl.store(p_sum + o_stat, tl.sum(tl.exp(b_logits - b_offset[None, :]), axis=0), mask=live)
