"""What can grade an output, by the names that task files use. Modules are loaded where they grade: some are slow."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from cluster.evaluation.records import Score

Reference = dict[str, Any]


@dataclass(frozen=True)
class Judgement:
    """What a grader says of one output; the fields are those of ``Grade``."""

    scores: dict[str, Score]
    weights: dict[str, float] = field(default_factory=dict)
    extracted: str | None = None
    problem: str | None = None


class Grader(Protocol):
    """The functions of a grader's module."""

    def check(self, references: Sequence[Reference]) -> None:
        """Raise ``UserError`` where these cannot be graded here: missing data, a reference of the wrong form."""

    def judge(self, reference: Reference, text: str) -> Judgement:
        """Grade one output. May crash or hang: it runs in a process of its own."""

    def blank(self, reference: Reference) -> Judgement:
        """The judgement of an output that earns nothing."""


@dataclass(frozen=True)
class GraderKind:
    """What is known of a grader without loading it."""

    module: str
    scores: tuple[str, ...]
    reference: tuple[str, ...]
    """Keys that the reference must have."""
    timeout_s: float
    """For one output. Beyond what a sound grader takes by far; where it runs code, beyond the program's own limit."""
    runs_code: bool = False

    def load(self) -> Grader:
        return cast(Grader, importlib.import_module(f"{__name__}.{self.module}"))


GRADERS: dict[str, GraderKind] = {
    "number": GraderKind("number", ("flexible", "strict"), ("answer",), 20.0),
    "math": GraderKind("math_answer", ("equal",), ("answer",), 30.0),
    "code": GraderKind("code", ("passed",), ("before", "after"), 60.0, runs_code=True),
    "instructions": GraderKind(
        "ifeval",
        ("prompt_level_strict_acc", "inst_level_strict_acc", "prompt_level_loose_acc", "inst_level_loose_acc"),
        ("prompt", "instructions", "arguments"),
        60.0,
    ),
}
