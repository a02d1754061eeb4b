"""Hugging Face model folders: config, safetensors, tokenizer. Nothing in them is ever executed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from specfold.config import ConfigError, DecodeConfig
from specfold.drafts import graph_for
from specfold.families.base import Family, ModelError
from specfold.families.registry import family_of
from specfold.spec import ModelSpec

if TYPE_CHECKING:
    import torch

    from specfold.model import LayerWeights, Model

FLOAT_DTYPES = {"F32", "BF16", "F16"}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a folder's small files tell, without its weights."""

    family: Family
    spec: ModelSpec
    mask_token_id: int
    stop_token_ids: tuple[int, ...]

    @property
    def context_length(self) -> int:
        return self.spec.context_length

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def block_size(self) -> int:
        return self.spec.block_size

    def check_config(self, config: DecodeConfig) -> None:
        """Raises ConfigError for a setting that this model cannot decode with."""
        self.family.rules(self.spec, config)
        graph_for(config)
        think = config.end_think_token_id
        if think is not None and not 0 <= think < self.vocab_size:
            raise ConfigError(f"end_think_token_id {think} is outside the vocabulary of {self.vocab_size} tokens.")

    def check_prompt(self, prompt_ids: Sequence[int], max_new_tokens: int) -> tuple[str, str] | None:
        """Kind and sentence of what is wrong with a prompt, or None."""
        if not len(prompt_ids):
            return "empty_prompt", "The prompt has no tokens."
        # Three passes in C; a test per token in Python costs as much as tokenising.
        spec = self.spec
        if set(map(type, prompt_ids)) != {int} or min(prompt_ids) < 0 or max(prompt_ids) >= spec.vocab_size:
            return "invalid_token_id", f"The prompt holds a token id outside 0..{spec.vocab_size - 1}."
        if self.mask_token_id in prompt_ids:
            return "mask_in_prompt", f"The prompt holds the mask token (id {self.mask_token_id})."
        needed = len(prompt_ids) + max_new_tokens
        if needed > spec.context_length:
            return "too_long", (
                f"{len(prompt_ids)} prompt tokens and {max_new_tokens} new ones exceed the context of "
                f"{self.context_length}."
            )
        return None


def read_model_info(
    folder: str | Path,
    tokenizer: Any = None,
    mask_token_id: int | None = None,
    stop_token_ids: tuple[int, ...] | None = None,
) -> ModelInfo:
    """Reads config.json (and generation_config.json); the tokenizer is loaded from the folder unless given.

    Raises ModelError if the folder is no model folder, its family is unknown, or the mask id is known neither to the
    config nor to the tokenizer nor to the caller.
    """
    folder = Path(folder)
    config, family, spec = _read_config(folder)
    if mask_token_id is None:
        tokenizer = load_tokenizer(folder) if tokenizer is None else tokenizer
        mask_token_id = family.mask_token_id(config, tokenizer)
    if mask_token_id is None:
        raise ModelError(f"{folder} does not say which token is the mask: give mask_token_id.")
    if not 0 <= mask_token_id < spec.vocab_size:
        raise ModelError(f"mask_token_id {mask_token_id} is outside the vocabulary of {spec.vocab_size} tokens.")
    if stop_token_ids is None:
        generation = folder / "generation_config.json"
        eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
        eos = config.get("eos_token_id") if eos is None else eos
        stop_token_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    outside = [token for token in stop_token_ids if not 0 <= token < spec.vocab_size]
    if outside:
        raise ModelError(f"stop token {outside[0]} is outside the vocabulary of {spec.vocab_size} tokens.")
    if mask_token_id in stop_token_ids:
        raise ModelError(f"token {mask_token_id} cannot be both the mask and a stop token.")
    return ModelInfo(family, spec, mask_token_id, tuple(stop_token_ids))


def check_settings(folder: str | Path, config: DecodeConfig) -> None:
    """Raises ModelError or ConfigError if the model cannot decode so; reads config.json alone, so it is fast."""
    _, family, spec = _read_config(Path(folder))
    family.rules(spec, config)
    graph_for(config)


MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "*.model")
"""What is fetched of a hub repository: never code, never pickles."""


def local_model_folder(name: str | Path, revision: str | None = None) -> Path:
    """The folder itself, or the hub id's files downloaded once. Raises ModelError if neither is to be had."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.exists() or folder.is_absolute() or str(name).startswith((".", "~")):
        raise ModelError(f"The model folder {name} does not exist.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=list(MODEL_FILES)))
    except Exception as e:  # network, authorisation, unknown repository: the library has a class for each
        raise ModelError(f"{name} is neither a folder nor a model that the hub gives: {_first_line(e)}") from e


def load_tokenizer(folder: str | Path) -> Any | None:
    """The folder's tokenizer, or None if it has none. Raises ModelError if its files cannot be read."""
    folder = Path(folder)
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return None
    # Imported here: it takes seconds, and a model without a tokenizer does not need it.
    from transformers import PreTrainedTokenizerFast

    try:
        config = _read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
        if (folder / "tokenizer.json").exists() and config.get("tokenizer_class") in (None, "PreTrainedTokenizerFast"):
            return PreTrainedTokenizerFast.from_pretrained(folder)
        from transformers import AutoTokenizer  # brings torch

        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as e:  # the library raises many kinds for a broken file
        raise ModelError(f"The tokenizer in {folder} cannot be read: {_first_line(e)}") from e


def load_model(folder: str | Path, info: ModelInfo, device: torch.device, dtype: torch.dtype) -> Model:
    """Reads the weights. Raises ModelError naming a missing, surplus or misshaped tensor or a broken file."""
    # Imported here: what else is read of a model's folder needs no torch, which takes seconds.
    import torch

    from specfold.model import LayerWeights, Model

    with ExitStack() as stack:
        tensors = _open_tensors(Path(folder), stack, "pt")
        shapes = expected_shapes(info.spec)
        names = info.family.tensor_names(info.spec)
        _check_tensors(tensors, {names[ours]: shape for ours, shape in shapes.items()}, info, names)

        def read(ours: str) -> torch.Tensor:
            return tensors[names[ours]].get_tensor(names[ours]).to(device=device, dtype=dtype)

        def layer(i: int) -> LayerWeights:
            def stacked(*parts: str) -> torch.Tensor:
                return torch.cat([read(f"{i}.{part}") for part in parts])

            return LayerWeights(
                attention_norm_E=read(f"{i}.attention_norm"),
                qkv_NE=stacked("q", "k", "v"),
                qkv_bias_N=stacked("q_bias", "k_bias", "v_bias") if info.spec.qkv_bias else None,
                output_EN=read(f"{i}.output"),
                ffn_norm_E=read(f"{i}.ffn_norm"),
                gate_up_2IE=stacked("gate", "up"),
                down_EI=read(f"{i}.down"),
            )

        embedding = read("embedding")
        head = embedding if info.spec.tied_head else read("head")
        layers = [layer(i) for i in range(info.spec.num_layers)]
        return Model(info.spec, embedding, layers, read("norm"), head)


def check_weights(folder: str | Path, info: ModelInfo) -> int:
    """Reads the weight files' headers only; the number of parameters. Raises ModelError as ``load_model`` does."""
    with ExitStack() as stack:
        names, shapes = info.family.tensor_names(info.spec), expected_shapes(info.spec)
        tensors = _open_tensors(Path(folder), stack, "numpy")
        _check_tensors(tensors, {names[ours]: shape for ours, shape in shapes.items()}, info, names)
    return sum(math.prod(shape) for shape in shapes.values())


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by our name."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, k, v = spec.qkv_sizes
    shapes: dict[str, tuple[int, ...]] = {"embedding": (spec.vocab_size, hidden), "norm": (hidden,)}
    if not spec.tied_head:
        shapes["head"] = (spec.vocab_size, hidden)
    layer = {
        "attention_norm": (hidden,),
        "q": (q, hidden),
        "k": (k, hidden),
        "v": (v, hidden),
        "output": (hidden, q),
        "ffn_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if spec.qkv_bias:
        layer |= {"q_bias": (q,), "k_bias": (k,), "v_bias": (v,)}
    return shapes | {f"{i}.{name}": shape for i in range(spec.num_layers) for name, shape in layer.items()}


def _open_tensors(folder: Path, stack: ExitStack, framework: str) -> dict[str, Any]:
    """Open safetensors handle of every tensor in the folder, single file or shards with an index.

    ``framework``: whose tensors they give; a file opened for ``pt`` imports torch.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index} has no weight_map.")
        files = sorted(set(weight_map.values()))
    else:
        files = ["model.safetensors"]
    tensors: dict[str, Any] = {}
    for name in files:
        path = folder / name
        if not path.is_file():
            raise ModelError(f"The weight file {path} is missing.")
        try:
            handle = stack.enter_context(safe_open(str(path), framework=framework))
        except (SafetensorError, OSError) as e:
            raise ModelError(f"The weight file {path} is damaged or cut short: {_first_line(e)}") from e
        tensors |= dict.fromkeys(handle.keys(), handle)
    return tensors


def _check_tensors(
    tensors: dict[str, Any], shapes: dict[str, tuple[int, ...]], info: ModelInfo, names: dict[str, str]
) -> None:
    missing = [name for name in shapes if name not in tensors]
    # Files of tied models may hold the head as well; it repeats the embedding.
    surplus = [name for name in tensors if name not in shapes and not (info.spec.tied_head and name == names["head"])]
    for what, found in (("lack", missing), ("hold the unexpected", surplus)):
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise ModelError(f"The weights {what} tensor {found[0]}{more}.")
    for name, shape in shapes.items():
        part = tensors[name].get_slice(name)
        if tuple(part.get_shape()) != shape:
            raise ModelError(f"Tensor {name} has shape {list(part.get_shape())}, the config asks for {list(shape)}.")
        if part.get_dtype() not in FLOAT_DTYPES:
            raise ModelError(
                f"Tensor {name} is of type {part.get_dtype()}; float32, bfloat16 and float16 are supported."
            )


def _read_config(folder: Path) -> tuple[dict[str, Any], Family, ModelSpec]:
    config = _read_json(folder / "config.json")
    family = family_of(config)
    try:
        return config, family, family.parse_config(config)
    except (TypeError, ZeroDivisionError, AttributeError) as e:
        raise ModelError(f"{folder / 'config.json'} has an entry of the wrong type: {e}.") from e


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{path.parent} is not a model folder: it has no {path.name}.") from None
    except (OSError, ValueError) as e:
        raise ModelError(f"{path} cannot be read: {_first_line(e)}") from e
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object.")
    return value


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".") + "."
