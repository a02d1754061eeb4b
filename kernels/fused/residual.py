"""Reading the residual stream: a position's value is what is stored plus the output of the projection before.

The value is not stored where it is only compared with, so whoever needs it computes it by the same operations from the
same inputs: equal states have equal bits. p list positions, S slots, B branches, T block positions, E hidden width,
K partial sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fused.layout import Addend, Branches, RowMap

MAX_PROGRAMS = 2048
"""Programs of a row-wise launch; each walks over its rows in strides. More would only cost time to exit again: counts
live on the device, and a launch is made for the largest."""
ELEMENTS = 8
MAX_WARPS = 8


def row_config(width: int) -> dict[str, int | bool]:
    """Tile and warps for one row of ``width``: they fix the order of its sums, so they depend on nothing else.

    ``ELEMENTS`` a thread, up to 8 warps, and beyond that more elements: several programs fit on a multiprocessor, and
    sums cross few warps. Multiply-adds stay unfused, so that each specialisation of a kernel rounds alike.
    """
    block = max(triton.next_power_of_2(width), 32)
    return {"BE": block, "num_warps": min(max(block // (32 * ELEMENTS), 1), MAX_WARPS), "enable_fp_fusion": False}


@triton.jit
def highest_bit(i_bits):
    """Number of the highest bit that is set in a positive int64; 0 for 0.

    The exponent of a float32; without the bit below the highest, rounding cannot reach the next power of two.
    """
    i_float = (i_bits & ~(i_bits >> 1)).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.maximum((i_float >> 23) - 127, 0)


@triton.jit
def source_row(p_keep, p_row, i_ancestors, i_slot, i_t, num_branches, T: tl.constexpr, CACHE: tl.constexpr):
    """Row that serves block position t of the branch with these ancestors."""
    i_branch = highest_bit(tl.load(p_keep + i_slot * T + i_t, cache_modifier=CACHE) & i_ancestors)
    return tl.load(p_row + (i_slot * num_branches + i_branch) * T + i_t, cache_modifier=CACHE)


@triton.jit
def stored_row(p_source, i_source, o_e, m_e, E: tl.constexpr, CACHE: tl.constexpr):
    """Stored row in float32."""
    p = p_source + tl.cast(i_source, tl.int64) * E + o_e
    return tl.load(p, mask=m_e, other=0.0, cache_modifier=CACHE).to(tl.float32)  # [BE]


@triton.jit
def added_row(
    p_parts, i_part, stride, used, o_e, m_e, E: tl.constexpr, K: tl.constexpr, COUNTED: tl.constexpr,
    MOSTLY_ONE: tl.constexpr = False,
):  # fmt: skip
    """Sum of a row's K > 0 parts, ``stride`` rows apart; COUNTED: of the first ``used`` of them.

    MOSTLY_ONE: the others are branched over where there is one, and need no registers while the first is on its way.
    """
    i_part = tl.cast(i_part, tl.int64)
    b_sum = tl.load(p_parts + i_part * E + o_e, mask=m_e, other=0.0)  # [BE]
    if COUNTED and MOSTLY_ONE and K > 1:
        if used > 1:
            b_sum = _add_others(b_sum, p_parts, i_part, stride, used, o_e, m_e, E, K, True)
    else:
        b_sum = _add_others(b_sum, p_parts, i_part, stride, used, o_e, m_e, E, K, COUNTED)
    return b_sum


@triton.jit
def _add_others(
    b_sum, p_parts, i_part, stride, used, o_e, m_e, E: tl.constexpr, K: tl.constexpr, COUNTED: tl.constexpr
):
    for k in tl.static_range(1, K):
        m_k = m_e
        if COUNTED:
            m_k = m_e & (k + 0 * o_e < used)  # A block: Triton's interpreter takes no scalar here.
        b_part = tl.load(p_parts + (i_part + k * stride) * E + o_e, mask=m_k, other=0.0)
        if COUNTED:
            b_sum = tl.where(used > k, b_sum + b_part, b_sum)  # Adding zero would lose the sign of a zero.
        else:
            b_sum += b_part
    return b_sum


@triton.jit
def summed_row(
    p_parts, p_stored, i_part, room, stride, used, o_e, m_e, E: tl.constexpr, K: tl.constexpr, COUNTED: tl.constexpr,
    STORED: tl.constexpr, MOSTLY_ONE: tl.constexpr = False,
):  # fmt: skip
    """The same where rows from ``room`` on are stored ones (STORED), which have one part."""
    if STORED:
        is_stored, i_part = i_part >= room, tl.cast(i_part, tl.int64)
        p_row = tl.where(is_stored, p_stored + (i_part - room) * E, p_parts + i_part * E)
        return added_row(p_row, 0, stride, tl.where(is_stored, 1, used), o_e, m_e, E, K, True, MOSTLY_ONE)
    else:
        return added_row(p_parts, i_part, stride, used, o_e, m_e, E, K, COUNTED, MOSTLY_ONE)


@triton.jit
def add_rows(b_stored, b_added, dtype):
    """The stream: stored row plus what was added, rounded to the stream's dtype; returned in float32."""
    return (b_stored + b_added).to(dtype).to(tl.float32)


@triton.jit
def rms_norm_row(b_x, b_weight, eps, dtype, E: tl.constexpr):
    """RMSNorm of a row. Rounded before the weight and after it, as the official models do."""
    b_normed = b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=0) / E + eps)
    return (b_normed.to(dtype).to(tl.float32) * b_weight.to(tl.float32)).to(dtype)


def source_rows(rows: RowMap, branches: Branches, position_N: torch.Tensor) -> torch.Tensor:
    """Rows that serve list positions, int64 [N]; the torch counterpart of ``source_row``."""
    block = branches.tokens_SBT.shape[2]
    a, t = position_N // block, position_N % block
    slot, branch = branches.slot_A[a].long(), branches.branch_A[a].long()
    kept = rows.keep_ST[slot, t] & branches.ancestors_B[branch]
    nearest = torch.zeros_like(branch)
    for n in range(len(branches.parent_B)):
        nearest = torch.where((kept >> n & 1).bool(), n, nearest)
    return rows.row_SBT[slot, nearest, t].long()


def stream_rows(
    stored_NE: torch.Tensor, addend: Addend | None, branches: Branches, position_N: torch.Tensor
) -> torch.Tensor:
    """Residual stream at list positions whose stored rows are given, [N, E]."""
    if addend is None:
        return stored_NE
    row_N = position_N if addend.rows is None else source_rows(addend.rows, branches, position_N)
    return (stored_NE.float() + addend.total(row_N)).to(stored_NE.dtype)
