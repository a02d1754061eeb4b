"""What people see while a job runs and when it ends: lines, a bar, the summary, the report of the check."""

from __future__ import annotations

import io
import re
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from cluster.driver.check import RowCheck, check_rows, rows_to_check
from cluster.driver.job import ranges
from cluster.driver.places import choose_device, most_workers, worker_count
from cluster.driver.progress import Counts, Pace, Progress, Snapshot, WarmUp
from cluster.driver.roster import DECODING, IDLE, LOADING, Live, Roster, WorkerLine
from cluster.driver.views import BarView, LineView, describe, open_view
from cluster.errors import UserError
from cluster.input.schema import carried_schema
from cluster.input.source import open_input
from cluster.messages import ShardRecord, WorkerState
from cluster.models import resolve_model
from cluster.output.summary import Tally
from cluster.output.summary_table import summary_table
from specfold import DecodeStats
from tests.cluster.jobs import JobFolder


def counts(**changes: Any) -> Counts:
    values = {
        "rows": 50, "total_rows": 200, "rows_failed": 2, "output_tokens": 3000, "drafts_proposed": 100,
        "drafts_accepted": 61, "recomputed_rows": 297_600, "foldable": 1000, "folded": 870,
    }  # fmt: skip
    return Counts(**(values | changes))


def workers(*doing: str) -> dict[str, WorkerLine]:
    return {f"worker-{i}": WorkerLine(state, "node-a", WorkerState(rows_done=7)) for i, state in enumerate(doing)}


def snapshot(*doing: str, **changes: Any) -> Snapshot:
    lines = workers(*(doing or (DECODING, DECODING, IDLE, LOADING)))
    values = {
        "counts": counts(), "tokens_per_s": 300.0, "run_tokens_per_s": 250.0, "eta_s": 30.0, "workers_wanted": 4,
        "workers": lines, "workers_up": sum(line.doing in (DECODING, IDLE) for line in lines.values()),
    }  # fmt: skip
    return Snapshot(**(values | changes))


def test_a_line_tells_rows_speeds_acceptance_folding_failures_workers_and_time_left() -> None:
    assert describe(snapshot()) == (
        "50/200 rows (25%), 300 tokens/s (250 over the run), acceptance 61%, 87% folded, "
        "99 computed/token, 2 failed, "
        "3 of 4 workers up (1 loading, 2 decoding, 1 idle), 30s left"
    )
    early = snapshot(
        DECODING, eta_s=None, workers_wanted=1,
        counts=counts(total_rows=None, rows=1, rows_failed=0, drafts_proposed=0, foldable=0, recomputed_rows=0),
    )  # fmt: skip
    assert describe(early) == "1 row, 300 tokens/s (250 over the run), 1 of 1 worker up"


def test_progress_tells_the_speed_now_and_over_the_run_and_the_time_left() -> None:
    now = 0.0
    progress = Progress(lambda: now)
    live = Live(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, workers(DECODING, LOADING))
    for minute in range(61):  # ten rows and 600 tokens a minute, then half as much
        now = minute * 60.0
        halves = 2 * min(minute, 30) + max(minute - 30, 0)
        seen = progress.snapshot(counts(rows=5 * halves, total_rows=1000, output_tokens=300 * halves), live, 2)
    assert seen.tokens_per_s == pytest.approx(5.0)
    assert seen.run_tokens_per_s == pytest.approx(7.5)
    assert seen.eta_s == pytest.approx((1000 - 450) / (5 / 60))
    told = seen.to_dict()
    assert told["tokens_per_second"] == {"now": 5.0, "run": 7.5}
    assert (told["acceptance"], told["fold_rate"], told["workers_up"], told["workers_wanted"]) == (0.61, 0.87, 2, 2)
    assert told["workers"]["worker-1"]["doing"] == "loading"
    assert told["workers"]["worker-0"]["rows"] == 7


def test_the_time_left_does_not_count_the_seconds_in_which_workers_load() -> None:
    now = 0.0
    progress = Progress(lambda: now)
    loading, up = (Live(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, n, workers(LOADING)) for n in (0, 1))
    for second in range(61):  # 100 rows stood there; 50 s go into loading, then there are 5 rows a second
        now = float(second)
        done = 5 * max(second - 50, 0)
        at_hand = counts(rows=100 + done, total_rows=300, output_tokens=10 * done)
        seen = progress.snapshot(at_hand, up if second >= 50 else loading, 1)
        assert second > 50 or seen.eta_s is None
    assert seen.eta_s == pytest.approx((300 - 150) / 5, rel=0.05)
    assert seen.tokens_per_s == pytest.approx(50.0, rel=0.05)
    assert seen.run_tokens_per_s == pytest.approx(500 / 60)


def test_the_speed_now_is_that_of_the_last_minute_and_the_time_left_that_of_five() -> None:
    now = 0.0
    pace = Pace(lambda: now)
    for second in range(0, 601, 10):
        now = float(second)
        rows = second if second <= 540 else 540
        pace.add(counts(rows=rows, total_rows=1140, output_tokens=rows))
    assert pace.tokens_per_s == 0.0
    assert pace.eta_s(counts(rows=540, total_rows=1140)) == pytest.approx(600 / (240 / 300))


def test_the_time_a_job_will_take_is_told_once_after_a_warm_up() -> None:
    now = 0.0
    warm_up = WarmUp(lambda: now)
    said = []
    for second in range(0, 120, 5):
        now = float(second)
        # The first ten seconds go into loading; 100 rows stood there from an earlier session.
        rows = 100 + 2 * max(second - 10, 0)
        said.append(warm_up.estimate(counts(rows=rows, total_rows=1300)))
    sentence = "About 9m35s to go, by the speed of the first 20 seconds of decoding."
    assert [line for line in said if line] == [sentence]

    now = 0.0
    warm_up = WarmUp(lambda: now)
    for second, rows in ((0, 0), (5, 10), (30, 190)):
        now = float(second)
        assert warm_up.estimate(counts(rows=rows)) is None, "nearly done"


def test_a_log_gets_plain_lines() -> None:
    log = io.StringIO()
    view = open_view(Console(file=log, force_terminal=False, width=200))
    assert isinstance(view, LineView)
    LineView(Console(file=log, force_terminal=False, width=40), every_s=0.0).show(snapshot())
    assert log.getvalue().startswith("50/200 rows (25%), 300 tokens/s")
    assert log.getvalue().count("\n") == 1


def test_a_terminal_gets_a_bar_and_its_workers() -> None:
    terminal = io.StringIO()
    bar = open_view(Console(file=terminal, force_terminal=True, width=200))
    assert isinstance(bar, BarView)
    bar.show(snapshot())
    bar.say("worker-1 is gone")
    bar.close()
    shown = terminal.getvalue()
    assert "50/200 rows (25%)" in shown
    assert "3 of 4 workers up" in shown
    assert "worker-1 is gone" in shown
    for i, doing in enumerate(("decoding", "decoding", "idle", "loading")):
        assert re.search(rf"worker-{i} +node-a +{doing} +7 +0 ", shown)

    narrow = io.StringIO()
    bar = BarView(Console(file=narrow, force_terminal=True, width=60))
    bar.show(snapshot(eta_s=3700.0))
    bar.close()
    shown = narrow.getvalue()
    assert re.search(r"50/200 rows \(25%\).*━━━.*1h01m left", shown)
    assert re.search(r"\n.*1\s+idle\)", shown), "what does not fit is on the next line"

    many = io.StringIO()
    bar = BarView(Console(file=many, force_terminal=True, width=200))
    bar.show(snapshot(*[DECODING] * 500, workers_wanted=512))
    bar.close()
    assert "500 of 512 workers up" in many.getvalue()
    assert "node-a" not in many.getvalue()


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


def test_the_check_warns_of_samples_that_cannot_differ(folder: JobFolder) -> None:
    warm = '{"custom_id": "a", "body": {"prompt": [5, 6], "temperature": 0.7}}'
    prompts = folder.write_prompts(3, {1: warm})
    for settings, warnings in (
        ({"num_samples": 2}, ["Warning: 2 rows have temperature 0, where all samples are the same; all are run."]),
        ({"num_samples": 2, "temperature": 0.7}, []),
        ({}, []),
    ):
        config = folder.config(prompts, **settings)
        source = open_input(config)
        found = check_rows(source, config, resolve_model(config.model), carried_schema(source, config), None)
        assert found.warnings == warnings


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


@pytest.mark.parametrize("settings", [{"device": "cuda"}, {"device": "auto", "gpus_per_worker": 0.5}])
def test_gpus_that_this_machine_lacks_are_refused_and_not_waited_for(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2.0})
    flag = "--gpus-per-worker 0.5" if "gpus_per_worker" in settings else "--device cuda"
    with pytest.raises(UserError, match=f"^{flag} was given, but Ray finds no GPU on this machine"):
        choose_device(folder.config("in.jsonl", **settings))
    remote = folder.config("in.jsonl", ray_address="10.0.0.1:6379", **settings)
    assert choose_device(remote) == "cuda", "a node with GPUs may join"


@pytest.mark.parametrize(
    ("settings", "resources", "most", "count"),
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
def test_workers_are_as_many_as_there_are_places_and_as_can_be_of_use(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], resources: dict[str, float],
    most: int | None, count: int,
) -> None:  # fmt: skip
    monkeypatch.setattr("ray.cluster_resources", lambda: resources)
    config = folder.config("in.jsonl", **({"workers": None} | settings))
    assert worker_count(config, most) == count


@pytest.mark.parametrize(("shards", "outputs", "most"), [(2, 40, 5), (5, 40, 5), (5, 10, 5), (1, 1, 1), (3, 17, 3)])
def test_a_long_shard_has_rows_for_several_workers(folder: JobFolder, shards: int, outputs: int, most: int) -> None:
    assert most_workers(folder.config("in.jsonl", batch_size=8), shards, outputs) == most


def test_rows_of_a_worker_that_is_gone_do_not_count() -> None:
    roster = Roster()
    gone, there = (roster.members[roster.enter(slot, 0.0)] for slot in (0, 1))
    gone.state, there.state = WorkerState(rows_done=5, rows_failed=1), WorkerState(rows_done=3)
    gone.dying = True
    live = roster.live()
    assert (live.unfinished_rows, live.unfinished_failed) == (3, 0)
