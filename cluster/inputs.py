"""The input as a stream of shards: consecutive rows, unparsed, with a hash of their content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from cluster.config import JobConfig

Kind = Literal["jsonl", "csv", "text", "arrow"]


@dataclass(frozen=True)
class RawShard:
    """Consecutive input rows as they stand in the input; only ``cluster.rows`` looks inside ``payload``.

    ``first_row`` numbers rows over the whole input. ``digest`` is the hash of the rows' content, the same in every run.
    """

    index: int
    first_row: int
    num_rows: int
    kind: Kind
    payload: Any
    digest: str

    def head_digest(self, num_rows: int) -> str:
        """What ``digest`` would be if the shard had only its first ``num_rows`` rows."""
        raise NotImplementedError


class InputSource:
    """An opened input. ``files`` names what was found, in row order."""

    files: list[str]

    def count(self) -> int | None:
        """Number of input rows, before ``--limit``; None for a stream of unknown length."""
        raise NotImplementedError

    def shards(self, shard_rows: int, limit: int | None = None) -> Iterator[RawShard]:
        """All rows, ``shard_rows`` at a time, in constant memory. Can be called again."""
        raise NotImplementedError


def open_input(config: JobConfig) -> InputSource:
    """Find and open ``config.prompts``. Raises ``UserError`` when nothing is there, readable or inside."""
    raise NotImplementedError
