"""Rows of a map: which kept position gets which, by the kernel and in torch. See ``kernels.fused.layout.RowMap``.

N kept positions, S slots, B branches, T block positions, X = B * T.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fused.layout import RowMap


@triton.jit
def place_row(
    p_keep, p_row, p_count, p_position, p_slot_count, p_slot_rows, p_index, i_p, i_slot, i_branch, i_t, num_live,
    num_branches, num_slot_rows, T: tl.constexpr, IN_PLACE: tl.constexpr, ONE_SLOT: tl.constexpr,
):  # fmt: skip
    """Enters a kept position into the map and returns its row. In place, nothing waits for a counter's answer."""
    i_row, i_in_slot = i_p, i_p
    if not IN_PLACE:
        if ONE_SLOT:
            i_row = tl.atomic_add(p_count, 1, sem="relaxed")
            i_in_slot = i_row
            tl.atomic_add(p_slot_count, 1, sem="relaxed")
        else:
            # Both counters at once, as their answers take long.
            o = tl.arange(0, 2)
            b_count = tl.atomic_add(tl.where(o == 0, p_count, p_slot_count + i_slot), 1, sem="relaxed")  # [2]
            i_row, i_in_slot = tl.sum(tl.where(o == 0, b_count, 0)), tl.sum(tl.where(o == 1, b_count, 0))
    else:
        if i_p == 0:
            tl.store(p_count, num_live * T)
        if not ONE_SLOT:
            # A slot's branches stand together in the list, the main one first.
            i_in_slot = i_p - tl.load(p_index + i_slot * num_branches) * T
            tl.atomic_add(p_slot_count + i_slot, 1, sem="relaxed")
        elif i_p == 0:
            tl.store(p_slot_count, num_live * T)
    tl.store(p_slot_rows + i_slot * num_slot_rows + i_in_slot, i_row)
    tl.atomic_or(p_keep + i_slot * T + i_t, tl.full([], 1, tl.int64) << i_branch, sem="relaxed")
    tl.store(p_row + (i_slot * num_branches + i_branch) * T + i_t, i_row)
    tl.store(p_position + i_row, i_p)
    return i_row


def place_rows(
    out: RowMap, position_N: torch.Tensor, slot_N: torch.Tensor, branch_N: torch.Tensor, t_N: torch.Tensor
) -> None:
    """Appends rows for kept positions."""
    row = int(out.count_1) + torch.arange(len(position_N), device=position_N.device)
    # Each branch sets its own bit, once: the sum is the union.
    out.keep_ST.index_put_((slot_N, t_N), torch.ones_like(branch_N) << branch_N, accumulate=True)
    out.row_SBT[slot_N, branch_N, t_N] = row.int()
    out.position_R[row] = position_N.int()
    out.count_1.add_(len(row))
    for s in slot_N.unique().tolist():
        mine = row[slot_N == s].int()
        have = int(out.slot_count_S[s])
        out.slot_rows_SX[s, have : have + len(mine)] = mine
        out.slot_count_S[s] += len(mine)
