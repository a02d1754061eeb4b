"""Faults of all kinds at random moments while rows flow. ``--fault-minutes 60`` hits a job for an hour."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.cluster.jobs import JobFolder
from tests.cluster.nodes import Nodes, some_nodes
from tests.cluster.processes import assert_undisturbed, rows_finished, start_driver, worker_pids
from tests.waiting import PATIENCE_S

SEED = 6
ROWS_PER_S = 12
STALL_S = 5.0
MAY_END_WITH = {
    0: "", 1: "no worker is left that works", 130: "Stopped by SIGINT", 143: "Stopped by SIGTERM",
    -signal.SIGINT: "", -signal.SIGTERM: "",
}  # fmt: skip
"""Exit codes and what is said; the last two: it was still being imported."""


@pytest.fixture(scope="module")
def nodes(ray_home: object) -> Iterator[Nodes]:
    with some_nodes(2) as nodes:
        yield nodes


class Misfortune:
    """A job, the faults that hit it, and a user who submits it again at once whenever it has ended."""

    def __init__(self, folder: JobFolder, nodes: Nodes, prompts: str) -> None:
        self.chance = random.Random(SEED)
        self.folder, self.nodes, self.prompts = folder, nodes, prompts
        self.log: list[str] = []
        self.counts: Counter[str] = Counter()
        self.driver = self.submit("counting_slowly")
        self.faults = [
            *[self.kill_worker] * 6, self.end_worker, self.stop_worker, self.lose_node, self.submit_twice,
            *[self.kill_driver] * 2, self.interrupt_driver,
        ]  # fmt: skip

    def submit(self, engine: str) -> subprocess.Popen[str]:
        self.counts["submitted"] += 1
        settings = {"workers": 2, "stall_timeout": STALL_S}
        return start_driver(self.folder, self.nodes.address, self.prompts, engine, **settings)

    def strike(self) -> None:
        """The next fault, once rows flow again since the last one."""
        parts = len(self.folder.parts)
        deadline = time.monotonic() + 300
        while len(self.folder.parts) <= parts and time.monotonic() < deadline:
            if self.driver.poll() is not None:
                if self.look_at_end() == 0:
                    return
                self.driver = self.submit("counting_slowly")
            time.sleep(0.05)
        assert time.monotonic() < deadline, f"no part for five minutes; {self.story()}"
        time.sleep(self.chance.uniform(0, 1.0))
        fault = self.chance.choice(self.faults)
        self.counts[fault.__name__] += 1
        self.log.append(f"{len(self.folder.parts)} parts: {fault.__name__}")
        fault()

    def look_at_end(self) -> int:
        """How the driver has ended; the user is never shown a traceback."""
        out, err = self.driver.communicate(timeout=PATIENCE_S)
        code = self.driver.returncode
        if code != -signal.SIGKILL:
            assert code in MAY_END_WITH, (code, out, err, self.story())
            assert MAY_END_WITH[code] in out + err, (code, out, err, self.story())
        assert "Traceback" not in err, (err, self.story())
        return code

    def kill_worker(self) -> None:
        self.hit_worker(signal.SIGKILL)

    def end_worker(self) -> None:
        self.hit_worker(signal.SIGTERM)

    def stop_worker(self) -> None:
        self.hit_worker(signal.SIGSTOP)

    def hit_worker(self, number: int) -> None:
        pids = worker_pids()
        # Mostly those that decode; three deaths of workers that only load would set their place aside.
        working = [pid for pid in pids if rows_finished(pid)]
        victims = working if working and self.chance.random() < 0.8 else pids
        if victims:
            kill(self.chance.choice(victims), number)

    def lose_node(self) -> None:
        """A node is gone; another one comes a little later."""
        self.nodes.lose(self.chance.randrange(self.nodes.count))
        time.sleep(self.chance.uniform(0, 2.0))
        self.nodes.add()

    def submit_twice(self) -> None:
        """Another driver on the same output; if the first has just ended it may be the one that goes on."""
        second = self.submit("counting_slowly")
        if self.driver.poll() is None:
            _, err = second.communicate(timeout=PATIENCE_S)
            if self.driver.poll() is None:
                assert second.returncode == 2, (err, self.story())
                assert "another driver" in err
                return
        self.look_at_end()
        if second.poll() is None:
            self.driver = second

    def kill_driver(self) -> None:
        """SIGKILL, and the same command at once, while the workers of the first still write."""
        self.end_driver(signal.SIGKILL)

    def interrupt_driver(self) -> None:
        self.end_driver(self.chance.choice([signal.SIGTERM, signal.SIGINT]))

    def end_driver(self, number: int) -> None:
        sent = time.monotonic()
        kill(self.driver.pid, number)
        self.driver.wait(PATIENCE_S)
        if number != signal.SIGKILL:
            assert time.monotonic() - sent < 3.0, self.story()  # what ``ray job stop`` allows
        self.look_at_end()
        if number == signal.SIGKILL and self.chance.random() < 0.3:
            self.tear_part()
        self.driver = self.submit("counting_slowly")

    def tear_part(self) -> None:
        self.counts["tear_part"] += 1
        part = self.chance.choice(self.folder.parts)
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])

    def finish(self) -> None:
        """No more faults; the same command until every row is there."""
        kill(self.driver.pid, signal.SIGTERM)
        self.driver.wait(PATIENCE_S)
        self.look_at_end()
        self.driver = self.submit("instant")
        out, err = self.driver.communicate(timeout=PATIENCE_S)
        assert self.driver.returncode == 0, (out, err, self.story())

    def story(self) -> str:
        return f"seed {SEED}: {dict(self.counts)}; last: {self.log[-12:]}"


def kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


@pytest.mark.timeout(0)  # every wait in it has an end
def test_no_row_is_lost_doubled_or_changed(folder: JobFolder, nodes: Nodes, request: pytest.FixtureRequest) -> None:
    seconds = 60 * request.config.getoption("--fault-minutes")
    count = max(int(seconds * ROWS_PER_S), 200)
    misfortune = Misfortune(folder, nodes, folder.write_prompts(count))
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end and misfortune.driver.poll() != 0:
            misfortune.strike()
        misfortune.finish()
    finally:
        kill(misfortune.driver.pid, signal.SIGKILL)

    assert_undisturbed(folder, count)
    summary = folder.summary()
    assert (summary["rows"]["done"], summary["rows"]["failed"]) == (count, 0)
    assert sum(worker["rows"] for worker in summary["workers"].values()) == count
    assert not folder.leftovers
    calm = JobFolder(folder.root / "calm")
    driver = start_driver(calm, nodes.address, misfortune.prompts, "instant")
    out, err = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0, (out, err)
    assert folder.steady().equals(calm.steady())
    print(f"{count} rows, {folder.decoded} decoded with faults; {misfortune.story()}")
