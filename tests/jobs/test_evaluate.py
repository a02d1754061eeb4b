"""An evaluation from the command line: the bundled model on its own kind of question, killed, resumed, compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from cluster.config import JobConfig
from cluster.errors import UserError
from cluster.evaluation.gradebook import Gradebook
from cluster.evaluation.pool import grade
from cluster.evaluation.records import Grade, Output
from cluster.evaluation.runs import make_plan
from cluster.evaluation.settings import EvaluationConfig
from cluster.evaluation.task import Task
from cluster.output.storage import Store
from jobs.evaluate import load_evaluation, main
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
ROWS = 8
TASK = """
description: Short arithmetic, as the bundled models were trained to answer it.
data: {splits: {demo: {file: prompts.jsonl}}}
split: demo
id: "{{ index }}"
prompt: "{{ prompt }}"
answer: "The answer is {{ answer }}."
reference: {answer: "{{ answer }}"}
max_new_tokens: 96
grader: number
metrics: {exact_match: {score: flexible, filter: flexible-extract}}
"""


@dataclass
class Folder:
    """A task of ``ROWS`` questions, whose last reference is wrong on purpose, and an output."""

    root: Path

    def __post_init__(self) -> None:
        (self.root / "sums.yaml").write_text(TASK)
        rows = [json.loads(line) for line in (ROOT / "jobs" / "prompts.jsonl").read_text().splitlines()[:ROWS]]
        rows[-1]["answer"] += 1
        (self.root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    @property
    def output(self) -> Path:
        return self.root / "out"

    @property
    def args(self) -> list[str]:
        task = ["--tasks", str(self.root / "sums.yaml"), "--task-data", str(self.root), "--output", str(self.output)]
        # One row a part and two at a time: parts appear one after the other, so that there is a middle to be killed in.
        slowly = ["--shard-rows", "1", "--workers", "1", "--batch-size", "2"]
        return [*task, "--compare", "vanilla,specfold:0.1,vanilla@0.1,vanilla+cache", *slowly]

    def parts(self, variant: str) -> list[Path]:
        return sorted((self.output / "sums" / variant / "data").glob("train-*.parquet"))

    def rows(self, variant: str) -> list[dict[str, Any]]:
        return [row for part in self.parts(variant) for row in pq.read_table(part).to_pylist()]

    def results(self) -> dict[str, Any]:
        return json.loads((self.output / "results.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("evaluation"))


@pytest.fixture(scope="module")
def killed(folder: Folder) -> int:
    """Parts of the second run when the driver was killed in the middle of it."""
    with started(folder) as process:
        wait_until("the second run never began", lambda: len(folder.parts("specfold-0.1")) >= 2, process)
    assert len(folder.parts("vanilla")) == ROWS
    assert not (folder.output / "results.json").exists()
    return len(folder.parts("specfold-0.1"))


@pytest.fixture(scope="module")
def printed(folder: Folder, killed: int) -> str:
    """What the same command printed when it had gone on to the end."""
    assert killed < ROWS, "the job was over before it could be killed"
    with started(folder) as process:
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, output
    return output


@contextmanager
def started(folder: Folder) -> Iterator[subprocess.Popen[str]]:
    """The command, killed where it still runs in the end."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "jobs" / "evaluate.py"), *folder.args],
        env=keep | {"HOME": str(folder.root), "RAY_AUTH_MODE": "disabled", "COLUMNS": "160"},
        cwd=folder.root, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()


def test_every_row_is_there_once_with_its_reference(folder: Folder, printed: str) -> None:
    for variant in ("vanilla", "specfold-0.1"):
        rows = folder.rows(variant)
        assert [(row["row_id"], row["sample_id"], row["id"]) for row in rows] == [(i, 0, str(i)) for i in range(ROWS)]
        assert all(json.loads(row["reference"])["answer"] for row in rows)
        assert {row["finish_reason"] for row in rows} == {"stop"}
    assert not {"train", "valid", "dev", "test", "eval"} & {
        part for p in folder.output.rglob("*") for part in p.parts[-1:]
    }


def test_the_results_have_the_harness_shape(folder: Folder, printed: str) -> None:
    found = folder.results()
    for name in ("sums:vanilla", "sums:specfold:0.1"):
        assert found["results"][name]["exact_match,flexible-extract"] == 7 / 8
        assert found["results"][name]["exact_match_stderr,flexible-extract"] == pytest.approx(0.125)
        assert found["n-samples"][name] == {"original": ROWS, "effective": ROWS}
        assert found["configs"][name]["generation_kwargs"]["max_gen_toks"] == 96
        assert found["n-shot"][name] == 0
        low, high = found["intervals"][name]["exact_match"]
        assert 0.5 < low < 7 / 8 < high < 1
    samples = [json.loads(line) for line in (folder.output / "samples_sums_vanilla.jsonl").open()]
    assert [(s["doc_id"], s["exact_match"]) for s in samples] == [(i, float(i < 7)) for i in range(ROWS)]
    assert samples[0]["resps"][0][0] == folder.rows("vanilla")[0]["output_text"]
    assert samples[0]["target"] == samples[0]["filtered_resps"][0].rstrip(".")


def test_the_table_says_whether_it_is_free(folder: Folder, printed: str) -> None:
    against = folder.results()["comparison"]["sums"]["against"]["sums:specfold:0.1"]
    assert against["difference"] | {"low": 0, "high": 0} == {
        "value": 0.0, "low": 0, "high": 0, "p": 1.0, "test": "exact McNemar", "only_first": 0, "only_second": 0,
    }  # fmt: skip
    assert against["outputs"]["agreement"] == 1.0
    costs = folder.results()["costs"]
    variants = {"vanilla": "vanilla", "specfold:0.1": "specfold-0.1", "vanilla@0.1": "vanilla-time0.1"}
    variants["vanilla+cache"] = "vanilla-cache"
    for name, variant in ((f"sums:{label}", folder_name) for label, folder_name in variants.items()):
        assert costs[name]["forwards"] == sum(row["num_forwards"] for row in folder.rows(variant))
        assert costs[name]["tokens_per_second"] > 0
    assert costs["sums:specfold:0.1"]["forwards"] < 0.6 * costs["sums:vanilla"]["forwards"]
    rows = {label: costs[f"sums:{label}"]["recomputed_rows_per_token"] for label in variants}
    assert rows["vanilla@0.1"] < rows["vanilla+cache"] < 0.8 * rows["vanilla"]
    assert costs["sums:vanilla@0.1"]["time_fold_rate"] > 0.5
    assert costs["sums:vanilla"]["time_fold_rate"] is None
    assert (folder.output / "comparison.png").read_bytes().startswith(b"\x89PNG")
    page = (folder.output / "comparison.md").read_text()
    assert "| specfold:0.1 | 87.5% (" in page
    assert "no difference beyond chance (p = 1.000), 0 questions lost and 0 won; 0." in page
    assert "specfold:0.1 against vanilla" in printed


def test_grades_are_kept_and_made_again_only_for_other_outputs(
    folder: Folder, printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(*settings(folder))
    run = plan.runs[0]
    store = Store(run.config.output)
    graded: list[str] = []

    def counted(task: Task, outputs: Iterable[Output], *rest: Any) -> Iterator[Grade]:
        outputs = list(outputs)
        graded.extend(output.item.id for output in outputs)
        return grade(task, outputs, *rest)

    monkeypatch.setattr("cluster.evaluation.gradebook.grade", counted)
    book = Gradebook(store, run.task, run.items)
    before = book.complete(1)
    assert graded == []
    store.write("grades/shard-0000003.json", b'{"identity": "of other outputs", "grades": []}')
    assert book.complete(1).grades == before.grades
    assert graded == ["3"]


def test_rows_that_are_missing_are_no_score(folder: Folder, printed: str) -> None:
    run = make_plan(*settings(folder)).runs[0]
    with pytest.raises(UserError, match="has 8 of 16 rows; run it again") as error:
        Gradebook(Store(run.config.output), run.task, run.items).complete(2)
    assert error.value.exit_code == 1


def settings(folder: Folder) -> tuple[JobConfig, EvaluationConfig, set[str]]:
    evaluation = load_evaluation(folder.args, {})
    assert evaluation is not None
    return evaluation.settings


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "--tasks names the tasks, such as gsm8k,humaneval; it is missing."),
        (["--tasks", ""], "Invalid value for --tasks: it must not be empty."),
        (["--tasks", "gsm8k", "--task-data", ""], "Invalid value for --task-data: it must not be empty."),
        (["--tasks", "gsm8k", "--compare", "vanilla,specfold", "--mode", "spiffy"], "--mode has no effect beside "),
        (["--tasks", "gsm9k"], "There is no task gsm9k; the bundled ones are gsm8k, "),
        (["--tasks", "gsm8k,gsm8k"], "--tasks has gsm8k twice."),
        (["--tasks", "gsm8k", "--prompts", "p.jsonl"], "--prompts has no meaning in an evaluation: "),
        (["--tasks", "gsm8k", "--check"], "--check has no meaning in an evaluation: "),
        (["--tasks", "gsm8k", "--fewshot", "-1"], "--fewshot must be 0 or more, not -1."),
        (["--tasks", "gsm8k", "--grading-workers", "9999"], "--grading-workers must be between 1 and 1024, not 9999."),
        (["--tasks", "gsm8k", "--comparee", "x"], "Unknown option: --comparee. Did you mean --compare?"),
        (["--tasks", "gsm8k", "--compare", "vanilla"], "--compare takes at least two variants"),
        (["--tasks", "humaneval", "--task-data", "DATA"], "Grading humaneval runs code that a model wrote; "),
        (["--tasks", "gsm8k", "--task-data", "DATA", "--model", "nowhere"], "The model folder nowhere does not exist."),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    args: list[str], sentence: str, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(shared / "data") if arg == "DATA" else arg for arg in args]
    assert main([*given, "--output", str(tmp_path / "out")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: " + sentence)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "letter.txt").write_text("Dear")
    assert main(["--tasks", "gsm8k", "--output", str(tmp_path)]) == 2
    assert "is not empty and not the output of an evaluation (it holds " in capsys.readouterr().err


def test_a_file_may_hold_the_flags_of_both(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("tasks: gsm8k\ncompare: vanilla,spiffy\nmax-new-tokens: 9\n")
    evaluation = load_evaluation(["--config", str(tmp_path / "run.yaml"), "--drafts", "2"], {})
    assert evaluation is not None
    config, settings, given = evaluation.settings
    assert (config.max_new_tokens, config.drafts, settings.compare) == (9, 2, "vanilla,spiffy")
    assert {"max_new_tokens", "drafts", "tasks"} <= given
    assert Path(config.output).name.startswith("fast_dllm_v2-scores-")
