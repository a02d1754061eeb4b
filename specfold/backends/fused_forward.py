"""The forward over a step's branches as a fixed sequence of fused operations on buffers made once.

What ``specfold.forward`` does, for a captured graph: every buffer has room for the largest step, and how many rows are
really computed is counted on the device.

S slots, B branches, T positions, A = S * B branches at most, N = A * T positions at most, R <= N recomputed rows,
E hidden width, H/G query/key-value heads, D head width, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.fused.arena import Arena, ArenaSize
from kernels.fused.control import Carry
from kernels.fused.layout import Addend, Branches, Parts, RowMap, TimeGate
from kernels.fused.linear_plan import make_parts, parts_size
from kernels.fused.prefix_state import MAX_CHUNKS, PrefixState
from specfold.backends.operations import Operations
from specfold.folding import Folding
from specfold.model import Model
from specfold.pages import PagePool
from specfold.prefill import NO_FOLDING
from specfold.spec import ModelSpec

SPLIT_ROWS = 1152
"""Up to this many rows the chunks of the prefix may be attended side by side, because the GPU would idle otherwise.
Four slots with eight drafts of 32 positions."""


@dataclass(frozen=True, slots=True)
class ForwardShape:
    """Room of a forward."""

    num_slots: int
    num_branches: int
    block: int

    @property
    def num_rows(self) -> int:
        return self.num_slots * self.num_branches * self.block

    @property
    def num_stored(self) -> int:
        """Rows that folding in time keeps from step to step."""
        return self.num_slots * self.block


@dataclass(frozen=True, slots=True)
class FoldMaps:
    """Row maps of all layers, the QKV and the feed-forward ones, in tensors that one call clears."""

    keep_LKST: torch.Tensor
    """int64 bit sets; K = 0 for QKV, 1 for the feed-forward network."""
    row_KLSBT: torch.Tensor
    counts_LKX: torch.Tensor
    """int32: number of rows, then rows of each slot."""
    position_R: torch.Tensor
    slot_rows_SX: torch.Tensor

    @classmethod
    def allocate(cls, num_layers: int, shape: ForwardShape, device: torch.device) -> FoldMaps:
        slots, branches, block = shape.num_slots, shape.num_branches, shape.block

        def ints(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            ints(num_layers, 2, slots, block, dtype=torch.int64),
            ints(2, num_layers, slots, branches, block),
            ints(num_layers, 2, 1 + slots),
            ints(shape.num_rows),
            ints(slots, branches * block),
        )

    def of(self, layer: int, stage: int) -> RowMap:
        """The map of one layer; stage 0 is QKV, 1 the feed-forward network."""
        counts = self.counts_LKX[layer, stage]
        return RowMap(
            keep_ST=self.keep_LKST[layer, stage],
            row_SBT=self.row_KLSBT[stage, layer],
            count_1=counts[:1],
            position_R=self.position_R,
            slot_count_S=counts[1:],
            slot_rows_SX=self.slot_rows_SX,
        )

    def clear(self) -> None:
        self.keep_LKST.zero_()
        self.counts_LKX.zero_()


@dataclass(frozen=True, slots=True)
class _Gates:
    """How the gates of all layers decide."""

    delta: float
    time: TimeGate | None
    may_fold: RowMap | None
    test_entry: bool
    """Whether the residual is tested at a layer's entry, or the map ``may_fold`` decides alone."""
    test_middle: bool
    """Whether it is tested again after attention."""


class FusedForward:
    """Buffers of one shape, and the sequence of operations over them.

    ``folding`` tells whether a step inherits from the one before: with folding in time each layer has of its own what
    all otherwise share; the sub-block cache only needs room for stored keys and values.
    """

    def __init__(
        self, ops: Operations, model: Model, pool: PagePool, shape: ForwardShape, folding: Folding = NO_FOLDING
    ) -> None:
        spec, device, dtype = model.spec, model.device, model.dtype
        self.ops, self.model, self.pool, self.shape = ops, model, pool, shape
        rows, split = shape.num_rows, shape.num_rows <= SPLIT_ROWS

        def buffer(*size: int) -> torch.Tensor:
            return torch.empty(size, device=device, dtype=dtype)

        self.maps = FoldMaps.allocate(spec.num_layers, shape, device)
        self.arena: Arena | None = None
        if folding.time_delta >= 0:
            self.arena = Arena.allocate(_arena_size(spec, shape), split, dtype, device)
            self.k_LRGD, self.v_LRGD = self.arena.k_LXGD, self.arena.v_LXGD
        else:
            room = rows + shape.num_stored if folding.block_cache else rows
            self.k_LRGD = buffer(spec.num_layers, room, spec.num_kv_heads, spec.head_dim)
            self.v_LRGD = torch.empty_like(self.k_LRGD)
            self._streams = buffer(2, rows, spec.hidden_size)
            self._q = buffer(rows, spec.num_heads, spec.head_dim)
            self._prefix = PrefixState.allocate(self._q, spec.num_kv_heads, split)
        self._normed = buffer(rows, spec.hidden_size)
        self._attended = buffer(rows, spec.num_heads * spec.head_dim)
        self._hidden = buffer(rows, spec.intermediate_size)
        weights = [(w.shape[0], w.shape[1]) for w in _split_weights(model)[: 2 if self.arena else 3]]
        size = max(parts_size(n, k, dtype, rows) for n, k in weights)
        self._parts = torch.empty(size, device=device, dtype=torch.float32)
        self._parts_used_1 = torch.ones(1, device=device, dtype=torch.int32)
        self._rope: tuple[torch.Tensor, ...] = ()
        self.may_fold: RowMap | None = None
        """Benches: a position may fold only where this map keeps no row; None leaves it to the gate."""

    def reserve_positions(self, num_positions: int) -> None:
        """Makes rotary tables for that many positions; graphs hold their addresses, so once is enough for a run."""
        self._rope = tuple(x.to(self.model.dtype) for x in self.model.rope_tables(num_positions))

    def run(
        self,
        branches: Branches,
        page_table_SP: torch.Tensor,
        folding: Folding,
        mask_unit: int,
        length_S: torch.Tensor | None = None,
        carry: Carry | None = None,
    ) -> tuple[torch.Tensor, Addend]:
        """Runs all layers. Returns the residual stream [N, E] and the last layer's output still to be added to it.

        ``mask_unit``: attention inside final branches goes by groups of that many positions. Positions from
        ``length_S`` on are not computed. ``carry``: what main branches may inherit.
        """
        gates = self._gates(folding, carry)
        self.maps.clear()
        stream, addend = self.model.embedding_VE, None
        for layer in range(self.model.spec.num_layers):
            stream, addend = self._layer(layer, stream, addend, branches, page_table_SP, gates, mask_unit, length_S)
        assert addend is not None
        return stream, addend

    def commit(
        self,
        branch_S: torch.Tensor,
        length_S: torch.Tensor,
        start_S: torch.Tensor,
        page_table_SP: torch.Tensor,
    ) -> None:
        """Keys and values of one final branch a slot (below 0: of none) into the slots' pages.

        int32 ``branch_S``; int64 ``length_S`` positions from ``start_S`` on.
        """
        rows, pool = self.maps.row_KLSBT[0], self.pool
        self.ops.commit_kv(self.k_LRGD, self.v_LRGD, rows, branch_S, length_S, start_S, page_table_SP, pool.k, pool.v)

    def store(self, branches: Branches, branch_S: torch.Tensor) -> None:
        """After acceptance: what serves one branch a slot (int32, below 0: of none) becomes the stored rows."""
        arena, maps = self.arena, self.maps
        if arena is None:
            self.ops.store_keys(self.k_LRGD, self.v_LRGD, maps.row_KLSBT[0, :, :, 0], branch_S)
            return
        down = arena.parts(0, self.model.layers[0].down_EI)
        self.ops.store_accepted(arena, maps.keep_LKST, maps.row_KLSBT, maps.counts_LKX, branches, branch_S, down)

    def _gates(self, folding: Folding, carry: Carry | None) -> _Gates:
        """The sub-block cache is a pattern that decides alone, at both gates."""
        if carry is None:
            return _Gates(folding.delta, None, self.may_fold, True, folding.ffn_gate == "own")
        time = TimeGate(folding.time_delta, carry.valid_S, skips=folding.block_cache)
        if folding.block_cache:
            pattern = replace(self.maps.of(0, 0), keep_ST=carry.compute_ST)
            return _Gates(folding.delta, time, pattern, test_entry=False, test_middle=False)
        return _Gates(folding.delta, time, self.may_fold, True, folding.ffn_gate == "own")

    def _layer(
        self,
        index: int,
        stream: torch.Tensor,
        addend: Addend | None,
        branches: Branches,
        page_table_SP: torch.Tensor,
        gates: _Gates,
        mask_unit: int,
        length_S: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Addend]:
        ops, spec, layer = self.ops, self.model.spec, self.model.layers[index]
        (entry, middle), q, prefix = self._buffers(index)
        qkv_map, ffn_map = self.maps.of(index, 0), self.maps.of(index, 1)
        k, v = self.k_LRGD[index], self.v_LRGD[index]
        gate = (spec.rms_eps, gates.delta)
        ops.gate_rows(
            stream, addend is None, addend, branches, layer.attention_norm_E, *gate, gates.may_fold, gates.test_entry,
            entry, qkv_map, self._normed, length_S, gates.time,
        )  # fmt: skip
        parts = self._parts_for(layer.qkv_NE)
        ops.linear_rows(self._normed, layer.qkv_NE, qkv_map.count_1, 1, parts)
        ops.rope_rows(parts, layer.qkv_bias_N, qkv_map, branches, *self._rope, q, k, v)
        scale = spec.head_dim**-0.5
        pages = (self.pool.k[index], self.pool.v[index])
        ops.prefix_attention(q, qkv_map, *pages, page_table_SP, branches.start_S, scale, prefix)
        # What is attended stands by list position; where positions are left out, by row.
        by_row = length_S is not None or (gates.time is not None and gates.time.skips)
        attended = (qkv_map.count_1, 1) if by_row else (branches.num_live_1, self.shape.block)
        ops.block_attention(q, k, v, prefix, qkv_map, branches, mask_unit, scale, self._attended, length_S, by_row)
        parts = self._parts_for(layer.output_EN)
        ops.linear_rows(self._attended, layer.output_EN, *attended, parts)
        addend = Addend(parts, qkv_map if by_row else None)
        ops.gate_rows(
            entry, False, addend, branches, layer.ffn_norm_E, *gate, qkv_map, gates.test_middle, middle, ffn_map,
            self._normed, length_S, gates.time,
        )  # fmt: skip
        ops.swiglu_rows(self._normed, layer.gate_up_2IE, ffn_map.count_1, 1, self._hidden)
        arena, down = self.arena, layer.down_EI
        parts = self._parts_for(down) if arena is None else arena.parts(index, down)
        ops.linear_rows(self._hidden, down, ffn_map.count_1, 1, parts)
        return middle, Addend(parts, ffn_map, None if arena is None else arena.ffn_LZE[index])

    def _buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, PrefixState]:
        """Residual streams [2, N, E], queries and states over the prefix."""
        if self.arena is None:
            return self._streams, self._q, self._prefix
        return self.arena.stream_LKXE[layer], self.arena.q_LXHD[layer], self.arena.prefix(layer)

    def _parts_for(self, weight_NK: torch.Tensor) -> Parts:
        """Partial sums of a projection, in the one buffer that all share."""
        width, inner = weight_NK.shape
        return make_parts(self._parts, self._parts_used_1, width, inner, weight_NK.dtype, self.shape.num_rows)


def forward_bytes(spec: ModelSpec, dtype: torch.dtype, shape: ForwardShape, folding: Folding = NO_FOLDING) -> int:
    """Device memory of a ``FusedForward``, without pages: what the memory plan counts."""
    rows, item = shape.num_rows, dtype.itemsize
    heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    num_states = MAX_CHUNKS if rows <= SPLIT_ROWS else 1
    in_time = folding.time_delta >= 0
    shared = rows * item * (spec.hidden_size + heads + spec.intermediate_size)
    shapes = ((heads + 2 * kv, spec.hidden_size), (spec.hidden_size, heads), (spec.hidden_size, spec.intermediate_size))
    parts = 4 * max(parts_size(n, k, dtype, rows) for n, k in shapes[: 2 if in_time else 3])
    maps = spec.num_layers * 2 * (8 * shape.num_stored + 4 * rows)
    if in_time:
        return shared + parts + maps + _arena_size(spec, shape).num_bytes(num_states > 1, dtype)
    states = 4 * rows * (heads + 2 * spec.num_heads) * num_states
    room = rows + shape.num_stored if folding.block_cache else rows
    own = item * (2 * spec.num_layers * room * kv + rows * (2 * spec.hidden_size + heads))
    return own + shared + parts + states + maps


def _arena_size(spec: ModelSpec, shape: ForwardShape) -> ArenaSize:
    heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
    return ArenaSize(
        spec.num_layers, shape.num_rows, shape.num_stored, spec.hidden_size, spec.intermediate_size, *heads
    )


def _split_weights(model: Model) -> tuple[torch.Tensor, ...]:
    """One of each kind of weight whose output is partial sums; the last one's an arena keeps apart."""
    layer = model.layers[0]
    return layer.qkv_NE, layer.output_EN, layer.down_EI
