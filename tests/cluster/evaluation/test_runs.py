"""Runs of an evaluation in one local Ray: several samples, more questions later, other questions refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.config import JobConfig
from cluster.errors import UserError
from cluster.evaluation.evaluate import Evaluation
from cluster.evaluation.settings import EvaluationConfig

PROMPTS = Path(__file__).resolve().parents[3] / "jobs" / "prompts.jsonl"
SAMPLES = 4
TASK = """
description: Short arithmetic.
data: {splits: {demo: {file: prompts.jsonl}}}
split: demo
id: "{{ index }}"
prompt: "{{ prompt }}"
answer: "The answer is {{ answer }}."
reference: {answer: "{{ answer }}"}
max_new_tokens: 96
grader: number
metrics: {exact_match: {score: flexible}}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("evaluation")
    (root / "sums.yaml").write_text(TASK)
    (root / "prompts.jsonl").write_text("".join(line + "\n" for line in PROMPTS.read_text().splitlines()[:3]))
    return root


def evaluation(root: Path, **settings: Any) -> Evaluation:
    """Four samples a question, hot enough for a model that is sure of itself to err now and then."""
    defaults = {"output": str(root / "out"), "device": "cpu", "workers": 1, "shard_rows": 1, "limit": 2,
                "num_samples": SAMPLES, "temperature": 2.5, "mode": "vanilla"}  # fmt: skip
    return Evaluation(
        JobConfig(**defaults | settings), EvaluationConfig(tasks=str(root / "sums.yaml"), task_data=str(root)), set()
    )


@pytest.fixture(scope="module")
def results(root: Path, local_ray: str) -> dict[str, Any]:
    assert evaluation(root).run() == 0
    return json.loads((root / "out/results.json").read_text())


def test_samples_give_a_mean_and_pass_at_k(results: dict[str, Any], root: Path) -> None:
    scores = results["results"]["sums"]
    samples = [json.loads(line) for line in (root / "out/samples_sums.jsonl").open()]
    right = [
        sum(grade["exact_match"] if "exact_match" in grade else grade["flexible"] for grade in s["grades"])
        for s in samples
    ]
    assert [len(s["resps"][0]) for s in samples] == [SAMPLES] * 2
    assert len(set(samples[0]["resps"][0])) > 1, "the samples are copies of each other"
    assert scores["exact_match,none"] == scores["pass@1,none"] == sum(right) / SAMPLES / 2
    assert scores["pass@4,none"] == sum(count > 0 for count in right) / 2
    assert scores["pass@1,none"] <= scores["pass@2,none"] <= scores["pass@4,none"]
    assert results["n-samples"]["sums"] == {"original": 3, "effective": 2}
    assert "comparison" in results
    assert not results["comparison"]


def test_a_larger_limit_decodes_the_new_questions_only(results: dict[str, Any], root: Path) -> None:
    run = root / "out/sums/vanilla"
    before = {path: path.stat().st_mtime_ns for path in run.glob("*/*0000001.*")}
    assert len(before) == 3  # rows, counters, grades
    assert evaluation(root, limit=3).run() == 0
    assert {path: path.stat().st_mtime_ns for path in run.glob("*/*0000001.*")} == before
    grown = json.loads((root / "out/results.json").read_text())
    assert grown["n-samples"]["sums"] == {"original": 3, "effective": 3}


def test_other_questions_are_refused_until_overwritten(results: dict[str, Any], root: Path) -> None:
    before = (root / "prompts.jsonl").read_text()
    (root / "prompts.jsonl").write_text(before.replace("?", "??", 1))
    try:
        with pytest.raises(UserError, match="holds a run on other items") as error:
            evaluation(root, limit=3).run()
    finally:
        (root / "prompts.jsonl").write_text(before)
    assert error.value.exit_code == 2
    assert "??" not in (root / "out/sums/items.jsonl").read_text()


def test_overwriting_removes_the_old_grades(results: dict[str, Any], root: Path) -> None:
    assert evaluation(root, limit=1, overwrite=True, num_samples=1, temperature=0.0).run() == 0
    assert [path.name for path in (root / "out/sums/vanilla/grades").iterdir()] == ["shard-0000000.json"]
    assert json.loads((root / "out/results.json").read_text())["results"]["sums"]["exact_match,none"] == 1.0
