"""How far a step gets along a slot's drafts.

S slots, B branches (0 the main one), T block positions. Source: Spiffy (arXiv:2509.18085), verification.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fused.control import Rules
from kernels.fused.layout import DENOISE, VOID

_VOID, _DENOISE = tl.constexpr(VOID), tl.constexpr(DENOISE)


@triton.jit
def select_next(
    tokens,
    confidence,
    o_t,
    threshold,
    T: tl.constexpr,
    GROUP: tl.constexpr,
    MASK_ID: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    STRICT: tl.constexpr,
):
    """Positions to unmask now, bool [BB, BT]: in the leftmost group with masks, the most confident position (ties: the
    lowest) and all that pass the threshold. Nothing where no mask is left."""
    masked = tokens == MASK_ID
    group = (o_t // GROUP)[None, :]
    eligible = masked & (group == tl.min(tl.where(masked, group, T), axis=1)[:, None])
    score = tl.where(eligible, confidence, float("-inf"))
    chosen = o_t[None, :] == tl.argmax(score, axis=1)[:, None]
    if HAS_THRESHOLD:
        if STRICT:
            chosen = chosen | (score > threshold)
        else:
            chosen = chosen | (score >= threshold)
    return chosen & eligible


@triton.jit
def walk(tokens, then, kind, invalid, o_b, B: tl.constexpr, BB: tl.constexpr):
    """The last accepted branch, all drafts that came true [BB], and whether a distribution on the way was invalid.

    A state's draft is the live one that equals it: its distribution is already known, so the walk goes on from it.
    """
    info = kind + tl.where(invalid, 4, 0)
    at = tl.sum(tl.where(o_b == 0, info, 0), axis=0)
    branch = at * 0
    accepted = o_b < 0
    if B > 1:
        # Every step unmasks something, unless the confidences are not numbers: hence the bound.
        steps = at * 0
        while (at == _DENOISE) & (steps < B):
            state = tl.sum(tl.where((o_b == branch)[:, None], then, 0), axis=0)
            differs = tl.max((tokens != state[None, :]).to(tl.int32), axis=1)
            match = (differs == 0) & (kind != _VOID) & (o_b > 0)
            accepted = accepted | match
            draft = tl.min(tl.where(match, o_b, BB), axis=0)
            branch = tl.where(draft < BB, draft, branch)
            # A state without a draft ends the walk: no branch has number BB, so what is found there is void.
            found = tl.sum(tl.where(o_b == draft, info, 0), axis=0)
            at = found
            steps += 1
    bad = tl.sum(tl.where(o_b == branch, info, 0), axis=0) >= 4
    return branch, accepted, bad


def select_next_reference(confidence_ST: torch.Tensor, masked_ST: torch.Tensor, rules: Rules) -> torch.Tensor:
    """``select_next`` in torch, for any leading shape."""
    block = masked_ST.shape[-1]
    group_T = torch.arange(block, device=masked_ST.device) // rules.group_size
    eligible = masked_ST & (group_T == torch.where(masked_ST, group_T, block).amin(-1, keepdim=True))
    score = torch.where(eligible, confidence_ST, -torch.inf)
    chosen = torch.zeros_like(eligible).scatter(-1, score.argmax(-1, keepdim=True), True)
    if rules.threshold is not None:
        chosen |= score > rules.threshold if rules.strict else score >= rules.threshold
    return chosen & eligible


def walk_reference(
    tokens_SBT: torch.Tensor, then_SBT: torch.Tensor, kind_SB: torch.Tensor, invalid_SB: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``walk`` in torch: branch [S], accepted [S, B], invalid [S]."""
    num_slots, num_branches = kind_SB.shape
    slot = torch.arange(num_slots, device=kind_SB.device)
    branch_S = torch.zeros_like(slot)
    accepted_SB = torch.zeros_like(kind_SB, dtype=torch.bool)
    moving_S = (kind_SB[:, 0] == DENOISE) & ~invalid_SB[:, 0]
    for _ in range(num_branches - 1):
        state_ST = then_SBT[slot, branch_S]
        match_SB = (tokens_SBT == state_ST[:, None]).all(-1) & (kind_SB != VOID) & moving_S[:, None]
        match_SB[:, 0] = False
        accepted_SB |= match_SB
        found_S = match_SB.any(-1)
        branch_S = torch.where(found_S, match_SB.to(torch.uint8).argmax(-1), branch_S)
        moving_S = found_S & (kind_SB[slot, branch_S] == DENOISE) & ~invalid_SB[slot, branch_S]
    return branch_S, accepted_SB, invalid_SB[slot, branch_S]
