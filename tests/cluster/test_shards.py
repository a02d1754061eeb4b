"""Shards partition the rows for any layout, size and limit, and their hash is one of the rows' content alone."""

from __future__ import annotations

import csv
import io
import json
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import JobConfig
from cluster.input.files import find_files
from cluster.input.parse import parse_shard
from cluster.input.records import csv_records, line_records
from cluster.input.shards import RawShard
from cluster.input.source import open_input

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
FILES = st.lists(st.lists(TEXT, max_size=9), min_size=1, max_size=4).filter(lambda files: any(files))
FORMATS = ("jsonl", "json", "csv", "parquet", "arrow")


def write(path: Path, format: str, prompts: list[str], row_group: int) -> None:
    rows = [{"prompt": prompt, "id": i} for i, prompt in enumerate(prompts)]
    schema = pa.schema({"prompt": pa.string(), "id": pa.int64()})
    table = pa.Table.from_pylist(rows, schema=schema)
    if format == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif format == "json":
        path.write_text(json.dumps(rows, indent=row_group % 3 or None))
    elif format == "csv":
        with path.open("w", newline="") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL)
            writer.writerows([["prompt", "id"], *([row["prompt"], row["id"]] for row in rows)])
    elif format == "parquet":
        pq.write_table(table, path, row_group_size=row_group)
    else:
        with pa.ipc.new_stream(str(path), schema) as sink:
            sink.write_table(table, max_chunksize=row_group)


def shards_of(folder: str, shard_rows: int, limit: int | None = None) -> list[RawShard]:
    return list(open_input(JobConfig(prompts=folder)).shards(shard_rows, limit))


def prompts_of(shards: list[RawShard]) -> list[Any]:
    return [row["prompt"] for raw in shards for row in parse_shard(raw).rows if isinstance(row, dict)]


@settings(max_examples=80)
@given(
    files=FILES,
    format=st.sampled_from(FORMATS),
    shard_rows=st.integers(1, 12),
    limit=st.none() | st.integers(1, 40),
    row_group=st.integers(1, 5),
)
def test_shards_partition_the_rows(
    files: list[list[str]], format: str, shard_rows: int, limit: int | None, row_group: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number, prompts in enumerate(files):
            write(Path(folder, f"{number}.{format}"), format, prompts, row_group)
        shards = shards_of(folder, shard_rows, limit)
    expected = [prompt for prompts in files for prompt in prompts][:limit]
    assert prompts_of(shards) == expected
    assert [raw.index for raw in shards] == list(range(len(shards)))
    assert [raw.first_row for raw in shards] == [i * shard_rows for i in range(len(shards))]
    assert all(raw.num_rows == shard_rows for raw in shards[:-1])
    assert sum(raw.num_rows for raw in shards) == len(expected)


@settings(max_examples=60)
@given(
    prompts=st.lists(TEXT, min_size=2, max_size=12),
    format=st.sampled_from(FORMATS),
    cut=st.integers(1, 11),
    row_groups=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_the_head_of_a_shard_is_the_shard_of_a_shorter_input(
    prompts: list[str], format: str, cut: int, row_groups: tuple[int, int]
) -> None:
    """So that appended rows are told from changed ones, also where the file was written anew in other pieces."""
    cut = min(cut, len(prompts) - 1)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "short").mkdir()
        write(Path(folder, f"long.{format}"), format, prompts, row_groups[0])
        write(Path(folder, "short", f"short.{format}"), format, prompts[:cut], row_groups[1])
        (long,) = shards_of(folder, 99)
        (short,) = shards_of(f"{folder}/short", 99)
        (limited,) = shards_of(folder, 99, cut)
    assert limited.digest == long.head_digest(cut)
    assert long.digest != limited.digest
    if format not in ("json",):  # an array's elements keep their white space, and the layouts differ there
        assert short.digest == limited.digest


@settings(max_examples=150)
@given(content=st.binary(max_size=60), shard_rows=st.integers(1, 4))
def test_any_line_of_bytes_is_one_row(content: bytes, shard_rows: int) -> None:
    lines = [line for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip(b" \t\r\x0b\x0c")]
    if not lines:
        return
    with tempfile.TemporaryDirectory() as folder:
        for extension in ("jsonl", "txt"):
            Path(folder, f"a.{extension}").write_bytes(content)
            shards = shards_of(f"{folder}/a.{extension}", shard_rows)
            assert sum(len(parse_shard(raw).rows) for raw in shards) == len(lines)


@settings(max_examples=200)
@given(content=st.text('a,"\n\r\xff', max_size=30))
def test_no_csv_line_is_lost(content: str) -> None:
    """Every line of the file is in some record, and every record is a row or an error row."""
    body = content.encode("latin-1")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a.csv").write_bytes(b"prompt,b\n" + body)
        files = find_files(f"{folder}/a.csv") or []
        records = [record for part in csv_records(files[0]) for record in part.records]
        lines = [line for bunch in line_records(files[0]) for line in bunch][1:]
        if records:
            shards = shards_of(f"{folder}/a.csv", 2)
            assert sum(len(parse_shard(raw).rows) for raw in shards) == len(records)
    kept = [line for record in records for line in record.split(b"\n") if line.strip()]
    assert kept == lines


def test_csv_rows_are_those_of_the_standard_reader(tmp_path: Path) -> None:
    rows = [[f'say "{i}"', f"line\n{i}\r\n", "", f"a,{i}"] for i in range(40)]
    buffer = io.StringIO()
    csv.writer(buffer).writerows([["prompt", "b", "c", "d"], *rows])
    (tmp_path / "a.csv").write_bytes(buffer.getvalue().encode())
    read = [list(row.values()) for raw in shards_of(str(tmp_path), 7) for row in parse_shard(raw).rows]  # type: ignore[union-attr]
    assert read == rows


def test_an_open_quote_costs_one_record_and_not_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('prompt,n\na,1\n"never closed,2\n' + "b,3\n" * 5)
    rows = [row for raw in shards_of(str(tmp_path), 3) for row in parse_shard(raw).rows]
    assert len(rows) == 7
    assert [type(row) for row in rows].count(dict) == 6
    assert str(rows[1]) == "The record is not valid CSV: a quote is not closed."


def test_a_changed_row_changes_the_hash_of_its_shard_only(tmp_path: Path) -> None:
    before = [f'{{"prompt": "{i}"}}\n' for i in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(before))
    old = [raw.digest for raw in shards_of(str(tmp_path), 3)]
    (tmp_path / "a.jsonl").write_text("".join([*before[:4], '{"prompt": "x"}\n', *before[5:]]))
    new = [raw.digest for raw in shards_of(str(tmp_path), 3)]
    assert [a == b for a, b in zip(old, new, strict=True)] == [True, False, True]


@pytest.mark.parametrize("rows", [3, 10])
def test_dictionaries_do_not_reach_beyond_the_shard(tmp_path: Path, rows: int) -> None:
    values = [f"v{i}" for i in range(10)]
    table = pa.table({"prompt": pa.array(values), "d": pa.array(values).dictionary_encode()})
    pq.write_table(table, tmp_path / "a.parquet")
    pq.write_table(table.slice(0, rows), tmp_path / "b.parquet")
    (whole,), (head,) = (shards_of(str(tmp_path / name), 99) for name in ("a.parquet", "b.parquet"))
    assert whole.head_digest(rows) == head.digest


@pytest.mark.parametrize("format", ["jsonl", "json", "csv", "parquet"])
def test_reading_takes_constant_memory(tmp_path: Path, format: str) -> None:
    """50 MB of rows pass through in a few blocks' worth of memory."""
    prompts = ["x" * 10_000] * 5_000
    write(tmp_path / f"a.{format}", format, prompts, 100)
    source = open_input(JobConfig(prompts=str(tmp_path)))
    tracemalloc.start()
    arrow_before = pa.total_allocated_bytes()
    rows, arrow_most = 0, 0
    for raw in source.shards(64):
        rows += raw.num_rows
        arrow_most = max(arrow_most, pa.total_allocated_bytes() - arrow_before)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rows == 5_000
    assert most + arrow_most < 32 << 20
