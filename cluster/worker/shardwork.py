"""One shard on a worker, from prepared rows to a published part. Knows nothing of Ray."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from itertools import zip_longest
from operator import attrgetter
from typing import Any

import pyarrow as pa

from cluster.input.rows import INPUT_ERROR_KINDS, PreparedRow
from cluster.input.shards import RawShard
from cluster.messages import RowKey, ShardRecord, ShardTask
from cluster.output.sink import PartError, build_rows, count_rows, merge_rows, publish, read_record, read_rows
from cluster.output.storage import Store
from cluster.worker.guards import QUARANTINED, Specials, flags_of
from cluster.worker.openshard import OpenShard
from cluster.worker.requests import make_request
from specfold.request import ERROR, Completion, Request
from specfold.stats import DecodeStats


class ShardWork:
    """The rows of a shard that are to be decoded now (``shard``), and what is needed to write the part afterwards.

    With ``task.keep`` these are the failed rows of the part that is there, except those whose input is at fault.
    """

    def __init__(
        self,
        raw: RawShard,
        task: ShardTask,
        rows: list[PreparedRow],
        carried: pa.Table,
        num_samples: int,
        store: Store,
        specials: Specials,
        *,
        quarantine: bool = False,
    ) -> None:
        self._raw, self._task, self._num_samples = raw, task, num_samples
        self._specials, self._quarantine = specials, quarantine
        self._old, self._old_stats = _read_old(store, raw.index) if task.keep else (None, DecodeStats())
        self._places = list(range(len(rows) * num_samples)) if self._old is None else _to_retry(self._old)
        """Positions in the part of the rows to be decoded now."""
        row_of = [place // num_samples for place in self._places]
        self._carried = carried.take(row_of)
        self._rows = [rows[i] for i in row_of]
        self._keys = [
            RowKey(row.row_id, place % num_samples) for row, place in zip(self._rows, self._places, strict=True)
        ]
        self._failed: dict[RowKey, Completion] = {}
        found = map(self._request, self._keys, self._rows)
        waiting = {key: request for key, request in zip(self._keys, found, strict=True) if request is not None}
        if task.keep:
            # Rows that are kept can show that the worker is sound; what comes of them goes nowhere.
            others = {key: rows[key.row_id - raw.first_row] for key in task.alone if key not in self._keys}
            waiting |= {key: make_request(key, row) for key, row in others.items() if row.error is None}
        alone = deque(waiting.pop(key) for key in task.alone if key in waiting)
        self.shard = OpenShard(raw.index, deque(waiting.values()), alone)

    @property
    def num_failed(self) -> int:
        """Rows that need no decoding because they have failed already."""
        return len(self._failed)

    def publish(self, store: Store, worker: str, started: float, spent: tuple[float, float]) -> tuple[ShardRecord, int]:
        """Write the part; returns its record and its size. Raises ``StorageError``.

        ``spent``: the worker's busy and idle seconds since its last part.
        """
        results = self._failed | self.shard.results
        decoded = [self.shard.results[key] for key in self._keys if key in self.shard.results]
        stats = sum_stats([c.stats for c in decoded if c.finish_reason != ERROR])
        stats.add(self._old_stats)
        lengths = [len(row.prompt_ids or ()) for row in self._rows]
        done = [results[key] for key in self._keys]
        flags = [flags_of(completion, self._specials) for completion in done]
        table = build_rows(self._keys, self._carried, lengths, done, flags)
        if self._old is not None:
            table = merge_rows(self._old, table, self._places)
        moved = [not QUARANTINED.isdisjoint(row) for row in table["flags"].to_pylist()] if self._quarantine else None
        record = ShardRecord(
            index=self._raw.index,
            first_row=self._raw.first_row,
            input_rows=self._raw.num_rows,
            num_samples=self._num_samples,
            input_digest=self._raw.digest,
            identity=self._task.identity,
            stats=stats,
            worker=worker,
            started=started,
            ended=time.time(),
            busy_s=round(spent[0], 3),
            idle_s=round(spent[1], 3),
            quarantined=sum(moved or ()),
            **count_rows(table),
        )
        return record, publish(store, table, record, moved)

    def _request(self, key: RowKey, row: PreparedRow) -> Request | None:
        """The row for the engine; None if it has failed already."""
        if row.error is not None:
            self._failed[key] = _error(key, row.error, row.error_kind)
        elif key in self._task.blamed:
            kind, message = self._task.blamed[key]
            self._failed[key] = _error(key, message, kind)
        else:
            return make_request(key, row)
        return None


def sum_stats(many: Sequence[DecodeStats]) -> DecodeStats:
    """The sum of many rows' counters, field by field: four times faster than adding row after row."""
    if not many:
        return DecodeStats()
    return DecodeStats(**{f.name: _sum([*map(attrgetter(f.name), many)]) for f in fields(DecodeStats)})


def _sum(values: list[Any]) -> Any:
    """Sum of numbers, or of nested lists element by element; a list that is too short counts as zeros."""
    if not isinstance(values[0], list):
        return sum(values)
    if not any(values):
        return []
    return [_sum([value for value in column if value is not None]) for column in zip_longest(*values)]


def _read_old(store: Store, index: int) -> tuple[pa.Table | None, DecodeStats]:
    """The part that is there. A damaged one is no reason to stop: all of its rows are decoded again."""
    try:
        record = read_record(store, index)
        return read_rows(store, record), record.stats
    except (pa.ArrowInvalid, PartError, OSError):
        return None, DecodeStats()


def _to_retry(part: pa.Table) -> list[int]:
    kinds = part["error_kind"].to_pylist()
    return [i for i, kind in enumerate(kinds) if kind is not None and kind not in INPUT_ERROR_KINDS]


def _error(key: RowKey, message: str, kind: str | None) -> Completion:
    return Completion(*key, token_ids=[], text="", finish_reason=ERROR, error=message, error_kind=kind)
