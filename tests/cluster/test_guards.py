"""Which outputs are flagged, and which are not."""

from __future__ import annotations

import random
import time
from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.worker.guards import FLAGS, QUARANTINED, Specials, flags_of, has_character_run, has_loop
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
        (loop(65, 600), False),  # the period is too long: verses and tables may repeat like this
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


def test_guards_cost_microseconds() -> None:
    random.seed(0)
    ids = [random.choice(WORDS[:25]) for _ in range(512)]
    before = time.perf_counter()
    for _ in range(20):
        flags(ids, "some words " * 200)
    assert (time.perf_counter() - before) / 20 < 0.01  # measured: 0.0002; an engine takes 0.1 s or more for such a row
