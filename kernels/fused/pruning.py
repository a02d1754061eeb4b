"""``kernels.pruning`` inside the kernel that builds branches: one slot's drafts, all at once.

B branches of a slot (0 the main one), padded to BB.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.pruning import FLOOR, HANDICAP, NEVER_KEPT, SHARE, UNIT

_FLOOR, _NEVER_KEPT = tl.constexpr(FLOOR), tl.constexpr(NEVER_KEPT)
_SHARE, _UNIT, _HANDICAP = tl.constexpr(SHARE), tl.constexpr(UNIT), tl.constexpr(HANDICAP)


@triton.jit
def to_units(logprob):
    """Log-probabilities in whole units; -inf counts as the floor."""
    return (tl.maximum(logprob, _FLOOR) * _UNIT).to(tl.int64)


@triton.jit
def keep_best(total, live, o_b, p_size, p_place, p_parent, p_ancestors, BUDGET: tl.constexpr, B: tl.constexpr):
    """Drafts to verify, bool [BB]: at most ``BUDGET`` of the live ones, each with all its ancestors."""
    live = live & (o_b > 0)
    size = tl.load(p_size + o_b, mask=o_b < B, other=1)
    share = (tl.zeros_like(size) + _SHARE) // tl.maximum(size, 1)
    own = tl.where(live, total * share.to(tl.int64), _NEVER_KEPT)
    # [BB, BB]: a branch and another one, its child or its ancestor.
    parent = tl.load(p_parent + o_b, mask=o_b < B, other=0)
    is_child = (parent[None, :] == o_b[:, None]) & (o_b > 0)[None, :] & (o_b < B)[None, :]
    child = tl.max(tl.where(is_child, own[None, :], _NEVER_KEPT), axis=1)
    place = tl.load(p_place + o_b, mask=o_b < B, other=0).to(tl.int64)
    score = own + tl.where(child > _NEVER_KEPT, child, own) - place * _HANDICAP
    ancestors = tl.load(p_ancestors + o_b, mask=o_b < B, other=0)
    is_ancestor = (((ancestors[:, None] >> o_b[None, :].to(tl.int64)) & 1) > 0) & (o_b > 0)[None, :]
    weakest = tl.min(tl.where(is_ancestor, score[None, :], -_NEVER_KEPT), axis=1)
    a, b = weakest[:, None], weakest[None, :]
    ahead = live[None, :] & ((b > a) | ((b == a) & (o_b[None, :] < o_b[:, None])))
    return live & (tl.sum(ahead.to(tl.int32), axis=1) < BUDGET)
