"""What a running job shows: its figures as Prometheus scrapes them, in summary.json and the log, and names in Ray."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ray.util.state import list_actors, list_tasks

from cluster.driver.metrics import metric_names as job_metrics
from cluster.worker.metrics import metric_names as worker_metrics
from tests.cluster.fake_engine import GO, NAN
from tests.cluster.head import Head
from tests.cluster.jobs import JobFolder
from tests.cluster.processes import start_driver
from tests.waiting import PATIENCE_S, wait_until

ROWS, HELD, FAILING = 200, 40, 3
DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "specfold.json"
METRICS = [*job_metrics(), *worker_metrics()]
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


@pytest.fixture(scope="module")
def watched(head: Head, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = JobFolder(tmp_path_factory.mktemp("watched"))
    prompts = folder.write_prompts(ROWS, {FAILING: NAN})
    driver = start_driver(folder, head.address, prompts, "gated", head.environment, workers=2)
    run = str(folder.output)
    summary_file = folder.output / "summary.json"

    def held() -> Scrape | None:
        found = scrape(head, run)
        # Each process reports when it comes to it.
        whole = found["ray_specfold_rows_total"] == dict.fromkeys(("worker-0", "worker-1"), HELD)
        return found if whole and found["ray_specfold_job_rows"] == {"": 2 * HELD} else None

    def live() -> dict[str, Any] | None:
        told = json.loads(summary_file.read_text()).get("live") if summary_file.exists() else None
        return told if told and told["rows"] == 2 * HELD else None

    seen = wait_until("the workers are not held", held, driver, every_s=0.2)
    told = wait_until("summary.json is not refreshed", live, driver)
    alive = list_actors(head.jobs, filters=[("state", "=", "ALIVE")])
    [job] = [actor.job_id for actor in alive if actor.name == f"output {run}"]
    actors = {actor.name: actor.class_name for actor in alive if actor.job_id == job}
    tasks = {task.name for task in list_tasks(head.jobs, filters=[("job_id", "=", job)], limit=1000)}
    (folder.root / GO).touch()
    output, errors = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0, output + errors
    final = {"ray_specfold_job_rows": {"": float(ROWS)}}
    wait_until("the last figures never come", lambda: scrape(head, run).items() >= final.items(), every_s=0.2)
    return Watched(
        run, seen, scrape(head, run), told, folder.summary(), output.splitlines(), actors, tasks
    )  # fmt: skip


def test_prometheus_sees_every_metric_while_the_job_runs(watched: Watched) -> None:
    held = watched.held
    assert {name.removeprefix("ray_").removesuffix("_total") for name in held} == set(METRICS)
    both = {"worker-0", "worker-1"}
    for name in set(worker_metrics()) - {"specfold_failed_rows"}:  # a counter begins with its first row
        assert (held.get(f"ray_{name}") or held[f"ray_{name}_total"]).keys() == both, name
    for name in job_metrics():
        assert held[f"ray_{name}"].keys() == {""}, name


def test_its_values_are_those_of_the_job(watched: Watched) -> None:
    held = watched.held
    assert held["ray_specfold_rows_total"] == {"worker-0": HELD, "worker-1": HELD}
    assert held["ray_specfold_failed_rows_total"].keys() <= {"worker-0", "worker-1"}
    assert sum(held["ray_specfold_failed_rows_total"].values()) == 1
    assert sum(held["ray_specfold_drafts_proposed_total"].values()) == 4 * (2 * HELD - 1)
    assert held["ray_specfold_job_rows"] == {"": 2 * HELD}
    assert held["ray_specfold_job_total_rows"] == {"": ROWS}
    assert held["ray_specfold_job_workers_up"] == held["ray_specfold_job_workers_wanted"] == {"": 2}
    assert held["ray_specfold_job_acceptance"] == {"": 0.5}


def test_the_last_figures_are_the_final_ones(watched: Watched) -> None:
    done, summary = watched.done, watched.summary
    assert done["ray_specfold_job_rows"] == {"": summary["rows"]["done"]} == {"": ROWS}
    assert done["ray_specfold_job_failed_rows"] == {"": summary["rows"]["failed"]} == {"": 1}
    assert done["ray_specfold_job_fold_rate"][""] == pytest.approx(summary["fold_rate"], abs=1e-4)
    assert done["ray_specfold_job_eta_seconds"] == {"": 0}


def test_the_dashboard_asks_for_nothing_that_does_not_exist(watched: Watched) -> None:
    text = DASHBOARD.read_text()
    asked = set(re.findall(r"ray_specfold_\w+", text))
    assert asked <= watched.held.keys()
    assert {name.removeprefix("ray_").removesuffix("_total") for name in asked} == set(METRICS), "shown by no panel"
    board = json.loads(text)
    assert all(panel["targets"] for panel in board["panels"])
    places = [(place["x"], place["y"]) for place in (panel["gridPos"] for panel in board["panels"])]
    assert len(set(places)) == len(places)


def test_the_summary_of_a_running_job_tells_its_speed_and_each_worker(watched: Watched) -> None:
    live = watched.live
    assert live["rows"] == 2 * HELD
    assert live["tokens_per_second"].keys() == {"now", "run"}
    assert live["tokens_per_second"]["run"] > 0
    assert (live["acceptance"], live["workers_up"], live["workers_wanted"]) == (0.5, 2, 2)
    assert live["eta_seconds"] > 0
    for worker in ("worker-0", "worker-1"):
        told = live["workers"][worker]
        assert (told["doing"], told["rows"]) == ("decoding", HELD)
        assert told["node"]
    assert "live" not in watched.summary


def test_the_log_of_a_job_is_plain_lines(watched: Watched) -> None:
    lines = [line for line in watched.lines if " workers up" in line]
    assert lines
    last = [line for line in lines if line.startswith(f"{2 * HELD}/{ROWS} rows (40%), ")][-1]
    assert re.search(
        r", [\d,]+ tokens/s \([\d,]+ over the run\), acceptance 50%, \d+% folded, ([\d,]+ computed/token, )?"
        r"1 failed, 2 of 2 workers up, ",
        last,
    )
    assert not any("\x1b" in line for line in watched.lines)


def test_names_in_rays_dashboard_say_what_they_are(watched: Watched) -> None:
    assert watched.actors["worker-0"] == watched.actors["worker-1"] == "WorkerActor"
    assert watched.actors[f"output {watched.output}"] == "OutputLock"
    shards = {name for name in watched.tasks if re.fullmatch(r"shard \d+", name)}
    assert len(shards) >= 2 * HELD // 8
    assert {"worker-0 load", "worker-1 load"} <= watched.tasks
    known = r"shard \d+|worker-\d+ (load|room|progress)|check (rows|model)|.*:(WorkerActor|OutputLock)\.__init__"
    assert [name for name in watched.tasks if not re.fullmatch(known, name)] == []
