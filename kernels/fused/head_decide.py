"""Second pass of the LM head: merges the vocabulary tiles of each row and scatters the answers.

V vocabulary, N tiles of BV tokens, J kept tokens, A branches of T positions, C chunks in which tokens were drawn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.fused.launch import wait_for_inputs


@triton.jit(do_not_specialize=["start", "num_answers"])
def decide_rows(
    p_count,
    p_target,
    p_slot,
    p_greedy,
    p_temperature,
    p_logits,
    p_best,
    p_at,
    p_sum,
    p_mask_logit,
    p_value,
    p_drawn,
    p_mass,
    p_token,
    p_confidence,
    p_top_token,
    p_top_logprob,
    p_next,
    p_invalid,
    start,
    num_answers,
    V: tl.constexpr,
    NUM_TILES: tl.constexpr,
    NT: tl.constexpr,
    T: tl.constexpr,
    J: tl.constexpr,
    JP: tl.constexpr,
    C: tl.constexpr,
    KEEP: tl.constexpr,
    SAMPLED: tl.constexpr,
    PLAIN: tl.constexpr,
    BV: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    i_r = tl.program_id(0)
    i_d = start + i_r
    if i_d >= tl.load(p_count):
        return
    target = tl.load(p_target + i_d)
    i_n = tl.arange(0, NT)
    o_stat = i_r * NUM_TILES + i_n
    b_best = tl.load(p_best + o_stat, mask=i_n < NUM_TILES, other=float("-inf"))  # [NT]
    b_sum = tl.load(p_sum + o_stat, mask=i_n < NUM_TILES, other=0.0)
    mask_logit = tl.load(p_mask_logit + i_r)
    best, i_tile = tl.max(b_best, axis=0, return_indices=True)
    offset = tl.maximum(best, mask_logit)
    total = offset + tl.log(tl.sum(b_sum * tl.exp(b_best - offset), axis=0) + tl.exp(mask_logit - offset))
    i_tile = tl.minimum(i_tile, NUM_TILES - 1)
    if KEEP:
        i_v = i_tile * BV + tl.arange(0, BV)
        b_logits = tl.load(p_logits + i_r * V + i_v, mask=i_v < V, other=float("-inf"))
        token = tl.min(tl.where(b_logits == best, i_v, V - 1), axis=0)
    else:
        token = tl.load(p_at + i_r * NUM_TILES + i_tile)
    confidence = tl.exp(best - total)
    if SAMPLED:
        temperature = tl.load(p_temperature + tl.load(p_slot + i_d))
        if (temperature > 0) & (tl.load(p_greedy + i_d) == 0):
            i_c = i_r * C + tl.arange(0, C)
            # Chunks ascend, and the lowest of equals wins.
            _, i_chunk = tl.max(tl.load(p_value + i_c), axis=0, return_indices=True)
            token = tl.load(p_drawn + i_r * C + i_chunk)
            logit = tl.load(p_logits + i_r * V + token)
            if PLAIN:
                confidence = tl.exp(logit - total)
            else:
                mass = tl.sum(tl.load(p_mass + i_c), axis=0)
                confidence = tl.exp(tl.div_rn(logit, temperature) - tl.div_rn(best, temperature)) / mass
    # NaN and infinity reach the total through the sums.
    if (total != total) | (tl.abs(total) == float("inf")):
        tl.store(p_invalid + target % num_answers // T, 1)
    if target >= num_answers:
        tl.store(p_next + target - num_answers, token.to(tl.int64))
    else:
        tl.store(p_token + target, token.to(tl.int64))
        tl.store(p_confidence + target, confidence)
        if J > 0:
            _store_top(
                p_logits + i_r * V, p_top_token + target * J, p_top_logprob + target * J, b_best, i_n, total,
                V, NUM_TILES, J, JP, BV,
            )  # fmt: skip


@triton.jit
def _store_top(
    p_logits,
    p_top_token,
    p_top_logprob,
    b_best,
    i_n,
    total,
    V: tl.constexpr,
    NUM_TILES: tl.constexpr,
    J: tl.constexpr,
    JP: tl.constexpr,
    BV: tl.constexpr,
):
    """The top J lie in the J tiles with the largest maxima, lowest tile of equals first: only those are read again."""
    i_j = tl.arange(0, JP)
    b_tile = tl.full([JP], -1, tl.int32)
    for j in tl.static_range(J):
        if j < NUM_TILES:
            best, i_tile = tl.max(b_best, axis=0, return_indices=True)
            b_tile = tl.where(i_j == j, tl.where(best > float("-inf"), i_tile, -1), b_tile)
            b_best = tl.where(i_n == i_tile, float("-inf"), b_best)
    b_token = b_tile[:, None] * BV + tl.arange(0, BV)[None, :]  # [JP, BV]
    b_logits = tl.load(p_logits + b_token, mask=(b_tile >= 0)[:, None] & (b_token < V), other=float("-inf"))
    for j in tl.static_range(J):
        value = tl.max(b_logits)
        token = tl.minimum(tl.min(tl.where((b_logits == value) & (b_token >= 0), b_token, V)), V - 1)
        b_logits = tl.where(b_token == token, float("-inf"), b_logits)
        tl.store(p_top_token + j, token.to(tl.int64))
        tl.store(p_top_logprob + j, value - total)
