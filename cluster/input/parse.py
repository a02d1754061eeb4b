"""From a raw shard to one mapping per row, and to the columns that are carried along.

Runs on workers and in helper tasks. Whatever the bytes are, a shard of n rows gives n results: a row, or its problem.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.csv as pa_csv

from cluster.input.problems import RowProblem
from cluster.input.records import CsvPart, ends_in_quotes, header_names
from cluster.input.shards import RawShard, read_stream

Row = dict[str, Any]
_LONG_INTEGER = re.compile(rb"\d{19}")
"""Beyond 64 bits orjson turns an integer into a float without a word; 19 digits may be that long."""


@dataclass(frozen=True)
class ParsedShard:
    """``rows``: for every input row its columns by name, or why there are none. ``table``: the same in columns, where
    the input has them (CSV as text, Parquet and Arrow typed), broken rows null."""

    rows: list[Row | RowProblem]
    table: pa.Table | None = None


def parse_shard(raw: RawShard, columns: Collection[str] | None = None) -> ParsedShard:
    """Never fails. ``columns``: the ones that ``rows`` must have; None: all."""
    if raw.kind == "jsonl":
        return ParsedShard(parse_lines(raw.payload))
    if raw.kind == "text":
        return ParsedShard([_attempt(_text_row, line) for line in raw.payload.split(b"\n")])
    table, problems = _read_table(raw)
    needed = table if columns is None else table.select([name for name in table.column_names if name in columns])
    rows: list[Row | RowProblem] = [*needed.to_pylist()] if needed.num_columns else [{} for _ in range(raw.num_rows)]
    for position, problem in problems.items():
        rows[position] = problem
    return ParsedShard(rows, table)


def parse_lines(payload: bytes) -> list[Row | RowProblem]:
    """Rows of JSON Lines."""
    if _LONG_INTEGER.search(payload) is not None:
        return [_attempt(_json_row_with_long_integers, line) for line in payload.split(b"\n")]
    rows: list[Row | RowProblem] = []
    for line in payload.split(b"\n"):
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            row = _why_not_json(line, error)
        rows.append(row if isinstance(row, dict | RowProblem) else _attempt(_json_row, line))
    return rows


def _read_table(raw: RawShard) -> tuple[pa.Table, dict[int, RowProblem]]:
    """The columns, and the rows that are broken, which are null there."""
    if raw.kind == "arrow":
        return _without_broken_text(read_stream(raw.payload))
    problems: dict[int, RowProblem] = {}
    tables, done = [], 0
    for part in raw.payload:
        table, broken = _csv_table(part)
        problems |= {done + position: problem for position, problem in broken.items()}
        tables.append(table)
        done += len(part.records)
    return pa.concat_tables(tables, promote_options="default"), problems


def what(value: Any) -> str:
    """``a string``, ``a list`` and so on, for sentences about a value of the wrong type."""
    names = {str: "a string", list: "a list", dict: "an object", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")


def _attempt(parse: Callable[[bytes], Row], line: bytes) -> Row | RowProblem:
    try:
        return parse(line)
    except RowProblem as problem:
        return problem


def _text_row(line: bytes) -> Row:
    try:
        return {"prompt": line.removesuffix(b"\r").decode()}
    except UnicodeDecodeError as error:
        raise _not_utf8(error) from None


def _json_row(line: bytes) -> Row:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise _why_not_json(line, error) from None
    if not isinstance(row, dict):
        raise RowProblem("wrong_type", f"The line holds {what(row)}, not a JSON object.")
    return row


def _json_row_with_long_integers(line: bytes) -> Row:
    row = _json_row(line)
    if _LONG_INTEGER.search(line) is None:
        return row
    try:
        return dict(json.loads(line))
    except (ValueError, RecursionError) as error:  # over 4,300 digits
        raise RowProblem("invalid_json", f"The line is not valid JSON: {error}.") from None


def _why_not_json(line: bytes, error: orjson.JSONDecodeError) -> RowProblem:
    try:
        line.decode()
    except UnicodeDecodeError as undecodable:
        return _not_utf8(undecodable)
    if "surrogate" in error.msg:
        return RowProblem("invalid_utf8", "The line holds a lone surrogate, which is no character.")
    return RowProblem("invalid_json", f"The line is not valid JSON: {error.msg} at character {error.pos + 1}.")


def _not_utf8(error: UnicodeDecodeError) -> RowProblem:
    return RowProblem(
        "invalid_utf8", f"The line is not UTF-8: byte {error.start + 1} is {error.object[error.start]:#x}."
    )


def _csv_table(part: CsvPart) -> tuple[pa.Table, dict[int, RowProblem]]:
    """Text columns of the records. Where one is broken all are read singly, to find which."""
    names = header_names(part.header)
    try:
        return _read_csv(b"\n".join(part.records), names, len(part.records)), {}
    except pa.ArrowInvalid:
        pass
    problems: dict[int, RowProblem] = {}
    tables = []
    for position, record in enumerate(part.records):
        try:
            tables.append(_read_csv(record, names, 1))
        except pa.ArrowInvalid as error:
            problems[position] = _why_not_csv(record, str(error))
            tables.append(pa.table([pa.nulls(1, pa.string())] * len(names), names))
    return pa.concat_tables(tables), problems


def _read_csv(data: bytes, names: Sequence[str], num_rows: int) -> pa.Table:
    table = pa_csv.read_csv(
        pa.BufferReader(data),
        pa_csv.ReadOptions(use_threads=False, column_names=names, block_size=len(data) + 1),
        pa_csv.ParseOptions(newlines_in_values=True),
        pa_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False),
    )
    if len(table) != num_rows:
        raise pa.ArrowInvalid("The records cannot be told apart")
    return table


def _why_not_csv(record: bytes, reason: str) -> RowProblem:
    try:
        record.decode()
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    if ends_in_quotes(record, inside=False):
        return RowProblem("invalid_csv", "The record is not valid CSV: a quote is not closed.")
    counts = re.search(r"Expected (\d+) columns, got (\d+)", reason)
    if counts is None:
        return RowProblem("invalid_csv", "The record is not valid CSV.")
    return RowProblem("invalid_csv", f"The record has {counts[2]} fields where the header has {counts[1]}.")


def _without_broken_text(table: pa.Table) -> tuple[pa.Table, dict[int, RowProblem]]:
    """The table with rows of text that is not UTF-8 made null."""
    if _is_valid(table):
        return table, {}
    broken = [i for i in range(len(table)) if not _is_valid(table.slice(i, 1))]
    problem = RowProblem("invalid_utf8", "A column of the row is not UTF-8.")
    kept = pa.array([None if i in set(broken) else i for i in range(len(table))], pa.int64())
    return table.take(kept), dict.fromkeys(broken, problem)


def _is_valid(table: pa.Table) -> bool:
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
