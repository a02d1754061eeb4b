"""The records of all parts in an output folder: what is true of a run, however it ended."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from cluster.messages import ShardRecord
from cluster.output.rundir import RunDir
from cluster.output.sink import PartError, read_record, require_pair

_READERS = 16


def read_footers(rundir: RunDir, *, pairs: bool = True) -> Iterator[tuple[int, ShardRecord | PartError]]:
    """Every part's index and record, or why it is no whole part; in order, read by several threads.

    ``pairs``: a part is not whole either if its file in ``quarantine/`` is missing or was not written with it.
    """
    quarantined = rundir.quarantined()

    def read(index: int) -> tuple[int, ShardRecord | PartError]:
        try:
            record = read_record(rundir.store, index)
            if pairs:
                require_pair(rundir.store, record, has_quarantine=index in quarantined)
            return index, record
        except PartError as error:
            return index, error

    with ThreadPoolExecutor(_READERS) as pool:
        yield from pool.map(read, rundir.parts())


def whole_records(rundir: RunDir, identity: str) -> Iterator[ShardRecord]:
    """The records of a run's whole parts."""
    for _, record in read_footers(rundir):
        if isinstance(record, ShardRecord) and record.identity == identity:
            yield record
