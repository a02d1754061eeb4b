"""The audit of one part: some of its rows decoded again without speculation and compared. Knows nothing of Ray."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from cluster.errors import UserError
from cluster.input.rows import PreparedRow
from cluster.input.shards import RawShard
from cluster.messages import AuditRecord, Divergence, RowKey, ShardTask
from cluster.output.sink import PartError, read_record, read_rows
from cluster.output.storage import Store
from cluster.worker.openshard import OpenShard
from cluster.worker.requests import make_request
from specfold.config import DecodeConfig
from specfold.request import ERROR, Completion
from specfold.stats import DecodeStats


def reference(config: DecodeConfig) -> DecodeConfig:
    """The settings without speculation and folding: the same tokens are promised, by most modes."""
    if config.mode in ("ar", "linear_spec"):
        return replace(config, mode="ar", block_size=None)
    return config.plain()


class AuditWork:
    """``task.audit`` rows of a part, chosen by a fixed hash among those with an output; ``shard`` decodes them."""

    num_failed = 0

    def __init__(self, raw: RawShard, task: ShardTask, rows: list[PreparedRow], store: Store) -> None:
        self._raw, self._task = raw, task
        self._outputs = _outputs(store, raw.index)
        chosen = sorted(sorted(self._outputs, key=_hash)[: task.audit])
        requests = {key: make_request(key, rows[key.row_id - raw.first_row]) for key in chosen}
        self._results = {
            key: Completion(*key, [], "", ERROR, error=task.blamed[key][1], error_kind=task.blamed[key][0])
            for key in chosen
            if key in task.blamed
        }
        waiting = {key: request for key, request in requests.items() if key not in self._results}
        alone = deque(waiting.pop(key) for key in task.alone if key in waiting)
        self._chosen = chosen
        self.shard = OpenShard(raw.index, deque(waiting.values()), alone)

    def publish(self, store: Store, worker: str, started: float, spent: tuple[float, float]) -> tuple[AuditRecord, int]:
        """Compare the outputs; writes nothing. The time ``spent`` is no part of the run's."""
        results = self._results | self.shard.results
        found = [compare(key, self._outputs[key], results[key]) for key in self._chosen]
        sizes = [len(self._outputs[key]) for key in self._chosen]
        record = AuditRecord(
            index=self._raw.index,
            first_row=self._raw.first_row,
            input_rows=len(self._chosen),
            num_samples=1,
            input_digest=self._raw.digest,
            identity=self._task.identity,
            failed={},
            finished={},
            stats=DecodeStats(),
            worker=worker,
            started=started,
            ended=time.time(),
            audited=len(self._chosen),
            tokens=sum(sizes),
            agreeing=sum(size if d is None else d.position for size, d in zip(sizes, found, strict=True)),
            divergences=[divergence for divergence in found if divergence],
        )
        return record, 0


def compare(key: RowKey, run: Sequence[int], again: Completion) -> Divergence | None:
    """Where two outputs of a row first differ; None if nowhere. An output that ends early differs at its end."""
    if again.finish_reason == ERROR:
        return Divergence(*key, position=0, run=run[0] if run else None, audit=None, reason=again.error)
    other = again.token_ids
    at = next((i for i, (a, b) in enumerate(zip(run, other, strict=False)) if a != b), min(len(run), len(other)))
    if at == len(run) == len(other):
        return None
    return Divergence(*key, at, run[at] if at < len(run) else None, other[at] if at < len(other) else None)


def _outputs(store: Store, index: int) -> dict[RowKey, list[int]]:
    """Output tokens of a part's rows that have not failed."""
    try:
        table = read_rows(store, read_record(store, index))
    except (PartError, pa.ArrowInvalid, OSError) as error:
        raise UserError(f"the part of shard {index} cannot be read for the audit: {error}", 1) from None
    names = ("row_id", "sample_id", "finish_reason", "output_token_ids")
    columns = [table[name].to_pylist() for name in names]
    return {RowKey(row, sample): ids for row, sample, reason, ids in zip(*columns, strict=True) if reason != ERROR}


def _hash(key: RowKey) -> bytes:
    return hashlib.blake2b(b"%d %d" % key, digest_size=8, person=b"audit row").digest()
