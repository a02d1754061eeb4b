"""Estimates from right and wrong answers, and how sure they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

_RESAMPLES = 9_999


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that at least one of ``k`` samples, drawn without replacement from ``num_samples``, is correct.

    Unbiased (Chen et al. 2021, Evaluating Large Language Models Trained on Code, section 2.1). Raises ``ValueError`` if
    ``k`` samples cannot be drawn.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} correct among {num_samples} samples has no meaning.")
    return 1.0 - float(stats.hypergeom.pmf(0, num_samples, num_correct, k))


def wilson_interval(num_correct: int, num_total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share."""
    return _share_interval(num_correct, num_total, confidence, "wilson")


def exact_interval(num_correct: int, num_total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper and Pearson's interval of a share: never covers less than ``confidence``, and is wider for it."""
    return _share_interval(num_correct, num_total, confidence, "exact")


def bootstrap_interval(
    values: Sequence[float] | np.ndarray,
    weights: Sequence[float] | np.ndarray | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of a weighted mean; ``values`` and ``weights``: one a question.

    All samples of a question go into one value, since they are not independent. The same seed gives the same interval.
    """
    values_Q = np.asarray(values, float)
    weights_Q = np.ones_like(values_Q) if weights is None else np.asarray(weights, float)
    if not values_Q.size or values_Q.shape != weights_Q.shape or weights_Q.sum() <= 0:
        raise ValueError("A bootstrap interval needs at least one value, and a weight for each.")
    if values_Q.size == 1 or np.ptp(values_Q) == 0:
        return float(values_Q[0]), float(values_Q[0])

    def mean(values_RQ: np.ndarray, weights_RQ: np.ndarray, axis: int = -1) -> Any:
        return (values_RQ * weights_RQ).sum(axis) / weights_RQ.sum(axis)

    found = stats.bootstrap(
        (values_Q, weights_Q), mean, paired=True, vectorized=True, n_resamples=_RESAMPLES, batch=500,
        confidence_level=confidence, method="percentile", rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return float(found.low), float(found.high)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Two-sided exact McNemar test: how likely so uneven a split of the questions that just one of two answers right,
    if both are equally good (McNemar 1947)."""
    if only_first + only_second == 0:
        return 1.0
    return float(stats.binomtest(only_first, only_first + only_second, 0.5).pvalue)


def _share_interval(num_correct: int, num_total: int, confidence: float, method: Any) -> tuple[float, float]:
    found = stats.binomtest(num_correct, num_total).proportion_ci(confidence, method)
    return float(found.low), float(found.high)
