"""A job that makes its own draft graph: once, before the first part, kept by the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.config import JobConfig
from cluster.driver.commands import run_job
from cluster.errors import UserError
from specfold.drafts import load_graph

PROMPTS = Path(__file__).resolve().parents[2] / "jobs" / "prompts.jsonl"


def config(output: Path, **settings: object) -> JobConfig:
    values = {"output": str(output), "prompts": str(PROMPTS), "device": "cpu", "workers": 1, "max_new_tokens": 16,
              "mode": "spiffy", "draft_graph": "auto", "shard_rows": 2}  # fmt: skip
    return JobConfig(**(values | settings))  # type: ignore[arg-type]


def test_the_graph_is_made_once_and_kept(local_ray: str, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert run_job(config(output, limit=2)) == 0
    run = json.loads((output / "run.json").read_text())
    graph = load_graph(run["config"]["draft_graph_text"], 4)
    assert isinstance(graph.origin, dict)
    assert graph.origin["rows"] == 2
    assert run["identity"]["draft_graph"].startswith("auto sha256:")

    # More rows than it was calibrated on: the graph stays that of the first session.
    assert run_job(config(output, limit=4)) == 0
    assert len(list((output / "data").glob("*.parquet"))) == 2
    assert json.loads((output / "run.json").read_text()) == run
    with pytest.raises(UserError, match=r"draft_graph: auto sha256:.* in the run, null now"):
        run_job(config(output, limit=4, draft_graph=None))


def test_auto_needs_drafts(tmp_path: Path) -> None:
    for settings in ({"mode": "vanilla"}, {"drafts": 0}):
        with pytest.raises(UserError, match="--draft-graph auto needs drafts"):
            config(tmp_path, **settings)
    with pytest.raises(UserError, match=r"--draft-budget must be between 1 and drafts \(4\) or left out, not 5"):
        config(tmp_path, draft_budget=5)
