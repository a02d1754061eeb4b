"""A larger model that computes the same function, for measuring speed with a small model's real behaviour.

Hidden units and feed-forward units are repeated, and their incoming weights divided, so that logits, confidences,
relative residuals, and with them acceptance and fold rate, stay those of the original up to rounding, while every
projection costs what its new shape costs. Added layers and heads compute everything and contribute nothing. A repeated
vocabulary divides every probability by the same number (but for the mask's share of it, which a trained model makes
nothing), so it changes no choice as long as no threshold is set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from specfold.model import LayerWeights, Model
from specfold.spec import ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How much larger; the defaults change nothing."""

    hidden_times: int = 1
    ffn_times: int = 1
    extra_layers: int = 0
    head_dim_times: int = 1
    num_heads: int | None = None
    num_kv_heads: int | None = None
    """At least as many heads a group as before."""
    vocab_times: int = 1


def enlarge(model: Model, growth: Growth, mask_id: int) -> Model:
    """A new model; ``mask_id``, of the original, is the one token whose copies must never be chosen."""
    old = model.spec
    spec = replace(
        old,
        hidden_size=old.hidden_size * growth.hidden_times,
        intermediate_size=old.intermediate_size * growth.ffn_times,
        num_layers=old.num_layers + growth.extra_layers,
        num_heads=growth.num_heads or old.num_heads,
        num_kv_heads=growth.num_kv_heads or old.num_kv_heads,
        head_dim=old.head_dim * growth.head_dim_times,
        vocab_size=old.vocab_size * growth.vocab_times,
        rope=_sparse_rope(old, growth.head_dim_times),
    )
    layers = [_layer(layer, old, spec, growth) for layer in model.layers]
    idle = replace(
        layers[-1],
        output_EN=torch.zeros_like(layers[-1].output_EN),
        down_EI=torch.zeros_like(layers[-1].down_EI),
    )
    layers += [idle] * growth.extra_layers
    wide = _repeat_rows(model.embedding_VE.T, growth.hidden_times).T
    copies = model.head_VE.clone()
    copies[mask_id] = 0
    head = torch.cat([model.head_VE] + [copies] * (growth.vocab_times - 1))
    return Model(
        spec,
        wide.repeat(growth.vocab_times, 1).contiguous(),
        layers,
        _repeat_rows(model.norm_E, growth.hidden_times),
        _repeat_columns(head, growth.hidden_times),
    )


def _layer(layer: LayerWeights, old: ModelSpec, new: ModelSpec, growth: Growth) -> LayerWeights:
    wide = growth.hidden_times
    gate, up = layer.gate_up_2IE.chunk(2)
    # Scores are divided by the square root of the head width, which has grown.
    sharper = growth.head_dim_times**0.5

    def heads(x: torch.Tensor) -> torch.Tensor:
        """Stacked query, key and value units, in the places of the new heads; the queries' scale made up for."""
        q, k, v = x.split(old.qkv_sizes)
        q = _place_heads(q, old, new, is_query=True) * sharper
        return torch.cat((q, *(_place_heads(part, old, new, is_query=False) for part in (k, v))))

    output = _place_heads(layer.output_EN.T, old, new, is_query=True, empty=True).T
    return LayerWeights(
        attention_norm_E=_repeat_rows(layer.attention_norm_E, wide),
        qkv_NE=_repeat_columns(heads(layer.qkv_NE), wide),
        qkv_bias_N=None if layer.qkv_bias_N is None else heads(layer.qkv_bias_N),
        output_EN=_repeat_rows(output, wide).contiguous(),
        ffn_norm_E=_repeat_rows(layer.ffn_norm_E, wide),
        gate_up_2IE=_repeat_columns(torch.cat([gate] * growth.ffn_times + [up] * growth.ffn_times), wide),
        down_EI=_repeat_rows(_repeat_columns(layer.down_EI, growth.ffn_times), wide),
    )


def _place_heads(x: torch.Tensor, old: ModelSpec, new: ModelSpec, is_query: bool, empty: bool = False) -> torch.Tensor:
    """Units [heads * D, ...] in the new heads: dimension d of a half at ``times * d``, so that the frequencies agree.

    Query heads keep their key/value head. Added heads are copies of others, or zero (``empty``: nothing comes of them).
    """
    times = new.head_dim // old.head_dim
    old_group, new_group = old.num_heads // old.num_kv_heads, new.num_heads // new.num_kv_heads
    assert new_group >= old_group, "groups of heads cannot shrink"
    assert new.num_kv_heads >= old.num_kv_heads, "key/value heads cannot become fewer"
    source = x.unflatten(0, (-1, old.head_dim))
    count = new.num_heads if is_query else new.num_kv_heads
    placed = x.new_zeros((count, new.head_dim, *x.shape[1:]))
    for head in range(count):
        kv, member = divmod(head, new_group) if is_query else (head, 0)
        is_old = kv < old.num_kv_heads and (not is_query or member < old_group)
        if is_old or not empty:
            at = kv * old_group + member if is_old and is_query else head
            placed[head, ::times] = source[at % len(source)]
    return placed.flatten(0, 1)


def _sparse_rope(old: ModelSpec, times: int) -> RopeSpec:
    """The old frequencies at every ``times``-th place; the dimensions between are zero and turn with any."""
    return replace(old.rope, repeats=old.rope.repeats * times)


def _repeat_rows(x: torch.Tensor, times: int) -> torch.Tensor:
    """Output units repeated."""
    return torch.cat([x] * times)


def _repeat_columns(x: torch.Tensor, times: int) -> torch.Tensor:
    """Input units repeated, each carrying its share."""
    return torch.cat([x] * times, dim=1) / times
