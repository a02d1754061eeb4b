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
    return within(h, h[parent_A], delta) & foldable_A[:, None]


def within(h: torch.Tensor, reference: torch.Tensor, delta: float) -> torch.Tensor:
    """``|h - reference| <= delta * |reference|`` over the last dimension, squared in float32. NaN is within nothing."""
    reference = reference.float()
    residual = (h.float() - reference).square().sum(dim=-1)
    return residual <= delta * delta * reference.square().sum(dim=-1)


def resolve_sources(
    fold_AT: torch.Tensor,
    parent_A: torch.Tensor,
    levels: Sequence[torch.Tensor],
    stored_AT: torch.Tensor | None = None,
    num_stored: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows to recompute, and for every position the row that serves it.

    ``levels`` lists, from the second depth on, the branches of one depth, so that parents resolve before children.
    Returns ``rows`` [R], sorted indices into the flattened [A, T], and ``source`` [A, T], indices into those R rows.
    Example: two branches of two positions, the child folding its first: ``rows = [0, 1, 3]``,
    ``source = [[0, 1], [0, 2]]``.

    With folding in time ``num_stored`` rows of the step before come first, computed ones count on from there, and a
    main branch (its own parent) is served by ``stored_AT`` where it folds.
    """
    keep = ~fold_AT.flatten()
    rows_R = keep.nonzero().squeeze(1)
    source_AT = (num_stored + keep.cumsum(0) - 1).view_as(fold_AT)
    if stored_AT is not None:
        main_A = parent_A == torch.arange(len(parent_A), device=parent_A.device)
        source_AT = torch.where(fold_AT & main_A[:, None], stored_AT, source_AT)
    for level in levels:
        inherited = source_AT[parent_A[level]]
        source_AT[level] = torch.where(fold_AT[level], inherited, source_AT[level])
    return rows_R, source_AT
