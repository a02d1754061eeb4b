"""From rows to questions: templates, examples before the question, chats and raw prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.errors import UserError
from cluster.evaluation.records import Item
from cluster.evaluation.taskfile import Column, TaskFile

Row = Mapping[str, Any]
_BETWEEN_EXAMPLES = "\n\n"


class Prompter:
    """The templates of one task file, compiled. Raises ``UserError`` where one is no valid Jinja2."""

    def __init__(self, name: str, form: TaskFile, chat: bool) -> None:
        self._name, self._chat = name, chat
        self._stop = form.stop if chat else form.raw_stop
        question = form.chat_prompt if chat and form.chat_prompt is not None else form.prompt
        answer = form.chat_answer if chat and form.chat_answer is not None else form.answer
        self._id = self._compile("id", form.id)
        self._question = self._compile("prompt", question)
        self._answer = None if answer is None else self._compile("answer", answer)
        self._reference = {key: self._value(f"reference.{key}", value) for key, value in form.reference.items()}

    def item(self, row: Row, examples: Sequence[Row]) -> Item:
        """One question, after ``examples`` with their answers."""
        reference = {key: read(row) for key, read in self._reference.items()}
        question, gold = self._question(row), self._gold(row)
        shots = [(self._question(example), self._shown_answer(example)) for example in examples]
        if not self._chat:
            prompt = "".join(text + answer + _BETWEEN_EXAMPLES for text, answer in shots) + question
            return Item(self._id(row), reference, prompt=prompt, gold=gold)
        turns = [{"role": "user", "content": question}]
        for text, answer in reversed(shots):
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": answer.strip()}, *turns]
        return Item(self._id(row), reference, messages=turns, gold=gold)

    def _shown_answer(self, example: Row) -> str:
        if self._answer is None:
            raise UserError(f"The task {self._name} has no answers, so no examples can stand before a question.")
        return self._answer(example)

    def _gold(self, row: Row) -> str | None:
        """The right answer as a run would give it: a stop text ends it."""
        if self._answer is None:
            return None
        answer = self._answer(row)
        ends = [answer.find(stop) for stop in self._stop]
        return answer[: min((end for end in ends if end >= 0), default=len(answer))]

    def _value(self, key: str, form: str | list[str] | Column) -> Callable[[Row], Any]:
        if isinstance(form, Column):
            return lambda row: _without_nulls(self._column(row, form.column))
        if isinstance(form, str):
            return self._compile(key, form)
        templates = [self._compile(key, text) for text in form]
        return lambda row: [template(row) for template in templates]

    def _column(self, row: Row, column: str) -> Any:
        if column not in row:
            raise UserError(f"A row of {self._name} has no column {column!r}.")
        return row[column]

    def _compile(self, key: str, source: str) -> Callable[[Row], str]:
        template = compiled(self._name, key, lambda environment: environment.from_string(source))

        def render(row: Row) -> str:
            return str(evaluated(self._name, key, lambda: template.render(dict(row))))

        return render


def row_filter(name: str, source: str | None) -> Callable[[Row], bool] | None:
    """``where`` of a split as a test of a row."""
    if source is None:
        return None
    test = compiled(name, "where", lambda environment: environment.compile_expression(source, undefined_to_none=False))
    return lambda row: bool(evaluated(name, "where", lambda: test(**row)))


def compiled(name: str, key: str, compile: Callable[[jinja2.Environment], Any]) -> Any:
    environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    try:
        return compile(environment)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{key} of the task {name} is not valid Jinja2: {str(error).rstrip('.')}.") from None


def evaluated(name: str, key: str, evaluate: Callable[[], Any]) -> Any:
    try:
        return evaluate()
    except Exception as error:  # a template can raise anything that its expressions can
        reason = (str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__
        raise UserError(f"{key} of the task {name} does not fit a row: {reason}.") from None


def numbered(rows: Iterator[dict[str, Any]], split: str) -> Iterator[dict[str, Any]]:
    """The rows with what templates may use beside the columns; columns of these names win."""
    return ({"index": index, "split": split, **row} for index, row in enumerate(rows))


def _without_nulls(value: Any) -> Any:
    """Tables fill in nulls for keys that a row does not have; in JSON lines they are absent."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
