"""Our graders against right answers and against the grades that other people's graders gave."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import nltk
import pytest
import yaml

from cluster.errors import UserError
from cluster.evaluation.pool import grade
from cluster.evaluation.records import Grade, Output
from cluster.evaluation.sandbox import require_sandbox
from cluster.evaluation.task import Task, load_task
from grading import outputs

DATA = Path(__file__).parent / "data"
NEED_SENTENCES = {"length_constraints:number_sentences", "change_case:capital_word_frequency"}


def skip_without_sandbox() -> None:
    """For tests that run code: not on a machine that refuses to, such as one without namespaces."""
    try:
        require_sandbox()
    except UserError as error:
        pytest.skip(str(error))


def has_sentence_data() -> bool:
    """Whether NLTK finds its punkt_tab data, which two of the 25 instructions need."""
    try:
        nltk.data.find("tokenizers/punkt_tab/english/")
    except LookupError:
        return False
    return True


def grade_gold(task: Task, shared: Path, split: str | None = None, every: int = 1, chat: bool = True) -> list[Grade]:
    """Grades of every ``every``-th right answer of a split."""
    items = list(task.items(str(shared / "data"), split=split, fewshot=0, chat=chat))[::every]
    return list(grade(task, [Output(item, item.gold or "") for item in items], allow_code_execution=True))


def instruction_texts() -> list[dict[str, Any]]:
    """One good and one bad text an instruction, those that can be checked here."""
    texts = yaml.safe_load((DATA / "instructions.yaml").read_text())
    return [text for text in texts if has_sentence_data() or text["instruction"] not in NEED_SENTENCES]


def differences(name: str, shared: Path, every: int = 1) -> tuple[int, list[str]]:
    """How many outputs were compared, and where our grade is not the others'."""
    theirs = json.loads((DATA / "scores_of_others.json").read_text())[name]
    answers = [answer for answer in getattr(outputs, name)(shared) if _can_grade(answer)][::every]
    task = load_task(name)
    ours = grade(task, _as_outputs(task, shared, answers), allow_code_execution=True)
    pairs = list(zip(answers, ours, strict=True))
    return len(pairs), [
        f"{answer.key}: {comparable(name, ours)} here, {theirs[answer.key]} there"
        for answer, ours in pairs
        if comparable(name, ours) != theirs[answer.key]
    ]


def comparable(name: str, ours: Grade) -> Any:
    """A grade in the form of the other graders."""
    if name == "humaneval":
        return ours.scores["passed"]
    if name == "gsm8k":
        return dict(ours.scores)
    total = round(ours.weights["inst_level_strict_acc"])
    return {
        key: value if key.startswith("prompt") else [total, round(value * total)] for key, value in ours.scores.items()
    }


def _can_grade(answer: outputs.Answer) -> bool:
    return has_sentence_data() or not NEED_SENTENCES & set(answer.row.get("instruction_id_list", ()))


def _as_outputs(task: Task, shared: Path, answers: Iterable[outputs.Answer]) -> Iterator[Output]:
    """The answers as outputs to raw prompts."""
    items = {item.id: item for item in task.items(str(shared / "data"), fewshot=0, chat=False)}
    for answer in answers:
        row = answer.row
        id = row.get("task_id") or row.get("key") or f"test-{answer.key.split()[0]}"
        yield Output(items[str(id)], answer.text)
