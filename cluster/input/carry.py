"""The carried columns of one shard, in the types that were fixed before the first shard."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from cluster.input.coltypes import Facts
from cluster.input.parse import ParsedShard, Row, what
from cluster.input.problems import RowProblem
from cluster.input.unify import is_json, json_text

Problems = dict[int, RowProblem]


def carried_table(parsed: ParsedShard, schema: pa.Schema, prefix: str, kind: str) -> tuple[pa.Table, Problems]:
    """Columns of ``schema`` for every row, nulls where a line is broken, and the rows whose values do not fit.

    Values fit by construction unless they came after the rows that fixed the types: beyond the first 10,000 of a
    stream, or beyond an earlier ``--limit``.
    """
    problems: Problems = {}
    columns = []
    for field in schema:
        name = field.name.removeprefix(prefix)
        if kind == "arrow":
            assert parsed.table is not None
            columns.append(_from_typed(parsed.table, field, name, problems))
        elif parsed.table is None:
            values = [row.get(name) if isinstance(row, dict) else None for row in parsed.rows]
            columns.append(_from_json(values, field, name, problems))
        else:
            columns.append(_from_text(parsed.table, field, name, problems))
    return _table(columns, schema, len(parsed.rows)), problems


def unknown_columns(rows: Sequence[Row | RowProblem], known: Set[str]) -> Problems:
    """Rows with a value in a column that has no place in the output."""
    problems: Problems = {}
    for position, row in enumerate(rows):
        if isinstance(row, dict) and not row.keys() <= known:
            late = next((name for name in row if name not in known and row[name] is not None), None)
            if late is not None:
                message = (
                    f"Column {late!r} came after the output's columns were fixed; name those to keep with --carry."
                )
                problems[position] = RowProblem("wrong_type", message)
    return problems


def _from_json(values: list[Any], field: pa.Field, name: str, problems: Problems) -> pa.Array:
    if is_json(field):
        return pa.array(map(json_text, values), pa.string())
    if not _fit(values, field.type):
        for position, value in enumerate(values):
            if not _fit([value], field.type):
                values[position] = None
                problems.setdefault(position, _misfit(name, what(value), field))
    return pa.array(values, field.type)


def _from_typed(table: pa.Table, field: pa.Field, name: str, problems: Problems) -> pa.ChunkedArray:
    """A typed column; values are cast only where files that came later have another type."""
    if name not in table.column_names:
        return pa.chunked_array([pa.nulls(len(table), field.type)])
    column = table.column(name)
    if column.type == field.type:
        return column
    cells = []
    for position in range(len(column)):
        cell = column.slice(position, 1)
        try:
            cells.append(cell.cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            cells.append(pa.chunked_array([pa.nulls(1, field.type)]))
            problems[position] = _misfit(name, f"a value of type {column.type}", field)
    return pa.chunked_array([chunk for cell in cells for chunk in cell.chunks], field.type)


def _from_text(table: pa.Table, field: pa.Field, name: str, problems: Problems) -> pa.Array:
    """A CSV column in its type. An empty field is an empty string in a column of text and null in any other."""
    if name not in table.column_names:
        return pa.nulls(len(table), field.type)
    column = table.column(name).combine_chunks()
    if pt.is_string(field.type):
        return column
    column = pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)
    facts = Facts()
    facts.observe_text(pa.chunked_array([column]))
    if not facts.fits(field.type):
        texts = column.to_pylist()
        for position, text in enumerate(texts):
            if text is not None and not _text_fits(text, field.type):
                texts[position] = None
                problems.setdefault(position, _misfit(name, repr(text[:40]), field))
        column = pa.array(texts, pa.string())
    return pc.equal(pc.utf8_lower(column), "true") if pt.is_boolean(field.type) else column.cast(field.type)


def _fit(values: list[Any], type: pa.DataType) -> bool:
    facts = Facts()
    facts.observe(values)
    return facts.fits(type)


def _text_fits(text: str, type: pa.DataType) -> bool:
    facts = Facts()
    facts.observe_text(pa.chunked_array([[text]], pa.string()))
    return facts.fits(type)


def _misfit(name: str, found: str, field: pa.Field) -> RowProblem:
    return RowProblem("wrong_type", f"Column {name!r} holds {found}, but its type was fixed as {field.type} before.")


def _table(columns: list[Any], schema: pa.Schema, num_rows: int) -> pa.Table:
    """A table that has its number of rows even without columns."""
    if columns:
        return pa.table(columns, schema=schema)
    return pa.table({"none": pa.nulls(num_rows)}).select([])
