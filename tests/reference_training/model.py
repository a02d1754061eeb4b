"""The networks, written plainly with the parameter names of the published checkpoints, and their config.json.

Letters: B batch, T positions, H query heads, K key/value heads, D head size, E hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_training.tokenizer import CONTEXT, VOCAB_SIZE

FAST_DLLM_V2, NEMOTRON = "fast_dllm_v2", "nemotron_labs_diffusion"
FAMILIES = (FAST_DLLM_V2, NEMOTRON)
BLOCK = 32
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 256, 6, 4, 2, 64, 512


def make_config(family: str, *, mask_id: int, stop_id: int, pad_id: int, **sizes: int) -> dict[str, Any]:
    """config.json in the shape of the real checkpoints; ``sizes`` overrides single entries (for tests)."""
    common = {
        "attention_dropout": 0.0,
        "eos_token_id": stop_id,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": CONTEXT,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": pad_id,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
    }
    if family == FAST_DLLM_V2:
        own: dict[str, Any] = {
            "architectures": ["Fast_dLLM_QwenForCausalLM"],
            "model_type": "Fast_dLLM_Qwen",
            "bd_size": BLOCK,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 1e6,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": False,
        }
    else:
        own = {
            "architectures": ["NemotronLabsDiffusionModel"],
            "model_type": "nemotron_labs_diffusion",
            "attention_bias": False,
            "block_size": BLOCK,
            "dlm_paradigm": "bidirectional",
            "head_dim": HEAD_DIM,
            "mask_token_id": mask_id,
            "mlp_bias": False,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": CONTEXT // 4,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_cache": False,
        }
    return dict(sorted({**common, **own, **sizes}.items()))


class ReferenceModel(nn.Module):
    """A decoder-only transformer of either family; attention is whatever the caller's mask says."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.tied = config["tie_word_embeddings"]
        if config["model_type"] == "nemotron_labs_diffusion":
            self.encoder = Body(config, qkv_bias=False)
            self.diffusion_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        else:
            self.model = Body(config, qkv_bias=True)
        self.apply(self._initialize)

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Layer):
            for weight in (module.self_attn.o_proj.weight, module.mlp.down_proj.weight):
                weight.data.mul_(1 / math.sqrt(2 * self.config["num_hidden_layers"]))

    @property
    def body(self) -> Body:
        return self.model if self.tied else self.encoder

    def forward(self, tokens_BT: Tensor, positions_T: Tensor, mask_BTT: Tensor) -> Tensor:
        """Logits [B, T, V]; ``mask_BTT`` [B or 1, T, T] is true where a query (row) may see a key (column)."""
        hidden_BTE = self.body(tokens_BT, positions_T, mask_BTT)
        return F.linear(hidden_BTE, self.body.embed_tokens.weight if self.tied else self.diffusion_head.weight)


class Body(nn.Module):
    def __init__(self, config: dict[str, Any], qkv_bias: bool) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, qkv_bias) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, tokens_BT: Tensor, positions_T: Tensor, mask_BTT: Tensor) -> Tensor:
        # A product with one-hot rows instead of a look-up: its gradient is a product too, deterministic and fast,
        # where the deterministic gradient of a look-up adds the many equal tokens one after the other.
        weight = self.embed_tokens.weight
        # The residual stream stays float32 under autocast.
        hidden_BTE = (F.one_hot(tokens_BT, weight.shape[0]).to(weight.dtype) @ weight).float()
        angles = rotary(self.config, positions_T)
        for layer in self.layers:
            hidden_BTE = layer(hidden_BTE, angles, mask_BTT)
        return self.norm(hidden_BTE)


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any], qkv_bias: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.self_attn = Attention(config, qkv_bias)
        self.post_attention_layernorm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.mlp = Mlp(config)

    def forward(self, hidden_BTE: Tensor, angles: Rotary, mask_BTT: Tensor) -> Tensor:
        hidden_BTE = hidden_BTE + self.self_attn(self.input_layernorm(hidden_BTE), angles, mask_BTT)
        return hidden_BTE + self.mlp(self.post_attention_layernorm(hidden_BTE))


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any], qkv_bias: bool) -> None:
        super().__init__()
        hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or hidden // heads
        self.group = heads // kv_heads
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)

    def forward(self, x_BTE: Tensor, angles: Rotary, mask_BTT: Tensor) -> Tensor:
        cos_TD, sin_TD, query_scale_T1 = angles
        q_BHTD, k_BKTD, v_BKTD = (
            projection(x_BTE).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q_BHTD = (rotate(q_BHTD, cos_TD, sin_TD) * query_scale_T1).to(v_BKTD.dtype)
        k_BKTD = rotate(k_BKTD, cos_TD, sin_TD).to(v_BKTD.dtype)
        # Repeated here because the kernels that take a mask do not group heads themselves.
        k_BHTD, v_BHTD = (t.repeat_interleave(self.group, dim=1) for t in (k_BKTD, v_BKTD))
        out_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, attn_mask=mask_BTT[:, None])
        return self.o_proj(out_BHTD.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, intermediate = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x_BTE: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTE)) * self.up_proj(x_BTE))


Rotary = tuple[Tensor, Tensor, Tensor]


def rotary(config: dict[str, Any], positions_T: Tensor) -> Rotary:
    """cos and sin [T, D] in float32, and the factor on rotated queries [T, 1] (1 for Fast-dLLM-v2)."""
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters")
    frequencies = yarn_frequencies(rope, dim) if rope else plain_frequencies(config["rope_theta"], dim)
    positions_T1 = positions_T.float()[:, None]
    angles_TD = (positions_T1 * frequencies.to(positions_T.device)).repeat(1, 2)
    scale_T1 = torch.ones_like(positions_T1)
    if rope:
        turns_T1 = torch.floor(positions_T1 / rope["original_max_position_embeddings"])
        scale_T1 = 1 + rope["llama_4_scaling_beta"] * torch.log1p(turns_T1)
    return angles_TD.cos(), angles_TD.sin(), scale_T1


def plain_frequencies(theta: float, dim: int) -> Tensor:
    return theta ** (-torch.arange(0, dim, 2).float() / dim)


def yarn_frequencies(rope: dict[str, Any], dim: int) -> Tensor:
    """YaRN: slow frequencies divided by ``factor``, fast ones kept, a ramp between; equal mscales need no more."""
    theta, original = rope["rope_theta"], rope["original_max_position_embeddings"]

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension_of(rope["beta_fast"])), 0)
    high = min(math.ceil(dimension_of(rope["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    fast = plain_frequencies(theta, dim)
    return fast * (1 - ramp) + fast / rope["factor"] * ramp


def rotate(x: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos_TD + torch.cat((-second, first), dim=-1) * sin_TD
