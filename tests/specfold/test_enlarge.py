"""An enlarged model decodes as the original does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specfold import DecodeConfig, Engine
from specfold.enlarge import Growth, enlarge
from tests.specfold.random_models import FAMILY_NAMES, MASK, random_engine


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"head_dim_times": 2, "num_heads": 12, "num_kv_heads": 3},
    ],
)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_tokens_acceptance_and_folding_stay(family: str, more: dict[str, int]) -> None:
    small = random_engine(family, 1)
    model = enlarge(small.model, Growth(hidden_times=3, ffn_times=2, extra_layers=1, **more), MASK)
    large = Engine(model, replace(small.info, spec=model.spec), None)
    assert large.model.layers[0].gate_up_2IE.shape == (2 * 48 * 2, 32 * 3)
    config = DecodeConfig(mode="specfold", delta=0.2, drafts=4, max_new_tokens=30)
    prompts = [[1, 2, 3], [4] * 20]
    for got, want in zip(large.generate(prompts, config), small.generate(prompts, config), strict=True):
        assert got.token_ids == want.token_ids
        assert got.stats.accepted_by_depth == want.stats.accepted_by_depth
        assert got.stats.folded_qkv[:2] == want.stats.folded_qkv


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_repeated_vocabulary_chooses_the_same_tokens(family: str) -> None:
    small = random_engine(family, 1, sharpness=12.0)
    model = enlarge(small.model, Growth(vocab_times=3), MASK)
    large = Engine(model, replace(small.info, spec=model.spec), None)
    config = DecodeConfig(mode="spiffy", drafts=3, max_new_tokens=24)
    prompts = [[1, 2, 3], [4] * 20]
    assert [c.token_ids for c in large.generate(prompts, config)] == [
        c.token_ids for c in small.generate(prompts, config)
    ]
