"""The folding gate: brings the residual stream up to date and sorts out which positions are recomputed.

N = A * T list positions p, S slots, B branches, T block positions, X = B * T, E hidden width, R recomputed rows,
K partial sums, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fused.launch import early, overlapped, wait_for_inputs
from kernels.fused.layout import DENOISE, Addend, Branches, RowMap, TimeGate
from kernels.fused.placement import place_row, place_rows
from kernels.fused.residual import (
    MAX_PROGRAMS,
    add_rows,
    added_row,
    rms_norm_row,
    row_config,
    source_row,
    stored_row,
    stream_rows,
    summed_row,
)
from kernels.norm import rms_norm

_DENOISE = tl.constexpr(DENOISE)
MAX_REGISTERS: int | None = 80
"""A thread's where there are several branches and rows are wide: three programs of 256 threads fit on a multiprocessor,
and so all positions of nine branches at once."""
MAX_EAGER = 320
"""Up to this room positions are read before it is known whether they are there: few are not."""


def gate_rows(
    source_XE: torch.Tensor,
    by_token: bool,
    addend: Addend | None,
    branches: Branches,
    norm_weight_E: torch.Tensor,
    eps: float,
    delta: float,
    inherit: RowMap | None,
    retest: bool,
    stream_NE: torch.Tensor,
    out: RowMap,
    normed_RE: torch.Tensor,
    length_S: torch.Tensor | None = None,
    time: TimeGate | None = None,
) -> None:
    """Adds the projection before to the residual stream, gates against the parent, and norms what is kept.

    ``source_XE`` is the stream by list position, or the embedding [V, E] to be read by token (``by_token``). To it
    the sum of the addend's parts is added in float32, rounded once, and stored to ``stream_NE``, another buffer:
    other positions still read the old rows.

    A draft's position is folded (SpecFold, gate) where ``|x - x_parent| <= delta * |x_parent|``, in L2 over E, tested
    squared in float32; ``delta`` < 0 folds nothing. Main and final branches are never folded. With ``inherit``, the
    map of the layer's first gate, a position may be folded only where that map folds it; without ``retest`` it is
    folded exactly there. Kept positions get a row of ``out`` (cleared before) and their RMSNorm in ``normed_RE``.

    Positions at or beyond ``length_S`` (int64; None: T) are left out: they have no row, their stream is undefined.

    With ``time`` a denoising main branch is gated, too, by ``time.delta`` against the stored rows, which are those of
    ``stream_NE`` behind its list positions, where ``time.valid_S`` allows; ``inherit`` and ``retest`` say the same of
    it as of drafts. Its folded positions get their stored row in ``out.row_SBT``.
    """
    num_slots, num_branches, block = branches.tokens_SBT.shape
    width = source_XE.shape[1]
    parts = addend.parts if addend else None
    added = addend.rows if addend else None
    assert source_XE.data_ptr() != stream_NE.data_ptr()
    for tensor in (source_XE, stream_NE, normed_RE, *(() if parts is None else (parts.values_KRN[0],))):
        assert tensor.is_contiguous()
    num_positions = len(branches.slot_A) * block
    drafts_fold = delta >= 0 and num_branches > 1
    folds = drafts_fold or time is not None
    stored = addend.stored_XE if addend else None
    assert stored is None or (added is not None and parts is not None and parts.values_KRN.shape[1] == num_positions)
    config = row_config(width)
    # Where a tensor is not needed another one stands in for it.
    _gate_kernel[(min(num_positions, MAX_PROGRAMS),)](
        source_XE,
        source_XE if parts is None else parts.values_KRN,
        out.count_1 if parts is None or parts.used_1 is None else parts.used_1,
        added.keep_ST if added else out.keep_ST,
        added.row_SBT if added else out.row_SBT,
        branches.tokens_SBT,
        branches.kind_SB,
        branches.index_SB,
        branches.num_live_1,
        branches.slot_A,
        branches.branch_A,
        branches.parent_B,
        branches.ancestors_B,
        branches.start_S if length_S is None else length_S,
        inherit.keep_ST if inherit else out.keep_ST,
        norm_weight_E,
        stream_NE,
        normed_RE,
        out.keep_ST,
        out.row_SBT,
        out.count_1,
        out.position_R,
        out.slot_count_S,
        out.slot_rows_SX,
        normed_RE if stored is None else stored,
        out.count_1 if time is None else time.valid_S,
        eps,
        delta * delta,
        0.0 if time is None else time.delta * time.delta,
        0 if parts is None else parts.stride,
        num_branches,
        num_positions,
        out.slot_rows_SX.shape[1],
        T=block,
        E=width,
        K=0 if parts is None else len(parts.values_KRN),
        COUNTED=parts is not None and parts.used_1 is not None,
        BY_TOKEN=by_token,
        MAPPED=added is not None,
        HAS_LENGTH=length_S is not None,
        INHERITS=folds and inherit is not None,
        TESTS=folds and (inherit is None or retest),
        DRAFTS=drafts_fold,
        TIME=time is not None,
        STORED=stored is not None,
        ONE_SLOT=num_slots == 1,
        ONE_BRANCH=num_branches == 1,
        EAGER=not by_token and num_positions <= MAX_EAGER,
        **early(source_XE),
        **config,
        **({"maxnreg": MAX_REGISTERS} if MAX_REGISTERS and num_branches > 1 and config["num_warps"] >= 8 else {}),
        **overlapped(source_XE),
    )


@triton.jit
def _gate_kernel(
    p_source,
    p_parts,
    p_used,
    p_added_keep,
    p_added_row,
    p_tokens,
    p_kind,
    p_index,
    p_num_live,
    p_slot,
    p_branch,
    p_parent,
    p_ancestors,
    p_length,
    p_inherit_keep,
    p_weight,
    p_stream,
    p_normed,
    p_keep,
    p_row,
    p_count,
    p_position,
    p_slot_count,
    p_slot_rows,
    p_stored,
    p_valid,
    eps,
    delta_squared,
    time_squared,
    stride,
    num_branches,
    num_positions,
    num_slot_rows,
    T: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    COUNTED: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    MAPPED: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    INHERITS: tl.constexpr,
    TESTS: tl.constexpr,
    DRAFTS: tl.constexpr,
    TIME: tl.constexpr,
    STORED: tl.constexpr,
    ONE_SLOT: tl.constexpr,
    ONE_BRANCH: tl.constexpr,
    EAGER: tl.constexpr,
    EARLY: tl.constexpr,
    BE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Without folding every position keeps its place: its row has its number.
    IN_PLACE: tl.constexpr = (not (INHERITS or TESTS)) and (not HAS_LENGTH)
    AT_ONCE: tl.constexpr = EAGER and (not EARLY)
    CACHE: tl.constexpr = ".cg" if EARLY else ""
    dtype: tl.constexpr = p_stream.dtype.element_ty
    o_e = tl.arange(0, BE)
    m_e = o_e < E
    # One branch: while the kernel before still runs. Several: late, where registers limit what is on its way at once.
    if ONE_BRANCH:
        b_weight = tl.load(p_weight + o_e, mask=m_e, other=0.0)  # [BE]
    used = K
    if not EARLY:
        wait_for_inputs(OVERLAP)
        if COUNTED:
            used = tl.load(p_used)
    num_live = tl.load(p_num_live, cache_modifier=CACHE)
    # Bounded by the room and not by the list's length: the first loads need not wait for it.
    for i_p in range(tl.program_id(0), num_positions, tl.num_programs(0)):
        i_t = i_p % T
        i_slot, i_branch = 0, 0
        if not ONE_SLOT:
            i_slot = tl.load(p_slot + i_p // T, cache_modifier=CACHE)
        if not ONE_BRANCH:
            i_branch = tl.load(p_branch + i_p // T, cache_modifier=CACHE)
        if AT_ONCE:
            b_stored = stored_row(p_source, i_p, o_e, m_e, E, "")  # [BE]
            if (K > 0) and (not MAPPED):
                b_added = added_row(p_parts, i_p, stride, used, o_e, m_e, E, K, COUNTED)  # [BE]
        live = i_p // T < num_live
        if HAS_LENGTH:
            live = live & (i_t < tl.load(p_length + tl.where(live, i_slot, 0), cache_modifier=CACHE))
        if live:
            i_table = (i_slot * num_branches + i_branch) * T + i_t
            i_ancestors = tl.full([], 1, tl.int64)
            if not ONE_BRANCH:
                i_ancestors = tl.load(p_ancestors + i_branch)
            i_part = i_p
            if MAPPED:
                if ONE_BRANCH:
                    i_part = tl.load(p_added_row + i_table, cache_modifier=CACHE)
                else:
                    i_part = source_row(p_added_keep, p_added_row, i_ancestors, i_slot, i_t, num_branches, T, CACHE)
            fold, in_time = False, False
            if INHERITS or TESTS:
                denoises = tl.load(p_kind + i_table // T, cache_modifier=CACHE) == _DENOISE
                if DRAFTS:
                    fold = (i_branch > 0) & denoises
                if TIME:
                    in_time = denoises & (i_branch == 0) & (tl.load(p_valid + i_slot, cache_modifier=CACHE) > 0)
            if INHERITS:
                kept = tl.load(p_inherit_keep + i_slot * T + i_t, cache_modifier=CACHE)
                if DRAFTS:
                    fold = fold & (((kept >> i_branch) & 1) == 0)
                if TIME:
                    in_time = in_time & (((kept >> i_branch) & 1) == 0)
            if not AT_ONCE:
                i_source = tl.load(p_tokens + i_table, cache_modifier=CACHE) if BY_TOKEN else i_p
                b_stored = stored_row(p_source, i_source, o_e, m_e, E, CACHE)  # [BE]
            if (not EARLY) and (K > 0) and (MAPPED or not AT_ONCE):
                b_added = summed_row(
                    p_parts, p_stored, i_part, num_positions, stride, used, o_e, m_e, E, K, COUNTED, STORED
                )  # [BE]  # fmt: skip
            if TESTS and (not DRAFTS):
                i_before = num_positions + i_slot * T + i_t
                b_above = stored_row(p_stream, i_before, o_e, o_e < tl.where(in_time, E, 0), E, CACHE)  # [BE]
            elif TESTS:
                # Masked and not branched over: the parent's row is on its way together with the branch's own.
                i_above = i_slot * num_branches + tl.load(p_parent + i_branch)
                i_p_above = tl.load(p_index + i_above, cache_modifier=CACHE) * T + i_t
                i_source = tl.load(p_tokens + i_above * T + i_t, cache_modifier=CACHE) if BY_TOKEN else i_p_above
                p_above, tested = p_source, fold
                if TIME:
                    p_above, tested = tl.where(in_time, p_stream, p_source), fold | in_time
                    i_source = tl.where(in_time, num_positions + i_slot * T + i_t, i_source)
                b_above = stored_row(p_above, i_source, o_e, o_e < tl.where(tested, E, 0), E, CACHE)  # [BE]
                i_part_above = i_p_above
                if MAPPED:
                    # A branch's ancestors are its parent's and itself. (Of main branches this makes none, hence row 0.)
                    i_above = i_ancestors ^ (tl.full([], 1, tl.int64) << i_branch)
                    i_part_above = source_row(p_added_keep, p_added_row, i_above, i_slot, i_t, num_branches, T, CACHE)
            if EARLY:
                wait_for_inputs(OVERLAP)
                if COUNTED:
                    used = tl.load(p_used)
                if K > 0:
                    b_added = summed_row(
                        p_parts, p_stored, i_part, num_positions, stride, used, o_e, m_e, E, K, COUNTED, STORED
                    )  # [BE]  # fmt: skip
            b_x = b_stored
            if K > 0:
                b_x = add_rows(b_stored, b_added, dtype)
            if TESTS and DRAFTS:
                if K > 0:
                    # Where the position was folded in the layer before, the same row serves both: it is here already.
                    other = i_part_above != i_part
                    m_other = o_e < tl.where(fold & other, E, 0)
                    b_other = summed_row(
                        p_parts, p_stored, i_part_above, num_positions, stride, used, o_e, m_other, E, K, COUNTED, STORED
                    )  # [BE]  # fmt: skip
                    b_parent = add_rows(b_above, tl.where(other, b_other, b_added), dtype)
                    b_above = tl.where(in_time, b_above, b_parent) if TIME else b_parent
                if TIME:
                    fold = (fold | in_time) & _is_near(b_x, b_above, tl.where(in_time, time_squared, delta_squared))
                else:
                    fold = fold & _is_near(b_x, b_above, delta_squared)
            elif TESTS:
                fold = in_time & _is_near(b_x, b_above, time_squared)
            elif TIME:
                fold = fold | in_time if DRAFTS else in_time
            tl.store(p_stream + tl.cast(i_p, tl.int64) * E + o_e, b_x.to(dtype), mask=m_e)
            if not fold:
                i_row = place_row(
                    p_keep, p_row, p_count, p_position, p_slot_count, p_slot_rows, p_index, i_p, i_slot, i_branch, i_t,
                    num_live, num_branches, num_slot_rows, T, IN_PLACE, ONE_SLOT,
                )  # fmt: skip
                if not ONE_BRANCH:
                    b_weight = tl.load(p_weight + o_e, mask=m_e, other=0.0)  # [BE]
                b_normed = rms_norm_row(b_x, b_weight, eps, p_normed.dtype.element_ty, E)
                tl.store(p_normed + tl.cast(i_row, tl.int64) * E + o_e, b_normed, mask=m_e)
            elif TIME:
                if in_time:
                    tl.store(p_row + i_table, num_positions + i_slot * T + i_t)
    if EARLY:
        wait_for_inputs(OVERLAP)  # For programs without a position: that this kernel ended must tell as much as ever.


@triton.jit
def _add_both(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _is_near(b_x, b_parent, delta_squared):
    """Whether the residual against the parent folds; not where it is NaN. Both sums in one reduction."""
    b_residual = b_x - b_parent
    residual, parent = tl.reduce((b_residual * b_residual, b_parent * b_parent), 0, _add_both)
    return residual <= delta_squared * parent


def gate_rows_reference(
    source_XE: torch.Tensor,
    by_token: bool,
    addend: Addend | None,
    branches: Branches,
    norm_weight_E: torch.Tensor,
    eps: float,
    delta: float,
    inherit: RowMap | None,
    retest: bool,
    stream_NE: torch.Tensor,
    out: RowMap,
    normed_RE: torch.Tensor,
    length_S: torch.Tensor | None = None,
    time: TimeGate | None = None,
) -> None:
    """The same in plain torch; rows stand in the order of the list."""
    block = branches.tokens_SBT.shape[2]
    position = torch.arange(int(branches.num_live_1) * block, device=stream_NE.device)
    if length_S is not None:
        position = position[position % block < length_S[branches.slot_A[position // block].long()]]
    a, t = position // block, position % block
    slot, branch = branches.slot_A[a].long(), branches.branch_A[a].long()

    def stream(position_N: torch.Tensor, branch_N: torch.Tensor) -> torch.Tensor:
        stored = source_XE[branches.tokens_SBT[slot, branch_N, t] if by_token else position_N]
        return stream_rows(stored, addend, branches, position_N)

    x = stream(position, branch)
    stream_NE[position] = x

    denoises = branches.kind_SB[slot, branch] == DENOISE
    fold = (branch > 0) & denoises & (delta >= 0)
    stored_row = len(branches.slot_A) * block + slot * block + t
    if time is not None:
        fold |= (branch == 0) & denoises & (time.valid_S[slot] > 0)
    if inherit is not None:
        fold &= (inherit.keep_ST[slot, t] >> branch & 1) == 0
    if inherit is None or retest:
        parent = branches.parent_B[branch].long()
        above = stream(branches.index_SB[slot, parent].long() * block + t, parent).float()
        limit = torch.full_like(above[:, 0], delta * delta)
        if time is not None:
            before = stream_NE[stored_row].float()
            above = torch.where((branch == 0)[:, None], before, above)
            limit = torch.where(branch == 0, time.delta * time.delta, limit)
        residual = (x.float() - above).square().sum(-1)
        fold &= residual <= limit * above.square().sum(-1)
    kept = ~fold
    if time is not None:
        folded = fold & (branch == 0)
        out.row_SBT[slot[folded], 0, t[folded]] = stored_row[folded].int()
    place_rows(out, position[kept], slot[kept], branch[kept], t[kept])
    row = out.row_SBT[slot[kept], branch[kept], t[kept]].long()
    normed_RE[row] = rms_norm(x[kept], norm_weight_E, eps)
