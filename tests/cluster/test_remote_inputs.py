"""Inputs on an object store and over HTTP, read from real local servers, credentials from the usual environment."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.config import JobConfig
from cluster.errors import UserError
from cluster.input.source import open_input
from tests.cluster.make_inputs import as_text, make_model, prepare_all, user_turn
from tests.cluster.object_store import BUCKET, ObjectStore

ROWS = [{"prompt": f"q{i}", "n": i} for i in range(20)]


@pytest.fixture(scope="module", autouse=True)
def _files(object_store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Parquet and compressed JSON Lines in the bucket."""
    folder = tmp_path_factory.mktemp("upload")
    for name, rows in (("b", ROWS[12:]), ("a", ROWS[:12])):
        pq.write_table(pa.Table.from_pylist(rows), folder / name, row_group_size=5)
        object_store.fs.put_file(str(folder / name), f"{BUCKET}/inputs/parquet/{name}.parquet")
    object_store.fs.pipe_file(f"{BUCKET}/inputs/lines/a.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n{"prompt": "b"}\n'))


@pytest.mark.usefixtures("s3")
def test_parquet_on_s3(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    for prompts in (
        "s3://bucket/inputs/parquet/*.parquet",
        "s3://bucket/inputs/parquet",
        "s3://bucket/inputs/parquet/",
    ):
        rows, table = prepare_all(prompts, model, shard_rows=7)
        assert [as_text(row.prompt_ids) for row in rows] == [user_turn(f"q{i}") for i in range(20)]
        assert table["n"].to_pylist() == list(range(20))
    source = open_input(JobConfig(prompts="s3://bucket/inputs/parquet/*.parquet"))
    assert source.files == ["s3://bucket/inputs/parquet/a.parquet", "s3://bucket/inputs/parquet/b.parquet"]
    assert source.count() == 20


@pytest.mark.usefixtures("s3")
def test_compressed_lines_on_s3(tmp_path: Path) -> None:
    rows, _ = prepare_all("s3://bucket/inputs/lines/a.jsonl.gz", make_model(tmp_path / "model"))
    assert [as_text(row.prompt_ids) for row in rows] == [user_turn("a"), user_turn("b")]


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        ("s3://bucket/inputs/parquet/z.parquet", "--prompts s3://bucket/inputs/parquet/z.parquet does not exist."),
        ("s3://bucket/inputs/*.csv", "No file matches --prompts s3://bucket/inputs/*.csv."),
        ("s3://elsewhere/a.jsonl", "--prompts s3://elsewhere/a.jsonl does not exist."),
    ],
)
def test_what_is_not_there(prompts: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        open_input(JobConfig(prompts=prompts))
    assert str(error.value) == sentence


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A web server with a JSON Lines file; its address."""
    folder = tmp_path_factory.mktemp("web")
    (folder / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_signed_urls_work_and_their_signature_is_never_shown(web: str) -> None:
    source = open_input(JobConfig(prompts=f"{web}/a.jsonl?signature=hunter2"))
    assert source.count() == 2
    assert source.files == [f"{web}/a.jsonl"]
    for gone in (f"{web}/b.jsonl?signature=hunter2", "http://127.0.0.1:1/a.jsonl?signature=hunter2"):
        with pytest.raises(UserError) as error:
            open_input(JobConfig(prompts=gone))
        assert "hunter2" not in str(error.value)
