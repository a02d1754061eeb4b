"""Prepared rows as requests for the engine."""

from __future__ import annotations

from cluster.input.rows import PreparedRow
from cluster.messages import RowKey
from specfold.request import Request


def make_request(key: RowKey, row: PreparedRow) -> Request:
    """The row for the engine; what it brings goes before the job's settings."""
    return Request(
        row.prompt_ids or [],
        *key,
        max_new_tokens=row.max_new_tokens,
        temperature=row.temperature,
        top_p=row.top_p,
        seed=row.seed,
        stop=row.stop,
    )
