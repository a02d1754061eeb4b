"""Attention of recomputed rows over their slot's prefix, as a streaming softmax state that the block part is added to.

The prefix is cut into at most ``MAX_CHUNKS`` chunks. Each chunk is a softmax of its own, and the states are merged one
after another in ascending order: either by the program that computed them all, or, when there are few rows and the
GPU would idle, by whichever of the chunks' programs comes last. Both do the same operations on a row in the same
order. Neither the cut nor anything else depends on more than the row's query and its slot's prefix.

R rows, H query heads, G key/value heads, D head width, S slots, X room for the rows of a slot, P pages of W positions.
Scores are in base 2: ``scale * log2(e)`` times the product.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.fused.layout import RowMap
from kernels.fused.prefix_state import MAX_CHUNKS, MIN_CHUNK, QUERY_TILE, ChunkStates, PrefixState, padded_width
from kernels.fused.softmax import add_keys, merge_keys, no_keys

KEY_TILE = {torch.bfloat16: 64, torch.float32: 32}
MAX_PROGRAMS = {True: 2 * 132, False: 8 * 132}
"""With chunks side by side as many as run at once on 132 processors; else more, for what they do differs in length."""


@triton.jit
def _chunk(
    b_q, p_k, p_v, p_pages, i_g, first, last, scale_log2,
    G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """State over the keys first <= j < last, which are not none."""
    o_d = tl.arange(0, BD)
    b_m, b_l, b_acc = no_keys(BM, BD)
    for start in range(first, last, BN):
        o_j = start + tl.arange(0, BN)
        inside = o_j < last
        b_page = tl.load(p_pages + o_j // W, mask=inside, other=0)
        o_kv = (b_page * W + o_j % W) * (G * D) + i_g * D
        mask = inside[:, None]
        if D < BD:
            mask = mask & (o_d < D)[None, :]
        b_k = tl.load(p_k + o_kv[:, None] + o_d[None, :], mask=mask, other=0.0)  # [BN, BD]
        b_v = tl.load(p_v + o_kv[:, None] + o_d[None, :], mask=mask, other=0.0)
        b_m, b_l, b_acc = add_keys(b_q, b_k, b_v, inside[None, :], b_m, b_l, b_acc, scale_log2)
    return b_m, b_l, b_acc


@triton.jit
def _store(p_m, p_l, p_acc, o_rh, valid, b_m, b_l, b_acc, D: tl.constexpr, BD: tl.constexpr):
    o_d = tl.arange(0, BD)
    tl.store(p_m + o_rh, b_m, mask=valid)
    tl.store(p_l + o_rh, b_l, mask=valid)
    tl.store(p_acc + o_rh[:, None] * D + o_d[None, :], b_acc, mask=valid[:, None] & (o_d < D)[None, :])


@triton.jit
def _store_chunk(p_m, p_l, p_acc, i_state, b_m, b_l, b_acc, BM: tl.constexpr, BD: tl.constexpr):
    """Scratch is laid out by tiles, so that its addresses take no registers."""
    o_m, o_d = tl.arange(0, BM), tl.arange(0, BD)
    tl.store(p_m + i_state * BM + o_m, b_m)
    tl.store(p_l + i_state * BM + o_m, b_l)
    tl.store(p_acc + i_state * (BM * BD) + o_m[:, None] * BD + o_d[None, :], b_acc)


@triton.jit
def _load_chunk(p_m, p_l, p_acc, i_state, BM: tl.constexpr, BD: tl.constexpr):
    o_m, o_d = tl.arange(0, BM), tl.arange(0, BD)
    b_acc = tl.load(p_acc + i_state * (BM * BD) + o_m[:, None] * BD + o_d[None, :])  # [BM, BD]
    return tl.load(p_m + i_state * BM + o_m), tl.load(p_l + i_state * BM + o_m), b_acc


@triton.jit
def _merge_chunks(p_m, p_l, p_acc, i_state, num_chunks, BM: tl.constexpr, BD: tl.constexpr):
    """Merges the stored states of a tile, of which there are at least two; the next one is on its way meanwhile."""
    b_m, b_l, b_acc = _load_chunk(p_m, p_l, p_acc, i_state, BM, BD)
    b_m_next, b_l_next, b_acc_next = _load_chunk(p_m, p_l, p_acc, i_state + 1, BM, BD)
    for i_c in range(2, num_chunks):
        b_m_c, b_l_c, b_acc_c = b_m_next, b_l_next, b_acc_next
        b_m_next, b_l_next, b_acc_next = _load_chunk(p_m, p_l, p_acc, i_state + i_c, BM, BD)
        b_m, b_l, b_acc = merge_keys(b_m, b_l, b_acc, b_m_c, b_l_c, b_acc_c)
    return merge_keys(b_m, b_l, b_acc, b_m_next, b_l_next, b_acc_next)


@triton.jit
def _chunk_keys(length, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    return tl.maximum(tl.cdiv(length, CHUNKS * CHUNK), 1) * CHUNK


@triton.jit
def _prefix_kernel(
    p_q, p_k, p_v, p_m, p_l, p_acc, p_part_m, p_part_l, p_part_acc, p_arrived,
    p_slot_rows, p_slot_count, p_page_table, p_prefix_len, scale_log2, num_slots, room, num_pages, room_tiles,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    BS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = H // G
    o_s, o_d = tl.arange(0, BS), tl.arange(0, BD)
    # The work that there is, slot by slot, is dealt to the programs: hardly one is launched in vain.
    b_queries = tl.load(p_slot_count + o_s, mask=o_s < num_slots, other=0) * GROUP
    b_length = tl.load(p_prefix_len + o_s, mask=o_s < num_slots, other=0).to(tl.int32)
    b_items = tl.where(b_length > 0, tl.cdiv(b_queries, BM) * G, 0)
    if SPLIT:
        b_items = b_items * tl.cdiv(b_length, _chunk_keys(b_length, CHUNKS, CHUNK))
    b_end = tl.cumsum(b_items, 0)
    for item in range(tl.program_id(0), tl.sum(b_items, 0), tl.num_programs(0)):
        i_s = tl.sum((b_end <= item).to(tl.int32), 0)
        i_item = item - tl.sum(tl.where(o_s < i_s, b_items, 0), 0)
        num_queries = tl.load(p_slot_count + i_s) * GROUP
        length = tl.load(p_prefix_len + i_s).to(tl.int32)
        p_pages = p_page_table + i_s.to(tl.int64) * num_pages
        p_rows = p_slot_rows + i_s.to(tl.int64) * room
        chunk = _chunk_keys(length, CHUNKS, CHUNK)
        num_chunks = tl.cdiv(length, chunk)
        i_c = 0
        if SPLIT:
            i_c = i_item % num_chunks
            i_item = i_item // num_chunks
        i_g, i_m = i_item % G, i_item // G
        o_m = i_m * BM + tl.arange(0, BM)
        valid = o_m < num_queries
        b_row = tl.load(p_rows + o_m // GROUP, mask=valid, other=0).to(tl.int64)
        o_rh = b_row * H + i_g * GROUP + o_m % GROUP
        b_q = tl.load(p_q + o_rh[:, None] * D + o_d[None, :], mask=valid[:, None] & (o_d < D)[None, :], other=0.0)
        if SPLIT:
            first = i_c * chunk
            last = tl.minimum(first + chunk, length)
            b_m, b_l, b_acc = _chunk(b_q, p_k, p_v, p_pages, i_g, first, last, scale_log2, G, D, W, BM, BN, BD)
        else:
            b_m, b_l, b_acc = no_keys(BM, BD)
            for first in range(0, length, chunk):
                last = tl.minimum(first + chunk, length)
                b_m_c, b_l_c, b_acc_c = _chunk(
                    b_q, p_k, p_v, p_pages, i_g, first, last, scale_log2, G, D, W, BM, BN, BD
                )
                b_m, b_l, b_acc = merge_keys(b_m, b_l, b_acc, b_m_c, b_l_c, b_acc_c)
        if SPLIT and num_chunks > 1:
            i_tile = (i_s * G + i_g) * room_tiles + i_m
            i_state = i_tile.to(tl.int64) * CHUNKS
            _store_chunk(p_part_m, p_part_l, p_part_acc, i_state + i_c, b_m, b_l, b_acc, BM, BD)
            # The barrier puts every thread's stores before the release of the one that counts; the last program's
            # acquire makes all chunks visible to it.
            tl.debug_barrier()
            if tl.atomic_add(p_arrived + i_tile, 1, sem="acq_rel") == num_chunks - 1:
                b_m, b_l, b_acc = _merge_chunks(p_part_m, p_part_l, p_part_acc, i_state, num_chunks, BM, BD)
                _store(p_m, p_l, p_acc, o_rh, valid, b_m, b_l, b_acc, D, BD)
                tl.store(p_arrived + i_tile, 0)
        else:
            _store(p_m, p_l, p_acc, o_rh, valid, b_m, b_l, b_acc, D, BD)


def prefix_attention(
    q_RHD: torch.Tensor,
    rows: RowMap,
    k_PWGD: torch.Tensor,
    v_PWGD: torch.Tensor,
    page_table_SP: torch.Tensor,
    prefix_len_S: torch.Tensor,
    scale: float,
    state: PrefixState,
) -> None:
    """Fills ``state`` for the rows of every slot, over the first ``prefix_len`` positions of the slot's pages.

    ``page_table_SP`` int64: position j lies in page ``page_table[s, j // W]`` at offset ``j % W``; ``prefix_len_S``
    int64. ``scale`` is positive. Weights are rounded to the dtype of the values before their product. Rows of slots
    without a prefix are left alone.
    """
    num_slots, room = rows.slot_rows_SX.shape
    num_heads, head_dim = q_RHD.shape[1:]
    width, num_kv = k_PWGD.shape[1:3]
    tensors = (q_RHD, k_PWGD, v_PWGD, page_table_SP, rows.slot_rows_SX)
    assert all(x.is_contiguous() for x in tensors), "the kernel takes contiguous tensors"
    query_tile = QUERY_TILE[q_RHD.dtype]
    split = state.chunks is not None
    # Without chunks the arguments of the scratch are never read.
    parts = state.chunks or ChunkStates(state.m_RH, state.l_RH, state.acc_RHD, rows.slot_count_S)
    tiles = triton.cdiv(room * (num_heads // num_kv), query_tile)
    assert not split or num_slots * num_kv * tiles <= len(parts.arrived_N), "the state has no room for so many rows"
    items = num_slots * num_kv * tiles * (MAX_CHUNKS if split else 1)
    _prefix_kernel[(min(items, MAX_PROGRAMS[split]),)](
        q_RHD,
        k_PWGD,
        v_PWGD,
        state.m_RH,
        state.l_RH,
        state.acc_RHD,
        parts.m_NCM,
        parts.l_NCM,
        parts.acc_NCMD,
        parts.arrived_N,
        rows.slot_rows_SX,
        rows.slot_count_S,
        page_table_SP,
        prefix_len_S,
        scale * math.log2(math.e),
        num_slots,
        room,
        page_table_SP.shape[1],
        tiles,
        H=num_heads,
        G=num_kv,
        D=head_dim,
        W=width,
        BS=max(2, triton.next_power_of_2(num_slots)),
        BM=query_tile,
        BN=KEY_TILE[q_RHD.dtype],
        BD=padded_width(head_dim),
        CHUNKS=MAX_CHUNKS,
        CHUNK=MIN_CHUNK,
        SPLIT=split,
        num_warps=4,
        num_stages=3,
    )


def prefix_attention_reference(
    q_RHD: torch.Tensor,
    rows: RowMap,
    k_PWGD: torch.Tensor,
    v_PWGD: torch.Tensor,
    page_table_SP: torch.Tensor,
    prefix_len_S: torch.Tensor,
    scale: float,
    state: PrefixState,
) -> None:
    """The same in torch, one softmax over the whole prefix."""
    width, num_kv, head_dim = k_PWGD.shape[1:]
    group = q_RHD.shape[1] // num_kv
    for slot, (count, length) in enumerate(zip(rows.slot_count_S.tolist(), prefix_len_S.tolist(), strict=True)):
        if not count or not length:
            continue
        rows_N = rows.slot_rows_SX[slot, :count].long()
        pages = page_table_SP[slot, : -(-length // width)]
        k, v = (x[pages].flatten(0, 1)[:length].transpose(0, 1).float() for x in (k_PWGD, v_PWGD))  # [G, j, D]
        # A row's bits must not depend on how many there are, and a CPU's matrix product for few rows is another one.
        q = k.new_zeros((num_kv, -(-count // 32) * 32, group, head_dim))
        q[:, :count] = q_RHD[rows_N].float().unflatten(1, (num_kv, group)).transpose(0, 1)
        scores = torch.bmm(q.flatten(1, 2), k.transpose(1, 2)) * (scale * math.log2(math.e))
        m = scores.amax(-1, keepdim=True)
        weights = torch.exp2(scores - m)
        total = weights.sum(-1, keepdim=True)
        acc = torch.bmm(weights.to(v_PWGD.dtype).float(), v)

        def by_row(x: torch.Tensor, count: int = count) -> torch.Tensor:
            """[G, N * group, Y] -> [N, H, Y]"""
            return x.unflatten(1, (-1, group))[:, :count].transpose(0, 1).flatten(1, 2)

        state.m_RH[rows_N] = by_row(m).squeeze(-1)
        state.l_RH[rows_N] = by_row(total).squeeze(-1)
        state.acc_RHD[rows_N] = by_row(acc)
