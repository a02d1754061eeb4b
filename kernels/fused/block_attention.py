"""Attention of every branch position over its own block, added to the state over the prefix.

A folded position takes query, prefix state, key and value from its source row, yet each branch's block part is
computed with the branch's own keys and values, so the softmax is exact.

A branches in the list, T block positions, R recomputed rows, H query heads, G key/value heads, D head width,
X = H * D, N = A * T list positions, S slots.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.fused.layout import FINAL, Branches, RowMap
from kernels.fused.prefix_state import PrefixState, padded_width
from kernels.fused.residual import highest_bit
from kernels.fused.softmax import add_keys

QUERY_TILE = {torch.bfloat16: 32, torch.float32: 16}
"""Small, and with a warp for 16 queries: one branch is too little work to fill the GPU, and the larger part of a
program's bytes belongs to its queries anyway."""
KEY_TILE = 32
NUM_WARPS = {torch.bfloat16: 2, torch.float32: 4}


@triton.jit
def _keepers(p_keep, i_s, o_t, valid, T: tl.constexpr):
    """Bit sets of the branches that are recomputed at some positions."""
    return tl.load(p_keep + i_s * T + o_t, mask=valid, other=0)


@triton.jit
def _source_rows(p_row, b_kept_ancestors, i_s, o_t, valid, B, T: tl.constexpr):
    """Row that serves each position of a branch: that of its nearest kept ancestor; 0 where not valid."""
    b_branch = highest_bit(b_kept_ancestors)
    return tl.load(p_row + (i_s * B + b_branch) * T + o_t, mask=valid, other=0).to(tl.int64)


@triton.jit
def _block_kernel(
    p_q, p_k, p_v, p_m, p_l, p_acc, p_keep, p_row, p_num_live, p_slot, p_branch, p_kind, p_start, p_ancestors,
    p_length, p_out, scale_log2, mask_unit, B,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, T: tl.constexpr, FINAL_KIND: tl.constexpr,
    LIMITED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    i_g, i_m, i_a = tl.program_id(0) % G, tl.program_id(0) // G, tl.program_id(1)
    GROUP: tl.constexpr = H // G
    # Read before it is known whether they are defined: one latency less.
    i_s, i_b = tl.load(p_slot + i_a), tl.load(p_branch + i_a)
    if i_a >= tl.load(p_num_live):
        return
    kind = tl.load(p_kind + i_s * B + i_b)
    ancestors = tl.load(p_ancestors + i_b)
    start = tl.load(p_start + i_s)
    length = T
    if LIMITED:
        length = tl.minimum(tl.load(p_length + i_s), T).to(tl.int32)
    unit = tl.where(kind == FINAL_KIND, mask_unit, T)

    o_m = i_m * BM + tl.arange(0, BM)
    o_t, o_u = o_m // GROUP, tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    in_head = (o_d < D)[None, :]
    valid, inside = o_t < length, o_u < length
    # The first keys' rows are looked up beside the queries', not after them: two latencies less.
    b_keep_t, b_keep_u = _keepers(p_keep, i_s, o_t, valid, T), _keepers(p_keep, i_s, o_u, inside, T)
    b_row_t = _source_rows(p_row, b_keep_t & ancestors, i_s, o_t, valid, B, T)
    b_row_u = _source_rows(p_row, b_keep_u & ancestors, i_s, o_u, inside, B, T)
    o_rh = b_row_t * H + i_g * GROUP + o_m % GROUP
    o_x = o_rh[:, None] * D + o_d[None, :]
    b_q = tl.load(p_q + o_x, mask=valid[:, None] & in_head, other=0.0)  # [BM, BD]
    has_prefix = tl.where(valid, start, 0) > 0
    b_m = tl.load(p_m + o_rh, mask=has_prefix, other=float("-inf"))
    b_l = tl.load(p_l + o_rh, mask=has_prefix, other=0.0)
    b_acc = tl.load(p_acc + o_x, mask=has_prefix[:, None] & in_head, other=0.0)

    # No query of the tile sees a key from `end` on. All see key 0, so m is finite after the first tile.
    end = tl.minimum(((i_m * BM + BM - 1) // GROUP // unit + 1) * unit, length)
    for _ in range(0, end, BN):
        o_kv = b_row_u[:, None] * (G * D) + i_g * D + o_d[None, :]
        b_k = tl.load(p_k + o_kv, mask=inside[:, None] & in_head, other=0.0)  # [BN, BD]
        b_v = tl.load(p_v + o_kv, mask=inside[:, None] & in_head, other=0.0)
        visible = inside[None, :] & ((o_u // unit)[None, :] <= (o_t // unit)[:, None])
        b_m, b_l, b_acc = add_keys(b_q, b_k, b_v, visible, b_m, b_l, b_acc, scale_log2)
        if T > BN:
            o_u += BN
            inside = o_u < length
            b_keep_u = _keepers(p_keep, i_s, o_u, inside, T)
            b_row_u = _source_rows(p_row, b_keep_u & ancestors, i_s, o_u, inside, B, T)
    o_out = (i_a.to(tl.int64) * T + o_t) * (H * D) + (i_g * GROUP + o_m % GROUP) * D
    b_out = b_acc / b_l[:, None]
    tl.store(p_out + o_out[:, None] + o_d[None, :], b_out.to(p_out.dtype.element_ty), mask=valid[:, None] & in_head)


def block_attention(
    q_RHD: torch.Tensor,
    k_RGD: torch.Tensor,
    v_RGD: torch.Tensor,
    state: PrefixState,
    rows: RowMap,
    branches: Branches,
    mask_unit: int,
    scale: float,
    out_NX: torch.Tensor,
    length_S: torch.Tensor | None = None,
) -> None:
    """Attention output of every position of every live branch, in the dtype of ``out_NX``.

    Inside the block, query t sees key u iff ``u // unit <= t // unit``: ``unit`` is ``mask_unit`` for final branches
    (T full, the block size, or 1 causal) and T for the others. Positions from ``length_S`` (int64) on do not exist:
    neither queries nor keys, and their output is left alone. Where ``branches.start_S`` is 0 the state is not read.
    """
    num_heads, head_dim = q_RHD.shape[1:]
    num_kv = k_RGD.shape[1]
    num_branches, block = branches.tokens_SBT.shape[1:]
    tensors = (q_RHD, k_RGD, v_RGD, out_NX, rows.keep_ST, rows.row_SBT, branches.kind_SB)
    assert all(x.is_contiguous() for x in tensors), "the kernel takes contiguous tensors"
    query_tile = QUERY_TILE[q_RHD.dtype]
    tiles = triton.cdiv(block * (num_heads // num_kv), query_tile)
    _block_kernel[(num_kv * tiles, branches.slot_A.shape[0])](
        q_RHD,
        k_RGD,
        v_RGD,
        state.m_RH,
        state.l_RH,
        state.acc_RHD,
        rows.keep_ST,
        rows.row_SBT,
        branches.num_live_1,
        branches.slot_A,
        branches.branch_A,
        branches.kind_SB,
        branches.start_S,
        branches.ancestors_B,
        branches.start_S if length_S is None else length_S,
        out_NX,
        scale * math.log2(math.e),
        mask_unit,
        num_branches,
        H=num_heads,
        G=num_kv,
        D=head_dim,
        T=block,
        FINAL_KIND=FINAL,
        LIMITED=length_S is not None,
        BM=query_tile,
        BN=min(KEY_TILE, max(16, triton.next_power_of_2(block))),
        BD=padded_width(head_dim),
        num_warps=NUM_WARPS[q_RHD.dtype],
        num_stages=1,
    )


def block_attention_reference(
    q_RHD: torch.Tensor,
    k_RGD: torch.Tensor,
    v_RGD: torch.Tensor,
    state: PrefixState,
    rows: RowMap,
    branches: Branches,
    mask_unit: int,
    scale: float,
    out_NX: torch.Tensor,
    length_S: torch.Tensor | None = None,
) -> None:
    """The same in torch, branch by branch, with one softmax over the whole block."""
    num_heads, num_kv, block = q_RHD.shape[1], k_RGD.shape[1], branches.tokens_SBT.shape[2]
    group = num_heads // num_kv
    for a in range(int(branches.num_live_1)):
        slot, branch = int(branches.slot_A[a]), int(branches.branch_A[a])
        length = block if length_S is None else min(int(length_S[slot]), block)
        if not length:
            continue
        kept_T = (rows.keep_ST[slot, :length] & branches.ancestors_B[branch]).tolist()
        sources = [int(rows.row_SBT[slot, bits.bit_length() - 1, t]) for t, bits in enumerate(kept_T)]
        rows_T = torch.tensor(sources, device=q_RHD.device)
        unit = mask_unit if int(branches.kind_SB[slot, branch]) == FINAL else block
        at_T = torch.arange(length, device=q_RHD.device) // unit
        hidden_TT = at_T[None, :] > at_T[:, None]

        q = q_RHD[rows_T].float().transpose(0, 1)  # [H, t, D]
        k, v = (x[rows_T].float().transpose(0, 1).repeat_interleave(group, 0) for x in (k_RGD, v_RGD))
        scores = torch.bmm(q, k.transpose(1, 2)) * (scale * math.log2(math.e))
        scores = scores.masked_fill(hidden_TT, -torch.inf)
        m = scores.amax(-1, keepdim=True)
        has_prefix = bool(branches.start_S[slot] > 0)
        if has_prefix:
            m_prefix = state.m_RH[rows_T].T[..., None]
            m = torch.maximum(m, m_prefix)
        weights = torch.exp2(scores - m)
        total = weights.sum(-1, keepdim=True)
        acc = torch.bmm(weights.to(v_RGD.dtype).float(), v)
        if has_prefix:
            keep = torch.exp2(m_prefix - m)
            total = total + state.l_RH[rows_T].T[..., None] * keep
            acc = acc + state.acc_RHD[rows_T].transpose(0, 1) * keep
        out_NX[a * block : a * block + length] = (acc / total).transpose(0, 1).flatten(1).to(out_NX.dtype)
