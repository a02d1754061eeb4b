"""Engines with the dimensions of real checkpoints and random weights: their speed is real, their text is not."""

from __future__ import annotations

from typing import Any

import torch

from specfold.checkpoint import ModelInfo, expected_shapes
from specfold.engine import Engine
from specfold.families.registry import FAMILIES
from specfold.model import LayerWeights, Model
from specfold.spec import ModelSpec

_QWEN: dict[str, Any] = {
    "model_type": "Fast_dLLM_Qwen",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "bd_size": 32,
    "max_position_embeddings": 8192,
}
_MINISTRAL: dict[str, Any] = {
    "model_type": "nemotron_labs_diffusion",
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 131072,
    "block_size": 32,
    "max_position_embeddings": 8192,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def _dimensions(hidden: int, layers: int, intermediate: int) -> dict[str, int]:
    return {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate}


SHAPES: dict[str, dict[str, Any]] = {
    "fast-dllm-v2-1.5b": _QWEN
    | _dimensions(1536, 28, 8960)
    | {"num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "nemotron-3b": _MINISTRAL | _dimensions(3072, 26, 9216),
    "fast-dllm-v2-7b": _QWEN
    | _dimensions(3584, 28, 18944)
    | {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
    "nemotron-8b": _MINISTRAL | _dimensions(4096, 34, 14336),
    "nemotron-14b": _MINISTRAL
    | _dimensions(5120, 40, 16384)
    | {"num_attention_heads": 40, "rope_parameters": _MINISTRAL["rope_parameters"] | {"rope_theta": 1e9}},
}
"""config.json entries of the five checkpoints of the SpecFold paper; contexts are cut, they decide memory only."""

OFFICIAL_TOKENS_PER_S = {
    "fast-dllm-v2-1.5b": 49.0,
    "nemotron-3b": 45.0,
    "fast-dllm-v2-7b": 51.0,
    "nemotron-8b": 36.0,
    "nemotron-14b": 29.0,
}
"""The checkpoints' own decoders on an H200: random bfloat16 weights, one row, a 500-token prompt, 64 new tokens, one
token a step (transformers 4.53 and 4.57)."""

PEAK_BYTES_PER_S = 4.3e12
"""Measured copy bandwidth of an H200; an H100's is about 3."""


def random_engine(shape: str, device: str | torch.device, dtype: torch.dtype, backend: str) -> Engine:
    """An engine of one of ``SHAPES`` with random weights."""
    config = SHAPES[shape]
    family = next(f for f in FAMILIES if f.model_type == config["model_type"])
    spec = family.parse_config(config)
    vocab = spec.vocab_size
    info = ModelInfo(family, spec, vocab - 2, (vocab - 1,))
    return Engine(random_model(spec, torch.device(device), dtype), info, None, backend)


def random_model(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Model:
    """Weights of standard deviation 0.02, norms of one. Seeded."""
    generator = torch.Generator(device).manual_seed(0)

    def tensor(name: str, *shape: int) -> torch.Tensor:
        if name.endswith("norm"):
            return torch.ones(shape, device=device, dtype=dtype)
        return torch.empty(shape, device=device, dtype=dtype).normal_(0, 0.02, generator=generator)

    found = {name: tensor(name, *shape) for name, shape in expected_shapes(spec).items()}
    layers = [_layer(found, i, spec.qkv_bias) for i in range(spec.num_layers)]
    embedding = found["embedding"]
    return Model(spec, embedding, layers, found["norm"], embedding if spec.tied_head else found["head"])


def weight_floor_s(model: Model) -> float:
    """Least time of a forward: every weight of the layers and the head read once."""
    layers = sum(x.nbytes for layer in model.layers for x in layer.tensors)
    return (layers + model.head_VE.nbytes) / PEAK_BYTES_PER_S


def _layer(found: dict[str, torch.Tensor], i: int, has_bias: bool) -> LayerWeights:
    def stacked(*names: str) -> torch.Tensor:
        return torch.cat([found.pop(f"{i}.{name}") for name in names])

    return LayerWeights(
        attention_norm_E=found[f"{i}.attention_norm"],
        qkv_NE=stacked("q", "k", "v"),
        qkv_bias_N=stacked("q_bias", "k_bias", "v_bias") if has_bias else None,
        output_EN=found[f"{i}.output"],
        ffn_norm_E=found[f"{i}.ffn_norm"],
        gate_up_2IE=stacked("gate", "up"),
        down_EI=found[f"{i}.down"],
    )
