"""Live counters as Ray metrics, so that they reach Ray's dashboard and Prometheus."""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

from cluster.messages import WorkerState

_COUNTERS = {
    "rows_done": ("specfold_rows", "Rows finished, failed ones included."),
    "rows_failed": ("specfold_failed_rows", "Rows that ended as error rows."),
    "output_tokens": ("specfold_output_tokens", "Committed output tokens."),
    "forwards": ("specfold_forwards", "Forwards of finished rows, prefill excluded."),
    "drafts_proposed": ("specfold_drafts_proposed", "Drafts verified."),
    "drafts_accepted": ("specfold_drafts_accepted", "Drafts accepted."),
    "recomputed_rows": ("specfold_recomputed_rows", "Positions whose QKV was computed, over layers and forwards."),
    "foldable": ("specfold_foldable", "Projections and feed-forward outputs that drafts could have inherited."),
    "folded": ("specfold_folded", "Projections and feed-forward outputs that drafts have inherited."),
    "busy_s": ("specfold_busy_seconds", "Time with at least one row in the engine."),
    "idle_s": ("specfold_idle_seconds", "Time without, loading excluded."),
}
_GAUGES = {
    "active_rows": ("specfold_active_rows", "Rows in the engine now."),
    "waiting_rows": ("specfold_waiting_rows", "Rows on the worker that wait for the engine."),
    "batch_size": (
        "specfold_batch_size",
        "Rows decoded together at most: fewer than asked for once memory has run out.",
    ),
}


class WorkerMetrics:
    """One worker's metrics; ``update`` is called about once a second, never per row."""

    def __init__(self, worker: str, run: str) -> None:
        tags = {"worker": worker, "run": run}
        keys = tuple(tags)
        self._counters = {name: Counter(*text, tag_keys=keys) for name, text in _COUNTERS.items()}
        self._gauges = {name: Gauge(*text, tag_keys=keys) for name, text in _GAUGES.items()}
        for metric in (*self._counters.values(), *self._gauges.values()):
            metric.set_default_tags(tags)
        self._last = WorkerState()

    def update(self, state: WorkerState) -> None:
        for name, counter in self._counters.items():
            grown = getattr(state, name) - getattr(self._last, name)
            if grown > 0:
                counter.inc(grown)
        for name, gauge in self._gauges.items():
            gauge.set(getattr(state, name))
        self._last = state


def metric_names() -> list[str]:
    """Every metric of a worker."""
    return [name for name, _ in (*_COUNTERS.values(), *_GAUGES.values())]
