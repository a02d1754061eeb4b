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
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.fused.layout import RowMap
from kernels.fused.softmax import add_keys, merge_keys, no_keys

MAX_CHUNKS = 8
"""Merging costs a program about as much per chunk as 64 keys do, so more chunks would not end sooner."""
MIN_CHUNK = 128
"""Chunks are multiples of it; a multiple of every key tile."""
QUERY_TILE = {torch.bfloat16: 64, torch.float32: 16}
KEY_TILE = {torch.bfloat16: 64, torch.float32: 32}
TARGET_PROGRAMS = 8 * 132
"""Beyond about this many, programs take several query tiles instead: those that find no row cost their launch."""


def chunk_keys(prefix_len: int) -> int:
    """Keys of one chunk. The kernel computes the same."""
    return MIN_CHUNK * max(1, -(-prefix_len // (MAX_CHUNKS * MIN_CHUNK)))


@dataclass(frozen=True, slots=True)
class ChunkStates:
    """Scratch: the chunks' states before they are merged. N query tiles of M queries, slot by slot and head by head."""

    m_NCM: torch.Tensor
    l_NCM: torch.Tensor
    acc_NCMD: torch.Tensor
    """With padded head width."""
    arrived_N: torch.Tensor
    """int32: how many of a tile's chunks are there; zero between calls."""


@dataclass(frozen=True, slots=True)
class PrefixState:
    """Softmax over the prefix before normalisation, float32. Undefined for rows whose prefix is empty.

    ``l = sum(2 ** (score - m))`` and ``acc = sum(2 ** (score - m) * v)``, with scores and m in base 2.
    """

    m_RH: torch.Tensor
    l_RH: torch.Tensor
    acc_RHD: torch.Tensor
    chunks: ChunkStates | None
    """None: one program computes all chunks of a row. The result is the same."""

    @classmethod
    def allocate(cls, q_RHD: torch.Tensor, num_kv: int, num_slots: int, room: int, split: bool) -> PrefixState:
        """State for rows like ``q``, ``room`` of them a slot.

        ``split`` is worth it for few slots (fewer query tiles than processors); its scratch is ``MAX_CHUNKS`` states.
        """
        num_rows, num_heads, head_dim = q_RHD.shape

        def floats(*shape: int) -> torch.Tensor:
            return q_RHD.new_empty(shape, dtype=torch.float32)

        chunks = None
        if split:
            tile = QUERY_TILE[q_RHD.dtype]
            num_tiles = num_slots * num_kv * triton.cdiv(room * (num_heads // num_kv), tile)
            shape = (num_tiles, MAX_CHUNKS, tile)
            arrived_N = q_RHD.new_zeros(num_tiles, dtype=torch.int32)
            chunks = ChunkStates(floats(*shape), floats(*shape), floats(*shape, _padded(head_dim)), arrived_N)
        return cls(floats(num_rows, num_heads), floats(num_rows, num_heads), floats(*q_RHD.shape), chunks)


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


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
def _merge_chunks(p_m, p_l, p_acc, i_state, num_chunks, BM: tl.constexpr, BD: tl.constexpr):
    o_m, o_d = tl.arange(0, BM), tl.arange(0, BD)
    b_m, b_l, b_acc = no_keys(BM, BD)
    for i in range(i_state, i_state + num_chunks):
        b_m_next = tl.load(p_m + i * BM + o_m)
        b_l_next = tl.load(p_l + i * BM + o_m)
        b_acc_next = tl.load(p_acc + i * (BM * BD) + o_m[:, None] * BD + o_d[None, :])
        b_m, b_l, b_acc = merge_keys(b_m, b_l, b_acc, b_m_next, b_l_next, b_acc_next)
    return b_m, b_l, b_acc


@triton.jit
def _prefix_kernel(
    p_q, p_k, p_v, p_m, p_l, p_acc, p_part_m, p_part_l, p_part_acc, p_arrived,
    p_slot_rows, p_slot_count, p_page_table, p_prefix_len, scale_log2, room, num_pages, room_tiles,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    i_g, i_c, i_s = tl.program_id(0) % G, tl.program_id(0) // G, tl.program_id(1)
    GROUP: tl.constexpr = H // G
    num_queries = tl.load(p_slot_count + i_s) * GROUP
    length = tl.load(p_prefix_len + i_s).to(tl.int32)
    chunk = tl.maximum(tl.cdiv(length, CHUNKS * CHUNK), 1) * CHUNK
    num_chunks = tl.cdiv(length, chunk)
    if i_c >= num_chunks:
        return
    p_pages = p_page_table + i_s.to(tl.int64) * num_pages
    p_rows = p_slot_rows + i_s.to(tl.int64) * room
    o_d = tl.arange(0, BD)
    for i_m in range(tl.program_id(2), tl.cdiv(num_queries, BM), tl.num_programs(2)):
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
    lanes = num_kv * (MAX_CHUNKS if split else 1)
    tiles = triton.cdiv(room * (num_heads // num_kv), query_tile)
    assert not split or num_slots * num_kv * tiles <= len(parts.arrived_N), "the state has no room for so many rows"
    steps = min(tiles, max(1, TARGET_PROGRAMS // (lanes * num_slots)))
    _prefix_kernel[(lanes, num_slots, steps)](
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
        room,
        page_table_SP.shape[1],
        tiles,
        H=num_heads,
        G=num_kv,
        D=head_dim,
        W=width,
        BM=query_tile,
        BN=KEY_TILE[q_RHD.dtype],
        BD=_padded(head_dim),
        CHUNKS=MAX_CHUNKS,
        CHUNK=MIN_CHUNK,
        SPLIT=split,
        num_warps=4,
        # The table of pages is read a stage before the keys: 5 stages keep two tiles in flight, 3 leave room for two
        # programs on a processor.
        num_stages=5 if split else 3,
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
