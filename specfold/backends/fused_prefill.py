"""Prompts into the cache with the step's own operations: a prompt's chunk is the one final branch of a slot.

S prompts that one forward takes, T positions of a chunk, E hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.fused.control import Graph
from kernels.fused.head_scratch import HeadScratch
from kernels.fused.layout import FINAL
from specfold.backends.base import RunSetup, to_device
from specfold.backends.fused_forward import ForwardShape, FusedForward, forward_bytes
from specfold.backends.fused_step import (
    FusedStep,
    empty_branches,
    empty_head_rows,
    empty_predictions,
    mask_unit,
)
from specfold.backends.operations import Operations
from specfold.backends.replay import Replay
from specfold.pages import PagePool
from specfold.prefill import CHUNK, NO_FOLDING, Prefill, chunk_size

MAX_PROMPTS = 8
"""Prompts of one forward. A short one costs a forward the reading of all weights, and many that once."""
SLOTS_A_PROMPT = 4
"""With few slots rows end seldom, and hardly two prompts would wait at a time: one more prompt for so many slots."""
GROUP_POSITIONS = 1024
"""And no more positions, so that the rows that decode do not wait for long; products are at their best rate by then."""


class FusedPrefill:
    """Caches chunks of prompts, several prompts in one forward.

    What stands in the cache depends on the prompt alone: no row of a forward knows how many others there are.
    """

    def __init__(
        self, ops: Operations, setup: RunSetup, pool: PagePool, step: FusedStep, table: int, num_positions: int
    ) -> None:
        self._ops, self._setup, self._pool, self._step = ops, setup, pool, step
        self._table, self._num_positions = table, num_positions
        self._chunks: dict[int, _Chunks] = {}
        device = setup.model.device
        one = torch.ones(1, dtype=torch.int32, device=device)
        self._seed_rows = empty_head_rows(1, one)
        self._seed_rows.target_D.fill_(1)
        self._seed_rows.greedy_D.fill_(not setup.rules.seed_sampled)
        self._seed = empty_predictions(1, 1, 0, device)
        self._scratch: dict[tuple[bool, bool], HeadScratch] = {}

    def advance(self, prefills: Sequence[Prefill]) -> None:
        """Computes and caches the next chunk of each of these prompts."""
        group: list[Prefill] = []
        for prefill in prefills:
            if self._next_length(prefill) > CHUNK:
                self._run([prefill])
                continue
            positions = sum(map(self._next_length, group)) + self._next_length(prefill)
            if len(group) == prefill_slots(self._setup) or (group and positions > GROUP_POSITIONS):
                self._run(group)
                group = []
            group.append(prefill)
        if group:
            self._run(group)

    def _next_length(self, prefill: Prefill) -> int:
        return min(chunk_size(prefill, self._setup.rules), prefill.length - prefill.done)

    def _run(self, group: Sequence[Prefill]) -> None:
        lengths = [self._next_length(prefill) for prefill in group]
        room = -(-max(lengths) // CHUNK) * CHUNK
        if room not in self._chunks:
            # Chunks of other sizes than the ordinary come from bidirectional prompts; only one size is kept.
            self._chunks = {size: chunks for size, chunks in self._chunks.items() if size == CHUNK}
            slots = prefill_slots(self._setup) if room == CHUNK else 1
            shape = ForwardShape(slots, 1, room)
            self._chunks[room] = _Chunks(self._ops, self._setup, self._pool, shape, self._table, self._num_positions)
        hidden_DE = self._chunks[room].run(group, lengths)
        for prefill, length, hidden_E in zip(group, lengths, hidden_DE, strict=False):
            prefill.done += length
            if prefill.finished:
                prefill.last_hidden_E = hidden_E.clone()

    def seed(self, prefill: Prefill, slot: int) -> torch.Tensor:
        """The token after a cached prompt [1], on the device: argmax, or drawn where the rules sample seeds."""
        setup, rows = self._setup, self._seed_rows
        assert prefill.last_hidden_E is not None
        rows.slot_D.fill_(slot)
        rows.position_D.fill_(prefill.length)
        sampled = setup.rules.seed_sampled
        key = (sampled, sampled)
        if key not in self._scratch:
            vocab, device = setup.model.head_VE.shape[0], setup.model.device
            self._scratch[key] = HeadScratch.make(1, vocab, 0, *key, device)
        self._ops.head_rows(
            prefill.last_hidden_E[None],
            setup.model.head_VE,
            rows,
            self._step.sampling,
            setup.mask_id,
            0,
            setup.rules.plain_confidence,
            *key,
            self._scratch[key],
            self._seed,
        )
        return self._seed.next_AT[0].clone()

    @staticmethod
    def num_bytes(setup: RunSetup) -> int:
        """Device memory of the buffers for chunks of the ordinary size."""
        return forward_bytes(setup.model.spec, setup.model.dtype, ForwardShape(prefill_slots(setup), 1, CHUNK))


def prefill_slots(setup: RunSetup) -> int:
    """Prompts that one forward takes."""
    return min(MAX_PROMPTS, 1 + setup.batch_size // SLOTS_A_PROMPT)


class _Chunks:
    """Buffers and the graph of one chunk size; shorter chunks leave the end of their place empty."""

    def __init__(
        self, ops: Operations, setup: RunSetup, pool: PagePool, shape: ForwardShape, table: int, num_positions: int
    ) -> None:
        model, device, slots, size = setup.model, setup.model.device, shape.num_slots, shape.block
        self._ops, self._setup, self._pool = ops, setup, pool
        self._forward = FusedForward(ops, model, pool, shape)
        self._forward.reserve_positions(num_positions)
        self._start_S = torch.zeros(slots, dtype=torch.int64, device=device)
        self._length_S = torch.zeros_like(self._start_S)
        self._page_table_SP = torch.zeros((slots, table), dtype=torch.int64, device=device)
        count = torch.full((1,), slots, dtype=torch.int32, device=device)
        self._branches = empty_branches(shape, self._start_S, Graph.build([[]], [0], device), count)
        self._branches.kind_SB.fill_(FINAL)
        for places in (self._branches.slot_A, self._branches.index_SB[:, 0]):
            places.copy_(torch.arange(slots))
        self._committed = torch.zeros(slots, dtype=torch.int32, device=device)
        self._rows = empty_head_rows(slots, count.clone())
        self._hidden_DE = torch.empty((slots, model.spec.hidden_size), dtype=model.dtype, device=device)
        self._mask_unit = mask_unit(setup.rules.prefill_mask, size, setup.rules.block_size)
        # Empty at first: the launch that compiles computes nothing.
        self._replay = Replay(self._launch, device)

    def run(self, prefills: Sequence[Prefill], lengths: Sequence[int]) -> torch.Tensor:
        """Caches the next positions of some prompts, so many of each.

        Returns the normed hidden state of the last one of each [D, E], which the next call overwrites.
        """
        slots, _, size = self._branches.tokens_SBT.shape
        device = self._start_S.device
        empty = [0] * (slots - len(prefills))
        starts = [prefill.done for prefill in prefills]
        self._start_S.copy_(to_device(starts + empty, device))
        self._length_S.copy_(to_device([*lengths, *empty], device))
        ends = [place * size + length - 1 for place, length in enumerate(lengths)]
        self._rows.hidden_D.copy_(to_device(ends + empty, device))
        for place, (prefill, start, length) in enumerate(zip(prefills, starts, lengths, strict=True)):
            tokens = list(prefill.prompt_ids[start : start + length])
            self._branches.tokens_SBT[place, 0, :length] = to_device(tokens, device)
            self._page_table_SP[place, : len(prefill.pages)] = to_device(prefill.pages, device)
        self._replay()
        return self._hidden_DE[: len(prefills)]

    def _launch(self) -> None:
        ops, branches, forward, model = self._ops, self._branches, self._forward, self._setup.model
        stream, addend = forward.run(branches, self._page_table_SP, NO_FOLDING, self._mask_unit, self._length_S)
        ops.head_norm(stream, addend, branches, self._rows, model.norm_E, model.spec.rms_eps, self._hidden_DE)
        forward.commit(self._committed, self._length_S, self._start_S, self._page_table_SP)
