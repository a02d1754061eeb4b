"""Tiny random models of both families, built in memory."""

from __future__ import annotations

from functools import cache

import torch

from specfold import Engine
from specfold.checkpoint import ModelInfo, expected_shapes
from specfold.families.registry import FAMILIES
from specfold.model import LayerWeights, Model
from specfold.spec import ModelSpec

VOCAB, MASK, STOP = 40, 39, 38
FAMILY_NAMES = tuple(family.name for family in FAMILIES)


@cache
def random_engine(family_name: str, seed: int = 0, block_size: int = 8, sharpness: float = 3.0) -> Engine:
    """An engine with random weights. ``sharpness`` scales the head: confidences spread from near 0 to near 1."""
    family = next(f for f in FAMILIES if f.name == family_name)
    config = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "head_dim": 8,
        "bd_size": block_size,
        "block_size": block_size,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    spec = family.parse_config(config)
    info = ModelInfo(family, spec, MASK, (STOP,))
    return Engine(_random_model(spec, seed, sharpness), info, None)


def _random_model(spec: ModelSpec, seed: int, sharpness: float) -> Model:
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(spec)

    def draw(name: str) -> torch.Tensor:
        shape = shapes[name]
        if name.endswith("norm"):
            return torch.ones(shape)
        scale = 1.0 if name == "embedding" else sharpness if name == "head" else 1.5
        width = 1 if name == "embedding" else shape[-1]
        return torch.randn(shape, generator=generator) * scale * width**-0.5

    def layer(i: int) -> LayerWeights:
        def stacked(*names: str) -> torch.Tensor:
            return torch.cat([draw(f"{i}.{name}") for name in names])

        bias = torch.zeros(sum(spec.qkv_sizes)) if spec.qkv_bias else None
        return LayerWeights(
            draw(f"{i}.attention_norm"),
            stacked("q", "k", "v"),
            bias,
            draw(f"{i}.output"),
            draw(f"{i}.ffn_norm"),
            stacked("gate", "up"),
            draw(f"{i}.down"),
        )

    return Model(spec, draw("embedding"), [layer(i) for i in range(spec.num_layers)], draw("norm"), draw("head"))
