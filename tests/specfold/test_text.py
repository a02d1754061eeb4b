"""Stop strings: where text and tokens end, and that nothing else changes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specfold import ConfigError, DecodeConfig, Engine, Request, reference_models
from specfold.checkpoint import load_tokenizer
from specfold.text import cut_at_stop, decode_text
from tests.specfold.random_models import random_engine

PROMPT = "Mia has 12 apples. She buys 5 more. How many apples does Mia have now?"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(reference_models.path("fast_dllm_v2"))


def prompt_ids(engine: Engine) -> list[int]:
    turn = [{"role": "user", "content": PROMPT}]
    text = engine.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return engine.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("mode", ["vanilla", "specfold"])
def test_a_stop_string_cuts_the_text_and_changes_no_other_token(engine: Engine, mode: str) -> None:
    ids = prompt_ids(engine)
    config = DecodeConfig(mode=mode, max_new_tokens=96)
    full = engine.generate([ids], config)[0]
    assert full.finish_reason == "stop"
    words = full.text.split()
    for stop in (" ".join(words[2:4]), full.text[:3], full.text[-3:], words[len(words) // 2]):
        cut = next(engine.stream([Request(ids, stop=("never in it", stop))], config))
        assert cut.finish_reason == "stop"
        assert cut.text == full.text[: full.text.find(stop)]
        assert cut.token_ids == full.token_ids[: len(cut.token_ids)]
        assert len(decode_text(engine.tokenizer, cut.token_ids)) >= len(cut.text)
        if cut.token_ids:
            assert len(decode_text(engine.tokenizer, cut.token_ids[:-1])) < len(cut.text)
    absent = next(engine.stream([Request(ids, stop=("never in it",))], config))
    assert (absent.text, absent.token_ids) == (full.text, full.token_ids)


def test_a_stop_string_saves_the_rest_of_the_row(engine: Engine) -> None:
    ids = prompt_ids(engine)
    config = DecodeConfig(mode="vanilla", max_new_tokens=96)
    full = engine.generate([ids], config)[0]
    cut = next(engine.stream([Request(ids, stop=(full.text[:4],))], config))
    assert cut.stats.num_forwards < full.stats.num_forwards


@given(st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=3))
@settings(max_examples=60)
def test_any_text_and_any_stop_string(text: str, stop: str) -> None:
    tokenizer = bundled_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = decode_text(tokenizer, ids)
    kept, shown, cut = cut_at_stop(tokenizer, ids, (stop,))
    assert cut == (stop in whole)
    assert shown == (whole[: whole.find(stop)] if cut else whole)
    assert stop not in shown
    assert kept == ids[: len(kept)]


@cache
def bundled_tokenizer() -> Any:
    return load_tokenizer(reference_models.path("fast_dllm_v2"))


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
        random_engine("fast_dllm_v2").generate([[1]], DecodeConfig(stop=("x",)))
    assert decode_text(None, [1, 2]) == ""
