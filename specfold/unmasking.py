"""Which positions of a block to unmask, by how confident the model is of them. S slots, T positions of a block."""

from __future__ import annotations

import torch

from specfold.families.base import BlockRules


def select(confidence_ST: torch.Tensor, masked_ST: torch.Tensor, rules: BlockRules) -> torch.Tensor:
    """Positions to unmask now, bool [S, T]: in the leftmost group with masks, the most confident position (ties: the
    lowest) and all that pass the threshold. Nothing where no mask is left."""
    eligible = masked_ST & (group_of(masked_ST, rules) == active_group(masked_ST, rules)[:, None])
    score = torch.where(eligible, confidence_ST, -torch.inf)
    best = score.argmax(dim=1, keepdim=True)
    chosen = torch.zeros_like(eligible).scatter(1, best, True)
    if rules.threshold is not None:
        chosen |= score > rules.threshold if rules.strict else score >= rules.threshold
    return chosen & eligible


def group_of(masked_ST: torch.Tensor, rules: BlockRules) -> torch.Tensor:
    """Group number of every position, [1, T]."""
    return torch.arange(masked_ST.shape[-1], device=masked_ST.device)[None] // rules.group_size


def active_group(masked_ST: torch.Tensor, rules: BlockRules) -> torch.Tensor:
    """Leftmost group with a mask, [S]; a number beyond the block where there is none."""
    beyond = masked_ST.shape[-1]
    return torch.where(masked_ST, group_of(masked_ST, rules), beyond).amin(dim=1)
