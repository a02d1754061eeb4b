"""The audit at a job's end: which rows are decoded again step by step, and what came of it. Knows no Ray."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from cluster.config import JobConfig
from cluster.driver.feed import InputFeed
from cluster.driver.ledger import Ledger, Work
from cluster.errors import UserError
from cluster.input.shards import RawShard
from cluster.messages import AuditRecord, Divergence
from cluster.output.resume import Survey
from cluster.worker.auditwork import reference

MAX_DIVERGENCES = 20


class Audit:
    """Rows of a run chosen by a fixed hash, spread over its shards, and the sums of what their audit found.

    ``rows``: by shard, the rows of its part that have an output. The same run and number give the same rows.
    """

    def __init__(self, config: JobConfig, rows: dict[int, int]) -> None:
        self.mode = reference(config.decode).mode
        self.counts = spread(config.audit, rows)
        """Rows to audit in each chosen shard."""
        self.error: str | None = None
        """Why the audit came to no end, in one sentence."""
        self._asked, self._run_mode = config.audit, _way(config)
        self._rows = self._tokens = self._agreeing = self._num_divergences = 0
        self._divergences: list[Divergence] = []
        self._all_shards = set(rows)

    @property
    def wanted(self) -> int:
        return sum(self.counts.values())

    def run(self, shards: Iterator[RawShard], go_on: Callable[[Ledger], None], wake: Callable[[], None]) -> None:
        """Give the chosen ones of the run's ``shards`` to the workers; what ends the audit early is in ``error``."""
        survey = Survey(done=self._all_shards - self.counts.keys())
        feed = InputFeed(_until(shards, max(self.counts)), survey, wake)
        try:
            go_on(Ledger(AuditFeed(feed, self)))
        except UserError as error:
            self.error = str(error)
        finally:
            feed.close()

    def add(self, record: AuditRecord) -> None:
        self._rows += record.audited
        self._tokens += record.tokens
        self._agreeing += record.agreeing
        self._num_divergences += len(record.divergences)
        found = sorted([*self._divergences, *record.divergences], key=lambda d: (d.row_id, d.sample_id))
        self._divergences = found[:MAX_DIVERGENCES]

    def to_dict(self) -> dict[str, Any]:
        """The ``audit`` of ``summary.json``."""
        same = self._rows - self._num_divergences
        return {
            "asked": self._asked,
            "run_mode": self._run_mode,
            "audit_mode": self.mode,
            "rows": self._rows,
            "identical": same,
            "agreement": round(same / self._rows, 4) if self._rows else None,
            "tokens": self._tokens,
            "tokens_before_divergence": self._agreeing,
            "divergences": [asdict(d) for d in self._divergences],
            "error": self.error,
        }


def _way(config: JobConfig) -> str:
    """How the run decodes: its mode, and what a step takes over from the step before."""
    if config.use_block_cache:
        return f"{config.mode} with the sub-block cache"
    return f"{config.mode} with delta-time {config.delta_time:g}" if config.decode.time_delta >= 0 else config.mode


class AuditFeed:
    """The chosen shards as work for the ledger."""

    def __init__(self, feed: InputFeed, audit: Audit) -> None:
        self._feed, self._audit = feed, audit

    def take(self) -> Work | None:
        work = self._feed.take()
        if work is not None:
            work.audit = self._audit.counts[work.index]
        return work

    @property
    def exhausted(self) -> bool:
        return self._feed.exhausted


def _until(shards: Iterator[RawShard], last: int) -> Iterator[RawShard]:
    """The input is read no further than to the last shard that is audited."""
    for raw in shards:
        yield raw
        if raw.index >= last:
            return


def spread(count: int, rows: dict[int, int]) -> dict[int, int]:
    """How many rows of each shard make ``count`` of all: shards take turns in the order of a fixed hash."""
    left = min(count, sum(rows.values()))
    order = sorted((shard for shard, size in rows.items() if size), key=_hash)
    chosen: dict[int, int] = {}
    while left:
        for shard in order[:left]:
            chosen[shard] = chosen.get(shard, 0) + 1
        left -= min(left, len(order))
        order = [shard for shard in order if chosen.get(shard, 0) < rows[shard]]
    return chosen


def _hash(shard: int) -> bytes:
    return hashlib.blake2b(shard.to_bytes(8, "little"), digest_size=8, person=b"audit shard").digest()
