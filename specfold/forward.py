"""The forward over a step's branches, with folding.

Every branch keeps its own residual stream. A folded position takes q, k, v and the feed-forward output from the row of
its source; attention stays exact for each branch's own keys and values (decoding rules: SpecFold, steps 1 to 6).

A branches, T positions, R recomputed rows, E hidden width, H/G query/key-value heads, D head width, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kernels.attention import merge_block_attention, prefix_attention
from kernels.gate import residual_gate, resolve_sources
from kernels.linear import linear_rows, swiglu_rows
from kernels.norm import rms_norm
from kernels.rope import apply_rope
from specfold.branches import BranchList
from specfold.config import FfnGate
from specfold.model import Model
from specfold.pages import PagePool
from specfold.watch import Watch


@dataclass(frozen=True, slots=True)
class Folding:
    """The gate's settings; ``delta`` below 0 folds nothing."""

    delta: float
    ffn_gate: FfnGate


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


@dataclass(slots=True)
class ForwardOutput:
    """Hidden states before the last norm [A, T, E], and per layer what else a step needs."""

    hidden_ATE: torch.Tensor
    fold_qkv_LAT: list[torch.Tensor] = field(default_factory=list)
    fold_ffn_LAT: list[torch.Tensor] = field(default_factory=list)
    final_kv: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Per layer, keys and values [F, T, G, D] of the final branches, in the order of the list."""


Observer = Callable[[str, torch.Tensor], None]


def forward_branches(
    model: Model,
    branches: BranchList,
    prefix: PrefixView,
    final_mask_TT: torch.Tensor | None,
    folding: Folding,
    observe: Observer | None = None,
    watch: Watch | None = None,
) -> ForwardOutput:
    """Runs all layers over the branches. ``final_mask_TT`` [T, T] is the attention inside final branches (None: full);
    other branches see all of their block. ``observe`` gets each layer's hidden states by name, ``watch`` the residual
    streams at both gates."""
    hidden = torch.nn.functional.embedding(branches.tokens_AT, model.embedding_VE)
    output = ForwardOutput(hidden)
    mask_ATT = None
    if final_mask_TT is not None and bool(branches.final_A.any()):
        mask_ATT = final_mask_TT[None] | ~branches.final_A[:, None, None]
    position_N = branches.position_AT.flatten()
    tables = model.rope_tables(int(position_N.max()) + 1)
    cos, sin, query_scale = (table[position_N].to(model.dtype) for table in tables)
    slot_N = branches.slot_A.repeat_interleave(branches.tokens_AT.shape[1])
    shared = _Step(branches, prefix, mask_ATT, folding, slot_N, (cos, sin, query_scale), watch)
    if observe is not None:
        observe("embed", hidden)
    for i in range(len(model.layers)):
        hidden = _layer(model, i, hidden, shared, output)
        if observe is not None:
            observe(f"layer{i}", hidden)
    output.hidden_ATE = hidden
    return output


def _layer(model: Model, index: int, h_ATE: torch.Tensor, shared: _Step, output: ForwardOutput) -> torch.Tensor:
    layer, folding = model.layers[index], shared.folding
    if shared.watch is not None:
        shared.watch.on_hidden(index, "entry", h_ATE)
    fold_qkv_AT = _gate(h_ATE, shared)
    rows_R, source_AT = _resolve(fold_qkv_AT, shared)
    attended_NX = _attention(model, index, h_ATE.flatten(0, 1)[rows_R], rows_R, source_AT, shared, output)
    mid_ATE = h_ATE + linear_rows(attended_NX, layer.output_EN).view_as(h_ATE)
    if shared.watch is not None:
        shared.watch.on_hidden(index, "middle", mid_ATE)

    fold_ffn_AT = fold_qkv_AT
    if folding.ffn_gate == "own" and folding.delta >= 0:
        fold_ffn_AT = fold_qkv_AT & _gate(mid_ATE, shared)
        rows_R, source_AT = _resolve(fold_ffn_AT, shared)
    normed = rms_norm(mid_ATE.flatten(0, 1)[rows_R], layer.ffn_norm_E, model.spec.rms_eps)
    ffn_RE = swiglu_rows(normed, layer.gate_up_2IE, layer.down_EI)
    output.fold_qkv_LAT.append(fold_qkv_AT)
    output.fold_ffn_LAT.append(fold_ffn_AT)
    return mid_ATE + ffn_RE[source_AT]


def _gate(h_ATE: torch.Tensor, shared: _Step) -> torch.Tensor:
    branches, delta = shared.branches, shared.folding.delta
    if delta < 0:
        return torch.zeros(h_ATE.shape[:2], dtype=torch.bool, device=h_ATE.device)
    return residual_gate(h_ATE, branches.parent_A, branches.foldable_A, delta)


def _resolve(fold_AT: torch.Tensor, shared: _Step) -> tuple[torch.Tensor, torch.Tensor]:
    levels = shared.branches.levels if shared.folding.delta >= 0 else []
    return resolve_sources(fold_AT, shared.branches.parent_A, levels)


def _attention(
    model: Model,
    index: int,
    h_RE: torch.Tensor,
    rows_R: torch.Tensor,
    source_AT: torch.Tensor,
    shared: _Step,
    output: ForwardOutput,
) -> torch.Tensor:
    """Attention output before its projection, [A * T, H * D]."""
    spec, layer, prefix = model.spec, model.layers[index], shared.prefix
    normed = rms_norm(h_RE, layer.attention_norm_E, spec.rms_eps)
    q, k, v = linear_rows(normed, layer.qkv_NE, layer.qkv_bias_N).split(spec.qkv_sizes, dim=-1)
    cos, sin, query_scale = (table[rows_R] for table in shared.rope_N)
    q = apply_rope(q.unflatten(-1, (-1, spec.head_dim)), cos, sin) * query_scale[:, None, None]
    k = apply_rope(k.unflatten(-1, (-1, spec.head_dim)), cos, sin)
    v = v.unflatten(-1, (-1, spec.head_dim))
    scale = spec.head_dim**-0.5
    state = prefix_attention(
        q,
        shared.slot_N[rows_R],
        prefix.pool.k[index],
        prefix.pool.v[index],
        prefix.page_table_SP,
        prefix.prefix_len_S,
        scale,
    )
    final = shared.branches.final_A
    output.final_kv.append((k[source_AT[final]], v[source_AT[final]]))
    return merge_block_attention(q, k, v, state, source_AT, shared.mask_ATT, scale).flatten(2).flatten(0, 1)


def inside_mask(kind: str, size: int, block_size: int, device: torch.device) -> torch.Tensor | None:
    """Attention among ``size`` positions that start at a block's border: ``full`` (None), ``block`` or ``causal``."""
    if kind == "full" or size == 1:
        return None
    at = torch.arange(size, device=device) // (block_size if kind == "block" else 1)
    return at[None, :] <= at[:, None]
