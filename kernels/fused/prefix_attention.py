"""Attention of recomputed rows over their slot's prefix, as streaming softmax states that the block part is added to.

Each chunk of the prefix is a softmax of its own (``prefix_state``). Nothing that is computed for a row depends on more
than its query and its slot's prefix.

R rows, H query heads, G key/value heads, D head width, S slots, X room for the rows of a slot, P pages of W positions.
Scores are in base 2: ``scale * log2(e)`` times the product.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.fused.launch import early, overlapped, wait_for_inputs
from kernels.fused.layout import RowMap
from kernels.fused.prefix_state import PrefixState, cut_prefix, padded_width
from kernels.fused.softmax import add_keys, merge_keys, no_keys

MAX_PROGRAMS = {True: 2 * 132, False: 8 * 132}
"""With chunks side by side as many as run at once on 132 processors; else more, for what they do differs in length."""


@triton.jit
def _pages(p_pages, start, last, W: tl.constexpr, BN: tl.constexpr, CACHE: tl.constexpr):
    """Numbers of the one or two pages where the keys of a tile lie: scalars, so a thread has no address per key."""
    page_0 = tl.load(p_pages + tl.minimum(start, last - 1) // W, cache_modifier=CACHE)
    page_1 = page_0
    if BN > W:
        page_1 = tl.load(p_pages + tl.minimum(start + W, last - 1) // W, cache_modifier=CACHE)
    return page_0, page_1


@triton.jit
def _walk(
    b_q, p_k, p_v, p_pages, i_g, first, last, chunk, scale_log2,
    G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    ONE_CHUNK: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """State over the keys first <= j < last, which are not none: that of each chunk, merged in ascending order.

    One loop over all tiles of keys: with a loop a chunk the first tile of each would be waited for.
    """
    o_n, o_d = tl.arange(0, BN), tl.arange(0, BD)
    b_m, b_l, b_acc = no_keys(BM, BD)
    b_m_all, b_l_all, b_acc_all = no_keys(BM, BD)
    page_0, page_1 = _pages(p_pages, first, last, W, BN, CACHE)
    end = first + chunk
    for start in range(first, last, BN):
        if not ONE_CHUNK:  # noqa: SIM102
            if start == end:
                b_m_all, b_l_all, b_acc_all = merge_keys(b_m_all, b_l_all, b_acc_all, b_m, b_l, b_acc)
                b_m, b_l, b_acc = no_keys(BM, BD)
                end += chunk
        # The pages of the next tile: their numbers are there when its keys are asked for.
        next_0, next_1 = _pages(p_pages, start + BN, last, W, BN, CACHE)
        inside = o_n < last - start
        mask = inside[:, None]
        if D < BD:
            mask = mask & (o_d < D)[None, :]
        o_w = o_n % W if BN > W else start % W + o_n
        b_page = tl.where(o_n < W, page_0 * (W * G * D) + i_g * D, page_1 * (W * G * D) + i_g * D)
        o_kv = b_page[:, None] + (o_w.to(tl.int64)[:, None] * (G * D) + o_d[None, :])
        b_k = tl.load(p_k + o_kv, mask=mask, other=0.0)  # [BN, BD]
        b_v = tl.load(p_v + o_kv, mask=mask, other=0.0)
        b_m, b_l, b_acc = add_keys(b_q, b_k, b_v, inside[None, :], b_m, b_l, b_acc, scale_log2)
        page_0, page_1 = next_0, next_1
    if not ONE_CHUNK:
        b_m, b_l, b_acc = merge_keys(b_m_all, b_l_all, b_acc_all, b_m, b_l, b_acc)
    return b_m, b_l, b_acc


@triton.jit
def _prefix_kernel(
    p_q, p_k, p_v, p_m, p_l, p_acc, p_slot_rows, p_slot_count, p_page_table, p_prefix_len, scale_log2,
    num_slots, room, num_pages, num_rows,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    SPLIT_TILES: tl.constexpr, KEYS_A_TILE: tl.constexpr, ONE_CHUNK: tl.constexpr, BS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = H // G
    # Before the wait the first-level cache may hold what was there before.
    CACHE: tl.constexpr = ".cg" if EARLY else ""
    if not EARLY:
        wait_for_inputs(OVERLAP)
    # The work that there is, slot by slot, is dealt to the programs: hardly one is launched in vain.
    if BS == 1:
        num_queries = tl.load(p_slot_count, cache_modifier=CACHE) * GROUP
        length = tl.load(p_prefix_len, cache_modifier=CACHE).to(tl.int32)
        chunk, num_states = cut_prefix(num_queries, length, 1, G, BM, CHUNKS, CHUNK, SPLIT_TILES, KEYS_A_TILE)
        num_items = tl.cdiv(num_queries, BM) * G * num_states
    else:
        o_s = tl.arange(0, BS)
        b_queries = tl.load(p_slot_count + o_s, mask=o_s < num_slots, other=0, cache_modifier=CACHE) * GROUP
        b_length = tl.load(p_prefix_len + o_s, mask=o_s < num_slots, other=0, cache_modifier=CACHE).to(tl.int32)
        _, b_states = cut_prefix(b_queries, b_length, num_slots, G, BM, CHUNKS, CHUNK, SPLIT_TILES, KEYS_A_TILE)
        b_items = tl.cdiv(b_queries, BM) * G * b_states
        b_end = tl.cumsum(b_items, 0)
        num_items = tl.sum(b_items, 0)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        i_item, p_pages, p_rows = item, p_page_table, p_slot_rows
        if BS > 1:
            i_s = tl.sum((b_end <= item).to(tl.int32), 0)
            i_item -= tl.sum(tl.where(o_s < i_s, b_items, 0), 0)
            num_queries = tl.load(p_slot_count + i_s, cache_modifier=CACHE) * GROUP
            length = tl.load(p_prefix_len + i_s, cache_modifier=CACHE).to(tl.int32)
            chunk, num_states = cut_prefix(
                num_queries, length, num_slots, G, BM, CHUNKS, CHUNK, SPLIT_TILES, KEYS_A_TILE
            )
            p_pages += i_s * num_pages
            p_rows += i_s * room
        i_c = i_item % num_states
        i_g, i_m = i_item // num_states % G, i_item // num_states // G
        first = i_c * chunk
        last = tl.where(num_states > 1, tl.minimum(first + chunk, length), length)
        o_m, o_d = i_m * BM + tl.arange(0, BM), tl.arange(0, BD)
        valid = o_m < num_queries
        b_row = o_m // GROUP
        if BS > 1:  # The rows of an only slot are all that there are, so no list need be read.
            b_row = tl.load(p_rows + b_row, mask=valid, other=0, cache_modifier=CACHE)
        o_q = (b_row * H + i_g * GROUP + o_m % GROUP) * D
        inside = valid[:, None]
        if D < BD:
            inside = inside & (o_d < D)[None, :]
        if EARLY:
            wait_for_inputs(OVERLAP)
        b_q = tl.load(p_q + o_q[:, None] + o_d[None, :], mask=inside, other=0.0)  # [BM, BD]
        b_m, b_l, b_acc = _walk(
            b_q, p_k, p_v, p_pages, i_g, first, last, chunk, scale_log2, G, D, W, BM, BN, BD, ONE_CHUNK, CACHE
        )
        o_state = (i_c * G + i_g) * (num_rows * GROUP)
        if BS > 1:
            o_state += b_row * GROUP + o_m % GROUP
        else:
            o_state += o_m
        tl.store(p_m + o_state, b_m, mask=valid)
        tl.store(p_l + o_state, b_l, mask=valid)
        tl.store(p_acc + o_state[:, None] * D + o_d[None, :], b_acc, mask=inside)
    if EARLY:
        wait_for_inputs(OVERLAP)  # Also without an item: that this kernel ended tells the next one of those before.


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
    num_rows, num_heads, head_dim = q_RHD.shape
    width, num_kv = k_PWGD.shape[1:3]
    tensors = (q_RHD, k_PWGD, v_PWGD, page_table_SP, rows.slot_rows_SX)
    assert all(x.is_contiguous() for x in tensors), "the kernel takes contiguous tensors"
    plan = state.plan
    assert width % plan.key_tile == 0 or plan.key_tile in (width, 2 * width), "a tile of keys has at most two pages"
    tiles = num_slots * num_kv * triton.cdiv(room * (num_heads // num_kv), plan.query_tile)
    split = state.split_tiles > 0
    _prefix_kernel[(min(tiles * (plan.max_chunks if split else 1), MAX_PROGRAMS[split]),)](
        q_RHD,
        k_PWGD,
        v_PWGD,
        state.m_CGRY,
        state.l_CGRY,
        state.acc_CGRYD,
        rows.slot_rows_SX,
        rows.slot_count_S,
        page_table_SP,
        prefix_len_S,
        scale * math.log2(math.e),
        num_slots,
        room,
        page_table_SP.shape[1],
        num_rows,
        H=num_heads,
        G=num_kv,
        D=head_dim,
        W=width,
        CHUNKS=plan.max_chunks,
        CHUNK=plan.min_chunk,
        SPLIT_TILES=state.split_tiles,
        KEYS_A_TILE=plan.keys_a_tile,
        # However many rows there are, whatever is longer than a chunk is split.
        ONE_CHUNK=tiles < state.split_tiles and tiles * plan.keys_a_tile <= plan.min_chunk,
        BS=triton.next_power_of_2(num_slots),
        BM=plan.query_tile,
        BN=plan.key_tile,
        BD=padded_width(head_dim),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **early(q_RHD),
        **overlapped(q_RHD),
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
    """The same in torch, one softmax over the whole prefix: always the first state alone."""
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

        for stored, x in ((state.m_CGRY, m[..., 0]), (state.l_CGRY, total[..., 0]), (state.acc_CGRYD, acc)):
            stored[0][:, rows_N] = x.unflatten(1, (-1, group))[:, :count]
