"""Opening a block: masks behind the seed and a due end-of-thinking token; and whether a block ends its row.

S slots, T block positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fused.control import Rules, Slots
from kernels.fused.launch import overlapped, wait_for_inputs


def open_block(
    slots: Slots, rules: Rules, stop_ids: torch.Tensor, slot: int, seed_1: torch.Tensor | None = None
) -> None:
    """Opens the first block of a row: what stands before ``first_new`` stays, the rest becomes masks.

    ``seed_1`` (int64, on the device) is the token after the cached prompt; it stands at position 0 where the prompt
    leaves no ragged end. The slot becomes active, or pending where the opening already ends the row.
    """
    block = rules.block_size
    _open_kernel[(1,)](
        slots.active_S,
        slots.pending_S,
        slots.has_guess_S,
        slots.state_ST,
        slots.start_S,
        slots.first_new_S,
        slots.limit_S,
        slots.think_S,
        stop_ids,
        slots.start_S if seed_1 is None else seed_1,
        slot,
        T=block,
        BT=tile_width(block),
        MASK_ID=rules.mask_id,
        END_THINK=-1 if rules.end_think_id is None else rules.end_think_id,
        HAS_SEED=seed_1 is not None,
        VERIFY=rules.verify_draft,
        NUM_STOP=len(stop_ids),
        num_warps=1,
        **overlapped(slots.state_ST),
    )


def tile_width(count: int) -> int:
    """Elements of a tile that holds ``count``."""
    return max(16, triton.next_power_of_2(count))


@triton.jit(do_not_specialize=["i_s"])
def _open_kernel(
    p_active,
    p_pending,
    p_has_guess,
    p_state,
    p_start,
    p_first_new,
    p_limit,
    p_think,
    p_stop_ids,
    p_seed,
    i_s,
    T: tl.constexpr,
    BT: tl.constexpr,
    MASK_ID: tl.constexpr,
    END_THINK: tl.constexpr,
    HAS_SEED: tl.constexpr,
    VERIFY: tl.constexpr,
    NUM_STOP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    o_t = tl.arange(0, BT)
    wait_for_inputs(OVERLAP)
    start = tl.load(p_start + i_s)
    first_new = tl.load(p_first_new + i_s).to(tl.int32)
    limit = block_limit(tl.load(p_limit + i_s), start, T)
    think = tl.load(p_think + i_s)
    state = tl.load(p_state + i_s * T + o_t, mask=o_t < T, other=-1).to(tl.int32)
    if HAS_SEED:
        state = tl.where((o_t == 0) & (first_new == 0), tl.load(p_seed).to(tl.int32), state)
        state = fill_block(state, o_t, tl.maximum(first_new, 1), first_new, start, think, T, MASK_ID, END_THINK)
    else:
        state = fill_block(state, o_t, first_new, first_new, start, think, T, MASK_ID, END_THINK)
    masked = opening_mask(state, o_t, MASK_ID, VERIFY)
    done, _, _ = find_ending(state, masked, o_t, first_new, limit, p_stop_ids, NUM_STOP, T, 0)
    tl.store(p_state + i_s * T + o_t, state.to(tl.int64), mask=o_t < T)
    tl.store(p_has_guess + i_s, False)
    tl.store(p_active + i_s, done == 0)
    tl.store(p_pending + i_s, done)


@triton.jit
def fill_block(
    state, o_t, known, first_new, start, think, T: tl.constexpr, MASK_ID: tl.constexpr, END_THINK: tl.constexpr
):
    """Masks from offset ``known`` on, and the end-of-thinking token where it falls due in this block."""
    state = tl.where((o_t >= known) & (o_t < T), MASK_ID, state)
    if END_THINK >= 0:
        # Due in an earlier block but not seen since: as early as this block's generated part allows.
        due = tl.maximum(think - start, first_new)
        state = tl.where((o_t == due) & (think < start + T), END_THINK, state)
    return state


@triton.jit
def opening_mask(state, o_t, MASK_ID: tl.constexpr, VERIFY: tl.constexpr):
    """Positions of a block just opened that decide nothing about its end: masks, and all drafts still unverified."""
    masked = state == MASK_ID
    if VERIFY:
        masked = masked | (o_t > 0)
    return masked


@triton.jit
def block_limit(limit, start, T: tl.constexpr):
    """The limit counted from the block's start; all beyond the block is one."""
    return tl.minimum(limit - start, T + 1).to(tl.int32)


@triton.jit
def find_ending(
    tokens, masked, o_t, first_new, limit, p_stop_ids, NUM_STOP: tl.constexpr, T: tl.constexpr, AXIS: tl.constexpr
):
    """Whether states end their row, where their tokens end, and whether a stop token does it.

    A row is done when a stop token, or the limit, has no mask before it; stop ids before ``first_new`` never count.
    """
    is_stop = tokens < -1
    for k in tl.static_range(NUM_STOP):
        is_stop = is_stop | (tokens == tl.load(p_stop_ids + k).to(tl.int32))
    is_stop = is_stop & (masked == 0) & (o_t >= first_new)
    first_stop = tl.min(tl.where(is_stop, o_t, T), axis=AXIS)
    first_mask = tl.min(tl.where(masked, o_t, T), axis=AXIS)
    stopped = (first_stop < T) & (first_mask > first_stop) & (first_stop < limit)
    done = stopped | ((limit <= T) & (first_mask >= limit))
    return done, tl.where(stopped, first_stop, tl.minimum(limit, T)), stopped


def open_block_reference(
    slots: Slots, rules: Rules, stop_ids: torch.Tensor, slot: int, seed_1: torch.Tensor | None = None
) -> None:
    """``open_block`` in torch."""
    at = slice(slot, slot + 1)
    state, first_new, start = slots.state_ST[at], slots.first_new_S[at], slots.start_S[at]
    if seed_1 is not None:
        offset = torch.arange(rules.block_size, device=state.device)
        state = torch.where((offset == 0) & (first_new == 0)[:, None], seed_1, state)
    known = first_new if seed_1 is None else first_new.clamp(min=1)
    state = fill_block_reference(state, known, first_new, start, slots.think_S[at], rules)
    masked = opening_mask_reference(state, rules)
    done, _, _ = find_ending_reference(state, masked, first_new, slots.limit_S[at] - start, stop_ids)
    slots.state_ST[at] = state
    slots.has_guess_S[at] = False
    slots.active_S[at] = ~done
    slots.pending_S[at] = done


def fill_block_reference(
    state_ST: torch.Tensor,
    known_S: torch.Tensor,
    first_new_S: torch.Tensor,
    start_S: torch.Tensor,
    think_S: torch.Tensor,
    rules: Rules,
) -> torch.Tensor:
    """``fill_block`` in torch."""
    offset = torch.arange(rules.block_size, device=state_ST.device)
    state_ST = torch.where(offset >= known_S[:, None], rules.mask_id, state_ST)
    if rules.end_think_id is None:
        return state_ST
    due_S = torch.maximum(think_S - start_S, first_new_S)
    inside_S = think_S < start_S + rules.block_size
    return torch.where((offset == due_S[:, None]) & inside_S[:, None], rules.end_think_id, state_ST)


def opening_mask_reference(state_ST: torch.Tensor, rules: Rules) -> torch.Tensor:
    """``opening_mask`` in torch."""
    masked_ST = state_ST == rules.mask_id
    if rules.verify_draft:
        masked_ST[:, 1:] = True
    return masked_ST


def find_ending_reference(
    tokens_ST: torch.Tensor,
    masked_ST: torch.Tensor,
    first_new_S: torch.Tensor,
    limit_S: torch.Tensor,
    stop_ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``find_ending`` in torch, for any leading shape: done, end, stopped."""
    block = tokens_ST.shape[-1]
    offset = torch.arange(block, device=tokens_ST.device)
    is_stop = torch.isin(tokens_ST, stop_ids) & ~masked_ST & (offset >= first_new_S[..., None])
    first_stop = torch.where(is_stop, offset, block).amin(-1)
    first_mask = torch.where(masked_ST, offset, block).amin(-1)
    stopped = (first_stop < block) & (first_mask > first_stop) & (first_stop < limit_S)
    full = (limit_S <= block) & (first_mask >= limit_S)
    return stopped | full, torch.where(stopped, first_stop, limit_S.clamp(max=block)), stopped
