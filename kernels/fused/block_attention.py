"""Attention of every branch position over its own block, merged with the states over the prefix.

A folded position takes query, prefix states, key and value from its source row, yet each branch's block part is
computed with the branch's own keys and values, so the softmax is exact.

A branches in the list, T block positions, R recomputed rows, H query heads, G key/value heads, D head width,
X = H * D, N = A * T list positions, S slots, B branches a slot, C chunks of the prefix.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.fused.launch import early, overlapped, wait_for_inputs
from kernels.fused.layout import FINAL, Branches, RowMap
from kernels.fused.prefix_state import PrefixState, cut_prefix, padded_width
from kernels.fused.residual import highest_bit
from kernels.fused.softmax import add_keys, merge_keys, no_keys

KEY_TILE = 32


@triton.jit
def _source_rows(
    p_keep, p_row, ancestors, i_s, o_t, valid, B: tl.constexpr, T: tl.constexpr, CACHE: tl.constexpr
):  # fmt: skip
    """Row that serves each position of a branch: that of its nearest kept ancestor; 0 where not valid."""
    p_row += i_s * (B * T)
    if B > 1:
        b_kept = tl.load(p_keep + i_s * T + o_t, mask=valid, other=0, cache_modifier=CACHE)
        p_row += highest_bit(b_kept & ancestors) * T
    return tl.load(p_row + o_t, mask=valid, other=0, cache_modifier=CACHE)


@triton.jit
def _load_state(p_m, p_l, p_acc, o_state, b_states, i_c, stride, D: tl.constexpr, BD: tl.constexpr):
    """State over a chunk; where there is no such chunk, one that adds nothing to finite states."""
    o_state += i_c * stride
    o_d = tl.arange(0, BD)
    there = b_states > i_c
    mask = there[:, None]
    if D < BD:
        mask = mask & (o_d < D)[None, :]
    b_m = tl.load(p_m + o_state, mask=there, other=float("-inf"))
    b_l = tl.load(p_l + o_state, mask=there, other=0.0)
    return b_m, b_l, tl.load(p_acc + o_state[:, None] * D + o_d[None, :], mask=mask, other=0.0)


@triton.jit
def _add_states(
    b_m, b_l, b_acc, p_m, p_l, p_acc, o_state, b_states, i_c, stride,
    COUNT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Merges the states of COUNT more chunks, at most four; all of them are on their way at a time."""
    m_0, l_0, acc_0 = _load_state(p_m, p_l, p_acc, o_state, b_states, i_c, stride, D, BD)
    m_1, l_1, acc_1 = _load_state(p_m, p_l, p_acc, o_state, b_states, i_c + 1, stride, D, BD)
    m_2, l_2, acc_2 = _load_state(p_m, p_l, p_acc, o_state, b_states, i_c + 2, stride, D, BD)
    b_m, b_l, b_acc = merge_keys(b_m, b_l, b_acc, m_0, l_0, acc_0)
    if COUNT > 3:
        m_3, l_3, acc_3 = _load_state(p_m, p_l, p_acc, o_state, b_states, i_c + 3, stride, D, BD)
    b_m, b_l, b_acc = merge_keys(b_m, b_l, b_acc, m_1, l_1, acc_1)
    b_m, b_l, b_acc = merge_keys(b_m, b_l, b_acc, m_2, l_2, acc_2)
    if COUNT > 3:
        b_m, b_l, b_acc = merge_keys(b_m, b_l, b_acc, m_3, l_3, acc_3)
    return b_m, b_l, b_acc


@triton.jit
def _prefix_states(
    p_m, p_l, p_acc, o_state, b_states, num_states, stride, STATES: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):
    """The states of all chunks merged in ascending order; where there is none, one that adds nothing."""
    b_m, b_l, b_acc = _load_state(p_m, p_l, p_acc, o_state, b_states, 0, stride, D, BD)
    b_m = tl.maximum(b_m, -1e30)  # Below any score, yet finite: merging nothing with nothing would give NaN.
    if STATES > 1:
        b_m, b_l, b_acc = _add_states(b_m, b_l, b_acc, p_m, p_l, p_acc, o_state, b_states, 1, stride, 3, D, BD)
        for i_c in range(4, num_states, 4):
            b_m, b_l, b_acc = _add_states(b_m, b_l, b_acc, p_m, p_l, p_acc, o_state, b_states, i_c, stride, 4, D, BD)
    return b_m, b_l, b_acc


@triton.jit
def _block_kernel(
    p_q, p_k, p_v, p_m, p_l, p_acc, p_keep, p_row, p_slot_count, p_num_live, p_slot, p_branch, p_kind, p_start,
    p_ancestors, p_length, p_out, scale_log2, num_slots, num_rows,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, B: tl.constexpr, T: tl.constexpr, UNIT: tl.constexpr,
    FINAL_KIND: tl.constexpr, LIMITED: tl.constexpr, ONE_SLOT: tl.constexpr, STATES: tl.constexpr,
    PREFIX_BM: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SPLIT_TILES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    i_g, i_m, i_a = tl.program_id(0) % G, tl.program_id(0) // G, tl.program_id(1)
    GROUP: tl.constexpr = H // G
    # Before the wait the first-level cache may hold what was there before.
    CACHE: tl.constexpr = ".cg" if EARLY else ""
    if not EARLY:
        wait_for_inputs(OVERLAP)
    # Read before it is known whether they are defined: one latency less. One slot's number needs no reading.
    i_s, i_b = 0, 0
    if not ONE_SLOT:
        i_s = tl.load(p_slot + i_a, cache_modifier=CACHE)
    if B > 1:
        i_b = tl.load(p_branch + i_a, cache_modifier=CACHE)
    if i_a >= tl.load(p_num_live, cache_modifier=CACHE):
        if EARLY:
            wait_for_inputs(OVERLAP)
        return
    ancestors = tl.load(p_ancestors + i_b)
    start = tl.load(p_start + i_s, cache_modifier=CACHE).to(tl.int32)
    num_queries = tl.load(p_slot_count + i_s, cache_modifier=CACHE) * GROUP
    length = T
    if LIMITED:
        length = tl.minimum(tl.load(p_length + i_s, cache_modifier=CACHE), T).to(tl.int32)
    _, num_states = cut_prefix(num_queries, start, num_slots, G, PREFIX_BM, CHUNKS, CHUNK, SPLIT_TILES)

    o_m = i_m * BM + tl.arange(0, BM)
    o_t, o_u, o_d = o_m // GROUP, tl.arange(0, BN), tl.arange(0, BD)
    valid = o_t < length
    mask = valid[:, None]
    if D < BD:
        mask = mask & (o_d < D)[None, :]
    b_source = _source_rows(p_keep, p_row, ancestors, i_s, o_t, valid, B, T, CACHE)
    o_h = i_g * GROUP + o_m % GROUP
    b_q = tl.load(
        p_q + ((b_source * H + o_h) * D)[:, None] + o_d[None, :], mask=mask, other=0.0, cache_modifier=CACHE
    )  # [BM, BD]

    # No query of the tile sees a key from `end` on. All see key 0, so m is finite after the first tile.
    b_m, b_l, b_acc = no_keys(BM, BD)
    end = length
    if UNIT < T:
        is_final = tl.load(p_kind + i_s * B + i_b, cache_modifier=CACHE) == FINAL_KIND
        end = tl.minimum(tl.where(is_final, ((i_m * BM + BM - 1) // GROUP // UNIT + 1) * UNIT, T), length)
    for _ in range(0, end if T > BN else 1, BN):
        inside = o_u < length
        b_row = _source_rows(p_keep, p_row, ancestors, i_s, o_u, inside, B, T, CACHE)
        o_kv = b_row[:, None] * (G * D) + (i_g * D + o_d)[None, :]
        mask_kv = inside[:, None]
        if D < BD:
            mask_kv = mask_kv & (o_d < D)[None, :]
        b_k = tl.load(p_k + o_kv, mask=mask_kv, other=0.0, cache_modifier=CACHE)  # [BN, BD]
        b_v = tl.load(p_v + o_kv, mask=mask_kv, other=0.0, cache_modifier=CACHE)
        visible = inside[None, :]
        if UNIT < T:
            visible &= ((o_u // UNIT)[None, :] <= (o_t // UNIT)[:, None]) | (is_final == 0)
        b_m, b_l, b_acc = add_keys(b_q, b_k, b_v, visible, b_m, b_l, b_acc, scale_log2)
        o_u += BN
    if EARLY:
        wait_for_inputs(OVERLAP)
    b_states = tl.where(valid, num_states, 0)
    o_state = (i_g * num_rows + b_source) * GROUP + o_m % GROUP
    b_m_p, b_l_p, b_acc_p = _prefix_states(p_m, p_l, p_acc, o_state, b_states, num_states, num_rows * H, STATES, D, BD)
    b_m, b_l, b_acc = merge_keys(b_m_p, b_l_p, b_acc_p, b_m, b_l, b_acc)
    o_out = ((i_a * T + o_t) * H + o_h) * D
    b_out = b_acc * (1.0 / b_l)[:, None]
    tl.store(p_out + o_out[:, None] + o_d[None, :], b_out.to(p_out.dtype.element_ty), mask=mask)


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
    neither queries nor keys, and their output is left alone. Where ``branches.start_S``, the prefix that ``state`` is
    about, is 0 the state is not read.
    """
    num_heads, head_dim = q_RHD.shape[1:]
    num_kv = k_RGD.shape[1]
    num_slots, num_branches, block = branches.tokens_SBT.shape
    tensors = (q_RHD, k_RGD, v_RGD, out_NX, rows.keep_ST, rows.row_SBT, branches.kind_SB)
    assert all(x.is_contiguous() for x in tensors), "the kernel takes contiguous tensors"
    plan = state.plan
    assert out_NX.numel() < 2**31, "the kernel counts elements in 32 bits"
    tiles = triton.cdiv(block * (num_heads // num_kv), plan.block_query_tile)
    _block_kernel[(num_kv * tiles, branches.slot_A.shape[0])](
        q_RHD,
        k_RGD,
        v_RGD,
        state.m_CGRY,
        state.l_CGRY,
        state.acc_CGRYD,
        rows.keep_ST,
        rows.row_SBT,
        rows.slot_count_S,
        branches.num_live_1,
        branches.slot_A,
        branches.branch_A,
        branches.kind_SB,
        branches.start_S,
        branches.ancestors_B,
        branches.start_S if length_S is None else length_S,
        out_NX,
        scale * math.log2(math.e),
        num_slots,
        len(q_RHD),
        H=num_heads,
        G=num_kv,
        D=head_dim,
        B=num_branches,
        T=block,
        UNIT=mask_unit,
        FINAL_KIND=FINAL,
        LIMITED=length_S is not None,
        ONE_SLOT=num_slots == 1,
        STATES=len(state.m_CGRY),
        PREFIX_BM=plan.query_tile,
        CHUNKS=plan.max_chunks,
        CHUNK=plan.min_chunk,
        SPLIT_TILES=state.split_tiles,
        BM=plan.block_query_tile,
        BN=min(KEY_TILE, max(16, triton.next_power_of_2(block))),
        BD=padded_width(head_dim),
        num_warps=plan.block_warps,
        num_stages=1,
        **early(q_RHD),
        **overlapped(q_RHD),
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
    """The same in torch after ``prefix_attention_reference``, branch by branch, one softmax over the whole block."""
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
            m_prefix = state.m_CGRY[0][:, rows_T].transpose(1, 2).flatten(0, 1)[..., None]  # [H, t, 1]
            m = torch.maximum(m, m_prefix)
        weights = torch.exp2(scores - m)
        total = weights.sum(-1, keepdim=True)
        acc = torch.bmm(weights.to(v_RGD.dtype).float(), v)
        if has_prefix:
            keep = torch.exp2(m_prefix - m)
            total = total + state.l_CGRY[0][:, rows_T].transpose(1, 2).flatten(0, 1)[..., None] * keep
            acc = acc + state.acc_CGRYD[0][:, rows_T].transpose(1, 2).flatten(0, 1) * keep
        out_NX[a * block : a * block + length] = (acc / total).transpose(0, 1).flatten(1).to(out_NX.dtype)
