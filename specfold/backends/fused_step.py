"""One decoding step as a fixed sequence of fused operations: branches, forward, head, acceptance, cache, counters.

What ``specfold.step`` does, without the host. S slots, B branches, T block positions, A = S * B, D head rows,
J kept tokens, E hidden width.
"""

from __future__ import annotations

from dataclasses import fields

import torch

from kernels.fused.control import Carry, Commit, Counters, Graph, Result, Rules, Slots
from kernels.fused.head_scratch import HeadScratch
from kernels.fused.layout import Branches, HeadRows, Predictions, Sampling
from specfold.backends.base import RunSetup
from specfold.backends.fused_forward import ForwardShape, FusedForward, forward_bytes
from specfold.backends.operations import Operations
from specfold.backends.replay import Replay
from specfold.drafts import DraftGraph
from specfold.families.base import MaskKind
from specfold.folding import Folding
from specfold.pages import PagePool
from specfold.slots import SlotState


class FusedStep:
    """Buffers and graphs of a run's steps. A graph is captured when a kind of row first needs it."""

    def __init__(self, ops: Operations, setup: RunSetup, pool: PagePool, slots: SlotState, num_positions: int) -> None:
        model, rules, config = setup.model, setup.rules, setup.config
        device = model.device
        self._ops, self._setup, self._pool = ops, setup, pool
        self._state = slots
        self.shape = step_shape(setup)
        self.folding = Folding.of(config)
        self.forward = FusedForward(ops, model, pool, self.shape, self.folding)
        self.forward.reserve_positions(num_positions)
        self.graph = graph_tensors(setup.graph, device, config.draft_budget)
        self.slots = _share(slots)
        self.sampling = Sampling(slots.temperature_S, slots.top_p_S, slots.top_k_S, slots.key_S2, slots.sample_S)
        self.stop_ids = torch.tensor(setup.stop_ids, dtype=torch.long, device=device)
        num_slots, num_branches, block = self.shape.num_slots, self.shape.num_branches, self.shape.block
        num_live, num_heads = torch.zeros(2, 1, dtype=torch.int32, device=device)
        self.branches = empty_branches(self.shape, slots.start_S, self.graph, num_live)
        self._head_rows = empty_head_rows(head_capacity(setup), num_heads)
        self.predictions = empty_predictions(num_slots * num_branches, block, setup.num_top, device)
        self._final_hidden_DE = torch.empty(
            (head_capacity(setup), model.spec.hidden_size), dtype=model.dtype, device=device
        )
        self.result = Result.empty(num_slots, block, device)
        self._commit = Commit.empty(num_slots, device)
        self.counters = Counters.empty(num_slots, num_branches, model.spec.num_layers, self.graph.num_depths, device)
        self.carry: Carry | None = None
        if self.folding.carries:
            self.carry = Carry.empty(slots.steps_S, block, config.refresh_every, config.use_block_cache)
        self._mask_unit = mask_unit(rules.final_mask, block, block)
        self._replays: dict[tuple[bool, bool], Replay] = {}

    @property
    def num_live(self) -> int:
        """Branches that the last step computed; waits for it."""
        return int(self.branches.num_live_1)

    def rules(self, sampled: bool) -> Rules:
        """The run's rules as the kernels take them."""
        rules = self._setup.rules
        return Rules(
            block_size=rules.block_size,
            group_size=rules.group_size,
            threshold=rules.threshold,
            strict=rules.strict,
            logit_shift=rules.logit_shift,
            seeded=rules.seeded,
            seed_sampled=rules.seed_sampled,
            verify_draft=rules.verify_draft,
            mask_id=self._setup.mask_id,
            end_think_id=self._setup.config.end_think_token_id,
            sampled=sampled,
        )

    def prepare(self, sampled: bool, limited: bool) -> None:
        """Makes the graph for rows that draw tokens (from a limited set) or do not, if it is not there yet."""
        if (sampled, limited) in self._replays:
            return
        scratch = HeadScratch.make(
            head_capacity(self._setup),
            self._setup.model.head_VE.shape[0],
            self._setup.num_top,
            sampled,
            limited,
            self.result.packed_SN.device,
        )
        # The first launch compiles; with every slot asleep it changes nothing.
        flags = (self.slots.active_S, self.slots.pending_S)
        kept = [flag.clone() for flag in flags]
        for flag in flags:
            flag.zero_()
        self._replays[sampled, limited] = Replay(
            lambda: self._launch(sampled, limited, scratch), self.result.packed_SN.device
        )
        for flag, value in zip(flags, kept, strict=True):
            flag.copy_(value)

    def run(self, sampled: bool, limited: bool) -> None:
        """One step of all active slots."""
        self.prepare(sampled, limited)
        self._replays[sampled, limited]()

    def open_block(self, slot: int, seed_1: torch.Tensor | None) -> None:
        """Opens the first block of a row; an ending row shows in the next step's result."""
        if self.carry is not None:
            self.carry.clear(slot)
        self._ops.open_block(self.slots, self.rules(False), self.stop_ids, slot, seed_1)

    def _launch(self, sampled: bool, limited: bool, scratch: HeadScratch) -> None:
        ops, setup, branches, head = self._ops, self._setup, self.branches, self._head_rows
        model, rules, predictions = setup.model, self.rules(sampled), self.predictions
        branches.num_live_1.zero_()
        head.count_1.zero_()
        control = (self.slots, self.graph, rules, self.stop_ids, branches)
        ops.build_branches(*control, head, predictions)
        stream, addend = self.forward.run(
            branches, self._state.page_table_SP, self.folding, self._mask_unit, carry=self.carry
        )
        ops.head_norm(stream, addend, branches, head, model.norm_E, model.spec.rms_eps, self._final_hidden_DE)
        ops.head_rows(
            self._final_hidden_DE,
            model.head_VE,
            head,
            self.sampling,
            setup.mask_id,
            setup.num_top,
            setup.rules.plain_confidence,
            sampled,
            limited,
            scratch,
            predictions,
        )
        ops.accept(*control, predictions, self.result, self._commit, self.counters, self.carry)
        commit = self._commit
        self.forward.commit(commit.branch_S, commit.length_S, commit.start_S, self._state.page_table_SP)
        carries = self.carry is not None
        ops.tally_folds(branches, self.graph, self.forward.maps.keep_LKST, self.counters, carries)
        if self.carry is not None:
            self.forward.store(branches, self.carry.branch_S)

    @staticmethod
    def num_bytes(setup: RunSetup) -> int:
        """Device memory of a step's buffers, the largest ones counted."""
        model, shape = setup.model, step_shape(setup)
        rows, vocab = head_capacity(setup), model.head_VE.shape[0]
        # Scratch of the head for each kind of rows, at most three.
        head = rows * model.spec.hidden_size * model.dtype.itemsize + 3 * min(rows * vocab * 4, 1 << 30)
        return forward_bytes(model.spec, model.dtype, shape, Folding.of(setup.config)) + head


def step_shape(setup: RunSetup) -> ForwardShape:
    """Room of a step."""
    return ForwardShape(setup.batch_size, 1 + len(setup.graph), setup.rules.block_size)


def head_capacity(setup: RunSetup) -> int:
    """Most head rows of a step: a branch needs its active group and, with drafts, the next one."""
    rules, shape = setup.rules, step_shape(setup)
    reach = rules.group_size * (2 if len(setup.graph) else 1)
    per_branch = rules.block_size if rules.verify_draft else min(rules.block_size, reach)
    return shape.num_slots * shape.num_branches * per_branch


def mask_unit(kind: MaskKind, size: int, block: int) -> int:
    """Positions of a final branch that see one another both ways: all, a block's, or each only itself."""
    return {"full": size, "block": block, "causal": 1}[kind]


def graph_tensors(graph: DraftGraph, device: torch.device, budget: int | None = None) -> Graph:
    """A draft graph as the kernels take it; branch 0 is the main state. ``budget`` None: all drafts."""
    ranks = [[-1] * graph.num_positions for _ in range(len(graph) + 1)]
    for n, formula in enumerate(graph.formulas):
        for position, token in formula:
            ranks[n + 1][position] = token
    parents = [0, *(graph.fold_parent(n) + 1 for n in range(len(graph)))]
    return Graph.build(ranks, parents, device, budget, [0, *graph.places])


def empty_branches(shape: ForwardShape, start_S: torch.Tensor, graph: Graph, num_live_1: torch.Tensor) -> Branches:
    """A table and a list with room for all branches."""
    device = start_S.device

    def ints(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    num_slots, num_branches = shape.num_slots, shape.num_branches
    return Branches(
        tokens_SBT=ints(num_slots, num_branches, shape.block, dtype=torch.int64),
        kind_SB=ints(num_slots, num_branches),
        index_SB=ints(num_slots, num_branches),
        num_live_1=num_live_1,
        slot_A=ints(num_slots * num_branches),
        branch_A=ints(num_slots * num_branches),
        start_S=start_S,
        parent_B=graph.parent_B,
        ancestors_B=graph.ancestors_B,
    )


def empty_head_rows(capacity: int, count_1: torch.Tensor) -> HeadRows:
    """A list with room for that many head rows."""
    fields = torch.zeros((6, capacity), dtype=torch.int32, device=count_1.device)
    return HeadRows(count_1, *fields)


def empty_predictions(num_branches: int, block: int, num_top: int, device: torch.device) -> Predictions:
    """Room for the answers of that many branches."""

    def zeros(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    return Predictions(
        token_AT=zeros(num_branches, block),
        confidence_AT=zeros(num_branches, block, dtype=torch.float32),
        top_token_ATJ=zeros(num_branches, block, num_top),
        top_logprob_ATJ=zeros(num_branches, block, num_top, dtype=torch.float32),
        next_AT=zeros(num_branches, block),
        invalid_A=zeros(num_branches, dtype=torch.int32),
    )


def _share(slots: SlotState) -> Slots:
    """The same tensors as the kernels take them."""
    shared = {f.name: getattr(slots, f.name) for f in fields(Slots) if f.name != "pending_S"}
    return Slots(pending_S=torch.zeros_like(slots.active_S), **shared)
