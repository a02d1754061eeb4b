"""Prompts into the cache with the step's own operations: a chunk is one final branch of one slot.

T positions of a chunk, E hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.fused.control import Graph
from kernels.fused.head_scratch import HeadScratch
from kernels.fused.layout import FINAL
from specfold.backends.base import RunSetup
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


class FusedPrefill:
    """Caches chunks of prompts, one prompt at a time, so that what stands in the cache depends on the prompt alone."""

    def __init__(
        self, ops: Operations, setup: RunSetup, pool: PagePool, step: FusedStep, table: int, num_positions: int
    ) -> None:
        self._ops, self._setup, self._pool, self._step = ops, setup, pool, step
        self._table, self._num_positions = table, num_positions
        self._chunks: dict[int, _Chunk] = {}
        device = setup.model.device
        one = torch.ones(1, dtype=torch.int32, device=device)
        self._seed_rows = empty_head_rows(1, one)
        self._seed_rows.target_D.fill_(1)
        self._seed_rows.greedy_D.fill_(not setup.rules.seed_sampled)
        self._seed = empty_predictions(1, 1, 0, device)
        self._scratch: dict[tuple[bool, bool], HeadScratch] = {}

    def advance(self, prefill: Prefill) -> None:
        """Computes and caches the next chunk of a prompt."""
        length = min(chunk_size(prefill, self._setup.rules), prefill.length - prefill.done)
        room = -(-length // CHUNK) * CHUNK
        if room not in self._chunks:
            # Chunks of other sizes than the ordinary come from bidirectional prompts; only one size is kept.
            self._chunks = {size: chunk for size, chunk in self._chunks.items() if size == CHUNK}
            self._chunks[room] = _Chunk(self._ops, self._setup, self._pool, room, self._table, self._num_positions)
        end = prefill.done + length
        tokens = prefill.prompt_ids[prefill.done : end]
        hidden_E = self._chunks[room].run(tokens, prefill.done, prefill.pages)
        if end == prefill.length:
            prefill.last_hidden_E = hidden_E.clone()
        prefill.done = end

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
        """Device memory of the ordinary chunk's buffers."""
        return forward_bytes(setup.model.spec, setup.model.dtype, ForwardShape(1, 1, CHUNK))


class _Chunk:
    """Buffers and the graph of one chunk size; shorter chunks leave its end empty."""

    def __init__(
        self, ops: Operations, setup: RunSetup, pool: PagePool, size: int, table: int, num_positions: int
    ) -> None:
        model, device = setup.model, setup.model.device
        self._ops, self._setup, self._pool = ops, setup, pool
        shape = ForwardShape(1, 1, size)
        self._forward = FusedForward(ops, model, pool, shape)
        self._forward.reserve_positions(num_positions)
        self._start_S = torch.zeros(1, dtype=torch.int64, device=device)
        self._length_S = torch.zeros_like(self._start_S)
        self._page_table_SP = torch.zeros((1, table), dtype=torch.int64, device=device)
        one = torch.ones(1, dtype=torch.int32, device=device)
        graph = Graph.build([[]], [0], device)
        self._branches = empty_branches(shape, self._start_S, graph, one)
        self._branches.kind_SB.fill_(FINAL)
        self._committed = torch.zeros(1, dtype=torch.int32, device=device)
        self._rows = empty_head_rows(1, one.clone())
        self._hidden_DE = torch.empty((1, model.spec.hidden_size), dtype=model.dtype, device=device)
        self._mask_unit = mask_unit(setup.rules.prefill_mask, size, setup.rules.block_size)
        # Empty at first: the launch that compiles computes nothing.
        self._replay = Replay(self._launch, device)

    def run(self, token_ids: Sequence[int], start: int, pages: list[int]) -> torch.Tensor:
        """Caches consecutive tokens of one prompt that see ``start`` cached positions.

        Returns the normed hidden state of the last one [E], which the next call overwrites.
        """
        device, length = self._start_S.device, len(token_ids)
        self._branches.tokens_SBT[0, 0, :length] = torch.tensor(list(token_ids), device=device)
        self._start_S.fill_(start)
        self._length_S.fill_(length)
        self._page_table_SP[0, : len(pages)] = torch.tensor(pages, device=device)
        self._rows.hidden_D.fill_(length - 1)
        self._replay()
        return self._hidden_DE[0]

    def _launch(self) -> None:
        ops, branches, forward, model = self._ops, self._branches, self._forward, self._setup.model
        stream, addend = forward.run(branches, self._page_table_SP, NO_FOLDING, self._mask_unit, self._length_S)
        ops.head_norm(stream, addend, branches, self._rows, model.norm_E, model.spec.rms_eps, self._hidden_DE)
        forward.commit(self._committed, self._length_S, self._start_S, self._page_table_SP)
