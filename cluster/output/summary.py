"""Totals of a run, made of the parts' records: ``summary.json`` and ``shards.parquet``."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from cluster.messages import ShardRecord, WorkerState
from cluster.output.storage import Store
from specfold.request import ERROR
from specfold.stats import DecodeStats

SUMMARY, SHARDS = "summary.json", "shards.parquet"
MAX_SLOWEST, MAX_SLOWEST_ROWS = 50, 10
MAX_PLACES = 2
MAX_EXAMPLES = 10

_SHARD_SCHEMA = pa.schema(
    [
        ("shard", pa.int32()), ("first_row", pa.int64()), ("rows", pa.int64()), ("failed", pa.int64()),
        ("output_tokens", pa.int64()), ("tokens_per_second", pa.float64()), ("tokens_per_forward", pa.float64()),
        ("acceptance", pa.float64()), ("fold_rate", pa.float64()), ("time_fold_rate", pa.float64()),
        ("recomputed_rows_per_token", pa.float64()), ("worker", pa.string()), ("started", pa.timestamp("ms", "UTC")),
        ("seconds", pa.float64()), ("slowest_row", pa.int64()), ("slowest_row_seconds", pa.float64()),
    ]
)  # fmt: skip


class ShardLine(NamedTuple):
    """A line of ``shards.parquet``."""

    shard: int
    first_row: int
    rows: int
    failed: int
    output_tokens: int
    tokens_per_second: float | None
    tokens_per_forward: float | None
    acceptance: float | None
    fold_rate: float | None
    time_fold_rate: float | None
    recomputed_rows_per_token: float | None
    worker: str
    started: int
    """Milliseconds since the epoch."""
    seconds: float
    slowest_row: int
    slowest_row_seconds: float


class SlowRow(NamedTuple):
    """A row that took long, and the part it is in."""

    row_id: int
    sample_id: int
    seconds: float
    """From admission to the last token."""
    shard: int
    worker: str


class Parts(NamedTuple):
    """The finished shards at one moment."""

    lines: list[ShardLine]
    """A line each, in order."""
    failed_in: dict[str, list[int]]
    """A few shards with errors of each kind; ``flagged_in``: with rows of each flag."""
    flagged_in: dict[str, list[int]]


class Tally:
    """Sums over finished shards, of this session and of earlier ones. Holds one line per shard and no results."""

    def __init__(self) -> None:
        self.stats = DecodeStats()
        self.failed: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.lengths: Counter[str] = Counter()
        self._failed_in: dict[str, list[int]] = {}
        self._flagged_in: dict[str, list[int]] = {}
        self.flags: Counter[str] = Counter()
        self.flagged: dict[str, list[list[int]]] = {}
        """The first rows of each flag, as row id and sample id."""
        self.slowest_rows: list[SlowRow] = []
        """Slowest first, of all parts."""
        self.quarantined = 0
        self.rows = 0
        self.session_rows = 0
        self.session_tokens = 0
        self._workers: dict[str, _WorkerTotals] = {}
        self._present: set[str] = set()
        """Workers of this session."""
        self._lines: dict[int, ShardLine] = {}

    def add(self, record: ShardRecord, *, fresh: bool) -> None:
        """Count a part. ``fresh``: written in this session."""
        self.stats.add(record.stats)
        self.failed.update(record.failed)
        self.finished.update(record.finished)
        self.lengths.update(record.lengths)
        for where, names in ((self._failed_in, record.failed), (self._flagged_in, record.flags)):
            for name in names:
                if len(where.setdefault(name, [])) < MAX_PLACES:
                    where[name].append(record.index)
        self._add_flags(record)
        self.rows += record.rows
        self._lines[record.index] = _line(record)
        self._workers.setdefault(record.worker, _WorkerTotals()).add(record, fresh=fresh)
        self._add_slowest(record)
        if fresh:
            self.session_rows += record.rows
            self.session_tokens += record.stats.output_tokens
            self._present.add(record.worker)

    def _add_flags(self, record: ShardRecord) -> None:
        self.flags.update(record.flags)
        self.quarantined += record.quarantined
        for name, rows in record.flagged.items():
            self.flagged[name] = sorted([*self.flagged.get(name, ()), *rows])[:MAX_EXAMPLES]

    def _add_slowest(self, record: ShardRecord) -> None:
        for row, sample, seconds in record.slowest:
            place = SlowRow(int(row), int(sample), seconds, record.index, record.worker)
            self.slowest_rows.append(place)
        self.slowest_rows = sorted(self.slowest_rows, key=lambda row: (-row.seconds, row.row_id))[:MAX_SLOWEST_ROWS]

    def observe(self, worker: str, state: WorkerState) -> None:
        """Keep a worker's latest live counters."""
        self._workers.setdefault(worker, _WorkerTotals()).state = state
        self._present.add(worker)

    @property
    def num_failed(self) -> int:
        return sum(self.failed.values())

    def rows_by_shard(self) -> dict[int, int]:
        """Rows of every part, failed ones left out."""
        return {index: line[2] - line[3] for index, line in sorted(self._lines.items())}

    @property
    def num_shards(self) -> int:
        return len(self._lines)

    def has(self, index: int) -> bool:
        return index in self._lines

    def parts(self) -> Parts:
        """A copy, which stays as it is."""
        lines = [self._lines[index] for index in sorted(self._lines)]
        failed_in, flagged_in = (
            {name: list(indexes) for name, indexes in places.items()} for places in (self._failed_in, self._flagged_in)
        )
        return Parts(lines, failed_in, flagged_in)

    def to_dict(self, seconds: float) -> dict[str, Any]:
        """The counted part of ``summary.json``; ``seconds``: how long this session has run.

        The decode speed is that of all workers together while they have rows: no start, no idle time.
        """
        busy = sum(worker.state.busy_s for worker in self._workers.values())
        places = len({name.partition(".")[0] for name in self._present})
        stats = self.stats
        return {
            "rows": {
                "done": self.rows,
                "failed": self.num_failed,
                "failed_by_kind": dict(sorted(self.failed.items())),
                "by_finish_reason": {reason: self.finished[reason] for reason in ("stop", "length", ERROR)},
                "quarantined": self.quarantined,
            },
            "flags": dict(sorted(self.flags.items())),
            "flagged_rows": {
                name: [{"row_id": row, "sample_id": sample} for row, sample in rows]
                for name, rows in sorted(self.flagged.items())
            },
            "output_tokens": stats.output_tokens,
            "output_lengths": {length: self.lengths[length] for length in sorted(self.lengths, key=int)},
            "tokens_per_second": {
                "decode": _ratio(self.session_tokens * places, busy),
                "end_to_end": _ratio(self.session_tokens, seconds),
            },
            "session": {
                "rows": self.session_rows,
                "output_tokens": self.session_tokens,
                "seconds": round(seconds, 3),
                "workers": len(self._present),
            },
            "tokens_per_forward": _round(stats.tokens_per_forward),
            "drafts_proposed": stats.drafts_proposed,
            "drafts_accepted": stats.drafts_accepted,
            "acceptance_by_depth": [_round(share) for share in stats.acceptance_by_depth],
            "fold_rate": _round(stats.fold_rate),
            "fold_rate_by_layer": [_round(share) for share in stats.fold_rate_by_layer],
            "time_fold_rate": _round(stats.time_fold_rate),
            "recomputed_rows_per_token": _round(stats.recomputed_rows_per_token),
            "recomputed_rows_per_forward": {
                "qkv": [[round(rows, 3) for rows in layer] for layer in stats.recomputed_per_forward("qkv")],
                "ffn": [[round(rows, 3) for rows in layer] for layer in stats.recomputed_per_forward("ffn")],
            },
            "stats": stats.to_dict(),
            "workers": {name: worker.to_dict() for name, worker in sorted(self._workers.items())},
            "slowest_rows": [row._asdict() for row in self.slowest_rows],
            "slowest_shards": self._slowest(),
        }

    def shards_file(self) -> bytes:
        """``shards.parquet``: one row per shard, in order."""
        lines = self.parts().lines
        columns = list(zip(*lines, strict=True)) if lines else [()] * len(_SHARD_SCHEMA)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, _SHARD_SCHEMA, strict=True)]
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(arrays, schema=_SHARD_SCHEMA), sink, compression="zstd", write_page_checksum=True)
        return sink.getvalue().to_pybytes()

    def _slowest(self) -> list[dict[str, Any]]:
        lines = sorted(self._lines.values(), key=lambda line: -line.seconds)[:MAX_SLOWEST]
        return [line._asdict() for line in lines]


class _WorkerTotals:
    """Sums of a worker over all sessions: parts of earlier ones tell their times, the live counters those of this."""

    def __init__(self) -> None:
        self.state = WorkerState()
        self._stats = DecodeStats()
        self._shards = self._rows = self._failed = self._earlier_tokens = 0
        self._earlier_busy_s = self._earlier_idle_s = 0.0

    def add(self, record: ShardRecord, *, fresh: bool) -> None:
        self._stats.add(record.stats)
        self._shards += 1
        self._rows += record.rows
        self._failed += record.num_failed
        if not fresh and record.busy_s:
            self._earlier_tokens += record.stats.output_tokens
            self._earlier_busy_s += record.busy_s
            self._earlier_idle_s += record.idle_s

    def to_dict(self) -> dict[str, Any]:
        stats, state = self._stats, self.state
        busy = self._earlier_busy_s + state.busy_s
        return {
            "shards": self._shards,
            "rows": self._rows,
            "failed": self._failed,
            "output_tokens": stats.output_tokens,
            "tokens_per_second": _ratio(self._earlier_tokens + state.output_tokens, busy),
            "tokens_per_forward": _round(stats.tokens_per_forward),
            "acceptance_by_depth": [_round(share) for share in stats.acceptance_by_depth],
            "fold_rate": _round(stats.fold_rate),
            "time_fold_rate": _round(stats.time_fold_rate),
            "recomputed_rows_per_token": _round(stats.recomputed_rows_per_token),
            "busy_seconds": round(busy, 3),
            "idle_seconds": round(self._earlier_idle_s + state.idle_s, 3),
        }


def summary_json(values: dict[str, Any]) -> bytes:
    """The file's content."""
    return orjson.dumps(values, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def read_summary(store: Store) -> dict[str, Any]:
    """The last summary; empty if there is none that can be read."""
    try:
        values = orjson.loads(store.read(SUMMARY))
    except (FileNotFoundError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _line(record: ShardRecord) -> ShardLine:
    stats = record.stats
    slowest = record.slowest[0] if record.slowest else [-1, 0, 0.0]
    return ShardLine(
        record.index, record.first_row, record.rows, record.num_failed, stats.output_tokens,
        _ratio(stats.output_tokens, record.seconds), stats.tokens_per_forward,
        _ratio(stats.drafts_accepted, stats.drafts_proposed), stats.fold_rate, stats.time_fold_rate,
        stats.recomputed_rows_per_token, record.worker, int(record.started * 1000), round(record.seconds, 3),
        int(slowest[0]), slowest[2],
    )  # fmt: skip


def _ratio(a: float, b: float) -> float | None:
    return round(a / b, 4) if b else None


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
