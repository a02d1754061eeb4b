"""Which input columns go to the output, and their types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa

from cluster.config import JobConfig
from cluster.inputs import InputSource

OUTPUT_COLUMNS = (
    "row_id", "sample_id", "output_text", "output_token_ids", "finish_reason", "error", "error_kind", "flags",
    "num_prompt_tokens", "num_output_tokens", "num_forwards", "drafts_proposed", "drafts_accepted",
    "accepted_by_depth", "fold_rate", "recomputed_rows", "seconds",
)  # fmt: skip

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


def carried_schema(source: InputSource, config: JobConfig, run: Map = map) -> pa.Schema:
    """Names (as in the output) and types of the carried columns.

    ``run`` may spread the pass over shards to other processes; it must keep the signature of ``map`` and may return
    results in any order. Raises ``UserError`` for a missing column or one named like an output column.
    """
    raise NotImplementedError


def schema_to_json(schema: pa.Schema) -> str:
    """The schema as text for ``run.json``."""
    raise NotImplementedError


def schema_from_json(text: str) -> pa.Schema:
    """Inverse of ``schema_to_json``."""
    raise NotImplementedError
