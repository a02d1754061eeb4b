"""Whole jobs on an object store: a real S3 server that fails every few requests, drivers killed, and every tool."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.driver import check_job
from cluster.output.storage import StorageError, Store
from jobs import compare_runs, report
from tests.cluster.fake_engine import LOOP, NAN
from tests.cluster.head import Head
from tests.cluster.jobs import VOLATILE, JobFolder
from tests.cluster.object_store import BUCKET, FAULTS, ObjectStore
from tests.cluster.processes import assert_as_decoded, start_driver
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
ROWS, LOOPING, FAILING = 100, 45, 5
PROMPTS, OUTPUT = f"s3://{BUCKET}/in/prompts.jsonl", f"s3://{BUCKET}/out"

TASK = """
description: Short arithmetic, as the bundled models were trained to answer it.
data: {splits: {demo: {file: sums/prompts.jsonl}}}
split: demo
id: "{{ index }}"
prompt: "{{ prompt }}"
reference: {answer: "{{ answer }}"}
max_new_tokens: 96
grader: number
metrics: {exact_match: {score: flexible, filter: flexible-extract}}
"""


@dataclass
class Story:
    """A job that was killed and went on while its store misbehaved, and what came of it."""

    folder: JobFolder
    store: ObjectStore
    at_death: dict[str, str] = field(default_factory=dict)
    """The parts that were there when the driver was killed, and what tells whether they were written again."""
    failed_at_death: list[str | None] = field(default_factory=list)
    """Kinds of error in the first part at that time."""
    said: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)

    def names(self) -> list[str]:
        """Every object of the output."""
        return sorted(name.removeprefix(f"{BUCKET}/out/") for name in self.store.fs.find(f"{BUCKET}/out"))

    def parts(self) -> dict[str, str]:
        """The parts, each with the store's hash of its content."""
        names = [name for name in self.names() if name.startswith("data/")]
        return {name: self.store.fs.info(f"{BUCKET}/out/{name}")["ETag"] for name in names}

    def read(self, name: str) -> bytes:
        return bytes(self.store.fs.cat_file(f"{BUCKET}/out/{name}"))

    def rows(self) -> pa.Table:
        """All rows, those in quarantine in their places."""
        files = [name for name in self.names() if name.startswith(("data/", "quarantine/"))]
        tables = [pq.read_table(pa.BufferReader(self.read(name))).replace_schema_metadata(None) for name in files]
        return pa.concat_tables(tables).sort_by("row_id").drop_columns(VOLATILE)


@pytest.fixture(scope="module")
def story(head: Head, object_store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Story:
    told = Story(JobFolder(tmp_path_factory.mktemp("remote")), object_store)
    prompts = told.folder.write_prompts(ROWS, {LOOPING: LOOP, FAILING: NAN})
    told.folder.write_weights()
    object_store.fs.put_file(prompts, PROMPTS.removeprefix("s3://"))
    with object_store.app.misbehaving(every=10):
        # Both workers stand still after 40 rows: looking at this store takes so long that the job could be over.
        first = start(told, head, "gated")
        failed = f"data/train-{FAILING // 10:07d}.parquet"
        wait_until("there are never four parts", lambda: len(parts := told.parts()) >= 4 and failed in parts, first)
        first.kill()
        first.communicate()
        told.at_death = told.parts()
        first_part = pq.read_table(pa.BufferReader(told.read("data/train-0000000.parquet")))
        told.failed_at_death = first_part["error_kind"].to_pylist()
        second = start(told, head, "cured", retry_failed=True)
        output, errors = second.communicate(timeout=PATIENCE_S)
        assert second.returncode == 0, output + errors
    told.said = output.splitlines()
    told.made = object_store.app.made
    return told


def start(story: Story, head: Head, engine: str, **settings: Any) -> subprocess.Popen[str]:
    settings = {"output": OUTPUT, "workers": 2, "quarantine": True} | settings
    return start_driver(story.folder, head.address, PROMPTS, engine, head.environment, **settings)


def test_a_job_on_a_store_that_fails_loses_and_changes_nothing(story: Story) -> None:
    assert set(story.made) == set(FAULTS), "the store was to misbehave in every way"
    table = story.rows()
    assert_as_decoded(table, ROWS, marked=(LOOPING, FAILING))  # whose prompts are others
    assert table["error"].null_count == ROWS
    assert table["flags"].to_pylist()[LOOPING] == ["repetition"]


def test_a_killed_driver_is_followed_at_once_and_its_parts_stand(story: Story) -> None:
    assert 4 <= len(story.at_death) <= 2 * 40 // 10
    assert not [line for line in story.said if line.startswith("Run again:")]
    [resumed] = [line for line in story.said if line.startswith("Resuming:")]
    # All but the one that is retried; workers of a killed driver may have written another one since.
    assert int(resumed.split()[1]) >= len(story.at_death) - 1


def test_a_row_that_failed_is_retried_and_only_its_part_is_written_again(story: Story) -> None:
    assert story.failed_at_death == [None] * FAILING + ["nan_logits"] + [None] * (9 - FAILING)
    now = story.parts()
    changed = [name for name, content in story.at_death.items() if now[name] != content]
    assert changed == [f"data/train-{FAILING // 10:07d}.parquet"]


def test_the_folder_holds_what_a_local_one_holds_and_nothing_else(story: Story) -> None:
    shards = range(ROWS // 10)
    parts = [f"data/train-{i:07d}.parquet" for i in shards] + [f"stats/shard-{i:07d}.json" for i in shards]
    moved = [f"quarantine/rows-{LOOPING // 10:07d}.parquet"]
    whole = ["README.md", "report.html", "run.json", "shards.parquet", "summary.json"]
    assert story.names() == sorted([*parts, *moved, *whole])
    summary = json.loads(story.read("summary.json"))
    assert (summary["state"], summary["rows"]["done"], summary["rows"]["quarantined"]) == ("done", ROWS, 1)
    assert json.loads(story.read("run.json"))["inputs"] == [PROMPTS]
    assert b"testing" not in story.read("run.json")  # no credentials


def test_check_report_and_comparison_read_the_store(
    story: Story, s3: ObjectStore, local_ray: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = story.names()
    config = story.folder.config(PROMPTS, output=OUTPUT, shard_rows=10, quarantine=True)
    assert check_job(config) == 0
    output = capsys.readouterr().out
    assert f"{ROWS} rows checked, 0 cannot be decoded." in output
    assert "None: every row is there." in output
    assert story.names() == before

    story.store.fs.rm_file(f"{BUCKET}/out/report.html")
    assert report.main([OUTPUT]) == 0
    assert b"<html" in story.read("report.html")
    capsys.readouterr()
    assert compare_runs.main([OUTPUT, OUTPUT]) == 0
    compared = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (compared["a"], compared["rows"]["same"], compared["rows"]["changed"]) == (OUTPUT, ROWS, 0)


def test_an_evaluation_reads_its_rows_and_keeps_its_results_on_the_store(
    object_store: ObjectStore, head: Head, tmp_path: Path
) -> None:
    """A task's folder and the output are both on the store; and so are the grades."""
    (tmp_path / "sums.yaml").write_text(TASK)
    prompts = (ROOT / "jobs" / "prompts.jsonl").read_bytes().splitlines(keepends=True)[:4]
    object_store.fs.pipe_file(f"{BUCKET}/sums/prompts.jsonl", b"".join(prompts))
    output = f"{BUCKET}/evaluation"
    command = [
        sys.executable, ROOT / "jobs" / "evaluate.py", "--tasks", tmp_path / "sums.yaml", "--workers", "1",
        "--task-data", f"s3://{BUCKET}/sums", "--output", f"s3://{output}", "--device", "cpu",
    ]  # fmt: skip
    environment = head.environment | {"RAY_ADDRESS": head.address}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 0, run.stdout + run.stderr
    results = json.loads(object_store.fs.cat_file(f"{output}/results.json"))
    scores = results["results"]["sums"]
    assert next(value for name, value in scores.items() if name.startswith("exact_match,")) == 1.0
    names = {name.removeprefix(f"{output}/") for name in object_store.fs.find(output)}
    folder = "sums/specfold-0.1"
    assert {"plan.json", "comparison.md", "sums/items.jsonl", f"{folder}/data/train-0000000.parquet"} <= names
    assert f"{folder}/grades/shard-0000000.json" in names


def test_a_writer_that_dies_in_the_middle_leaves_nothing(s3: ObjectStore) -> None:
    """SIGKILL while the body of a put is on its way."""
    code = (
        "import os, sys; from cluster.output.storage import Store;"
        "Store(sys.argv[1]).write('data/x', os.urandom(1 << 25))"
    )
    url = f"s3://{BUCKET}/killed"
    with s3.app.holding_writes("killed/data/x"):
        writer = subprocess.Popen([sys.executable, "-c", code, url], cwd=ROOT)
        assert s3.app.holding.wait(PATIENCE_S)
        writer.kill()
        writer.wait()
        s3.app.let_go.set()
        wait_until("the store has not noticed", lambda: s3.app.incomplete)
    assert s3.app.incomplete == 1
    assert s3.fs.find(f"{BUCKET}/killed") == []


def test_a_write_that_the_store_refuses_publishes_nothing_and_the_old_stays(
    s3: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # the client's own patience, by the usual environment
    monkeypatch.setattr("cluster.output.storage._PAUSES_S", (0.01, 0.01))
    store = Store(f"s3://{BUCKET}/refused")
    store.write("part", b"old")
    with (
        s3.app.misbehaving(every=1, kinds=["500"]),
        pytest.raises(StorageError, match=r"refused/part cannot be written: InternalError by request\.") as caught,
    ):
        store.write("part", b"new")
    assert not caught.value.is_mistake
    assert store.read("part") == b"old"


def test_a_store_that_stays_away_is_told_of_once_and_not_waited_for_at_the_end(
    s3: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("cluster.output.storage._PAUSES_S", (0.01, 0.01))
    store, said, before = Store(f"s3://{BUCKET}/away"), [], len(s3.app.made)
    store.say = said.append
    with s3.app.misbehaving(every=1, kinds=["500"]):
        for _ in range(2):
            with pytest.raises(StorageError):
                store.write("part", b"x")
        patient = len(s3.app.made) - before
        store.hurry()
        with pytest.raises(StorageError):
            store.write("part", b"x")
    assert said == [f"s3://{BUCKET}/away does not answer (InternalError by request); trying again."]
    assert len(s3.app.made) - before - patient == patient / 6


def test_of_two_that_create_a_file_one_does_also_where_answers_are_lost(s3: ObjectStore) -> None:
    """An answer that is lost is asked for again; that the file is there by then must not make its maker doubt."""
    store = Store(f"s3://{BUCKET}/created")
    for round in range(6):
        with s3.app.misbehaving(every=2, kinds=["lost"]):
            assert store.create(f"run-{round}", b"mine")
            assert not store.create(f"run-{round}", b"yours")
        assert store.read(f"run-{round}") == b"mine"


def test_what_is_there_is_seen_at_once(s3: ObjectStore) -> None:
    """No listing is remembered: two stores, as of two processes, see each other's files and deletions."""
    ours, theirs = Store(f"s3://{BUCKET}/listed"), Store(f"s3://{BUCKET}/listed/")
    assert ours.names("data") == theirs.names("data") == []
    for count in range(1, 4):
        theirs.write(f"data/{count}", b"x")
        assert ours.names("data") == [str(i + 1) for i in range(count)]
        assert ours.exists(f"data/{count}")
    theirs.delete("data/2")
    assert ours.names("data") == ["1", "3"]
    assert not ours.create("data/1", b"y")
