"""Grading in parallel processes: an output that crashes or hangs its grader costs that output only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cluster.evaluation.records import Grade, Output
from cluster.evaluation.task import Task


def grade(
    task: Task, outputs: Iterable[Output], workers: int | None = None, allow_code_execution: bool = False
) -> Iterator[Grade]:
    """One grade an output, in their order. Raises ``UserError`` if code must run and is not allowed, or cannot be held."""
    raise NotImplementedError
