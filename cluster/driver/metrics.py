"""The job's own figures as Ray metrics, beside those of its workers: what a dashboard shows first."""

from __future__ import annotations

import time

from ray.util.metrics import Gauge

from cluster.driver.progress import Snapshot

EVERY_S = 1.0
_GAUGES = {
    "rows": ("specfold_job_rows", "Rows that are there, failed ones and those of earlier sessions included."),
    "total_rows": ("specfold_job_total_rows", "Rows that there will be; 0 while that is not known."),
    "failed": ("specfold_job_failed_rows", "Rows that ended as error rows."),
    "tokens_per_s": ("specfold_job_tokens_per_second", "Output tokens per second over the last minute."),
    "run_tokens_per_s": ("specfold_job_run_tokens_per_second", "Output tokens per second since this session began."),
    "acceptance": ("specfold_job_acceptance", "Drafts accepted over drafts verified."),
    "fold_rate": ("specfold_job_fold_rate", "Share of what drafts could inherit that they did."),
    "eta_s": ("specfold_job_eta_seconds", "Seconds left at the speed of the last five minutes; -1 while unknown."),
    "workers_up": ("specfold_job_workers_up", "Workers whose engine is up."),
    "workers_wanted": ("specfold_job_workers_wanted", "Workers that the job would have now."),
}


class JobMetrics:
    """Gauges of one job; told of every snapshot, they are set about once a second."""

    def __init__(self, run: str) -> None:
        self._gauges = {name: Gauge(*text, tag_keys=("run",)) for name, text in _GAUGES.items()}
        for gauge in self._gauges.values():
            gauge.set_default_tags({"run": run})
        self._set = float("-inf")

    def update(self, snapshot: Snapshot, *, is_last: bool = False) -> None:
        now = time.monotonic()
        if now - self._set < EVERY_S and not is_last:
            return
        self._set = now
        counts = snapshot.counts
        values = {
            "rows": counts.rows,
            "total_rows": counts.total_rows or 0,
            "failed": counts.rows_failed,
            "tokens_per_s": snapshot.tokens_per_s,
            "run_tokens_per_s": snapshot.run_tokens_per_s,
            "acceptance": snapshot.acceptance or 0.0,
            "fold_rate": snapshot.fold_rate or 0.0,
            "eta_s": -1.0 if snapshot.eta_s is None else snapshot.eta_s,
            "workers_up": snapshot.workers_up,
            "workers_wanted": snapshot.workers_wanted,
        }
        for name, value in values.items():
            self._gauges[name].set(value)


def metric_names() -> list[str]:
    """Every metric of a job."""
    return [name for name, _ in _GAUGES.values()]
