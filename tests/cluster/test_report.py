"""The report page: what stands on it, for whole, failed, killed, empty and huge runs, and hostile text."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.errors import UserError
from cluster.messages import ShardRecord
from cluster.output.charts import histogram, rate_chart, span, timeline
from cluster.output.examples import shorten
from cluster.output.history import MAX_POINTS, History
from cluster.output.report import Report, rebuild, verdict
from cluster.output.sink import length_bins
from cluster.output.storage import Store
from cluster.output.summary import Tally
from jobs.report import main
from specfold import DecodeStats
from tests.cluster.fake_engine import BLANK, LOOP, NAN
from tests.cluster.finished_runs import PREFLIGHT, START, FinishedRun
from tests.cluster.jobs import JobFolder, prompt_ids

PAYLOADS = [
    "<script>document.title='pwned'</script>",
    "</script></style></title><script>pwned()</script>",
    "<img src=x onerror=pwned()>",
    "\"><svg onload=pwned()>",
    "' autofocus onfocus=pwned() x='",
    "]]>--><iframe srcdoc='<script>parent.pwned()</script>'></iframe>",
    "{{ 7 * 7 }}{% include '/etc/passwd' %}",
    "</pre></main><a href=\"javascript:pwned()\">x</a>",
]  # fmt: skip


AUDIT: dict[str, Any] = {
    "asked": 2, "run_mode": "specfold", "audit_mode": "vanilla", "rows": 2, "identical": 1, "agreement": 0.5,
    "tokens": 40, "tokens_before_divergence": 25, "error": None,
    "divergences": [{"row_id": 4, "sample_id": 0, "position": 5, "run": 77, "audit": None, "reason": None}],
}  # fmt: skip


class Tags(HTMLParser):
    """The elements, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.text += " " * (tag in ("th", "td"))  # cells stand apart
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def finished(tmp_path: Path) -> FinishedRun:
    return FinishedRun(tmp_path / "out")


def page(run: FinishedRun, **changes: Any) -> Tags:
    return Tags(Report(run.store).render(run.summary(**changes), run.tally.parts()))


def test_the_page_tells_the_counts_and_shows_examples(finished: FinishedRun) -> None:
    finished.fill(errors={3: ("too_long", "The prompt has 9,000 tokens."), 50: ("nan_logits", "NaN logits.")})
    shown = page(finished).text
    assert "All 96 rows are there; 2 of them failed." in shown
    assert "The prompt has 9,000 tokens." in shown
    assert "Row 50, error" in shown
    assert "The answer is 17." in shown
    for title in ("Throughput over time", "Workers over time", "Acceptance by depth", "Output lengths"):
        assert title in shown
    assert "--max-failed allows" in page(finished, exit_code=3).text


def test_flagged_rows_are_counted_at_the_top_and_shown(finished: FinishedRun) -> None:
    finished.fill()
    shown = page(finished, flags={"repetition": 3, "empty": 2}).text
    assert "repetition 3, empty 2" in shown
    assert "in time" not in shown
    folded = page(finished, time_fold_rate=0.64, recomputed_rows_per_token=53.72).text
    assert "64.0% in time" in folded
    assert "53.7" in folded
    assert "No output is flagged." not in shown


def test_the_slowest_rows_are_the_slowest_of_all_parts(finished: FinishedRun) -> None:
    finished.fill()  # row i takes 1 + i % 13 / 4 seconds
    values = finished.summary()
    assert [(row["row_id"], row["shard"]) for row in values["slowest_rows"]] == [
        (12, 1), (25, 3), (38, 4), (51, 6), (64, 8), (77, 9), (90, 11), (11, 1), (24, 3), (37, 4),
    ]  # fmt: skip
    slow = page(finished).text.partition("Slowest rows")[2].partition("Slowest parts")[0].split()
    assert slow[slow.index("worker") + 1 :][:4] == ["12", "4s", "1", "worker-1"]
    assert slow.count("worker-1") + slow.count("worker-0") == 10


def test_settings_are_flags_and_the_audit_is_in_words(finished: FinishedRun) -> None:
    finished.fill()
    shown = page(finished, audit=AUDIT).text
    for name in ("chat-template-text", "draft-graph-text", "submitted", "audit_mode", "tokens_before_divergence"):
        assert name not in shown
    assert "max-failed" in shown
    assert (
        "Audit: 1 of 2 rows decoded with --mode vanilla are identical; 62.5% of the tokens come before a difference; "
        "the first is in row 4 (sample 0) at token 5."
    ) in shown
    assert "the end" in shown


@pytest.mark.parametrize(
    ("counts", "tone", "sentence"),
    [
        ((1, 0, 0), "good", "The one row is there and none failed."),
        ((9, 0, 1), "fair", "All 9 rows are there and none failed; 1 is in quarantine."),
        ((9, 2, 3), "fair", "All 9 rows are there; 2 of them failed and 3 are in quarantine."),
        ((9, 0, 9), "bad", "All 9 rows are there, and every one is in quarantine: data/ holds none."),
    ],
)
def test_how_a_run_stands(counts: tuple[int, int, int], tone: str, sentence: str) -> None:
    rows = dict(zip(("done", "failed", "quarantined"), counts, strict=True)) | {"total": counts[0]}
    assert verdict({"rows": rows, "state": "done", "sessions": [{"exit_code": 0}]}) == (tone, sentence)


def test_hostile_text_stays_text_wherever_it_comes_from(tmp_path: Path) -> None:
    run = FinishedRun(tmp_path / "out", num_shards=2, model=PAYLOADS[2], prompts=PAYLOADS[0], system_prompt=PAYLOADS[1])
    texts = dict(enumerate(PAYLOADS))
    run.add_part(0, texts, {7: (PAYLOADS[3], PAYLOADS[4])}, column=PAYLOADS[2])
    run.add_part(1, {8 + i: text for i, text in texts.items()}, {})
    first = {PAYLOADS[6]: {"row_id": 0, "error": PAYLOADS[5]}}
    shown = page(
        run, flags={PAYLOADS[0]: 1}, missing_shards=PAYLOADS[1], audit=AUDIT | {"error": PAYLOADS[3]},
        preflight=PREFLIGHT | {"failed_by_kind": {PAYLOADS[6]: 1}, "first_failed": first},
    )  # fmt: skip
    assert not shown.tags & {"script", "img", "iframe", "object", "embed", "form", "base"}
    assert not [name for name, _ in shown.attributes if name.startswith("on") or name in ("srcdoc", "autofocus")]
    links = [value or "" for name, value in shown.attributes if name in ("href", "src", "action", "xlink:href")]
    assert all(link.startswith("#") or link == "data:," for link in links)
    for payload in (PAYLOADS[0], PAYLOADS[1], *PAYLOADS[3:7]):
        assert payload in shown.text
    assert "http" not in "".join(value or "" for name, value in shown.attributes if name != "http-equiv")


def test_text_that_misleads_the_eye_is_made_visible() -> None:
    assert shorten("a\u202eb\x00c\u00a0d\ne", 99) == "a�b�c d\ne"
    assert shorten("x" * 3000, 10) == "xxxxxxxxxx… (2,990 more characters)"


@pytest.mark.parametrize("state", ["running", "done", "stopped", "interrupted"])
def test_a_run_without_any_part_has_a_page(finished: FinishedRun, state: str) -> None:
    shown = page(finished, state=state, history=[], exit_code=None).text
    assert "No output yet." in shown
    assert shown.count("Nothing to count yet.") == 4


def test_a_killed_run_gets_its_page_from_the_parts(finished: FinishedRun) -> None:
    finished.add_part(0, {}, {})
    finished.summary(state="running", exit_code=None)
    for index in range(1, 5):
        finished.add_part(index, {}, {})  # after the last summary
    finished.store.write("data/train-0000007.parquet", b"PAR1 and then nothing")
    rebuild(finished.store)
    shown = Tags(finished.store.read("report.html").decode()).text
    assert "Killed before its end. 56 of 96 rows are not done. The same command goes on from here." in shown
    finished.store.delete("summary.json")
    rebuild(finished.store)
    assert "Killed before its end." in finished.store.read("report.html").decode()


def test_only_a_run_gets_a_page(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the output of a run"):
        rebuild(Store(str(tmp_path)))


def test_the_page_is_made_anew_by_a_command(
    finished: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished.fill()
    finished.summary()
    assert main([finished.store.url]) == 0
    assert capsys.readouterr().out == f"{finished.store.url}/report.html\n"
    for args, sentence in (
        ([], "usage: "), ([""], "usage: "), ([str(tmp_path / "nothing")], "error: "), ([str(tmp_path)], "error: "),
        ([f"{finished.store.url}/data"], "error: "),
    ):  # fmt: skip
        assert main(args) == 2
        err = capsys.readouterr().err
        assert err.startswith(sentence)
        assert len(err.splitlines()) == 1
        assert "--output" not in err


def test_the_page_of_a_huge_run_is_small(tmp_path: Path) -> None:
    run = FinishedRun(tmp_path / "out", num_shards=10_000, rows=256, system_prompt="s" * 1_000_000)
    run.tally = huge_tally(10_000, 300)
    values = run.summary(missing_shards=", ".join(str(i) for i in range(0, 10_000, 2)))
    values["history"] = [[i, i, i * i] for i in range(MAX_POINTS)]
    assert len(Report(run.store).render(values, run.tally.parts())) < 600_000


def huge_tally(num_shards: int, num_workers: int) -> Tally:
    tally = Tally()
    folded = [[5000, 4000, 3000, 2000, 1500, 1000, 500, 250]] * 40
    for index in range(num_shards):
        started = START + index // num_workers * 60 + index % 7
        stats = DecodeStats(
            output_tokens=9000 + index % 500, denoise_forwards=3000, drafts_proposed=100, drafts_accepted=60,
            proposed_by_depth=[60] * 8, accepted_by_depth=[45] * 8, draft_rows=[8000] * 8, folded_qkv=folded,
            folded_ffn=folded, run_lengths=[9] * 33,
        )  # fmt: skip
        kinds = {f"kind-{index % 15}": 1} if index % 3 == 0 else {}
        tally.add(
            ShardRecord(
                index, index * 256, 256, 1, "digest", "id", failed=kinds, finished={"stop": 255, "error": 1},
                stats=stats, worker=f"worker-{index % num_workers}", started=started, ended=started + 50 + index % 9,
                slowest=[[index * 256, 0, index % 31]], lengths={str(2 ** (index % 13)): 256},
            ),
            fresh=True,
        )  # fmt: skip
    return tally


def test_the_history_is_bounded_even_and_ends_with_now() -> None:
    history = History()
    for i in range(40_000):
        history.add(i * 0.5, i, i * 10)
        assert len(history.points()) <= MAX_POINTS
    points = history.points()
    assert points[0][0] == 0.0
    assert points[-1] == [19_999.5, 39_999, 399_990]
    gaps = np.diff([point[0] for point in points[:-1]])
    assert len(points) >= MAX_POINTS / 2 - 1
    assert gaps.max() <= 2 * gaps.min()


@pytest.mark.parametrize(("length", "bin"), [(0, 0), (1, 1), (15, 15), (16, 16), (17, 16), (255, 240), (4095, 3840)])
def test_lengths_are_counted_in_bins_an_eighth_of_an_octave_wide(length: int, bin: int) -> None:
    assert length_bins(np.array([length, length], np.int32)) == {str(bin): 2}


def test_no_row_is_lost_between_the_bins_of_a_histogram() -> None:
    lengths = np.arange(1, 3000, 7)
    bins = {float(name): count for name, count in length_bins(lengths).items()}
    chart = histogram("id", "title", "", ("tokens", "rows"), bins, unit=256)
    assert sum(int(row[1]) for row in chart.rows) == len(lengths)
    assert len(chart.rows) <= 24


def test_a_steady_speed_is_a_flat_line_and_a_pause_a_zero() -> None:
    points = [[float(t), 0, 50 * t - 50 * max(0, min(t - 40, 20))] for t in range(101)]
    rates = [float(row[2]) for row in rate_chart("id", "title", "tokens/s", points, 2).rows]
    assert set(rates) == {50.0, 0.0}
    assert rates.count(0.0) == 10


def test_a_worker_that_paused_shows_its_gap() -> None:
    busy = {"worker-10": [(0.0, 100.0)], "worker-9": [(0.0, 30.0), (20.0, 40.0), (90.0, 100.0)]}
    chart = timeline("id", "title", 0.0, 100.0, busy)
    assert list(chart.rows) == [
        ("worker-9", 3, "50s", "50s", "50s from 40s on"),
        ("worker-10", 1, "1m40s", "0s", "0s from 1m40s on"),
    ]
    assert len(timeline("id", "title", 0.0, 9.0, {f"w-{i}": [(0.0, 9.0)] for i in range(500)}).y_labels) == 60


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (3.25, "3.2s"), (59.6, "1m00s"), (4000, "1h06m"), (300_000, "3d11h")]
)
def test_times_are_short(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.usefixtures("local_ray")
def test_a_job_leaves_its_page(folder: JobFolder) -> None:
    twin = json.dumps({"prompt_token_ids": prompt_ids(3), "id": "twin", "n": 40})
    planted = {40: twin, 5: "not json", 7: NAN, 9: LOOP, 20: BLANK, 21: LOOP, 30: '{"id": "no prompt"}'}
    prompts = folder.write_prompts(60, planted)
    assert folder.run(prompts, shard_rows=8, quarantine=True, audit=4) == 0
    shown = Tags((folder.output / "report.html").read_text()).text
    assert "All 60 rows are there; 3 of them failed and 3 are in quarantine." in shown
    assert "prompts that repeat an earlier one: 1" in shown
    assert "invalid_json 1, missing_prompt 1, nan_logits 1" in shown
    assert "repetition 2, empty 1; 3 rows in quarantine" in shown
    for row in (5, 7, 30):
        assert f"Row {row}, error" in shown
    for row in (9, 20, 21):
        assert f"Row {row}, stop" in shown
    assert "Audit: 4 of 4 rows decoded with --mode vanilla are identical." in shown
    assert "audit_mode" not in shown
    assert "Repeat the prompt of an earlier row" in shown
    assert "Prompt lengths" in shown
    assert not folder.leftovers
    values = folder.summary()
    assert values["history"][-1][1:] == [60, values["output_tokens"]]
    assert sum(values["output_lengths"].values()) == 57
    found = values["preflight"]
    assert (found["failed_by_kind"], found["repeated_prompts"], found["repeated_ids"]) == (
        {"invalid_json": 1, "missing_prompt": 1}, 1, 0,
    )  # fmt: skip
    # What only a driver can know stays when the page is made anew.
    rebuild(Store(str(folder.output)))
    again = Tags((folder.output / "report.html").read_text()).text
    assert "prompts that repeat an earlier one: 1" in again
    assert "Audit: 4 of 4 rows" in again
