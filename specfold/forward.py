"""The forward over a step's branches, with folding.

Every branch keeps its own residual stream. A folded position takes q, k, v and the feed-forward output from the row of
its source; attention stays exact for each branch's own keys and values (decoding rules: SpecFold, steps 1 to 6).

A branches, T positions, R recomputed rows, E hidden width, H/G query/key-value heads, D head width, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kernels.attention import PrefixState, merge_block_attention, prefix_attention
from kernels.gate import residual_gate, resolve_sources
from kernels.linear import linear_rows, swiglu_rows
from kernels.norm import rms_norm
from kernels.rope import apply_rope
from specfold.branches import BranchList
from specfold.folding import Folding
from specfold.model import Model
from specfold.pages import PagePool
from specfold.stored import FfnRows, Inheritance, QkvRows, ServedLayer, join
from specfold.watch import Watch


@dataclass(frozen=True, slots=True)
class PrefixView:
    """Where each slot's prefix lies."""

    pool: PagePool
    page_table_SP: torch.Tensor
    prefix_len_S: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of one forward share."""

    branches: BranchList
    prefix: PrefixView
    mask_ATT: torch.Tensor | None
    folding: Folding
    slot_N: torch.Tensor
    """Slot of every flattened position, N = A * T."""
    rope_N: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """cos [N, D], sin [N, D] and query scale [N]."""
    watch: Watch | None
    inheritance: Inheritance | None


@dataclass(slots=True)
class ForwardOutput:
    """Hidden states before the last norm [A, T, E], and per layer what else a step needs."""

    hidden_ATE: torch.Tensor
    fold_qkv_LAT: list[torch.Tensor] = field(default_factory=list)
    fold_ffn_LAT: list[torch.Tensor] = field(default_factory=list)
    final_kv: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Per layer, keys and values [F, T, G, D] of the final branches, in the order of the list."""
    served: list[ServedLayer] = field(default_factory=list)
    """Per layer, where steps inherit from one another."""


Observer = Callable[[str, torch.Tensor], None]


def forward_branches(
    model: Model,
    branches: BranchList,
    prefix: PrefixView,
    final_mask_TT: torch.Tensor | None,
    folding: Folding,
    observe: Observer | None = None,
    watch: Watch | None = None,
    inheritance: Inheritance | None = None,
) -> ForwardOutput:
    """Runs all layers over the branches. ``final_mask_TT`` [T, T] is the attention inside final branches (None: full);
    other branches see all of their block. ``observe`` gets each layer's hidden states by name, ``watch`` the residual
    streams at both gates. ``inheritance``: what main branches may take from the step before."""
    hidden = torch.nn.functional.embedding(branches.tokens_AT, model.embedding_VE)
    output = ForwardOutput(hidden)
    mask_ATT = None
    if final_mask_TT is not None and bool(branches.final_A.any()):
        mask_ATT = final_mask_TT[None] | ~branches.final_A[:, None, None]
    position_N = branches.position_AT.flatten()
    tables = model.rope_tables(int(position_N.max()) + 1)
    cos, sin, query_scale = (table[position_N].to(model.dtype) for table in tables)
    slot_N = branches.slot_A.repeat_interleave(branches.tokens_AT.shape[1])
    shared = _Step(branches, prefix, mask_ATT, folding, slot_N, (cos, sin, query_scale), watch, inheritance)
    if observe is not None:
        observe("embed", hidden)
    for i in range(len(model.layers)):
        hidden = _layer(model, i, hidden, shared, output)
        if observe is not None:
            observe(f"layer{i}", hidden)
    output.hidden_ATE = hidden
    return output


def _layer(model: Model, index: int, h_ATE: torch.Tensor, shared: _Step, output: ForwardOutput) -> torch.Tensor:
    layer, folding, inherited = model.layers[index], shared.folding, shared.inheritance
    if shared.watch is not None:
        shared.watch.on_hidden(index, "entry", h_ATE)
    stored_qkv, stored_ffn = inherited.layers[index] if inherited is not None else (None, None)
    fold_qkv_AT = _gate(h_ATE, stored_qkv, shared)
    rows_R, qkv_source_AT = _resolve(fold_qkv_AT, shared)
    qkv = _qkv_rows(model, index, h_ATE.flatten(0, 1)[rows_R], rows_R, shared)
    qkv = qkv if stored_qkv is None else join(stored_qkv, qkv)
    attended_NX = _attention(model, qkv, qkv_source_AT, shared, output)
    mid_ATE = h_ATE + linear_rows(attended_NX, layer.output_EN).view_as(h_ATE)
    if shared.watch is not None:
        shared.watch.on_hidden(index, "middle", mid_ATE)

    fold_ffn_AT, ffn_source_AT = fold_qkv_AT, qkv_source_AT
    if folding.ffn_gate == "own" and (folding.delta >= 0 or folding.carries):
        fold_ffn_AT = fold_qkv_AT & _gate(mid_ATE, stored_ffn, shared)
        rows_R, ffn_source_AT = _resolve(fold_ffn_AT, shared)
    mid_RE = mid_ATE.flatten(0, 1)[rows_R]
    normed = rms_norm(mid_RE, layer.ffn_norm_E, model.spec.rms_eps)
    ffn = FfnRows(mid_RE, swiglu_rows(normed, layer.gate_up_2IE, layer.down_EI))
    if stored_ffn is not None:
        ffn = join(stored_ffn, ffn)
        output.served.append(ServedLayer(qkv, qkv_source_AT, ffn, ffn_source_AT))
    output.fold_qkv_LAT.append(fold_qkv_AT)
    output.fold_ffn_LAT.append(fold_ffn_AT)
    return mid_ATE + ffn.ffn_RE[ffn_source_AT]


def _gate(h_ATE: torch.Tensor, stored: QkvRows | FfnRows | None, shared: _Step) -> torch.Tensor:
    """Positions that fold at one of a layer's two gates, bool [A, T]: drafts on parents, main branches in time."""
    branches, delta = shared.branches, shared.folding.delta
    fold_AT = torch.zeros(h_ATE.shape[:2], dtype=torch.bool, device=h_ATE.device)
    if delta >= 0:
        fold_AT = residual_gate(h_ATE, branches.parent_A, branches.foldable_A, delta)
    if shared.inheritance is not None and stored is not None:
        fold_AT |= shared.inheritance.gate(h_ATE, stored.h_RE)
    return fold_AT


def _resolve(fold_AT: torch.Tensor, shared: _Step) -> tuple[torch.Tensor, torch.Tensor]:
    branches, inherited = shared.branches, shared.inheritance
    levels = branches.levels if shared.folding.delta >= 0 else []
    if inherited is None:
        return resolve_sources(fold_AT, branches.parent_A, levels)
    return resolve_sources(fold_AT, branches.parent_A, levels, inherited.row_AT, inherited.num_rows)


def _qkv_rows(model: Model, index: int, h_RE: torch.Tensor, rows_R: torch.Tensor, shared: _Step) -> QkvRows:
    """Queries, keys and values of the recomputed rows, and their attention over the prefix."""
    spec, layer, prefix = model.spec, model.layers[index], shared.prefix
    normed = rms_norm(h_RE, layer.attention_norm_E, spec.rms_eps)
    q, k, v = linear_rows(normed, layer.qkv_NE, layer.qkv_bias_N).split(spec.qkv_sizes, dim=-1)
    cos, sin, query_scale = (table[rows_R] for table in shared.rope_N)
    q = apply_rope(q.unflatten(-1, (-1, spec.head_dim)), cos, sin) * query_scale[:, None, None]
    k = apply_rope(k.unflatten(-1, (-1, spec.head_dim)), cos, sin)
    v = v.unflatten(-1, (-1, spec.head_dim))
    state = prefix_attention(
        q,
        shared.slot_N[rows_R],
        prefix.pool.k[index],
        prefix.pool.v[index],
        prefix.page_table_SP,
        prefix.prefix_len_S,
        spec.head_dim**-0.5,
    )
    return QkvRows(h_RE, q, k, v, *state)


def _attention(
    model: Model, qkv: QkvRows, source_AT: torch.Tensor, shared: _Step, output: ForwardOutput
) -> torch.Tensor:
    """Attention output before its projection, [A * T, H * D]."""
    final, scale = shared.branches.final_A, model.spec.head_dim**-0.5
    k, v = qkv.k_RGD, qkv.v_RGD
    output.final_kv.append((k[source_AT[final]], v[source_AT[final]]))
    state = PrefixState(qkv.m_RH, qkv.l_RH, qkv.acc_RHD)
    return merge_block_attention(qkv.q_RHD, k, v, state, source_AT, shared.mask_ATT, scale).flatten(2).flatten(0, 1)


def inside_mask(kind: str, size: int, block_size: int, device: torch.device) -> torch.Tensor | None:
    """Attention among ``size`` positions that start at a block's border: ``full`` (None), ``block`` or ``causal``."""
    if kind == "full" or size == 1:
        return None
    at = torch.arange(size, device=device) // (block_size if kind == "block" else 1)
    return at[None, :] <= at[:, None]
