"""The branches of a step: the main states, their drafts, and the positions whose tokens the LM head must decide.

S slots, B branches (0 the main one), T block positions, A room for computed branches, J kept tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fused.candidates import SCAN, draft_greedily, draft_tokens_reference, draft_under_noise
from kernels.fused.control import Graph, Rules, Slots
from kernels.fused.head_list import list_head_rows, list_head_rows_reference
from kernels.fused.launch import overlapped, wait_for_inputs
from kernels.fused.layout import DENOISE, FINAL, VOID, Branches, HeadRows, Predictions
from kernels.fused.opening import block_limit, find_ending, find_ending_reference, tile_width
from kernels.fused.pruning import keep_best
from kernels.pruning import keep_best as keep_best_reference

_VOID, _DENOISE, _FINAL = tl.constexpr(VOID), tl.constexpr(DENOISE), tl.constexpr(FINAL)


def build_branches(
    slots: Slots,
    graph: Graph,
    rules: Rules,
    stop_ids: torch.Tensor,
    branches: Branches,
    head: HeadRows,
    predictions: Predictions,
) -> None:
    """Fills the table and the list of branches and the head's rows, and resets the predictions of listed branches.

    A draft is void in a block's first step, where its formula goes beyond the masks left, and where it would end the
    row, and where its slot has ``graph.budget`` better ones. Branches without a mask are final. ``branches.num_live_1``
    and ``head.count_1`` must be zero. One program a slot.
    """
    block, num_top = rules.block_size, slots.guess_token_STJ.shape[2]
    num_branches = graph.num_branches
    width, height = tile_width(block), triton.next_power_of_2(num_branches)
    _build_kernel[(len(slots.active_S),)](
        slots.active_S,
        slots.state_ST,
        slots.start_S,
        slots.first_new_S,
        slots.limit_S,
        slots.key_S2,
        slots.sample_S,
        slots.temperature_S,
        slots.has_guess_S,
        slots.guess_token_STJ,
        slots.guess_logprob_STJ,
        graph.token_rank_BI,
        graph.size_B,
        graph.place_B,
        graph.parent_B,
        graph.ancestors_B,
        stop_ids,
        branches.tokens_SBT,
        branches.kind_SB,
        branches.index_SB,
        branches.num_live_1,
        branches.slot_A,
        branches.branch_A,
        head.count_1,
        head.hidden_D,
        head.target_D,
        head.slot_D,
        head.position_D,
        head.masks_left_D,
        head.greedy_D,
        predictions.confidence_AT,
        predictions.top_logprob_ATJ,
        predictions.invalid_A,
        len(branches.slot_A),
        B=num_branches,
        BB=height,
        T=block,
        BT=width,
        J=num_top,
        BJ=triton.next_power_of_2(max(num_top, 1)),
        KEPT=predictions.top_logprob_ATJ.shape[2],
        NUM_RANKS=graph.num_ranks,
        BR=triton.next_power_of_2(max(graph.num_ranks, 1)),
        GROUP=rules.group_size,
        HAS_THRESHOLD=rules.threshold is not None,
        SHIFT=rules.logit_shift,
        SEEDED=rules.seeded,
        SEED_SAMPLED=rules.seed_sampled,
        VERIFY=rules.verify_draft,
        MASK_ID=rules.mask_id,
        SAMPLED=rules.sampled,
        NUM_STOP=len(stop_ids),
        SCAN=min(SCAN, width),
        BUDGET=graph.budget if graph.prunes else 0,
        num_warps=num_warps(height * width),
        **overlapped(slots.active_S),
    )


def num_warps(num_elements: int) -> int:
    """Warps of a program whose largest tile has so many elements.

    At two elements a thread all loads and stores agree on one layout: 4 warps instead of 8 mean 24 changes of layout
    through shared memory instead of 7 (nine branches of 32 positions).
    """
    return max(1, min(16, num_elements // 64))


@triton.jit(do_not_specialize=["room"])
def _build_kernel(
    p_active,
    p_state,
    p_start,
    p_first_new,
    p_limit,
    p_key,
    p_sample,
    p_temperature,
    p_has_guess,
    p_guess_token,
    p_guess_logprob,
    p_token_rank,
    p_size,
    p_place,
    p_parent,
    p_ancestors,
    p_stop_ids,
    p_tokens,
    p_kind,
    p_index,
    p_num_live,
    p_slot,
    p_branch,
    p_head_count,
    p_head_hidden,
    p_head_target,
    p_head_slot,
    p_head_position,
    p_head_masks_left,
    p_head_greedy,
    p_confidence,
    p_top_logprob,
    p_invalid,
    room,
    B: tl.constexpr,
    BB: tl.constexpr,
    T: tl.constexpr,
    BT: tl.constexpr,
    J: tl.constexpr,
    BJ: tl.constexpr,
    KEPT: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BR: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    SHIFT: tl.constexpr,
    SEEDED: tl.constexpr,
    SEED_SAMPLED: tl.constexpr,
    VERIFY: tl.constexpr,
    MASK_ID: tl.constexpr,
    SAMPLED: tl.constexpr,
    NUM_STOP: tl.constexpr,
    SCAN: tl.constexpr,
    BUDGET: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    i_s = tl.program_id(0)
    o_b, o_t = tl.arange(0, BB), tl.arange(0, BT)
    wait_for_inputs(OVERLAP)
    if tl.load(p_active + i_s).to(tl.int32) == 0:
        tl.store(p_kind + i_s * B + o_b, tl.full([BB], _VOID, tl.int32), mask=o_b < B)
        return
    start = tl.load(p_start + i_s)
    state = tl.load(p_state + i_s * T + o_t, mask=o_t < T, other=-1).to(tl.int32)
    unfinished = tl.max((state == MASK_ID).to(tl.int32), axis=0) > 0
    if B > 1:
        if SAMPLED:
            tokens, drafted, worth = draft_under_noise(
                i_s, state, o_b, o_t, p_guess_token, p_guess_logprob, p_token_rank, p_start, p_key, p_sample,
                p_temperature, B, T, J, BJ, NUM_RANKS, GROUP, MASK_ID, BUDGET > 0,
            )  # fmt: skip
        else:
            tokens, drafted, worth = draft_greedily(
                i_s, state, o_b, o_t, p_state, p_guess_token, p_guess_logprob, p_token_rank, B, T, BT, J, NUM_RANKS, BR,
                GROUP, MASK_ID, SCAN, BUDGET > 0,
            )  # fmt: skip
        masked = tokens == MASK_ID
        first_new = tl.load(p_first_new + i_s).to(tl.int32)
        limit = block_limit(tl.load(p_limit + i_s), start, T)
        ends, _, _ = find_ending(tokens, masked, o_t[None, :], first_new, limit, p_stop_ids, NUM_STOP, T, 1)
        guess = tl.load(p_has_guess + i_s).to(tl.int32) > 0
        num_drafting = tl.where(guess & unfinished, B, 1)
        live = (o_b < num_drafting) & ((o_b == 0) | (drafted & (ends == 0)))
        if BUDGET > 0:
            live = (live & (o_b == 0)) | keep_best(worth, live, o_b, p_size, p_place, p_parent, p_ancestors, BUDGET, B)
    else:
        tokens = tl.where((o_b == 0)[:, None], state[None, :], -1)
        masked = tokens == MASK_ID
        live = o_b == 0
    masks_left = tl.sum(masked.to(tl.int32), axis=1)
    kind = tl.where(live, tl.where(masks_left > 0, _DENOISE, _FINAL), _VOID)
    rank = tl.cumsum(live.to(tl.int32), axis=0) - 1
    num_live = tl.sum(live.to(tl.int32), axis=0)
    first = tl.atomic_add(p_num_live, num_live, sem="relaxed")
    index = first + rank
    inside = (o_b < B)[:, None] & (o_t < T)[None, :]
    tl.store(p_tokens + (i_s * B + o_b)[:, None] * T + o_t[None, :], tokens.to(tl.int64), mask=inside)
    tl.store(p_kind + i_s * B + o_b, kind, mask=o_b < B)
    tl.store(p_index + i_s * B + o_b, index, mask=live)
    tl.store(p_slot + index, tl.zeros_like(o_b) + i_s, mask=live)
    tl.store(p_branch + index, o_b, mask=live)
    tl.store(p_invalid + index, tl.zeros_like(o_b), mask=live)
    _fill(p_confidence, first * T, num_live * T)
    _fill(p_top_logprob, first * T * KEPT, num_live * T * KEPT)

    list_head_rows(
        i_s, masked, kind, index, start, o_t, p_head_count, p_head_hidden, p_head_target, p_head_slot, p_head_position,
        p_head_masks_left, p_head_greedy, room, T, NUM_RANKS, GROUP, HAS_THRESHOLD, SHIFT, SEEDED, SEED_SAMPLED, VERIFY,
    )  # fmt: skip


@triton.jit
def _fill(p, first, count):
    """Writes -inf into ``count`` elements from ``first`` on."""
    o = tl.arange(0, 512)
    for i in range(0, count, 512):
        tl.store(p + first + i + o, tl.full([512], float("-inf"), tl.float32), mask=i + o < count)


def build_branches_reference(
    slots: Slots,
    graph: Graph,
    rules: Rules,
    stop_ids: torch.Tensor,
    branches: Branches,
    head: HeadRows,
    predictions: Predictions,
) -> None:
    """``build_branches`` in torch."""
    main_ST = slots.state_ST
    unfinished_S = (main_ST == rules.mask_id).any(-1)
    tokens_SBT, live_SB = main_ST[:, None], slots.active_S[:, None]
    if graph.num_branches > 1:
        tokens_SBT, drafted_SB, worth_SB = draft_tokens_reference(slots, graph, rules)
        ends_SB, _, _ = find_ending_reference(
            tokens_SBT,
            tokens_SBT == rules.mask_id,
            slots.first_new_S[:, None].expand(drafted_SB.shape),
            (slots.limit_S - slots.start_S)[:, None].expand(drafted_SB.shape),
            stop_ids,
        )
        live_SB = (slots.active_S & unfinished_S & slots.has_guess_S)[:, None] & drafted_SB & ~ends_SB
        if graph.prunes:
            tree = graph.size_B, graph.place_B, graph.parent_B, graph.ancestors_B
            live_SB = keep_best_reference(worth_SB, live_SB, *tree, graph.budget)
        live_SB[:, 0] = slots.active_S
    open_SB = (tokens_SBT == rules.mask_id).any(-1)
    kind_SB = torch.where(live_SB, torch.where(open_SB, DENOISE, FINAL), VOID)
    branches.tokens_SBT.copy_(tokens_SBT)
    branches.kind_SB.copy_(kind_SB)
    slot_A, branch_A = live_SB.nonzero(as_tuple=True)
    num_live = len(slot_A)
    branches.num_live_1.fill_(num_live)
    branches.slot_A[:num_live] = slot_A.int()
    branches.branch_A[:num_live] = branch_A.int()
    branches.index_SB[slot_A, branch_A] = torch.arange(num_live, dtype=torch.int32, device=slot_A.device)
    predictions.confidence_AT[:num_live] = -torch.inf
    predictions.top_logprob_ATJ[:num_live] = -torch.inf
    predictions.invalid_A[:num_live] = 0
    list_head_rows_reference(slots, graph, rules, tokens_SBT[slot_A, branch_A], slot_A, len(branches.slot_A), head)
