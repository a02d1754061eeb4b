"""Scores, their intervals, paired differences and costs, against numbers known from elsewhere."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cluster.evaluation.cost import covered_seconds
from cluster.evaluation.paired import paired_difference
from cluster.evaluation.records import Grade, Metric
from cluster.evaluation.scores import is_binary, question_scores, score_run

RIGHT = {"right": Metric("right", "right")}


def grades(values: list[bool], num_samples: int = 1) -> list[Grade]:
    return [Grade(str(i // num_samples), i % num_samples, v, {"right": v}) for i, v in enumerate(values)]


def test_a_share_has_wilsons_interval_and_the_standard_error_of_a_mean() -> None:
    score = score_run(RIGHT, grades([True] * 8 + [False] * 2), 1)["right"]
    assert score.value == 0.8
    assert (score.low, score.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Wilson's, 8 of 10
    assert score.stderr == pytest.approx(math.sqrt(0.8 * 0.2 / 9))


def test_samples_of_a_question_are_one_observation() -> None:
    """Ten questions, each with four samples that agree, say no more than ten questions do."""
    once = score_run(RIGHT, grades([True] * 5 + [False] * 5), 1)["right"]
    four = score_run(RIGHT, grades([True] * 20 + [False] * 20, 4), 4)
    assert four["right"].value == once.value == 0.5
    assert four["right"].stderr == pytest.approx(once.stderr)
    assert four["right"].high - four["right"].low > 0.4


def test_pass_at_k_is_unbiased() -> None:
    """Two questions with 1 and 3 right of 4: one minus the chance that k drawn ones are all wrong."""
    scores = score_run(RIGHT, grades([True, False, False, False, True, True, True, False], 4), 4)
    assert [name for name in scores if name.startswith("pass")] == ["pass@1", "pass@2", "pass@4"]
    assert scores["pass@1"].value == pytest.approx((1 / 4 + 3 / 4) / 2)
    assert scores["pass@2"].value == pytest.approx((1 - 3 / 6 + 1) / 2)
    assert scores["pass@4"].value == 1.0


def test_a_weighted_metric_is_the_mean_over_its_parts() -> None:
    """IFEval's instructions: one of two and three of three followed are four of five."""
    metric = Metric("inst", "inst")
    found = [
        Grade("a", 0, False, {"inst": 0.5}, weights={"inst": 2.0}),
        Grade("b", 0, True, {"inst": 1.0}, weights={"inst": 3.0}),
    ]
    assert not is_binary(metric, found, 1)
    assert score_run({"inst": metric}, found, 1)["inst"].value == pytest.approx(0.8)


def test_a_paired_difference_of_right_and_wrong_is_mcnemars() -> None:
    first = [1.0] * 70 + [0.0] * 30
    second = [1.0] * 60 + [0.0] * 10 + [1.0] * 2 + [0.0] * 28
    found = paired_difference(first, second, binary=True)
    assert (found.only_first, found.only_second, found.value) == (10, 2, pytest.approx(-0.08))
    assert found.p == pytest.approx(2 * sum(math.comb(12, k) for k in range(3)) / 2**12)
    # Agresti and Min's formula by hand: 11.5, 2.5 and n = 102 after the added halves.
    centre, spread = -8 / 102, math.sqrt(13 - 64 / 102) / 102
    assert (found.low, found.high) == pytest.approx((centre - 1.95996 * spread, centre + 1.95996 * spread), abs=1e-5)


def test_equal_answers_leave_an_interval_that_shrinks_with_the_number_of_questions() -> None:
    few, many = (paired_difference([1.0] * n, [1.0] * n, binary=True) for n in (16, 1319))
    assert few.p == many.p == 1.0
    assert few.value == many.value == 0.0
    assert 0.1 < few.high < 0.12
    assert 0.0014 < many.high < 0.0016


def test_means_of_samples_are_compared_by_permutation() -> None:
    rng = np.random.default_rng(1)
    first = rng.integers(0, 5, 60) / 4
    same = paired_difference(first, rng.permutation(first), binary=False)
    worse = paired_difference(first, np.maximum(first - 0.25 * rng.integers(0, 2, 60), 0), binary=False)
    assert same.p > 0.05
    assert same.low < 0 < same.high
    assert worse.p < 0.001
    assert worse.high < 0
    assert worse.only_first is None


def test_permutation_of_one_sample_each_is_mcnemars_test() -> None:
    first, second = [1.0] * 9 + [0.0] * 3, [0.0] * 7 + [1.0] * 5
    exact = paired_difference(first, second, binary=True)
    assert paired_difference(first, second, binary=False).p == pytest.approx(exact.p, abs=0.02)


def test_time_side_by_side_counts_once_and_pauses_not_at_all() -> None:
    assert covered_seconds([(0, 10), (2, 8), (9, 12), (100, 101)]) == 13
    assert covered_seconds([]) == 0


def test_scores_by_question_are_means_over_samples() -> None:
    assert question_scores(RIGHT["right"], grades([True, False, True, True], 2), 2) == [0.5, 1.0]
