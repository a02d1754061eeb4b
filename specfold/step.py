"""One decoding step of all slots: branches, forward, verification, commit, next block.

Drafts, folding, final branches and the causal modes are data here (draft graph, folding settings, block rules), not
code paths. S slots, B branches, A computed branches, T positions, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.fused.control import NEVER
from specfold.branches import BranchList, BranchTable, GraphTensors, build_branches
from specfold.families.base import BlockRules, Family
from specfold.folding import Folding
from specfold.forward import ForwardOutput, PrefixView, forward_branches, inside_mask
from specfold.model import Model
from specfold.pages import PagePool
from specfold.predict import Prediction, predict
from specfold.prefill import write_final_kv
from specfold.slots import Ending, SlotState, ending
from specfold.stored import StoredBranch
from specfold.verify import Walk, walk
from specfold.watch import Watch


@dataclass(frozen=True, slots=True)
class StepContext:
    """What stays the same over a run."""

    model: Model
    family: Family
    rules: BlockRules
    pool: PagePool
    graph: GraphTensors
    folding: Folding
    mask_id: int
    stop_ids: torch.Tensor
    num_top: int
    end_think_id: int | None
    stored: StoredBranch | None = None
    """Where steps inherit from one another."""
    watch: Watch | None = None

    @property
    def num_ranks(self) -> int:
        """Position ranks that drafts use; 0 without drafts."""
        return self.graph.token_rank_BI.shape[1]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the host needs of a step; counts are per slot."""

    ending: Ending
    """Of the block before it was replaced, or of the next block's opening where ``committed``."""
    committed_S: torch.Tensor
    invalid_S: torch.Tensor
    kind_SB: torch.Tensor
    accepted_SB: torch.Tensor
    fold_qkv_LSB: torch.Tensor
    fold_ffn_LSB: torch.Tensor
    """Folded positions of each branch."""


def step(slots: SlotState, context: StepContext) -> StepResult:
    """Advances every active slot by one forward, in place."""
    rules, watch = context.rules, context.watch
    if watch is not None:
        watch.before_step(slots, context)
    table = build_branches(slots, context.graph, rules, context.mask_id, context.stop_ids)
    branches = BranchList.of(table, context.graph, slots.start_S)
    if watch is not None:
        watch.on_branches(branches, slots, context)
    prefix = PrefixView(context.pool, slots.page_table_SP, slots.start_S)
    final_mask = inside_mask(rules.final_mask, rules.block_size, rules.block_size, slots.state_ST.device)
    stored = context.stored
    inheritance = None if stored is None else stored.offer(slots, branches, rules, context.mask_id)
    output = forward_branches(
        context.model, branches, prefix, final_mask, context.folding, watch=watch, inheritance=inheritance
    )
    prediction = predict(
        context.model,
        output.hidden_ATE,
        branches,
        slots,
        rules,
        context.mask_id,
        context.num_ranks,
        context.num_top,
    )
    after = walk(slots, table, branches, prediction, context.family, rules, context.mask_id, context.stop_ids)
    _commit(slots, after, branches, prediction, output, context)
    _keep(slots, after, branches, prediction, output, context)
    result = _result(slots, after, table, branches, output, context)
    if watch is not None:
        watch.after_step(slots, result)
    return result


def _commit(
    slots: SlotState,
    after: Walk,
    branches: BranchList,
    prediction: Prediction,
    output: ForwardOutput,
    context: StepContext,
) -> None:
    """Finished blocks enter the cache and the output; their slots open the next block."""
    slots.state_ST = torch.where(slots.active_S[:, None], after.state_ST, slots.state_ST)
    slot_C = after.committed_S.nonzero().squeeze(1)
    if not len(slot_C):
        return
    rules = context.rules
    at_C = branches.index_SB[slot_C, after.branch_S[slot_C]]
    final_C = branches.final_A.cumsum(0)[at_C] - 1
    next_CT = prediction.next_AT[at_C]
    length_C = after.length_S[slot_C]
    table_CP = slots.page_table_SP[slot_C]
    write_final_kv(context.pool, output, final_C, table_CP, slots.start_S[slot_C], length_C)
    _emit(slots, slot_C, length_C)
    slots.start_S[slot_C] += length_C
    slots.first_new_S[slot_C] = 0
    seed_C = next_CT.gather(1, length_C[:, None] - 1).squeeze(1) if rules.seeded else None
    open_block(slots, slot_C, seed_C, context)


def _emit(slots: SlotState, slot_C: torch.Tensor, length_C: torch.Tensor) -> None:
    """Appends the committed part of the blocks to the output, from the first generated position on."""
    offset = torch.arange(slots.block_size, device=slot_C.device)[None]
    counts = (offset < length_C[:, None]) & (offset >= slots.first_new_S[slot_C][:, None])
    row, at = counts.nonzero(as_tuple=True)
    slot = slot_C[row]
    position = slots.start_S[slot] + at - slots.prompt_len_S[slot]
    inside = position < slots.output_SC.shape[1]
    slots.output_SC[slot[inside], position[inside]] = slots.state_ST[slot, at][inside]


def open_block(slots: SlotState, slot_C: torch.Tensor, seed_C: torch.Tensor | None, context: StepContext) -> None:
    """Fills the blocks of chosen slots with masks behind the seed, and writes a due end-of-thinking token.

    Does not touch what stands before ``first_new``.
    """
    block = slots.block_size
    offset = torch.arange(block, device=slot_C.device)[None]
    first_new = slots.first_new_S[slot_C][:, None]
    state = torch.where(offset < first_new, slots.state_ST[slot_C], context.mask_id)
    if seed_C is not None:
        state = torch.where((offset == 0) & (first_new == 0), seed_C[:, None], state)
    if context.end_think_id is not None:
        seen = (slots.output_SC[slot_C] == context.end_think_id).any(-1)
        think = torch.where(seen, NEVER, slots.think_S[slot_C])
        slots.think_S[slot_C] = think
        start = slots.start_S[slot_C]
        at = torch.maximum(think - start, slots.first_new_S[slot_C])[:, None]
        state = torch.where((offset == at) & (think < start + block)[:, None], context.end_think_id, state)
    slots.state_ST[slot_C] = state
    slots.steps_S[slot_C] = 0
    slots.has_guess_S[slot_C] = False


def _keep(
    slots: SlotState,
    after: Walk,
    branches: BranchList,
    prediction: Prediction,
    output: ForwardOutput,
    context: StepContext,
) -> None:
    """The last accepted branch becomes the stored one, and its distribution the one to draft from."""
    slot = torch.arange(slots.num_slots, device=slots.state_ST.device)
    at = branches.index_SB[slot, after.branch_S]
    moved_S = slots.active_S & ~after.committed_S
    slots.steps_S += moved_S
    if context.stored is not None:
        context.stored.keep(output.served, at, moved_S)
    if not slots.guess_token_STJ.shape[-1]:
        return
    moved = moved_S[:, None, None]
    num_top = slots.guess_token_STJ.shape[-1]
    slots.guess_token_STJ = torch.where(moved, prediction.top_token_ATJ[at][..., :num_top], slots.guess_token_STJ)
    slots.guess_logprob_STJ = torch.where(moved, prediction.top_logprob_ATJ[at][..., :num_top], slots.guess_logprob_STJ)
    slots.has_guess_S |= moved.flatten()


def _result(
    slots: SlotState,
    after: Walk,
    table: BranchTable,
    branches: BranchList,
    output: ForwardOutput,
    context: StepContext,
) -> StepResult:
    opening = opening_ending(slots, context)
    committed = after.committed_S
    merged = Ending(
        *(torch.where(committed, getattr(opening, name), getattr(after.ending, name)) for name in Ending.__slots__)
    )
    num_layers = len(output.fold_qkv_LAT)
    folded = []
    for fold_LAT in (output.fold_qkv_LAT, output.fold_ffn_LAT):
        counts = torch.zeros((num_layers, *table.kind_SB.shape), dtype=torch.long, device=table.kind_SB.device)
        counts[:, branches.slot_A, branches.branch_A] = torch.stack(fold_LAT).sum(-1)
        folded.append(counts)
    return StepResult(merged, committed, after.invalid_S, table.kind_SB, after.accepted_SB, *folded)


def opening_ending(slots: SlotState, context: StepContext) -> Ending:
    """Whether the current block's known positions already end the row (a stop token as seed, the limit reached)."""
    masked = slots.state_ST == context.mask_id
    if context.rules.verify_draft:
        masked[:, 1:] = True
    return ending(slots.state_ST, masked, slots.first_new_S, slots.limit_S - slots.start_S, context.stop_ids)
