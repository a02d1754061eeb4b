"""What people see while a job runs and when it ends: lines, a bar, the summary, the report of the check."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from cluster.driver.check import RowCheck, check_rows, rows_to_check
from cluster.driver.job import ranges
from cluster.driver.places import worker_count
from cluster.driver.progress import BarView, LineView, Pace, Snapshot, WarmUp, describe, open_view
from cluster.input.schema import carried_schema
from cluster.input.source import open_input
from cluster.messages import ShardRecord, WorkerState
from cluster.models import resolve_model
from cluster.output.summary import Tally
from cluster.output.summary_table import summary_table
from specfold import DecodeStats
from tests.cluster.jobs import JobFolder


def snapshot(**changes: Any) -> Snapshot:
    values = {
        "rows": 50, "total_rows": 200, "rows_failed": 2, "output_tokens": 3000, "drafts_proposed": 100,
        "drafts_accepted": 61, "recomputed_rows": 297_600, "workers_up": 3, "workers": 4,
    }  # fmt: skip
    return Snapshot(**(values | changes))


def test_a_line_tells_rows_speed_acceptance_failures_workers_and_time_left() -> None:
    times = iter([0.0, 10.0])
    pace = Pace(lambda: next(times))
    pace.add(snapshot(rows=0, output_tokens=0))
    pace.add(snapshot())
    line = describe(snapshot(), pace)
    assert line == (
        "50/200 rows (25%), 300 tokens/s, acceptance 61%, 99 computed/token, 2 failed, 3 of 4 workers up, 30s left"
    )
    assert describe(snapshot(total_rows=None), pace).startswith("50 rows, 300 tokens/s")


def test_the_speed_is_that_of_the_last_five_minutes() -> None:
    now = 0.0
    pace = Pace(lambda: now)
    for minute in range(60):
        now = minute * 60.0
        tokens = 600 * min(minute, 30) + 60 * max(minute - 30, 0)
        pace.add(snapshot(output_tokens=tokens))
    assert pace.tokens_per_s == pytest.approx(1.0)


def test_the_time_a_job_will_take_is_told_once_after_a_warm_up() -> None:
    now = 0.0
    warm_up = WarmUp(lambda: now)
    said = []
    for second in range(0, 120, 5):
        now = float(second)
        # The first ten seconds go into loading; 100 rows stood there from an earlier session.
        rows = 100 + 2 * max(second - 10, 0)
        said.append(warm_up.estimate(snapshot(rows=rows, total_rows=1300)))
    sentence = "About 9m35s to go, by the speed of the first 20 seconds of decoding."
    assert [line for line in said if line] == [sentence]

    now = 0.0
    warm_up = WarmUp(lambda: now)
    for second, rows in ((0, 0), (5, 10), (30, 190)):
        now = float(second)
        assert warm_up.estimate(snapshot(rows=rows)) is None, "nearly done"


def test_a_log_gets_plain_lines_and_a_terminal_a_bar() -> None:
    log = io.StringIO()
    view = open_view(Console(file=log, force_terminal=False, width=200))
    assert isinstance(view, LineView)
    LineView(Console(file=log, force_terminal=False, width=40), every_s=0.0).show(snapshot())
    assert log.getvalue().startswith("50/200 rows (25%), 0 tokens/s")
    assert log.getvalue().count("\n") == 1

    terminal = io.StringIO()
    bar = open_view(Console(file=terminal, force_terminal=True, width=120))
    assert isinstance(bar, BarView)
    bar.show(snapshot())
    bar.say("worker-1 is gone")
    bar.close()
    assert "50/200 rows (25%)" in terminal.getvalue()
    assert "worker-1 is gone" in terminal.getvalue()


def record(index: int, worker: str, tokens: int, seconds: float, failed: int = 0, busy_s: float = 0.0) -> ShardRecord:
    stats = DecodeStats(
        output_tokens=tokens, denoise_forwards=tokens // 4, drafts_proposed=100, drafts_accepted=60,
        proposed_by_depth=[60, 40], accepted_by_depth=[45, 15], draft_rows=[10], folded_qkv=[[8], [4]],
        folded_ffn=[[6], [2]], recomputed_qkv_rows=97 * tokens, main_rows=200, main_folded_qkv=[100, 80],
        main_folded_ffn=[60, 40],
    )  # fmt: skip
    return ShardRecord(
        index, index * 10, 10, 1, "digest", "id", failed={"too_long": failed} if failed else {},
        finished={"stop": 10 - failed, "error": failed}, stats=stats, worker=worker, started=100.0,
        ended=100.0 + seconds, slowest=[[index, 0, seconds]], busy_s=busy_s, idle_s=busy_s / 4,
    )  # fmt: skip


def test_the_summary_adds_up_and_keeps_sessions_apart() -> None:
    tally = Tally()
    tally.add(record(0, "worker-0", 400, 1.0, failed=1, busy_s=12.0), fresh=False)
    tally.add(record(1, "worker-0", 400, 2.0), fresh=True)
    tally.add(record(2, "worker-1", 200, 3.0), fresh=True)
    tally.observe("worker-0", WorkerState(output_tokens=400, busy_s=4.0, idle_s=1.0))
    tally.observe("worker-1", WorkerState(output_tokens=200, busy_s=2.0, idle_s=3.0))
    values = tally.to_dict(seconds=10.0)
    assert values["rows"]["done"] == 30
    assert values["rows"]["failed_by_kind"] == {"too_long": 1}
    assert values["rows"]["by_finish_reason"] == {"stop": 29, "length": 0, "error": 1}
    assert values["output_tokens"] == 1000
    assert values["tokens_per_second"] == {"decode": 200.0, "end_to_end": 60.0}
    assert values["tokens_per_forward"] == 4.0
    assert values["acceptance_by_depth"] == [0.75, 0.375]
    assert values["fold_rate_by_layer"] == [0.7, 0.3]
    assert values["fold_rate"] == 0.5
    assert values["time_fold_rate"] == 0.35
    assert values["recomputed_rows_per_token"] == values["workers"]["worker-1"]["recomputed_rows_per_token"] == 97.0
    # 250 forwards, 600 main and 30 draft positions; by layer, then main branch and depth of the draft.
    assert values["recomputed_rows_per_forward"] == {
        "qkv": [[1.2, 0.024], [1.44, 0.072]],
        "ffn": [[1.68, 0.048], [1.92, 0.096]],
    }
    assert values["workers"]["worker-1"]["idle_seconds"] == 3.0
    assert values["session"] == {"rows": 20, "output_tokens": 600, "seconds": 10.0, "workers": 2}
    first = values["workers"]["worker-0"]  # of all sessions
    assert (first["rows"], first["shards"], first["failed"], first["output_tokens"]) == (20, 2, 1, 800)
    assert (first["busy_seconds"], first["idle_seconds"], first["tokens_per_second"]) == (16.0, 4.0, 50.0)
    assert [line["shard"] for line in values["slowest_shards"]] == [2, 1, 0]

    shards = pq.read_table(pa.BufferReader(tally.shards_file())).to_pylist()
    assert [(line["shard"], line["time_fold_rate"], line["recomputed_rows_per_token"]) for line in shards] == [
        (index, 0.35, 97.0) for index in range(3)
    ]

    shown = io.StringIO()
    Console(file=shown, width=120).print(summary_table(values))
    narrow = io.StringIO()
    Console(file=narrow, width=50).print(summary_table(values))
    assert "…" not in narrow.getvalue()
    for text in (
        "30 (29 stop, 0 length, 1 error)",
        "1 (1 too_long)",
        "75.0%, 37.5%",
        "50.0%",
        "4.00",
        "35.0%",
        "97.00",
    ):
        assert text in shown.getvalue()


def test_at_most_fifty_slow_shards_are_listed() -> None:
    tally = Tally()
    for index in range(80):
        tally.add(record(index, "worker-0", 10, float(index)), fresh=True)
    slowest = tally.to_dict(1.0)["slowest_shards"]
    assert [line["shard"] for line in slowest] == list(range(79, 29, -1))


def test_the_check_counts_by_kind_and_warns_of_repeats(folder: JobFolder) -> None:
    twin = '{"prompt_token_ids": [2, 5, 3], "id": "row-1"}'  # the prompt of row 0 and the id of row 1
    config = folder.config(folder.write_prompts(30, {4: "broken", 9: '{"id": 3}', 12: twin, 20: "broken"}))
    source = open_input(config)
    found = check_rows(source, config, resolve_model(config.model), carried_schema(source, config), None)
    assert (found.rows, dict(found.failed)) == (30, {"invalid_json": 2, "missing_prompt": 1})
    lines = found.report()
    assert lines[0] == "30 rows checked, 3 cannot be decoded."
    assert lines[1].startswith("  invalid_json: 2 rows, first row 4: ")
    assert found.warnings == [
        "Warning: 1 row repeats the id of an earlier row; all are run.",
        "Warning: 1 row repeats the prompt of an earlier row; all are run.",
    ]
    assert found.first_problem().startswith("row 4: ")


@pytest.mark.parametrize(("total", "checked"), [(5, None), (100_000, None), (100_001, 10_000), (None, 10_000)])
def test_how_much_is_checked_before_a_job(total: int | None, checked: int | None) -> None:
    assert rows_to_check(total) == checked


def test_an_empty_check_says_nothing() -> None:
    assert RowCheck(rows=3).report() == ["3 rows checked, 0 cannot be decoded."]


@pytest.mark.parametrize(
    ("indexes", "text"), [([], ""), ([4], "4"), ([0, 1, 2], "0-2"), ([1, 2, 3, 7, 9, 10], "1-3, 7, 9-10")]
)
def test_missing_shards_are_told_as_ranges(indexes: list[int], text: str) -> None:
    assert ranges(indexes) == text


@pytest.mark.parametrize(
    ("settings", "resources", "left", "count"),
    [
        ({"device": "cpu"}, {"CPU": 6.0}, None, 6),
        ({"device": "cpu"}, {"CPU": 6.0}, 2, 2),
        ({"device": "cpu", "workers": 3}, {"CPU": 6.0}, 9, 3),
        ({"device": "cuda"}, {"GPU": 8.0}, 99, 8),
        ({"device": "cuda", "gpus_per_worker": 2.0}, {"GPU": 8.0}, 99, 4),
        ({"device": "cuda", "gpus_per_worker": 0.3}, {"GPU": 2.0}, 99, 6),
        ({"device": "cuda"}, {}, 99, 1),
    ],
)
def test_workers_are_as_many_as_there_are_places_and_shards(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], resources: dict[str, float],
    left: int | None, count: int,
) -> None:  # fmt: skip
    monkeypatch.setattr("ray.cluster_resources", lambda: resources)
    config = folder.config("in.jsonl", **({"workers": None} | settings))
    assert worker_count(config, left) == count
