"""Consecutive input rows, unparsed: what an input offers, how it is cut into shards, and the hash of their content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import pyarrow as pa

from cluster.input.records import CsvPart

Kind = Literal["jsonl", "csv", "text", "arrow"]
T = TypeVar("T")


@dataclass(frozen=True)
class RawShard:
    """Consecutive input rows as they stand in the input; only ``cluster.input.parse`` looks inside ``payload``.

    ``first_row`` numbers rows over the whole input. ``digest`` is the hash of the rows' content, the same in every run.
    ``payload``: lines joined by line feeds (``jsonl``, ``text``), an Arrow stream (``arrow``), or ``CsvPart``s.
    """

    index: int
    first_row: int
    num_rows: int
    kind: Kind
    payload: Any
    digest: str

    def head(self, num_rows: int) -> RawShard:
        """The shard that an input ending after ``num_rows`` of these rows would have given."""
        if num_rows >= self.num_rows:
            return self
        payload = _head(self.kind, self.payload, num_rows)
        return replace(self, num_rows=num_rows, payload=payload, digest=_digest(self.kind, payload))

    def head_digest(self, num_rows: int) -> str:
        """What ``digest`` would be if the shard had only its first ``num_rows`` rows."""
        return self.head(num_rows).digest


class InputSource:
    """An opened input. ``files`` names what was found, in row order."""

    kind: Kind
    files: list[str]

    def count(self) -> int | None:
        """Number of input rows, before ``--limit``; None for a stream of unknown length."""
        raise NotImplementedError

    def shards(self, shard_rows: int, limit: int | None = None) -> Iterator[RawShard]:
        """All rows, ``shard_rows`` at a time, in constant memory. Can be called again.

        Raises ``UserError`` where a file turns out to be damaged.
        """
        raise NotImplementedError

    def columns(self) -> list[str] | None:
        """Names of the columns, if the input declares them."""
        return None

    def schema(self) -> pa.Schema | None:
        """Types of the columns, if the input declares them."""
        return None


def cut_lines(kind: Kind, bunches: Iterable[list[bytes]], shard_rows: int, limit: int | None) -> Iterator[RawShard]:
    """Shards of records that are one line each."""
    groups = _regroup(bunches, shard_rows, limit, len, lambda lines, start, stop: lines[start:stop])
    joined = ((size, b"\n".join([line for lines in pieces for line in lines])) for size, pieces in groups)
    return _number(kind, shard_rows, joined)


def cut_csv(bunches: Iterable[CsvPart], shard_rows: int, limit: int | None) -> Iterator[RawShard]:
    """Shards of CSV records, each under the header of its file."""

    def part(bunch: CsvPart, start: int, stop: int) -> CsvPart:
        return CsvPart(bunch.header, bunch.records[start:stop])

    groups = _regroup(bunches, shard_rows, limit, lambda bunch: len(bunch.records), part)
    return _number("csv", shard_rows, groups)


def cut_tables(tables: Iterable[pa.Table], shard_rows: int, limit: int | None) -> Iterator[RawShard]:
    """Shards of typed rows. All tables must have one schema."""
    groups = _regroup(tables, shard_rows, limit, len, lambda table, start, stop: table.slice(start, stop - start))
    streams = ((size, _to_stream(pa.concat_tables(pieces))) for size, pieces in groups)
    return _number("arrow", shard_rows, streams)


def read_stream(payload: bytes) -> pa.Table:
    """The table in an ``arrow`` payload."""
    return pa.ipc.open_stream(payload).read_all()


def _number(kind: Kind, shard_rows: int, payloads: Iterator[tuple[int, Any]]) -> Iterator[RawShard]:
    for index, (size, payload) in enumerate(payloads):
        yield RawShard(index, index * shard_rows, size, kind, payload, _digest(kind, payload))


def _regroup(
    bunches: Iterable[T],
    rows: int,
    limit: int | None,
    length: Callable[[T], int],
    part: Callable[[T, int, int], T],
) -> Iterator[tuple[int, list[T]]]:
    """Pieces of bunches that together have ``rows`` rows (fewer at the end), and how many they have."""
    pieces: list[T] = []
    held, left = 0, limit
    for bunch in bunches:
        start, end = 0, length(bunch) if left is None else min(length(bunch), left)
        left = None if left is None else left - end
        while start < end:
            stop = min(end, start + rows - held)
            pieces.append(part(bunch, start, stop))
            held, start = held + stop - start, stop
            if held == rows:
                yield held, pieces
                pieces, held = [], 0
        if left == 0:
            break
    if held:
        yield held, pieces


def _to_stream(table: pa.Table) -> bytes:
    """The rows as an Arrow stream whose bytes depend on nothing but the rows.

    A slice drags the buffers of its whole batch along, and its bytes depend on where the file's row groups end;
    ``take`` copies just the rows into fresh buffers.
    """
    fresh = table.replace_schema_metadata(None).take(pa.array(range(len(table)), pa.int64())).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, fresh.schema) as writer:
        writer.write_table(fresh)
    return sink.getvalue().to_pybytes()


def _head(kind: Kind, payload: Any, num_rows: int) -> Any:
    if kind == "arrow":
        return _to_stream(read_stream(payload).slice(0, num_rows))
    if kind != "csv":
        return b"\n".join(payload.split(b"\n")[:num_rows])
    parts: list[CsvPart] = []
    for header, records in payload:
        parts.append(CsvPart(header, records[: max(0, num_rows)]))
        num_rows -= len(records)
    return [part for part in parts if part.records]


def _digest(kind: Kind, payload: Any) -> str:
    hasher = hashlib.blake2b(kind.encode(), digest_size=16)
    if kind == "csv":
        for header, records in payload:
            for record in records:
                hasher.update(b"%d,%d:" % (len(header), len(record)) + header + record)
    elif kind == "arrow":
        hasher.update(_without_dictionaries(payload))
    else:
        hasher.update(payload)
    return hasher.hexdigest()


def _without_dictionaries(payload: bytes) -> bytes:
    """A dictionary holds values of rows beyond the shard, so the hash is of the values themselves."""
    table = read_stream(payload)
    if not any(pa.types.is_dictionary(field.type) for field in table.schema):
        return payload
    columns = [c.cast(c.type.value_type) if pa.types.is_dictionary(c.type) else c for c in table.columns]
    return _to_stream(pa.table(columns, table.column_names))
