"""A transformer's dimensions, weights and rotary tables; the same for every family.

L layers, E hidden width, H query heads, G key/value heads, D head width, I feed-forward width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

ROPE_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: ``inv_freq`` [D/2] float32, a factor on cos and sin, and Llama-4's query scale.

    Queries are scaled after rotation by ``1 + query_beta * ln(1 + floor(position / query_period))``.
    """

    inv_freq: torch.Tensor
    factor: float = 1.0
    query_beta: float = 0.0
    query_period: int = 1


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Dimensions read from a checkpoint's config."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_eps: float
    tied_head: bool
    qkv_bias: bool
    block_size: int
    context_length: int
    rope: RopeSpec = field(repr=False)

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Widths of the stacked query, key and value projections."""
        kv = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv, kv


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; projections that share an input are stacked."""

    attention_norm_E: torch.Tensor
    qkv_NE: torch.Tensor
    qkv_bias_N: torch.Tensor | None
    output_EN: torch.Tensor
    ffn_norm_E: torch.Tensor
    gate_up_2IE: torch.Tensor
    down_EI: torch.Tensor

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that are there."""
        return [x for name in LayerWeights.__slots__ if (x := getattr(self, name)) is not None]


@dataclass(slots=True)
class Model:
    """Weights on one device."""

    spec: ModelSpec
    embedding_VE: torch.Tensor
    layers: list[LayerWeights]
    norm_E: torch.Tensor
    head_VE: torch.Tensor
    _rope: tuple[torch.Tensor, ...] = ()

    @property
    def device(self) -> torch.device:
        return self.embedding_VE.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_VE.dtype

    @property
    def num_bytes(self) -> int:
        """Memory of the weights; a tied head counts once."""
        tensors = [self.embedding_VE, self.norm_E, self.head_VE]
        tensors += [
            x
            for layer in self.layers
            for x in (getattr(layer, name) for name in LayerWeights.__slots__)
            if x is not None
        ]
        return sum(x.nbytes for x in {x.data_ptr(): x for x in tensors}.values())

    def rope_tables(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """cos [n, D], sin [n, D] and query scale [n] for at least ``num_positions`` positions.

        Tables grow by whole chunks at fixed positions, so an entry's bits do not depend on when it was made.
        """
        have = len(self._rope[0]) if self._rope else 0
        if have < num_positions:
            chunks = [self._rope_chunk(start) for start in range(have, num_positions, ROPE_CHUNK)]
            old = [self._rope] if self._rope else []
            self._rope = tuple(torch.cat(parts) for parts in zip(*old, *chunks, strict=True))
        cos, sin, scale = self._rope
        return cos, sin, scale

    def _rope_chunk(self, start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rope = self.spec.rope
        position = torch.arange(start, start + ROPE_CHUNK, device=self.device, dtype=torch.float32)
        angle = position[:, None] * rope.inv_freq.to(self.device)[None]
        angle = torch.cat((angle, angle), dim=-1)
        scale = 1 + rope.query_beta * torch.log1p(torch.floor(position / rope.query_period))
        return angle.cos() * rope.factor, angle.sin() * rope.factor, scale
