"""Which drafts of a graph are worth verifying now, under a budget of branches (Spiffy, arXiv:2509.18085).

A draft's own worth is the geometric mean of its candidates' probabilities; its score the geometric mean of that and of
its best child's. Probabilities say which tokens come, hardly in which order their positions do; what calibration knows
of that is the graph's order, so each place in it is a handicap (ours: measured in docs/log.md). A draft is kept only
with all its ancestors and counts as much as the worst of them. All in whole numbers: no order of summation shows in the
choice, and every implementation makes the same.

S slots, B branches (0 the main one).
"""

from __future__ import annotations

import torch

UNIT = 1 << 16
"""Log-probabilities are counted in parts of 1 / UNIT."""
FLOOR = -64.0
"""Less likely candidates (e**-64) are taken as this likely."""
SHARE = 1 << 20
"""A mean over k candidates is their sum times ``SHARE // k``."""
HANDICAP = 2 * int(0.3 * UNIT) * SHARE
"""What each place in the graph's order costs a score: as much as a probability lower by e**-0.3."""
NEVER_KEPT = -(1 << 60)


def to_units(logprob: torch.Tensor) -> torch.Tensor:
    """Log-probabilities in whole units, int64; what is not finite counts as the floor."""
    return (torch.nan_to_num(logprob, nan=FLOOR, neginf=FLOOR).clamp(min=FLOOR) * UNIT).long()


def keep_best(
    sum_SB: torch.Tensor,
    live_SB: torch.Tensor,
    size_B: torch.Tensor,
    place_B: torch.Tensor,
    parent_B: torch.Tensor,
    ancestors_B: torch.Tensor,
    budget: int,
) -> torch.Tensor:
    """Drafts to verify, bool [S, B]: at most ``budget`` of the live ones a slot, each with all its ancestors.

    ``sum_SB``: int64 sums of the candidates' log-probabilities in units. ``size_B``: candidates of each formula;
    ``place_B``: its place in the graph's order of worth.
    ``ancestors_B``: int64 bit sets along ``parent_B``, each branch in its own. A live draft's ancestors must be live.
    Branch 0 is never among the kept. Ties go to the lower number.
    """
    num_branches = len(size_B)
    branch = torch.arange(num_branches, device=sum_SB.device)
    live_SB = live_SB & (branch > 0)
    own_SB = torch.where(live_SB, sum_SB * (SHARE // size_B.clamp(min=1)), NEVER_KEPT)
    is_child_BC = (parent_B[None, :] == branch[:, None]) & (branch > 0)
    child_SB = torch.where(is_child_BC, own_SB[:, None, :], NEVER_KEPT).amax(-1)
    score_SB = own_SB + torch.where(child_SB > NEVER_KEPT, child_SB, own_SB) - place_B.long() * HANDICAP
    is_ancestor_BA = ((ancestors_B[:, None] >> branch) & 1).bool() & (branch > 0)
    weakest_SB = torch.where(is_ancestor_BA, score_SB[:, None, :], -NEVER_KEPT).amin(-1)
    a, b = weakest_SB[:, :, None], weakest_SB[:, None, :]
    ahead_SBB = live_SB[:, None, :] & ((b > a) | ((b == a) & (branch[None, :] < branch[:, None])))
    return live_SB & (ahead_SBB.sum(-1) < budget)
