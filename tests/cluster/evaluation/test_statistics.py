"""Estimates and intervals, against enumeration, published numbers and simulation."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from cluster.evaluation.statistics import bootstrap_interval, exact_interval, mcnemar_p, pass_at_k, wilson_interval


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (5, 0), (5, 2), (6, 5), (7, 7)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n: int, c: int) -> None:
    samples = [index < c for index in range(n)]
    for k in range(1, n + 1):
        subsets = list(combinations(samples, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_unbiased() -> None:
    rng = np.random.default_rng(0)
    chance = 0.2
    counts = np.bincount(rng.binomial(10, chance, 20_000), minlength=11)
    mean = np.average([pass_at_k(10, count, 3) for count in range(11)], weights=counts)
    assert mean == pytest.approx(1 - (1 - chance) ** 3, abs=0.01)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 4, 1), (3, 1, 0)])
def test_pass_at_k_of_nothing_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="has no meaning"):
        pass_at_k(n, c, k)


def test_intervals_of_a_share_are_the_published_ones() -> None:
    # 81 of 263 is the worked example of Newcombe 1998 (Two-sided confidence intervals for the single proportion).
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert exact_interval(81, 263) == pytest.approx((0.2527, 0.3676), abs=5e-5)
    low, high = wilson_interval(0, 20)
    assert low == 0
    assert high == pytest.approx(0.1611, abs=5e-5)


def test_mcnemar_is_an_exact_coin_toss() -> None:
    assert mcnemar_p(0, 0) == 1.0
    assert mcnemar_p(5, 5) == 1.0
    assert mcnemar_p(1, 9) == mcnemar_p(9, 1) == pytest.approx(2 * (1 + 10) / 2**10)


def test_the_bootstrap_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for seed in range(30):
        low, high = bootstrap_interval(rng.normal(0.5, 0.2, 80), seed=seed)
        covered += low <= 0.5 <= high
    assert covered >= 24  # of 30; with 95% each, fewer has a chance of one in a thousand


def test_the_bootstrap_weighs_and_repeats() -> None:
    values, weights = [0.0, 1.0, 0.5, 1.0], [1.0, 3.0, 2.0, 1.0]
    assert bootstrap_interval(values, weights) == bootstrap_interval(values, weights)
    heavy = bootstrap_interval([0.0, 1.0] * 20, [1.0, 99.0] * 20)
    light = bootstrap_interval([0.0, 1.0] * 20)
    assert heavy[0] > light[1]
    assert bootstrap_interval([1.0, 1.0]) == (1.0, 1.0)
