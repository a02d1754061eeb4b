"""The dataset card: what the hub's own parser reads, what people read, and text that tries to break either."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import DatasetCard

from cluster.config import JobConfig
from cluster.models import ModelRef
from cluster.output.card import dataset_card, reproduction
from cluster.output.identity import resolve
from cluster.output.summary import Tally
from jobs.cli import load_config

FOLDER = ModelRef("m", path="/models/m", content_hash="sha256:12ab")
HUB = ModelRef("nvidia/some-8B", repo="nvidia/some-8B", commit="0123abc")
HOSTILE = '"]}\n---\n# A heading | `code` <script>alert(1)</script> ${x} ``` \r\n\x1b[31m [a](b) --- : {% x %}'


def summary(**changes: Any) -> dict[str, Any]:
    values = Tally().to_dict(10.0)
    values["rows"] |= {"done": 1_234, "failed": 3, "failed_by_kind": {"too_long": 3}, "quarantined": 300}
    values |= {"acceptance_by_depth": [0.75, 0.5], "fold_rate": 0.868, "time_fold_rate": 0.5,
               "recomputed_rows_per_token": 53.7, "flags": {"repetition": 2},
               "audit": {"rows": 20, "identical": 19, "audit_mode": "vanilla"}}  # fmt: skip
    return values | {"tokens_per_second": {"decode": 1234.5, "end_to_end": None}} | changes


def card(config: JobConfig, model: ModelRef = FOLDER) -> DatasetCard:
    text = dataset_card(resolve(config, "cpu", 8), model, summary(), {"torch": "2.13", "triton": None})
    return DatasetCard(text)


def tables(text: str) -> list[list[str]]:
    return [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]


def test_the_card_tells_rows_speed_failures_and_flags() -> None:
    found = card(JobConfig(model="/models/m", prompts="questions.jsonl"))
    data = found.data.to_dict()
    assert data["size_categories"] == ["n<1K"]
    assert data["task_categories"] == ["text-generation"]
    assert "configs" not in data
    for line in (
        "- Model: /models/m (content sha256:12ab)", "- Prompts: questions.jsonl",
        "934 outputs, made by a diffusion language model.",
        "| decoded | 1,231 |", "| decoded again with mode vanilla, all tokens identical | 19 of 20 |",
        "| error too_long | 3 |", "| flag repetition | 2 |", "| mode | specfold |", "| delta | 0.1 |",
        "| acceptance by draft depth | 75.0%, 50.0% |", "| draft positions folded | 86.8% |",
        "| positions folded in time | 50.0% |", "| positions computed for an output token, all layers | 53.70 |",
        "| tokens per second while decoding | 1,234.50 |", "| tokens per second end to end | unknown |",
        "Made with torch 2.13.",
    ):  # fmt: skip
        assert line in found.text.splitlines()


def test_hostile_settings_break_neither_the_yaml_nor_the_tables() -> None:
    config = JobConfig(
        model=HOSTILE, prompts=HOSTILE, system_prompt=HOSTILE, stop=(HOSTILE, "```"), prompt_column=HOSTILE,
        input_prefix=HOSTILE,
    )  # fmt: skip
    found = card(config)
    assert set(found.data.to_dict()) == {"pretty_name", "size_categories", "tags", "task_categories"}
    assert {len(cells) for cells in tables(found.text)} == {2}
    prose, fence, rest = found.text.partition("````bash\n")
    command, _, after = rest.partition("\n````\n")
    assert fence
    for text in (prose, after):
        assert "<script" not in text
        assert "`code`" not in text
        assert "[a](b)" not in text
        assert "\n# A heading" not in text
    assert "\x1b" not in found.content
    assert command.startswith("python jobs/generate.py")


def test_the_command_gives_the_same_settings_again(tmp_path: Path) -> None:
    prompts = tmp_path / "in.jsonl"
    config = JobConfig(
        prompts=str(prompts), limit=7, delta=-1.0, mode="spiffy", stop=("-x", "a 'b' \"c\"", "d\ne"), num_samples=2,
        temperature=2.0, stop_token_ids=(3, 4), causal_context=False, deterministic=False, system_prompt="--delta 5",
        output=str(tmp_path), overwrite=True, workers=3, push_to_hub="a/b", max_failed=0.5, audit=9, batch_size=3,
        stall_timeout=12.0, quarantine=True,
    )  # fmt: skip
    config = resolve(config, "cpu", 16)
    command = reproduction(config, FOLDER).replace("python jobs/generate.py", "printf '%s\\0'")
    words = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    again = load_config(words.split("\0")[:-1], {})
    assert again is not None
    assert again.identity() == config.identity()
    assert (again.prompts, again.limit, again.model) == (config.prompts, 7, config.model)
    assert (again.overwrite, again.workers, again.push_to_hub) == (False, None, None)
    named = ("max_failed", "audit", "batch_size", "stall_timeout", "device")
    assert [getattr(again, name) for name in named] == [0.5, 9, 3, 12.0, "cpu"]


def test_a_hub_model_is_named_with_its_commit_and_a_url_without_its_password() -> None:
    config = JobConfig(model=HUB.name, revision="main", prompts="https://me:secret@host/p.jsonl?key=secret")
    found = card(config, HUB)
    assert "- Model: nvidia/some-8B (commit 0123abc)" in found.text
    assert "--revision=0123abc" in found.text
    assert "https://host/p.jsonl" in found.text
    assert "secret" not in found.content


def test_a_run_that_may_not_repeat_says_so() -> None:
    assert "Not deterministic" in card(JobConfig(deterministic=False)).text
    assert "Not deterministic" not in card(JobConfig()).text


def test_datasets_reads_the_parts_beside_the_card_and_the_page(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for folder in ("data", "stats", "quarantine"):
        (out / folder).mkdir(parents=True)
    for i in range(3):
        pq.write_table(pa.table({"row_id": [2 * i, 2 * i + 1]}), out / "data" / f"train-{i:07d}.parquet")
    (out / "README.md").write_text(dataset_card(replace(JobConfig(), shard_rows=2), FOLDER, summary(), {}))
    (out / "report.html").write_text("<!doctype html><p>train</p>")
    (out / "summary.json").write_text("{}")
    loaded = datasets.load_dataset(str(out), cache_dir=str(tmp_path / "cache"))
    assert list(loaded) == ["train"]
    assert loaded["train"]["row_id"][:] == list(range(6))
