"""The driver's side of dispatching: which workers take part, what is shown, when ``summary.json`` is written."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from cluster.driver.audit import Audit
from cluster.driver.metrics import JobMetrics
from cluster.driver.progress import Counts, Progress, Snapshot, WarmUp
from cluster.driver.roster import Live
from cluster.driver.summary_file import SummaryFile
from cluster.driver.views import View
from cluster.messages import AuditRecord, ShardRecord, WorkerInfo, WorkerState
from cluster.output.identity import DEVICE, differences, token_versions
from cluster.output.rundir import RunDir, RunFile
from cluster.output.summary import Tally

SUMMARY_S, SHOW_S = 10.0, 0.5


class Admission:
    """Holds workers against the run's identity. The first one of a new run completes it and creates ``run.json``."""

    def __init__(self, rundir: RunDir, run: RunFile, say: Callable[[str], None], *, is_new: bool) -> None:
        self._rundir, self._run, self._say, self._is_new = rundir, run, say, is_new
        self._is_first = True
        self.identity = "" if is_new else run.hash
        """The hash for the footers."""

    def admit(self, info: WorkerInfo) -> str | None:
        """Why a worker may not take part, if so. ``UserError`` if the first of a resumed run is of another kind."""
        versions = token_versions()
        if info.versions != versions:
            return f"its packages differ ({'; '.join(differences(versions, info.versions))})."
        if self._is_first:
            self._admit_first(info.device_kind)
            self._is_first = False
            if info.memory:
                self._say(info.memory)
        kind = self._run.identity[DEVICE]
        if info.device_kind == kind or not self._run.identity["deterministic"]:
            return None
        return f"the run is made on {kind} and it has {info.device_kind}, where tokens could differ."

    def _admit_first(self, kind: str) -> None:
        whole = self._run.with_identity(DEVICE, kind)
        if self._is_new:
            self._run = whole
            self._rundir.create(whole)
            self.identity = whole.hash
        else:
            self._rundir.require_same(self._run, whole.identity)


class JobHost:
    """What the dispatcher tells the driver, passed on to the tally, the view and the summary."""

    def __init__(
        self,
        admission: Admission,
        tally: Tally,
        view: View,
        summary: SummaryFile,
        total_rows: int | None,
        check: Callable[[], None],
    ) -> None:
        self._admission, self._tally, self._view, self._summary = admission, tally, view, summary
        self._total_rows, self._check = total_rows, check
        self._shown = self._written = time.monotonic()
        self._audit: Audit | None = None
        self._progress, self._warm_up, self._metrics = Progress(), WarmUp(), JobMetrics(summary.url)

    @property
    def identity(self) -> str:
        return self._admission.identity

    def admit(self, info: WorkerInfo) -> str | None:
        return self._admission.admit(info)

    def begin_audit(self, audit: Audit) -> None:
        """From now on workers audit: what they count is no part of the run's totals."""
        self._audit = audit
        self._summary.stop_clock()

    def finished(self, record: ShardRecord) -> None:
        if isinstance(record, AuditRecord):
            assert self._audit is not None
            self._audit.add(record)
            self._summary.audit = self._audit.to_dict()
        else:
            self._tally.add(record, fresh=True)

    def observe(self, worker: str, state: WorkerState) -> None:
        if self._audit is None:
            self._tally.observe(worker, state)

    def say(self, message: str) -> None:
        self._view.say(message)

    def tick(self, live: Live, wanted: int) -> None:
        """Show and save where the job is; raises what must end it (a signal, a lost lease)."""
        self._check()
        now = time.monotonic()
        if now - self._shown >= SHOW_S and self._audit is None:
            self._shown = now
            snapshot = self._look(live, wanted)
            self._view.show(snapshot)
            self._metrics.update(snapshot)
            estimate = self._warm_up.estimate(snapshot.counts)
            if estimate:
                self._view.say(estimate)
            self._summary.note(snapshot.counts.rows, snapshot.counts.output_tokens)
            self._summary.live = snapshot.to_dict()
        if now - self._written >= SUMMARY_S and self.identity:
            self._written = now
            self._summary.refresh()

    def conclude(self, live: Live, wanted: int) -> None:
        """Every part is published: let the metrics and the view end with the final figures.

        What workers had done beside that is of no part: rows of a helper whose death is not known yet.
        """
        snapshot = self._look(replace(live, unfinished_rows=0, unfinished_failed=0), wanted)
        self._metrics.update(snapshot, is_last=True)
        self._view.show(snapshot)

    def _look(self, live: Live, wanted: int) -> Snapshot:
        return self._progress.snapshot(self._counts(live), live, wanted)

    def _counts(self, live: Live) -> Counts:
        rows = self._tally.rows + live.unfinished_rows
        return Counts(
            rows=rows if self._total_rows is None else min(rows, self._total_rows),
            total_rows=self._total_rows,
            rows_failed=self._tally.num_failed + live.unfinished_failed,
            output_tokens=live.output_tokens,
            drafts_proposed=live.drafts_proposed,
            drafts_accepted=live.drafts_accepted,
            recomputed_rows=live.recomputed_rows,
            foldable=live.foldable,
            folded=live.folded,
        )
