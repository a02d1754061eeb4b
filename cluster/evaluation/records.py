"""What passes between a task, a run and a grader: one question, one graded output, one metric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Score = float | bool


@dataclass(frozen=True)
class Item:
    """One question of a task. Exactly one of ``prompt`` and ``messages`` is given."""

    id: str
    """Unique within the task, the same wherever the rows come from."""
    reference: dict[str, Any]
    """What the grader needs beside the output. Plain JSON values, so that it can travel as a carried column."""
    prompt: str | None = None
    """Raw text to be continued."""
    messages: list[dict[str, str]] | None = None
    """A conversation, few-shot turns included, whose last turn is the question."""
    gold: str | None = None
    """An output that must be graded correct, if the data has one."""


@dataclass(frozen=True)
class Output:
    """One model output: the text that answers ``item``, and which of its samples it is."""

    item: Item
    text: str
    sample_id: int = 0


@dataclass(frozen=True)
class Grade:
    """How one output did."""

    id: str
    sample_id: int
    correct: bool
    """The score of the task's main metric."""
    scores: dict[str, Score] = field(default_factory=dict)
    """By score name."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weight of a score in its metric where it is not 1 (IFEval: the number of instructions)."""
    extracted: str | None = None
    """The answer found in the output; None if none was found."""
    problem: str | None = None
    """What went wrong: the grader ran out of time or crashed, or what the executed code raised."""


@dataclass(frozen=True)
class Metric:
    """A number made of many grades: the mean of one score, weighted."""

    name: str
    score: str
    filter: str = "none"
    """How lm-evaluation-harness calls the extraction behind it; its results are keyed ``name,filter``."""

    def of(self, grades: Iterable[Grade]) -> float:
        """Weighted mean over the grades; ``nan`` if there is none."""
        total = weight = 0.0
        for grade in grades:
            share = grade.weights.get(self.score, 1.0)
            total += share * float(grade.scores[self.score])
            weight += share
        return total / weight if weight else float("nan")


Metrics = Mapping[str, Metric]
"""By name; the main one first."""
