"""The kernel of ``kernels.fused.gate``: one program a list position brings its stream up to date, gates and norms it.

AHEAD, with TESTS: where there are more positions than programs that fit at once, each walks over several. What it must
know of a position lies at the end of a chain of loads: it is looked up while the one before is on its way.

p list positions, S slots, B branches, T block positions, E hidden width, K partial sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.fused.gate_lookup import listed, look_above, look_up
from kernels.fused.launch import wait_for_inputs
from kernels.fused.layout import DENOISE
from kernels.fused.placement import place_row
from kernels.fused.residual import add_rows, added_row, rms_norm_row, stored_row, summed_row

_DENOISE = tl.constexpr(DENOISE)


@triton.jit(do_not_specialize_on_alignment=["p_count", "p_slot_count", "p_used", "p_valid"])
def gate_kernel(
    p_source,
    p_parts,
    p_used,
    p_added_keep,
    p_added_row,
    p_tokens,
    p_kind,
    p_index,
    p_num_live,
    p_slot,
    p_branch,
    p_parent,
    p_ancestors,
    p_length,
    p_inherit_keep,
    p_weight,
    p_stream,
    p_normed,
    p_keep,
    p_row,
    p_count,
    p_position,
    p_slot_count,
    p_slot_rows,
    p_stored,
    p_valid,
    eps,
    delta_squared,
    time_squared,
    stride,
    num_branches,
    num_positions,
    num_slot_rows,
    T: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    COUNTED: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    MAPPED: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    INHERITS: tl.constexpr,
    TESTS: tl.constexpr,
    DRAFTS: tl.constexpr,
    TIME: tl.constexpr,
    SKIPS: tl.constexpr,
    STORED: tl.constexpr,
    ONE_SLOT: tl.constexpr,
    ONE_BRANCH: tl.constexpr,
    EAGER: tl.constexpr,
    EARLY: tl.constexpr,
    BE: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Without folding every position keeps its place: its row has its number.
    IN_PLACE: tl.constexpr = (not (INHERITS or TESTS or SKIPS)) and (not HAS_LENGTH)
    AT_ONCE: tl.constexpr = EAGER and (not EARLY)
    CACHE: tl.constexpr = ".cg" if EARLY else ""
    dtype: tl.constexpr = p_stream.dtype.element_ty
    o_e = tl.arange(0, BE)
    m_e = o_e < E
    # One branch: while the kernel before still runs. Several: late, where registers limit what is on its way at once.
    if ONE_BRANCH:
        b_weight = tl.load(p_weight + o_e, mask=m_e, other=0.0)  # [BE]
    num_live = tl.load(p_num_live, cache_modifier=CACHE)
    # Bounded by the room and not by the list's length: the first loads need not wait for it.
    i_first, step, end = tl.program_id(0), tl.num_programs(0), num_positions
    used = K
    if AHEAD:
        end = num_live * T
        i_slot, i_branch = listed(p_slot, p_branch, i_first, end, T, ONE_SLOT, ONE_BRANCH, CACHE)
        i_next_slot, i_next_branch = listed(p_slot, p_branch, i_first + step, end, T, ONE_SLOT, ONE_BRANCH, CACHE)
        own = look_up(
            p_added_keep, p_added_row, p_kind, p_ancestors, p_inherit_keep, p_valid, i_first, i_slot, i_branch,
            num_branches, T, MAPPED, INHERITS, TESTS, DRAFTS, TIME, ONE_BRANCH, CACHE,
        )  # fmt: skip
        if DRAFTS:
            above = look_above(
                p_added_keep, p_added_row, p_index, p_parent, i_first, i_slot, i_branch, own[2], num_branches, T,
                MAPPED, CACHE,
            )  # fmt: skip
    if AHEAD or (not EARLY):
        wait_for_inputs(OVERLAP)
        if COUNTED:
            used = tl.load(p_used)
    for i_p in range(i_first, end, step):
        i_t = i_p % T
        live = True
        if not AHEAD:
            i_slot, i_branch = 0, 0
            if not ONE_SLOT:
                i_slot = tl.load(p_slot + i_p // T, cache_modifier=CACHE)
            if not ONE_BRANCH:
                i_branch = tl.load(p_branch + i_p // T, cache_modifier=CACHE)
            live = i_p // T < num_live
        if AT_ONCE:
            b_stored = stored_row(p_source, i_p, o_e, m_e, E, "")  # [BE]
            if (K > 0) and (not MAPPED):
                b_added = added_row(p_parts, i_p, stride, used, o_e, m_e, E, K, COUNTED)  # [BE]
        if HAS_LENGTH:
            live = live & (i_t < tl.load(p_length + tl.where(live, i_slot, 0), cache_modifier=CACHE))
        if SKIPS:
            i_at = tl.where(live, i_slot, 0)
            skip = live & (tl.load(p_valid + i_at, cache_modifier=CACHE) > 0)
            skip = skip & (tl.load(p_kind + i_at, cache_modifier=CACHE) == _DENOISE)
            skip = skip & ((tl.load(p_inherit_keep + i_at * T + i_t, cache_modifier=CACHE) & 1) == 0)
            if skip:
                if EARLY:
                    wait_for_inputs(OVERLAP)
                tl.store(p_row + i_at * T + i_t, num_positions + i_at * T + i_t)
            live = live & (skip == 0)
        if live:
            i_table = (i_slot * num_branches + i_branch) * T + i_t
            if not AHEAD:
                own = look_up(
                    p_added_keep, p_added_row, p_kind, p_ancestors, p_inherit_keep, p_valid, i_p, i_slot, i_branch,
                    num_branches, T, MAPPED, INHERITS, TESTS, DRAFTS, TIME, ONE_BRANCH, CACHE,
                )  # fmt: skip
            fold, in_time, i_ancestors, i_part = own
            if not AT_ONCE:
                i_source = tl.load(p_tokens + i_table, cache_modifier=CACHE) if BY_TOKEN else i_p
                b_stored = stored_row(p_source, i_source, o_e, m_e, E, CACHE)  # [BE]
            if (AHEAD or (not EARLY)) and (K > 0) and (MAPPED or not AT_ONCE):
                b_added = summed_row(
                    p_parts, p_stored, i_part, num_positions, stride, used, o_e, m_e, E, K, COUNTED, STORED, AHEAD
                )  # [BE]  # fmt: skip
            if TESTS and (not DRAFTS):
                i_before = num_positions + i_slot * T + i_t
                b_above = stored_row(p_stream, i_before, o_e, o_e < tl.where(in_time, E, 0), E, CACHE)  # [BE]
            elif TESTS:
                # Masked and not branched over: the parent's row is on its way together with the branch's own.
                if not AHEAD:
                    above = look_above(
                        p_added_keep, p_added_row, p_index, p_parent, i_p, i_slot, i_branch, i_ancestors, num_branches,
                        T, MAPPED, CACHE,
                    )  # fmt: skip
                i_above, i_p_above, i_part_above = above
                i_source = tl.load(p_tokens + i_above * T + i_t, cache_modifier=CACHE) if BY_TOKEN else i_p_above
                p_above, tested = p_source, fold
                if TIME:
                    p_above, tested = tl.where(in_time, p_stream, p_source), fold | in_time
                    i_source = tl.where(in_time, num_positions + i_slot * T + i_t, i_source)
                b_above = stored_row(p_above, i_source, o_e, o_e < tl.where(tested, E, 0), E, CACHE)  # [BE]
            if EARLY and (not AHEAD):
                wait_for_inputs(OVERLAP)
                if COUNTED:
                    used = tl.load(p_used)
                if K > 0:
                    b_added = summed_row(
                        p_parts, p_stored, i_part, num_positions, stride, used, o_e, m_e, E, K, COUNTED, STORED, False
                    )  # [BE]  # fmt: skip
            if TESTS and DRAFTS and (K > 0):
                # Where the position was folded in the layer before, the same row serves both: it is here already.
                other = i_part_above != i_part
                m_other = o_e < tl.where(fold & other, E, 0)
                b_other = summed_row(
                    p_parts, p_stored, i_part_above, num_positions, stride, used, o_e, m_other, E, K, COUNTED, STORED,
                    AHEAD,
                )  # [BE]  # fmt: skip
            if AHEAD:
                # While this position's rows are on their way.
                i_now_slot, i_now_branch, i_slot, i_branch = i_slot, i_branch, i_next_slot, i_next_branch
                i_next_slot, i_next_branch = listed(
                    p_slot, p_branch, i_p + 2 * step, end, T, ONE_SLOT, ONE_BRANCH, CACHE
                )
                own = look_up(
                    p_added_keep, p_added_row, p_kind, p_ancestors, p_inherit_keep, p_valid, i_p + step, i_slot,
                    i_branch, num_branches, T, MAPPED, INHERITS, TESTS, DRAFTS, TIME, ONE_BRANCH, CACHE,
                )  # fmt: skip
                if DRAFTS:
                    above = look_above(
                        p_added_keep, p_added_row, p_index, p_parent, i_p + step, i_slot, i_branch, own[2],
                        num_branches, T, MAPPED, CACHE,
                    )  # fmt: skip
            else:
                i_now_slot, i_now_branch = i_slot, i_branch
            b_x = b_stored
            if K > 0:
                b_x = add_rows(b_stored, b_added, dtype)
            if TESTS and DRAFTS:
                if K > 0:
                    b_parent = add_rows(b_above, tl.where(other, b_other, b_added), dtype)
                    b_above = tl.where(in_time, b_above, b_parent) if TIME else b_parent
                if TIME:
                    fold = (fold | in_time) & _is_near(b_x, b_above, tl.where(in_time, time_squared, delta_squared))
                else:
                    fold = fold & _is_near(b_x, b_above, delta_squared)
            elif TESTS:
                fold = in_time & _is_near(b_x, b_above, time_squared)
            elif TIME:
                fold = fold | in_time if DRAFTS else in_time
            tl.store(p_stream + tl.cast(i_p, tl.int64) * E + o_e, b_x.to(dtype), mask=m_e)
            if not fold:
                i_row = place_row(
                    p_keep, p_row, p_count, p_position, p_slot_count, p_slot_rows, p_index, i_p, i_now_slot,
                    i_now_branch, i_t, num_live, num_branches, num_slot_rows, T, IN_PLACE, ONE_SLOT,
                )  # fmt: skip
                if not ONE_BRANCH:
                    b_weight = tl.load(p_weight + o_e, mask=m_e, other=0.0)  # [BE]
                b_normed = rms_norm_row(b_x, b_weight, eps, p_normed.dtype.element_ty, E)
                tl.store(p_normed + tl.cast(i_row, tl.int64) * E + o_e, b_normed, mask=m_e)
            elif in_time:
                tl.store(p_row + i_table, num_positions + i_now_slot * T + i_t)
    if EARLY and (not AHEAD):
        wait_for_inputs(OVERLAP)  # For programs without a position: that this kernel ended must tell as much as ever.


@triton.jit
def _add_both(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _is_near(b_x, b_parent, delta_squared):
    """Whether the residual against the parent folds; not where it is NaN. Both sums in one reduction."""
    b_residual = b_x - b_parent
    residual, parent = tl.reduce((b_residual * b_residual, b_parent * b_parent), 0, _add_both)
    return residual <= delta_squared * parent
