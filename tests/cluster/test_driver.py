"""Whole jobs on a real local Ray with a fake engine: what a user finds in the output folder, and exit codes."""

from __future__ import annotations

import json
import re
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import DatasetCard

from cluster.driver import check_job, run_job
from cluster.errors import UserError
from cluster.output.storage import Store
from specfold.drafts import build_graph
from tests.cluster import fake_engine
from tests.cluster.fake_engine import NAN
from tests.cluster.jobs import JobFolder, expected, keys

pytestmark = pytest.mark.usefixtures("local_ray")


def test_the_bar_ends_where_the_job_does(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # to the output, a terminal
    assert folder.run(folder.write_prompts(20), shard_rows=10) == 0
    assert re.findall(r"\d+/\d+ rows \(\d+%\)", capsys.readouterr().out)[-1] == "20/20 rows (100%)"


def test_every_row_once_and_in_order(folder: JobFolder) -> None:
    prompts = folder.write_prompts(50)
    assert folder.run(prompts, num_samples=2, shard_rows=8, max_new_tokens=9, workers=2) == 0

    table = folder.rows()
    assert keys(table) == [(row, sample) for row in range(50) for sample in range(2)]
    for line in table.to_pylist():
        assert line.items() >= expected(line["row_id"], line["sample_id"], max_new_tokens=9).items()
    assert [path.name for path in folder.parts] == [f"train-{i:07d}.parquet" for i in range(7)]
    assert pq.read_table(folder.parts[6])["row_id"].to_pylist() == [48, 48, 49, 49]


def test_the_run_directory_tells_what_was_done(folder: JobFolder) -> None:
    prompts = folder.write_prompts(40, {3: "not json", 7: NAN})
    assert folder.run(prompts, shard_rows=16, max_failed=0.1) == 0

    run = json.loads((folder.output / "run.json").read_text())
    assert run["identity"]["shard_rows"] == 16
    assert run["identity"]["torch"]
    assert run["identity"]["device"]
    assert run["inputs"] == [prompts]
    assert run["config"]["max_failed"] == 0.1
    summary = folder.summary()
    assert summary["state"] == "done"
    assert summary["rows"]["done"] == summary["rows"]["total"] == 40
    assert summary["rows"]["failed_by_kind"] == {"invalid_json": 1, "nan_logits": 1}
    assert summary["output_tokens"] == sum(folder.rows()["num_output_tokens"].to_pylist())
    assert summary["acceptance_by_depth"] == [1.0, 0.0]
    assert summary["fold_rate"] == pytest.approx((30 + 24) / 128, abs=1e-3)
    assert sum(worker["rows"] for worker in summary["workers"].values()) == 40
    shards = pq.read_table(folder.output / "shards.parquet").to_pylist()
    assert [(line["shard"], line["rows"], line["failed"]) for line in shards] == [(0, 16, 2), (1, 16, 0), (2, 8, 0)]
    stats = [json.loads(path.read_text()) for path in sorted((folder.output / "stats").iterdir())]
    footers = [json.loads(pq.read_metadata(path).metadata[b"specfold.shard"]) for path in folder.parts]
    assert stats == footers
    assert [(f["first_row"], f["input_rows"], f["identity"]) for f in footers] == [
        (0, 16, run["identity_hash"]), (16, 16, run["identity_hash"]), (32, 8, run["identity_hash"]),
    ]  # fmt: skip

    card = DatasetCard.load(folder.output / "README.md")
    assert card.data.size_categories == ["n<1K"]
    assert "| error nan_logits | 1 |" in card.text
    loaded = datasets.load_dataset(str(folder.output), cache_dir=str(folder.root / "cache"))
    assert list(loaded) == ["train"]
    assert loaded["train"]["row_id"][:] == list(range(40))
    assert loaded["train"]["output_token_ids"][0] == expected(0)["output_token_ids"]
    assert loaded["train"]["output_token_ids"][3] == []


def test_columns_do_not_depend_on_the_values_and_too_many_failures_are_exit_code_3(folder: JobFolder) -> None:
    prompts = folder.write_prompts(12, dict.fromkeys(range(8), "broken"))
    assert folder.run(prompts, shard_rows=8) == 3

    schemas = [pq.read_schema(path).remove_metadata() for path in folder.parts]
    assert schemas[0] == schemas[1]
    assert schemas[0].names[:4] == ["row_id", "sample_id", "id", "n"]
    assert schemas[0].field("n").type == pa.int64()
    assert [name for name in schemas[0].names if schemas[0].field(name).nullable] == [
        "id", "n", "error", "error_kind", "fold_rate",
    ]  # fmt: skip
    broken = pq.read_table(folder.parts[0]).to_pylist()[0]
    assert (broken["finish_reason"], broken["error_kind"], broken["n"], broken["output_text"]) == (
        "error", "invalid_json", None, "",
    )  # fmt: skip
    assert folder.run(prompts, shard_rows=8, max_failed=0.7) == 0  # nothing is left to do, and the limit may change


def test_nothing_to_decode_is_exit_code_2_before_anything_is_written(folder: JobFolder) -> None:
    prompts = folder.write_prompts(3, dict.fromkeys(range(3), '{"prompt_token_ids": []}'))
    with pytest.raises(UserError, match="no row can be decoded: row 0") as caught:
        folder.run(prompts)
    assert caught.value.exit_code == 2
    assert list(folder.output.iterdir()) == []


def test_a_setting_that_the_engine_refuses_is_one_sentence(folder: JobFolder) -> None:
    with pytest.raises(UserError, match=r"^--mode ar exists for Nemotron") as caught:
        folder.run(folder.write_prompts(3), mode="ar")
    assert caught.value.exit_code == 2


def test_a_part_too_large_for_a_worker_is_refused_by_check_and_job(folder: JobFolder) -> None:
    config = folder.config(folder.write_prompts(105), num_samples=10_000, shard_rows=500)
    for command in (check_job, run_job):
        with pytest.raises(UserError, match=r"give --shard-rows 104 or less\.$"):
            command(config)
    assert not (folder.output / "run.json").exists()


def test_check_counts_what_is_wrong_and_writes_nothing(folder: JobFolder, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = folder.write_prompts(10, {1: "broken", 2: "broken", 4: '{"prompt_token_ids": [], "id": "row-0"}'})
    folder.write_weights()
    assert check_job(folder.config(prompts)) == 0

    shown = capsys.readouterr().out
    assert "10 rows checked, 3 cannot be decoded." in shown
    assert "invalid_json: 2 rows, first row 1" in shown
    assert "empty_prompt: 1 row, first row 4" in shown
    assert "1 row repeats the id" in shown
    assert "10 outputs in 2 parts of 8 input rows" in shown
    assert "Unknown: no run" in shown
    assert not folder.output.exists()


def test_check_and_job_say_that_a_graph_is_another_models_and_that_samples_are_the_same(
    folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write_weights()
    graph = build_graph([[(0, 0)]], {"model": "other\x1b[2J", "content": "sha256:0"})
    graph.save(folder.root / "graph.json")
    settings = {"draft_graph": str(folder.root / "graph.json"), "drafts": 1, "num_samples": 2}
    config = folder.config(folder.write_prompts(2), **settings).with_files()
    assert check_job(config) == 0
    assert run_job(config, engine_factory=f"{fake_engine.MODULE}:instant") == 0
    shown = capsys.readouterr().out
    assert shown.count("calibrated on another model than this job's, or other weights of it ('other\\x1b[2J')") == 2
    assert shown.count("Warning: 2 rows have temperature 0, where all samples are the same") == 2


def test_check_ends_with_two_where_the_job_could_not_run(folder: JobFolder, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = folder.write_prompts(10)
    with pytest.raises(UserError, match=r"^The weight file .*model\.safetensors is missing\.$") as caught:
        check_job(folder.config(prompts))
    assert caught.value.exit_code == 2
    assert "10 rows checked, 0 cannot be decoded." in capsys.readouterr().out

    folder.write_weights()
    assert folder.run(prompts) == 0
    before = sorted(path for path in folder.output.rglob("*") if path.is_file())
    assert check_job(folder.config(prompts)) == 0
    assert "None: every row is there." in capsys.readouterr().out
    with pytest.raises(UserError, match=r"other settings \(delta: 0\.1 in the run, 0\.2 now\)"):
        check_job(folder.config(prompts, delta=0.2))
    assert check_job(folder.config(prompts, delta=0.2, overwrite=True)) == 0
    assert before == sorted(path for path in folder.output.rglob("*") if path.is_file())


@pytest.mark.parametrize("changes", [{}, {"overwrite": True}])
def test_a_parquet_file_of_another_name_is_refused_and_stays(folder: JobFolder, changes: dict[str, Any]) -> None:
    prompts = folder.write_prompts(16)
    assert folder.run(prompts, shard_rows=8) == 0
    copy = folder.parts[0].with_name("train-0000000 (copy).parquet")
    copy.write_bytes(folder.parts[0].read_bytes())
    with pytest.raises(UserError, match=r"data/train-0000000 \(copy\)\.parquet is no part of a run; take it out"):
        folder.run(prompts, shard_rows=8, **changes)
    copy.rename(folder.output / "copy.parquet")
    assert folder.run(prompts, shard_rows=8, **changes) == 0


def test_the_same_command_resumes_and_what_may_change_may_change(folder: JobFolder) -> None:
    prompts = folder.write_prompts(60, {11: NAN, 35: NAN})
    assert folder.run(prompts, limit=20, shard_rows=8, max_failed=1.0) == 0
    first = {path.name: path.read_bytes() for path in folder.parts}
    with pytest.raises(UserError, match=r"other settings \(delta: 0\.1 in the run, 0\.2 now\)") as caught:
        folder.run(prompts, delta=0.2, shard_rows=8)
    assert caught.value.exit_code == 2

    assert folder.run(prompts, limit=40, shard_rows=8, max_failed=1.0, batch_size=3, workers=2) == 0
    assert keys(folder.rows()) == [(row, 0) for row in range(40)]
    second = {path.name: path.read_bytes() for path in folder.parts}
    assert [name for name in first if second[name] != first[name]] == ["train-0000002.parquet"]  # it had four rows
    assert folder.summary()["rows"]["failed_by_kind"] == {"nan_logits": 2}
    assert [session["rows"] for session in folder.summary()["sessions"]] == [20, 24]
    workers = folder.summary()["workers"]
    assert sum(worker["rows"] for worker in workers.values()) == 40
    assert sum(worker["output_tokens"] for worker in workers.values()) == folder.summary()["output_tokens"]

    assert folder.run(prompts, engine="cured", limit=40, shard_rows=8, retry_failed=True) == 0
    third = {path.name: path.read_bytes() for path in folder.parts}
    assert [name for name in second if third[name] != second[name]] == [
        "train-0000001.parquet", "train-0000004.parquet",
    ]  # fmt: skip
    assert set(folder.rows()["finish_reason"].to_pylist()) == {"stop"}
    assert keys(folder.rows()) == [(row, 0) for row in range(40)]
    assert folder.summary()["rows"]["failed"] == 0

    (folder.output / "letter.txt").write_text("mine")
    assert folder.run(prompts, shard_rows=10, delta=0.2, limit=10, overwrite=True) == 0
    assert [path.name for path in folder.parts] == ["train-0000000.parquet"]
    assert json.loads((folder.output / "run.json").read_text())["identity"]["delta"] == 0.2
    assert (folder.output / "letter.txt").read_text() == "mine"
    assert len(list((folder.output / "stats").iterdir())) == 1


def test_a_folder_of_something_else_is_left_alone(folder: JobFolder) -> None:
    folder.output.mkdir()
    (folder.output / "letter.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="is not empty and not the output of a run") as caught:
            folder.run(folder.write_prompts(3), overwrite=overwrite)
        assert caught.value.exit_code == 2
    assert [path.name for path in folder.output.iterdir()] == ["letter.txt"]


def test_the_rows_are_pushed_at_the_end_and_a_failed_push_keeps_them(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pushed = []

    def push(store: Store, repo: str, *, public: bool) -> str:
        pushed.append((repo, public, store.exists("README.md"), len(store.names("data"))))
        if len(pushed) == 1:
            raise UserError("The results are whole.", 1)
        return "https://hub/a/b"

    monkeypatch.setattr("cluster.driver.job.push", push)
    monkeypatch.setattr("cluster.driver.commands.require_token", lambda: None)
    prompts = folder.write_prompts(20, {3: "broken"})
    assert folder.run(prompts, push_to_hub="a/b", max_failed=0.0) == 3
    assert "Nothing was pushed to the hub." in capsys.readouterr().out
    first = folder.summary()
    with pytest.raises(UserError, match="The results are whole") as caught:
        folder.run(prompts, push_to_hub="a/b")
    assert caught.value.exit_code == 1
    assert keys(folder.rows()) == [(row, 0) for row in range(20)]
    assert folder.run(prompts, push_to_hub="a/b", hub_public=True) == 0
    assert "Pushed to https://hub/a/b" in capsys.readouterr().out
    assert pushed == [("a/b", False, True, 3), ("a/b", True, True, 3)]
    # Sessions that decode nothing leave the speed of the one that did; its workers are told by the parts.
    last = folder.summary()
    assert {name: last[name] for name in ("tokens_per_second", "history")} == {
        name: first[name] for name in ("tokens_per_second", "history")
    }
    assert [(name, worker["rows"]) for name, worker in last["workers"].items()] == [("worker-0", 20)]
    times = [run["workers"]["worker-0"]["busy_seconds"] for run in (first, last)]
    assert times[1] == pytest.approx(times[0], abs=0.05)
    assert [session["workers"] for session in last["sessions"]] == [1, 0, 0]
