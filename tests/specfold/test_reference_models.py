"""The bundled models: shape, tokenizer, prompts, and that they answer what they were trained for."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from evaluate_reference_models import MAX_NEW_TOKENS, chat_ids, evaluate
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_training import decode
from reference_training.model import ReferenceModel
from reference_training.task import heldout_problems, is_heldout, training_problems
from reference_training.tokenizer import MASK, PAD, SPECIALS, START, STOP, chat_prompt
from safetensors.torch import load_file
from transformers import AutoTokenizer

from jobs import __file__ as jobs_file
from specfold import DecodeConfig, Engine, reference_models
from specfold.checkpoint import load_tokenizer

SLICE = 12
TOKENIZER = load_tokenizer(reference_models.path("fast_dllm_v2"))
TEXTS = st.lists(st.one_of(st.text(max_size=20), st.sampled_from([*SPECIALS, " 12  3", "\r\n\t", "e\u0301", " the"])))


@pytest.fixture(scope="module", params=reference_models.NAMES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine.from_pretrained(reference_models.path(request.param))


@pytest.mark.parametrize("name", reference_models.NAMES)
def test_a_model_is_small_enough_for_the_repository(name: str) -> None:
    files = {path.name: path.stat().st_size for path in reference_models.path(name).iterdir()}
    assert set(files) == {
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= 8_000_000


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no bundled model is called 'llama'"):
        reference_models.path("llama")


def test_special_tokens_and_context(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    assert [tokenizer.convert_tokens_to_ids(token) for token in (PAD, START, STOP, MASK)] == [0, 1, 2, 3]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    assert (engine.stop_token_ids, engine.mask_token_id) == ((2,), 3)
    assert engine.context_length >= 4096
    assert engine.vocab_size == len(tokenizer)


@given(st.one_of(TEXTS.map("".join), st.binary().map(lambda data: data.decode("latin-1"))))
@settings(max_examples=200)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@given(st.integers(0, 10**12))
@settings(max_examples=50)
def test_every_digit_is_one_token(number: int) -> None:
    assert TOKENIZER.tokenize(str(number)) == list(str(number))


@pytest.mark.parametrize("name", reference_models.NAMES)
def test_transformers_reads_the_tokenizer_as_it_is(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reference_models.path(name))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == chat_prompt("2 + 2?", "Be brief.")
    assert tokenizer.encode(text, add_special_tokens=False) == TOKENIZER.encode(text, add_special_tokens=False)


def test_bundled_prompts_are_held_out_of_training() -> None:
    with open(jobs_file.replace("__init__.py", "prompts.jsonl")) as file:
        rows = [json.loads(line) for line in file]
    assert rows == [{"prompt": p.question, "answer": p.answer} for p in heldout_problems(96)]
    assert all(is_heldout(row["prompt"]) for row in rows)
    trained_on = {p.question for p in islice(training_problems(seed=1), 20_000)}
    assert not any(map(is_heldout, trained_on))


def test_answers_are_right_in_fewer_forwards_with_most_draft_rows_folded(engine: Engine) -> None:
    def run(mode: str) -> dict:
        return evaluate(engine, DecodeConfig(mode=mode, max_new_tokens=MAX_NEW_TOKENS), SLICE)

    vanilla, folded = run("vanilla"), run("specfold")
    assert vanilla["accuracy"] >= 0.9
    assert folded["accuracy"] >= vanilla["accuracy"] - 1 / SLICE  # the full 200 stay within 2 points
    assert folded["forwards"] <= 0.55 * vanilla["forwards"]
    assert folded["fold_rate"] >= 0.6
    if engine.family == "nemotron_labs_diffusion":
        assert run("linear_spec")["accuracy"] >= 0.9


def test_the_engine_agrees_with_the_decoder_of_the_training(engine: Engine) -> None:
    folder = reference_models.path(engine.family)
    model = ReferenceModel(json.loads((folder / "config.json").read_text()))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    prompts = [chat_ids(engine, p.question) for p in heldout_problems(2)]
    expected, _ = decode.decode(model.float(), engine.family, prompts, 48, engine.mask_token_id, 2)
    outputs = engine.generate(prompts, DecodeConfig(mode="vanilla", max_new_tokens=48))
    assert [o.token_ids for o in outputs] == expected
