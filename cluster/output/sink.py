"""Output parts: their columns, their footer, and the two ways to make one. Knows nothing of Ray or of input formats."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cluster.messages import RowKey, ShardRecord
from cluster.output.storage import Store
from specfold.request import ERROR, Completion

DATA, STATS, QUARANTINE = "data", "stats", "quarantine"
MAX_FLAGGED, MAX_SLOWEST = 3, 10
_FOOTER = b"specfold.shard"
_IDS = pa.list_(pa.int32())

_FIRST = [pa.field("row_id", pa.int64(), nullable=False), pa.field("sample_id", pa.int32(), nullable=False)]
_LAST = [
    pa.field("output_text", pa.string(), nullable=False),
    pa.field("output_token_ids", _IDS, nullable=False),
    pa.field("finish_reason", pa.string(), nullable=False),
    pa.field("error", pa.string()),
    pa.field("error_kind", pa.string()),
    pa.field("flags", pa.list_(pa.string()), nullable=False),
    pa.field("num_prompt_tokens", pa.int32(), nullable=False),
    pa.field("num_output_tokens", pa.int32(), nullable=False),
    pa.field("num_forwards", pa.int32(), nullable=False),
    pa.field("drafts_proposed", pa.int32(), nullable=False),
    pa.field("drafts_accepted", pa.int32(), nullable=False),
    pa.field("accepted_by_depth", _IDS, nullable=False),
    pa.field("fold_rate", pa.float32()),
    pa.field("recomputed_rows", pa.int64(), nullable=False),
    pa.field("seconds", pa.float32(), nullable=False),
]


class PartError(ValueError):
    """A file in ``data/`` that is no whole part."""


class ForeignPartError(PartError):
    """A whole file in ``data/`` that this program did not write."""


class MisplacedPartError(PartError):
    """A whole part under the name of another one; ``identity`` is that of the run which made it."""

    def __init__(self, name: str, record: ShardRecord) -> None:
        super().__init__(f"{name} holds shard {record.index}.")
        self.identity = record.identity


def output_schema(carried: pa.Schema) -> pa.Schema:
    """Columns of every part, whatever its rows: the keys, the carried columns, what decoding found."""
    return pa.schema([*_FIRST, *carried, *_LAST])


def part_name(index: int) -> str:
    """Path of a part. ``train-`` and seven digits let ``datasets`` read the folder in order."""
    return f"{DATA}/train-{index:07d}.parquet"


def part_index(name: str) -> int | None:
    """Inverse of ``part_name`` for a bare file name; None for any other file."""
    stem = name.removeprefix("train-").removesuffix(".parquet")
    return int(stem) if name == f"train-{stem}.parquet" and len(stem) == 7 and stem.isdigit() else None


def quarantine_name(index: int) -> str:
    """Path of a part's quarantined rows. Nothing in it may look like the name of a split to ``datasets``."""
    return f"{QUARANTINE}/rows-{index:07d}.parquet"


def quarantine_index(name: str) -> int | None:
    """Inverse of ``quarantine_name`` for a bare file name; None for any other file."""
    return part_index(name.replace("rows-", "train-", 1)) if name.startswith("rows-") else None


def stats_name(index: int) -> str:
    return f"{STATS}/shard-{index:07d}.json"


def build_rows(
    keys: Sequence[RowKey],
    carried: pa.Table,
    prompt_lengths: Sequence[int],
    results: Sequence[Completion],
    flags: Sequence[Sequence[str]] | None = None,
) -> pa.Table:
    """Output rows of the given keys; ``carried`` holds one row per key. An error row has no output."""
    texts = ["" if c.finish_reason == ERROR else c.text for c in results]
    ids = [[] if c.finish_reason == ERROR else c.token_ids for c in results]
    stats = [c.stats for c in results]
    schema = output_schema(carried.schema)
    columns = [
        [k.row_id for k in keys],
        [k.sample_id for k in keys],
        *carried.columns,
        texts,
        _lists(ids),
        [c.finish_reason for c in results],
        [c.error for c in results],
        [c.error_kind for c in results],
        _lists(flags or [()] * len(keys), pa.string()),
        list(prompt_lengths),
        [len(row) for row in ids],
        [s.num_forwards for s in stats],
        [s.drafts_proposed for s in stats],
        [s.drafts_accepted for s in stats],
        _lists([s.accepted_by_depth for s in stats]),
        [s.fold_rate for s in stats],
        [s.recomputed_qkv_rows for s in stats],
        [s.seconds for s in stats],
    ]
    arrays = [pa.array(c, f.type) if isinstance(c, list) else c for c, f in zip(columns, schema, strict=True)]
    return pa.table(arrays, schema=schema)


def merge_rows(old: pa.Table, new: pa.Table, places: Sequence[int]) -> pa.Table:
    """``old`` with the rows at ``places`` replaced by those of ``new``, in their order."""
    order = list(range(old.num_rows))
    for i, place in enumerate(places):
        order[place] = old.num_rows + i
    return pa.concat_tables([old, new]).take(order)


def count_rows(table: pa.Table) -> dict[str, Any]:
    """The counts of a record that can be read off the rows: by error kind, finish reason and flag; the slowest rows."""
    return {
        "failed": _tally(table["error_kind"].drop_null()),
        "finished": _tally(table["finish_reason"]),
        "slowest": _slowest(table),
        "lengths": length_bins(
            table["num_output_tokens"].filter(pc.not_equal(table["finish_reason"], ERROR)).to_numpy()
        ),
        **_count_flags(table),
    }


def length_bins(lengths: np.ndarray) -> dict[str, int]:
    """Counts by length: every length below 16 by itself, above it eight bins an octave. Bins of many parts add up."""
    octave = np.maximum(np.floor(np.log2(np.maximum(lengths, 1))) - 3, 0).astype(np.int64)
    values, counts = np.unique(lengths >> octave << octave, return_counts=True)
    return {str(value): int(count) for value, count in zip(values, counts, strict=True)}


def encode_part(table: pa.Table, record: ShardRecord) -> bytes:
    """The part as a whole Parquet file in memory, its record in the footer.

    No dictionaries: nearly every value is a row's own, and zstd finds what repeats. Files were 2 to 46% smaller without
    them and written in 66 to 84% of the time.
    """
    sink = pa.BufferOutputStream()
    table = table.replace_schema_metadata({_FOOTER: record.to_json()})
    settings = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}
    with pq.ParquetWriter(sink, table.schema, **settings) as writer:
        if table.num_rows:  # ``datasets`` cannot read a row group without rows, which a part that lost all would have
            writer.write_table(table)
    return sink.getvalue().to_pybytes()


def publish(store: Store, table: pa.Table, record: ShardRecord, moved: Sequence[bool] | None = None) -> int:
    """Write the part, then the copy of its counters; returns the part's size in bytes.

    ``moved``: which rows go to ``quarantine/``; None without a quarantine. Both files carry the same record and the one
    in ``data/`` is written last: a pair whose records differ is torn.
    """
    size = 0
    if moved is not None:
        if record.quarantined:
            size = _write_part(store, quarantine_name(record.index), table.filter(pa.array(moved)), record)
            table = table.filter(pa.array([not is_moved for is_moved in moved]))
        else:
            store.delete(quarantine_name(record.index))  # what a writer of this part that was killed has left
    size += _write_part(store, part_name(record.index), table, record)
    store.write(stats_name(record.index), record.to_json(), durable=False)
    return size


def _write_part(store: Store, name: str, table: pa.Table, record: ShardRecord) -> int:
    data = encode_part(table, record)
    store.write(name, data)
    return len(data)


def read_record(store: Store, index: int, name: str = "") -> ShardRecord:
    """The record in the footer of a part, or of its file ``name``. ``PartError`` for a truncated or foreign file."""
    name = name or part_name(index)
    try:
        metadata = _read_footer(store, name)
    except (pa.ArrowInvalid, OSError, EOFError) as error:
        raise PartError(f"{name} is not a whole Parquet file: {error}") from None
    if _FOOTER not in metadata:
        raise ForeignPartError(f"{name} was not written by this program.")
    try:
        record = ShardRecord.from_json(metadata[_FOOTER])
    except ValueError as error:
        raise PartError(f"{name} has a damaged footer: {error}") from None
    if record.index != index:
        raise MisplacedPartError(name, record)
    return record


def _read_footer(store: Store, name: str) -> dict[bytes, bytes]:
    """What the file says of itself, of which only the end is read.

    Where that fails on an object store, the whole file tells whether it is broken or the way to it was.
    """
    try:
        with store.open(name) as file:
            return pq.read_metadata(file).metadata or {}
    except (pa.ArrowInvalid, OSError, EOFError):
        if store.is_local:
            raise
    return pq.read_metadata(pa.BufferReader(store.read(name))).metadata or {}


def require_pair(store: Store, record: ShardRecord, *, has_quarantine: bool) -> None:
    """``PartError`` unless a part's file in ``quarantine/`` is there just if it has one, and was written with it."""
    name = quarantine_name(record.index)
    if has_quarantine != bool(record.quarantined):
        raise PartError(f"{name} is {'missing' if record.quarantined else 'not of the part in data/'}.")
    if has_quarantine and read_record(store, record.index, name) != record:
        raise PartError(f"{name} was not written with the part in data/.")


def read_rows(store: Store, record: ShardRecord) -> pa.Table:
    """All rows of a part in their order, quarantined ones included, page checksums verified."""
    names = [part_name(record.index), *([quarantine_name(record.index)] if record.quarantined else [])]
    tables = [pq.read_table(pa.BufferReader(store.read(name)), page_checksum_verification=True) for name in names]
    if len(tables) == 1:
        return tables[0]
    return pa.concat_tables(tables).sort_by([("row_id", "ascending"), ("sample_id", "ascending")])


def _lists(rows: Sequence[Sequence[Any]], item: pa.DataType | None = None) -> pa.Array:
    """A list column from its flat values: several times faster than from nested Python lists."""
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row))
    values = pa.array(chain.from_iterable(rows), item or pa.int32(), size=offsets[-1])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


def _slowest(table: pa.Table) -> list[list[float]]:
    """As many rows as a page lists: so the slowest rows of all parts are among them."""
    decoded = table.filter(pc.not_equal(table["finish_reason"], ERROR)).select(["row_id", "sample_id", "seconds"])
    order = pc.select_k_unstable(decoded, MAX_SLOWEST, [("seconds", "descending"), ("row_id", "ascending")])
    return [[row["row_id"], row["sample_id"], round(row["seconds"], 3)] for row in decoded.take(order).to_pylist()]


def _count_flags(table: pa.Table) -> dict[str, Any]:
    """Rows by flag, and the first few rows of each."""
    if not pc.sum(pc.list_value_length(table["flags"])).as_py():
        return {}
    flags: dict[str, int] = {}
    flagged: dict[str, list[list[int]]] = {}
    columns = [table[name].to_pylist() for name in ("flags", "row_id", "sample_id")]
    for names, row, sample in zip(*columns, strict=True):
        for name in names:
            flags[name] = flags.get(name, 0) + 1
            if flags[name] <= MAX_FLAGGED:
                flagged.setdefault(name, []).append([row, sample])
    return {"flags": dict(sorted(flags.items())), "flagged": dict(sorted(flagged.items()))}


def _tally(column: pa.ChunkedArray) -> dict[str, int]:
    return {entry["values"]: entry["counts"] for entry in sorted(pc.value_counts(column).to_pylist(), key=str)}
