"""The form of a task file. Whatever is wrong with one is told in a sentence that names the key."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.errors import UserError
from cluster.evaluation.graders import GRADERS
from cluster.strict_yaml import read_yaml


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Split(_Part):
    """Where the rows of one split are; at least one of the two places."""

    file: str | None = None
    """Path below the data folder."""
    hub: str | None = None
    """Name of the split in the hub's dataset."""
    where: str | None = None
    """Jinja2 expression over a row; only rows for which it is true belong to the split."""

    @model_validator(mode="after")
    def _somewhere(self) -> Split:
        if self.file is None and self.hub is None:
            raise ValueError("it needs file or hub")
        return self


class Data(_Part):
    hub: str | None = None
    """Dataset id, or ``id:configuration``."""
    splits: dict[str, Split] = Field(min_length=1)


class FewShot(_Part):
    count: int = Field(default=0, ge=0)
    """Examples before each question, unless the user says otherwise."""
    split: str | None = None
    """Where the examples come from: the first rows of this split …"""
    examples: list[dict[str, Any]] = []
    """… or these rows."""


class MetricForm(_Part):
    score: str
    filter: str = "none"


class Column(_Part):
    column: str


class TaskFile(_Part):
    """All keys of a task file. Texts are Jinja2 templates over a row, which also has ``index`` and ``split``."""

    description: str
    data: Data
    split: str
    """The split that is graded unless the user says otherwise."""
    id: str
    prompt: str
    """The question as raw text to be continued, and in a chat unless ``chat_prompt`` is given."""
    chat_prompt: str | None = None
    answer: str | None = None
    """A right answer as the model should write it: for examples before the question, and to try the grader."""
    chat_answer: str | None = None
    reference: dict[str, str | list[str] | Column]
    """What the grader gets beside the output: templates, or columns as they are."""
    fewshot: FewShot = FewShot(count=0)
    stop: list[str] = []
    """Texts that end an answer in a chat."""
    raw_stop: list[str] = []
    """Texts that end the continuation of a raw prompt."""
    max_new_tokens: int = Field(ge=1)
    grader: str
    metrics: dict[str, MetricForm] = Field(min_length=1)
    """The main one first: it decides whether an output is correct."""

    @model_validator(mode="after")
    def _consistent(self) -> TaskFile:
        for split in (self.split, self.fewshot.split):
            if split is not None and split not in self.data.splits:
                raise ValueError(f"the split {split} is not among data.splits")
        if self.answer is None and (self.chat_answer or self.fewshot.count or self.fewshot.split):
            raise ValueError("examples and chat_answer need answer")
        grader = GRADERS.get(self.grader)
        if grader is None:
            raise ValueError(f"the grader {self.grader} does not exist; there are {', '.join(GRADERS)}")
        for name, metric in self.metrics.items():
            if metric.score not in grader.scores:
                raise ValueError(f"the metric {name} needs a score of {', '.join(grader.scores)}, not {metric.score}")
        for key in grader.reference:
            if key not in self.reference:
                raise ValueError(f"the grader {self.grader} needs reference.{key}")
        return self


def parse_task_file(text: str, path: Path) -> TaskFile:
    """Raises ``UserError``."""
    values = read_yaml(text, f"The task file {path}")
    if not isinstance(values, dict):
        raise UserError(f"The task file {path} holds no keys.")
    try:
        return TaskFile.model_validate(values)
    except ValidationError as error:
        raise UserError(f"The task file {path} is wrong: {_first(error)}.") from None


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(problem["loc"][-1]), TaskFile.model_fields, 1)
        return f"it has no key {key}" + (f"; did you mean {close[0]}?" if close else "").rstrip("?")
    if problem["type"] == "missing":
        return f"the key {key} is missing"
    message = problem["msg"].removeprefix("Value error, ").rstrip(".")
    message = message[:1].lower() + message[1:]
    return f"{key}: {message}" if key else message
