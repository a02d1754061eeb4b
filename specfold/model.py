"""A transformer's weights and rotary tables; the same for every family.

L layers, E hidden width, H query heads, G key/value heads, D head width, I feed-forward width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specfold.spec import ModelSpec, RopeSpec

ROPE_CHUNK = 1024


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
        angle = position[:, None] * inverse_frequencies(rope).to(self.device)[None]
        angle = torch.cat((angle, angle), dim=-1)
        scale = 1 + rope.query_beta * torch.log1p(torch.floor(position / rope.query_period))
        return angle.cos() * rope.factor, angle.sin() * rope.factor, scale


def inverse_frequencies(rope: RopeSpec) -> torch.Tensor:
    """The angle by which each pair of dimensions turns from one position to the next, float32 [D/2]."""
    exponent = torch.arange(0, rope.head_dim, 2, dtype=torch.int64).float() / rope.head_dim
    plain = 1.0 / rope.theta**exponent
    if rope.yarn is not None:
        factor, low, high = rope.yarn.factor, rope.yarn.low, rope.yarn.high
        ramp = (torch.arange(rope.head_dim // 2).float() - low) / (high - low if high != low else 0.001)
        extrapolate = 1 - ramp.clamp(0, 1)
        plain = plain / factor * (1 - extrapolate) + plain * extrapolate
    return plain.repeat_interleave(rope.repeats)
