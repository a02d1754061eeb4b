"""What driver and workers tell each other: a shard's task and its record, a worker's plan, state and failure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import NamedTuple

import orjson
import pyarrow as pa

from cluster.config import JobConfig
from cluster.models import ModelRef
from specfold.stats import DecodeStats


class RowKey(NamedTuple):
    """One row of the job: an input row and which of its samples."""

    row_id: int
    sample_id: int


@dataclass(frozen=True)
class WorkerPlan:
    """All a worker needs to know of the job. The same for every worker; pickled once."""

    config: JobConfig
    model: ModelRef
    carried: pa.Schema
    output: str
    engine_factory: str
    """``module:callable`` that makes the engine."""
    device: str
    token: str
    """Names this driver; the worker must find it in the output folder."""


@dataclass(frozen=True)
class ShardTask:
    """How to run one shard, beside its raw rows."""

    identity: str
    """Hash that goes into the part's footer."""
    keep: bool = False
    """Take the good rows from the part that is there; decode only those that may succeed now."""
    alone: tuple[RowKey, ...] = ()
    """Rows in flight when a process died: each decodes with nothing beside it, in this order, before all others."""
    blamed: dict[RowKey, tuple[str, str]] = field(default_factory=dict)
    """Rows that have killed two processes: their error kind and message."""
    audit: int = 0
    """Decode this many rows of the part that is there again without speculation, and compare; publish nothing."""


@dataclass(frozen=True)
class ShardRecord:
    """A part's footer: what was decoded from what, and the counters. Copied to ``stats/``; sums make the summary."""

    index: int
    first_row: int
    input_rows: int
    num_samples: int
    input_digest: str
    identity: str
    failed: dict[str, int]
    """Error rows by kind."""
    finished: dict[str, int]
    """Rows by finish reason."""
    stats: DecodeStats
    flags: dict[str, int] = field(default_factory=dict)
    """Rows by flag; a row may have several."""
    worker: str = ""
    started: float = 0.0
    """Seconds since the epoch; work on the shard ran from here to ``ended``."""
    ended: float = 0.0
    busy_s: float = 0.0
    """Seconds in which the worker had rows in its engine since its last part, or since its engine was up."""
    idle_s: float = 0.0
    """Likewise, in which it had none."""
    slowest: list[list[float]] = field(default_factory=list)
    """The slowest few rows, slowest first, as row id, sample id and seconds from admission to the last token."""
    lengths: dict[str, int] = field(default_factory=dict)
    """Rows with an output, by its tokens in bins of an eighth of an octave: the bin's smallest length names it."""
    flagged: dict[str, list[list[int]]] = field(default_factory=dict)
    """The first few rows of each flag, as row id and sample id."""
    quarantined: int = 0
    """Rows that stand in the part's other half, in ``quarantine/``; they count as rows of the part."""

    @property
    def rows(self) -> int:
        return self.input_rows * self.num_samples

    @property
    def num_failed(self) -> int:
        return sum(self.failed.values())

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    def to_json(self) -> bytes:
        return orjson.dumps(asdict(self))

    @classmethod
    def from_json(cls, data: bytes | str) -> ShardRecord:
        """Inverse of ``to_json``; ``ValueError`` if it is not a record. Unknown keys are ignored."""
        try:
            values = orjson.loads(data)
            known = {f.name for f in fields(cls)}
            values = {name: value for name, value in values.items() if name in known}
            return cls(**values | {"stats": DecodeStats.from_dict(values["stats"])})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a shard's record: {error}") from None


@dataclass(frozen=True)
class Divergence:
    """A row whose two outputs differ: the first position where they do, and the tokens there (None: it has ended)."""

    row_id: int
    sample_id: int
    position: int
    run: int | None
    audit: int | None
    reason: str | None = None
    """Why there is nothing to compare with: the row failed when it was decoded again."""


@dataclass(frozen=True)
class AuditRecord(ShardRecord):
    """What the audit of a part found. Its counters are of the audited rows and go into no total."""

    audited: int = 0
    """Rows decoded again."""
    tokens: int = 0
    """Their output tokens in the run."""
    agreeing: int = 0
    """Those of them before a row's first difference."""
    divergences: list[Divergence] = field(default_factory=list)


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker tells once its engine is up."""

    device_kind: str
    node: str
    """Name of the node, for people."""
    node_id: str
    """Ray's id of the node."""
    pid: int
    versions: dict[str, str | None]
    born: str | None = None
    """When the process started: with ``pid`` it names the process for good."""
    memory: str | None = None
    """How the engine divides the device's memory, in one line."""


COUNTED = (
    "rows_done", "rows_failed", "output_tokens", "forwards", "drafts_proposed", "drafts_accepted",
    "recomputed_rows", "foldable", "folded",
)  # fmt: skip
"""Fields of a worker's state that only grow, and that add up over workers."""


@dataclass(frozen=True)
class WorkerState:
    """A worker's live counters since its process started. ``pulse`` changes whenever decoding advances."""

    loading: bool = True
    open_shards: int = 0
    waiting_rows: int = 0
    active_rows: int = 0
    rows_done: int = 0
    rows_failed: int = 0
    output_tokens: int = 0
    forwards: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    recomputed_rows: int = 0
    """Positions whose QKV was computed, summed over layers and forwards."""
    foldable: int = 0
    """Projections and feed-forward outputs that drafts could have inherited; ``folded``: those that they did."""
    folded: int = 0
    busy_s: float = 0.0
    """Time with at least one row in the engine."""
    idle_s: float = 0.0
    """Time without, loading excluded."""
    pulse: int = 0
    batch_size: int = 0
    """Rows decoded together: fewer than asked for once memory has run out."""
    asked_batch_size: int = 0
    """Rows that were to be decoded together."""


@dataclass(frozen=True)
class Receipt:
    """A published part: counters only, never results."""

    record: ShardRecord
    state: WorkerState
    num_bytes: int = 0


@dataclass(frozen=True)
class Help:
    """How far a worker came with rows of another: those done, and those of them that failed."""

    rows: int
    failed: int
    failure: Failure | None = None
    """Why it cannot go on."""


@dataclass(frozen=True)
class Failure:
    """Why a worker cannot go on, in one sentence."""

    message: str
    fatal: bool = False
    """No other worker could either: the job ends with ``exit_code``."""
    exit_code: int = 1
    by_rows: bool = True
    """What it decoded may be the cause."""


@dataclass(frozen=True)
class Flight:
    """What a flight recorder says: the rows in the engine, and how many rows the process had finished."""

    rows: list[RowKey]
    finished: int
