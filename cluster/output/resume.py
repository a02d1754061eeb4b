"""What an earlier session left: which parts stand, which must be run again, and which forbid going on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from cluster.errors import UserError
from cluster.input.rows import INPUT_ERROR_KINDS
from cluster.input.shards import RawShard
from cluster.messages import ShardRecord
from cluster.output.footers import read_footers
from cluster.output.rundir import RunDir
from cluster.output.sink import STATS, ForeignPartError, MisplacedPartError, PartError, part_name, stats_name
from cluster.output.storage import Store


@dataclass
class Survey:
    """The state of a run's parts."""

    done: set[int] = field(default_factory=set)
    """Parts that stand."""
    retry: dict[int, ShardRecord] = field(default_factory=dict)
    """Whole parts with rows that may succeed if decoded again."""
    broken: dict[int, str] = field(default_factory=dict)
    """Files that are no whole part, and why; run again."""
    records: dict[int, ShardRecord] = field(default_factory=dict)
    """Records of ``done`` until they are counted."""

    def needs(self, index: int) -> bool:
        return index not in self.done


def survey(
    rundir: RunDir, identity: str, shards: Iterable[RawShard], *, num_samples: int, retry_failed: bool
) -> Survey:
    """Hold every part against the input and the run's identity; ``shards`` is read as far as there are parts.

    ``UserError`` names a part of another identity, one whose input has changed, and a file beyond the input.
    """
    result = Survey()
    found = _read_records(rundir, result, identity)
    beyond = set(result.broken)
    for raw in _until(shards, max([*found, *beyond], default=-1)):
        beyond.discard(raw.index)
        if raw.index not in found:
            continue
        record = found.pop(raw.index)
        if not _stands(rundir, record, raw, num_samples):
            continue
        if retry_failed and any(kind not in INPUT_ERROR_KINDS for kind in record.failed):
            result.retry[raw.index] = record
        else:
            result.done.add(raw.index)
            result.records[raw.index] = record
    if found:
        raise UserError(
            f"{rundir.store.path(part_name(min(found)))} holds rows that the input no longer has (a smaller --limit "
            "or a shorter file); give the former input, choose another --output, or --overwrite to start anew."
        )
    if beyond:
        # No shard would ever replace it, and whoever reads the folder would read it with the others.
        first = min(beyond)
        raise UserError(
            f"{rundir.store.path(part_name(first))} is no part of this run, whose input has no such shard "
            f"({result.broken[first].removesuffix('.')}); take it out of the folder, or --overwrite to start anew."
        )
    return result


def restore_stats(store: Store, records: Iterable[ShardRecord]) -> None:
    """Write the missing copies in ``stats/`` anew."""
    present = set(store.names(STATS))
    for record in records:
        name = stats_name(record.index)
        if name.rpartition("/")[2] not in present:
            store.write(name, record.to_json(), durable=False)


def _read_records(rundir: RunDir, result: Survey, identity: str) -> dict[int, ShardRecord]:
    """Footers of all whole parts; the others go to ``result.broken``. ``UserError`` for what no resume may replace."""
    found: dict[int, ShardRecord] = {}
    for index, record in read_footers(rundir):
        if isinstance(record, ShardRecord | MisplacedPartError) and record.identity != identity:
            raise UserError(
                f"{rundir.store.path(part_name(index))} was written by another run; "
                "choose another --output, or --overwrite to start anew."
            )
        if isinstance(record, ForeignPartError):
            raise UserError(f"{rundir.store.url} cannot be used: {record}")
        if isinstance(record, PartError):
            result.broken[index] = str(record)
        else:
            found[index] = record
    return found


def _until(shards: Iterable[RawShard], last: int) -> Iterator[RawShard]:
    if last < 0:
        return
    for raw in shards:
        yield raw
        if raw.index >= last:
            return


def _stands(rundir: RunDir, record: ShardRecord, raw: RawShard, num_samples: int) -> bool:
    """Whether a part's rows are those of the shard; False if they are only its beginning."""
    if record.num_samples != num_samples or record.first_row != raw.first_row:
        raise UserError(f"{rundir.store.path(part_name(raw.index))} was cut differently from the input's shards.")
    if record.input_rows == raw.num_rows and record.input_digest == raw.digest:
        return True
    if record.input_rows < raw.num_rows and record.input_digest == raw.head_digest(record.input_rows):
        return False
    raise UserError(
        f"{rundir.store.path(part_name(raw.index))} was made from other input rows "
        f"({raw.first_row} to {raw.first_row + record.input_rows - 1} have changed); "
        "give the former input, choose another --output, or --overwrite to start anew."
    )
