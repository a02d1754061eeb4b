"""``summary.json`` and ``report.html`` of a session: refreshed beside the driver while it runs, final at its end."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from cluster.output.history import History
from cluster.output.identity import other_versions, token_versions
from cluster.output.report import Report
from cluster.output.run_charts import RUNNING
from cluster.output.storage import Store
from cluster.output.summary import SUMMARY, Parts, Tally, read_summary, summary_json

REPORT_S = 30.0
REPORT_SHARE = 0.01
_MAX_SESSIONS = 100
_OF_DECODING = ("tokens_per_second", "history", "audit")
"""Entries of the summary that stay those of the last session that decoded."""


class SummaryFile:
    """The two files for people. A refresh never holds up its caller, however long the store takes to answer."""

    def __init__(
        self,
        store: Store,
        tally: Tally,
        total_rows: int | None,
        say: Callable[[str], None],
        preflight: dict[str, Any] | None = None,
    ) -> None:
        self._preflight = preflight
        self.url = store.url
        self._store, self._tally, self._total_rows, self._say = store, tally, total_rows, say
        self._history = History()
        self._report = Report(store)
        self._report_due = 0.0
        self._refresh: Future[None] | None = None
        self._started, self._begin = time.time(), time.monotonic()
        self._seconds: float | None = None
        self.audit: dict[str, Any] | None = None
        """What the audit has found so far, if one was asked for."""
        self.live: dict[str, Any] | None = None
        """Where the job is now, told only while it runs."""
        self._before = read_summary(store)
        self._sessions = self._before.get("sessions", [])[-_MAX_SESSIONS:]
        self._versions = token_versions() | other_versions() | {"git": _git_commit()}

    def note(self, rows: int, tokens: int) -> None:
        """Keep for the history how far the job is now; ``tokens``: of this session."""
        self._history.add(time.monotonic() - self._begin, rows, tokens)

    def stop_clock(self) -> None:
        """What follows is no part of the run's time: an audit must not make its speed look lower."""
        self._seconds = time.monotonic() - self._begin

    def refresh(self) -> None:
        """Begin to publish the totals so far; skipped while the last refresh still waits for the store.

        Raises what the last one has met, such as ``StorageError``.
        """
        if self._refresh is not None:
            if not self._refresh.done():
                return
            self._refresh.result()
        # Made here, as bytes: what the tally holds goes on changing.
        data = summary_json(self._values(RUNNING) | {"live": self.live})
        is_due = time.monotonic() - self._begin >= self._report_due
        self._refresh = _beside(partial(self._publish, data, self._tally.parts() if is_due else None))

    def settle(self) -> None:
        """Wait for the refresh under way, which must not overwrite what is published next."""
        if self._refresh is not None:
            wait([self._refresh])

    def write(
        self, state: str, exit_code: int | None = None, missing: str = "", error: str | None = None
    ) -> dict[str, Any]:
        """Publish the final totals; returns them. ``error``: what ended the job before its time."""
        self.settle()
        values = self._values(state, exit_code, missing, error)
        self._publish(summary_json(values), self._tally.parts())
        return values

    def _values(
        self, state: str, exit_code: int | None = None, missing: str = "", error: str | None = None
    ) -> dict[str, Any]:
        seconds = time.monotonic() - self._begin if self._seconds is None else self._seconds
        values = self._tally.to_dict(seconds)
        values["rows"] = {"total": self._total_rows} | values["rows"]
        session = values.pop("session") | {
            "state": state, "exit_code": exit_code, "started": _utc(self._started), "host": os.uname().nodename,
            "versions": self._versions,
        }  # fmt: skip
        values = {"state": state, "error": error, "missing_shards": missing, "updated": _utc(time.time())} | values
        values["sessions"] = [*self._sessions, session]
        if self._preflight is not None:
            values["preflight"] = self._preflight
        if state != RUNNING:
            self._history.add(seconds, self._tally.rows, self._tally.session_tokens)
        values["history"] = self._history.points()
        if not self._tally.session_rows:
            # A session that only pushes, audits or looks has no speed of its own to tell.
            values |= {name: self._before[name] for name in _OF_DECODING if name in self._before}
        if self.audit is not None:
            values["audit"] = self.audit
        return values

    def _publish(self, summary: bytes, parts: Parts | None) -> None:
        """``parts``: makes the page, too."""
        self._store.write(SUMMARY, summary)
        if parts is not None:
            self._write_report(orjson.loads(summary), parts)

    def _write_report(self, values: dict[str, Any], parts: Parts) -> None:
        """Publish the page. The rows matter more: whatever is wrong with the page is one line and never ends a job."""
        before = time.monotonic()
        try:
            self._report.write(values, parts)
        except Exception as error:
            self._say(
                f"report.html could not be made ({type(error).__name__}: {error}); the results are not concerned."
            )
        now = time.monotonic()
        # A slow store or a huge run gets fewer pages, not a slower job.
        self._report_due = now - self._begin + max(REPORT_S, (now - before) / REPORT_SHARE)


def _beside(call: Callable[[], None]) -> Future[None]:
    """Run in a thread that the end of the process does not wait for, as it does for those of a pool."""
    future: Future[None] = Future()

    def work() -> None:
        try:
            call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=work, name="summary", daemon=True).start()
    return future


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _git_commit() -> str | None:
    """The program's commit, where it runs from a checkout."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
