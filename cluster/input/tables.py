"""Typed inputs: Parquet and Arrow files, and datasets of the ``datasets`` library."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs

from cluster.config import without_secrets
from cluster.errors import UserError
from cluster.input.files import InputFile, explained
from cluster.input.shards import InputSource, RawShard, cut_tables
from cluster.input.unify import conform, unify_schemas

_BATCH_ROWS = 1024
_FOOTERS_AT_ONCE = 16
STREAM_TYPE_ROWS = 10_000


class TableFileSource(InputSource):
    """Parquet or Arrow files. Columns keep their type; where files disagree they become JSON text."""

    kind = "arrow"

    def __init__(self, files: list[InputFile]) -> None:
        self._files = files
        self.files = [file.name for file in files]
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
            heads = list(pool.map(_read_head, files))
        self._schema = unify_schemas(schema for schema, _ in heads)
        self._count = sum(rows for _, rows in heads)

    def count(self) -> int:
        return self._count

    def shards(self, shard_rows: int, limit: int | None = None) -> Iterator[RawShard]:
        return cut_tables(self._tables(), shard_rows, limit)

    def columns(self) -> list[str]:
        return self._schema.names

    def schema(self) -> pa.Schema:
        return self._schema

    def _tables(self) -> Iterator[pa.Table]:
        for file in self._files:
            with explained(file.name):
                for table in _read_tables(file):
                    yield conform(table, self._schema)


class DatasetSource(InputSource):
    """A dataset of the ``datasets`` library: saved on disk (``count`` known) or streamed."""

    kind = "arrow"

    def __init__(self, name: str, dataset: Any) -> None:
        self.files = [name]
        self._dataset = dataset.with_format("arrow")
        self._is_stream = not hasattr(dataset, "__len__")
        if dataset.features is not None:
            self._schema = unify_schemas([dataset.features.arrow_schema])
        else:
            head = itertools.islice(self._batches(), STREAM_TYPE_ROWS // _BATCH_ROWS + 1)
            self._schema = unify_schemas(table.schema for table in head)

    def count(self) -> int | None:
        return None if self._is_stream else len(self._dataset)

    def shards(self, shard_rows: int, limit: int | None = None) -> Iterator[RawShard]:
        return cut_tables(self._tables(), shard_rows, limit)

    def columns(self) -> list[str]:
        return self._schema.names

    def schema(self) -> pa.Schema:
        return self._schema

    def _tables(self) -> Iterator[pa.Table]:
        # A stream without declared types may leave, later on, the ones that its first rows had.
        with explained(self.files[0]):
            for table in self._batches():
                yield conform(table, self._schema)

    def _batches(self) -> Iterator[pa.Table]:
        with explained(self.files[0]):
            yield from self._dataset.iter(batch_size=_BATCH_ROWS)


def open_saved(prompts: str, split: str | None) -> DatasetSource | None:
    """The folder of ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk``; None if it is no such folder."""
    shown = without_secrets(prompts)
    if prompts.startswith(("http://", "https://")):  # no folders there, and any question may be answered with yes
        return None
    with explained(shown):
        fs, path = url_to_fs(prompts)
        path = path.rstrip("/")
        is_dict = fs.isfile(f"{path}/dataset_dict.json")
        if not is_dict and not fs.isfile(f"{path}/state.json"):
            return None
        # Imported here: it takes seconds, and most inputs do not need it.
        from datasets import load_from_disk

        saved = load_from_disk(prompts)
    if is_dict:
        split = choose_split(shown, list(saved), split)
        return DatasetSource(f"{shown} ({split})", saved[split])
    if split is not None:
        raise UserError(f"{shown} holds a single dataset, so --split {split} has no meaning.")
    return DatasetSource(shown, saved)


def choose_split(name: str, available: list[str], split: str | None) -> str:
    """The split that was asked for, or the only one. ``UserError`` names those that there are."""
    if split is None and len(available) == 1:
        return available[0]
    if split in available:
        return str(split)
    has = f"{name} has the splits {', '.join(available)}"
    raise UserError(f"{has}; choose one with --split." if split is None else f"{has}, but no {split!r}.")


def _read_head(file: InputFile) -> tuple[pa.Schema, int]:
    """Schema and number of rows."""
    with explained(file.name), file.open() as handle:
        if file.format == "parquet":
            parquet = pq.ParquetFile(handle)
            return parquet.schema_arrow, parquet.metadata.num_rows
        reader = _arrow_reader(handle)
        return reader.schema, sum(batch.num_rows for batch in _arrow_batches(reader))


def _read_tables(file: InputFile) -> Iterator[pa.Table]:
    with file.open() as handle:
        if file.format == "parquet":
            # A local file is read by Arrow itself, which is faster than through a Python handle.
            batches = pq.ParquetFile(file.path if file.is_local else handle).iter_batches(_BATCH_ROWS)
        else:
            batches = _arrow_batches(_arrow_reader(handle))
        for batch in batches:
            yield pa.Table.from_batches([batch])


def _arrow_reader(handle: Any) -> Any:
    """Arrow files come in two forms: with a footer, and as a stream (what ``datasets`` writes)."""
    try:
        return pa.ipc.open_file(handle)
    except pa.ArrowInvalid:
        handle.seek(0)
        return pa.ipc.open_stream(handle)


def _arrow_batches(reader: Any) -> Iterator[pa.RecordBatch]:
    if isinstance(reader, pa.RecordBatchFileReader):
        return (reader.get_batch(i) for i in range(reader.num_record_batches))
    return iter(reader)
