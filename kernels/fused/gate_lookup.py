"""What the gate must know of a list position before it can read its rows.

p list positions, S slots, B branches, T block positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.fused.layout import DENOISE
from kernels.fused.residual import source_row

_DENOISE = tl.constexpr(DENOISE)


@triton.jit
def listed(
    p_slot, p_branch, i_p, end, T: tl.constexpr, ONE_SLOT: tl.constexpr, ONE_BRANCH: tl.constexpr, CACHE: tl.constexpr
):  # fmt: skip
    """Slot and branch of a list position; 0, of which everything can be looked up, beyond the end."""
    i_slot, i_branch = 0, 0
    if not ONE_SLOT:
        i_slot = tl.load(p_slot + i_p // T, mask=i_p < end, other=0, cache_modifier=CACHE)
    if not ONE_BRANCH:
        i_branch = tl.load(p_branch + i_p // T, mask=i_p < end, other=0, cache_modifier=CACHE)
    return i_slot, i_branch


@triton.jit
def look_up(
    p_added_keep, p_added_row, p_kind, p_ancestors, p_inherit_keep, p_valid, i_p, i_slot, i_branch, num_branches,
    T: tl.constexpr, MAPPED: tl.constexpr, INHERITS: tl.constexpr, TESTS: tl.constexpr, DRAFTS: tl.constexpr,
    TIME: tl.constexpr, ONE_BRANCH: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Whether a position may fold on its parent, or in time, its ancestors, and the row of what is added to it."""
    i_t = i_p % T
    i_table = (i_slot * num_branches + i_branch) * T + i_t
    i_ancestors = tl.full([], 1, tl.int64)
    if not ONE_BRANCH:
        i_ancestors = tl.load(p_ancestors + i_branch)
    i_part = i_p
    if MAPPED:
        if ONE_BRANCH:
            i_part = tl.load(p_added_row + i_table, cache_modifier=CACHE)
        else:
            i_part = source_row(p_added_keep, p_added_row, i_ancestors, i_slot, i_t, num_branches, T, CACHE)
    fold, in_time = False, False
    if INHERITS or TESTS:
        denoises = tl.load(p_kind + i_table // T, cache_modifier=CACHE) == _DENOISE
        if DRAFTS:
            fold = (i_branch > 0) & denoises
        if TIME:
            in_time = denoises & (i_branch == 0) & (tl.load(p_valid + i_slot, cache_modifier=CACHE) > 0)
    if INHERITS:
        kept = tl.load(p_inherit_keep + i_slot * T + i_t, cache_modifier=CACHE)
        if DRAFTS:
            fold = fold & (((kept >> i_branch) & 1) == 0)
        if TIME:
            in_time = in_time & (((kept >> i_branch) & 1) == 0)
    return fold, in_time, i_ancestors, i_part


@triton.jit
def look_above(
    p_added_keep, p_added_row, p_index, p_parent, i_p, i_slot, i_branch, i_ancestors, num_branches,
    T: tl.constexpr, MAPPED: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """A position's parent: its branch over all slots, its list position, and the row of what is added to it."""
    i_t = i_p % T
    i_above = i_slot * num_branches + tl.load(p_parent + i_branch)
    i_p_above = tl.load(p_index + i_above, cache_modifier=CACHE) * T + i_t
    i_part_above = i_p_above
    if MAPPED:
        # A branch's ancestors are its parent's and itself. (Of main branches this makes none, hence row 0.)
        i_others = i_ancestors ^ (tl.full([], 1, tl.int64) << i_branch)
        i_part_above = source_row(p_added_keep, p_added_row, i_others, i_slot, i_t, num_branches, T, CACHE)
    return i_above, i_p_above, i_part_above
