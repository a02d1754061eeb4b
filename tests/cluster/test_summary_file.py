"""``summary.json`` and the page while a job runs: made beside it, never instead of it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import orjson
import pytest

from cluster.driver import host
from cluster.driver.summary_file import SummaryFile
from cluster.output.report import Report
from cluster.output.storage import StorageError, Store
from cluster.output.summary import SUMMARY
from tests.cluster.finished_runs import FinishedRun
from tests.cluster.jobs import JobFolder
from tests.waiting import PATIENCE_S, wait_until


@pytest.fixture
def finished(tmp_path: Path) -> FinishedRun:
    run = FinishedRun(tmp_path / "out")
    run.fill()
    return run


class Held:
    """A store that answers to one write of the summary, or fails at it, only when it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.waits, self.let_go = threading.Event(), threading.Event()
        self.states: list[str] = []
        write = Store.write

        def held(store: Store, name: str, data: bytes, **options: Any) -> None:
            if name == SUMMARY:
                self.states.append(orjson.loads(data)["state"])
                if not self.waits.is_set():
                    self.waits.set()
                    assert self.let_go.wait(PATIENCE_S)
                    if error is not None:
                        raise error
            write(store, name, data, **options)

        monkeypatch.setattr(Store, "write", held)


def test_a_refresh_waits_for_no_store_and_the_last_word_comes_last(
    finished: FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    summary = SummaryFile(finished.store, finished.tally, 96, print)
    for _ in range(5):
        summary.refresh()
    assert held.waits.wait(PATIENCE_S)
    summary.refresh()
    assert held.states == ["running"]  # not one more for each time it was asked for
    threading.Timer(0.2, held.let_go.set).start()
    summary.write("done", 0)
    assert held.states == ["running", "done"]
    assert orjson.loads(finished.store.read(SUMMARY))["state"] == "done"


def test_what_a_refresh_meets_is_told_by_the_next_one(finished: FinishedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch, StorageError("the disk is full."))
    summary = SummaryFile(finished.store, finished.tally, 96, print)
    summary.refresh()
    summary.refresh()  # it still waits
    held.let_go.set()
    summary.settle()
    with pytest.raises(StorageError, match="the disk is full"):
        summary.refresh()
    summary.write("stopped", 1)  # nor does it keep the last word from being tried
    assert held.states == ["running", "stopped"]


@pytest.mark.usefixtures("local_ray")
def test_a_job_goes_on_while_its_summary_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    monkeypatch.setattr(host, "SUMMARY_S", 0.1)
    folder = JobFolder(tmp_path)
    parts_meanwhile: list[int] = []

    def wait_for_parts() -> None:
        try:
            assert held.waits.wait(PATIENCE_S)
            wait_until("all parts while the summary waits", lambda: len(folder.parts) == 12)
            parts_meanwhile.append(len(folder.parts))
        finally:
            held.let_go.set()

    watcher = threading.Thread(target=wait_for_parts)
    watcher.start()
    assert folder.run(folder.write_prompts(96), shard_rows=8) == 0
    watcher.join()
    assert parts_meanwhile == [12]
    assert folder.summary()["state"] == "done"


def test_a_page_that_cannot_be_made_is_one_line_and_the_summary_stays(
    finished: FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    summary = SummaryFile(finished.store, finished.tally, 96, said.append)

    def fail(*_: Any) -> None:
        raise RuntimeError("no page today")

    monkeypatch.setattr(Report, "write", fail)
    summary.write("done", 0)
    assert said == ["report.html could not be made (RuntimeError: no page today); the results are not concerned."]
    assert finished.store.exists(SUMMARY)


def test_a_slow_store_gets_fewer_pages(finished: FinishedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    pages: list[float] = []

    def write(*_: Any) -> None:
        nonlocal now
        pages.append(now)
        now += 2.0

    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr(Report, "write", write)
    summary = SummaryFile(finished.store, finished.tally, 96, print)
    while now < 1000:
        now += 10
        summary.refresh()
        summary.settle()
    assert 4 <= len(pages) <= 6  # 2 s each, at most a hundredth of the time, and one at once
