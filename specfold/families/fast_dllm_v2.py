"""Fast-dLLM-v2 (arXiv:2509.26328): Qwen2.5 bodies, block-causal attention, token shift, sub-blocks."""

from __future__ import annotations

from typing import Any

from specfold.config import ConfigError, DecodeConfig
from specfold.families.base import BlockRules, Family, ModelError, common_spec, head_width
from specfold.spec import ModelSpec, RopeSpec

MASK_TOKEN = "|<MASK>|"


class FastDllmV2(Family):
    name = "fast_dllm_v2"
    model_type = "Fast_dLLM_Qwen"
    architecture = "Fast_dLLM_QwenForCausalLM"
    has_sub_blocks = True

    def parse_config(self, config: dict[str, Any]) -> ModelSpec:
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ModelError(f"config.json asks for rope type {kind!r}, which Fast-dLLM-v2 does not have.")
        if config.get("use_sliding_window"):
            raise ModelError("config.json asks for sliding-window attention, which is not supported.")
        theta = config.get("rope_theta") or rope.get("rope_theta", 1e6)
        return common_spec(
            config,
            rope=RopeSpec(1.0 * theta, head_width(config)),
            rms_eps=config.get("rms_norm_eps", 1e-6),
            qkv_bias=True,
            block_size=config.get("bd_size", 32),
            context_length=config.get("max_position_embeddings", 32768),
        )

    def tensor_names(self, spec: ModelSpec) -> dict[str, str]:
        names = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
        for i in range(spec.num_layers):
            layer = f"model.layers.{i}"
            names |= {f"{i}.{ours}": f"{layer}.{theirs}" for ours, theirs in LAYER_NAMES.items()}
        return names

    def mask_token_id(self, config: dict[str, Any], tokenizer: Any) -> int | None:
        if config.get("mask_token_id") is not None:
            return config["mask_token_id"]
        return tokenizer.get_vocab().get(MASK_TOKEN) if tokenizer is not None else None

    def rules(self, spec: ModelSpec, config: DecodeConfig) -> BlockRules:
        self.check_mode(config)
        block = config.block_size or spec.block_size
        if block % config.small_block_size:
            raise ConfigError(f"small_block_size {config.small_block_size} does not divide the block size {block}.")
        return BlockRules(
            block_size=block,
            group_size=config.small_block_size,
            threshold=config.threshold,
            strict=True,
            logit_shift=1,
            aligned=True,
            seeded=True,
            seed_sampled=False,
            prefill_mask="block",
            final_mask="full",
            plain_confidence=False,
        )


LAYER_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "output": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
