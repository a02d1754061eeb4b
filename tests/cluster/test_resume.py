"""What an earlier session's files are worth, and which sentence refuses them. No Ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

from cluster.errors import UserError
from cluster.input.shards import RawShard
from cluster.input.source import open_input
from cluster.messages import RowKey, ShardRecord
from cluster.models import resolve_model
from cluster.output.identity import resolve, run_identity
from cluster.output.resume import Survey, restore_stats, survey
from cluster.output.rundir import RunDir, RunFile, describe_run
from cluster.output.sink import build_rows, count_rows, part_name, publish
from cluster.output.storage import Store
from specfold import Completion, DecodeStats
from tests.cluster.jobs import JobFolder

CARRIED = pa.schema([pa.field("id", pa.string())])


@pytest.fixture
def rundir(folder: JobFolder) -> RunDir:
    return RunDir(Store(str(folder.output)))


def shards(folder: JobFolder, rows: int, first: int = 0) -> Iterator[RawShard]:
    lines = "\n".join(f'{{"prompt_token_ids": [{first + i}]}}' for i in range(rows))
    (folder.root / "in.jsonl").write_text(lines + "\n")
    return open_input(folder.config(str(folder.root / "in.jsonl"))).shards(4)


def write_part(rundir: RunDir, raw: RawShard, identity: str = "id", kind: str | None = None) -> None:
    keys = [RowKey(raw.first_row + i, 0) for i in range(raw.num_rows)]
    done = [Completion(*key, [], "", "stop") for key in keys]
    if kind:
        done[0] = Completion(*keys[0], [], "", "error", error="Bad.", error_kind=kind)
    table = build_rows(keys, pa.table([["x"] * len(keys)], schema=CARRIED), [1] * len(keys), done)
    record = ShardRecord(
        raw.index, raw.first_row, raw.num_rows, 1, raw.digest, identity, stats=DecodeStats(), **count_rows(table)
    )
    publish(rundir.store, table, record)


def look(rundir: RunDir, raws: Iterator[RawShard], retry_failed: bool = False, identity: str = "id") -> Survey:
    return survey(rundir, identity, raws, num_samples=1, retry_failed=retry_failed)


def test_parts_that_stand_are_kept_and_missing_ones_run(folder: JobFolder, rundir: RunDir) -> None:
    for raw in shards(folder, 14):
        if raw.index != 1:
            write_part(rundir, raw)
    found = look(rundir, shards(folder, 14))
    assert (found.done, found.retry, found.broken) == ({0, 2, 3}, {}, {})
    assert [found.needs(i) for i in range(5)] == [False, True, False, False, True]


def test_a_truncated_part_is_run_again(folder: JobFolder, rundir: RunDir) -> None:
    for raw in shards(folder, 8):
        write_part(rundir, raw)
    path = folder.parts[1]
    path.write_bytes(path.read_bytes()[:-9])
    found = look(rundir, shards(folder, 8))
    assert (found.done, list(found.broken)) == ({0}, [1])


def test_appended_rows_and_a_larger_limit_are_new_work(folder: JobFolder, rundir: RunDir) -> None:
    for raw in shards(folder, 6):
        write_part(rundir, raw)
    found = look(rundir, shards(folder, 11))
    assert found.done == {0}
    assert found.needs(1)
    assert found.needs(2)


def test_changed_input_is_refused_by_name(folder: JobFolder, rundir: RunDir) -> None:
    for raw in shards(folder, 8):
        write_part(rundir, raw)
    with pytest.raises(UserError, match=r"train-0000000\.parquet was made from other input rows \(0 to 3 have changed"):
        look(rundir, shards(folder, 8, first=1))


def test_a_shorter_input_is_refused_by_name(folder: JobFolder, rundir: RunDir) -> None:
    for raw in shards(folder, 12):
        write_part(rundir, raw)
    with pytest.raises(UserError, match=r"train-0000002\.parquet holds rows that the input no longer has"):
        look(rundir, shards(folder, 8))
    with pytest.raises(UserError, match=r"train-0000001\.parquet was made from other input rows"):
        look(rundir, shards(folder, 6))


def test_a_part_of_another_run_is_refused_by_name(folder: JobFolder, rundir: RunDir) -> None:
    for raw in shards(folder, 8):
        write_part(rundir, raw, identity="id" if raw.index == 0 else "other")
    with pytest.raises(UserError, match=r"train-0000001\.parquet was written by another run"):
        look(rundir, shards(folder, 8))


def test_a_part_of_another_run_is_refused_under_any_name(folder: JobFolder, rundir: RunDir) -> None:
    [first, _] = shards(folder, 8)
    write_part(rundir, first, identity="other")
    moved = folder.parts[0].rename(folder.output / part_name(1))
    before = moved.read_bytes()
    with pytest.raises(UserError, match=r"train-0000001\.parquet was written by another run"):
        look(rundir, shards(folder, 8))
    assert moved.read_bytes() == before


def test_a_copy_of_a_part_is_run_again_where_it_can_be_and_refused_where_not(folder: JobFolder, rundir: RunDir) -> None:
    for raw in shards(folder, 8):
        write_part(rundir, raw)
    (folder.output / part_name(1)).write_bytes(folder.parts[0].read_bytes())
    found = look(rundir, shards(folder, 8))
    assert (found.done, list(found.broken)) == ({0}, [1])
    (folder.output / part_name(2)).write_bytes(folder.parts[0].read_bytes())
    with pytest.raises(UserError, match=r"train-0000002\.parquet is no part of this run.*\(.*holds shard 0\)"):
        look(rundir, shards(folder, 8))


def test_a_cut_file_beyond_the_input_is_refused_by_name(folder: JobFolder, rundir: RunDir) -> None:
    for raw in shards(folder, 8):
        write_part(rundir, raw)
    (folder.output / part_name(9)).write_bytes(folder.parts[0].read_bytes()[:-9])
    with pytest.raises(UserError, match=r"train-0000009\.parquet is no part of this run.*not a whole Parquet file"):
        look(rundir, shards(folder, 8))


def test_a_foreign_parquet_file_is_refused_and_not_overwritten(folder: JobFolder, rundir: RunDir) -> None:
    import pyarrow.parquet as pq

    (folder.output / "data").mkdir(parents=True)
    pq.write_table(pa.table({"a": [1]}), folder.output / part_name(0))
    with pytest.raises(UserError, match=r"train-0000000\.parquet was not written by this program"):
        look(rundir, shards(folder, 8))


def test_only_failures_that_may_pass_are_tried_again(folder: JobFolder, rundir: RunDir) -> None:
    for raw, kind in zip(shards(folder, 16), [None, "too_long", "worker_died", "nan_logits"], strict=True):
        write_part(rundir, raw, kind=kind)
    assert look(rundir, shards(folder, 16)).done == {0, 1, 2, 3}
    found = look(rundir, shards(folder, 16), retry_failed=True)
    assert (found.done, set(found.retry)) == ({0, 1}, {2, 3})


def test_missing_copies_of_the_counters_are_made_again(folder: JobFolder, rundir: RunDir) -> None:
    for raw in shards(folder, 8):
        write_part(rundir, raw)
    copy = folder.output / "stats" / "shard-0000001.json"
    before = copy.read_bytes()
    copy.unlink()
    restore_stats(rundir.store, look(rundir, shards(folder, 8)).records.values())
    assert copy.read_bytes() == before


def run_file(folder: JobFolder, **settings: Any) -> RunFile:
    config = resolve(folder.config("in.jsonl", **settings), "cpu", 8)
    model = resolve_model(config.model)
    identity = run_identity(config, model)
    return describe_run(config, identity, CARRIED, ["in.jsonl"], model).with_identity("device", "chip A")


def test_a_run_is_read_back_as_it_was_created(folder: JobFolder, rundir: RunDir) -> None:
    assert rundir.read() is None
    made = run_file(folder)
    rundir.create(made)
    assert rundir.read() == made
    with pytest.raises(UserError, match="has just become the output of another run"):
        rundir.create(made)


@pytest.mark.parametrize(
    ("settings", "difference"),
    [
        ({"delta": 0.2}, "delta: 0.1 in the run, 0.2 now"),
        ({"num_samples": 3, "seed": 5}, "num_samples: 1 in the run, 3 now; seed: 0 in the run, 5 now"),
        ({"stop": ("END",)}, 'stop: [] in the run, ["END"] now'),
        ({"batch_size": 4}, None),
        ({"workers": 7, "limit": 3, "max_failed": 1.0, "stall_timeout": 1.0}, None),
    ],
)
def test_a_difference_is_named_key_by_key(
    folder: JobFolder, rundir: RunDir, settings: dict[str, Any], difference: str | None
) -> None:
    now = dict(run_file(folder, **settings).identity)
    del now["device"]  # before a worker is up
    if difference is None:
        rundir.require_same(run_file(folder), now)
    else:
        with pytest.raises(UserError) as caught:
            rundir.require_same(run_file(folder), now)
        assert difference in str(caught.value)
        assert caught.value.exit_code == 2


def test_the_batch_size_counts_unless_deterministic(folder: JobFolder, rundir: RunDir) -> None:
    loose = run_file(folder, deterministic=False)
    assert orjson.loads(loose.to_json())["note"].startswith("Not deterministic: tokens may depend")
    with pytest.raises(UserError, match="batch_size: 8 in the run, 4 now"):
        rundir.require_same(loose, run_file(folder, deterministic=False, batch_size=4).identity)


def test_the_model_counts_by_content(folder: JobFolder, rundir: RunDir) -> None:
    before = run_file(folder)
    config = folder.model / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 8', '"hidden_size": 16'))
    with pytest.raises(UserError, match=r"model: sha256:[0-9a-f]+ in the run, sha256:[0-9a-f]+ now"):
        rundir.require_same(before, run_file(folder).identity)


@pytest.mark.parametrize("name", ["notes.txt", "data/train-0000000.parquet", "run.json"])
def test_a_folder_of_something_else_is_refused(folder: JobFolder, rundir: RunDir, name: str) -> None:
    rundir.store.write(name, b'{"kind": "shopping list"}')
    with pytest.raises(UserError, match=r"is not empty and not the output of a run|was not written by this program"):
        rundir.read()


def test_erasing_a_run_leaves_other_files_alone(folder: JobFolder, rundir: RunDir) -> None:
    rundir.create(run_file(folder))
    for raw in shards(folder, 8):
        write_part(rundir, raw)
    for name in ("summary.json", "data/mine.txt", "letter.txt", "data/.train-0000001.parquet.1.tmp"):
        rundir.store.write(name, b"x")
    rundir.erase()
    left = sorted(str(p.relative_to(folder.output)) for p in folder.output.rglob("*") if p.is_file())
    assert left == ["data/mine.txt", "letter.txt"]


def test_secrets_in_urls_do_not_reach_the_run_file(folder: JobFolder) -> None:
    made = run_file(folder)
    config = folder.config("https://user:hunter2@host/in.jsonl?sig=hunter2")
    text = dataclasses.replace(made, config=config.to_dict()).to_json()
    assert b"hunter2" not in text


def test_a_run_of_a_newer_format_is_refused(folder: JobFolder, rundir: RunDir, tmp_path: Path) -> None:
    values = orjson.loads(run_file(folder).to_json()) | {"format": 99}
    rundir.store.write("run.json", orjson.dumps(values))
    with pytest.raises(UserError, match="written by a newer version"):
        rundir.read()
