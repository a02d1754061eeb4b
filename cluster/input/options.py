"""Rows in the form of an OpenAI batch request: ``custom_id`` and a ``body`` with the prompt and options of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cluster.input.parse import Row, what
from cluster.input.problems import RowProblem
from specfold.config import ConfigError, DecodeConfig

_PROMPTS = ("messages", "prompt")
_OPTIONS = ("max_tokens", "temperature", "top_p", "stop", "seed")
_IGNORED = ("model", "user", "metadata", "stream", "store")
"""Keys that have no bearing on what is generated here; the model is the job's."""


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Settings of one row; None: the job's setting holds."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None


def is_batch_line(row: Row) -> bool:
    """Whether the row is a batch request and not just one with columns of these names."""
    return "custom_id" in row and isinstance(row.get("body"), dict)


def read_body(body: dict[str, Any], decode: DecodeConfig) -> tuple[Row, RowOptions]:
    """The body's prompt as the columns of an ordinary row, and its options checked against the job's.

    Raises ``RowProblem`` for an option that is not supported or has a wrong value.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name not in (*_PROMPTS, *_OPTIONS, *_IGNORED):
            raise RowProblem("unsupported_option", f"The option {name!r} in the row's body is not supported.")
    options = RowOptions(
        max_new_tokens=_integer(given, "max_tokens"),
        temperature=_number(given, "temperature"),
        top_p=_number(given, "top_p"),
        seed=_integer(given, "seed"),
        stop=_strings(given, "stop"),
    )
    set_here = {name: getattr(options, name) for name in options.__slots__ if getattr(options, name) is not None}
    try:
        replace(decode, **set_here)
    except ConfigError as error:
        message = str(error).replace("max_new_tokens", "max_tokens")
        raise RowProblem("wrong_type", f"In the row's body {message}") from None
    row = {name: given[name] for name in _PROMPTS if name in given}
    if isinstance(row.get("prompt"), list):
        row["prompt_token_ids"] = row.pop("prompt")
    return row, options


def _integer(given: dict[str, Any], name: str) -> int | None:
    value = given.get(name)
    if value is not None and type(value) is not int:
        raise _wrong(name, "a whole number", value)
    return value


def _number(given: dict[str, Any], name: str) -> float | None:
    value = given.get(name)
    if value is not None and type(value) not in (int, float):
        raise _wrong(name, "a number", value)
    return None if value is None else float(value)


def _strings(given: dict[str, Any], name: str) -> tuple[str, ...] | None:
    value = given.get(name)
    if value is None:
        return None
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise _wrong(name, "a string or a list of strings", value)
    return tuple(values)


def _wrong(name: str, wanted: str, value: Any) -> RowProblem:
    return RowProblem("wrong_type", f"The option {name!r} in the row's body must be {wanted}, not {what(value)}.")
