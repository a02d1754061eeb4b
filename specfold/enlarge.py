"""A larger model that computes the same function, for measuring speed with a small model's real behaviour.

Hidden units and feed-forward units are repeated, and their incoming weights divided, so that logits, confidences,
relative residuals, and with them acceptance and fold rate, stay those of the original up to rounding, while every
projection costs what its new shape costs. Added layers compute everything and contribute nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from specfold.model import LayerWeights, Model


def enlarge(model: Model, hidden_times: int = 1, ffn_times: int = 1, extra_layers: int = 0) -> Model:
    """Repeats the hidden width and the feed-forward width, and appends layers. All factors at least 1 (layers 0)."""
    spec = replace(
        model.spec,
        hidden_size=model.spec.hidden_size * hidden_times,
        intermediate_size=model.spec.intermediate_size * ffn_times,
        num_layers=model.spec.num_layers + extra_layers,
    )

    def rows(weight: torch.Tensor) -> torch.Tensor:
        """Output units repeated."""
        return torch.cat([weight] * hidden_times)

    def columns(weight: torch.Tensor, times: int = hidden_times) -> torch.Tensor:
        """Input units repeated, each carrying its share."""
        return torch.cat([weight] * times, dim=1) / times

    def layer(old: LayerWeights) -> LayerWeights:
        gate, up = old.gate_up_2IE.chunk(2)
        return LayerWeights(
            attention_norm_E=rows(old.attention_norm_E),
            qkv_NE=columns(old.qkv_NE),
            qkv_bias_N=old.qkv_bias_N,
            output_EN=rows(old.output_EN),
            ffn_norm_E=rows(old.ffn_norm_E),
            gate_up_2IE=columns(torch.cat([gate] * ffn_times + [up] * ffn_times)),
            down_EI=rows(columns(old.down_EI, ffn_times)),
        )

    layers = [layer(old) for old in model.layers]
    idle = replace(
        layers[-1],
        output_EN=torch.zeros_like(layers[-1].output_EN),
        down_EI=torch.zeros_like(layers[-1].down_EI),
    )
    layers += [idle] * extra_layers
    return Model(spec, rows(model.embedding_VE.T).T.contiguous(), layers, rows(model.norm_E), columns(model.head_VE))
