"""Draws tokens from logits that the LM head kept: Gumbel maximum, inside top-k and top-p where a row asks for it.

R rows of a slice, V vocabulary, N tiles, C chunks of V.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fused.head_scratch import CHUNK_STEP, NUM_CHUNKS, VOCAB_TILE, HeadScratch, chunk_size
from kernels.fused.launch import overlapped, wait_for_inputs
from kernels.fused.layout import HeadRows, Sampling
from kernels.fused.noise import gumbel_of_words, philox_words
from kernels.fused.top_limits import bound_kept, collect_candidates, draw_limited
from kernels.head import keep_top
from kernels.noise import gumbel_noise


def draw_rows(
    rows: HeadRows,
    sampling: Sampling,
    start: int,
    vocab: int,
    plain_confidence: bool,
    limited: bool,
    scratch: HeadScratch,
) -> None:
    """Fills ``scratch.value``, ``token`` and ``mass`` for the slice's rows that are drawn; leaves others undefined."""
    num_rows = min(scratch.num_rows, rows.target_D.shape[0] - start)
    num_tiles = scratch.best_RN.shape[1]
    of_rows = (
        rows.count_1,
        rows.slot_D,
        rows.position_D,
        rows.masks_left_D,
        rows.greedy_D,
        sampling.temperature_S,
        sampling.top_p_S,
        sampling.top_k_S,
        sampling.key_S2,
        sampling.sample_S,
        scratch.best_RN,
        scratch.value_RC,
        scratch.token_RC,
        scratch.mass_RC,
        scratch.num_keys_RC,
        scratch.keys_RK,
        start,
    )
    _draw_chunks[(num_rows, NUM_CHUNKS)](
        *of_rows,
        scratch.logits_RV,
        V=vocab,
        NUM_TILES=num_tiles,
        NT=triton.next_power_of_2(num_tiles),
        BV=VOCAB_TILE,
        C=NUM_CHUNKS,
        CHUNK=chunk_size(vocab),
        BLOCK=CHUNK_STEP,
        PLAIN=plain_confidence,
        LIMITED=limited,
        num_warps=8,
        **overlapped(rows.count_1),
    )
    if limited:
        draw_limited[(num_rows,)](
            *of_rows,
            NUM_TILES=num_tiles,
            NT=triton.next_power_of_2(num_tiles),
            C=NUM_CHUNKS,
            CHUNK=chunk_size(vocab),
            W=128,
            num_warps=8,
            **overlapped(rows.count_1),
        )


def draw_reference(
    logits_RV: torch.Tensor,
    total_R: torch.Tensor,
    rows: HeadRows,
    sampling: Sampling,
    at: slice,
    plain_confidence: bool,
    limited: bool,
    token_R: torch.Tensor,
    confidence_R: torch.Tensor,
) -> None:
    """Overwrites token and confidence of the rows that are drawn, in plain torch. ``logits``: -inf at the mask id."""
    slot_R = rows.slot_D[at].long()
    drawn = ((sampling.temperature_S[slot_R] > 0) & (rows.greedy_D[at] == 0)).nonzero().squeeze(1)
    slot = slot_R[drawn]
    logits = logits_RV[drawn]
    scaled = logits / sampling.temperature_S[slot, None]
    if limited:
        scaled = keep_top(scaled, sampling.top_k_S[slot], sampling.top_p_S[slot])
    position, masks_left = rows.position_D[at][drawn].long(), rows.masks_left_D[at][drawn].long()
    noise = gumbel_noise(sampling.key_S2[slot], sampling.sample_S[slot], position, masks_left, logits.shape[1])
    token = (scaled + noise).argmax(-1)
    if plain_confidence:
        chosen, total = logits.gather(1, token[:, None]).squeeze(1), total_R[drawn]
    else:
        chosen, total = scaled.gather(1, token[:, None]).squeeze(1), scaled.logsumexp(-1)
    token_R[drawn] = token
    confidence_R[drawn] = (chosen - total).exp()


@triton.jit
def _draw_chunks(
    p_count,
    p_slot,
    p_position,
    p_left,
    p_greedy,
    p_temperature,
    p_top_p,
    p_top_k,
    p_key,
    p_sample,
    p_best,
    p_value,
    p_token,
    p_mass,
    p_num_keys,
    p_keys,
    start,
    p_logits,
    V: tl.constexpr,
    NUM_TILES: tl.constexpr,
    NT: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PLAIN: tl.constexpr,
    LIMITED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One chunk of a row: its noisy maximum, or its candidates where top-k or top-p are on; and its mass."""
    wait_for_inputs(OVERLAP)
    i_r = tl.program_id(0)
    i_c = tl.program_id(1)
    i_d = start + i_r
    if i_d >= tl.load(p_count):
        return
    slot = tl.load(p_slot + i_d)
    temperature = tl.load(p_temperature + slot)
    if (temperature <= 0) | (tl.load(p_greedy + i_d) != 0):
        return
    if i_c * CHUNK >= V:
        tl.store(p_value + i_r * C + i_c, float("-inf"))
        tl.store(p_mass + i_r * C + i_c, 0.0)
        tl.store(p_num_keys + i_r * C + i_c, 0)
        return
    i_n = tl.arange(0, NT)
    b_best = tl.load(p_best + i_r * NUM_TILES + i_n, mask=i_n < NUM_TILES, other=float("-inf"))
    b_best = tl.div_rn(b_best, temperature)
    best = tl.max(b_best, axis=0)
    limits = False
    if LIMITED:
        top_k = tl.load(p_top_k + slot)
        top_p = tl.load(p_top_p + slot)
        limits = (top_k > 0) | (top_p < 1)
        if limits:
            bound = bound_kept(b_best, i_n, top_k, top_p, NUM_TILES, V)
            collect_candidates(
                p_logits + i_r * V, p_keys + i_r.to(tl.int64) * (C * CHUNK) + i_c * CHUNK, p_num_keys + i_r * C + i_c,
                p_mass + i_r * C + i_c, temperature, best, bound, i_c * CHUNK, V, CHUNK, BLOCK,
            )  # fmt: skip
    if not limits:
        _noisy_chunk(
            p_logits + i_r * V, p_best + i_r * NUM_TILES, p_value + i_r * C + i_c, p_token + i_r * C + i_c,
            p_mass + i_r * C + i_c, tl.load(p_position + i_d), tl.load(p_left + i_d), tl.load(p_sample + slot),
            tl.load(p_key + slot * 2), tl.load(p_key + slot * 2 + 1), temperature, best, i_c * CHUNK,
            V, NUM_TILES, BV, CHUNK, BLOCK, PLAIN,
        )  # fmt: skip


@triton.jit
def _noisy_chunk(
    p_logits,
    p_best,
    p_value,
    p_token,
    p_mass,
    position,
    left,
    sample,
    key0,
    key1,
    temperature,
    best,
    first,
    V: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PLAIN: tl.constexpr,
):
    b_value = tl.full([BLOCK // 4], float("-inf"), tl.float32)
    b_token = tl.full([BLOCK // 4], V - 1, tl.int32)
    b_mass = tl.zeros([BLOCK // 4], tl.float32)
    # Noise lies between -2.9 and 22.9: a token further than 26 below the best one cannot win. Its mass counts down
    # to exp(-104), the smallest that float32 holds.
    reach = 26.0 if PLAIN else 104.0
    i_near = tl.arange(0, BLOCK // BV)
    for o_v in range(first, tl.minimum(first + CHUNK, V), BLOCK):
        i_n = o_v // BV + i_near
        near = tl.max(tl.load(p_best + i_n, mask=i_n < NUM_TILES, other=float("-inf")), axis=0)
        if not (tl.div_rn(near, temperature) < best - reach):
            # One counter makes the noise of four tokens.
            i_group = o_v // 4 + tl.arange(0, BLOCK // 4)
            words = philox_words(i_group, position, left, sample, key0, key1)
            for j in tl.static_range(4):
                i_v = i_group * 4 + j
                b_scaled = tl.div_rn(tl.load(p_logits + i_v, mask=i_v < V, other=float("-inf")), temperature)
                b_noisy = b_scaled + gumbel_of_words(words[j])
                b_token = tl.where(b_noisy > b_value, i_v, b_token)
                b_value = tl.maximum(b_noisy, b_value)
                b_mass += tl.exp(b_scaled - best)
    value = tl.max(b_value, axis=0)
    tl.store(p_value, value)
    tl.store(p_token, tl.min(tl.where(b_value == value, b_token, V - 1), axis=0))
    tl.store(p_mass, tl.sum(b_mass, axis=0))
