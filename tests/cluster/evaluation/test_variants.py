"""``--compare``: variants as people write them, their folders, and mistakes that are one sentence."""

from __future__ import annotations

import pytest

from cluster.config import JobConfig
from cluster.errors import UserError
from cluster.evaluation.variants import parse_variants

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
        ("vanilla", "--compare takes at least two variants, such as vanilla,specfold:0.1."),
    ],
)
def test_a_mistake_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        parse_variants(text, CONFIG)
    assert str(error.value).startswith(sentence)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        (
            "vanilla,specfold:0.1@0.05",
            "delta_time",
            "specfold:0.1@0.05: this version of the engine does not have folding",
        ),
        (
            "vanilla,vanilla+cache",
            "use_block_cache",
            "vanilla+cache: this version of the engine does not have the sub-",
        ),
    ],
)
def test_what_the_engine_does_not_have_is_refused_until_it_has_it(text: str, name: str, sentence: str) -> None:
    if hasattr(CONFIG, name):
        assert getattr(parse_variants(text, CONFIG)[1].of(CONFIG), name)
        return
    with pytest.raises(UserError, match="^--compare " + sentence.replace("+", r"\+")):
        parse_variants(text, CONFIG)
