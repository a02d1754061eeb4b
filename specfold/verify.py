"""Verification: how far a step gets along its branches (exact: the result equals step-by-step decoding).

S slots, B branches, A computed branches, T positions, J kept tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specfold.branches import FINAL, VOID, BranchList, BranchTable
from specfold.families.base import BlockRules, Family
from specfold.predict import Prediction
from specfold.slots import Ending, SlotState, ending


@dataclass(frozen=True, slots=True)
class Walk:
    """Where each slot stands after a step."""

    state_ST: torch.Tensor
    """The accepted state, or the finished block where ``committed``."""
    branch_S: torch.Tensor
    """The last accepted branch; its distribution leads on."""
    accepted_SB: torch.Tensor
    """Drafts that came true."""
    committed_S: torch.Tensor
    """The last accepted branch is final: its keys and values enter the cache."""
    length_S: torch.Tensor
    """Positions of the block that count when it is committed: all, or those that verification confirmed."""
    ending: Ending
    invalid_S: torch.Tensor
    """A distribution that was needed held NaN."""


def walk(
    slots: SlotState,
    table: BranchTable,
    branches: BranchList,
    prediction: Prediction,
    family: Family,
    rules: BlockRules,
    mask_id: int,
    stop_ids: torch.Tensor,
) -> Walk:
    """Applies the policy to the main branch's distribution, then on along the drafts that come true."""
    num_slots, num_branches = table.kind_SB.shape
    slot = torch.arange(num_slots, device=table.kind_SB.device)
    branch = torch.zeros_like(slots.start_S)
    state = slots.state_ST
    accepted = torch.zeros_like(table.kind_SB, dtype=torch.bool)
    committed = slots.active_S & (table.kind_SB[:, 0] == FINAL)
    moving = slots.active_S & ~committed
    invalid = slots.active_S & prediction.invalid_A[branches.index_SB[:, 0]]
    limit_S = slots.limit_S - slots.start_S
    for _ in range(num_branches):
        at = branches.index_SB[slot, branch]
        masked = state == mask_id
        chosen = family.select(prediction.confidence_AT[at], masked, rules)
        state = torch.where(chosen & moving[:, None], prediction.token_AT[at], state)
        matches_SB = (table.tokens_SBT == state[:, None]).all(-1) & (table.kind_SB != VOID) & moving[:, None]
        matches_SB[:, 0] = False
        found = matches_SB.any(-1)
        # A finished row needs no further distribution; drafts that would end it are void, so nothing matches then.
        branch = torch.where(found, matches_SB.to(torch.uint8).argmax(-1), branch)
        accepted |= matches_SB
        at = branches.index_SB[slot, branch]
        is_final = found & (table.kind_SB[slot, branch] == FINAL)
        committed |= is_final
        invalid |= found & prediction.invalid_A[at]
        moving = found & ~is_final
        if num_branches == 1:
            break
    offset = torch.arange(state.shape[1], device=state.device)
    length = torch.full_like(slots.start_S, state.shape[1])
    masked = state == mask_id
    if rules.verify_draft:
        following = prediction.next_AT[branches.index_SB[slot, branch]]
        agreed = (state[:, 1:] == following[:, :-1]).long().cumprod(-1).sum(-1) + 1
        length = torch.where(committed, agreed, 1)
        masked = offset >= length[:, None]
    end = ending(state, masked, slots.first_new_S, limit_S, stop_ids)
    return Walk(state, branch, accepted, committed & ~end.done_S, length, end, invalid)
