"""Final norm of the positions that the LM head needs.

D head rows, N list positions, E hidden width, K partial sums, T block positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fused.launch import overlapped, wait_for_inputs
from kernels.fused.layout import Addend, Branches, HeadRows
from kernels.fused.residual import (
    MAX_PROGRAMS,
    add_rows,
    rms_norm_row,
    row_config,
    source_row,
    stored_row,
    stream_rows,
    summed_row,
)
from kernels.norm import rms_norm


def head_norm(
    stream_NE: torch.Tensor,
    addend: Addend,
    branches: Branches,
    rows: HeadRows,
    norm_weight_E: torch.Tensor,
    eps: float,
    out_DE: torch.Tensor,
) -> None:
    """Writes the normed last hidden state of every head row d < ``rows.count_1`` to ``out_DE[d]``.

    The hidden state is the stream plus the last layer's addend, rounded to the stream's dtype.
    """
    parts, added, stored = addend.parts, addend.rows, addend.stored_XE
    num_parts, room, width = parts.values_KRN.shape
    for tensor in (stream_NE, parts.values_KRN[0], out_DE):
        assert tensor.is_contiguous()
    _head_norm_kernel[(min(len(out_DE), MAX_PROGRAMS),)](
        stream_NE,
        parts.values_KRN,
        rows.count_1 if parts.used_1 is None else parts.used_1,
        added.keep_ST if added else stream_NE,
        added.row_SBT if added else stream_NE,
        branches.slot_A,
        branches.branch_A,
        branches.ancestors_B,
        rows.count_1,
        rows.hidden_D,
        norm_weight_E,
        out_DE,
        stream_NE if stored is None else stored,
        eps,
        parts.stride,
        room,
        len(branches.parent_B),
        T=branches.tokens_SBT.shape[2],
        E=width,
        K=num_parts,
        MAPPED=added is not None,
        COUNTED=parts.used_1 is not None,
        STORED=stored is not None,
        **row_config(width),
        **overlapped(stream_NE),
    )


@triton.jit(do_not_specialize=["num_branches"], do_not_specialize_on_alignment=["p_used", "p_count"])
def _head_norm_kernel(
    p_stream,
    p_parts,
    p_used,
    p_keep,
    p_map,
    p_slot,
    p_branch,
    p_ancestors,
    p_count,
    p_hidden,
    p_weight,
    p_out,
    p_stored,
    eps,
    stride,
    room,
    num_branches,
    T: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    MAPPED: tl.constexpr,
    COUNTED: tl.constexpr,
    STORED: tl.constexpr,
    BE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    o_e = tl.arange(0, BE)
    m_e = o_e < E
    b_weight = tl.load(p_weight + o_e, mask=m_e, other=0.0)  # [BE]
    wait_for_inputs(OVERLAP)
    used = K
    if COUNTED:
        used = tl.load(p_used)
    for i_row in range(tl.program_id(0), tl.load(p_count), tl.num_programs(0)):
        i_p = tl.load(p_hidden + i_row)
        i_part = i_p
        if MAPPED:
            i_slot, i_branch = tl.load(p_slot + i_p // T), tl.load(p_branch + i_p // T)
            i_part = source_row(p_keep, p_map, tl.load(p_ancestors + i_branch), i_slot, i_p % T, num_branches, T, "")
        b_stored = stored_row(p_stream, i_p, o_e, m_e, E, "")  # [BE]
        b_added = summed_row(p_parts, p_stored, i_part, room, stride, used, o_e, m_e, E, K, COUNTED, STORED)  # [BE]
        b_x = add_rows(b_stored, b_added, p_stream.dtype.element_ty)
        b_normed = rms_norm_row(b_x, b_weight, eps, p_out.dtype.element_ty, E)
        tl.store(p_out + tl.cast(i_row, tl.int64) * E + o_e, b_normed, mask=m_e)


def head_norm_reference(
    stream_NE: torch.Tensor,
    addend: Addend,
    branches: Branches,
    rows: HeadRows,
    norm_weight_E: torch.Tensor,
    eps: float,
    out_DE: torch.Tensor,
) -> None:
    """The same in plain torch."""
    count = int(rows.count_1)
    position = rows.hidden_D[:count].long()
    hidden = stream_rows(stream_NE[position], addend, branches, position)
    out_DE[:count] = rms_norm(hidden, norm_weight_E, eps)
