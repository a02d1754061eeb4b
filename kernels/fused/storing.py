"""After acceptance: what the accepted branch's positions are served by becomes the slots' stored rows.

Letters as in ``kernels.fused.arena``; S slots, B branches, T block positions. Sources are those of the decoding rules
for folding in time: what a position's QKV row stands for (q, k, v, prefix state, residual stream at the layer's entry)
and its feed-forward row (output, residual stream after attention) are stored apart.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fused.arena import Arena
from kernels.fused.launch import overlapped, wait_for_inputs
from kernels.fused.layout import Branches, Parts
from kernels.fused.prefix_state import cut_prefix, padded_width
from kernels.fused.residual import added_row, highest_bit, row_config
from kernels.fused.softmax import merge_keys


def store_accepted(
    arena: Arena,
    keep_LKST: torch.Tensor,
    row_KLSBT: torch.Tensor,
    counts_LKX: torch.Tensor,
    branches: Branches,
    branch_S: torch.Tensor,
    down: Parts,
) -> None:
    """Copies to the stored rows, layer by layer, what serves the positions of branch ``branch_S[s]`` (int32).

    Below 0 nothing of a slot is copied, nor where a stored row serves already. ``down``: parts of the first layer's
    feed-forward output; those of the others lie alike. ``start_S`` must be what it was in the forward.
    """
    num_layers, _, num_slots, block = keep_LKST.shape
    num_heads, head_dim = arena.q_LXHD.shape[2:]
    num_kv, width = arena.k_LXGD.shape[2], arena.stream_LKXE.shape[3]
    plan, room = arena.plan, arena.q_LXHD.shape[1]
    tensors = (arena.stream_LKXE, arena.q_LXHD, arena.k_LXGD, arena.v_LXGD, arena.acc_LCGXYD, arena.ffn_LZE)
    assert all(x.is_contiguous() for x in (*tensors, keep_LKST, row_KLSBT, counts_LKX, down.values_KRN[0]))
    split = arena.m_LCGXY.shape[1] > 1
    _store_kernel[(block, num_slots, num_layers)](
        arena.stream_LKXE,
        arena.q_LXHD,
        arena.k_LXGD,
        arena.v_LXGD,
        arena.m_LCGXY,
        arena.l_LCGXY,
        arena.acc_LCGXYD,
        arena.ffn_LZE,
        keep_LKST,
        row_KLSBT,
        counts_LKX,
        branches.index_SB,
        branches.ancestors_B,
        branches.start_S,
        branch_S,
        arena.parts_LM,
        arena.used_L,
        arena.parts_LM.shape[1],
        down.stride,
        arena.num_rows,
        room,
        branches.kind_SB.shape[1],
        T=block,
        E=width,
        K=len(down.values_KRN),
        COUNTED=down.used_1 is not None,
        H=num_heads,
        G=num_kv,
        D=head_dim,
        PREFIX_BM=plan.query_tile,
        CHUNKS=plan.max_chunks,
        CHUNK=plan.min_chunk,
        SPLIT_TILES=plan.split_tiles if split else 0,
        KEYS_A_TILE=plan.keys_a_tile,
        STATES=arena.m_LCGXY.shape[1],
        BQ=triton.next_power_of_2(num_heads * head_dim),
        BKV=triton.next_power_of_2(num_kv * head_dim),
        BH=triton.next_power_of_2(num_heads),
        BD=padded_width(head_dim),
        **row_config(width),
        **overlapped(arena.q_LXHD),
    )


@triton.jit
def _source(p_keep, p_row, ancestors, i_map, i_t, num_branches, T: tl.constexpr):
    """Branch and row that serve a position, and whether that is a row of this step. ``i_map``: layer and slot."""
    kept = tl.load(p_keep) & ancestors
    i_source = highest_bit(kept)
    return i_source, tl.load(p_row + (i_map * num_branches + i_source) * T + i_t), kept != 0


@triton.jit
def _copy(p, i_from, i_to, W: tl.constexpr, BW: tl.constexpr):
    """One row of width W to another's place."""
    o = tl.arange(0, BW)
    tl.store(p + i_to * W + o, tl.load(p + i_from * W + o, mask=o < W), mask=o < W)


@triton.jit(do_not_specialize=["num_branches"])
def _store_kernel(
    p_stream, p_q, p_k, p_v, p_m, p_l, p_acc, p_ffn, p_keep, p_row, p_counts, p_index, p_ancestors, p_start,
    p_accepted, p_parts, p_used, layer_stride, stride, num_rows, room, num_branches,
    T: tl.constexpr, E: tl.constexpr, K: tl.constexpr, COUNTED: tl.constexpr, H: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, PREFIX_BM: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    SPLIT_TILES: tl.constexpr, KEYS_A_TILE: tl.constexpr, STATES: tl.constexpr, BQ: tl.constexpr, BKV: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a position, slot and layer."""
    GROUP: tl.constexpr = H // G
    i_t, i_s, i_l = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_slots, num_layers = tl.num_programs(1), tl.num_programs(2)
    wait_for_inputs(OVERLAP)
    i_branch = tl.load(p_accepted + i_s)
    if i_branch >= 0:
        ancestors = tl.load(p_ancestors + i_branch)
        i_to = num_rows + i_s * T + i_t
        o_layer = tl.cast(i_l, tl.int64) * room
        i_map = i_l * num_slots + i_s
        p_kept = p_keep + (2 * i_l * num_slots + i_s) * T + i_t
        i_source, i_row, kept = _source(p_kept, p_row, ancestors, i_map, i_t, num_branches, T)
        if kept:
            _copy(p_q, o_layer + i_row, o_layer + i_to, H * D, BQ)
            _copy(p_k, o_layer + i_row, o_layer + i_to, G * D, BKV)
            _copy(p_v, o_layer + i_row, o_layer + i_to, G * D, BKV)
            i_p = tl.load(p_index + i_s * num_branches + i_source) * T + i_t
            _copy(p_stream, 2 * o_layer + i_p, 2 * o_layer + i_to, E, BE)
            length = tl.load(p_start + i_s).to(tl.int32)
            num_queries = tl.load(p_counts + 2 * i_l * (num_slots + 1) + 1 + i_s) * GROUP
            _, num_states = cut_prefix(
                num_queries, length, num_slots, G, PREFIX_BM, CHUNKS, CHUNK, SPLIT_TILES, KEYS_A_TILE
            )
            if num_states > 0:
                o_h, o_d = tl.arange(0, BH), tl.arange(0, BD)
                m_h = o_h < H
                mask = m_h[:, None] & (o_d < D)[None, :]
                o_head = (o_layer * (STATES * G) + (o_h // GROUP) * tl.cast(room, tl.int64)) * GROUP + o_h % GROUP
                o_from = o_head + i_row * GROUP
                b_m = tl.load(p_m + o_from, mask=m_h, other=0.0)
                b_l = tl.load(p_l + o_from, mask=m_h, other=0.0)
                b_acc = tl.load(p_acc + o_from[:, None] * D + o_d[None, :], mask=mask, other=0.0)  # [BH, BD]
                # In the order and by the operations of block attention: the same bits.
                for _ in range(1, num_states):
                    o_from += tl.cast(room, tl.int64) * H
                    m_c = tl.load(p_m + o_from, mask=m_h, other=0.0)
                    l_c = tl.load(p_l + o_from, mask=m_h, other=0.0)
                    acc_c = tl.load(p_acc + o_from[:, None] * D + o_d[None, :], mask=mask, other=0.0)
                    b_m, b_l, b_acc = merge_keys(b_m, b_l, b_acc, m_c, l_c, acc_c)
                o_to = o_head + i_to * GROUP
                tl.store(p_m + o_to, b_m, mask=m_h)
                tl.store(p_l + o_to, b_l, mask=m_h)
                tl.store(p_acc + o_to[:, None] * D + o_d[None, :], b_acc, mask=mask)

        p_kept += num_slots * T
        i_source, i_row, kept = _source(p_kept, p_row, ancestors, num_layers * num_slots + i_map, i_t, num_branches, T)
        if kept:
            i_p = tl.load(p_index + i_s * num_branches + i_source) * T + i_t
            _copy(p_stream, 2 * o_layer + room + i_p, 2 * o_layer + room + i_to, E, BE)
            used = K
            if COUNTED:
                used = tl.load(p_used + i_l)
            o_e = tl.arange(0, BE)
            p_parts += tl.cast(i_l, tl.int64) * layer_stride
            b_sum = added_row(p_parts, i_row, stride, used, o_e, o_e < E, E, K, COUNTED)
            tl.store(p_ffn + (tl.cast(i_map, tl.int64) * T + i_t) * E + o_e, b_sum, mask=o_e < E)


def store_accepted_reference(
    arena: Arena,
    keep_LKST: torch.Tensor,
    row_KLSBT: torch.Tensor,
    counts_LKX: torch.Tensor,
    branches: Branches,
    branch_S: torch.Tensor,
    down: Parts,
) -> None:
    """The same in torch, after ``prefix_attention_reference``, which leaves one state."""
    block, device = keep_LKST.shape[3], keep_LKST.device
    slot_N = (branch_S >= 0).nonzero().squeeze(1)
    t = torch.arange(block, device=device)
    to_NT = arena.num_rows + slot_N[:, None] * block + t
    ancestors_N1 = branches.ancestors_B[branch_S[slot_N].long()][:, None]
    for layer, (keep_KST, row_KSBT) in enumerate(zip(keep_LKST, row_KLSBT.transpose(0, 1), strict=True)):
        for stage in range(2):
            kept_NT = keep_KST[stage, slot_N] & ancestors_N1
            source_NT = torch.zeros_like(kept_NT)
            for b in range(len(branches.parent_B)):
                source_NT = torch.where((kept_NT >> b & 1).bool(), b, source_NT)
            at = kept_NT != 0
            row_N = row_KSBT[stage, slot_N[:, None], source_NT, t][at].long()
            p_N = (branches.index_SB[slot_N[:, None], source_NT] * block + t)[at].long()
            to_N = to_NT[at]
            arena.stream_LKXE[layer, stage, to_N] = arena.stream_LKXE[layer, stage, p_N]
            if stage == 0:
                for x_LXHD in (arena.q_LXHD, arena.k_LXGD, arena.v_LXGD):
                    x_LXHD[layer, to_N] = x_LXHD[layer, row_N]
                for x_LCGX in (arena.m_LCGXY, arena.l_LCGXY, arena.acc_LCGXYD):
                    x_LCGX[layer, 0, :, to_N] = x_LCGX[layer, 0, :, row_N]
            else:
                arena.ffn_LZE[layer, to_N - arena.num_rows] = _parts_of(arena, down, layer).total(row_N)


def _parts_of(arena: Arena, down: Parts, layer: int) -> Parts:
    """One layer's parts, which lie like those of the first."""
    first = down.values_KRN
    values = arena.parts_LM[layer].as_strided(first.shape, first.stride())
    return Parts(values, None if down.used_1 is None else arena.used_L[layer : layer + 1])
