"""The main job from the command line, with the bundled model on public prompts it was never trained for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cluster.processes import descendants, is_worker
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    keep = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return keep | {"HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"}


def start(environment: dict[str, str], *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "jobs" / "generate.py"), *args]
    return subprocess.Popen(
        command, env=environment, cwd=environment["HOME"], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def run(environment: dict[str, str], *args: str) -> str:
    process = start(environment, *args)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    return output


def read(output: Path) -> pa.Table:
    """The whole output without the column that no two runs share."""
    parts = sorted((output / "data").glob("*.parquet"))
    table = pa.concat_tables([pq.read_table(part).replace_schema_metadata(None) for part in parts])
    return table.drop_columns(["seconds"])


def test_public_prompts_killed_and_resumed_give_the_same_rows(
    shared: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    gsm8k = [json.loads(line)["question"] for line in (shared / "data/gsm8k/test.jsonl").open()][:14]
    tasks = shared / "data/self_instruct/user_oriented_instructions.jsonl"
    instructions = [json.loads(line)["instruction"] for line in tasks.open()][:10]
    lines = [
        {"text": text, "source": source} for source, texts in (("gsm8k", gsm8k), ("si", instructions)) for text in texts
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = ["--prompts", str(prompts), "--prompt-column", "text", "--max-new-tokens", "32", "--shard-rows", "3"]

    printed = run(environment, *args, "--output", str(tmp_path / "whole"))
    assert f"Parquet: {tmp_path / 'whole' / 'data'}" in printed.splitlines()
    whole = read(tmp_path / "whole")
    assert whole["row_id"].to_pylist() == list(range(24))
    assert whole["source"].to_pylist() == [line["source"] for line in lines]
    assert whole["finish_reason"].to_pylist().count("error") == 0

    killed = start(environment, *args, "--output", str(tmp_path / "killed"))
    parts = tmp_path / "killed" / "data"
    wait_until("no part was ever published", lambda: any(parts.glob("train-*.parquet")), killed)
    urgency = {os.getpriority(os.PRIO_PROCESS, pid) for pid in descendants(killed.pid) if is_worker(pid)}
    assert urgency == {os.getpriority(os.PRIO_PROCESS, killed.pid)}  # Ray's own choice is the lowest but four
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    before = len(list(parts.glob("*.parquet")))
    assert before < 8, "the job was over before it could be killed"
    run(environment, *args, "--output", str(tmp_path / "killed"))
    assert read(tmp_path / "killed").equals(whole)

    loaded = datasets.load_dataset(str(tmp_path / "killed"), cache_dir=str(tmp_path / "cache"), split="train")
    assert loaded["row_id"][:] == list(range(24))
    assert loaded["output_text"][:] == whole["output_text"].to_pylist()


def test_the_other_family_and_another_mode(environment: dict[str, str], tmp_path: Path) -> None:
    args = ["--model", "nemotron_labs_diffusion", "--mode", "ar", "--limit", "8", "--max-new-tokens", "96"]
    run(environment, *args, "--output", str(tmp_path / "out"))
    table = read(tmp_path / "out")
    right = [
        text.endswith(f"The answer is {answer}.")
        for text, answer in zip(table["output_text"].to_pylist(), table["answer"].to_pylist(), strict=True)
    ]
    assert sum(right) >= 7


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--mode", "ar"], "error: --mode ar exists for Nemotron-Labs-Diffusion only, this model is fast_dllm_v2."),
        (["--model", "/nothing/here"], "error: "),
        (["--deltta", "0.1"], "error: "),
        (
            ["--backend", "triton"],
            "error: --backend triton needs a GPU, and Ray finds none; leave --backend out or give ",
        ),
        (["--drafts", "99"], "error: --drafts must be between 0 and 32, not 99."),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    environment: dict[str, str], tmp_path: Path, args: list[str], sentence: str
) -> None:
    process = start(environment, *args, "--output", str(tmp_path / "out"))
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert output.startswith(sentence), output
    assert "Traceback" not in output
    assert len(output.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_cluster_that_does_not_answer_is_one_line(environment: dict[str, str], tmp_path: Path) -> None:
    process = start(environment | {"RAY_ADDRESS": "127.0.0.1:1"}, "--limit", "1", "--output", str(tmp_path / "out"))
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert output == "error: no Ray cluster answers at 127.0.0.1:1: Connection refused.\n"
