"""The input: finding it, opening it, and streaming the rows of text files as shards."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from cluster.config import JobConfig, without_secrets
from cluster.errors import UserError
from cluster.input.files import InputFile, find_files
from cluster.input.hub import open_hub
from cluster.input.records import csv_header, csv_records, json_records, line_records
from cluster.input.shards import InputSource, RawShard, cut_csv, cut_lines
from cluster.input.tables import TableFileSource, open_saved

__all__ = ["InputSource", "RawShard", "open_input"]


def open_input(config: JobConfig) -> InputSource:
    """Find and open ``config.prompts``. Raises ``UserError`` when nothing is there, readable or inside."""
    source = _open(config.prompts, config.split)
    if next(source.shards(1, 1), None) is None:
        raise UserError(f"--prompts {without_secrets(config.prompts)} has no rows.")
    return source


class LineSource(InputSource):
    """JSON Lines, JSON arrays and plain text: every row is one line of text by the time it is shipped."""

    def __init__(self, files: list[InputFile]) -> None:
        self._files = files
        self._read = json_records if files[0].format == "json" else line_records
        self.kind = "text" if files[0].format == "text" else "jsonl"
        self.files = [file.name for file in files]
        self._count: int | None = None

    def count(self) -> int:
        if self._count is None:
            self._count = sum(len(lines) for lines in self._lines())
        return self._count

    def shards(self, shard_rows: int, limit: int | None = None) -> Iterator[RawShard]:
        return cut_lines(self.kind, self._lines(), shard_rows, limit)

    def columns(self) -> list[str] | None:
        return ["prompt"] if self.kind == "text" else None

    def _lines(self) -> Iterator[list[bytes]]:
        return chain.from_iterable(map(self._read, self._files))


class CsvSource(InputSource):
    """CSV files with a header line each; a column that a file lacks is null there."""

    kind = "csv"

    def __init__(self, files: list[InputFile]) -> None:
        self._files = files
        self.files = [file.name for file in files]
        self._columns = list(dict.fromkeys(name for file in files for name in csv_header(file)))
        self._count: int | None = None

    def count(self) -> int:
        if self._count is None:
            self._count = sum(len(part.records) for file in self._files for part in csv_records(file))
        return self._count

    def shards(self, shard_rows: int, limit: int | None = None) -> Iterator[RawShard]:
        return cut_csv(chain.from_iterable(map(csv_records, self._files)), shard_rows, limit)

    def columns(self) -> list[str]:
        return self._columns


def _open(prompts: str, split: str | None) -> InputSource:
    saved = open_saved(prompts, split)
    if saved is not None:
        return saved
    files = find_files(prompts)
    if files is None:
        return open_hub(prompts, split)
    if split is not None:
        raise UserError(f"--split {split} has no meaning for files; it names a part of a dataset.")
    format = files[0].format
    if format == "csv":
        return CsvSource(files)
    if format in ("parquet", "arrow"):
        return TableFileSource(files)
    return LineSource(files)
