"""How much drafts differ from their parents, layer by layer and around newly unmasked tokens (SpecFold's premise).

A branches, T block positions, E hidden width, L layers, K depths, H thresholds, R distances, U steps since unmasking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specfold.branches import BranchList
from specfold.slots import SlotState
from specfold.step import StepContext
from specfold.watch import Watch

THRESHOLDS = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0)
STAGES = ("entry", "middle")
"""At a layer's entry, where QKV fold; and before its FFN, where the own gate tests again."""
MAX_DEPTH = 8
"""Deeper drafts count as this deep."""
MAX_DISTANCE, MAX_SINCE = 16, 4


class ResidualWatch(Watch):
    """Adds up the relative residuals |h - h_parent| / |h_parent| of all drafts that could fold, over any decoding run.

    Run it with nothing folded (mode spiffy): the residuals are then those of exact states.
    """

    def __init__(self, num_layers: int) -> None:
        self._count_LSKH = torch.zeros(num_layers, len(STAGES), MAX_DEPTH, len(THRESHOLDS) + 1, dtype=torch.long)
        width = 2 * MAX_DISTANCE + 1
        self._sum_LUR = torch.zeros(num_layers, MAX_SINCE, width, dtype=torch.float64)
        self._seen_LUR = torch.zeros(num_layers, MAX_SINCE, width, dtype=torch.long)
        self._above_LUR = torch.zeros(num_layers, MAX_SINCE, width, dtype=torch.long)

    def on_branches(self, branches: BranchList, slots: SlotState, context: StepContext) -> None:
        self._branch_D = branches.foldable_A.nonzero().squeeze(1)
        self._parent_D = branches.parent_A[self._branch_D]
        self._depth_D = branches.depth_A[self._branch_D].clamp(max=MAX_DEPTH) - 1
        self._pairs = [self._unmasked(branches, since) for since in range(MAX_SINCE)]

    def on_hidden(self, layer: int, stage: str, h_ATE: torch.Tensor) -> None:
        if not len(self._branch_D):
            return
        h, parent = h_ATE[self._branch_D].float(), h_ATE[self._parent_D].float()
        ratio_DT = (h - parent).norm(dim=-1) / parent.norm(dim=-1)
        edges = torch.tensor(THRESHOLDS, device=ratio_DT.device)
        bins = torch.bucketize(ratio_DT, edges) + self._depth_D[:, None] * (len(THRESHOLDS) + 1)
        counts = torch.bincount(bins.flatten(), minlength=MAX_DEPTH * (len(THRESHOLDS) + 1))
        self._count_LSKH[layer, STAGES.index(stage)] += counts.view(MAX_DEPTH, -1).cpu()
        if stage == "entry":
            for since, pairs in enumerate(self._pairs):
                self._add_ripple(layer, since, ratio_DT, *pairs)

    def shares(self) -> list[dict[str, Any]]:
        """Share of (draft, step, position) at most each threshold, by layer, stage and depth of the draft."""
        records = []
        for layer, stage, depth in _grid(self._count_LSKH.shape[:3]):
            counts = self._count_LSKH[layer, stage, depth]
            if total := int(counts.sum()):
                below = counts.cumsum(0)[:-1].tolist()
                records += [
                    {
                        "layer": layer,
                        "stage": STAGES[stage],
                        "depth": depth + 1,
                        "threshold": threshold,
                        "share": count / total,
                        "count": total,
                    }
                    for threshold, count in zip(THRESHOLDS, below, strict=True)
                ]
        return records

    def ripple(self) -> list[dict[str, Any]]:
        """Mean residual, and share above 0.1, by layer, steps since a token was unmasked and distance from it.

        Step 0 is the token that the draft itself adds to its parent, step 1 the one that its parent adds, and so on.
        """
        records = []
        for layer, since, place in _grid(self._seen_LUR.shape):
            if seen := int(self._seen_LUR[layer, since, place]):
                records.append(
                    {
                        "layer": layer,
                        "steps_since": since,
                        "distance": place - MAX_DISTANCE,
                        "mean": float(self._sum_LUR[layer, since, place]) / seen,
                        "share_above_0.1": int(self._above_LUR[layer, since, place]) / seen,
                        "count": seen,
                    }
                )
        return records

    def share_below(self, threshold: float, stage: str = "entry") -> float:
        """Share of all (draft, step, layer, position) at most one of ``THRESHOLDS``."""
        counts = self._count_LSKH[:, STAGES.index(stage)].sum((0, 1))
        return float(counts[: THRESHOLDS.index(threshold) + 1].sum() / counts.sum().clamp(min=1))

    def _unmasked(self, branches: BranchList, since: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts (by place among the foldable) and positions that they, or their ancestors ``since`` up, unmask."""
        at_D, real_D = self._branch_D, torch.ones_like(self._branch_D, dtype=torch.bool)
        for _ in range(since):
            at_D = branches.parent_A[at_D]
            real_D = real_D & (branches.depth_A[at_D] > 0)
        new_DT = branches.tokens_AT[at_D] != branches.tokens_AT[branches.parent_A[at_D]]
        draft, position = (new_DT & real_D[:, None]).nonzero(as_tuple=True)
        return draft, position

    def _add_ripple(
        self, layer: int, since: int, ratio_DT: torch.Tensor, draft_N: torch.Tensor, position_N: torch.Tensor
    ) -> None:
        block = ratio_DT.shape[1]
        distance_NT = torch.arange(block, device=ratio_DT.device) - position_N[:, None]
        near_NT = distance_NT.abs() <= MAX_DISTANCE
        place = (distance_NT + MAX_DISTANCE)[near_NT]
        ratio = ratio_DT[draft_N][near_NT]
        width = self._seen_LUR.shape[2]
        self._seen_LUR[layer, since] += torch.bincount(place, minlength=width).cpu()
        self._sum_LUR[layer, since] += torch.bincount(place, ratio.double(), minlength=width).cpu()
        self._above_LUR[layer, since] += torch.bincount(place[ratio > 0.1], minlength=width).cpu()


def _grid(shape: Sequence[int]) -> list[list[int]]:
    return torch.cartesian_prod(*(torch.arange(n) for n in shape)).tolist()
