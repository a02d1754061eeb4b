"""What can be wrong with one input row. Such a row becomes an error row; it never stops the job."""

from __future__ import annotations

INPUT_ERROR_KINDS = frozenset(
    {
        "invalid_json", "invalid_csv", "invalid_utf8", "missing_prompt", "ambiguous_prompt", "wrong_type",
        "empty_prompt", "template_error", "too_long", "mask_in_prompt", "invalid_token_id", "unsupported_option",
    }
)  # fmt: skip
"""Errors that lie in the row itself: the same on every attempt, so never tried again."""


class RowProblem(Exception):
    """Why a row cannot be decoded: a kind out of ``INPUT_ERROR_KINDS`` and one sentence."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
