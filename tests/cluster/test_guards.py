"""Which outputs are flagged, and which are not."""

from __future__ import annotations

import json
import random
import time
from itertools import cycle, islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.worker.guards import FLAGS, QUARANTINED, Specials, flags_of
from cluster.worker.loops import has_character_run, has_counting_loop, has_loop
from specfold import Completion, Engine, reference_models
from specfold.checkpoint import load_tokenizer

MASK, PAD, END = 9, 1, 2
SPECIALS = Specials(MASK, frozenset({PAD, END}))
WORDS = list(range(100, 140))
"""Forty tokens of which no two are equal."""


def flags(ids: list[int], text: str = "words", reason: str = "stop", specials: Specials = SPECIALS) -> list[str]:
    return flags_of(Completion(0, 0, ids, text, reason), specials)


def loop(period: int, length: int) -> list[int]:
    return list(islice(cycle(range(1000, 1000 + period)), length))


@pytest.mark.parametrize(
    ("ids", "text", "reason", "expected"),
    [
        (WORDS, "words", "stop", []),
        (WORDS, "words", "length", ["no_stop"]),
        ([], "", "stop", ["empty"]),
        (WORDS, " \n", "stop", ["empty"]),
        ([*WORDS, MASK], "words", "stop", ["mask_left"]),
        ([*WORDS, *[PAD] * 7], "words", "stop", []),
        ([*WORDS, *[PAD] * 8, *WORDS], "words", "stop", ["special_flood"]),
        ([100, PAD, 101, END] * 2 + [PAD, 102, END, 103, PAD, 104, END, 105], "words", "stop", ["special_flood"]),
        ([5] * 300, "a" * 300, "length", ["repetition", "no_stop"]),
        ([PAD] * 64, "", "length", ["empty", "special_flood", "repetition", "no_stop"]),
        ([9] * 3, "x", "error", []),
    ],
)
def test_each_fault_has_its_flag(ids: list[int], text: str, reason: str, expected: list[str]) -> None:
    assert flags(ids, text, reason) == expected
    assert set(expected) <= set(FLAGS)


def test_a_model_without_a_tokenizer_has_no_text_to_miss() -> None:
    specials = Specials(MASK, has_text=False)
    assert flags(WORDS, "", specials=specials) == []
    assert flags([], "", specials=specials) == ["empty"]


def test_a_cut_output_alone_is_not_quarantined() -> None:
    assert frozenset(FLAGS) - {"no_stop"} == QUARANTINED


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (loop(1, 24), True),
        (loop(1, 23), False),  # too short to call it a loop
        (loop(6, 24), True),
        (loop(7, 27), False),  # fewer than four repeats
        (loop(64, 256), True),
        (loop(65, 190), False),  # a long passage twice: verses and tables may repeat like this
        (loop(65, 195), True),
        (list(range(900)) + loop(300, 900), True),
        (list(range(900)) + loop(300, 1000)[:-50], True),  # cut in the middle of the passage
        (list(range(900)) + loop(200, 600) + list(range(500, 900)), False),  # it went on to something else
        (WORDS + loop(5, 64) + WORDS * 2, True),
        (list(range(300)) + loop(5, 63), False),  # a short loop in a long output
        (list(range(300)) + loop(5, 64) + list(range(500, 800)), True),
        ([], False),
    ],
)
def test_loops_are_found_by_length_and_repeats(ids: list[int], found: bool) -> None:
    assert has_loop(ids) is found


@given(st.lists(st.integers(0, 5), min_size=1, max_size=64), st.lists(st.integers(0, 99)), st.lists(st.integers(0, 99)))
def test_a_long_loop_is_found_wherever_it_stands(part: list[int], before: list[int], after: list[int]) -> None:
    repeats = max(4, -(-64 // len(part)))
    assert has_loop(before + part * repeats + after)


PROSE = "Tom has some pens and buys a few more. How many pens does he have now? We add them. " + " ".join(
    f"word{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(120)
)


@pytest.mark.parametrize(
    ("line", "count", "found"),
    [
        ("Step {i}: add the numbers.\n", 12, True),
        ("Step {i}: add the numbers.\n", 5, False),  # too few
        ("We have {a} apples and eat 3, so {b} are left. ", 8, True),
        ("    x[{i}] = compute(value, {i})\n", 12, True),
        ("{i} + 1 = {a}\n", 40, False),  # a table of numbers
        ("Row {i}: {square} apples and pears\n", 20, False),  # its numbers say something
        ("Chapter {i}: the {word} comes home again.\n", 20, False),
    ],
)
@pytest.mark.parametrize("head", ["", PROSE])
def test_loops_with_a_counter_are_found(line: str, count: int, found: bool, head: str) -> None:
    loop = "".join(
        line.format(i=i, a=3 * i + 7, b=1000 - 5 * i, square=i * i, word=f"w{chr(97 + i)}") for i in range(3, 3 + count)
    )
    assert has_counting_loop(head + loop) is found
    assert has_counting_loop(head + loop + PROSE * 3) is False  # a small part, and the output went on
    assert (flags(WORDS, head + loop) == ["repetition"]) is found


@given(st.text("ab 12.\n", max_size=400))
def test_any_text_can_be_searched_for_counting_loops(text: str) -> None:
    assert has_counting_loop(text) in (True, False)


@given(st.integers(0, 300), st.integers(0, 300), st.sampled_from("a- \n"), st.integers(100, 160))
def test_one_character_over_and_over(before: int, after: int, character: str, length: int) -> None:
    text = "xy" * before + character * length + "xy" * after
    assert has_character_run(text) is (length >= 128)


TEXTS = [
    "| a | b |\n" + "|---|---|\n" + "".join(f"| {i} | {i * i} |\n" for i in range(12)),
    "for i in range(10):\n    for j in range(10):\n        print(i, j)\n        if i == j:\n            break\n",
    "She sells sea shells by the sea shore. The shells she sells are sea shells, I'm sure. " * 2,
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20",
    "Ha ha ha ha! Very, very, very, very good.",
]


@pytest.mark.parametrize("text", TEXTS)
def test_ordinary_texts_are_not_flagged(text: str) -> None:
    tokenizer = load_tokenizer(reference_models.path("fast_dllm_v2"))
    assert flags(tokenizer(text, add_special_tokens=False)["input_ids"], text) == []


@pytest.mark.parametrize("name", reference_models.NAMES)
def test_specials_are_read_off_the_model(name: str) -> None:
    tokenizer = load_tokenizer(reference_models.path(name))
    engine = Engine.from_pretrained(reference_models.path(name))
    specials = Specials.of(tokenizer, engine.mask_token_id, engine.stop_token_ids)
    assert specials.has_text
    assert set(engine.stop_token_ids) <= specials.special
    assert engine.mask_token_id not in specials.special
    assert flags([*engine.stop_token_ids] * 20, "x", specials=specials)[0] == "special_flood"


def answers(shared: Path) -> list[str]:
    """Texts that people and a good model wrote, a sixth of those in the log."""
    lines = [json.loads(line) for line in (shared / "data/gsm8k/test.jsonl").open()]
    texts = [line["answer"] for line in lines]
    for line in (shared / "data/mt_bench/reference_answer_gpt-4.jsonl").open():
        texts += [turn for choice in json.loads(line)["choices"] for turn in choice["turns"]]
    for line in (shared / "data/humaneval/HumanEval.jsonl").open():
        texts += [json.loads(line)[name] for name in ("prompt", "canonical_solution")]
    return texts


def test_what_people_wrote_is_no_loop(shared: Path) -> None:
    tokenizer = load_tokenizer(shared / "data/qwen2.5_tokenizer")
    texts = answers(shared)
    assert len(texts) > 1_600
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    specials = Specials.of(tokenizer, mask=151_665, stops=())
    flagged = [text for text, tokens in zip(texts, ids, strict=True) if flags(tokens, text, specials=specials)]
    assert flagged == []


def test_guards_cost_microseconds() -> None:
    random.seed(0)
    ids = [random.choice(WORDS[:25]) for _ in range(512)]
    before = time.process_time()
    for _ in range(20):
        flags(ids, "some words " * 200)
    assert (time.process_time() - before) / 20 < 0.01  # measured: 0.0002; an engine takes 0.1 s or more for such a row
