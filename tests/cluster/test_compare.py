"""Two runs side by side: rows joined, tokens compared, settings and totals told, anything else refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cluster.config import JobConfig
from cluster.errors import UserError
from cluster.messages import RowKey, ShardRecord
from cluster.models import ModelRef
from cluster.output.compare import compare_rows, compare_settings, open_run
from cluster.output.rundir import RunDir, describe_run
from cluster.output.sink import build_rows, count_rows, publish, read_record, read_rows
from cluster.output.storage import Store
from jobs.compare_runs import main
from specfold import Completion, DecodeStats

CARRIED = pa.schema([pa.field("id", pa.string())])


def completion(row: int, ids: Sequence[int], text: str = "", kind: str | None = None) -> Completion:
    if kind:
        return Completion(row, 0, [], "", "error", error="Bad.", error_kind=kind)
    stats = DecodeStats(output_tokens=len(ids), denoise_forwards=2, drafts_proposed=4, drafts_accepted=1,
                        proposed_by_depth=[4], accepted_by_depth=[1])  # fmt: skip
    return Completion(row, 0, list(ids), text or f"text of {list(ids)}", "stop", stats=stats)


def make_run(
    folder: Path, rows: Sequence[Completion], shard_rows: int = 4, prompt_tokens: int = 7, **settings: Any
) -> str:
    """A finished run of these rows."""
    store = Store(str(folder))
    config = JobConfig(prompts="in.jsonl", shard_rows=shard_rows, **settings)
    model = ModelRef("m", path="/m", content_hash="sha256:1")
    run = describe_run(config, config.identity() | {"model": "sha256:1"}, CARRIED, ["in.jsonl"], model)
    RunDir(store).create(run)
    for index, start in enumerate(range(0, len(rows), shard_rows)):
        part = rows[start : start + shard_rows]
        keys, lengths = [RowKey(c.row_id, 0) for c in part], [prompt_tokens] * len(part)
        table = build_rows(keys, pa.table([["x"] * len(part)], schema=CARRIED), lengths, part)
        stats = DecodeStats()
        for row in part:
            stats.add(row.stats)
        record = ShardRecord(index, start, len(part), 1, "digest", run.hash, stats=stats, **count_rows(table))
        publish(store, table, record)
    speed = {"tokens_per_second": {"decode": 100.0, "end_to_end": 80.0}, "workers": {"worker-0": {}}}
    store.write("summary.json", json.dumps(speed).encode())
    return store.root


def test_equal_runs_agree_however_they_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [completion(i, [i, i + 1, i + 2]) for i in range(1000)]
    a, b = make_run(tmp_path / "a", rows, shard_rows=64), make_run(tmp_path / "b", rows, shard_rows=1000)
    assert main([a, b]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "Rows: 1,000 in both, 100.00% of them the same; 0 only in A, 0 only in B." in shown
    report = json.loads(shown[-1])
    assert report["settings"] == {"shard_rows": [64, 1000]}
    assert report["rows"]["agreement"] == 1.0
    assert report["totals"]["output tokens"] == [3000, 3000]
    assert report["totals"]["acceptance"] == [0.25, 0.25]
    assert report["totals"]["tokens/s while decoding"] == [100.0, 100.0]


def test_changed_missing_and_failed_rows_are_told_apart(tmp_path: Path) -> None:
    left = [completion(i, [1, 2, 3, 4]) for i in range(8)]
    right = list(left)
    right[1] = completion(1, [1, 2, 9, 4], "the answer is 9")
    right[2] = completion(2, [1, 2])
    right[3] = completion(3, [], kind="nan_logits")
    right[4] = replace(left[4], finish_reason="length")
    a = open_run(make_run(tmp_path / "a", left[:7]))
    b = open_run(make_run(tmp_path / "b", right[1:], shard_rows=3, prompt_tokens=8))
    rows = compare_rows(a, b, 2)
    assert (rows.same, rows.changed, rows.only_a, rows.only_b) == (2, 4, 1, 1)
    assert (rows.failed_only_a, rows.failed_only_b, rows.other_prompts) == (0, 1, 6)
    assert rows.first_difference == {2: 2}
    assert [(e["row_id"], e["position"], e["b"]["tokens"]) for e in rows.examples] == [(1, 2, 4), (2, 2, 2)]
    assert rows.examples[0]["b"] == {"tokens": 4, "ending": "stop", "text": "the answer is 9"}


def test_an_example_shows_the_place_where_the_texts_part(tmp_path: Path) -> None:
    before, after = "x" * 5000, "z" * 5000
    a = open_run(make_run(tmp_path / "a", [completion(0, [1, 2, 3], f"{before}one{after}")]))
    b = open_run(make_run(tmp_path / "b", [completion(0, [1, 9, 3], f"{before}two{after}")]))
    [example] = compare_rows(a, b, 5).examples
    assert example["a"]["text"].startswith("x" * 20 + "onezz")
    assert example["b"]["text"].startswith("x" * 20 + "twozz")
    assert len(example["a"]["text"]) == 60


def test_rows_in_quarantine_count(tmp_path: Path) -> None:
    rows = [completion(i, [i]) for i in range(8)]
    whole, split = make_run(tmp_path / "a", rows), make_run(tmp_path / "b", rows)
    store = Store(split)
    table, record = read_rows(store, read_record(store, 1)), read_record(store, 1)
    publish(store, table, replace(record, quarantined=2), moved=[False, True, True, False])
    Path(split, "quarantine", "rows-0000000.parquet").write_bytes(b"of a writer that was killed")
    found = compare_rows(open_run(whole), open_run(split), 0)
    assert (found.same, found.both, found.only_a) == (8, 8, 0)
    assert open_run(split).totals["rows in quarantine"] == 2


def test_differing_settings_are_named_those_of_the_tokens_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [completion(0, [1])]
    a = make_run(tmp_path / "a", rows, workers=2, stop=("[red]x[/red]",))
    b = make_run(tmp_path / "b", rows, delta=0.3, workers=4)
    found = compare_settings(open_run(a), open_run(b))
    assert list(found.items()) == [
        ("delta", (0.1, 0.3)), ("stop", (["[red]x[/red]"], [])), ("workers", (2, 4)),
    ]  # fmt: skip
    assert main([a, b]) == 0
    assert "[red]x[/red]" in capsys.readouterr().out


def test_hostile_outputs_reach_the_terminal_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = make_run(tmp_path / "a", [completion(0, [1], "\x1b[2J[bold]gone\n")])
    b = make_run(tmp_path / "b", [completion(0, [2], "\x1b[2J[bold]here\n")])
    assert main([a, b]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "'\\x1b[2J[bold]gone\\n'" in shown


def test_a_killed_run_has_no_speed_but_can_be_compared(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", [completion(0, [1, 2])])
    (Path(path) / "summary.json").unlink()
    totals = open_run(path).totals
    assert (totals["rows"], totals["output tokens"], totals["tokens/s end to end"]) == (1, 2, None)


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = make_run(tmp_path / "good", [completion(0, [1])])
    empty, foreign = tmp_path / "empty", tmp_path / "foreign"
    empty.mkdir()
    foreign.mkdir()
    (foreign / "run.json").write_text('{"kind": "something else"}')
    for other in (str(tmp_path / "absent"), str(empty), str(foreign)):
        for order in ([good, other], [other, good]):
            assert main(order) == 2
            error = capsys.readouterr().err
            assert error.startswith(f"error: {other} ")
            assert error.count("\n") == 1


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    path = Path(make_run(tmp_path / "a", [completion(i, [i] * 50) for i in range(8)]))
    part = path / "data" / "train-0000001.parquet"
    run = open_run(str(path))
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(UserError, match=r"train-0000001\.parquet cannot be read") as caught:
        compare_rows(run, run, 1)
    assert caught.value.exit_code == 2
    with pytest.raises(UserError, match=r"train-0000001\.parquet is not a whole Parquet file"):
        open_run(str(path))


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["a", "b", "--examples", "-1"], "--examples must be 0 or more, not -1."),
        (["a", ""], "A run's folder or URL must not be empty."),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"
