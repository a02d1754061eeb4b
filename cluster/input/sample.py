"""The first rows of an input, prepared in this process: what calibration and profiling look at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pyarrow as pa

from cluster.config import JobConfig, without_secrets
from cluster.errors import UserError
from cluster.input.rows import PreparedRow, RowPreparer
from cluster.input.schema import carried_schema
from cluster.input.shards import InputSource, RawShard

_SHARD_ROWS = 256


def sample_rows(config: JobConfig, source: InputSource, folder: str, count: int, skip: int = 0) -> list[PreparedRow]:
    """Up to ``count`` rows that can be decoded, after ``skip`` such rows. Raises ``UserError`` where there is none."""
    rows, problem = prepare_rows(config, folder, source.shards(_SHARD_ROWS, config.limit), skip + count)
    if len(rows) <= skip:
        name = without_secrets(config.prompts)
        if skip:
            raise UserError(f"--prompts {name} has {len(rows)} rows that can be decoded; more than {skip} are needed.")
        raise UserError(f"no row can be decoded: {problem}")
    return rows[skip:]


def prepare_rows(
    config: JobConfig, folder: str, shards: Iterable[RawShard], count: int
) -> tuple[list[PreparedRow], str | None]:
    """The first ``count`` rows that can be decoded, and what is wrong with the first that cannot."""
    preparer = RowPreparer(replace(config, carry="none"), folder, pa.schema([]))
    good: list[PreparedRow] = []
    problem = None
    for raw in shards:
        for row in preparer.prepare(raw)[0]:
            if row.error is None:
                good.append(row)
            elif problem is None:
                problem = f"row {row.row_id}: {row.error}"
        if len(good) >= count:
            break
    return good[:count], problem


def sample_answers(
    config: JobConfig, source: InputSource, folder: str, rows: list[PreparedRow], column: str | None
) -> list[str | None]:
    """What a column of the input says for each of the sampled rows, as text; None where it says nothing."""
    if column is None:
        return [None] * len(rows)
    carrying = replace(config, carry=column, input_prefix="")
    preparer = RowPreparer(carrying, folder, carried_schema(source, carrying, flag="--answer-column"))
    found: dict[int, str | None] = {}
    for raw in source.shards(_SHARD_ROWS, rows[-1].row_id + 1):
        values = preparer.prepare(raw)[1][column].to_pylist()
        found |= {raw.first_row + i: None if v is None else str(v) for i, v in enumerate(values)}
    return [found[row.row_id] for row in rows]
