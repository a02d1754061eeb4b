"""Tasks: what a benchmark asks, where its rows are, how outputs are graded."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from cluster.errors import UserError
from cluster.evaluation.graders import GRADERS
from cluster.evaluation.prompts import Prompter, numbered, row_filter
from cluster.evaluation.records import Item, Metric, Metrics
from cluster.evaluation.sources import Row, is_single_file, read_rows, require_source
from cluster.evaluation.taskfile import TaskFile, parse_task_file

_BUNDLED = Path(__file__).with_name("tasks")


@dataclass(frozen=True)
class Task:
    """A loaded and validated task file; ``fingerprint`` is the hash of its content."""

    name: str
    form: TaskFile
    fingerprint: str

    @property
    def description(self) -> str:
        return self.form.description

    @property
    def metrics(self) -> Metrics:
        """By name; the main one first."""
        return {name: Metric(name, metric.score, metric.filter) for name, metric in self.form.metrics.items()}

    @property
    def grader(self) -> str:
        return self.form.grader

    @property
    def split(self) -> str:
        """The split that is graded unless the user says otherwise."""
        return self.form.split

    @property
    def fewshot(self) -> int:
        """Examples before each question, unless the user says otherwise."""
        return self.form.fewshot.count

    @property
    def max_new_tokens(self) -> int:
        return self.form.max_new_tokens

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end an answer in a chat."""
        return tuple(self.form.stop)

    @property
    def raw_stop(self) -> tuple[str, ...]:
        """Texts that end the continuation of a raw prompt."""
        return tuple(self.form.raw_stop)

    @property
    def needs_code_execution(self) -> bool:
        return GRADERS[self.form.grader].runs_code

    def items(
        self,
        source: str | None = None,
        split: str | None = None,
        limit: int | None = None,
        fewshot: int | None = None,
        chat: bool = True,
    ) -> Iterator[Item]:
        """The questions, in the order of the data.

        ``source``: a folder in which the task's files lie, one file, or None for the task's dataset on the hub.
        ``chat``: conversations, examples as earlier turns; else raw prompts. An example that is the question itself
        is left out. Raises ``UserError``: no such data, a row
        that does not fit the templates, two rows of one id, fewer examples than asked for.
        """
        require_source(source)
        split = split or self.split
        prompter = Prompter(self.name, self.form, chat)
        examples = self._examples(source, self.fewshot if fewshot is None else fewshot)
        seen: set[str] = set()
        for row in itertools.islice(self._rows(source, split), limit):
            item = prompter.item(row, [example for example in examples if not _same(example, row)])
            if item.id in seen:
                raise UserError(f"Two rows of the task {self.name} have the id {item.id!r}.")
            seen.add(item.id)
            yield item

    def _rows(self, source: str | None, split: str) -> Iterator[Row]:
        wanted = self.form.data.splits.get(split)
        belongs = row_filter(self.name, wanted.where if wanted else None)
        return numbered(read_rows(self.name, self.form.data, split, source, belongs), split)

    def _examples(self, source: str | None, count: int) -> list[Row]:
        """Rows for ``count`` examples, the same for every question."""
        if count < 0:
            raise UserError(f"There cannot be {count} examples before a question.")
        form = self.form.fewshot
        if not count:
            return []
        if form.split is None:
            rows = form.examples
        elif is_single_file(source):
            raise UserError(
                f"The examples of {self.name} come from its split {form.split}, which a single file does not hold: "
                "name the folder of the task's files, or ask for 0 examples."
            )
        else:
            rows = list(itertools.islice(self._rows(source, form.split), count))
        if len(rows) < count:
            raise UserError(f"The task {self.name} has {len(rows)} examples, fewer than the {count} asked for.")
        return rows[:count]


def _same(first: Row, second: Row) -> bool:
    return all(first.get(column) == second[column] for column in second if column not in ("index", "split"))


def load_task(name_or_path: str | Path) -> Task:
    """A bundled task by its name, or a YAML file. Raises ``UserError`` of one sentence for a wrong one."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = _BUNDLED / f"{name_or_path}.yaml"
        if path.parent != _BUNDLED or not path.is_file():
            raise UserError(
                f"There is no task {name_or_path}; the bundled ones are {', '.join(bundled_tasks())}, any other is a "
                "YAML file."
            )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else (error.strerror or "").lower()
        raise UserError(f"The task file {path} cannot be read: {reason}.") from None
    form = parse_task_file(text, path)
    Prompter(path.stem, form, chat=True), Prompter(path.stem, form, chat=False)
    for split in form.data.splits.values():
        row_filter(path.stem, split.where)
    return Task(path.stem, form, hashlib.sha256(text.encode()).hexdigest())


def bundled_tasks() -> list[str]:
    """Names of the tasks that come with the project."""
    return sorted(path.stem for path in _BUNDLED.glob("*.yaml"))


def data_fingerprint(items: list[Item]) -> str:
    """Hash of the questions as they are asked and graded: the data, the prompts and the examples in them."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(orjson.dumps(item, option=orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE))
    return digest.hexdigest()
