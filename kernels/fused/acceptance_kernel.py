"""The kernel of ``kernels.fused.acceptance``: one program takes a slot from its predictions to its next state.

S slots, B branches, T block positions, J kept tokens, K draft depths.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.fused.control import FLAGS, NEVER
from kernels.fused.launch import wait_for_inputs
from kernels.fused.layout import DENOISE, FINAL, VOID
from kernels.fused.opening import block_limit, fill_block, find_ending, opening_mask
from kernels.fused.walk import select_next, walk

_VOID, _DENOISE, _FINAL, _NEVER = tl.constexpr(VOID), tl.constexpr(DENOISE), tl.constexpr(FINAL), tl.constexpr(NEVER)
_NUM_FLAGS = tl.constexpr(len(FLAGS))


@triton.jit(
    do_not_specialize=["threshold"],
    # Parts of one tensor: where they begin depends on the batch.
    do_not_specialize_on_alignment=["p_commit_branch", "p_commit_length", "p_commit_start", "p_valid"],
)
def accept_kernel(
    p_active,
    p_pending,
    p_state,
    p_start,
    p_first_new,
    p_limit,
    p_think,
    p_has_guess,
    p_guess_token,
    p_guess_logprob,
    p_stop_ids,
    p_tokens,
    p_kind,
    p_index,
    p_token,
    p_confidence,
    p_top_token,
    p_top_logprob,
    p_next,
    p_invalid,
    p_result,
    p_commit_branch,
    p_commit_length,
    p_commit_start,
    p_depth,
    p_denoise,
    p_commit,
    p_proposed,
    p_accepted,
    p_draft_rows,
    p_run_lengths,
    p_carried,
    p_steps,
    p_valid,
    p_compute,
    threshold,
    B: tl.constexpr,
    BB: tl.constexpr,
    T: tl.constexpr,
    BT: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    STRICT: tl.constexpr,
    SEEDED: tl.constexpr,
    VERIFY: tl.constexpr,
    MASK_ID: tl.constexpr,
    END_THINK: tl.constexpr,
    NUM_STOP: tl.constexpr,
    CARRY: tl.constexpr,
    REFRESH: tl.constexpr,
    SUB_BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    i_s = tl.program_id(0)
    o_b, o_t = tl.arange(0, BB), tl.arange(0, BT)
    wait_for_inputs(OVERLAP)
    in_t = o_t < T
    start = tl.load(p_start + i_s)
    first_new = tl.load(p_first_new + i_s).to(tl.int32)
    row_limit = tl.load(p_limit + i_s)
    limit = block_limit(row_limit, start, T)
    if tl.load(p_active + i_s).to(tl.int32) == 0:
        tl.store(p_commit_branch + i_s, -1)
        if CARRY:
            tl.store(p_carried + i_s, -1)
        state = tl.load(p_state + i_s * T + o_t, mask=in_t, other=-1).to(tl.int32)
        masked = opening_mask(state, o_t, MASK_ID, VERIFY)
        _, end, stopped = find_ending(state, masked, o_t, first_new, limit, p_stop_ids, NUM_STOP, T, 0)
        # A row that ended when it was opened is reported here; of any other slot there is nothing to tell.
        pending = tl.load(p_pending + i_s).to(tl.int32) > 0
        tl.store(p_pending + i_s, False)
        _report(p_result, i_s, False, pending, stopped & pending, False, False, 0, end, first_new, first_new, start, T)
        _report_block(p_result, i_s, 1, state, o_t, T)
        return

    inside = (o_b < B)[:, None] & in_t[None, :]
    kind = tl.load(p_kind + i_s * B + o_b, mask=o_b < B, other=_VOID)
    index = tl.load(p_index + i_s * B + o_b, mask=o_b < B, other=0)
    tokens = tl.load(p_tokens + (i_s * B + o_b)[:, None] * T + o_t[None, :], mask=inside, other=-1).to(tl.int32)
    live = kind != _VOID
    computed = live[:, None] & in_t[None, :]
    o_at = index[:, None] * T + o_t[None, :]
    confidence = tl.load(p_confidence + o_at, mask=computed, other=float("-inf"))
    choice = tl.load(p_token + o_at, mask=computed, other=0).to(tl.int32)
    invalid = tl.load(p_invalid + index, mask=live, other=0) != 0
    chosen = select_next(tokens, confidence, o_t, threshold, T, GROUP, MASK_ID, HAS_THRESHOLD, STRICT)
    then = tl.where(chosen, choice, tokens)  # [BB, BT]: every branch's next state; a final one's is itself

    branch, accepted, bad = walk(tokens, then, kind, invalid, o_b, B, BB)
    here = o_b == branch
    state = tl.sum(tl.where(here[:, None], then, 0), axis=0)
    at = tl.sum(tl.where(here, index, 0), axis=0)
    final = tl.max(tl.where(here, kind, _VOID), axis=0) == _FINAL
    masked = state == MASK_ID
    length = at * 0 + T
    if VERIFY:
        wanted = (o_t > 0) & (o_t < tl.where(final, T, 0))
        follows = tl.load(p_next + at * T + o_t - 1, mask=wanted, other=0).to(tl.int32)
        agreed = tl.min(tl.where((o_t > 0) & (state != follows), o_t, T), axis=0)
        length = tl.where(final, agreed, 1)
        masked = in_t & (o_t >= length)
    done, end, stopped = find_ending(state, masked, o_t, first_new, limit, p_stop_ids, NUM_STOP, T, 0)
    committed = final & (done == 0) & (bad == 0)

    # The next block, as it opens where this one is committed.
    _report_block(p_result, i_s, 0, state, o_t, T)
    next_start = start + tl.where(committed, length, 0)
    next_first_new = tl.where(committed, 0, first_new)
    think = tl.load(p_think + i_s)
    opened = state
    if SEEDED:
        seed = tl.load(p_next + at * T + length - 1, mask=committed, other=0).to(tl.int32)
        opened = tl.where(o_t == 0, seed, opened)
    if END_THINK >= 0:
        seen = (state == END_THINK) & (o_t >= first_new) & (o_t < length)
        think = tl.where(committed & (tl.max(seen.to(tl.int32), axis=0) > 0), _NEVER, think)
        tl.store(p_think + i_s, think)
    opened = fill_block(opened, o_t, 1 if SEEDED else 0, next_first_new, next_start, think, T, MASK_ID, END_THINK)
    masked = opening_mask(opened, o_t, MASK_ID, VERIFY)
    next_limit = block_limit(row_limit, next_start, T)
    opened_done, opened_end, opened_stopped = find_ending(
        opened, masked, o_t, 0, next_limit, p_stop_ids, NUM_STOP, T, 0
    )
    state = tl.where(committed, opened, state)
    done = tl.where(committed, opened_done, done)
    end = tl.where(committed, opened_end, end)
    stopped = tl.where(committed, opened_stopped, stopped)

    _report(p_result, i_s, True, done, stopped, bad, committed, length, end, first_new, next_first_new, next_start, T)
    _report_block(p_result, i_s, 1, state, o_t, T)
    tl.store(p_commit_branch + i_s, tl.where(committed, branch, -1))
    tl.store(p_commit_length + i_s, length.to(tl.int64))
    tl.store(p_commit_start + i_s, start)
    tl.store(p_state + i_s * T + o_t, state.to(tl.int64), mask=in_t)
    tl.store(p_start + i_s, next_start)
    tl.store(p_first_new + i_s, next_first_new.to(tl.int64))
    tl.store(p_active + i_s, (done == 0) & (bad == 0))
    if CARRY:
        goes_on = (committed == 0) & (done == 0) & (bad == 0)
        _carry(p_carried, p_steps, p_valid, p_compute, i_s, branch, state, goes_on, o_t, T, GROUP, MASK_ID, REFRESH,
               SUB_BLOCKS)  # fmt: skip
    if J > 0:
        tl.store(p_has_guess + i_s, committed == 0)
        _keep(p_guess_token, p_top_token, i_s, at, tl.where(committed, 0, T * J), T * J)
        _keep(p_guess_logprob, p_top_logprob, i_s, at, tl.where(committed, 0, T * J), T * J)

    _count(i_s, kind, accepted, o_b, p_depth, p_denoise, p_commit, p_proposed, p_accepted, p_draft_rows, p_run_lengths,
           B, BB, T, K)  # fmt: skip


@triton.jit
def _carry(
    p_carried, p_steps, p_valid, p_compute, i_s, branch, state, goes_on, o_t, T: tl.constexpr, GROUP: tl.constexpr,
    MASK_ID: tl.constexpr, REFRESH: tl.constexpr, SUB_BLOCKS: tl.constexpr,
):  # fmt: skip
    """What the next step of the same block may inherit from; an ended row has none."""
    steps = tl.where(goes_on, tl.load(p_steps + i_s) + 1, 0)
    valid = goes_on
    if REFRESH > 0:
        valid = valid & (steps % REFRESH != 0)
    if SUB_BLOCKS:
        masked = (state == MASK_ID) & (o_t < T)
        active = tl.min(tl.where(masked, o_t // GROUP, T), axis=0)
        valid = valid & (tl.max((masked & (o_t == active * GROUP)).to(tl.int32), axis=0) == 0)
        tl.store(p_compute + i_s * T + o_t, (o_t // GROUP == active).to(tl.int64), mask=o_t < T)
    tl.store(p_carried + i_s, tl.where(goes_on, branch, -1))
    tl.store(p_steps + i_s, steps)
    tl.store(p_valid + i_s, valid.to(tl.int32))


@triton.jit
def _count(
    i_s,
    kind,
    accepted,
    o_b,
    p_depth,
    p_denoise,
    p_commit,
    p_proposed,
    p_accepted,
    p_draft_rows,
    p_run_lengths,
    B: tl.constexpr,
    BB: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
):
    """Adds a slot's step to its counters. Atomic because branches of one depth share a counter."""
    drafting = tl.max(tl.where(o_b == 0, kind, _VOID), axis=0) == _DENOISE
    tl.atomic_add(p_denoise + i_s, drafting.to(tl.int64), sem="relaxed")
    tl.atomic_add(p_commit + i_s, (drafting == 0).to(tl.int64), sem="relaxed")
    if K > 0:
        draft = (o_b > 0) & (kind != _VOID)
        o_k = i_s * K + tl.load(p_depth + o_b, mask=o_b < B, other=1) - 1
        one = tl.full([BB], 1, tl.int64)
        tl.atomic_add(p_proposed + o_k, one, mask=draft, sem="relaxed")
        tl.atomic_add(p_accepted + o_k, one, mask=draft & accepted, sem="relaxed")
        tl.atomic_add(p_draft_rows + o_k, one * T, mask=draft & (kind == _DENOISE), sem="relaxed")
        run = tl.sum(accepted.to(tl.int32), axis=0)
        tl.atomic_add(p_run_lengths + i_s * B + run, drafting.to(tl.int64), sem="relaxed")


@triton.jit
def _report(
    p_result,
    i_s,
    active,
    done,
    stopped,
    invalid,
    committed,
    length,
    end,
    block_first_new,
    first_new,
    start,
    T: tl.constexpr,
):
    """Writes a slot's flags in the order of ``FLAGS``."""
    p = p_result + i_s * (_NUM_FLAGS + 2 * T)
    tl.store(p, active)
    tl.store(p + 1, done)
    tl.store(p + 2, stopped)
    tl.store(p + 3, invalid)
    tl.store(p + 4, committed)
    tl.store(p + 5, length)
    tl.store(p + 6, end)
    tl.store(p + 7, block_first_new)
    tl.store(p + 8, first_new)
    tl.store(p + 9, start)


@triton.jit
def _report_block(p_result, i_s, WHICH: tl.constexpr, tokens, o_t, T: tl.constexpr):
    """Writes the finished block (0) or the state (1)."""
    p = p_result + i_s * (_NUM_FLAGS + 2 * T) + _NUM_FLAGS + WHICH * T
    tl.store(p + o_t, tokens.to(tl.int64), mask=o_t < T)


@triton.jit
def _keep(p_guess, p_top, i_s, at, count, SIZE: tl.constexpr):
    """Copies ``count`` elements (all or none) of the last accepted distribution: the next drafts come from it."""
    o = tl.arange(0, 256)
    for i in range(0, count, 256):
        mask = i + o < count
        tl.store(p_guess + i_s * SIZE + i + o, tl.load(p_top + at * SIZE + i + o, mask=mask), mask=mask)
