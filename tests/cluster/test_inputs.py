"""Inputs of every format: the same rows come out whatever the layout, and a whole-file mistake is one sentence."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.config import JobConfig
from cluster.errors import UserError
from cluster.input.parse import parse_shard
from cluster.input.source import open_input
from tests.cluster.make_inputs import write_lines

ROWS = [{"prompt": f"question {i}", "n": i, "tags": ["a", "b"][: i % 3]} for i in range(25)]


def read(prompts: Path | str, shard_rows: int = 7, limit: int | None = None, **settings: Any) -> list[Any]:
    """All rows as mappings, having checked that the shards are numbered without a gap."""
    source = open_input(JobConfig(prompts=str(prompts), **settings))
    rows: list[Any] = []
    for index, raw in enumerate(source.shards(shard_rows, limit)):
        assert (raw.index, raw.first_row) == (index, len(rows))
        assert raw.num_rows == len(parse_shard(raw).rows) <= shard_rows
        rows += parse_shard(raw).rows
    if limit is None and source.count() is not None:
        assert source.count() == len(rows)
    return rows


def mistake(prompts: Path | str, **settings: Any) -> str:
    with pytest.raises(UserError) as error:
        open_input(JobConfig(prompts=str(prompts), **settings))
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for prompts in (tmp_path / "pipe.jsonl", tmp_path / "*.jsonl"):
        assert mistake(prompts).startswith(f"{tmp_path}/pipe.jsonl is a pipe or a device; ")
    read_end, write_end = os.pipe()
    with os.fdopen(read_end), os.fdopen(write_end):
        assert mistake(f"/dev/fd/{read_end}").startswith(f"/dev/fd/{read_end} is a pipe or a device; ")


def test_jsonl(tmp_path: Path) -> None:
    assert read(write_lines(tmp_path / "a.jsonl", ROWS)) == ROWS


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b"}\n\n{"prompt": "c"}')
    assert [row["prompt"] for row in read(tmp_path / "a.jsonl")] == ["a", "b", "c"]


@pytest.mark.parametrize("indent", [None, 2])
def test_json_array(tmp_path: Path, indent: int | None) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=indent))
    assert read(tmp_path / "a.json") == ROWS


def test_json_that_is_json_lines(tmp_path: Path) -> None:
    assert read(write_lines(tmp_path / "a.json", ROWS)) == ROWS


def test_an_array_larger_than_a_block_is_read_piece_by_piece(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * 1000, "i": i} for i in range(9000)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert read(tmp_path / "a.json", shard_rows=4000) == rows


def test_csv_with_quotes_commas_and_line_breaks(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'prompt,n\r\n"a, ""b""\nc",1\r\n\r\nplain 5" text,2\r\n"",3\r\n')
    assert [row["prompt"] for row in read(tmp_path / "a.csv", shard_rows=2)] == ['a, "b"\nc', 'plain 5" text', ""]


def test_csv_files_may_differ_in_their_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,x\np,1\n")
    (tmp_path / "b.csv").write_text("y,prompt\n2,q\n")
    assert read(tmp_path) == [{"prompt": "p", "x": "1", "y": None}, {"prompt": "q", "x": None, "y": "2"}]


def test_text_is_one_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("één\r\n\n two \u2028 lines? no\n".encode())
    assert [row["prompt"] for row in read(tmp_path / "a.txt")] == ["één", " two \u2028 lines? no"]


@pytest.mark.parametrize("row_group_size", [3, 100])
def test_parquet(tmp_path: Path, row_group_size: int) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=row_group_size)
    assert read(tmp_path / "a.parquet") == ROWS


@pytest.mark.parametrize("writer", [pa.ipc.new_file, pa.ipc.new_stream])
def test_arrow_files(tmp_path: Path, writer: Any) -> None:
    table = pa.Table.from_pylist(ROWS)
    with writer(str(tmp_path / "a.arrow"), table.schema) as sink:
        sink.write_table(table, max_chunksize=4)
    assert read(tmp_path / "a.arrow") == ROWS


def test_saved_dataset_and_its_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.select(range(20, 4, -1)).save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"alpha": dataset.select(range(3)), "beta": dataset.select(range(3, 5))}).save_to_disk(
        tmp_path / "two"
    )
    assert read(tmp_path / "one") == ROWS[20:4:-1]
    assert read(tmp_path / "two", split="beta") == ROWS[3:5]
    assert mistake(tmp_path / "two").endswith("two has the splits alpha, beta; choose one with --split.")
    assert mistake(tmp_path / "two", split="gamma").endswith("has the splits alpha, beta, but no 'gamma'.")
    assert "holds a single dataset, so --split x has no meaning." in mistake(tmp_path / "one", split="x")


def test_hub_dataset_is_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is out of reach here, so a folder stands in for it; the library takes both by the same name."""
    from cluster.input.hub import open_hub

    write_lines(tmp_path / "train.jsonl", ROWS)
    source = open_hub(str(tmp_path), None)
    assert source.count() is None
    assert [row for raw in source.shards(7, 10) for row in parse_shard(raw).rows] == ROWS[:10]


def test_files_are_taken_by_name(tmp_path: Path) -> None:
    for name, start in (("b", 10), ("a", 0), ("c", 20)):
        write_lines(tmp_path / f"{name}.jsonl", ROWS[start : start + 10])
    assert read(tmp_path / "*.jsonl") == ROWS
    assert read(tmp_path) == ROWS
    assert open_input(JobConfig(prompts=str(tmp_path))).files == [str(tmp_path / f"{name}.jsonl") for name in "abc"]


def test_limit_counts_input_rows_over_all_files(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ROWS[:10])
    write_lines(tmp_path / "b.jsonl", ROWS[10:])
    assert read(tmp_path, limit=12) == ROWS[:12]


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
def test_compressed(tmp_path: Path, suffix: str, compress: Any) -> None:
    plain = write_lines(tmp_path / "plain", ROWS).read_bytes()
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(compress(plain))
    assert read(tmp_path / f"a.jsonl.{suffix}") == ROWS


def test_remote_files(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/remote/b.jsonl", write_lines(tmp_path / "x", ROWS[10:]).read_bytes())
    memory.pipe("/remote/a.jsonl", write_lines(tmp_path / "x", ROWS[:10]).read_bytes())
    assert read("memory://remote/*.jsonl") == ROWS
    assert mistake("memory://remote/z.jsonl") == "--prompts memory://remote/z.jsonl does not exist."


def test_whole_file_mistakes(tmp_path: Path) -> None:
    for name in ("empty.jsonl", "empty.json", "empty.csv", "empty.txt"):
        (tmp_path / name).touch()
        assert mistake(tmp_path / name) == f"--prompts {tmp_path / name} has no rows."
    (tmp_path / "header.csv").write_text("prompt,n\n")
    assert mistake(tmp_path / "header.csv").endswith("has no rows.")
    (tmp_path / "empty.parquet").touch()
    assert mistake(tmp_path / "empty.parquet").startswith(f"{tmp_path}/empty.parquet cannot be read: Parquet file size")
    assert mistake(tmp_path / "*.nothing") == f"No file matches --prompts {tmp_path}/*.nothing."
    assert mistake(tmp_path / "gone.jsonl") == f"--prompts {tmp_path}/gone.jsonl does not exist."
    (tmp_path / "notes.md").touch()
    assert "notes.md has an extension that is not supported; use .jsonl, .ndjson" in mistake(tmp_path / "notes.md")
    assert "mixes formats: empty.csv is csv and empty.json is json;" in mistake(tmp_path)
    (tmp_path / "none").mkdir()
    assert "none holds no .jsonl, .ndjson, .json, .csv, .txt, .parquet, .pq or .arrow file." in mistake(
        tmp_path / "none"
    )
    assert mistake("nosuch://a/b.jsonl") == "nosuch://a/b.jsonl cannot be read: Protocol not known: nosuch."
    assert "--split x has no meaning for files" in mistake(write_lines(tmp_path / "a.jsonl", ROWS), split="x")


def test_damaged_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"prompt": "a"}, {"prompt": }]')
    assert mistake(tmp_path / "a.json") == f"{tmp_path}/a.json is not a valid JSON array near character 19."
    (tmp_path / "b.json").write_text('{\n  "prompt": "a"\n}')
    assert mistake(tmp_path / "b.json").endswith("b.json holds neither a JSON array nor one JSON object a line.")
    (tmp_path / "c.csv").write_text("prompt,prompt\n1,2\n")
    assert mistake(tmp_path / "c.csv").endswith("c.csv has two columns named 'prompt'.")
    (tmp_path / "d.csv").write_text("prompt,\n1,2\n")
    assert mistake(tmp_path / "d.csv").endswith("Column 2 of " + str(tmp_path / "d.csv") + " has no name.")
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 9999)[:-20])
    with pytest.raises(UserError, match=r"e\.jsonl\.gz cannot be read: Compressed file ended before"):
        read(tmp_path / "e.jsonl.gz")
    (tmp_path / "f.parquet").write_bytes(b"PAR1" + b"x" * 50)
    assert "f.parquet cannot be read: " in mistake(tmp_path / "f.parquet")


@pytest.fixture
def _as_nobody() -> Iterator[None]:
    """Root may read anything, so a test of permissions becomes somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("pattern", ["", "a.jsonl", "*.jsonl"])
def test_unreadable_folder(tmp_path_factory: pytest.TempPathFactory, pattern: str, request: Any) -> None:
    folder = tmp_path_factory.mktemp("locked")
    for parent in (folder.parent, folder.parent.parent):
        parent.chmod(parent.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)
    write_lines(folder / "a.jsonl", ROWS)
    folder.chmod(0)
    request.getfixturevalue("_as_nobody")
    assert mistake(folder / pattern if pattern else folder).endswith("cannot be read: permission is denied.")


def test_a_hub_id_needs_the_form_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert mistake("prompts") == "--prompts prompts does not exist."
    assert mistake("some/prompts.jsonl") == "--prompts some/prompts.jsonl does not exist."
    (tmp_path / "owner").mkdir()
    assert mistake("owner/name") == "--prompts owner/name does not exist."
    assert mistake("someone/questions:main").startswith("The dataset someone/questions:main cannot be read: ")
