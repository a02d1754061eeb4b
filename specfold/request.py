"""What goes into the engine and what comes out: one request and one completion a row."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specfold.config import ConfigError, DecodeConfig
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

    def problem(self, config: DecodeConfig) -> str | None:
        """What is wrong with the row's own settings, in one sentence, or None."""
        names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop")
        own = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        try:
            replace(config, **own)
            struct.pack("<qq", self.row_id, self.sample_id)
        except ConfigError as error:
            return str(error)
        except struct.error:
            return f"row_id and sample_id must be whole numbers of 64 bits, not {self.row_id!r} and {self.sample_id!r}."
        return None


@dataclass(slots=True)
class Completion:
    """A finished row.

    ``token_ids`` and ``text`` hold neither the stop token nor the stop string. ``finish_reason`` is ``stop``,
    ``length`` or ``error``; with ``error`` the message is one sentence and ``error_kind`` one of ``empty_prompt``,
    ``invalid_token_id``, ``mask_in_prompt``, ``too_long``, ``unsupported_option``, ``nan_logits``, ``no_memory``.
    """

    row_id: int
    sample_id: int
    token_ids: list[int]
    text: str
    finish_reason: str
    error: str | None = None
    error_kind: str | None = None
    stats: DecodeStats = field(default_factory=DecodeStats)
