"""What a model family decides: checkpoint layout, block rules, unmasking policy.

A new family is one file beside this one: a subclass of ``Family``, registered in ``specfold.families.registry``.
S slots, T positions of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from specfold.config import ConfigError, DecodeConfig
from specfold.spec import ModelSpec, RopeSpec

if TYPE_CHECKING:
    import torch

MaskKind = Literal["full", "block", "causal"]


class ModelError(ValueError):
    """A model folder that cannot be used; the message is one sentence that names what is wrong."""


@dataclass(frozen=True, slots=True)
class BlockRules:
    """How blocks of one decoding run behave; data, so that the step function needs no family branches."""

    block_size: int
    group_size: int
    """Positions that the policy may unmask together: the leftmost group with masks (sub-block), or the whole block."""
    threshold: float | None
    strict: bool
    """A position passes the threshold only above it, not at it."""
    logit_shift: int
    """The prediction for position n stands at position n - logit_shift."""
    aligned: bool
    """Blocks lie on multiples of the block size; the prompt's ragged end opens the first block."""
    seeded: bool
    """Position 0 of a block is the next token of the forward over the block before it."""
    seed_sampled: bool
    """That token is drawn at the row's temperature; otherwise it is the argmax at any temperature."""
    prefill_mask: MaskKind
    final_mask: MaskKind
    """Attention inside a finished block."""
    plain_confidence: bool
    """Confidence is the plain softmax probability, whatever the temperature and top-p."""
    verify_draft: bool = False
    """A block's tokens count only as far as the forward over the finished block predicts them (linear_spec)."""


class Family:
    """Base of all families; see the two subclasses for the rules' sources."""

    name: ClassVar[str]
    model_type: ClassVar[str]
    architecture: ClassVar[str]
    extra_modes: ClassVar[tuple[str, ...]] = ()
    has_sub_blocks: ClassVar[bool] = False
    """Blocks are denoised part by part, and the parts can be cached."""

    def parse_config(self, config: dict[str, Any]) -> ModelSpec:
        """Dimensions from config.json. Raises ModelError for a missing or unsupported entry."""
        raise NotImplementedError

    def tensor_names(self, spec: ModelSpec) -> dict[str, str]:
        """Checkpoint name of every tensor by our name (see ``specfold.checkpoint.expected_shapes``)."""
        raise NotImplementedError

    def mask_token_id(self, config: dict[str, Any], tokenizer: Any) -> int | None:
        """The mask id, or None where neither the config nor the tokenizer knows it."""
        raise NotImplementedError

    def rules(self, spec: ModelSpec, config: DecodeConfig) -> BlockRules:
        """Rules of a run. Raises ConfigError for a setting that the family does not have."""
        raise NotImplementedError

    def check_mode(self, config: DecodeConfig) -> None:
        """Raises ConfigError if the family has no such mode, or no sub-blocks to cache."""
        if config.use_block_cache and not self.has_sub_blocks:
            raise ConfigError(f"use_block_cache exists for Fast-dLLM-v2 only, this model is {self.name}.")
        if config.mode in ("ar", "linear_spec") and config.mode not in self.extra_modes:
            raise ConfigError(f"mode {config.mode} exists for Nemotron-Labs-Diffusion only, this model is {self.name}.")

    def select(self, confidence_ST: torch.Tensor, masked_ST: torch.Tensor, rules: BlockRules) -> torch.Tensor:
        """Positions to unmask now, bool [S, T]."""
        # Imported here, with the engine: a model's small files are read without torch.
        from specfold.unmasking import select

        return select(confidence_ST, masked_ST, rules)


def common_spec(config: dict[str, Any], *, rope: RopeSpec, **special: Any) -> ModelSpec:
    """Dimensions under the names that all families share; ``special`` are the family's own entries of ModelSpec."""
    heads = required(config, "num_attention_heads")
    return ModelSpec(
        num_layers=required(config, "num_hidden_layers"),
        hidden_size=required(config, "hidden_size"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_width(config),
        intermediate_size=required(config, "intermediate_size"),
        vocab_size=required(config, "vocab_size"),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        rope=rope,
        **special,
    )


def head_width(config: dict[str, Any]) -> int:
    """Width of one attention head."""
    return index(config.get("head_dim") or required(config, "hidden_size") // required(config, "num_attention_heads"))


def required(config: dict[str, Any], key: str) -> Any:
    """A config entry that must be there."""
    if config.get(key) is None:
        raise ModelError(f"config.json has no entry {key!r}.")
    return config[key]
