"""The folding gate: which positions of a branch inherit from its parent, and from which row.

A branches (parents before children), T positions of a block, E hidden width, R recomputed rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def residual_gate(h_ATE: torch.Tensor, parent_A: torch.Tensor, foldable_A: torch.Tensor, delta: float) -> torch.Tensor:
    """Positions whose relative residual against the parent is at most ``delta``, bool [A, T] (SpecFold, gate).

    ``|h - h_parent| <= delta * |h_parent|`` in L2 over the hidden width, tested squared in float32. ``parent_A``
    indexes A; branches that are not ``foldable_A`` never fold.
    """
    h = h_ATE.float()
    parent = h[parent_A]
    residual = (h - parent).square().sum(dim=-1)
    return (residual <= delta * delta * parent.square().sum(dim=-1)) & foldable_A[:, None]


def resolve_sources(
    fold_AT: torch.Tensor, parent_A: torch.Tensor, levels: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows to recompute, and for every position the row that serves it.

    ``levels`` lists, from the second depth on, the branches of one depth, so that parents resolve before children.
    Returns ``rows`` [R], sorted indices into the flattened [A, T], and ``source`` [A, T], indices into those R rows.
    Example: two branches of two positions, the child folding its first: ``rows = [0, 1, 3]``,
    ``source = [[0, 1], [0, 2]]``.
    """
    keep = ~fold_AT.flatten()
    rows_R = keep.nonzero().squeeze(1)
    source_AT = (keep.cumsum(0) - 1).view_as(fold_AT)
    for level in levels:
        inherited = source_AT[parent_A[level]]
        source_AT[level] = torch.where(fold_AT[level], inherited, source_AT[level])
    return rows_R, source_AT
