"""From raw rows to prompts in tokens, and to the columns that are carried along."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from cluster.config import JobConfig
from cluster.inputs import RawShard

INPUT_ERROR_KINDS = frozenset(
    {
        "invalid_json", "invalid_csv", "invalid_utf8", "missing_prompt", "ambiguous_prompt", "wrong_type",
        "empty_prompt", "template_error", "too_long", "mask_in_prompt", "invalid_token_id", "unsupported_option",
    }
)  # fmt: skip
"""Errors that lie in the row itself: the same on every attempt, so never tried again."""


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """An input row ready to decode, or the reason why it is not. None in an override: the job's setting holds."""

    row_id: int
    prompt_ids: list[int] | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    error: str | None = None
    error_kind: str | None = None


class RowPreparer:
    """Turns raw shards into prepared rows. Cheap to build: reads the tokenizer and the model's config, no weights."""

    def __init__(self, config: JobConfig, model_folder: str, carried: pa.Schema) -> None:
        raise NotImplementedError

    def prepare(self, raw: RawShard) -> tuple[list[PreparedRow], pa.Table]:
        """One prepared row per input row, and the carried columns of the same rows (nulls for a broken line)."""
        raise NotImplementedError
