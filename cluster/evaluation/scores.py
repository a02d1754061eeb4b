"""The scores of one run: every metric of its task with a standard error and an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.evaluation.paired import CONFIDENCE
from cluster.evaluation.records import Grade, Metric, Metrics
from cluster.evaluation.statistics import bootstrap_interval, pass_at_k, wilson_interval


@dataclass(frozen=True)
class Score:
    """A metric's value over all questions, its standard error, and where the true value lies with 95% confidence."""

    value: float
    stderr: float
    low: float
    high: float


def score_run(metrics: Metrics, grades: Sequence[Grade], num_samples: int) -> dict[str, Score]:
    """Scores by metric name, the main one first; with several samples also ``pass@k``.

    ``grades`` are ordered by question, ``num_samples`` of each. Questions are what is drawn at random: samples of one
    question count as one observation, their mean.
    """
    scores = {name: _metric_score(metric, grades, num_samples) for name, metric in metrics.items()}
    if num_samples > 1:
        right = by_question([float(grade.correct) for grade in grades], num_samples).sum(axis=1)
        for k in _sample_counts(num_samples):
            if f"pass@{k}" not in scores:
                values = np.array([pass_at_k(num_samples, int(count), k) for count in right])
                scores[f"pass@{k}"] = _mean_score(values, np.ones(len(values)))
    return scores


def question_scores(metric: Metric, grades: Sequence[Grade], num_samples: int) -> list[float]:
    """A metric's score of each question, the mean over its samples."""
    values = by_question([float(grade.scores[metric.score]) for grade in grades], num_samples)
    return [float(value) for value in values.mean(axis=1)]


def is_binary(metric: Metric, grades: Sequence[Grade], num_samples: int) -> bool:
    """Whether every question is simply right or wrong."""
    weighted = any(metric.score in grade.weights for grade in grades)
    return num_samples == 1 and not weighted and all(grade.scores[metric.score] in (0, 1) for grade in grades)


def by_question(values: Sequence[float], num_samples: int) -> np.ndarray:
    """``[questions, samples]``."""
    return np.asarray(values, float).reshape(-1, num_samples)


def _metric_score(metric: Metric, grades: Sequence[Grade], num_samples: int) -> Score:
    values = by_question([float(grade.scores[metric.score]) for grade in grades], num_samples)
    weights = by_question([grade.weights.get(metric.score, 1.0) for grade in grades], num_samples)
    sums, totals = (values * weights).sum(axis=1), weights.sum(axis=1)
    per_question = np.divide(sums, totals, out=np.zeros(len(sums)), where=totals > 0)
    return _mean_score(per_question, totals / num_samples)


def _mean_score(values: np.ndarray, weights: np.ndarray) -> Score:
    """Wilson's interval where every question is right or wrong, which has a width even if all are right."""
    if np.isin(values, (0, 1)).all() and (weights == 1).all():
        low, high = wilson_interval(int(values.sum()), len(values), CONFIDENCE)
    else:
        low, high = bootstrap_interval(values, weights, CONFIDENCE)
    value = float((values * weights).sum() / weights.sum())
    return Score(value, _stderr(values, weights), float(low), float(high))


def _stderr(values: np.ndarray, weights: np.ndarray) -> float:
    """Standard error of a weighted mean of questions (of a ratio, to first order); 0 for a single question."""
    size = len(values)
    if size < 2:
        return 0.0
    mean = (values * weights).sum() / weights.sum()
    residuals = weights * (values - mean) / weights.mean()
    return float(np.sqrt((residuals**2).sum() / (size - 1) / size))


def _sample_counts(num_samples: int) -> list[int]:
    """1, 2, 4, … and the number of samples itself."""
    counts = [1 << power for power in range(num_samples.bit_length()) if 1 << power < num_samples]
    return [*counts, num_samples]
