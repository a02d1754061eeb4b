"""One type for columns that different files or rows give different types, or JSON text where there is none."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

_FAMILIES = (pt.is_signed_integer, pt.is_unsigned_integer, pt.is_floating)
_TEXTS = (pt.is_string, pt.is_large_string, pt.is_string_view)
JSON_TEXT = {b"json": b"1"}
"""Field metadata of a string column whose values are JSON."""


def json_field(name: str) -> pa.Field:
    """A column whose values are carried as JSON text."""
    return pa.field(name, pa.string(), metadata=JSON_TEXT)


def is_json(field: pa.Field) -> bool:
    return (field.metadata or {}).get(b"json") == b"1"


def json_text(value: Any) -> str | None:
    """A value as JSON text; a null stays a null."""
    return None if value is None else json.dumps(value, ensure_ascii=False, default=str)


def unify_schemas(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """Every column of any of the schemas, in order of appearance; JSON text where a common type would change values."""
    types: dict[str, list[pa.DataType]] = {}
    for schema in schemas:
        for field in schema:
            seen = types.setdefault(field.name, [])
            if field.type not in seen:
                seen.append(field.type)
    return pa.schema([_unify(name, seen) for name, seen in types.items()])


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with exactly the schema's columns: cast, written as JSON text, or null where it lacks one.

    Raises ``pyarrow.ArrowInvalid`` for a value that the type does not hold.
    """
    columns = []
    for field in schema:
        if field.name not in table.column_names:
            columns.append(pa.nulls(len(table), field.type))
            continue
        column = table.column(field.name)
        if is_json(field):
            column = pa.array(map(json_text, column.to_pylist()), pa.string())
        columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.table(columns, schema=schema)


def _unify(name: str, types: list[pa.DataType]) -> pa.Field:
    common = _common_type([type for type in types if not pt.is_null(type)])
    return json_field(name) if common is None else pa.field(name, common)


def _common_type(types: list[pa.DataType]) -> pa.DataType | None:
    """The type that holds every value of all of them unchanged, or None."""
    if len(types) <= 1:
        return types[0] if types else pa.string()
    if all(any(is_text(type) for is_text in _TEXTS) for type in types):
        return pa.large_string()
    if all(pt.is_list(type) or pt.is_large_list(type) for type in types):
        item = _common_type(list(dict.fromkeys(type.value_type for type in types)))
        return None if item is None else pa.large_list(item)
    for is_member in _FAMILIES:
        if all(map(is_member, types)):
            return max(types, key=lambda type: type.bit_width)
    return None
