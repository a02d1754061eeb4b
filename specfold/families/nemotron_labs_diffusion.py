"""Nemotron-Labs-Diffusion (arXiv:2607.05722): Ministral-3 bodies, causal prefix, bidirectional block, no token shift.

The same checkpoint decodes autoregressively (``ar``: blocks of one token) and by linear self-speculation
(``linear_spec``: a diffusion draft of the block, verified by a causal forward over it).
"""

from __future__ import annotations

import math
from typing import Any

from specfold.config import ConfigError, DecodeConfig
from specfold.families.base import BlockRules, Family, ModelError, common_spec, head_width, required
from specfold.families.fast_dllm_v2 import LAYER_NAMES
from specfold.spec import ModelSpec, RopeSpec, YarnScaling


class NemotronLabsDiffusion(Family):
    name = "nemotron_labs_diffusion"
    model_type = "nemotron_labs_diffusion"
    architecture = "NemotronLabsDiffusionModel"
    extra_modes = ("ar", "linear_spec")

    def parse_config(self, config: dict[str, Any]) -> ModelSpec:
        if config.get("sliding_window"):
            raise ModelError("config.json asks for sliding-window attention, which is not supported.")
        return common_spec(
            config,
            rope=yarn_rope(required(config, "rope_parameters"), head_width(config)),
            rms_eps=config.get("rms_norm_eps", 1e-5),
            qkv_bias=False,
            block_size=config.get("block_size", 32),
            context_length=config.get("max_position_embeddings", 262144),
        )

    def tensor_names(self, spec: ModelSpec) -> dict[str, str]:
        names = {
            "embedding": "encoder.embed_tokens.weight",
            "norm": "encoder.norm.weight",
            "head": "diffusion_head.weight",
        }
        for i in range(spec.num_layers):
            layer = f"encoder.layers.{i}"
            names |= {f"{i}.{ours}": f"{layer}.{theirs}" for ours, theirs in LAYER_NAMES.items() if "bias" not in ours}
        return names

    def mask_token_id(self, config: dict[str, Any], tokenizer: Any) -> int | None:
        return config.get("mask_token_id")

    def rules(self, spec: ModelSpec, config: DecodeConfig) -> BlockRules:
        self.check_mode(config)
        causal = config.causal_context
        if config.mode in self.extra_modes and not causal:
            raise ConfigError(f"mode {config.mode} needs causal_context.")
        if config.mode == "ar" and config.block_size not in (None, 1):
            raise ConfigError("mode ar decodes token by token: leave block_size out.")
        block = 1 if config.mode == "ar" else config.block_size or spec.block_size
        speculative = config.mode == "linear_spec"
        return BlockRules(
            block_size=block,
            group_size=block,
            # With no threshold linear_spec fills the whole draft in one forward, as the official decoder does.
            threshold=0.0 if speculative and config.threshold is None else config.threshold,
            strict=False,
            logit_shift=0,
            aligned=False,
            seeded=causal,
            seed_sampled=config.mode in self.extra_modes,
            prefill_mask="causal" if causal else "full",
            final_mask="causal" if causal else "full",
            plain_confidence=True,
            verify_draft=speculative,
        )


def yarn_rope(rope: dict[str, Any], head_dim: int) -> RopeSpec:
    """YaRN frequencies (arXiv:2309.00071) with the correction range truncated to whole dimensions."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope.get("rope_theta", 1e6))
    beta = float(rope.get("llama_4_scaling_beta") or 0.0)
    period = int(rope.get("original_max_position_embeddings") or 1)
    if kind == "default":
        return RopeSpec(theta, head_dim, query_beta=beta, query_period=period)
    if kind != "yarn":
        raise ModelError(f"config.json asks for rope type {kind!r}; yarn and default are supported.")
    factor, original = float(required(rope, "factor")), float(required(rope, "original_max_position_embeddings"))

    def correction_dim(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction_dim(float(rope.get("beta_fast") or 32))), 0)
    high = min(math.ceil(correction_dim(float(rope.get("beta_slow") or 1))), head_dim - 1)
    yarn = YarnScaling(factor, low, high)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    attention = rope.get("attention_factor")
    if attention is None:
        attention = magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)
    return RopeSpec(theta, head_dim, yarn, factor=float(attention), query_beta=beta, query_period=period)
