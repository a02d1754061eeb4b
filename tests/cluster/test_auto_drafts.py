"""A job that chooses its number of drafts: once, before the first part, kept by the run whatever happens to it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from cluster.config import JobConfig
from cluster.driver import check_job, run_job
from cluster.driver import job as driver_job
from cluster.errors import UserError
from cluster.evaluation.variants import parse_variants
from cluster.output.report import settings as settings_shown
from cluster.worker.choices import JobChoices
from jobs import calibrate
from jobs.cli import load_config

PROMPTS = Path(__file__).resolve().parents[2] / "jobs" / "prompts.jsonl"


def config(output: Path, **settings: Any) -> JobConfig:
    values = {"output": str(output), "prompts": str(PROMPTS), "device": "cpu", "workers": 1, "max_new_tokens": 5,
              "drafts": "auto", "shard_rows": 2, "limit": 2}  # fmt: skip
    return JobConfig(**(values | settings))


@pytest.fixture(scope="module")
def run(local_ray: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a graph and drafts of its own choice."""
    output = tmp_path_factory.mktemp("auto") / "out"
    assert run_job(config(output, draft_graph="auto")) == 0
    return output


def read(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


def test_the_choice_stands_in_run_json_with_what_was_measured(run: Path) -> None:
    values = read(run)
    choice = values["choices"]["drafts"]
    speeds = {trial["drafts"]: trial["tokens_per_second"] for trial in choice["trials"]}
    assert 0 in speeds
    assert 2 in speeds or "2" in choice["left_out"]  # a busy machine may have no time for it
    assert speeds[choice["drafts"]] >= 0.98 * max(speeds.values())
    assert choice["batch_size"] == 8
    assert choice["device"] == "cpu"
    assert values["identity"]["drafts"] == f"auto ({choice['drafts']})"
    assert values["identity"]["batch_size"] == 8, "with folding tokens may follow the drafts, and those the batch size"
    graph = json.loads(values["config"]["draft_graph_text"])
    assert len(graph["nodes"]) == 8, "as many as may be chosen"
    part = pq.read_table(run / "data")
    proposed, forwards = (sum(part[name].to_pylist()) for name in ("drafts_proposed", "num_forwards"))
    assert bool(proposed) == bool(choice["drafts"])
    assert proposed <= choice["drafts"] * forwards
    assert ("drafts", f"auto ({choice['drafts']})") in settings_shown(values["config"], changed=True)


def test_resume_and_retry_keep_it_and_measure_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read(run)

    def never(*_: object) -> None:
        raise AssertionError("it has chosen again")

    monkeypatch.setattr(driver_job, "choose_by_first_rows", never)
    assert run_job(config(run, draft_graph="auto", limit=4)) == 0
    assert run_job(config(run, draft_graph="auto", limit=4, retry_failed=True)) == 0
    assert len(list((run / "data").glob("*.parquet"))) == 2
    assert read(run) == before
    card = (run / "README.md").read_text()
    chosen = before["config"]["chosen_drafts"]
    assert f"--drafts={chosen}" in card or chosen == JobConfig.drafts
    assert "--drafts=auto" not in card


def test_overwrite_chooses_anew(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    other = 1 + read(run)["config"]["chosen_drafts"]

    def choose(settings: JobConfig, *_: object) -> JobChoices:
        return JobChoices(replace(settings, chosen_drafts=other), {"drafts": {"drafts": other}})

    monkeypatch.setattr(driver_job, "choose_by_first_rows", choose)
    assert run_job(config(copy, overwrite=True)) == 0
    assert read(copy)["identity"]["drafts"] == f"auto ({other})"


def test_other_settings_are_refused_by_name(run: Path) -> None:
    chosen = read(run)["config"]["chosen_drafts"]
    for settings, sentence in (
        ({"drafts": 5}, rf"settings \(drafts: auto \({chosen}\) in the run, 5 now\);"),
        ({"batch_size": 4}, "batch_size: 8 in the run, 4 now"),
    ):
        with pytest.raises(UserError, match=sentence):
            run_job(config(run, draft_graph="auto", **settings))
    fixed = replace(config(run), drafts=chosen)
    with pytest.raises(UserError, match=rf"drafts: auto \({chosen}\) in the run, {chosen} now"):
        run_job(fixed)


def test_a_run_with_a_number_does_not_become_one_that_chooses() -> None:
    fixed, auto = config(Path("out"), drafts=3).identity(), config(Path("out")).identity()
    assert (fixed["drafts"], auto["drafts"]) == (3, "auto")


def test_check_says_what_will_be_chosen_and_what_was(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_job(config(tmp_path / "new", draft_graph="auto")) == 0
    told = capsys.readouterr().out
    assert "Drafts    The draft graph will be made from the first rows, before the first part." in told
    assert "0 to 8, as short runs of the first rows will show to be fastest for 8 rows at a time" in told
    assert not (tmp_path / "new").exists()
    assert check_job(config(run, draft_graph="auto", limit=4)) == 0
    chosen = read(run)["config"]["chosen_drafts"]
    assert f"Drafts    {chosen}, as the run in the folder has chosen." in capsys.readouterr().out


def test_the_batch_size_counts_only_where_tokens_may_follow_the_drafts() -> None:
    lossless = [{"mode": "spiffy"}, {"delta": -1.0}]
    assert all("batch_size" not in config(Path("out"), **settings).identity() for settings in lossless)
    assert "batch_size" in config(Path("out")).identity()
    assert "batch_size" not in config(Path("out"), drafts=4).identity()


def test_what_cannot_be_chosen_is_one_sentence() -> None:
    for settings, sentence in (
        ({"mode": "vanilla"}, "--drafts auto needs drafts: --mode spiffy or specfold."),
        ({"mode": "ar"}, "--drafts auto needs drafts: --mode spiffy or specfold."),
        ({"draft_budget": 2}, "--draft-budget needs a number of drafts, which auto is not."),
    ):
        with pytest.raises(UserError) as refused:
            config(Path("out"), **settings)
        assert str(refused.value) == sentence


def test_variants_without_drafts_leave_the_choice_to_the_others() -> None:
    command = config(Path("out"), draft_graph="auto")
    plain, folded = (variant.of(command) for variant in parse_variants("vanilla,specfold:0.1", command))
    assert (plain.drafts, plain.draft_graph) == (JobConfig.drafts, None)
    assert (folded.drafts, folded.draft_graph) == ("auto", "auto")


def test_the_command_line_takes_a_number_or_auto(capsys: pytest.CaptureFixture[str]) -> None:
    read_flags = load_config(["--drafts", "auto"], {}), load_config(["--drafts", "6"], {})
    assert [flags.drafts for flags in read_flags if flags] == ["auto", 6]
    with pytest.raises(UserError, match="it must be a whole number or auto, not 'some'"):
        load_config(["--drafts", "some"], {})
    assert calibrate.main(["--save", "graph.json", "--drafts", "auto"]) == 2
    assert capsys.readouterr().err.startswith("error: --drafts auto is for jobs")
