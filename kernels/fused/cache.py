"""Keys and values of accepted blocks into the prefix pages; with the sub-block cache, those of a step for the next.

L layers, R rows of a layer's arena, G key/value heads, D head width, S slots, B branches, T block positions,
W positions a page; a page table has P entries a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fused.launch import overlapped, wait_for_inputs

SLOT_GROUPS = 8
"""Programs that share the slots of one tile: most slots commit nothing, and a check is cheaper than a program."""


def commit_kv(
    k_LRGD: torch.Tensor,
    v_LRGD: torch.Tensor,
    row_LSBT: torch.Tensor,
    commit_branch_S: torch.Tensor,
    length_S: torch.Tensor,
    start_S: torch.Tensor,
    page_table_SP: torch.Tensor,
    k_LPWGD: torch.Tensor,
    v_LPWGD: torch.Tensor,
) -> None:
    """Copies positions t < ``length_S[s]`` of branch ``commit_branch_S[s]`` of every layer to the slot's pages.

    A negative branch (int32) commits nothing. Position t goes to ``start_S[s] + t``: entry ``// W`` of the slot's page
    table, at ``% W``. Final branches are never folded, so each position has a row of its own, ``row_LSBT``. Length,
    start and page table are int64; ``start_S`` is that of the committed block, which the slot has left already.
    """
    num_layers, num_slots, num_branches, block = row_LSBT.shape
    width = k_LRGD.shape[2] * k_LRGD.shape[3]
    for tensor in (k_LRGD, v_LRGD, row_LSBT, page_table_SP, k_LPWGD, v_LPWGD):
        assert tensor.is_contiguous()
    tile = min(8, triton.next_power_of_2(block))
    _commit_kernel[(triton.cdiv(block, tile), num_layers, min(num_slots, SLOT_GROUPS))](
        k_LRGD,
        v_LRGD,
        row_LSBT,
        commit_branch_S,
        length_S,
        start_S,
        page_table_SP,
        k_LPWGD,
        v_LPWGD,
        k_LRGD.shape[1],
        num_slots,
        num_branches,
        page_table_SP.shape[1],
        k_LPWGD.shape[1],
        T=block,
        W=k_LPWGD.shape[2],
        GD=width,
        BT=tile,
        BGD=triton.next_power_of_2(width),
        num_warps=8,
        **overlapped(k_LRGD),
    )


@triton.jit(
    do_not_specialize=["num_rows", "num_slots", "num_branches", "num_entries", "num_pages"],
    do_not_specialize_on_alignment=["p_commit", "p_length", "p_start"],
)
def _commit_kernel(
    p_k,
    p_v,
    p_row,
    p_commit,
    p_length,
    p_start,
    p_table,
    p_k_pages,
    p_v_pages,
    num_rows,
    num_slots,
    num_branches,
    num_entries,
    num_pages,
    T: tl.constexpr,
    W: tl.constexpr,
    GD: tl.constexpr,
    BT: tl.constexpr,
    BGD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    i_layer = tl.program_id(1)
    o_x = tl.arange(0, BGD)
    wait_for_inputs(OVERLAP)
    for i_slot in range(tl.program_id(2), num_slots, tl.num_programs(2)):
        i_branch = tl.load(p_commit + i_slot)
        if i_branch >= 0:
            m_t = (o_t < tl.load(p_length + i_slot)) & (o_t < T)
            o_map = ((i_layer * num_slots + i_slot) * num_branches + i_branch) * T
            i_row = tl.load(p_row + o_map + o_t, mask=m_t, other=0)  # [BT]
            position = tl.load(p_start + i_slot) + o_t
            i_page = tl.load(p_table + i_slot * num_entries + position // W, mask=m_t, other=0)  # [BT]

            m_x = m_t[:, None] & (o_x < GD)[None, :]  # [BT, BGD]
            o_from = (i_layer.to(tl.int64) * num_rows + i_row)[:, None] * GD + o_x[None, :]
            o_to = ((i_layer.to(tl.int64) * num_pages + i_page) * W + position % W)[:, None] * GD + o_x[None, :]
            b_k = tl.load(p_k + o_from, mask=m_x)
            b_v = tl.load(p_v + o_from, mask=m_x)
            tl.store(p_k_pages + o_to, b_k, mask=m_x)
            tl.store(p_v_pages + o_to, b_v, mask=m_x)


def commit_kv_reference(
    k_LRGD: torch.Tensor,
    v_LRGD: torch.Tensor,
    row_LSBT: torch.Tensor,
    commit_branch_S: torch.Tensor,
    length_S: torch.Tensor,
    start_S: torch.Tensor,
    page_table_SP: torch.Tensor,
    k_LPWGD: torch.Tensor,
    v_LPWGD: torch.Tensor,
) -> None:
    """The same in plain torch."""
    page_size = k_LPWGD.shape[2]
    for s in (commit_branch_S >= 0).nonzero().flatten().tolist():
        length = min(int(length_S[s]), row_LSBT.shape[3])
        position = start_S[s] + torch.arange(length, device=row_LSBT.device)
        page, offset = page_table_SP[s, position // page_size], position % page_size
        row_LT = row_LSBT[:, s, commit_branch_S[s], :length].long()
        for layer, row_T in enumerate(row_LT):
            k_LPWGD[layer, page, offset] = k_LRGD[layer, row_T]
            v_LPWGD[layer, page, offset] = v_LRGD[layer, row_T]


def store_keys(k_LXGD: torch.Tensor, v_LXGD: torch.Tensor, row_LST: torch.Tensor, branch_S: torch.Tensor) -> None:
    """Copies keys and values of the main branches' positions to their stored rows, the last S * T of X.

    Not of slots whose ``branch_S`` (int32) is below 0, nor where the stored row serves already.
    """
    num_layers, num_slots, block = row_LST.shape
    room, width = k_LXGD.shape[1], k_LXGD.shape[2] * k_LXGD.shape[3]
    assert k_LXGD.is_contiguous()
    assert v_LXGD.is_contiguous()
    assert row_LST.is_contiguous()
    tile = min(8, triton.next_power_of_2(block))
    _store_keys_kernel[(triton.cdiv(block, tile), num_layers, num_slots)](
        k_LXGD,
        v_LXGD,
        row_LST,
        branch_S,
        room,
        T=block,
        GD=width,
        BT=tile,
        BGD=triton.next_power_of_2(width),
        num_warps=8,
        **overlapped(k_LXGD),
    )


@triton.jit
def _store_keys_kernel(
    p_k, p_v, p_row, p_branch, room,
    T: tl.constexpr, GD: tl.constexpr, BT: tl.constexpr, BGD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    i_layer, i_slot, num_slots = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    o_x = tl.arange(0, BGD)
    wait_for_inputs(OVERLAP)
    if tl.load(p_branch + i_slot) >= 0:
        num_rows = room - num_slots * T
        i_row = tl.load(p_row + (i_layer * num_slots + i_slot) * T + o_t, mask=o_t < T, other=room)  # [BT]
        mask = (i_row < num_rows)[:, None] & (o_x < GD)[None, :]  # [BT, BGD]
        o_layer = i_layer.to(tl.int64) * room
        o_from = (o_layer + i_row)[:, None] * GD + o_x[None, :]
        o_to = (o_layer + num_rows + i_slot * T + o_t)[:, None] * GD + o_x[None, :]
        b_k, b_v = tl.load(p_k + o_from, mask=mask), tl.load(p_v + o_from, mask=mask)
        tl.store(p_k + o_to, b_k, mask=mask)
        tl.store(p_v + o_to, b_v, mask=mask)


def store_keys_reference(
    k_LXGD: torch.Tensor, v_LXGD: torch.Tensor, row_LST: torch.Tensor, branch_S: torch.Tensor
) -> None:
    """The same in plain torch."""
    _, num_slots, block = row_LST.shape
    num_rows = k_LXGD.shape[1] - num_slots * block
    to_ST = num_rows + torch.arange(num_slots * block, device=row_LST.device).view(num_slots, block)
    for layer, row_ST in enumerate(row_LST):
        own = (row_ST < num_rows) & (branch_S >= 0)[:, None]
        for x_XGD in (k_LXGD[layer], v_LXGD[layer]):
            x_XGD[to_ST[own]] = x_XGD[row_ST[own].long()]
