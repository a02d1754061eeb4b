"""A comparison as a picture: every variant's accuracy with its interval, one panel a task, and what it costs."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from typing import Any

from cluster.evaluation.comparison import TaskResult

PLOT = "comparison.png"


def can_plot() -> bool:
    """Whether matplotlib, an extra, is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def comparison_png(results: Sequence[TaskResult]) -> bytes:
    """The picture of all tasks that were run in several variants."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 3.4 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 1, squeeze=False)[:, 0]
    for panel, result in zip(panels, results, strict=True):
        _plot_task(panel, result)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def _plot_task(panel: Any, result: TaskResult) -> None:
    labels = [variant.run.variant.label for variant in result.variants]
    scores = [variant.scores[result.main_metric] for variant in result.variants]
    values = [100 * score.value for score in scores]
    below = [100 * (score.value - score.low) for score in scores]
    above = [100 * (score.high - score.value) for score in scores]
    panel.errorbar(range(len(labels)), values, yerr=[below, above], fmt="o-", capsize=4, label=result.main_metric)
    first = result.first.cost.forwards
    cost = [100 * variant.cost.forwards / first for variant in result.variants]
    panel.plot(range(len(labels)), cost, "s--", color="grey", label="forwards, of the first one's")
    panel.set_xticks(range(len(labels)), labels, rotation=20)
    panel.set_ylim(0, 105)
    panel.set_ylabel("%")
    panel.set_title(f"{result.name}, {len(result.first.graded.answers):,} outputs, 95% intervals", fontsize=10)
    panel.legend(fontsize=8)
