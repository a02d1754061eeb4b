"""What a step decided: how far each row got along its drafts, finished blocks, the next block, the row's end.

S slots, B branches, A room for computed branches, T block positions, J kept tokens. Exact: the result equals
step-by-step decoding.
"""

from __future__ import annotations

import torch
import triton

from kernels.fused.acceptance_kernel import accept_kernel
from kernels.fused.control import FLAGS, NEVER, Carry, Commit, Counters, Graph, Result, Rules, Slots
from kernels.fused.drafting import num_warps
from kernels.fused.launch import overlapped
from kernels.fused.layout import DENOISE, FINAL, VOID, Branches, Predictions
from kernels.fused.opening import fill_block_reference, find_ending_reference, opening_mask_reference, tile_width
from kernels.fused.walk import select_next_reference, walk_reference


def accept(
    slots: Slots,
    graph: Graph,
    rules: Rules,
    stop_ids: torch.Tensor,
    branches: Branches,
    predictions: Predictions,
    result: Result,
    commit: Commit,
    counters: Counters,
    carry: Carry | None = None,
) -> None:
    """Applies the policy to the main branch's distribution, then on along the drafts that come true.

    Finished blocks are committed and their slots open the next block; otherwise the last accepted distribution is kept
    to draft from. Rows that end or are invalid become inactive, and nothing of an invalid row is committed. Counts
    everything but folds (``kernels.fused.tally``). ``carry``, where the main branch folds in time: which branch's rows
    are to be stored, and what of them the next step may use. One program a slot.
    """
    block, num_top = rules.block_size, slots.guess_token_STJ.shape[2]
    width, height = tile_width(block), triton.next_power_of_2(graph.num_branches)
    assert num_top in (0, predictions.top_token_ATJ.shape[2]), "slots and predictions keep the same number of tokens"
    accept_kernel[(len(slots.active_S),)](
        slots.active_S,
        slots.pending_S,
        slots.state_ST,
        slots.start_S,
        slots.first_new_S,
        slots.limit_S,
        slots.think_S,
        slots.has_guess_S,
        slots.guess_token_STJ,
        slots.guess_logprob_STJ,
        stop_ids,
        branches.tokens_SBT,
        branches.kind_SB,
        branches.index_SB,
        predictions.token_AT,
        predictions.confidence_AT,
        predictions.top_token_ATJ,
        predictions.top_logprob_ATJ,
        predictions.next_AT,
        predictions.invalid_A,
        result.packed_SN,
        commit.branch_S,
        commit.length_S,
        commit.start_S,
        graph.depth_B,
        counters.denoise_S,
        counters.commit_S,
        counters.proposed_SK,
        counters.accepted_SK,
        counters.draft_rows_SK,
        counters.run_lengths_SB,
        *(
            (commit.branch_S,) * 4
            if carry is None
            else (carry.branch_S, carry.steps_S, carry.valid_S, carry.compute_ST)
        ),
        0.0 if rules.threshold is None else rules.threshold,
        B=graph.num_branches,
        BB=height,
        T=block,
        BT=width,
        J=num_top,
        K=graph.num_depths,
        GROUP=rules.group_size,
        HAS_THRESHOLD=rules.threshold is not None,
        STRICT=rules.strict,
        SEEDED=rules.seeded,
        VERIFY=rules.verify_draft,
        MASK_ID=rules.mask_id,
        END_THINK=-1 if rules.end_think_id is None else rules.end_think_id,
        NUM_STOP=len(stop_ids),
        CARRY=carry is not None,
        REFRESH=0 if carry is None else carry.refresh_every,
        SUB_BLOCKS=carry is not None and carry.sub_blocks,
        num_warps=num_warps(height * width),
        **overlapped(slots.active_S),
    )


def accept_reference(
    slots: Slots,
    graph: Graph,
    rules: Rules,
    stop_ids: torch.Tensor,
    branches: Branches,
    predictions: Predictions,
    result: Result,
    commit: Commit,
    counters: Counters,
    carry: Carry | None = None,
) -> None:
    """``accept`` in torch."""
    _report_idle(slots, rules, stop_ids, result)
    commit.branch_S.fill_(-1)
    if carry is not None:
        carry.branch_S.fill_(-1)
    slot_N = slots.active_S.nonzero().squeeze(1)
    if not len(slot_N):
        return
    kind_NB, tokens_NBT = branches.kind_SB[slot_N], branches.tokens_SBT[slot_N]
    live_NB = kind_NB != VOID
    index_NB = torch.where(live_NB, branches.index_SB[slot_N], 0).long()
    chosen = select_next_reference(predictions.confidence_AT[index_NB], tokens_NBT == rules.mask_id, rules)
    then_NBT = torch.where(chosen & live_NB[..., None], predictions.token_AT[index_NB], tokens_NBT)
    invalid_NB = live_NB & (predictions.invalid_A[index_NB] != 0)
    branch_N, accepted_NB, bad_N = walk_reference(tokens_NBT, then_NBT, kind_NB, invalid_NB)
    row = torch.arange(len(slot_N), device=slot_N.device)
    _count(slot_N, kind_NB, accepted_NB, graph, rules.block_size, counters)
    _advance(
        slot_N,
        then_NBT[row, branch_N],
        branch_N,
        index_NB[row, branch_N],
        kind_NB[row, branch_N] == FINAL,
        bad_N,
        slots,
        rules,
        stop_ids,
        predictions,
        result,
        commit,
    )
    if carry is not None:
        _carry(carry, slot_N, branch_N, slots, rules, commit)


def _carry(
    carry: Carry, slot_N: torch.Tensor, branch_N: torch.Tensor, slots: Slots, rules: Rules, commit: Commit
) -> None:
    """What the next step of the same block may inherit from; an ended row has none."""
    goes_on_N = slots.active_S[slot_N] & (commit.branch_S[slot_N] < 0)
    steps_N = torch.where(goes_on_N, carry.steps_S[slot_N] + 1, 0)
    valid_N = goes_on_N & (steps_N % carry.refresh_every != 0 if carry.refresh_every else True)
    if carry.sub_blocks:
        masked_NT = slots.state_ST[slot_N] == rules.mask_id
        group_T = torch.arange(rules.block_size, device=slot_N.device) // rules.group_size
        active_N1 = torch.where(masked_NT, group_T, rules.block_size).amin(-1, keepdim=True)
        first_NT = torch.arange(rules.block_size, device=slot_N.device) == active_N1 * rules.group_size
        valid_N &= ~(masked_NT & first_NT).any(-1)
        carry.compute_ST[slot_N] = (group_T == active_N1).long()
    carry.branch_S[slot_N] = torch.where(goes_on_N, branch_N, -1).int()
    carry.steps_S[slot_N] = steps_N
    carry.valid_S[slot_N] = valid_N.int()


def _report_idle(slots: Slots, rules: Rules, stop_ids: torch.Tensor, result: Result) -> None:
    """Reports of the slots that took no part: only that a row ended when it was opened."""
    idle_S, state_ST, first_new_S = ~slots.active_S, slots.state_ST, slots.first_new_S
    masked_ST = opening_mask_reference(state_ST, rules)
    _, end_S, stopped_S = find_ending_reference(
        state_ST, masked_ST, first_new_S, slots.limit_S - slots.start_S, stop_ids
    )
    report = {
        "done": slots.pending_S,
        "stopped": slots.pending_S & stopped_S,
        "end": end_S,
        "block_first_new": first_new_S,
        "first_new": first_new_S,
        "start": slots.start_S,
    }
    for name in FLAGS:
        result.flag(name)[idle_S] = report.get(name, torch.zeros_like(end_S))[idle_S].long()
    result.state_ST[idle_S] = state_ST[idle_S]
    slots.pending_S.logical_and_(slots.active_S)


def _advance(
    slot_N: torch.Tensor,
    state_NT: torch.Tensor,
    branch_N: torch.Tensor,
    at_N: torch.Tensor,
    final_N: torch.Tensor,
    bad_N: torch.Tensor,
    slots: Slots,
    rules: Rules,
    stop_ids: torch.Tensor,
    predictions: Predictions,
    result: Result,
    commit: Commit,
) -> None:
    """Commits what is finished, opens the next blocks, keeps the distributions of the others and reports."""
    start_N, first_new_N, limit_N = slots.start_S[slot_N], slots.first_new_S[slot_N], slots.limit_S[slot_N]
    next_NT = predictions.next_AT[at_N]
    block = rules.block_size
    offset = torch.arange(block, device=slot_N.device)
    masked_NT = state_NT == rules.mask_id
    length_N = torch.full_like(start_N, block)
    if rules.verify_draft:
        agreed_N = (state_NT[:, 1:] == next_NT[:, :-1]).long().cumprod(-1).sum(-1) + 1
        length_N = torch.where(final_N, agreed_N, 1)
        masked_NT = offset >= length_N[:, None]
    ending = find_ending_reference(state_NT, masked_NT, first_new_N, limit_N - start_N, stop_ids)
    committed_N = final_N & ~ending[0] & ~bad_N
    result.block_ST[slot_N] = state_NT

    next_start_N = torch.where(committed_N, start_N + length_N, start_N)
    next_first_new_N = torch.where(committed_N, 0, first_new_N)
    think_N = slots.think_S[slot_N]
    if rules.end_think_id is not None:
        counts = (offset >= first_new_N[:, None]) & (offset < length_N[:, None])
        seen_N = (counts & (state_NT == rules.end_think_id)).any(-1)
        think_N = torch.where(committed_N & seen_N, NEVER, think_N)
    opened_NT = state_NT
    if rules.seeded:
        opened_NT = torch.where(offset == 0, next_NT.gather(1, length_N[:, None] - 1), state_NT)
    known_N = torch.full_like(start_N, int(rules.seeded))
    opened_NT = fill_block_reference(opened_NT, known_N, next_first_new_N, next_start_N, think_N, rules)
    opened_mask = opening_mask_reference(opened_NT, rules)
    opening = find_ending_reference(opened_NT, opened_mask, next_first_new_N, limit_N - next_start_N, stop_ids)
    done_N, end_N, stopped_N = (torch.where(committed_N, a, b) for a, b in zip(opening, ending, strict=True))
    state_NT = torch.where(committed_N[:, None], opened_NT, state_NT)

    slots.state_ST[slot_N] = state_NT
    slots.start_S[slot_N] = next_start_N
    slots.first_new_S[slot_N] = next_first_new_N
    slots.think_S[slot_N] = think_N
    slots.active_S[slot_N] = ~done_N & ~bad_N
    if slots.guess_token_STJ.shape[2]:
        slots.has_guess_S[slot_N] = ~committed_N
        keeping = slot_N[~committed_N]
        slots.guess_token_STJ[keeping] = predictions.top_token_ATJ[at_N[~committed_N]]
        slots.guess_logprob_STJ[keeping] = predictions.top_logprob_ATJ[at_N[~committed_N]]
    commit.branch_S[slot_N] = torch.where(committed_N, branch_N, -1).int()
    commit.length_S[slot_N] = length_N
    commit.start_S[slot_N] = start_N
    result.state_ST[slot_N] = state_NT
    active_N = torch.ones_like(done_N)
    flags = (active_N, done_N, stopped_N, bad_N, committed_N, length_N, end_N, first_new_N, next_first_new_N)
    for name, value in zip(FLAGS, (*flags, next_start_N), strict=True):
        result.flag(name)[slot_N] = value.long()


def _count(
    slot_N: torch.Tensor,
    kind_NB: torch.Tensor,
    accepted_NB: torch.Tensor,
    graph: Graph,
    block: int,
    counters: Counters,
) -> None:
    """Adds a step to the counters of its slots."""
    drafting_N = kind_NB[:, 0] == DENOISE
    counters.denoise_S[slot_N] += drafting_N
    counters.commit_S[slot_N] += ~drafting_N
    if not graph.num_depths:
        return
    depths = torch.arange(1, graph.num_depths + 1, device=slot_N.device)
    at_depth_BK = (graph.depth_B[:, None] == depths).long()

    def by_depth(flag_NB: torch.Tensor) -> torch.Tensor:
        return (flag_NB.long()[..., None] * at_depth_BK).sum(-2)

    counters.proposed_SK[slot_N] += by_depth(kind_NB != VOID)
    counters.accepted_SK[slot_N] += by_depth(accepted_NB)
    counters.draft_rows_SK[slot_N] += by_depth(kind_NB == DENOISE) * block
    counters.run_lengths_SB[slot_N, accepted_NB.sum(-1)] += drafting_N
