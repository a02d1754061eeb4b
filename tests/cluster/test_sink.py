"""Parts: their columns, their footers, and what a damaged or foreign one is called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.input.schema import OUTPUT_COLUMNS
from cluster.messages import RowKey, ShardRecord
from cluster.output.sink import (
    ForeignPartError,
    PartError,
    build_rows,
    count_rows,
    encode_part,
    merge_rows,
    output_schema,
    part_index,
    part_name,
    publish,
    read_record,
    read_rows,
)
from cluster.output.storage import Store
from cluster.worker.shardwork import sum_stats
from specfold import Completion, DecodeStats

CARRIED = pa.schema([pa.field("id", pa.string()), pa.field("n", pa.int64())])


def completion(row: int, kind: str | None = None) -> Completion:
    stats = DecodeStats(
        output_tokens=3, denoise_forwards=2, commit_forwards=1, drafts_proposed=4, drafts_accepted=1,
        proposed_by_depth=[4], accepted_by_depth=[1], recomputed_qkv_rows=10, draft_rows=[10], folded_qkv=[[5]],
        folded_ffn=[[4]], seconds=row / 2,
    )  # fmt: skip
    if kind:
        return Completion(row, 0, [9], "dropped", "error", error="Bad.", error_kind=kind)
    return Completion(row, 0, [1, 2, 3], f"text {row}", "stop", stats=stats)


def rows(completions: list[Completion]) -> pa.Table:
    count = len(completions)
    carried = pa.table([["x"] * count, [None] * count], schema=CARRIED)
    return build_rows([RowKey(c.row_id, 0) for c in completions], carried, [7] * count, completions)


def record(table: pa.Table, index: int = 0) -> ShardRecord:
    return ShardRecord(index, 0, table.num_rows, 1, "digest", "identity", stats=DecodeStats(), **count_rows(table))


def test_the_columns_are_those_of_the_contract() -> None:
    schema = output_schema(CARRIED)
    assert [name for name in schema.names if name not in CARRIED.names] == list(OUTPUT_COLUMNS)
    expected = {
        "row_id": pa.int64(), "sample_id": pa.int32(), "output_text": pa.string(),
        "output_token_ids": pa.list_(pa.int32()), "finish_reason": pa.string(), "error": pa.string(),
        "error_kind": pa.string(), "flags": pa.list_(pa.string()), "num_prompt_tokens": pa.int32(),
        "num_output_tokens": pa.int32(), "num_forwards": pa.int32(), "drafts_proposed": pa.int32(),
        "drafts_accepted": pa.int32(), "accepted_by_depth": pa.list_(pa.int32()), "fold_rate": pa.float32(),
        "recomputed_rows": pa.int64(), "seconds": pa.float32(),
    }  # fmt: skip
    assert {name: schema.field(name).type for name in expected} == expected


def test_an_error_row_has_no_output() -> None:
    good, bad = rows([completion(0), completion(1, "nan_logits")]).to_pylist()
    assert (good["output_text"], good["output_token_ids"], good["num_forwards"]) == ("text 0", [1, 2, 3], 3)
    assert good["fold_rate"] == pytest.approx(0.45)
    assert (bad["output_text"], bad["output_token_ids"], bad["num_output_tokens"]) == ("", [], 0)
    assert (bad["error"], bad["error_kind"], bad["fold_rate"], bad["flags"]) == ("Bad.", "nan_logits", None, [])


def test_a_part_is_read_back_with_its_record(tmp_path: Path) -> None:
    store, table = Store(str(tmp_path)), rows([completion(i, "too_long" if i == 1 else None) for i in range(5)])
    publish(store, table, record(table, 12))
    assert read_record(store, 12) == record(table, 12)
    assert read_rows(store, record(table, 12)).replace_schema_metadata(None).equals(table)
    assert (tmp_path / "stats" / "shard-0000012.json").read_bytes() == record(table, 12).to_json()
    found = read_record(store, 12)
    assert (found.failed, found.finished) == ({"too_long": 1}, {"error": 1, "stop": 4})
    assert found.slowest[0] == [4, 0, 2.0]


def test_pages_carry_checksums(tmp_path: Path) -> None:
    store, table = Store(str(tmp_path)), rows([completion(i) for i in range(50)])
    data = bytearray(encode_part(table, record(table)))
    texts = pq.read_metadata(pa.BufferReader(bytes(data))).row_group(0).column(4)
    assert texts.path_in_schema == "output_text"
    data[(texts.dictionary_page_offset or texts.data_page_offset) + texts.total_compressed_size - 1] ^= 0xFF
    store.write(part_name(0), bytes(data))
    with pytest.raises(OSError, match="could not verify page integrity, CRC"):
        read_rows(store, record(table))


@pytest.mark.parametrize("keep", [0, 3, 100, -4])
def test_a_truncated_part_is_told(tmp_path: Path, keep: int) -> None:
    store, table = Store(str(tmp_path)), rows([completion(0)])
    store.write(part_name(3), encode_part(table, record(table, 3))[:keep])
    with pytest.raises(PartError, match=r"train-0000003\.parquet is not a whole Parquet file"):
        read_record(store, 3)


def test_foreign_and_misplaced_parts_are_told(tmp_path: Path) -> None:
    store, table = Store(str(tmp_path)), rows([completion(0)])
    pq.write_table(table, tmp_path / "x.parquet")
    store.write(part_name(0), (tmp_path / "x.parquet").read_bytes())
    with pytest.raises(ForeignPartError, match="was not written by this program"):
        read_record(store, 0)
    store.write(part_name(0), encode_part(table, record(table, 5)))
    with pytest.raises(PartError, match="holds shard 5"):
        read_record(store, 0)


def test_a_record_survives_unknown_counters() -> None:
    made = replace(record(rows([completion(0)])), stats=DecodeStats(output_tokens=3, folded_qkv=[[1, 2]]))
    text = made.to_json().replace(b'"output_tokens"', b'"of_the_future":1,"output_tokens"')
    assert ShardRecord.from_json(text.replace(b'"worker"', b'"new":2,"worker"')) == made
    with pytest.raises(ValueError, match="not a shard's record"):
        ShardRecord.from_json(b"{}")


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_replaced_rows_keep_their_places(replaced: list[bool]) -> None:
    old = rows([completion(i, "engine_error" if again else None) for i, again in enumerate(replaced)])
    places = [i for i, again in enumerate(replaced) if again]
    merged = merge_rows(old, rows([completion(i) for i in places]), places)
    assert merged.equals(rows([completion(i) for i in range(len(replaced))]))


@given(st.integers(0, 9_999_999))
def test_part_names_sort_by_index(index: int) -> None:
    name = part_name(index).rpartition("/")[2]
    assert part_index(name) == index
    assert part_name(index) <= part_name(9_999_999)
    assert part_index("." + name) is None
    assert part_index(name + ".tmp") is None


COUNTS = st.lists(st.integers(0, 100), max_size=3)
STATS = st.builds(
    DecodeStats, output_tokens=st.integers(0, 99), seconds=st.integers(0, 9), accepted_by_depth=COUNTS,
    run_lengths=COUNTS, folded_qkv=st.lists(COUNTS, max_size=3),
)  # fmt: skip


@given(st.lists(STATS, max_size=6))
def test_the_quick_sum_of_counters_is_their_sum(many: list[DecodeStats]) -> None:
    total = DecodeStats()
    for stats in many:
        total.add(stats)
    assert sum_stats(many) == total
