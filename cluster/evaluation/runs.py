"""The runs of an evaluation: one folder a task and variant, each made by the main job's own driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from cluster.config import JobConfig
from cluster.driver import DEFAULT_ENGINE, run_job
from cluster.driver.commands import require_model
from cluster.driver.job import EXIT_FAILED, choose_device
from cluster.driver.session import ray_session
from cluster.driver.signals import StopSignals
from cluster.errors import UserError
from cluster.evaluation.pool import grade
from cluster.evaluation.records import Item, Output
from cluster.evaluation.settings import EvaluationConfig, run_config
from cluster.evaluation.task import Task, load_task
from cluster.evaluation.variants import Variant, parse_variants, require_effect
from cluster.input.templates import chat_template_of
from cluster.models import local_folder, resolve_model
from cluster.output.rundir import RUN
from cluster.output.storage import Store, mistakes_of_place
from specfold.checkpoint import load_tokenizer

PLAN, ITEMS = "plan.json", "items.jsonl"
_MARK = "specfold evaluation"
_SPLITS = {"train", "valid", "validation", "dev", "test", "eval", "evaluation"}
"""Words from which ``datasets`` guesses splits: in a path they would hide the rows of a run."""


@dataclass(frozen=True)
class PlannedTask:
    """A task and its items, all of them whatever ``--limit`` says."""

    task: Task
    items: list[Item]
    split: str
    fewshot: int

    def lines(self) -> bytes:
        """The items as input of the main job. A reference is JSON text, so that its column has one type."""
        return b"".join(orjson.dumps(_line(item), option=orjson.OPT_APPEND_NEWLINE) for item in self.items)


@dataclass(frozen=True)
class PlannedRun:
    """One run: a task decoded in one variant."""

    planned: PlannedTask
    variant: Variant
    config: JobConfig

    @property
    def task(self) -> Task:
        return self.planned.task

    @property
    def items(self) -> list[Item]:
        """The items that are decoded."""
        return self.planned.items[: self.config.limit]


@dataclass(frozen=True)
class Plan:
    """All that is to be decoded. Nothing has been written yet."""

    store: Store
    tasks: list[PlannedTask]
    variants: list[Variant]
    runs: list[PlannedRun]
    """Task by task, the variants in their order."""


def make_plan(config: JobConfig, evaluation: EvaluationConfig, given: Set[str]) -> Plan:
    """Load the tasks and settle every run's settings. Raises ``UserError`` for whatever can be known to go wrong."""
    store = Store(config.output)
    variants = parse_variants(evaluation.compare, config)
    require_effect(evaluation.compare, given)
    with mistakes_of_place():
        store.require_writable()
        _require_ours(store)
    chat = _is_chat(config)
    tasks = [_load(name, config, evaluation, chat) for name in evaluation.task_names]
    names = [planned.task.name for planned in tasks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"--tasks has two tasks of the name {twice}.")
    runs = []
    for planned in tasks:
        folder = planned.task.name
        prompts = store.path(f"{folder}/{ITEMS}")
        settled = run_config(config, planned.task, given, prompts, chat)
        for variant in variants:
            run = replace(variant.of(settled), output=store.path(f"{folder}/{variant.folder}"))
            runs.append(PlannedRun(planned, variant, run))
    return Plan(store, tasks, variants, runs)


def decode(plan: Plan, say: Callable[[str], None], signals: StopSignals, engine_factory: str = DEFAULT_ENGINE) -> int:
    """Make or complete every run; returns the exit code, of which 0 and 3 mean that all rows are there."""
    config = plan.runs[0].config
    for run in plan.runs:
        require_model(run.config)
    worst = 0
    with ray_session(config.ray_address, config.workers, signals):
        choose_device(config)
        _write_items(plan)
        for number, run in enumerate(plan.runs, 1):
            say(f"{run.task.name}, {run.variant.label} ({number} of {len(plan.runs)})")
            code = run_job(run.config, engine_factory=engine_factory)
            if code not in (0, EXIT_FAILED):
                return code
            worst = max(worst, code)
    return worst


def _is_chat(config: JobConfig) -> bool:
    """Whether questions are asked in conversations: where there is a chat template, the model's or the user's."""
    if config.chat_template != "auto":
        return config.chat_template != "none"
    folder = local_folder(resolve_model(config.model, config.revision))  # the checks of the input need it here, too
    return chat_template_of(load_tokenizer(Path(folder))) is not None


def _load(name: str, config: JobConfig, evaluation: EvaluationConfig, chat: bool) -> PlannedTask:
    task = load_task(name)
    if _SPLITS & set(task.name.lower().replace("-", "_").split("_")):
        raise UserError(f"The task {task.name} cannot be a folder's name: datasets would take it for a split.")
    items = list(task.items(evaluation.task_data, config.split, fewshot=evaluation.fewshot, chat=chat))
    if not items:
        raise UserError(f"The task {task.name} has no rows.")
    # What grading would refuse is refused before anything is decoded; nothing is graded, as no grade is taken.
    grade(task, [Output(item, "") for item in items], allow_code_execution=evaluation.allow_code_execution)
    fewshot = task.fewshot if evaluation.fewshot is None else evaluation.fewshot
    return PlannedTask(task, items, config.split or task.split, fewshot)


def _require_ours(store: Store) -> None:
    """``UserError`` for a folder that is neither empty nor an earlier evaluation's."""
    if store.exists(RUN):
        raise UserError(f"{store.url} is the output of a single run; choose another --output.")
    try:
        mark = orjson.loads(store.read(PLAN)).get("kind")
    except FileNotFoundError:
        names = [name for name in store.names() if not name.endswith(".tmp")]
        if names:
            raise UserError(
                f"{store.url} is not empty and not the output of an evaluation (it holds {names[0]}); "
                "choose another --output."
            ) from None
        return
    except (ValueError, AttributeError):
        mark = None
    if mark != _MARK:
        raise UserError(f"{store.path(PLAN)} was not written by this program; choose another --output.")


def _write_items(plan: Plan) -> None:
    """Write each task's items once. ``UserError`` where those of an earlier session were others."""
    old = {planned.task.name: _read(plan.store, f"{planned.task.name}/{ITEMS}") for planned in plan.tasks}
    if not plan.runs[0].config.overwrite:
        for planned in plan.tasks:
            found = old[planned.task.name]
            if found is not None and found != planned.lines():
                raise UserError(
                    f"{plan.store.path(planned.task.name)} holds a run on other items (the task, its data, --fewshot "
                    "or --split have changed); choose another --output, or --overwrite to start anew."
                )
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    values = {"kind": _MARK, "format": 1, "created": created}
    plan.store.create(PLAN, orjson.dumps(values, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    for planned in plan.tasks:
        lines = planned.lines()
        if old[planned.task.name] != lines:
            plan.store.write(f"{planned.task.name}/{ITEMS}", lines)


def _read(store: Store, name: str) -> bytes | None:
    try:
        return store.read(name)
    except FileNotFoundError:
        return None


def _line(item: Item) -> dict[str, object]:
    prompt = {"prompt": item.prompt} if item.messages is None else {"messages": item.messages}
    return {"id": item.id, **prompt, "reference": orjson.dumps(item.reference).decode()}
