"""A few rows of the parts for people to look at: outputs, errors, flagged outputs. Bounded, whatever a part holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.output.sink import output_schema, part_name, quarantine_name
from cluster.output.storage import StorageError, Store
from specfold.request import ERROR

MAX_TEXT, MAX_VALUE, MAX_CARRIED = 1_500, 200, 6
_BATCH_ROWS = 64


@dataclass(frozen=True)
class Example:
    """One output row, its texts cut to a size that a page can hold."""

    row_id: int
    sample_id: int
    text: str
    finish_reason: str
    num_tokens: int
    flags: list[str] = field(default_factory=list)
    carried: list[tuple[str, str]] = field(default_factory=list)


def find_outputs(store: Store, index: int, count: int) -> list[Example]:
    """The first outputs of a part that are no error."""
    return _find(store, part_name(index), count, lambda row: row["finish_reason"] != ERROR)


def find_flagged(store: Store, index: int, flag: str, count: int) -> list[Example]:
    """The first rows of a part with a flag, those in quarantine before those in ``data/``."""
    found: list[Example] = []
    for name in (quarantine_name(index), part_name(index)):
        found += _find(store, name, count - len(found), lambda row: flag in row["flags"])
    return found


def find_errors(store: Store, index: int, kind: str, count: int) -> list[Example]:
    """The first rows of a part with an error of a kind; ``text`` is its message."""
    return _find(store, part_name(index), count, lambda row: row["error_kind"] == kind)


def shorten(value: Any, limit: int) -> str:
    """The value as text of at most ``limit`` characters and what was cut; characters that show nothing are marked."""
    text = value if isinstance(value, str) else repr(value)
    more = len(text) - limit
    text = "".join(c if c.isprintable() or c in "\n\t" else _mark(c) for c in text[:limit])
    return text if more <= 0 else f"{text}… ({more:,} more characters)"


def _mark(character: str) -> str:
    """Spaces of all kinds stay; control characters, also those that turn the direction of text, become visible."""
    return " " if character.isspace() and character != "\r" else "\N{REPLACEMENT CHARACTER}"


def _find(store: Store, name: str, count: int, fits: Callable[[dict[str, Any]], bool]) -> list[Example]:
    """Reads no further than the last row it needs. None for a part that has gone or cannot be read."""
    found: list[Example] = []
    try:
        for row in _rows(store, name) if count > 0 else ():
            if fits(row):
                found.append(_example(row))
            if len(found) == count:
                break
    except (OSError, ValueError, StorageError):
        pass  # a part that is damaged is the next session's business
    return found


def _rows(store: Store, name: str) -> Iterator[dict[str, Any]]:
    with store.open(name) as handle:
        file = pq.ParquetFile(handle)
        wanted = [column for column in file.schema_arrow.names if column != "output_token_ids"]
        for batch in file.iter_batches(_BATCH_ROWS, columns=wanted):
            yield from batch.to_pylist()


def _example(row: dict[str, Any]) -> Example:
    own = output_schema(pa.schema([])).names
    carried = [(name, value) for name, value in row.items() if name not in own and value is not None]
    return Example(
        row["row_id"],
        row["sample_id"],
        shorten(row["error"] if row["finish_reason"] == ERROR else row["output_text"], MAX_TEXT),
        row["finish_reason"],
        row["num_output_tokens"],
        list(row["flags"]),
        [(shorten(name, MAX_VALUE), shorten(value, MAX_VALUE)) for name, value in carried[:MAX_CARRIED]],
    )
