"""Model folders: formats that load, and one sentence for each that does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specfold import ConfigError, DecodeConfig, Engine, ModelError
from specfold.checkpoint import read_model_info
from tests.specfold.goldens import GOLDEN, load_case

pytestmark = pytest.mark.usefixtures("shared")
UNTIED, TIED, NEMOTRON = "fast_dllm_v2/a_base", "fast_dllm_v2/b_tied", "nemotron_labs_diffusion/a_base"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_case(UNTIED, tmp_path / "model")


def copy_case(name: str, to: Path) -> Path:
    to.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name / file, to / file)
        (to / file).chmod(0o644)
    return to


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def load(folder: Path, **kwargs: Any) -> Engine:
    return Engine.from_pretrained(folder, **{"mask_token_id": 511, **kwargs})


def weights(engine: Engine) -> list[torch.Tensor]:
    model = engine.model
    return [model.embedding_VE, model.head_VE, model.layers[-1].qkv_NE, model.layers[-1].down_EI]


@pytest.mark.parametrize("name", [UNTIED, TIED, NEMOTRON])
def test_shards_load_like_one_file(tmp_path: Path, name: str) -> None:
    folder = copy_case(name, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, part in shards.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {n: file for file, part in shards.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    mask = load_case(name).engine.mask_token_id
    sharded = load(folder, mask_token_id=mask)
    for got, want in zip(weights(sharded), weights(load_case(name).engine), strict=True):
        assert torch.equal(got, want)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors is missing"):
        load(folder, mask_token_id=mask)


def test_bfloat16_files_and_engines(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
    as_float = load(folder)
    assert all(w.dtype == torch.float32 for w in weights(as_float))
    as_bfloat = load(folder, dtype="bfloat16")
    assert all(w.dtype == torch.bfloat16 for w in weights(as_bfloat))
    config = DecodeConfig(max_new_tokens=40)
    assert as_bfloat.generate([[1, 2, 3]], config)[0].token_ids
    assert as_float.generate([[1, 2, 3]], config)[0].token_ids


def test_a_tied_file_may_repeat_the_head(tmp_path: Path) -> None:
    folder = copy_case(TIED, tmp_path / "model")
    edit_tensors(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    engine = load(folder, mask_token_id=380)
    assert engine.model.head_VE is engine.model.embedding_VE


def drop(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (drop("model.norm.weight"), r"The weights lack tensor model\.norm\.weight\."),
        (
            lambda tensors: [tensors.pop(f"model.layers.{i}.mlp.up_proj.weight") for i in (1, 2)],
            r"The weights lack tensor model\.layers\.1\.mlp\.up_proj\.weight and 1 more\.",
        ),
        (
            lambda tensors: tensors.update({"model.extra": torch.ones(1)}),
            r"The weights hold the unexpected tensor model\.extra\.",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}),
            r"Tensor model\.norm\.weight has shape \[63\], the config asks for \[64\]\.",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            r"Tensor model\.norm\.weight is of type I8; float32, bfloat16 and float16 are supported\.",
        ),
    ],
)
def test_a_wrong_tensor_is_named(folder: Path, edit: Any, sentence: str) -> None:
    edit_tensors(folder, edit)
    with pytest.raises(ModelError, match=sentence):
        load(folder)


def test_damaged_folders(folder: Path, tmp_path: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 7, 500, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut short"):
            load(folder)
    file.unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"is not a model folder: it has no config\.json"):
        load(folder)
    with pytest.raises(ModelError, match="does not exist"):
        load(tmp_path / "nothing")


def test_wrong_configs(folder: Path) -> None:
    edit_config(folder, model_type="llama", architectures=["LlamaForCausalLM"])
    with pytest.raises(ModelError, match=r"model_type 'llama'; supported are Fast_dLLM_Qwen, nemotron_labs_diffusion"):
        load(folder)
    edit_config(folder, model_type="Fast_dLLM_Qwen", hidden_size=None)
    with pytest.raises(ModelError, match=r"config\.json has no entry 'hidden_size'"):
        load(folder)


def test_mask_and_stop_ids(folder: Path) -> None:
    with pytest.raises(ModelError, match="does not say which token is the mask: give mask_token_id"):
        load(folder, mask_token_id=None)
    with pytest.raises(ModelError, match="mask_token_id 512 is outside the vocabulary of 512 tokens"):
        load(folder, mask_token_id=512)
    with pytest.raises(ModelError, match="token 510 cannot be both the mask and a stop token"):
        load(folder, mask_token_id=510)
    with pytest.raises(ModelError, match="stop token 512 is outside the vocabulary of 512 tokens"):
        load(folder, stop_token_ids=[3, 512])
    assert load(folder).stop_token_ids == (510,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 510]}')
    assert load(folder).stop_token_ids == (3, 510)
    assert load(folder, stop_token_ids=[9]).stop_token_ids == (9,)
    assert read_model_info(GOLDEN / NEMOTRON).mask_token_id == 100


def test_settings_that_a_model_cannot_do() -> None:
    fast, nemotron = load_case(UNTIED).engine, load_case(NEMOTRON).engine
    with pytest.raises(ConfigError, match="mode ar exists for Nemotron-Labs-Diffusion only"):
        fast.generate([[1]], DecodeConfig(mode="ar"))
    with pytest.raises(ConfigError, match="small_block_size 5 does not divide the block size 32"):
        fast.generate([[1]], DecodeConfig(small_block_size=5))
    with pytest.raises(ConfigError, match="mode linear_spec needs causal_context"):
        nemotron.generate([[1]], DecodeConfig(mode="linear_spec", causal_context=False))
    with pytest.raises(ConfigError, match="device 'cuda' was asked for, but torch sees no CUDA device"):
        Engine.from_pretrained(GOLDEN / NEMOTRON, device="cuda")
