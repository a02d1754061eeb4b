"""Queries, keys and values of recomputed rows: sum of the projection's parts, bias, rotary embedding.

R rows, K partial sums, H/G query/key-value heads, D head width, N = (H + 2G) * D, P positions, A listed branches,
T block positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fused.launch import early, overlapped, wait_for_inputs
from kernels.fused.layout import Branches, Parts, RowMap
from kernels.fused.residual import MAX_PROGRAMS, added_row
from kernels.rope import apply_rope


def rope_rows(
    parts: Parts,
    bias_N: torch.Tensor | None,
    rows: RowMap,
    branches: Branches,
    cos_PD: torch.Tensor,
    sin_PD: torch.Tensor,
    query_scale_P: torch.Tensor,
    q_RHD: torch.Tensor,
    k_RGD: torch.Tensor,
    v_RGD: torch.Tensor,
) -> None:
    """Writes q, k and v of the rows below ``rows.count_1``.

    The float32 parts are added in order, then the bias; the sum is rounded to the output's dtype (what a projection
    returns), then rotated by halves and, for queries, scaled in float32, and rounded again at the end. A row's
    position is ``start_S`` of its slot plus t; the tables, in any dtype, are read at it.
    """
    num_parts, num_rows, _ = parts.values_KRN.shape
    num_heads, num_kv_heads, head_dim = q_RHD.shape[1], k_RGD.shape[1], q_RHD.shape[2]
    all_heads = num_heads + 2 * num_kv_heads
    for tensor in (parts.values_KRN[0], cos_PD, sin_PD, q_RHD, k_RGD, v_RGD):
        assert tensor.is_contiguous()
    # Small tiles while the programs for all rows fit. Elementwise, so the choice does not show in the bits.
    heads_per_tile = next((n for n in (4, 8) if num_rows * triton.cdiv(all_heads, n) <= MAX_PROGRAMS), 16)
    heads_per_tile = min(heads_per_tile, triton.next_power_of_2(all_heads))
    num_tiles = triton.cdiv(all_heads, heads_per_tile)
    half = triton.next_power_of_2(head_dim // 2)
    _rope_kernel[(num_tiles, min(num_rows, max(1, MAX_PROGRAMS // num_tiles)))](
        parts.values_KRN,
        rows.count_1 if parts.used_1 is None else parts.used_1,
        parts.values_KRN if bias_N is None else bias_N,
        rows.count_1,
        rows.position_R,
        branches.slot_A,
        branches.start_S,
        cos_PD,
        sin_PD,
        query_scale_P,
        q_RHD,
        k_RGD,
        v_RGD,
        num_rows,
        parts.stride,
        T=branches.tokens_SBT.shape[2],
        K=num_parts,
        H=num_heads,
        G=num_kv_heads,
        D=head_dim,
        BH=heads_per_tile,
        BD=half,
        BIAS=bias_N is not None,
        COUNTED=parts.used_1 is not None,
        ONE_SLOT=len(branches.start_S) == 1,
        num_warps=8 if heads_per_tile * half > 512 else 4,
        enable_fp_fusion=False,
        **early(q_RHD),
        **overlapped(q_RHD),
    )


@triton.jit
def _sum_parts(
    p_parts, b_bias, i_row, o_n, m_n, stride, used, dtype,
    K: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Output of the projection at columns o_n of a row, rounded to ``dtype``, in float32."""
    b_x = added_row(p_parts, i_row, stride, used, o_n, m_n, N, K, COUNTED)
    if BIAS:
        b_x += b_bias.to(tl.float32)
    return b_x.to(dtype).to(tl.float32)


@triton.jit
def _store_heads(p_out, i_row, o_h, m_h, o_d, m_d, b_x, heads: tl.constexpr, D: tl.constexpr):
    """Stores [BH, BD] to those heads of a row that lie in 0 <= h < heads."""
    o_x = tl.cast(i_row, tl.int64) * (heads * D) + o_h[:, None] * D + o_d[None, :]
    inside = m_h & (o_h >= 0) & (o_h < heads)
    tl.store(p_out + o_x, b_x.to(p_out.dtype.element_ty), mask=inside[:, None] & m_d[None, :])


@triton.jit(do_not_specialize_on_alignment=["p_used", "p_count"])
def _rope_kernel(
    p_parts,
    p_used,
    p_bias,
    p_count,
    p_position,
    p_slot,
    p_start,
    p_cos,
    p_sin,
    p_scale,
    p_q,
    p_k,
    p_v,
    num_rows,
    stride,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    BIAS: tl.constexpr,
    COUNTED: tl.constexpr,
    ONE_SLOT: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    HALF: tl.constexpr = D // 2
    N: tl.constexpr = (H + 2 * G) * D
    dtype = p_q.dtype.element_ty
    o_d = tl.arange(0, BD)
    m_d = o_d < HALF
    o_h = tl.program_id(0) * BH + tl.arange(0, BH)
    m_h = o_h < H + 2 * G
    o_n = o_h[:, None] * D + o_d[None, :]  # [BH, BD]
    m_n = m_h[:, None] & m_d[None, :]
    b_bias1, b_bias2 = 0.0, 0.0
    if BIAS:
        b_bias1 = tl.load(p_bias + o_n, mask=m_n, other=0.0)  # [BH, BD]
        b_bias2 = tl.load(p_bias + o_n + HALF, mask=m_n, other=0.0)
    if not EARLY:
        wait_for_inputs(OVERLAP)
    CACHE: tl.constexpr = ".cg" if EARLY else ""
    count = tl.load(p_count, cache_modifier=CACHE)
    # Bounded by the room and not by the count: the first loads need not wait for it.
    for i_row in range(tl.program_id(1), num_rows, tl.num_programs(1)):
        i_p = tl.load(p_position + i_row, cache_modifier=CACHE)
        if i_row < count:
            i_slot = 0
            if not ONE_SLOT:
                i_slot = tl.load(p_slot + i_p // T, cache_modifier=CACHE)
            position = tl.load(p_start + i_slot, cache_modifier=CACHE) + i_p % T
            o_table = position * D + o_d
            b_cos1 = tl.load(p_cos + o_table, mask=m_d, other=0.0).to(tl.float32)[None, :]  # [1, BD]
            b_sin1 = tl.load(p_sin + o_table, mask=m_d, other=0.0).to(tl.float32)[None, :]
            b_cos2 = tl.load(p_cos + o_table + HALF, mask=m_d, other=0.0).to(tl.float32)[None, :]
            b_sin2 = tl.load(p_sin + o_table + HALF, mask=m_d, other=0.0).to(tl.float32)[None, :]
            scale = tl.load(p_scale + position).to(tl.float32)
            if EARLY:
                wait_for_inputs(OVERLAP)
            used = K
            if COUNTED:
                used = tl.load(p_used)
            # [BH, BD]
            b_first = _sum_parts(p_parts, b_bias1, i_row, o_n, m_n, stride, used, dtype, K, N, BIAS, COUNTED)
            b_second = _sum_parts(p_parts, b_bias2, i_row, o_n + HALF, m_n, stride, used, dtype, K, N, BIAS, COUNTED)
            b_turned1 = b_first * b_cos1 - b_second * b_sin1  # [BH, BD]
            b_turned2 = b_second * b_cos2 + b_first * b_sin2

            _store_heads(p_q, i_row, o_h, m_h, o_d, m_d, b_turned1 * scale, H, D)
            _store_heads(p_q, i_row, o_h, m_h, o_d + HALF, m_d, b_turned2 * scale, H, D)
            _store_heads(p_k, i_row, o_h - H, m_h, o_d, m_d, b_turned1, G, D)
            _store_heads(p_k, i_row, o_h - H, m_h, o_d + HALF, m_d, b_turned2, G, D)
            _store_heads(p_v, i_row, o_h - H - G, m_h, o_d, m_d, b_first, G, D)
            _store_heads(p_v, i_row, o_h - H - G, m_h, o_d + HALF, m_d, b_second, G, D)
    if EARLY:
        wait_for_inputs(OVERLAP)  # For programs without a row.


def rope_rows_reference(
    parts: Parts,
    bias_N: torch.Tensor | None,
    rows: RowMap,
    branches: Branches,
    cos_PD: torch.Tensor,
    sin_PD: torch.Tensor,
    query_scale_P: torch.Tensor,
    q_RHD: torch.Tensor,
    k_RGD: torch.Tensor,
    v_RGD: torch.Tensor,
) -> None:
    """The same in plain torch."""
    count, block, dtype = int(rows.count_1), branches.tokens_SBT.shape[2], q_RHD.dtype
    total = parts.total(slice(count))
    if bias_N is not None:
        total = total + bias_N.float()
    head_dim = q_RHD.shape[2]
    heads = total.to(dtype).float().view(count, q_RHD.shape[1] + 2 * k_RGD.shape[1], head_dim)
    q, k, v = heads.split((q_RHD.shape[1], k_RGD.shape[1], v_RGD.shape[1]), dim=1)
    p = rows.position_R[:count].long()
    position = branches.start_S[branches.slot_A[p // block].long()] + p % block
    cos, sin = cos_PD[position].float(), sin_PD[position].float()
    q_RHD[:count] = (apply_rope(q, cos, sin) * query_scale_P[position].float()[:, None, None]).to(dtype)
    k_RGD[:count] = apply_rope(k, cos, sin).to(dtype)
    v_RGD[:count] = v.to(dtype)
