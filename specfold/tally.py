"""Counters of the rows in the slots, added up on the device step by step.

S slots, B branches, K draft depths, L layers.
"""

from __future__ import annotations

import torch

from specfold.branches import DENOISE, FINAL, VOID, GraphTensors
from specfold.stats import DecodeStats
from specfold.step import StepResult


class Tally:
    """Sums of ``StepResult`` per slot, read and cleared when a row leaves."""

    def __init__(
        self, num_slots: int, num_layers: int, block_size: int, graph: GraphTensors, carries: bool = False
    ) -> None:
        """``carries``: steps inherit from one another."""
        device = graph.depth_B.device
        depths = torch.arange(1, int(graph.depth_B.max()) + 1, device=device)
        self._at_depth_BK = (graph.depth_B[:, None] == depths).long()
        self._rows_per_branch = num_layers * block_size
        self._block_size = block_size
        num_depths = len(depths)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros((num_slots, *shape), dtype=torch.long, device=device)

        self.denoise, self.commit = zeros(), zeros()
        self.qkv_rows, self.ffn_rows = zeros(), zeros()
        self.proposed, self.accepted, self.draft_rows = zeros(num_depths), zeros(num_depths), zeros(num_depths)
        self.run_lengths = zeros(len(graph.depth_B))
        self.folded_qkv, self.folded_ffn = zeros(num_layers, num_depths), zeros(num_layers, num_depths)
        self._carries = carries
        self.main_folded_qkv, self.main_folded_ffn = zeros(num_layers), zeros(num_layers)

    def add(self, result: StepResult) -> None:
        """Counts one step."""
        kind_SB = result.kind_SB
        computed_SB = kind_SB != VOID
        main_S = kind_SB[:, 0]
        self.denoise += main_S == DENOISE
        self.commit += main_S == FINAL
        rows_S = computed_SB.sum(-1) * self._rows_per_branch
        self.qkv_rows += rows_S - result.fold_qkv_LSB.sum((0, 2))
        self.ffn_rows += rows_S - result.fold_ffn_LSB.sum((0, 2))
        if self._carries:
            self.main_folded_qkv += result.fold_qkv_LSB[..., 0].T
            self.main_folded_ffn += result.fold_ffn_LSB[..., 0].T
        if not self._at_depth_BK.shape[1]:
            return
        self.proposed += self._by_depth(computed_SB)
        self.accepted += self._by_depth(result.accepted_SB)
        self.draft_rows += self._by_depth(kind_SB == DENOISE) * self._block_size
        drafted_S = (main_S == DENOISE).long()
        self.run_lengths.scatter_add_(1, result.accepted_SB.sum(-1, keepdim=True), drafted_S[:, None])
        self.folded_qkv += self._by_depth(result.fold_qkv_LSB).transpose(0, 1)
        self.folded_ffn += self._by_depth(result.fold_ffn_LSB).transpose(0, 1)

    def _by_depth(self, count_B: torch.Tensor) -> torch.Tensor:
        """Sums over the branches of each depth, [..., B] -> [..., K]; branch 0 has no depth and is dropped."""
        return (count_B[..., None] * self._at_depth_BK).sum(-2)

    def take(self, slot: int) -> DecodeStats:
        """The counters of one slot, which start again from zero."""
        has_drafts = self.proposed.shape[1] > 0
        stats = DecodeStats(
            denoise_forwards=int(self.denoise[slot]),
            commit_forwards=int(self.commit[slot]),
            drafts_proposed=int(self.proposed[slot].sum()),
            drafts_accepted=int(self.accepted[slot].sum()),
            proposed_by_depth=self.proposed[slot].tolist(),
            accepted_by_depth=self.accepted[slot].tolist(),
            run_lengths=self.run_lengths[slot].tolist() if has_drafts else [],
            recomputed_qkv_rows=int(self.qkv_rows[slot]),
            recomputed_ffn_rows=int(self.ffn_rows[slot]),
            draft_rows=self.draft_rows[slot].tolist(),
            folded_qkv=self.folded_qkv[slot].tolist() if has_drafts else [],
            folded_ffn=self.folded_ffn[slot].tolist() if has_drafts else [],
            main_rows=int(self.denoise[slot]) * self._block_size if self._carries else 0,
            main_folded_qkv=self.main_folded_qkv[slot].tolist() if self._carries else [],
            main_folded_ffn=self.main_folded_ffn[slot].tolist() if self._carries else [],
        )
        for counter in vars(self).values():
            if isinstance(counter, torch.Tensor) and counter is not self._at_depth_BK:
                counter[slot] = 0
        return stats
