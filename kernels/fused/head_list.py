"""The positions whose tokens the LM head must decide in a step.

B branches of a slot, A computed branches, T block positions, D head rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fused.control import Graph, Rules, Slots
from kernels.fused.layout import FINAL, VOID, HeadRows

_VOID, _FINAL = tl.constexpr(VOID), tl.constexpr(FINAL)


@triton.jit
def list_head_rows(
    i_s,
    masked,
    kind,
    index,
    start,
    o_t,
    p_count,
    p_hidden,
    p_target,
    p_slot,
    p_position,
    p_masks_left,
    p_greedy,
    room,
    T: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    SHIFT: tl.constexpr,
    SEEDED: tl.constexpr,
    SEED_SAMPLED: tl.constexpr,
    VERIFY: tl.constexpr,
):
    """Lists a slot's rows: needed masks of its branches, and what follows its final branches. ``room`` is A."""
    need = needed(masked, o_t, T, NUM_RANKS, GROUP, HAS_THRESHOLD) & (kind != _VOID)[:, None]  # [BB, BT]
    after = need & (masked == 0)  # none
    if SEEDED:
        after = (kind == _FINAL)[:, None] & (o_t < T)[None, :] & (o_t >= (0 if VERIFY else T - 1))[None, :]
    wanted = (need | after).to(tl.int32)
    num_rows = tl.sum(wanted, axis=1)
    before = tl.cumsum(num_rows, axis=0) - num_rows
    base = tl.atomic_add(p_count, tl.sum(num_rows, axis=0), sem="relaxed")
    row = base + before[:, None] + tl.cumsum(wanted, axis=1) - 1
    place = index[:, None] * T + o_t[None, :]
    wanted = wanted > 0
    tl.store(p_hidden + row, tl.where(after, place, place - SHIFT), mask=wanted)
    tl.store(p_target + row, tl.where(after, place + room * T, place), mask=wanted)
    tl.store(p_slot + row, tl.zeros_like(place) + i_s, mask=wanted)
    tl.store(p_position + row, (start + o_t)[None, :].to(tl.int32) + after.to(tl.int32), mask=wanted)
    # A draft drawn under the noise of its verification is the likeliest to pass it.
    masks_left = tl.sum(masked.to(tl.int32), axis=1)
    left = tl.zeros_like(place) + (0 if VERIFY else masks_left[:, None])
    tl.store(p_masks_left + row, left, mask=wanted)
    tl.store(p_greedy + row, tl.zeros_like(place) if SEED_SAMPLED else after.to(tl.int32), mask=wanted)


@triton.jit
def needed(masked, o_t, T: tl.constexpr, NUM_RANKS: tl.constexpr, GROUP: tl.constexpr, HAS_THRESHOLD: tl.constexpr):
    """Masks of the active group, and of the next one where drafts may reach beyond the active one."""
    group = (o_t // GROUP)[None, :]
    active = tl.min(tl.where(masked, group, T), axis=1)[:, None]
    need = masked & (group == active)
    if NUM_RANKS > 0:
        later = masked & (group > active)
        then = later & (group == tl.min(tl.where(later, group, T), axis=1)[:, None])
        if HAS_THRESHOLD:
            need = need | then
        else:
            # One mask goes in this step.
            need = need | (then & (tl.sum(need.to(tl.int32), axis=1) - 1 < NUM_RANKS)[:, None])
    return need


def list_head_rows_reference(
    slots: Slots,
    graph: Graph,
    rules: Rules,
    tokens_AT: torch.Tensor,
    slot_A: torch.Tensor,
    room: int,
    head: HeadRows,
) -> None:
    """``list_head_rows`` in torch, for the listed branches of all slots; ``room`` is A."""
    block = rules.block_size
    masked_AT = tokens_AT == rules.mask_id
    need_AT = needed_reference(masked_AT, rules, graph.num_ranks)
    after_AT = torch.zeros_like(masked_AT)
    if rules.seeded:
        after_AT[:, 0 if rules.verify_draft else -1 :] = ~masked_AT.any(-1, keepdim=True)
    a, t = (need_AT | after_AT).nonzero(as_tuple=True)
    after = after_AT[a, t]
    masks_left = masked_AT.sum(-1)[a]
    place = a * block + t
    count = len(a)
    head.count_1.fill_(count)
    head.hidden_D[:count] = torch.where(after, place, place - rules.logit_shift).int()
    head.target_D[:count] = torch.where(after, place + room * block, place).int()
    head.slot_D[:count] = slot_A[a].int()
    head.position_D[:count] = (slots.start_S[slot_A[a]] + t + after).int()
    head.masks_left_D[:count] = (torch.zeros_like(masks_left) if rules.verify_draft else masks_left).int()
    head.greedy_D[:count] = (torch.zeros_like(after) if rules.seed_sampled else after).int()


def needed_reference(masked_AT: torch.Tensor, rules: Rules, num_ranks: int) -> torch.Tensor:
    """``needed`` in torch, bool [A, T]."""
    block = masked_AT.shape[1]
    group_T = torch.arange(block, device=masked_AT.device) // rules.group_size
    active_A = torch.where(masked_AT, group_T, block).amin(-1, keepdim=True)
    now_AT = masked_AT & (group_T == active_A)
    if not num_ranks:
        return now_AT
    reaches_A = (now_AT.sum(-1, keepdim=True) - 1 < num_ranks) | (rules.threshold is not None)
    later_AT = masked_AT & (group_T > active_A)
    next_A = torch.where(later_AT, group_T, block).amin(-1, keepdim=True)
    return now_AT | (later_AT & (group_T == next_A) & reaches_A)
