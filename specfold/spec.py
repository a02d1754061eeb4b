"""A transformer's dimensions as its config tells them: plain data, for a model's small files are read without torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): dimensions up to ``low`` keep their frequency, from ``high`` on it is divided by
    ``factor``, between them it changes evenly."""

    factor: float
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: what its frequencies come from, a factor on cos and sin, and Llama-4's query scale.

    Queries are scaled after rotation by ``1 + query_beta * ln(1 + floor(position / query_period))``.
    """

    theta: float
    head_dim: int
    yarn: YarnScaling | None = None
    repeats: int = 1
    """Every frequency stands so many times in a row (see ``specfold.enlarge``)."""
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
