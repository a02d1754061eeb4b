"""The folding gate: brings the residual stream up to date and sorts out which positions are recomputed.

N = A * T list positions p, S slots, B branches, T block positions, X = B * T, E hidden width, R recomputed rows,
K partial sums, V vocabulary.
"""

from __future__ import annotations

import torch

from kernels.fused.gate_kernel import gate_kernel
from kernels.fused.launch import early, overlapped
from kernels.fused.layout import DENOISE, Addend, Branches, RowMap, TimeGate
from kernels.fused.placement import place_rows
from kernels.fused.residual import MAX_PROGRAMS, row_config, stream_rows
from kernels.norm import rms_norm

MAX_REGISTERS: int | None = 80
"""A thread's where there are several branches and rows are wide: three programs of 256 threads fit on a multiprocessor,
and so all positions of nine branches at once."""
WALKING_REGISTERS = 64
WALKING_WARPS = 132 * 32
"""Programs of so many warps and registers a thread fit on the GPU at once. Where more positions than that are tested,
they walk over them and look ahead; without tests that was slower (docs/log.md)."""
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
    it as of drafts. Its folded positions get their stored row in ``out.row_SBT``. Where ``time.skips`` (main branches
    alone) they get nothing else.
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
    skips = time is not None and time.skips
    folds = drafts_fold or (time is not None and not skips)
    assert not skips or (num_branches == 1 and inherit is not None and not retest)
    stored = addend.stored_XE if addend else None
    assert stored is None or (added is not None and parts is not None and parts.values_KRN.shape[1] == num_positions)
    config = row_config(width)
    tests = folds and (inherit is None or retest)
    walkers = WALKING_WARPS // config["num_warps"]
    walks = tests and num_positions > walkers and length_S is None
    registers = WALKING_REGISTERS if walks else MAX_REGISTERS if num_branches > 1 else None
    # Where a tensor is not needed another one stands in for it.
    gate_kernel[(min(num_positions, walkers if walks else MAX_PROGRAMS),)](
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
        TESTS=tests,
        DRAFTS=drafts_fold,
        TIME=time is not None and not skips,
        SKIPS=skips,
        STORED=stored is not None,
        ONE_SLOT=num_slots == 1,
        ONE_BRANCH=num_branches == 1,
        EAGER=not by_token and num_positions <= MAX_EAGER and not walks,
        AHEAD=walks,
        **early(source_XE),
        **config,
        **({"maxnreg": registers} if registers and config["num_warps"] >= 8 else {}),
        **overlapped(source_XE),
    )


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
    if time is not None and time.skips:
        assert inherit is not None
        position = _without_skipped(position, branches, inherit, time, out)
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
    if time is not None and not time.skips:
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
    if time is not None and not time.skips:
        folded = fold & (branch == 0)
        out.row_SBT[slot[folded], 0, t[folded]] = stored_row[folded].int()
    place_rows(out, position[kept], slot[kept], branch[kept], t[kept])
    row = out.row_SBT[slot[kept], branch[kept], t[kept]].long()
    normed_RE[row] = rms_norm(x[kept], norm_weight_E, eps)


def _without_skipped(
    position_N: torch.Tensor, branches: Branches, inherit: RowMap, time: TimeGate, out: RowMap
) -> torch.Tensor:
    """The positions that are not left out; the others get their stored row."""
    block = branches.tokens_SBT.shape[2]
    slot, t = branches.slot_A[position_N // block].long(), position_N % block
    denoises = branches.kind_SB[slot, 0] == DENOISE
    skipped = denoises & (time.valid_S[slot] > 0) & (inherit.keep_ST[slot, t] & 1 == 0)
    stored_row = len(branches.slot_A) * block + slot * block + t
    out.row_SBT[slot[skipped], 0, t[skipped]] = stored_row[skipped].int()
    return position_N[~skipped]
