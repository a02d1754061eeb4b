"""What folding in time keeps of every layer: rows recomputed in a step, until one branch is accepted, and stored ones.

L layers, X = R + S * T rows: room for R = A * T recomputed ones (or, of the residual streams, list positions), then
the Z stored ones, row ``R + s * T + t`` for position t of slot s. K = 0 at a layer's entry, 1 after attention. E hidden
width, I feed-forward width, H/G query/key-value heads, Y = H / G, D head width, C chunks of the prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.fused.layout import Parts
from kernels.fused.linear_plan import make_parts, parts_size
from kernels.fused.prefix_state import MAX_CHUNKS, PLANS, AttentionPlan, PrefixState


@dataclass(frozen=True, slots=True)
class Arena:
    """All layers' rows. Of a stored row's prefix the chunks are merged, in the first state."""

    stream_LKXE: torch.Tensor
    q_LXHD: torch.Tensor
    k_LXGD: torch.Tensor
    v_LXGD: torch.Tensor
    m_LCGXY: torch.Tensor
    l_LCGXY: torch.Tensor
    acc_LCGXYD: torch.Tensor
    parts_LM: torch.Tensor
    """float32: feed-forward outputs of recomputed rows, as partial sums."""
    used_L: torch.Tensor
    """int32: see ``Parts``."""
    ffn_LZE: torch.Tensor
    """float32: those of the stored rows. Rounded, what a position folded at an unchanged input adds would change."""
    num_rows: int
    """R."""
    plan: AttentionPlan

    @classmethod
    def allocate(cls, size: ArenaSize, split: bool, dtype: torch.dtype, device: torch.device | str) -> Arena:
        """``split``: see ``PrefixState.allocate``."""
        plan, room = PLANS[dtype], size.room

        def buffer(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty((size.num_layers, *shape), dtype=dtype, device=device)

        states = (plan.max_chunks if split else 1, size.num_kv, room, size.num_heads // size.num_kv)
        parts = parts_size(size.hidden_size, size.intermediate_size, dtype, size.num_rows)
        return cls(
            buffer(2, room, size.hidden_size),
            buffer(room, size.num_heads, size.head_dim),
            buffer(room, size.num_kv, size.head_dim),
            buffer(room, size.num_kv, size.head_dim),
            buffer(*states, dtype=torch.float32),
            buffer(*states, dtype=torch.float32),
            buffer(*states, size.head_dim, dtype=torch.float32),
            buffer(parts, dtype=torch.float32),
            torch.ones(size.num_layers, dtype=torch.int32, device=device),
            buffer(size.num_stored, size.hidden_size, dtype=torch.float32),
            size.num_rows,
            plan,
        )

    def prefix(self, layer: int) -> PrefixState:
        """One layer's states over the prefix."""
        return PrefixState(self.m_LCGXY[layer], self.l_LCGXY[layer], self.acc_LCGXYD[layer], self.plan)

    def parts(self, layer: int, weight_EI: torch.Tensor) -> Parts:
        """Where one layer's down projection puts its output."""
        width, inner = weight_EI.shape
        used_1 = self.used_L[layer : layer + 1]
        return make_parts(self.parts_LM[layer], used_1, width, inner, weight_EI.dtype, self.num_rows)


@dataclass(frozen=True, slots=True)
class ArenaSize:
    """What decides an arena's size."""

    num_layers: int
    num_rows: int
    """R."""
    num_stored: int
    """Z."""
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv: int
    head_dim: int

    @property
    def room(self) -> int:
        return self.num_rows + self.num_stored

    def num_bytes(self, split: bool, dtype: torch.dtype) -> int:
        """Device memory."""
        row = dtype.itemsize * (2 * self.hidden_size + (self.num_heads + 2 * self.num_kv) * self.head_dim)
        row += 4 * (MAX_CHUNKS if split else 1) * self.num_heads * (self.head_dim + 2)
        parts = parts_size(self.hidden_size, self.intermediate_size, dtype, self.num_rows)
        return self.num_layers * (self.room * row + 4 * (parts + self.num_stored * self.hidden_size))
