"""The outcome of a task: its variants' scores and costs, each held against the first one, question by question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.evaluation.cost import Cost, cost_of
from cluster.evaluation.gradebook import GradedRun
from cluster.evaluation.paired import Difference, paired_difference
from cluster.evaluation.runs import PlannedRun
from cluster.evaluation.scores import Score, is_binary, question_scores, score_run
from cluster.output.compare import RowComparison, compare_rows, open_run


@dataclass(frozen=True)
class VariantResult:
    """One run, scored."""

    run: PlannedRun
    graded: GradedRun
    scores: dict[str, Score]
    cost: Cost
    problems: dict[str, int]
    """How often grading an output went wrong, by what happened."""

    @property
    def num_failed(self) -> int:
        """Rows without an output; they count as wrong."""
        return sum(answer.error is not None for answer in self.graded.answers)

    @property
    def num_cut(self) -> int:
        """Outputs that ended at the length limit."""
        return sum(answer.finish_reason == "length" for answer in self.graded.answers)


@dataclass(frozen=True)
class Against:
    """A run held against the first one of its task."""

    difference: Difference
    rows: RowComparison

    def to_dict(self) -> dict[str, Any]:
        return {"difference": asdict(self.difference), "outputs": self.rows.to_dict()}


@dataclass(frozen=True)
class TaskResult:
    """All variants of a task, in the order of ``--compare``."""

    variants: list[VariantResult]
    against: list[Against]
    """For every variant but the first."""

    @property
    def first(self) -> VariantResult:
        return self.variants[0]

    @property
    def name(self) -> str:
        return self.first.run.task.name

    @property
    def main_metric(self) -> str:
        return next(iter(self.first.run.task.metrics))


def score(run: PlannedRun, graded: GradedRun) -> VariantResult:
    """Scores and cost of one run."""
    scores = score_run(run.task.metrics, graded.grades, run.config.num_samples)
    problems = Counter(_kind(grade.problem) for grade in graded.grades if grade.problem is not None)
    return VariantResult(run, graded, scores, cost_of(graded.records), dict(problems.most_common()))


def compare(variants: Sequence[VariantResult]) -> TaskResult:
    """Hold every variant of a task against the first, by the main metric and by the tokens. Raises ``UserError``."""
    first, *others = variants
    return TaskResult([first, *others], [_against(first, other) for other in others])


def _against(first: VariantResult, other: VariantResult) -> Against:
    metric = next(iter(first.run.task.metrics.values()))
    sides = [(side.graded.grades, side.run.config.num_samples) for side in (first, other)]
    values = [question_scores(metric, *side) for side in sides]
    difference = paired_difference(*values, binary=all(is_binary(metric, *side) for side in sides))
    rows = compare_rows(open_run(first.run.config.output), open_run(other.run.config.output), num_examples=3)
    return Against(difference, rows)


def _kind(problem: str) -> str:
    """The problem's first words: an exception's name without its message."""
    return problem.split(":", 1)[0].strip()[:60]
