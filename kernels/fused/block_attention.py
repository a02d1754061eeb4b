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
from kernels.fused.prefix_state import MAX_BLOCK_TILES, PrefixState, cut_prefix, padded_width
from kernels.fused.residual import highest_bit
from kernels.fused.softmax import add_keys, merge_keys, no_keys

KEY_TILE = 32


@triton.jit
def _source_rows(
    p_keep, p_row, ancestors, i_s, o_t, valid, num_branches, ONE_BRANCH: tl.constexpr, T: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """Row that serves each position of a branch: that of its nearest kept ancestor; 0 where not valid."""
    p_row += i_s * (num_branches * T)
    if not ONE_BRANCH:
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
    b_m, b_l, b_acc, p_m, p_l, p_acc, o_state, b_states, num_states, stride, D: tl.constexpr, BD: tl.constexpr
):
    """Merges the states of the chunks from the fourth on, two at a time on their way."""
    for i_c in range(4, num_states, 2):
        m_0, l_0, acc_0 = _load_state(p_m, p_l, p_acc, o_state, b_states, i_c, stride, D, BD)
        m_1, l_1, acc_1 = _load_state(p_m, p_l, p_acc, o_state, b_states, i_c + 1, stride, D, BD)
        b_m, b_l, b_acc = merge_keys(b_m, b_l, b_acc, m_0, l_0, acc_0)
        b_m, b_l, b_acc = merge_keys(b_m, b_l, b_acc, m_1, l_1, acc_1)
    return b_m, b_l, b_acc


@triton.jit
def _load_keys(p_k, p_v, b_row, inside, i_g, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, CACHE: tl.constexpr):
    """Keys and values of these rows."""
    o_d = tl.arange(0, BD)
    o_kv = b_row[:, None] * (G * D) + (i_g * D + o_d)[None, :]
    mask = inside[:, None]
    if D < BD:
        mask = mask & (o_d < D)[None, :]
    b_k = tl.load(p_k + o_kv, mask=mask, other=0.0, cache_modifier=CACHE)  # [BN, BD]
    return b_k, tl.load(p_v + o_kv, mask=mask, other=0.0, cache_modifier=CACHE)


@triton.jit(do_not_specialize=["num_slots", "num_branches"])
def _block_kernel(
    p_q, p_k, p_v, p_m, p_l, p_acc, p_keep, p_row, p_slot_count, p_num_live, p_slot, p_branch, p_kind, p_start,
    p_ancestors, p_length, p_out, scale_log2, num_slots, num_branches, num_rows,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, T: tl.constexpr, UNIT: tl.constexpr, FINAL_KIND: tl.constexpr,
    LIMITED: tl.constexpr, ONE_SLOT: tl.constexpr, ONE_BRANCH: tl.constexpr, STATES: tl.constexpr,
    PREFIX_BM: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SPLIT_TILES: tl.constexpr,
    KEYS_A_TILE: tl.constexpr, TILES: tl.constexpr, STORED: tl.constexpr, BY_ROW: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, EARLY: tl.constexpr, OVERLAP: tl.constexpr,
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
    if not ONE_BRANCH:
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
        if i_m * TILES * BM // GROUP >= length:
            if EARLY:
                wait_for_inputs(OVERLAP)
            return
    _, num_states = cut_prefix(num_queries, start, num_slots, G, PREFIX_BM, CHUNKS, CHUNK, SPLIT_TILES, KEYS_A_TILE)
    is_final = True
    if UNIT < T:
        is_final = tl.load(p_kind + i_s * num_branches + i_b, cache_modifier=CACHE) == FINAL_KIND

    o_u, o_d = tl.arange(0, BN), tl.arange(0, BD)
    inside = o_u < length
    b_row = _source_rows(p_keep, p_row, ancestors, i_s, o_u, inside, num_branches, ONE_BRANCH, T, CACHE)
    b_k, b_v = _load_keys(p_k, p_v, b_row, inside, i_g, G, D, BD, CACHE)
    for i in range(TILES):
        o_m = (i_m * TILES + i) * BM + tl.arange(0, BM)
        o_t = o_m // GROUP
        valid = o_t < length
        mask = valid[:, None]
        if D < BD:
            mask = mask & (o_d < D)[None, :]
        b_source = _source_rows(p_keep, p_row, ancestors, i_s, o_t, valid, num_branches, ONE_BRANCH, T, CACHE)
        if BY_ROW:
            valid = valid & (b_source < tl.num_programs(1) * T)
            mask = mask & valid[:, None]
        o_h = i_g * GROUP + o_m % GROUP
        o_q = (b_source * H + o_h) * D
        b_q = tl.load(p_q + o_q[:, None] + o_d[None, :], mask=mask, other=0.0, cache_modifier=CACHE)  # [BM, BD]
        if EARLY:
            wait_for_inputs(OVERLAP)
        # On their way while the block is attended.
        o_state = (i_g * num_rows + b_source) * GROUP + o_m % GROUP
        b_states, stride = tl.where(valid, num_states, 0), num_rows * H
        if STORED:
            # Stored rows, behind those of the list's positions, have the chunks merged in one state.
            b_states = tl.where(b_source < tl.num_programs(1) * T, b_states, tl.minimum(b_states, 1))
        m_p, l_p, acc_p = _load_state(p_m, p_l, p_acc, o_state, b_states, 0, stride, D, BD)
        if STATES > 1:
            m_1, l_1, acc_1 = _load_state(p_m, p_l, p_acc, o_state, b_states, 1, stride, D, BD)
            m_2, l_2, acc_2 = _load_state(p_m, p_l, p_acc, o_state, b_states, 2, stride, D, BD)
            m_3, l_3, acc_3 = _load_state(p_m, p_l, p_acc, o_state, b_states, 3, stride, D, BD)

        # All queries see key 0, so m is finite after the first tile of keys.
        visible = inside[None, :]
        if UNIT < T:
            visible = visible & (((o_u // UNIT)[None, :] <= (o_t // UNIT)[:, None]) | (is_final == 0))
        b_m, b_l, b_acc = no_keys(BM, BD)
        b_m, b_l, b_acc = add_keys(b_q, b_k, b_v, visible, b_m, b_l, b_acc, scale_log2)
        if T > BN:
            # No query of the tile sees a key from `end` on.
            end = length
            if UNIT < T:
                last_t = ((i_m * TILES + i) * BM + BM - 1) // GROUP
                end = tl.minimum(tl.where(is_final, (last_t // UNIT + 1) * UNIT, T), length)
            for first in range(BN, end, BN):
                o_next = first + o_u
                inside_next = o_next < length
                b_row = _source_rows(
                    p_keep, p_row, ancestors, i_s, o_next, inside_next, num_branches, ONE_BRANCH, T, CACHE
                )
                b_k_next, b_v_next = _load_keys(p_k, p_v, b_row, inside_next, i_g, G, D, BD, CACHE)
                visible = inside_next[None, :]
                if UNIT < T:
                    visible = visible & (((o_next // UNIT)[None, :] <= (o_t // UNIT)[:, None]) | (is_final == 0))
                b_m, b_l, b_acc = add_keys(b_q, b_k_next, b_v_next, visible, b_m, b_l, b_acc, scale_log2)

        # The chunks in ascending order, then the block; where there is no chunk, a state that adds nothing.
        m_p = tl.maximum(m_p, -1e30)  # Below any score, yet finite: merging nothing with nothing would give NaN.
        if STATES > 1:
            m_p, l_p, acc_p = merge_keys(m_p, l_p, acc_p, m_1, l_1, acc_1)
            m_p, l_p, acc_p = merge_keys(m_p, l_p, acc_p, m_2, l_2, acc_2)
            m_p, l_p, acc_p = merge_keys(m_p, l_p, acc_p, m_3, l_3, acc_3)
            m_p, l_p, acc_p = _add_states(
                m_p, l_p, acc_p, p_m, p_l, p_acc, o_state, b_states, num_states, stride, D, BD
            )
        b_m, b_l, b_acc = merge_keys(m_p, l_p, acc_p, b_m, b_l, b_acc)
        o_out = ((b_source if BY_ROW else i_a * T + o_t) * H + o_h) * D
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
    by_row: bool = False,
) -> None:
    """Attention output of every position of every live branch, in the dtype of ``out_NX``.

    Inside the block, query t sees key u iff ``u // unit <= t // unit``: ``unit`` is ``mask_unit`` for final branches
    (T full, the block size, or 1 causal) and T for the others. Positions from ``length_S`` (int64) on do not exist:
    neither queries nor keys, and their output is left alone. Rows from A * T on are stored ones: their prefix is in the
    first state alone. With ``by_row`` (main branches alone) only positions with a row of their own are queries, and
    their output goes to that row. Where ``branches.start_S``, the prefix that ``state`` is
    about, is 0 the state is not read.
    """
    num_heads, head_dim = q_RHD.shape[1:]
    num_kv = k_RGD.shape[1]
    num_slots, num_branches, block = branches.tokens_SBT.shape
    tensors = (q_RHD, k_RGD, v_RGD, out_NX, rows.keep_ST, rows.row_SBT, branches.kind_SB)
    assert all(x.is_contiguous() for x in tensors), "the kernel takes contiguous tensors"
    plan = state.plan
    assert out_NX.numel() < 2**31, "the kernel counts elements in 32 bits"
    room = branches.slot_A.shape[0]
    tiles = triton.cdiv(block * (num_heads // num_kv), plan.block_query_tile)
    several = 1
    if block <= KEY_TILE:
        while several < MAX_BLOCK_TILES and 2 * several * plan.block_programs <= num_kv * tiles * room:
            several *= 2
    _block_kernel[(num_kv * triton.cdiv(tiles, several), room)](
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
        num_branches,
        len(q_RHD),
        H=num_heads,
        G=num_kv,
        D=head_dim,
        T=block,
        UNIT=mask_unit,
        FINAL_KIND=FINAL,
        LIMITED=length_S is not None,
        ONE_SLOT=num_slots == 1,
        ONE_BRANCH=num_branches == 1,
        STATES=len(state.m_CGRY),
        PREFIX_BM=plan.query_tile,
        CHUNKS=plan.max_chunks,
        CHUNK=plan.min_chunk,
        SPLIT_TILES=state.split_tiles,
        KEYS_A_TILE=plan.keys_a_tile,
        TILES=several,
        BY_ROW=by_row,
        STORED=len(q_RHD) > room * block and len(state.m_CGRY) > 1,
        BM=plan.block_query_tile,
        BN=min(KEY_TILE, max(16, triton.next_power_of_2(block))),
        BD=padded_width(head_dim),
        num_warps=plan.block_warps,
        **({"maxnreg": plan.block_registers} if plan.block_registers else {}),
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
    by_row: bool = False,
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
        sources = [int(rows.row_SBT[slot, max(bits.bit_length() - 1, 0), t]) for t, bits in enumerate(kept_T)]
        rows_T = torch.tensor(sources, device=q_RHD.device)
        unit = mask_unit if int(branches.kind_SB[slot, branch]) == FINAL else block
        at_T = torch.arange(length, device=q_RHD.device) // unit
        own_T = rows_T < len(branches.slot_A) * block if by_row else torch.ones_like(at_T, dtype=torch.bool)
        hidden_TT = (at_T[None, :] > at_T[:, None])[own_T]
        asked_T = rows_T[own_T]

        q = q_RHD[asked_T].float().transpose(0, 1)  # [H, t, D]
        k, v = (x[rows_T].float().transpose(0, 1).repeat_interleave(group, 0) for x in (k_RGD, v_RGD))
        scores = torch.bmm(q, k.transpose(1, 2)) * (scale * math.log2(math.e))
        scores = scores.masked_fill(hidden_TT, -torch.inf)
        m = scores.amax(-1, keepdim=True)
        has_prefix = bool(branches.start_S[slot] > 0)
        if has_prefix:
            m_prefix = state.m_CGRY[0][:, asked_T].transpose(1, 2).flatten(0, 1)[..., None]  # [H, t, 1]
            m = torch.maximum(m, m_prefix)
        weights = torch.exp2(scores - m)
        total = weights.sum(-1, keepdim=True)
        acc = torch.bmm(weights.to(v_RGD.dtype).float(), v)
        if has_prefix:
            keep = torch.exp2(m_prefix - m)
            total = total + state.l_CGRY[0][:, asked_T].transpose(1, 2).flatten(0, 1)[..., None] * keep
            acc = acc + state.acc_CGRYD[0][:, asked_T].transpose(1, 2).flatten(0, 1) * keep
        to_T = asked_T if by_row else a * block + torch.arange(length, device=q_RHD.device)
        out_NX[to_T] = (acc / total).transpose(0, 1).flatten(1).to(out_NX.dtype)
