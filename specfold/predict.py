"""From hidden states to decisions: the LM head on the positions that can be unmasked now or drafted next.

S slots, A computed branches, T positions, R head rows, J kept tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.head import RowSampling, head_rows
from kernels.norm import rms_norm
from specfold.branches import BranchList
from specfold.families.base import BlockRules
from specfold.model import Model
from specfold.slots import SlotState
from specfold.unmasking import active_group, group_of


@dataclass(frozen=True, slots=True)
class Prediction:
    """Distributions of the branches where they are needed; confidence and log-probabilities are -inf elsewhere."""

    token_AT: torch.Tensor
    confidence_AT: torch.Tensor
    top_token_ATJ: torch.Tensor
    top_logprob_ATJ: torch.Tensor
    next_AT: torch.Tensor
    """Token that follows each position of a final branch; only the last column, unless drafts are verified by it."""
    invalid_A: torch.Tensor


def predict(
    model: Model,
    hidden_ATE: torch.Tensor,
    branches: BranchList,
    slots: SlotState,
    rules: BlockRules,
    mask_id: int,
    num_ranks: int,
    num_top: int,
) -> Prediction:
    """Runs the head where a token can be decided (``needed``) and after finished blocks."""
    masked_AT = branches.tokens_AT == mask_id
    denoise_AT = needed(masked_AT, rules, num_ranks) & ~branches.final_A[:, None]
    after_AT = torch.zeros_like(masked_AT)
    if rules.seeded:
        after_AT[:, 0 if rules.verify_draft else -1 :] = branches.final_A[:, None]
    branch_D, at_D = denoise_AT.nonzero(as_tuple=True)
    branch_F, at_F = after_AT.nonzero(as_tuple=True)
    branch_R = torch.cat((branch_D, branch_F))
    # Predicted position and the position whose hidden state predicts it.
    position_R = branches.position_AT[branch_R, torch.cat((at_D, at_F))]
    position_R[len(at_D) :] += 1
    hidden_RE = hidden_ATE[branch_R, torch.cat((at_D - rules.logit_shift, at_F))]
    masks_left_R = masked_AT.sum(-1)[branch_R]
    if rules.verify_draft:
        # A draft drawn under the noise of its verification is the likeliest to pass it.
        masks_left_R = torch.zeros_like(masks_left_R)
    slot_R = branches.slot_A[branch_R]
    temperature_R = slots.temperature_S[slot_R].clone()
    if not rules.seed_sampled:
        temperature_R[len(at_D) :] = 0
    sampling = RowSampling(
        temperature_R,
        slots.top_p_S[slot_R],
        slots.top_k_S[slot_R],
        slots.key_S2[slot_R],
        slots.sample_S[slot_R],
        position_R,
        masks_left_R,
    )
    normed = rms_norm(hidden_RE, model.norm_E, model.spec.rms_eps)
    head = head_rows(normed, model.head_VE, mask_id, num_top, sampling, rules.plain_confidence)
    return _scatter(head, masked_AT, branch_D, at_D, branch_F, at_F)


def seed_token(
    model: Model, hidden_E: torch.Tensor, slots: SlotState, slot: int, rules: BlockRules, mask_id: int
) -> torch.Tensor:
    """The token after a cached prompt, [1]: argmax, or drawn where the rules sample seeds."""
    at = slice(slot, slot + 1)
    temperature = slots.temperature_S[at] if rules.seed_sampled else torch.zeros_like(slots.temperature_S[at])
    sampling = RowSampling(
        temperature,
        slots.top_p_S[at],
        slots.top_k_S[at],
        slots.key_S2[at],
        slots.sample_S[at],
        slots.start_S[at],
        torch.zeros_like(slots.start_S[at]),
    )
    normed = rms_norm(hidden_E[None], model.norm_E, model.spec.rms_eps)
    return head_rows(normed, model.head_VE, mask_id, 1, sampling, rules.plain_confidence).token_R


def _scatter(
    head: tuple[torch.Tensor, ...],
    masked_AT: torch.Tensor,
    branch_D: torch.Tensor,
    at_D: torch.Tensor,
    branch_F: torch.Tensor,
    at_F: torch.Tensor,
) -> Prediction:
    token_R, confidence_R, top_token_RJ, top_logprob_RJ, invalid_R = head
    num_denoise = len(at_D)
    shape = masked_AT.shape
    token = torch.zeros(shape, dtype=torch.long, device=masked_AT.device)
    confidence = torch.full(shape, -torch.inf, device=masked_AT.device)
    top_token = token.new_zeros((*shape, top_token_RJ.shape[1]))
    top_logprob = confidence[..., None].repeat(1, 1, top_token_RJ.shape[1])
    following = torch.zeros_like(token)
    token[branch_D, at_D] = token_R[:num_denoise]
    confidence[branch_D, at_D] = confidence_R[:num_denoise]
    top_token[branch_D, at_D] = top_token_RJ[:num_denoise]
    top_logprob[branch_D, at_D] = top_logprob_RJ[:num_denoise]
    following[branch_F, at_F] = token_R[num_denoise:]
    invalid = torch.zeros(len(masked_AT), dtype=torch.bool, device=masked_AT.device)
    invalid[torch.cat((branch_D, branch_F))[invalid_R]] = True
    return Prediction(token, confidence, top_token, top_logprob, following, invalid)


def needed(masked_AT: torch.Tensor, rules: BlockRules, num_ranks: int) -> torch.Tensor:
    """Masks of the active group, and of the next one where drafts may reach beyond the active one. Bool [A, T]."""
    group = group_of(masked_AT, rules)
    active_A = active_group(masked_AT, rules)
    now_AT = masked_AT & (group == active_A[:, None])
    if not num_ranks:
        return now_AT
    # One mask goes in this step, more under a threshold.
    reaches_A = (now_AT.sum(-1) - 1 < num_ranks) | (rules.threshold is not None)
    later_AT = masked_AT & (group > active_A[:, None])
    next_AT = later_AT & (group == active_group(later_AT, rules)[:, None])
    return now_AT | (next_AT & reaches_A[:, None])
