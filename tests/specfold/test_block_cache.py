"""Fast-dLLM-v2's sub-block cache: the official tokens and the official work."""

from __future__ import annotations

from typing import Any

import pytest

from specfold import ConfigError, DecodeConfig
from tests.specfold import goldens
from tests.specfold.random_models import random_engine

FAST = [name for name in goldens.CASES if name.startswith("fast_dllm")]


@pytest.mark.parametrize("name", FAST)
def test_the_sub_block_cache_gives_the_official_tokens(name: str) -> None:
    """And its forwards compute what the official ones do: a whole block, or one sub-block of it."""
    case = goldens.load_case(name)
    entries = case.entries("generate_block_cache")
    got = goldens.decode_together(case, entries, batch_size=3, use_block_cache=True)
    layers = case.engine.info.spec.num_layers
    for entry in entries:
        _, stop = goldens.settings(entry)
        completion = got[entry["name"]]
        ids, reason = goldens.expected_ids(entry, stop)
        assert (completion.token_ids, completion.finish_reason) == (ids, reason), entry["name"]
        assert ids != goldens_without_cache(entry, stop), "the case tells the cache from plain decoding"
        stats, partial = completion.stats, sum(entry["step_partial"])
        assert stats.denoise_forwards == entry["nfe"]["denoise"]
        whole = stats.num_forwards - partial
        want = layers * (whole * entry["block_size"] + partial * entry["small_block_size"])
        assert stats.recomputed_qkv_rows == stats.recomputed_ffn_rows == want


def goldens_without_cache(entry: dict[str, Any], stop: int) -> list[int]:
    ids = entry["same_prompt_without_block_cache_output_ids"][len(entry["prompt_ids"]) :]
    return ids[:-1] if ids[-1] == stop else ids


def test_the_sub_block_cache_exists_for_fast_dllm_only() -> None:
    config = DecodeConfig(mode="vanilla", use_block_cache=True)
    with pytest.raises(ConfigError, match=r"^use_block_cache exists for Fast-dLLM-v2 only, this model is nemotron"):
        random_engine("nemotron_labs_diffusion").generate([[1]], config)
