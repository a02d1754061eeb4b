"""What a running job shows: its figures as Prometheus scrapes them, in summary.json and the log, and names in Ray."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ray.util.state import list_actors, list_tasks

from cluster.driver.metrics import metric_names as job_metrics
from cluster.worker.metrics import metric_names as worker_metrics
from tests.cluster.fake_engine import GO, NAN
from tests.cluster.head import Head
from tests.cluster.jobs import JobFolder, expected
from tests.cluster.processes import start_driver

ROWS, HELD, FAILING = 200, 40, 3
DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "specfold.json"
Scrape = dict[str, dict[str, float]]
"""Values by metric, then by worker (empty for those of the job)."""


@dataclass
class Watched:
    """One job as it was seen while its workers were held, each after the same number of rows, and when it was over."""

    output: str
    held: Scrape
    done: Scrape
    live: dict[str, Any]
    summary: dict[str, Any]
    lines: list[str]
    actors: dict[str, str] = field(default_factory=dict)
    """Class names by name."""
    tasks: set[str] = field(default_factory=set)


def scrape(head: Head, run: str) -> Scrape:
    found: Scrape = defaultdict(dict)
    for name, labels, value in re.findall(r"^(\w+)\{(.*)\} (\S+)$", head.scrape(), re.MULTILINE):
        tags = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if tags.get("run") == run:
            found[name][tags.get("worker", "")] = float(value)
    return found


def wait_until(what: str, look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := look()):
        assert time.monotonic() < deadline, what
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def watched(head: Head, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = JobFolder(tmp_path_factory.mktemp("watched"))
    prompts = folder.write_prompts(ROWS, {FAILING: NAN})
    driver = start_driver(folder, head.address, prompts, "gated", head.environment, workers=2)
    run = str(folder.output)
    summary_file = folder.output / "summary.json"

    def held() -> Scrape | None:
        assert driver.poll() is None, driver.communicate()
        found = scrape(head, run)
        whole = set(found["ray_specfold_rows_total"].values()) == {HELD}
        return found if whole and found["ray_specfold_job_rows"] == {"": 2 * HELD} else None

    def live() -> dict[str, Any] | None:
        told = json.loads(summary_file.read_text()).get("live") if summary_file.exists() else None
        return told if told and told["rows"] == 2 * HELD else None

    seen = wait_until("the workers are not held", held)
    told = wait_until("summary.json is not refreshed", live)
    actors = {actor.name: actor.class_name for actor in list_actors(head.jobs, filters=[("state", "=", "ALIVE")])}
    tasks = {task.name for task in list_tasks(head.jobs, limit=1000)}
    (folder.root / GO).touch()
    output, errors = driver.communicate(timeout=60)
    assert driver.returncode == 0, output + errors
    final = {"ray_specfold_job_rows": {"": float(ROWS)}}
    wait_until("the last figures never come", lambda: scrape(head, run).items() >= final.items())
    return Watched(
        run, seen, scrape(head, run), told, folder.summary(), output.splitlines(), actors, tasks
    )  # fmt: skip


def test_prometheus_sees_every_metric_while_the_job_runs(watched: Watched) -> None:
    names = {re.sub("^ray_|_total$", "", name) for name in watched.held}
    assert names == {re.sub("_total$", "", name) for name in (*job_metrics(), *worker_metrics())}
    held = watched.held
    assert held["ray_specfold_rows_total"] == {"worker-0": HELD, "worker-1": HELD}
    print(json.dumps(held, indent=1))
