"""Settings of an evaluation beside those of the main job, and the job's settings that each of its runs gets."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Annotated, Any

from cyclopts import Group, Parameter

from cluster.config import JobConfig
from cluster.errors import UserError
from cluster.evaluation.task import Task
from cluster.flags import Int, Text, flag

_GROUP = Group("Evaluation", sort_key=0)
_BY_TASK = {
    "prompts": "the tasks bring their prompts; --task-data says where their rows are",
    "prompt_column": "the tasks say how a prompt is made",
    "prompt_template": "the tasks say how a prompt is made",
    "carry": "every row carries its id and its reference",
    "input_prefix": "every row carries its id and its reference",
    "push_to_hub": "an evaluation has many runs; push one with jobs/generate.py",
    "hub_public": "an evaluation has many runs; push one with jobs/generate.py",
    "check": "give a task's items.jsonl to jobs/generate.py --check instead",
}
"""Settings of the main job that have no meaning here, and why."""
_MOST_GRADING_WORKERS = 1024
"""All of them are processes of this machine."""
COLUMNS = ("id", "reference")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The flags that only an evaluation has."""

    tasks: Annotated[Text, Parameter(group=_GROUP)] = ""
    """Tasks by name (gsm8k, math500, humaneval, mbpp, ifeval) or as YAML files, with commas between them."""
    compare: Annotated[Text | None, Parameter(group=_GROUP)] = None
    """Variants to hold against the first of them, such as vanilla,specfold:0.1,vanilla@0.1: a mode, then :delta,
    @delta-time, +cache."""
    task_data: Annotated[Text | None, Parameter(group=_GROUP)] = None
    """Where the tasks' rows are: a folder, a file or a hub id; left out: each task's own hub id."""
    fewshot: Annotated[Int | None, Parameter(group=_GROUP)] = None
    """Worked examples before each question; left out: what the task says."""
    allow_code_execution: Annotated[bool, Parameter(group=_GROUP, negative=())] = False
    """Run code that the model wrote, in a limited process of its own; needed by humaneval and mbpp."""
    grading_workers: Annotated[Int | None, Parameter(group=_GROUP)] = None
    """Processes that grade; left out: one for each core of this machine."""

    def __post_init__(self) -> None:
        if not self.task_names:
            raise UserError("--tasks names the tasks, such as gsm8k,humaneval; it is missing.")
        twice = next((name for name in self.task_names if self.task_names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"--tasks has {twice} twice.")
        if self.fewshot is not None and self.fewshot < 0:
            raise UserError(f"--fewshot must be 0 or more, not {self.fewshot}.")
        workers = self.grading_workers
        if workers is not None and not 1 <= workers <= _MOST_GRADING_WORKERS:
            raise UserError(f"--grading-workers must be between 1 and {_MOST_GRADING_WORKERS}, not {workers}.")

    @property
    def task_names(self) -> list[str]:
        return [name.strip() for name in self.tasks.split(",") if name.strip()]


def require_free(given: Set[str]) -> None:
    """``UserError`` for a setting of the main job that the tasks decide. ``given``: names that the user has set."""
    for name, reason in _BY_TASK.items():
        if name in given:
            raise UserError(f"{flag(name)} has no meaning in an evaluation: {reason}.")


def run_config(config: JobConfig, task: Task, given: Set[str], prompts: str, chat: bool) -> JobConfig:
    """The job's settings of one run: what the task says wherever the user has not said it.

    ``chat``: questions are asked in conversations, else the model continues raw prompts.
    """
    settings: dict[str, Any] = {"prompts": prompts, "carry": ",".join(COLUMNS), "split": None}
    if "max_new_tokens" not in given:
        settings["max_new_tokens"] = task.max_new_tokens
    if "stop" not in given:
        settings["stop"] = task.stop if chat else task.raw_stop
    if not chat:
        settings["chat_template"] = "none"
    return replace(config, **settings)
