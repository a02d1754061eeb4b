"""What folding in time keeps of every layer: rows recomputed in a step, until one branch is accepted, and stored ones.

L layers, X = R + S * T rows: room for R = A * T recomputed ones (or, of the residual streams, list positions), then
the stored ones, row ``R + s * T + t`` for position t of slot s. K = 0 at a layer's entry, 1 after attention. E hidden
width, H/G query/key-value heads, Y = H / G, D head width, C chunks of the prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.fused.prefix_state import PLANS, AttentionPlan, PrefixState


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
    sums_LXE: torch.Tensor
    """float32: feed-forward outputs. In the model's dtype a position folded at an unchanged input would change."""
    num_rows: int
    """R."""
    plan: AttentionPlan

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_rows: int,
        num_stored: int,
        heads: tuple[int, int, int],
        hidden_size: int,
        split: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Arena:
        """``heads``: query heads, key/value heads and their width. ``split``: see ``PrefixState.allocate``."""
        num_heads, num_kv, head_dim = heads
        room, plan = num_rows + num_stored, PLANS[dtype]

        def buffer(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty((num_layers, *size), dtype=dtype, device=device)

        states = (plan.max_chunks if split else 1, num_kv, room, num_heads // num_kv)
        assert room * hidden_size < 2**31, "the kernels count a layer's elements in 32 bits"
        return cls(
            buffer(2, room, hidden_size),
            buffer(room, num_heads, head_dim),
            buffer(room, num_kv, head_dim),
            buffer(room, num_kv, head_dim),
            buffer(*states, dtype=torch.float32),
            buffer(*states, dtype=torch.float32),
            buffer(*states, head_dim, dtype=torch.float32),
            buffer(room, hidden_size, dtype=torch.float32),
            num_rows,
            plan,
        )

    def prefix(self, layer: int) -> PrefixState:
        """One layer's states over the prefix."""
        return PrefixState(self.m_LCGXY[layer], self.l_LCGXY[layer], self.acc_LCGXYD[layer], self.plan)

    @staticmethod
    def num_bytes(
        num_layers: int, room: int, heads: tuple[int, int, int], hidden_size: int, num_states: int, item: int
    ) -> int:
        """Of an arena of X = ``room`` rows with elements of ``item`` bytes."""
        num_heads, num_kv, head_dim = heads
        row = item * (2 * hidden_size + (num_heads + 2 * num_kv) * head_dim)
        return num_layers * room * (row + 4 * hidden_size + 4 * num_states * num_heads * (head_dim + 2))
