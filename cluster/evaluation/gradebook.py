"""The grades of a run, kept in its folder beside its parts: what has been graded once is not graded again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata, resources
from typing import Any

import orjson

from cluster.errors import UserError
from cluster.evaluation.pool import grade
from cluster.evaluation.records import Grade, Item, Output
from cluster.evaluation.task import Task
from cluster.messages import RowKey, ShardRecord
from cluster.output.rundir import GRADES, RunDir
from cluster.output.sink import PartError, read_record, read_rows
from cluster.output.storage import Store

_COLUMNS = ("row_id", "sample_id", "id", "output_text", "num_output_tokens", "finish_reason", "error")
_LIBRARIES = ("math-verify", "if-verifiable", "sympy", "latex2sympy2_extended", "langdetect", "nltk")
_EXIT_MISSING = 1


@dataclass(frozen=True)
class Answer:
    """One output of a run."""

    key: RowKey
    item: Item
    text: str
    num_tokens: int
    finish_reason: str
    error: str | None


@dataclass(frozen=True)
class GradedRun:
    """Every output of a run with its grade, ordered by row and sample."""

    answers: list[Answer]
    grades: list[Grade]
    records: list[ShardRecord]


class Gradebook:
    """Grades of one run folder, one file a part. A file is worth something only for the outputs and the graders that
    it was made of."""

    def __init__(self, store: Store, task: Task, items: Sequence[Item]) -> None:
        self._store, self._task, self._items = store, task, items
        self._graders = _graders_identity(task)

    def complete(
        self,
        num_samples: int,
        workers: int | None = None,
        allow_code_execution: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> GradedRun:
        """All grades, the missing ones made now and kept part by part; ``check`` may raise in between.

        Raises ``UserError``, also where rows are missing.
        """
        parts = [self._read_part(index) for index in RunDir(self._store).parts()]
        num_rows = sum(len(answers) for _, answers in parts)
        if num_rows != len(self._items) * num_samples:
            wanted = len(self._items) * num_samples
            raise UserError(f"{self._store.url} has {num_rows:,} of {wanted:,} rows; run it again.", _EXIT_MISSING)
        identities = [self._identity(answers) for _, answers in parts]
        kept: list[list[Grade] | None] = []
        for (record, _), identity in zip(parts, identities, strict=True):
            kept.append(self._load(record.index, identity))
        missing = [answers for (_, answers), grades in zip(parts, kept, strict=True) if grades is None]
        outputs = (Output(answer.item, answer.text, answer.key.sample_id) for answers in missing for answer in answers)
        with _closing(grade(self._task, outputs, workers, allow_code_execution)) as fresh:
            for place, (record, part) in enumerate(parts):
                if kept[place] is None:
                    made = kept[place] = [_next(fresh, check) for _ in part]
                    self._save(record.index, identities[place], made)
        answers = [answer for _, part in parts for answer in part]
        return GradedRun(answers, [grade for part in kept for grade in part or ()], [record for record, _ in parts])

    def _read_part(self, index: int) -> tuple[ShardRecord, list[Answer]]:
        try:
            record = read_record(self._store, index)
            table = read_rows(self._store, record)
        except (PartError, OSError) as error:
            raise UserError(f"{self._store.url} cannot be graded: {error}", _EXIT_MISSING) from None
        columns = [table[name].to_pylist() for name in _COLUMNS]
        return record, [self._answer(*values) for values in zip(*columns, strict=True)]

    def _answer(
        self, row: int, sample: int, id: str, text: str, num_tokens: int, reason: str, error: str | None
    ) -> Answer:
        if row >= len(self._items) or self._items[row].id != id:
            raise UserError(
                f"{self._store.url} holds the row {id!r}, which is not the task's; choose another --output."
            )
        return Answer(RowKey(row, sample), self._items[row], text, num_tokens, reason, error)

    def _identity(self, answers: Sequence[Answer]) -> str:
        digest = hashlib.sha256(self._graders.encode())
        for answer in answers:
            values = [*answer.key, answer.item.id, answer.item.reference, answer.text]
            digest.update(orjson.dumps(values, option=orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE))
        return digest.hexdigest()

    def _load(self, index: int, identity: str) -> list[Grade] | None:
        """A part's grades; None if there are none that were made of these outputs by these graders."""
        try:
            values = orjson.loads(self._store.read(_name(index)))
            return [Grade(**grade) for grade in values["grades"]] if values["identity"] == identity else None
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def _save(self, index: int, identity: str, grades: Sequence[Grade]) -> None:
        values = {"identity": identity, "task": self._task.name, "grades": [asdict(grade) for grade in grades]}
        self._store.write(_name(index), orjson.dumps(values), durable=False)


def _next(grades: Iterator[Grade], check: Callable[[], None]) -> Grade:
    check()
    return next(grades)


@contextmanager
def _closing(grades: Iterator[Grade]) -> Iterator[Iterator[Grade]]:
    """The grading processes end with the block, however it is left."""
    try:
        yield grades
    finally:
        close = getattr(grades, "close", None)
        if close is not None:
            close()


def _name(index: int) -> str:
    return f"{GRADES}/shard-{index:07d}.json"


def _graders_identity(task: Task) -> str:
    """What a grade depends on beside the output: the task, the graders' source and the libraries they use."""
    digest = hashlib.sha256(task.fingerprint.encode())
    for name, source in _sources():
        digest.update(f"{name}\0{len(source)}\0".encode() + source)
    for package in _LIBRARIES:
        try:
            digest.update(f"{package} {metadata.version(package)}\n".encode())
        except metadata.PackageNotFoundError:
            continue
    return digest.hexdigest()


def _sources() -> Iterator[tuple[str, bytes]]:
    package: Any = resources.files("cluster.evaluation")
    for folder in ("graders", "sandbox"):
        for file in sorted((package / folder).iterdir(), key=lambda file: str(file.name)):
            if file.name.endswith(".py"):
                yield f"{folder}/{file.name}", file.read_bytes()
