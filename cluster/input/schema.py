"""Which input columns go to the output, under which names and types."""

from __future__ import annotations

import base64
import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from cluster.config import JobConfig
from cluster.errors import UserError
from cluster.input.coltypes import Facts, merge_columns
from cluster.input.parse import parse_shard
from cluster.input.shards import InputSource, RawShard
from cluster.input.unify import is_json, json_field

OUTPUT_COLUMNS = (
    "row_id", "sample_id", "output_text", "output_token_ids", "finish_reason", "error", "error_kind", "flags",
    "num_prompt_tokens", "num_output_tokens", "num_forwards", "drafts_proposed", "drafts_accepted",
    "accepted_by_depth", "fold_rate", "recomputed_rows", "seconds",
)  # fmt: skip
PROMPT_COLUMNS = ("prompt", "messages", "prompt_token_ids")
TYPE_ROWS = 10_000
"""At least so many rows fix the types, whatever ``--limit`` is, so that a larger limit later finds the same types."""
_SCAN_SHARD_ROWS = 4096
_MAX_COLUMNS = 2000

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


def carried_schema(source: InputSource, config: JobConfig, run: Map = map, flag: str = "--carry") -> pa.Schema:
    """Names (as in the output) and types of the carried columns, which the user has named by ``flag``.

    ``run`` may spread the pass over shards to other processes; it must do what ``map`` does, order included. A resumed
    run takes its schema from ``run.json`` instead. Raises ``UserError`` for a missing column, or one named like an
    output column.
    """
    declared = source.schema()
    if declared is None:
        declared = _types_from_rows(source, config, run)
    if len(declared):
        _check_prompt_column(declared, config)
    carried = [declared.field(name) for name in _carried_names(declared, config, flag)]
    renamed = [field.with_name(config.input_prefix + field.name) for field in carried]
    _check_collisions([field.name for field in renamed], config)
    return pa.schema(renamed)


def prompt_columns(config: JobConfig) -> tuple[str, ...]:
    """Columns that may hold a row's prompt; a template makes the prompt itself and leaves none."""
    if config.prompt_template is not None:
        return ()
    return (config.prompt_column or PROMPT_COLUMNS[0], *PROMPT_COLUMNS[1:])


def scan_columns(raw: RawShard) -> dict[str, Facts]:
    """What the shard's values say about the types of its columns. Broken rows say nothing."""
    parsed = parse_shard(raw, columns=())
    facts: dict[str, Facts] = {}
    if parsed.table is not None:
        for name in parsed.table.column_names:
            facts[name] = Facts()
            facts[name].observe_text(parsed.table.column(name))
        return facts
    values: dict[str, list[Any]] = {}
    for row in parsed.rows:
        if isinstance(row, dict):
            for name, value in row.items():
                values.setdefault(name, []).append(value)
    for name, column in values.items():
        facts[name] = Facts()
        facts[name].observe(column)
    return facts


def schema_to_json(schema: pa.Schema) -> dict[str, Any]:
    """The schema as JSON values for ``run.json``: readable types, and the exact form beside them."""
    types = {field.name: "JSON text" if is_json(field) else str(field.type) for field in schema}
    return {"columns": types, "arrow": base64.b64encode(schema.serialize()).decode()}


def schema_from_json(value: dict[str, Any]) -> pa.Schema:
    """Inverse of ``schema_to_json``."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(value["arrow"])))


def _types_from_rows(source: InputSource, config: JobConfig, run: Map) -> pa.Schema:
    """One pass over the rows. Text files are never a stream of unknown length, so it covers all rows of the run."""
    if source.kind == "text":
        return pa.schema([("prompt", pa.string())])
    limit = None if config.limit is None else max(config.limit, TYPE_ROWS)
    columns = merge_columns(run(scan_columns, source.shards(_SCAN_SHARD_ROWS, limit)))
    if len(columns) > _MAX_COLUMNS:
        raise UserError(f"The rows have over {_MAX_COLUMNS} different columns; name those to keep with --carry.")
    names = source.columns() or list(columns)
    fallback = pa.string() if source.kind == "csv" else None
    types = {name: columns.get(name, Facts()).arrow_type() or fallback for name in names}
    return pa.schema([json_field(name) if type is None else pa.field(name, type) for name, type in types.items()])


def _check_prompt_column(schema: pa.Schema, config: JobConfig) -> None:
    names = schema.names
    if config.prompt_column is not None and config.prompt_column not in names:
        raise UserError(f"--prompt-column {config.prompt_column} does not exist.{_hint(config.prompt_column, names)}")
    wanted = prompt_columns(config)
    if wanted and not any(name in names for name in wanted) and not _holds_batch_lines(schema):
        raise UserError(
            f"The input has none of the columns prompt, messages and prompt_token_ids; name the one to use with "
            f"--prompt-column.{_hint('', names)}"
        )


def _carried_names(schema: pa.Schema, config: JobConfig, flag: str) -> Sequence[str]:
    if config.carry == "none":
        return []
    if config.carry == "all":
        prompt = {*prompt_columns(config), *(["body"] if _holds_batch_lines(schema) else [])}
        return [name for name in schema.names if name not in prompt]
    names = list(dict.fromkeys(name.strip() for name in config.carry.split(",")))
    for name in names:
        if name not in schema.names:
            raise UserError(f"{flag} names the column {name!r}, which does not exist.{_hint(name, schema.names)}")
    return names


def _holds_batch_lines(schema: pa.Schema) -> bool:
    """Whether the rows look like OpenAI batch requests: ``custom_id`` and an object ``body``."""
    if "custom_id" not in schema.names or "body" not in schema.names:
        return False
    body = schema.field("body")
    return pt.is_struct(body.type) or is_json(body)


def _check_collisions(names: Sequence[str], config: JobConfig) -> None:
    taken = [name for name in names if name in OUTPUT_COLUMNS]
    if not taken:
        return
    which = f"The input column {taken[0]!r} is named like an output column"
    if config.input_prefix:
        which = (
            f"With --input-prefix {config.input_prefix} the input column {taken[0]!r} is named like an output column"
        )
    raise UserError(f"{which}; choose another --input-prefix, such as in_, or leave the column out with --carry.")


def _hint(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, 1)
    if close:
        return f" Did you mean {close[0]}?"
    shown = ", ".join(names[:20]) + (" and more" if len(names) > 20 else "")
    return f" The columns are {shown}."
