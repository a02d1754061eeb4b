"""The tokens that drafts put at masked positions, by the last accepted distribution (Spiffy, arXiv:2509.18085).

S slots, B branches, T block positions, I position ranks, J kept tokens. Position rank i is the masked position that
the policy would take i-th, token rank j its j-th best token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fused.control import Graph, Rules, Slots
from kernels.fused.noise import gumbel
from kernels.fused.pruning import to_units
from kernels.noise import gumbel_noise_of
from kernels.pruning import to_units as to_units_reference

SCAN = 32
"""Positions that others are compared with at a time."""


@triton.jit
def draft_greedily(
    i_s,
    state,
    o_b,
    o_t,
    p_state,
    p_guess_token,
    p_guess_logprob,
    p_token_rank,
    B: tl.constexpr,
    T: tl.constexpr,
    BT: tl.constexpr,
    J: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BR: tl.constexpr,
    GROUP: tl.constexpr,
    MASK_ID: tl.constexpr,
    SCAN: tl.constexpr,
    SCORED: tl.constexpr,
):
    """Tokens [BB, BT] of all branches, [BB] whether a branch's formula finds what it names, and where ``SCORED``, [BB]
    the sum of its candidates' log-probabilities in units.

    Without noise the policy's order is a sort by group, confidence and position, found by comparing every position
    with every other, at once for all ranks.
    """
    confidence = tl.load(p_guess_logprob + (i_s * T + o_t) * J, mask=o_t < T, other=float("-inf"))
    rank = tl.zeros([BT], tl.int32)
    for o_u in tl.static_range(0, BT, SCAN):
        u = o_u + tl.arange(0, SCAN)
        # Read again rather than taken from the registers, where they lie along the other dimension.
        state_u = tl.load(p_state + i_s * T + u, mask=u < T, other=-1)
        confidence_u = tl.load(p_guess_logprob + (i_s * T + u) * J, mask=u < T, other=float("-inf"))
        free_u = (state_u == MASK_ID) & is_finite(confidence_u)
        group_t, group_u = (o_t // GROUP)[:, None], (u // GROUP)[None, :]
        c_t, c_u = confidence[:, None], confidence_u[None, :]
        ahead = (c_u > c_t) | ((c_u == c_t) & (u[None, :] < o_t[:, None]))  # [BT, SCAN]
        ahead = free_u[None, :] & ((group_u < group_t) | ((group_u == group_t) & ahead))
        rank += tl.sum(ahead.to(tl.int32), axis=1)
    free = (state == MASK_ID) & is_finite(confidence)
    ranked = (free & (rank < NUM_RANKS))[None, :] & (o_b < B)[:, None]
    j = tl.load(p_token_rank + o_b[:, None] * NUM_RANKS + rank[None, :], mask=ranked, other=-1)  # [BB, BT]
    chosen = j >= 0
    o_guess = (i_s * T + o_t)[None, :] * J + j
    exists = chosen & (j < J)
    token = tl.load(p_guess_token + o_guess, mask=exists, other=0).to(tl.int32)
    logprob = tl.load(p_guess_logprob + o_guess, mask=exists, other=float("-inf"))
    usable = is_finite(logprob)
    worth = tl.zeros_like(o_b).to(tl.int64)
    if SCORED:
        worth = tl.sum(tl.where(chosen, to_units(logprob), 0), axis=1)
    # A formula that goes beyond the free positions finds fewer of its candidates than it names.
    o_i = tl.arange(0, BR)
    named = tl.load(
        p_token_rank + o_b[:, None] * NUM_RANKS + o_i[None, :],
        mask=(o_b < B)[:, None] & (o_i < NUM_RANKS)[None, :],
        other=-1,
    )
    missing = tl.sum((named >= 0).to(tl.int32), axis=1) - tl.sum((chosen & usable).to(tl.int32), axis=1)
    return tl.where(chosen, token, state[None, :]), missing == 0, worth


@triton.jit
def draft_under_noise(
    i_s,
    state,
    o_b,
    o_t,
    p_guess_token,
    p_guess_logprob,
    p_token_rank,
    p_start,
    p_key,
    p_sample,
    p_temperature,
    B: tl.constexpr,
    T: tl.constexpr,
    J: tl.constexpr,
    BJ: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    GROUP: tl.constexpr,
    MASK_ID: tl.constexpr,
    SCORED: tl.constexpr,
):
    """The same where rank i is judged under the noise of the i-th coming step, whose block has i masks fewer."""
    o_j = tl.arange(0, BJ)
    inside = (o_t < T)[:, None] & (o_j < J)[None, :]
    o_guess = (i_s * T + o_t)[:, None] * J + o_j[None, :]
    token = tl.load(p_guess_token + o_guess, mask=inside, other=0)  # [BT, BJ]
    logprob = tl.load(p_guess_logprob + o_guess, mask=inside, other=float("-inf"))
    logprob = tl.where(is_finite(logprob), logprob, float("-inf"))
    position = (tl.load(p_start + i_s) + o_t)[:, None]
    key0, key1 = tl.load(p_key + i_s * 2), tl.load(p_key + i_s * 2 + 1)
    sample = tl.load(p_sample + i_s)
    temperature = tl.load(p_temperature + i_s)
    masked = state == MASK_ID
    masks_left = tl.sum(masked.to(tl.int32), axis=0)
    free = masked & is_finite(tl.max(tl.where(o_j[None, :] == 0, logprob, float("-inf")), axis=1))
    tokens = tl.where((o_b >= 0)[:, None], state[None, :], 0)
    missing = tl.zeros_like(o_b)
    worth = tl.zeros_like(o_b).to(tl.int64)
    for i in range(NUM_RANKS):
        noise = gumbel(token, position, tl.maximum(masks_left - i, 0), sample, key0, key1)
        score = tl.where(temperature > 0, logprob / tl.maximum(temperature, 1e-6) + noise, logprob)
        best_j = tl.argmax(score, axis=1)
        confidence = tl.max(tl.where(o_j[None, :] == best_j[:, None], logprob, float("-inf")), axis=1)
        group = o_t // GROUP
        eligible = free & (group == tl.min(tl.where(free, group, T), axis=0))
        at = tl.argmax(tl.where(eligible, confidence, float("-inf")), axis=0)
        here = (o_t == at)[:, None]
        score_j = tl.sum(tl.where(here, score, 0.0), axis=0)
        token_j = tl.sum(tl.where(here, token, 0), axis=0).to(tl.int32)
        usable_j = tl.max((here & is_finite(logprob) & eligible[:, None]).to(tl.int32), axis=0)
        rank_j = _ranks(score_j, o_j)
        j = tl.load(p_token_rank + o_b * NUM_RANKS + i, mask=o_b < B, other=-1)
        hit = rank_j[None, :] == j[:, None]  # [BB, BJ]
        token_b = tl.sum(tl.where(hit, token_j[None, :], 0), axis=1)
        usable_b = tl.sum(tl.where(hit, usable_j[None, :], 0), axis=1)
        tokens = tl.where((j >= 0)[:, None] & (o_t == at)[None, :], token_b[:, None], tokens)
        missing += ((j >= 0) & (usable_b == 0)).to(tl.int32)
        if SCORED:
            logprob_j = tl.sum(tl.where(here, logprob, 0.0), axis=0)
            units_b = tl.sum(tl.where(hit, to_units(logprob_j)[None, :], 0), axis=1)
            worth += tl.where(j >= 0, units_b, 0)
        free = free & (o_t != at)
    return tokens, missing == 0, worth


@triton.jit
def _ranks(score, o):
    """Place of each score in descending order; ties by index."""
    a, b = score[:, None], score[None, :]
    ahead = (b > a) | ((b == a) & (o[None, :] < o[:, None]))
    return tl.sum(ahead.to(tl.int32), axis=1)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


def draft_tokens_reference(slots: Slots, graph: Graph, rules: Rules) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [S, B, T] of all branches, [S, B] whether a branch's formula finds what it names, and the sum of its
    candidates' log-probabilities in units, [S, B]."""
    main_ST = slots.state_ST
    block = main_ST.shape[1]
    position_SI, token_SIJ, logprob_SIJ, usable_SIJ = _rank_candidates(slots, graph.num_ranks, rules)
    rank_SBI = graph.token_rank_BI.long().expand(len(main_ST), -1, -1)
    chosen = rank_SBI >= 0
    rank_SIB = rank_SBI.clamp(min=0, max=token_SIJ.shape[2] - 1).transpose(1, 2)
    usable_SBI = usable_SIJ.gather(2, rank_SIB).transpose(1, 2) & (rank_SBI < token_SIJ.shape[2])
    # A spare last column takes the writes of unused position ranks.
    target_SBI = torch.where(chosen, position_SI[:, None], block)
    padded = torch.cat((main_ST, main_ST.new_zeros(len(main_ST), 1)), dim=1)
    token_SBI = token_SIJ.gather(2, rank_SIB).transpose(1, 2)
    tokens_SBT = padded[:, None].repeat(1, graph.num_branches, 1).scatter(2, target_SBI, token_SBI)[..., :block]
    units_SBI = to_units_reference(logprob_SIJ.gather(2, rank_SIB).transpose(1, 2))
    return tokens_SBT, (usable_SBI | ~chosen).all(-1), torch.where(chosen, units_SBI, 0).sum(-1)


def _rank_candidates(slots: Slots, num_ranks: int, rules: Rules) -> tuple[torch.Tensor, ...]:
    """Positions [S, I] in the policy's order, their tokens best first, the tokens' log-probabilities and which of these
    are known, [S, I, J]."""
    logprob, token = slots.guess_logprob_STJ, slots.guess_token_STJ
    masked_ST = slots.state_ST == rules.mask_id
    block = masked_ST.shape[1]
    group_T = torch.arange(block, device=token.device) // rules.group_size
    free_ST = masked_ST & torch.isfinite(logprob[..., 0])
    positions, tokens, logprobs, usables = [], [], [], []
    for i in range(num_ranks):
        order_STJ = torch.arange(token.shape[-1], device=token.device).expand_as(token)
        if rules.sampled:
            score = _score(slots, (masked_ST.sum(-1) - i).clamp(min=0))
            order_STJ = score.argsort(dim=-1, descending=True, stable=True)
        confidence_ST = logprob.gather(-1, order_STJ[..., :1]).squeeze(-1)
        active_S = torch.where(free_ST, group_T, block).amin(-1)
        eligible = free_ST & (group_T == active_S[:, None])
        best_S = torch.where(eligible, confidence_ST, -torch.inf).argmax(-1)
        at = best_S[:, None, None].expand(-1, 1, order_STJ.shape[-1])
        order_SJ = order_STJ.gather(1, at).squeeze(1)
        positions.append(best_S)
        tokens.append(token.gather(1, at).squeeze(1).gather(1, order_SJ))
        logprobs.append(logprob.gather(1, at).squeeze(1).gather(1, order_SJ))
        usables.append(torch.isfinite(logprobs[-1]) & eligible.any(-1, keepdim=True))
        free_ST = free_ST.scatter(1, best_S[:, None], False)
    return tuple(torch.stack(found, 1) for found in (positions, tokens, logprobs, usables))


def _score(slots: Slots, masks_left_S: torch.Tensor) -> torch.Tensor:
    """Kept tokens' log-probabilities under the row's temperature and noise, [S, T, J]."""
    logprob, token = slots.guess_logprob_STJ, slots.guess_token_STJ
    block = token.shape[1]
    position_ST = slots.start_S[:, None] + torch.arange(block, device=token.device)

    def rows(x_S: torch.Tensor) -> torch.Tensor:
        return x_S.repeat_interleave(block, dim=0)

    noise = gumbel_noise_of(
        rows(slots.key_S2), rows(slots.sample_S), position_ST.flatten(), rows(masks_left_S), token.flatten(0, 1)
    ).view_as(logprob)
    temperature = slots.temperature_S[:, None, None]
    return torch.where(temperature > 0, logprob / temperature.clamp(min=1e-6) + noise, logprob)
