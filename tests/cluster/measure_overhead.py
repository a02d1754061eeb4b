"""What guards and report cost a whole run: runs with and without them, in pairs, on one Ray.

    python -m tests.cluster.measure_overhead instant --rows 20000 --pairs 8
    python -m tests.cluster.measure_overhead model --rows 96 --pairs 8

``instant`` is the fake engine, which costs nothing, so that all there is is overhead; ``model`` is the bundled one. The
two runs of a pair follow each other, which of them first takes turns. Prints one line a pair and ends with one of JSON,
medians and quartiles: the ratio of the times with and without, of the wall and of the processors (driver and worker
together, loading left out), and the share of the processors' time that guards and page were seen to take.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from cluster.driver import run_job
from cluster.driver.summary_file import SummaryFile
from cluster.output.storage import Store
from cluster.output.summary import Parts
from cluster.worker import shardwork
from cluster.worker.guards import Specials
from specfold import Completion, Engine
from tests.cluster.fake_engine import FakeEngine
from tests.cluster.jobs import JobFolder

NAME, WORKER = "tests.cluster.measure_overhead", "worker.json"


def instant(folder: str, **_: Any) -> FakeEngine:
    _watch(bare=False)
    return FakeEngine()


def instant_bare(folder: str, **_: Any) -> FakeEngine:
    _watch(bare=True)
    return FakeEngine()


def model(folder: str, **settings: Any) -> Engine:
    engine = Engine.from_pretrained(folder, **settings)
    _watch(bare=False)
    return engine


def model_bare(folder: str, **settings: Any) -> Engine:
    engine = Engine.from_pretrained(folder, **settings)
    _watch(bare=True)
    return engine


def _watch(*, bare: bool) -> None:
    """In a worker's process, which ends with its run: leave out the guards or time them, and note what it has used."""
    flags_of, publish, spent, begin = shardwork.flags_of, shardwork.ShardWork.publish, [0.0], time.process_time()

    def timed(completion: Completion, specials: Specials) -> list[str]:
        before = time.thread_time()
        found = flags_of(completion, specials)
        spent[0] += time.thread_time() - before
        return found

    def noted(self: shardwork.ShardWork, store: Store, *args: Any) -> Any:
        done = publish(self, store, *args)
        Path(store.root, WORKER).write_text(json.dumps({"cpu": time.process_time() - begin, "guards": spent[0]}))
        return done

    shardwork.flags_of = (lambda completion, specials: []) if bare else timed
    shardwork.ShardWork.publish = noted  # type: ignore[method-assign]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("instant", "model"))
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--pairs", type=int, default=8)
    args = parser.parse_args(argv)
    ray.init(address="local", num_cpus=2, include_dashboard=False, namespace="specfold", log_to_driver=False)
    ratios: dict[str, list[float]] = {"wall": [], "cpu": [], "guards_share": [], "page_share": []}
    for pair in range(args.pairs + 1):
        found = {
            bare: _run(args.engine, args.rows, bare=bare) for bare in ((False, True) if pair % 2 else (True, False))
        }
        if not pair:
            continue  # the first pair warms the caches
        whole, less = found[False], found[True]
        for kind in ("wall", "cpu"):
            ratios[kind].append(whole[kind] / less[kind])
        for kind in ("guards", "page"):
            ratios[f"{kind}_share"].append(whole[kind] / whole["cpu"])
        print({kind: round(values[-1], 4) for kind, values in ratios.items()}, file=sys.stderr)
    result = {kind: _spread(values) for kind, values in ratios.items()}
    print(json.dumps({"engine": args.engine, "rows": args.rows, "pairs": args.pairs} | result))


def _run(engine: str, rows: int, *, bare: bool) -> dict[str, float]:
    """Seconds of one job: of the wall from its start to its last part, of the processors, of guards and page."""
    kept, factory = SummaryFile._write_report, f"{NAME}:{engine}" + ("_bare" if bare else "")
    with tempfile.TemporaryDirectory() as root:
        folder = JobFolder(Path(root))
        if engine == "instant":
            config = folder.config(folder.write_prompts(rows))
        else:
            lines = (Path(__file__).parents[2] / "jobs/prompts.jsonl").read_text().splitlines()
            prompts = Path(root, "in.jsonl")
            prompts.write_text("\n".join((lines * (rows // len(lines) + 1))[:rows]) + "\n")
            config = folder.config(str(prompts), model="fast_dllm_v2", shard_rows=16)
        page = [0.0]

        def timed(self: SummaryFile, values: dict[str, Any], parts: Parts) -> None:
            before = time.thread_time()
            if not bare:
                kept(self, values, parts)
            page[0] += time.thread_time() - before

        SummaryFile._write_report = timed  # type: ignore[method-assign]
        try:
            before = time.process_time()
            if run_job(config, engine_factory=factory):
                raise SystemExit("the job failed")
            driver = time.process_time() - before
        finally:
            SummaryFile._write_report = kept  # type: ignore[method-assign]
        worker = json.loads((folder.output / WORKER).read_text())
        seconds = folder.summary()["sessions"][-1]["seconds"]
        return {"wall": seconds, "cpu": driver + worker["cpu"], "guards": worker["guards"], "page": page[0]}


def _spread(ratios: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(ratios, n=4)
    return {"median": round(median, 4), "lower": round(low, 4), "upper": round(high, 4)}


if __name__ == "__main__":
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    main(sys.argv[1:])
