"""Two sets of answers to the same questions: by how much do they differ, and could that be chance?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from cluster.evaluation.statistics import mcnemar_p

CONFIDENCE = 0.95
_FLIPS = 9_999


@dataclass(frozen=True)
class Difference:
    """How much better the second set is: the difference of the two means, its interval, and a p value."""

    value: float
    low: float
    high: float
    p: float
    test: str
    only_first: int | None = None
    """Questions that only the first answers right; None where there are several samples a question."""
    only_second: int | None = None


def paired_difference(first: Sequence[float], second: Sequence[float], *, binary: bool) -> Difference:
    """Compare scores per question. ``binary``: every score is 0 or 1.

    Binary: exact McNemar test, and the interval of Agresti and Min (2005, Simple improved confidence intervals for
    comparing matched proportions): a half added to each cell of the table, which leaves the interval a width even where
    no question differs. Otherwise (means over several samples): a paired permutation test, which flips the signs of the
    questions' differences and is McNemar's test where these are 1 and -1, and Student's interval of their mean.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError("Two sets of answers to compare must have the same length, and it must not be 0.")
    changes = np.asarray(second, float) - np.asarray(first, float)
    value = float(changes.mean())
    if binary:
        gained, lost = int((changes > 0).sum()), int((changes < 0).sum())
        low, high = _matched_interval(lost, gained, len(changes))
        return Difference(value, low, high, float(mcnemar_p(lost, gained)), "exact McNemar", lost, gained)
    low, high = _mean_interval(changes)
    return Difference(value, low, high, _sign_flip_p(changes), "paired permutation")


def _matched_interval(lost: int, gained: int, total: int) -> tuple[float, float]:
    size = total + 2
    middle = (gained - lost) / size
    spread = np.sqrt((gained + lost + 1) - (gained - lost) ** 2 / size) / size
    reach = float(stats.norm.ppf(0.5 + CONFIDENCE / 2) * spread)
    return max(middle - reach, -1.0), min(middle + reach, 1.0)


def _mean_interval(changes: np.ndarray) -> tuple[float, float]:
    mean, size = float(changes.mean()), len(changes)
    if size < 2:
        return -1.0, 1.0
    reach = float(stats.t.ppf(0.5 + CONFIDENCE / 2, size - 1) * changes.std(ddof=1) / np.sqrt(size))
    return mean - reach, mean + reach


def _sign_flip_p(changes: np.ndarray) -> float:
    changes = changes[changes != 0]
    if not len(changes):
        return 1.0
    result = stats.permutation_test(
        (changes,), lambda x, axis: np.mean(x, axis=axis), permutation_type="samples", vectorized=True,
        n_resamples=_FLIPS, rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(result.pvalue)
