"""A whole job with an engine that returns at once, side by side with Ray Data doing the same to the same rows.

    python -m tests.cluster.bench_ray_data --rows 1000000 --pairs 2 --json docs/bench/ray-data.json
    python -m tests.cluster.bench_ray_data --rows 300000 --pairs 0 --kill
    python -m tests.cluster.bench_ray_data --rows 100000 --only job

Each run is a command of its own with a Ray of its own: one of ours, one of Ray Data (``read_json``, ``map_batches``
with the engine's function, ``write_parquet``), in turn, and with workers of the command's own priority. Measured from
the start of the command: seconds, the time to the first part, peak memory of all processes (PSS). ``--kill`` ends each
with SIGKILL of its driver on the way and counts what is left; ours is then run again. Prints a line a run; the last one
is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.config import default_shard_rows
from specfold import Request
from tests.cluster.fake_engine import echo
from tests.cluster.jobs import JobFolder
from tests.cluster.memory import MIB, MemoryWatch, family
from tests.cluster.processes import RAY_SETTINGS, ROOT, descendants, start_driver

CPUS, SETTLE_S = 2, 8.0
JOB, RAY_DATA = "job", "ray-data"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--only", choices=(JOB, RAY_DATA))
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--json", type=Path, help="add the results to this file")
    args = parser.parse_args(argv)
    sides = (args.only,) if args.only else (JOB, RAY_DATA)
    results: dict[str, Any] = {"rows": args.rows, "cpus": CPUS, "date": time.strftime("%Y-%m-%d"), "runs": []}
    with tempfile.TemporaryDirectory() as root:
        os.environ |= {"HOME": root, **RAY_SETTINGS}
        prompts = JobFolder(Path(root, "input")).write_prompts(args.rows)
        for number in range(args.pairs):
            for side in sides:
                results["runs"].append(_note(Run(side, Path(root, f"{side}-{number}"), prompts).measure(args.rows)))
        if args.kill:
            results["killed"] = [
                _note(Run(side, Path(root, f"{side}-killed"), prompts).kill(args.rows)) for side in sides
            ]
    if args.json:
        known = json.loads(args.json.read_text()) if args.json.exists() else []
        args.json.write_text(json.dumps([*known, results], indent=1) + "\n")
    print(json.dumps(results))


class Run:
    """One command on a folder of its own."""

    def __init__(self, side: str, root: Path, prompts: str) -> None:
        self._side, self._prompts = side, prompts
        self._folder = JobFolder(root)

    def measure(self, rows: int) -> dict[str, Any]:
        """Run to the end."""
        before = time.monotonic()
        driver = self._start()
        watch = MemoryWatch(partial(family, driver.pid))
        first = None
        while driver.poll() is None:
            if first is None and self._parts():
                first = time.monotonic() - before
            time.sleep(0.05)
        seconds = time.monotonic() - before
        watch.stop()
        self._require_success(driver)
        left = self._count()
        assert left["rows"] == rows, left
        return {
            "side": self._side, "rows_per_s": round(rows / seconds), "seconds": round(seconds, 1),
            "first_part_s": round(first or seconds, 1),
            "rows_per_s_after_first_part": round(rows / (seconds - (first or 0))),
            "peak_mib": round(watch.peak_bytes / MIB), "files": left["files"],
            "peak_mib_by_process": {name: round(size / MIB) for name, size in watch.peak.most_common()},
        }  # fmt: skip

    def kill(self, rows: int) -> dict[str, Any]:
        """SIGKILL the driver once something is there and half of the likely time has gone; ours goes on afterwards."""
        driver = self._start()
        while not self._enough(rows):
            assert driver.poll() is None, driver.communicate()
            time.sleep(0.02)
        below = descendants(driver.pid)
        driver.kill()
        driver.wait()
        time.sleep(SETTLE_S)
        for pid in below:  # what outlives its driver for longer would only hold memory
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        found = {"side": self._side, **self._count()}
        if self._side == JOB:
            again = self._start()
            again.wait()
            self._require_success(again)
            found["after_resume"] = self._count()
        return found

    def _start(self) -> subprocess.Popen[str]:
        if self._side == JOB:
            return start_driver(self._folder, None, self._prompts, "echoing", workers=CPUS, shard_rows=None)  # type: ignore[arg-type]
        command = [sys.executable, "-m", "tests.cluster.bench_ray_data", "run-ray-data", self._prompts]
        return subprocess.Popen(
            [*command, str(self._folder.output / "data")], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def _parts(self) -> list[Path]:
        return sorted((self._folder.output / "data").glob("[!.]*.parquet"))

    def _enough(self, rows: int) -> bool:
        """Ours writes parts all along, Ray Data a few large ones."""
        return len(self._parts()) >= (rows // default_shard_rows(rows) // 2 if self._side == JOB else 1)

    def _count(self) -> dict[str, int]:
        """Files, those that can be read, their rows, and how many of these are different rows."""
        names: list[str] = []
        readable = 0
        for path in self._parts():
            with suppress(pa.ArrowInvalid, OSError):
                names += pq.read_table(path, columns=["id"])["id"].to_pylist()
                readable += 1
        return {
            "files": len(self._parts()),
            "readable": readable,
            "rows": len(names),
            "different_rows": len(set(names)),
        }

    def _require_success(self, driver: subprocess.Popen[str]) -> None:
        output, errors = driver.communicate()
        if driver.returncode:
            raise SystemExit(f"{self._side} has failed: {output[-2000:]} {errors[-2000:]}")


def run_ray_data(prompts: str, output: str) -> None:
    """What one would write with Ray Data: read, map, write."""
    import ray

    ray.init(address="local", num_cpus=CPUS, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    ray.data.read_json(prompts, lines=True).map_batches(decode_batch, batch_format="pyarrow").write_parquet(output)


def decode_batch(batch: pa.Table) -> pa.Table:
    """The engine's function on every row; fewer columns than a part of ours has."""
    ids = batch["prompt_token_ids"].to_pylist()
    done = [echo(Request(prompt)) for prompt in ids]
    return (
        batch.drop_columns(["prompt_token_ids"])
        .append_column("output_text", [[c.text for c in done]])
        .append_column("output_token_ids", [[c.token_ids for c in done]])
        .append_column("finish_reason", [[c.finish_reason for c in done]])
    )


def _note(run: dict[str, Any]) -> dict[str, Any]:
    print(run, file=sys.stderr, flush=True)
    return run


if __name__ == "__main__":
    if sys.argv[1:2] == ["run-ray-data"]:
        run_ray_data(*sys.argv[2:])
    else:
        main(sys.argv[1:])
