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
}


class WorkerMetrics:
    """One worker's metrics; ``update`` is called about once a second, never per row."""

    def __init__(self, worker: str, run: str) -> None:
        tags = {"worker": worker, "run": run}
        keys = tuple(tags)
        self._counters = {name: Counter(*text, tag_keys=keys) for name, text in _COUNTERS.items()}
        self._acceptance = Gauge("specfold_acceptance", "Drafts accepted over drafts verified.", tag_keys=keys)
        self._active = Gauge("specfold_active_rows", "Rows in the engine now.", tag_keys=keys)
        self._waiting = Gauge("specfold_waiting_rows", "Rows on the worker that wait for the engine.", tag_keys=keys)
        for metric in (*self._counters.values(), self._acceptance, self._active, self._waiting):
            metric.set_default_tags(tags)
        self._last = WorkerState()

    def update(self, state: WorkerState) -> None:
        for name, counter in self._counters.items():
            grown = getattr(state, name) - getattr(self._last, name)
            if grown > 0:
                counter.inc(grown)
        self._acceptance.set(state.drafts_accepted / max(state.drafts_proposed, 1))
        self._active.set(state.active_rows)
        self._waiting.set(state.waiting_rows)
        self._last = state
