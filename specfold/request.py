"""What goes into the engine and what comes out: one request and one completion a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specfold.stats import DecodeStats

STOP, LENGTH, ERROR = "stop", "length", "error"


@dataclass(slots=True)  # frozen it takes three times as long to make, for every row
class Request:
    """One row to decode. A field that is None takes the value of the engine's ``DecodeConfig``.

    ``row_id`` and ``sample_id`` name the row and key its sampling noise: the same pair gives the same tokens in any
    batch, order or retry.
    """

    prompt_ids: Sequence[int]
    row_id: int = 0
    sample_id: int = 0
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None


@dataclass(slots=True)
class Completion:
    """A finished row.

    ``token_ids`` and ``text`` hold neither the stop token nor the stop string. ``finish_reason`` is ``stop``,
    ``length`` or ``error``; with ``error`` the message is one sentence and ``error_kind`` one of ``invalid_prompt``,
    ``too_long``, ``nan_logits``, ``no_memory``.
    """

    row_id: int
    sample_id: int
    token_ids: list[int]
    text: str
    finish_reason: str
    error: str | None = None
    error_kind: str | None = None
    stats: DecodeStats = field(default_factory=DecodeStats)
