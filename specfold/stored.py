"""The stored branch: what served the last accepted branch of every slot's block, for the step after to inherit from.

To the gate it is the parent of the main branch, a state one step back (folding in time). Per layer and position it
holds the results that served the accepted branch and the residual streams that these were computed from: what the gate
measures is the change since a position's last computation, so that slow drift cannot add up unseen. In a block's first
step there is none.

The sub-block cache of Fast-dLLM-v2 is a forced pattern of the same: where the main branch must compute only its active
sub-block, every other position inherits whatever the gate would say. Nothing of those positions reaches a token then,
but for their stored keys and values.

S slots, T block positions, N = S * T stored rows, A computed branches, R recomputed rows, E hidden width, H/G query and
key/value heads, D head width, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from kernels.gate import within
from specfold.branches import BranchList
from specfold.families.base import BlockRules
from specfold.folding import Folding
from specfold.slots import SlotState
from specfold.spec import ModelSpec
from specfold.unmasking import active_group, group_of


class QkvRows(NamedTuple):
    """Positions before attention: the residual stream at the layer's entry and what is computed from it."""

    h_RE: torch.Tensor
    q_RHD: torch.Tensor
    k_RGD: torch.Tensor
    v_RGD: torch.Tensor
    m_RH: torch.Tensor
    l_RH: torch.Tensor
    acc_RHD: torch.Tensor
    """``m``, ``l``, ``acc``: the streaming softmax over the prefix."""


class FfnRows(NamedTuple):
    """Positions after attention: the residual stream before the FFN and the FFN's output."""

    h_RE: torch.Tensor
    ffn_RE: torch.Tensor


Rows = TypeVar("Rows", QkvRows, FfnRows)


def join(stored: Rows, computed: Rows) -> Rows:
    """Stored rows first, then those that the step computes: what sources index."""
    return type(stored)(*(torch.cat(pair) for pair in zip(stored, computed, strict=True)))


@dataclass(slots=True)
class ServedLayer:
    """All rows of one layer in a step, and by which of them every position is served."""

    qkv: QkvRows
    qkv_source_AT: torch.Tensor
    ffn: FfnRows
    ffn_source_AT: torch.Tensor


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What the main branches of one step may take from the stored branch."""

    layers: list[tuple[QkvRows, FfnRows]]
    delta: float
    main_M: torch.Tensor
    """The main branches that may, by their place in the list."""
    row_AT: torch.Tensor
    """The stored row of every position."""
    forced_AT: torch.Tensor | None
    """Where they must, whatever the gate says."""

    @property
    def num_rows(self) -> int:
        return len(self.layers[0][0].h_RE)

    def gate(self, h_ATE: torch.Tensor, stored_NE: torch.Tensor) -> torch.Tensor:
        """Positions that inherit, bool [A, T]."""
        if self.forced_AT is not None:
            return self.forced_AT
        fold_AT = torch.zeros(h_ATE.shape[:2], dtype=torch.bool, device=h_ATE.device)
        fold_AT[self.main_M] = within(h_ATE[self.main_M], stored_NE[self.row_AT[self.main_M]], self.delta)
        return fold_AT


class StoredBranch:
    """The stored rows of all layers and slots. Slots in the first step of their block hold rubbish."""

    def __init__(
        self,
        spec: ModelSpec,
        num_slots: int,
        block_size: int,
        folding: Folding,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._folding = folding
        self._shape = num_slots, block_size

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros((num_slots * block_size, *shape), dtype=dtype, device=device)

        heads, kv_heads, width, hidden = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.hidden_size

        def layer() -> tuple[QkvRows, FfnRows]:
            exact = torch.float32
            prefix = zeros(heads, dtype=exact), zeros(heads, dtype=exact), zeros(heads, width, dtype=exact)
            qkv = zeros(heads, width), zeros(kv_heads, width), zeros(kv_heads, width)
            return QkvRows(zeros(hidden), *qkv, *prefix), FfnRows(zeros(hidden), zeros(hidden))

        self.layers = [layer() for _ in range(spec.num_layers)]

    def offer(self, slots: SlotState, branches: BranchList, rules: BlockRules, mask_id: int) -> Inheritance:
        """What this step may inherit: nothing in a block's first step and where a refresh is due."""
        num_slots, block = self._shape
        folding, steps_S = self._folding, slots.steps_S
        open_S = steps_S > 0
        if folding.refresh_every:
            open_S &= steps_S % folding.refresh_every != 0
        open_A = open_S[branches.slot_A] & (branches.branch_A == 0) & ~branches.final_A
        row_ST = torch.arange(num_slots * block, device=steps_S.device).view(num_slots, block)
        forced = _outside_sub_block(branches.tokens_AT == mask_id, open_A, rules) if folding.block_cache else None
        main_M = open_A.nonzero().squeeze(1)
        return Inheritance(self.layers, folding.time_delta, main_M, row_ST[branches.slot_A], forced)

    def keep(self, served: list[ServedLayer], at_S: torch.Tensor, moved_S: torch.Tensor) -> None:
        """Takes over the rows that served the accepted branch, ``at_S`` in the list, of every slot that moved on."""
        num_slots, block = self._shape
        own_ST = torch.arange(num_slots * block, device=at_S.device).view(num_slots, block)

        def rows(source_AT: torch.Tensor) -> torch.Tensor:
            return torch.where(moved_S[:, None], source_AT[at_S], own_ST).flatten()

        self.layers = [
            (
                QkvRows(*(x[rows(layer.qkv_source_AT)] for x in layer.qkv)),
                FfnRows(*(x[rows(layer.ffn_source_AT)] for x in layer.ffn)),
            )
            for layer in served
        ]


def _outside_sub_block(masked_AT: torch.Tensor, open_A: torch.Tensor, rules: BlockRules) -> torch.Tensor:
    """Positions outside the active sub-block, where the cache serves them: not where the sub-block's first position is
    still a mask, because its prediction stands outside."""
    active_A = active_group(masked_AT, rules)
    first_A = (active_A * rules.group_size).clamp(max=masked_AT.shape[1] - 1)
    partial_A = open_A & ~masked_AT.gather(1, first_A[:, None]).squeeze(1)
    return (group_of(masked_AT, rules) != active_A[:, None]) & partial_A[:, None]
