"""Task files: what a benchmark asks, where its rows are, how outputs are graded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.evaluation.records import Item, Metrics


@dataclass(frozen=True)
class Task:
    """A loaded and validated task file."""

    name: str
    description: str
    fingerprint: str
    metrics: Metrics
    split: str
    fewshot: int
    stop: tuple[str, ...]
    max_new_tokens: int
    needs_code_execution: bool

    def items(
        self, source: str | None = None, split: str | None = None, limit: int | None = None, fewshot: int | None = None
    ) -> Iterator[Item]:
        """The questions, in the order of the data.

        ``source``: a folder that holds the task's files, one file, or a hub id; None is the task's own hub id.
        Raises ``UserError``.
        """
        raise NotImplementedError


def load_task(name_or_path: str | Path) -> Task:
    """A bundled task by its name, or a YAML file. Raises ``UserError`` of one sentence for a wrong one."""
    raise NotImplementedError
