"""``--compare``: variants as people write them, their folders, and mistakes that are one sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.config import JobConfig
from cluster.errors import UserError
from cluster.evaluation.variants import parse_variants, require_effect

CONFIG = JobConfig(delta=0.3)


def test_deltas_that_differ_little_are_two_variants() -> None:
    found = parse_variants("vanilla,specfold:0.1234561,specfold:0.1234562,specfold:1", JobConfig())
    assert [variant.label for variant in found[1:]] == ["specfold:0.1234561", "specfold:0.1234562", "specfold:1"]


def test_variants_have_labels_folders_and_settings() -> None:
    variants = parse_variants("vanilla, spiffy,specfold,specfold:0.10,specfold:-1", CONFIG)
    assert [v.label for v in variants] == ["vanilla", "spiffy", "specfold:0.3", "specfold:0.1", "specfold:-1"]
    assert [v.folder for v in variants] == ["vanilla", "spiffy", "specfold-0.3", "specfold-0.1", "specfold--1"]
    decoded = [v.of(CONFIG).decode for v in variants]
    assert [(d.mode, d.delta) for d in decoded[2:]] == [("specfold", 0.3), ("specfold", 0.1), ("specfold", -1.0)]
    assert decoded[0].mode == "vanilla"


def test_without_compare_there_is_the_mode_of_the_command() -> None:
    assert [v.folder for v in parse_variants(None, CONFIG)] == ["specfold-0.3"]
    assert [v.folder for v in parse_variants(None, JobConfig(mode="spiffy"))] == ["spiffy"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("vanilla,specfld:0.1", "--compare has the unknown mode 'specfld'. Did you mean specfold?"),
        (
            "vanilla,quick",
            "--compare has the unknown mode 'quick'. There are vanilla, spiffy, specfold, ar, linear_spec.",
        ),
        ("vanilla,vanilla:0.1", "--compare vanilla:0.1: only specfold folds, so only it takes a delta."),
        ("vanilla,specfold:x", "--compare cannot read 'specfold:x': 'x' is not a number."),
        ("vanilla,specfold:99", "--delta must be a number up to 10, not 99.0."),
        ("vanilla,specfold:", "--compare cannot read 'specfold:': a variant is a mode, then "),
        ("vanilla,,spiffy", "--compare cannot read '': a variant is a mode, then "),
        ("specfold:0.1,specfold:0.10", "--compare has specfold:0.1 twice."),
        ("vanilla,specfold@x", "--compare cannot read 'specfold@x': 'x' is not a number."),
        ("vanilla,specfold+cache", "--use-block-cache takes no drafts: give mode vanilla."),
        ("vanilla,vanilla@0.1+cache", "--use-block-cache and --delta-time are two ways to save work; give"),
        ("vanilla,linear_spec@0.1", "--delta-time goes with modes vanilla, spiffy and specfold: mode linear_spec does"),
        ("vanilla", "--compare takes at least two variants, such as vanilla,specfold:0.1."),
    ],
)
def test_a_mistake_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        parse_variants(text, CONFIG)
    assert str(error.value).startswith(sentence)
    assert error.value.exit_code == 2


def test_folding_in_time_and_the_sub_block_cache_are_variants() -> None:
    text = "vanilla,vanilla@0.1,specfold:0.1@0.05,spiffy@0.2,vanilla@-1,vanilla+cache"
    variants = parse_variants(text, CONFIG)
    assert [v.label for v in variants] == text.split(",")
    assert len({v.folder for v in variants}) == len(variants)
    decoded = [v.of(CONFIG).decode for v in variants]
    assert [d.delta_time for d in decoded] == [None, 0.1, 0.05, 0.2, -1.0, None]
    assert [d.use_block_cache for d in decoded] == [False] * 5 + [True]


def test_the_commands_own_folding_in_time_stands_in_the_labels() -> None:
    config = JobConfig(delta_time=0.3, refresh_every=4)
    variants = parse_variants("vanilla@-1,vanilla,specfold:0.1@0.2", config)
    assert [v.label for v in variants] == ["vanilla@-1", "vanilla@0.3", "specfold:0.1@0.2"]
    assert [v.of(config).decode.time_delta for v in variants] == [-1.0, 0.3, 0.2]
    assert [v.label for v in parse_variants(None, config)] == ["specfold:0.1@0.3"]
    assert [v.label for v in parse_variants(None, JobConfig(mode="vanilla", use_block_cache=True))] == ["vanilla+cache"]


@pytest.mark.parametrize(
    ("text", "given", "sentence"),
    [
        ("vanilla,specfold", {"mode"}, "--mode has no effect beside --compare: every variant begins with its mode."),
        ("vanilla,vanilla+cache", {"use_block_cache", "mode"}, "--use-block-cache has no effect beside --compare: "),
        ("vanilla,specfold:0.1", {"delta"}, "--delta has no effect beside --compare: there is no specfold without"),
        ("vanilla,spiffy", {"delta"}, "--delta has no effect beside --compare: there is no specfold without"),
        ("vanilla@-1,spiffy@0.1", {"delta_time"}, "--delta-time has no effect beside --compare: every variant has"),
    ],
)
def test_a_flag_that_the_variants_decide_is_refused(text: str, given: set[str], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        require_effect(text, given)
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "given"),
    [
        (None, {"mode", "delta", "use_block_cache"}),
        ("vanilla,specfold:0.1,specfold", {"delta", "drafts"}),
        ("vanilla,vanilla@0.1", {"delta_time"}),
        ("vanilla@-1,vanilla@0.1", {"delta_time", "refresh_every"}),
    ],
)
def test_a_flag_that_a_variant_takes_is_kept(text: str | None, given: set[str]) -> None:
    require_effect(text, given)
    # Each has an effect, or as --delta-time beside --refresh-every is needed by one that has.
    other: dict[str, Any] = {"mode": "spiffy", "delta": 0.7, "delta_time": 0.7, "drafts": 2, "refresh_every": 3}
    base = JobConfig(delta=0.3, delta_time=0.4)
    settled = [variant.of(base) for variant in parse_variants(text, base)]
    for name in given & other.keys() - ({"delta_time"} if "refresh_every" in given else set()):
        config = replace(base, **{name: other[name]})
        assert [variant.of(config) for variant in parse_variants(text, config)] != settled, name
