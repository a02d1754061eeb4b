"""Flagged rows in the output folder: counted, named, moved aside, and present all the same."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest

from cluster.errors import UserError
from cluster.input.source import open_input
from cluster.output.resume import Survey, survey
from cluster.output.rundir import RunDir
from cluster.output.sink import part_name, quarantine_index, quarantine_name
from cluster.output.storage import Store
from tests.cluster.fake_engine import BLANK, FLOOD, LOOP, NAN, UNFAITHFUL, UNMASKED
from tests.cluster.jobs import JobFolder, keys
from tests.cluster.test_worker import run_all, with_worker

FAULTS: dict[int, int | str] = {
    1: LOOP,
    2: BLANK,
    5: NAN,
    9: FLOOD,
    11: UNMASKED,
    14: LOOP,
    **dict.fromkeys(range(16, 24), BLANK),
}
MOVED = [1, 2, 9, 11, 14, *range(16, 24)]


def quarantined(folder: JobFolder) -> list[Path]:
    return sorted((folder.output / "quarantine").glob("*"))


def look(folder: JobFolder, prompts: str) -> Survey:
    shards = open_input(folder.config(prompts)).shards(8)
    return survey(RunDir(Store(str(folder.output))), "id", shards, num_samples=1, retry_failed=False)


def test_a_job_with_degenerate_outputs(local_ray: str, folder: JobFolder, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = folder.write_prompts(40, FAULTS | {33: UNFAITHFUL})
    assert folder.run(prompts, shard_rows=8, quarantine=True, audit=100) == 0

    # Every row once: what is not in data/ is in quarantine/.
    aside = [row for path in quarantined(folder) for row in pq.read_table(path).to_pylist()]
    assert [row["row_id"] for row in aside] == MOVED
    assert keys(folder.rows()) == [(row, 0) for row in range(40) if row not in MOVED]
    assert {row["row_id"]: row["flags"] for row in aside}[9] == ["special_flood"]
    summary = folder.summary()
    assert (summary["rows"]["done"], summary["rows"]["failed"], summary["rows"]["quarantined"]) == (40, 1, 13)
    assert summary["flags"] == {"empty": 9, "mask_left": 1, "repetition": 2, "special_flood": 1}
    assert summary["flagged_rows"]["repetition"] == [{"row_id": 1, "sample_id": 0}, {"row_id": 14, "sample_id": 0}]
    stats = json.loads((folder.output / "stats" / "shard-0000000.json").read_text())
    assert stats["flags"] == {"empty": 1, "repetition": 1}

    # The audit took every row with an output; one differs, where the fake engine was told to.
    audit = summary["audit"]
    assert (audit["rows"], audit["identical"], audit["audit_mode"], audit["error"]) == (39, 38, "vanilla", None)
    token = folder.rows().to_pylist()[-7]["output_token_ids"][2]
    assert audit["divergences"] == [
        {"row_id": 33, "sample_id": 0, "position": 2, "run": token, "audit": token - 1, "reason": None}
    ]
    assert sum(worker["rows"] for worker in summary["workers"].values()) == 40
    shown = capsys.readouterr().out
    assert "9 empty, 1 mask_left, 2 repetition" in shown
    assert "13 rows in" in shown
    assert "Audit: 38 of 39 rows decoded with --mode vanilla are identical" in shown
    assert "the first is in row 33 (sample 0) at token 2." in shown

    loaded = datasets.load_dataset(str(folder.output), cache_dir=str(folder.root / "cache"))
    assert list(loaded) == ["train"]
    assert loaded["train"]["row_id"][:] == [row for row in range(40) if row not in MOVED]

    # A second command finds nothing to do but the audit, and another choice is refused.
    before = {path: path.stat().st_mtime_ns for path in [*folder.parts, *quarantined(folder)]}
    assert folder.run(prompts, shard_rows=8, quarantine=True, audit=3) == 0
    assert {path: path.stat().st_mtime_ns for path in [*folder.parts, *quarantined(folder)]} == before
    assert folder.summary()["audit"]["rows"] == 3
    with pytest.raises(UserError, match="quarantine: true in the run, false now"):
        folder.run(prompts, shard_rows=8)


def test_without_quarantine_flagged_rows_stay(folder: JobFolder) -> None:
    with_worker(folder, folder.write_prompts(24, FAULTS), run_all)
    assert keys(folder.rows()) == [(row, 0) for row in range(24)]
    assert folder.rows()["flags"].to_pylist()[:3] == [[], ["repetition"], ["empty"]]
    assert not quarantined(folder)


def test_a_shard_without_a_good_row_has_a_part_all_the_same(folder: JobFolder) -> None:
    prompts = folder.write_prompts(24, FAULTS)
    with_worker(folder, prompts, run_all, quarantine=True)
    assert pq.read_table(folder.parts[2]).num_rows == 0
    assert pq.read_schema(folder.parts[2]).remove_metadata() == pq.read_schema(folder.parts[0]).remove_metadata()
    assert look(folder, prompts).done == {0, 1, 2}


def test_a_run_whose_every_row_is_in_quarantine_can_be_read(folder: JobFolder) -> None:
    prompts = folder.write_prompts(16, dict.fromkeys(range(16), BLANK))
    with_worker(folder, prompts, run_all, quarantine=True)
    assert look(folder, prompts).done == {0, 1}
    # ``datasets`` knows no empty split that is downloaded; it reads one as a stream, with every column.
    cache = str(folder.root / "cache")
    empty = datasets.load_dataset(str(folder.output), streaming=True, split="train", cache_dir=cache)
    assert list(empty) == []
    assert empty.features["output_text"].dtype == "string"
    files = str(folder.output / "quarantine" / "*.parquet")
    aside = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache)
    assert aside["row_id"][:] == list(range(16))
    assert set(aside.features) == set(empty.features)


def test_cut_outputs_stay_in_data(folder: JobFolder) -> None:
    with_worker(folder, folder.write_prompts(8), run_all, quarantine=True, max_new_tokens=3)
    assert folder.rows()["flags"].to_pylist() == [["no_stop"]] * 8
    assert not quarantined(folder)


def test_a_torn_pair_is_run_again(folder: JobFolder) -> None:
    prompts = folder.write_prompts(32, FAULTS)
    with_worker(folder, prompts, run_all, quarantine=True)
    assert look(folder, prompts).broken == {}
    store = Store(str(folder.output))
    store.delete(quarantine_name(0))
    store.write(quarantine_name(2), store.read(quarantine_name(1)))
    store.write(quarantine_name(3), store.read(quarantine_name(1)))
    assert look(folder, prompts).done == {1}
    # Run again, and what is left of the torn pair is gone.
    with_worker(folder, prompts, run_all, quarantine=True)
    assert look(folder, prompts).done == {0, 1, 2, 3}
    assert [quarantine_index(path.name) for path in quarantined(folder)] == [0, 1, 2]


def test_failed_rows_are_retried_beside_quarantined_ones(folder: JobFolder) -> None:
    from cluster.messages import Receipt, ShardTask

    prompts = folder.write_prompts(8, FAULTS)
    with_worker(folder, prompts, run_all, quarantine=True)
    aside = pq.read_table(quarantined(folder)[0])

    async def again(worker, raws):  # type: ignore[no-untyped-def]
        return await worker.run_shard(raws[0], ShardTask("id", keep=True))

    receipt = with_worker(folder, prompts, again, engine="cured", quarantine=True)
    assert isinstance(receipt, Receipt)
    assert (receipt.record.failed, receipt.record.quarantined) == ({}, 2)
    assert receipt.state.rows_done == 1
    assert keys(folder.rows()) == [(row, 0) for row in (0, 3, 4, 5, 6, 7)]
    assert pq.read_table(quarantined(folder)[0]).equals(aside)


def test_erasing_a_run_takes_its_quarantine(folder: JobFolder) -> None:
    prompts = folder.write_prompts(8, FAULTS)
    with_worker(folder, prompts, run_all, quarantine=True)
    (folder.output / "quarantine" / "mine.parquet").write_bytes(b"x")
    RunDir(Store(str(folder.output))).erase()
    assert [path.name for path in quarantined(folder)] == ["mine.parquet"]
    assert not (folder.output / part_name(0)).exists()
