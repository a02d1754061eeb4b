"""The branches of a step: the main state and its drafts, as a table and as the list that is computed.

S slots, B branches (0 the main one), T block positions, A computed branches, I position ranks, J token ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from kernels.fused.layout import DENOISE, FINAL, VOID
from kernels.noise import gumbel_noise_of
from kernels.pruning import keep_best, to_units
from specfold.drafts import DraftGraph
from specfold.families.base import BlockRules
from specfold.slots import SlotState, ending
from specfold.unmasking import active_group, group_of


@dataclass(frozen=True, slots=True)
class GraphTensors:
    """A draft graph on the device. Branch 0 is the main state, branch n + 1 is node n."""

    token_rank_BI: torch.Tensor
    """Token rank that a branch puts at each position rank, -1 where it leaves the mask."""
    parent_B: torch.Tensor
    depth_B: torch.Tensor
    """Steps from the main state; 0 for the main state itself."""
    size_B: torch.Tensor
    """Tokens that a branch puts."""
    place_B: torch.Tensor
    """Place of a draft in the graph's order of worth."""
    ancestors_B: torch.Tensor
    """Bit set of a branch's ancestors along ``parent_B``, itself included."""
    budget: int
    """Most drafts of a slot that a step verifies."""

    @classmethod
    def build(
        cls, graph: DraftGraph, device: torch.device, min_ranks: int = 0, budget: int | None = None
    ) -> GraphTensors:
        """``min_ranks``: position ranks to have distributions for, if the graph names fewer; ``budget`` None: all."""
        ranks = torch.full((len(graph) + 1, max(graph.num_positions, min_ranks)), -1, dtype=torch.long)
        for n, formula in enumerate(graph.formulas):
            for i, j in formula:
                ranks[n + 1, i] = j
        parents = [0, *(graph.fold_parent(n) + 1 for n in range(len(graph)))]
        depths = [0, *(graph.depth(n) + 1 for n in range(len(graph)))]
        ancestors = [1]
        for b in range(1, len(parents)):
            ancestors.append(ancestors[parents[b]] | 1 << b)
        return cls(
            ranks.to(device),
            torch.tensor(parents, device=device),
            torch.tensor(depths, device=device),
            (ranks >= 0).sum(-1).to(device),
            torch.tensor([0, *graph.places], device=device),
            torch.tensor(ancestors, device=device),
            len(graph) if budget is None else budget,
        )


@dataclass(frozen=True, slots=True)
class BranchTable:
    """All branches of all slots. A branch is ``VOID`` where it is not computed."""

    tokens_SBT: torch.Tensor
    kind_SB: torch.Tensor


def build_branches(
    slots: SlotState, graph: GraphTensors, rules: BlockRules, mask_id: int, stop_ids: torch.Tensor
) -> BranchTable:
    """The main states and their drafts from the last accepted distribution.

    A draft is void in a block's first step, where its formula goes beyond the masks left or the vocabulary, where it
    would end the row (nothing follows it), and where its slot has ``graph.budget`` better ones. Branches without a mask
    are final, those of finished main states too.
    """
    main_ST = slots.state_ST
    masked_ST = main_ST == mask_id
    unfinished_S = masked_ST.any(-1)
    main_kind = torch.where(slots.active_S, torch.where(unfinished_S, DENOISE, FINAL), VOID)
    if len(graph.parent_B) == 1:
        return BranchTable(main_ST[:, None], main_kind[:, None])
    num_ranks = graph.token_rank_BI.shape[1]
    position_SI, token_SIJ, logprob_SIJ, usable_SIJ = rank_candidates(slots, masked_ST, num_ranks, rules)
    rank_SBI = graph.token_rank_BI.expand(slots.num_slots, -1, -1)
    chosen = rank_SBI >= 0
    # A small vocabulary has fewer tokens than a graph may name.
    num_tokens = token_SIJ.shape[2]
    exists = (rank_SBI < num_tokens).all(-1)
    rank_SIB = rank_SBI.clamp(0, num_tokens - 1).transpose(1, 2)
    token_SBI = token_SIJ.gather(2, rank_SIB).transpose(1, 2)
    valid_SB = (usable_SIJ.gather(2, rank_SIB).transpose(1, 2) | ~chosen).all(-1) & exists
    # A spare last column takes the writes of unused position ranks.
    block = slots.block_size
    target_SBI = torch.where(chosen, position_SI[:, None], block)
    padded = torch.cat((main_ST, main_ST.new_zeros(slots.num_slots, 1)), dim=1)
    tokens_SBT = padded[:, None].repeat(1, rank_SBI.shape[1], 1).scatter(2, target_SBI, token_SBI)[..., :block]
    masked_SBT = tokens_SBT == mask_id
    ends = ending(
        tokens_SBT,
        masked_SBT,
        slots.first_new_S[:, None].expand(valid_SB.shape),
        (slots.limit_S - slots.start_S)[:, None].expand(valid_SB.shape),
        stop_ids,
    )
    drafting = (slots.active_S & unfinished_S & slots.has_guess_S)[:, None] & valid_SB & ~ends.done_S
    if graph.budget < len(graph.parent_B) - 1:
        units_SBI = to_units(logprob_SIJ.gather(2, rank_SIB).transpose(1, 2))
        worth_SB = torch.where(chosen, units_SBI, 0).sum(-1)
        tree = graph.size_B, graph.place_B, graph.parent_B, graph.ancestors_B
        drafting = keep_best(worth_SB, drafting, *tree, graph.budget)
    kind_SB = torch.where(drafting, torch.where(masked_SBT.any(-1), DENOISE, FINAL), VOID)
    kind_SB[:, 0] = main_kind
    return BranchTable(tokens_SBT, kind_SB)


def rank_candidates(
    slots: SlotState, masked_ST: torch.Tensor, num_ranks: int, rules: BlockRules
) -> tuple[torch.Tensor, ...]:
    """Positions in the order the policy would take them, and their tokens best first.

    Returns position [S, I], token [S, I, J], log-probability [S, I, J], usable [S, I, J]. Rank i is judged under the
    noise of the i-th coming step, whose block has i masks fewer.
    """
    logprob, token = slots.guess_logprob_STJ, slots.guess_token_STJ
    masks_left_S = masked_ST.sum(-1)
    group_ST = group_of(masked_ST, rules)
    free_ST = masked_ST & torch.isfinite(logprob[..., 0])
    positions, tokens, logprobs, usables = [], [], [], []
    for i in range(num_ranks):
        order_STJ, confidence_ST = _judge(slots, logprob, token, (masks_left_S - i).clamp(min=0))
        eligible = free_ST & (group_ST == active_group(free_ST, rules)[:, None])
        best_S = torch.where(eligible, confidence_ST, -torch.inf).argmax(-1)
        at = best_S[:, None, None].expand(-1, 1, order_STJ.shape[-1])
        order_SJ = order_STJ.gather(1, at).squeeze(1)
        positions.append(best_S)
        tokens.append(token.gather(1, at).squeeze(1).gather(1, order_SJ))
        logprobs.append(logprob.gather(1, at).squeeze(1).gather(1, order_SJ))
        usables.append(torch.isfinite(logprobs[-1]) & eligible.any(-1, keepdim=True))
        free_ST = free_ST.scatter(1, best_S[:, None], False)
    return tuple(torch.stack(found, 1) for found in (positions, tokens, logprobs, usables))


def _judge(
    slots: SlotState, logprob_STJ: torch.Tensor, token_STJ: torch.Tensor, masks_left_S: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Order of the kept tokens at each position, best first, and the confidence of the best."""
    if not bool((slots.temperature_S > 0).any()):
        order = torch.arange(token_STJ.shape[-1], device=token_STJ.device).expand_as(token_STJ)
        return order, logprob_STJ[..., 0]
    block = token_STJ.shape[1]
    position_ST = slots.start_S[:, None] + torch.arange(block, device=token_STJ.device)

    def rows(x_S: torch.Tensor) -> torch.Tensor:
        return x_S.repeat_interleave(block, dim=0)

    noise = gumbel_noise_of(
        rows(slots.key_S2),
        rows(slots.sample_S),
        position_ST.flatten(),
        rows(masks_left_S),
        token_STJ.flatten(0, 1),
    ).view_as(logprob_STJ)
    temperature = slots.temperature_S[:, None, None]
    score = torch.where(temperature > 0, logprob_STJ / temperature.clamp(min=1e-6) + noise, logprob_STJ)
    order = score.argsort(dim=-1, descending=True, stable=True)
    return order, logprob_STJ.gather(-1, order[..., :1]).squeeze(-1)


@dataclass(frozen=True)
class BranchList:
    """The computed branches, sorted by slot, parents before children."""

    slot_A: torch.Tensor
    branch_A: torch.Tensor
    parent_A: torch.Tensor
    """Index in this list of the branch to fold on; itself for main branches."""
    depth_A: torch.Tensor
    final_A: torch.Tensor
    foldable_A: torch.Tensor
    """Drafts that are not final."""
    tokens_AT: torch.Tensor
    position_AT: torch.Tensor
    index_SB: torch.Tensor
    """Place of each branch in this list; meaningless where void."""

    @classmethod
    def of(cls, table: BranchTable, graph: GraphTensors, start_S: torch.Tensor) -> BranchList:
        slot_A, branch_A = (table.kind_SB != VOID).nonzero(as_tuple=True)
        index_SB = torch.zeros_like(table.kind_SB)
        index_SB[slot_A, branch_A] = torch.arange(len(slot_A), device=slot_A.device)
        final_A = table.kind_SB[slot_A, branch_A] == FINAL
        tokens_AT = table.tokens_SBT[slot_A, branch_A]
        offset = torch.arange(tokens_AT.shape[1], device=slot_A.device)
        return cls(
            slot_A=slot_A,
            branch_A=branch_A,
            parent_A=index_SB[slot_A, graph.parent_B[branch_A]],
            depth_A=graph.depth_B[branch_A],
            final_A=final_A,
            foldable_A=~final_A & (branch_A > 0),
            tokens_AT=tokens_AT,
            position_AT=start_S[slot_A][:, None] + offset,
            index_SB=index_SB,
        )

    @cached_property
    def levels(self) -> list[torch.Tensor]:
        """Foldable branches by depth, from depth 1 on."""
        deepest = int(self.depth_A.max()) if len(self.depth_A) else 0
        return [((self.depth_A == d) & self.foldable_A).nonzero().squeeze(1) for d in range(1, deepest + 1)]
