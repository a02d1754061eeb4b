"""Counts which positions a step recomputed and which it folded.

S slots, B branches, T block positions, K draft depths, L layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fused.control import Counters, Graph
from kernels.fused.drafting import num_warps
from kernels.fused.launch import overlapped, wait_for_inputs
from kernels.fused.layout import DENOISE, Branches
from kernels.fused.opening import tile_width

_DENOISE = tl.constexpr(DENOISE)


def tally_folds(
    branches: Branches, graph: Graph, keep_LKST: torch.Tensor, counters: Counters, carries: bool = False
) -> None:
    """Adds a step's recomputed rows, and its folded positions by layer and depth of the draft.

    ``carries``: main branches fold, too, in time; theirs are counted apart.

    ``keep_LKST``: int64 bit sets [L, 2, S, T] of the branches recomputed at a position, K = 0 for QKV and 1 for the
    FFN. One program a slot and layer.
    """
    num_layers, _, num_slots, block = keep_LKST.shape
    width, height = tile_width(block), triton.next_power_of_2(graph.num_branches)
    assert keep_LKST.is_contiguous()
    _tally_kernel[(num_slots, num_layers)](
        keep_LKST,
        branches.kind_SB,
        graph.depth_B,
        counters.qkv_rows_S,
        counters.ffn_rows_S,
        counters.folded_qkv_SLK,
        counters.folded_ffn_SLK,
        counters.main_qkv_SL,
        counters.main_ffn_SL,
        B=graph.num_branches,
        BB=height,
        T=block,
        BT=width,
        K=graph.num_depths,
        CARRIES=carries,
        num_warps=num_warps(height * width),
        **overlapped(keep_LKST),
    )


@triton.jit
def _tally_kernel(
    p_keep,
    p_kind,
    p_depth,
    p_qkv_rows,
    p_ffn_rows,
    p_folded_qkv,
    p_folded_ffn,
    p_main_qkv,
    p_main_ffn,
    B: tl.constexpr,
    BB: tl.constexpr,
    T: tl.constexpr,
    BT: tl.constexpr,
    K: tl.constexpr,
    CARRIES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    i_s, i_l = tl.program_id(0), tl.program_id(1)
    num_slots, num_layers = tl.num_programs(0), tl.num_programs(1)
    o_b, o_t = tl.arange(0, BB), tl.arange(0, BT)
    wait_for_inputs(OVERLAP)
    kind = tl.load(p_kind + i_s * B + o_b, mask=o_b < B, other=0)
    depth = tl.load(p_depth + o_b, mask=o_b < B, other=1)
    draft = (kind == _DENOISE) & (o_b > 0)
    for i_k in tl.static_range(2):
        bits = tl.load(p_keep + ((i_l * 2 + i_k) * num_slots + i_s) * T + o_t, mask=o_t < T, other=0)
        kept = tl.sum(((bits[None, :] >> o_b[:, None].to(tl.int64)) & 1).to(tl.int32), axis=1)
        p_rows, p_folded = (p_qkv_rows, p_folded_qkv) if i_k == 0 else (p_ffn_rows, p_folded_ffn)
        tl.atomic_add(p_rows + i_s, tl.sum(kept, axis=0).to(tl.int64), sem="relaxed")
        if K > 0:
            o_k = (i_s * num_layers + i_l) * K + depth - 1
            tl.atomic_add(p_folded + o_k, (T - kept).to(tl.int64), mask=draft, sem="relaxed")
        if CARRIES:
            p_main = p_main_qkv if i_k == 0 else p_main_ffn
            folded = tl.sum(tl.where((kind == _DENOISE) & (o_b == 0), T - kept, 0), axis=0)
            tl.atomic_add(p_main + i_s * num_layers + i_l, folded.to(tl.int64), sem="relaxed")


def tally_folds_reference(
    branches: Branches, graph: Graph, keep_LKST: torch.Tensor, counters: Counters, carries: bool = False
) -> None:
    """``tally_folds`` in torch."""
    block = keep_LKST.shape[3]
    bit_B = torch.arange(graph.num_branches, device=keep_LKST.device)
    kept_KSLB = ((keep_LKST[..., None] >> bit_B) & 1).sum(-2).permute(1, 2, 0, 3)
    counters.qkv_rows_S.add_(kept_KSLB[0].sum((1, 2)))
    counters.ffn_rows_S.add_(kept_KSLB[1].sum((1, 2)))
    if carries:
        main_S1 = branches.kind_SB[:, :1] == DENOISE
        counters.main_qkv_SL.add_((block - kept_KSLB[0, :, :, 0]) * main_S1)
        counters.main_ffn_SL.add_((block - kept_KSLB[1, :, :, 0]) * main_S1)
    draft_SB = (branches.kind_SB == DENOISE) & (bit_B > 0)
    folded_KSLB = (block - kept_KSLB) * draft_SB[:, None]
    for depth in range(1, graph.num_depths + 1):
        at_depth_B = graph.depth_B == depth
        counters.folded_qkv_SLK[..., depth - 1] += folded_KSLB[0][..., at_depth_B].sum(-1)
        counters.folded_ffn_SLK[..., depth - 1] += folded_KSLB[1][..., at_depth_B].sum(-1)
