"""Datasets of the hub on a machine that cannot reach it: read from the caches that earlier downloads have left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cluster.object_store import BUCKET, ObjectStore

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CARD = """---
configs:
- config_name: main
  data_files: [{split: test, path: main/test-*}, {split: train, path: main/train-*}]
- config_name: other
  data_files: [{split: test, path: other/test-*}]
---
"""
READ = """
import json, sys
from cluster.config import JobConfig
from cluster.errors import UserError
from cluster.evaluation.task import load_task
from cluster.input.parse import parse_shard
from cluster.input.source import open_input

def read(prompts, split):
    source = open_input(JobConfig(prompts=prompts, split=split))
    return {"files": source.files, "rows": [row for raw in source.shards(2) for row in parse_shard(raw).rows]}

def ask(source, fewshot):
    items = list(load_task("gsm8k").items(source, fewshot=fewshot, chat=False))
    return [[item.id, item.prompt, item.reference] for item in items]

for call, *arguments in json.load(sys.stdin):
    try:
        answer = {"read": read, "ask": ask}[call](*arguments)
    except UserError as error:
        answer = str(error)
    print(json.dumps(answer))
"""


def question(number: int) -> dict[str, str]:
    return {"question": f"What is {number} and 1?", "answer": f"{number} + 1 = {number + 1}\n#### {number + 1}"}


def write_snapshot(home: Path, repository: str, files: dict[str, list[dict[str, Any]]]) -> None:
    """What ``hf download --repo-type dataset`` leaves: the files of one commit, and the commit's number."""
    place = home / "hub" / f"datasets--{repository.replace('/', '--')}"
    folder = place / "snapshots" / COMMIT
    for name, rows in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
    (folder / "README.md").write_text(CARD)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)


def write_prepared(home: Path, rows: list[dict[str, Any]]) -> None:
    """What ``load_dataset("acme/words")`` leaves: the same as for a folder of that name, but for the owner."""
    folder = home / "words"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    datasets.load_dataset(str(folder), cache_dir=str(home / "datasets"))
    (home / "datasets" / "words").rename(home / "datasets" / "acme___words")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, object_store: ObjectStore) -> list[Any]:
    """What a process without a network makes of each question."""
    home = tmp_path_factory.mktemp("hub")
    piece = "main/{}-0000{}-of-0000{}.parquet".format
    rows = [question(number) for number in range(5)]
    whole = {piece("test", 0, 2): rows[:2], piece("test", 1, 2): rows[2:3], piece("train", 0, 1): rows[3:]}
    write_snapshot(home, "openai/gsm8k", whole | {"other/test-00000-of-00001.parquet": [question(9)]})
    write_snapshot(home, "acme/torn", {piece("test", 0, 3): rows, piece("train", 0, 1): rows})
    write_prepared(home, [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}])
    lines = {"test": rows[:3], "train": rows[3:]}
    for split, chosen in lines.items():
        text = "".join(json.dumps(row) + "\n" for row in chosen)
        object_store.fs.pipe_file(f"{BUCKET}/tasks/gsm8k/{split}.jsonl", text.encode())
    bucket = f"s3://{BUCKET}/tasks"
    questions = [
        ["read", "openai/gsm8k:main", "test"], ["read", "openai/gsm8k:main", None], ["read", "acme/words", None],
        ["read", "acme/torn:main", "test"], ["read", "acme/nowhere", None], ["read", "openai/gsm8k:gone", "test"],
        ["ask", None, 1], ["ask", "openai/gsm8k:main", 1], ["ask", bucket, 1], ["ask", f"{bucket}/gsm8k/", 1],
        ["ask", f"{bucket}/gsm8k/test.jsonl", 0], ["ask", f"s3://{BUCKET}/in", 1], ["ask", "s3://nowhere/x", 0],
    ]  # fmt: skip
    environment = os.environ | object_store.environment | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", READ], input=json.dumps(questions), env=environment, cwd=ROOT, capture_output=True,
        text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_a_downloaded_snapshot_is_read_in_the_order_of_its_files(answers: list[Any]) -> None:
    assert answers[0]["rows"] == [question(0), question(1), question(2)]
    assert answers[0]["files"] == ["openai/gsm8k:main (test), commit 0123456789ab from the cache"]
    assert answers[1] == "openai/gsm8k:main has the splits test, train; choose one with --split."


def test_a_dataset_that_was_prepared_once_is_read_again(answers: list[Any]) -> None:
    assert answers[2]["rows"] == [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
    assert answers[2]["files"] == ["acme/words (train)"]


def test_what_is_not_there_or_not_whole_is_a_sentence(answers: list[Any]) -> None:
    assert answers[3] == (
        "The dataset acme/torn:main is not whole in the cache: it has 1 of 3 files main/test-*.parquet; download all "
        "of it."
    )
    assert answers[4].startswith("The dataset acme/nowhere cannot be read: Couldn't reach 'acme/nowhere' on the Hub")
    assert answers[5].startswith("The dataset openai/gsm8k:gone cannot be read: BuilderConfig 'gone' not found.")


def test_a_task_reads_its_rows_from_the_cache_of_the_hub_and_from_an_object_store(answers: list[Any]) -> None:
    own, other, folder, subfolder = answers[6:10]
    assert [item[0] for item in own] == ["test-0", "test-1", "test-2"]
    assert own[2][1] == ("Question: What is 3 and 1?\nAnswer: 3 + 1 = 4\n#### 4\n\nQuestion: What is 2 and 1?\nAnswer:")
    assert own[2][2] == {"answer": "3"}
    assert own == other == folder == subfolder
    assert [item[2]["answer"] for item in answers[10]] == ["1", "2", "3"]


def test_task_data_that_is_not_there_is_a_sentence(answers: list[Any]) -> None:
    assert answers[11].startswith(f"s3://{BUCKET}/in does not exist") or "holds no gsm8k" in answers[11]
    assert answers[12].startswith("s3://nowhere/x does not exist")
