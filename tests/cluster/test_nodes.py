"""Several real raylets on one machine: nodes that are lost, come late, see another disk, have a broken GPU."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.fake_engine import GO
from tests.cluster.jobs import JobFolder
from tests.cluster.nodes import Nodes, some_nodes
from tests.cluster.processes import assert_undisturbed, descendants, start_driver, wait_for_parts
from tests.waiting import PATIENCE_S, wait_until


@pytest.fixture(scope="module")
def nodes(ray_home: object) -> Iterator[Nodes]:
    with some_nodes(1) as nodes:
        yield nodes


def test_a_lost_node_and_one_that_comes_late_change_nothing(folder: JobFolder, nodes: Nodes) -> None:
    """The job starts on one node, a second one joins, the first is lost, and the second ends the job alone."""
    prompts = folder.write_prompts(400)
    driver = start_driver(folder, nodes.address, prompts, "gated", workers=2, shard_rows=5)
    wait_for_parts(folder, 2, driver)
    assert {path.read_text().partition('"worker":"')[2][:8] for path in counters(folder)} == {"worker-0"}
    nodes.add()
    wait_for_worker(folder, "worker-1", driver)
    nodes.lose(0)
    (folder.root / GO).touch()
    out, err = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0, (out, err)
    assert "is gone (its node is gone); shards to run again: " in out
    assert_undisturbed(folder, 400)
    summary = folder.summary()
    assert summary["rows"]["failed"] == 0
    assert {"worker-0", "worker-1"} <= summary["workers"].keys()
    assert folder.decoded - 400 <= 4 * 5  # the four open shards of the worker that was lost
    print(f"a lost node: {folder.decoded - 400} of 400 rows decoded again")
    assert not folder.leftovers


def counters(folder: JobFolder) -> list[Path]:
    """The copies of the parts' counters."""
    return sorted((folder.output / "stats").glob("shard-*.json"))


def wait_for_worker(folder: JobFolder, worker: str, driver: subprocess.Popen[str]) -> None:
    """Until a worker has published a part."""

    def published() -> bool:
        return any(f'"worker":"{worker}"' in path.read_text() for path in counters(folder))

    wait_until(f"{worker} publishes nothing", published, driver)


def test_a_place_whose_gpu_never_finishes_a_row_is_set_aside(folder: JobFolder, nodes: Nodes) -> None:
    nodes.add()
    driver = start_driver(folder, nodes.address, folder.write_prompts(200), "broken_gpu_1", workers=2)
    assert driver.stdout is not None
    said = "The place of worker-1.3 is not used any more: 3 workers ended there without a finished row."
    assert any(said in line for line in driver.stdout), driver.communicate()
    (folder.root / GO).touch()
    out, err = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0, (out, err)
    assert_undisturbed(folder, 200)
    assert folder.summary()["rows"]["failed"] == 0


@pytest.fixture
def node_of_its_own_disk(nodes: Nodes, folder: JobFolder) -> Iterator[None]:
    """A node for which the parent of the output is another, empty disk."""
    place = folder.root / "shared"
    place.mkdir()
    start = [
        Path(sys.executable).with_name("ray"), "start", f"--address={nodes.address}", "--num-cpus=1", "--block",
        "--node-manager-port=0", "--dashboard-agent-listen-port=0", "--disable-usage-stats",
    ]  # fmt: skip
    inner = f'mount -t tmpfs none "{place}" && exec ' + " ".join(map(str, start))
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("a process may not have mounts of its own here")
    log = (folder.root / "node.log").open("w")
    process = subprocess.Popen(["unshare", "-m", "sh", "-c", inner], stdout=log, stderr=log, start_new_session=True)
    yield
    for pid in [*descendants(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(10)
    log.close()


@pytest.mark.usefixtures("node_of_its_own_disk")
def test_an_output_that_a_node_does_not_share_is_a_sentence(folder: JobFolder, nodes: Nodes) -> None:
    while nodes.count:
        nodes.lose(0)
    folder.output = folder.root / "shared" / "out"
    driver = start_driver(folder, nodes.address, folder.write_prompts(20))
    out, err = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 2, (out, err)
    assert "does not see the driver's files in" in err
    assert "--output must be a folder or URL that every node shares." in err
    assert len(err.strip().splitlines()) == 1
    assert not folder.parts
    shutil.rmtree(folder.output)
