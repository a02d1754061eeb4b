"""The two tools on one engine, calibrate and profile: what they write, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs import calibrate, profile
from specfold.drafts import load_graph


def test_calibrate_writes_a_graph_that_says_where_it_came_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "graph.json"
    args = ["--save", str(file), "--rows", "3", "--nodes", "4", "--compare", "2", "--max-new-tokens", "24"]
    assert calibrate.main(args) == 0
    graph = load_graph(file, 4)
    assert isinstance(graph.origin, dict)
    assert graph.origin["model"] == "fast_dllm_v2"
    assert graph.origin["rows"] == 3
    assert graph.origin["settings"]["small_block_size"] == 8
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {r["graph"] for r in report["records"]} > {"default", "degree-0", "degree-1", "total", "oracle"}
    assert [path.name for path in tmp_path.iterdir()] == ["graph.json"]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "error: --save is missing."),
        (["--save"], "Parameter --save requires an argument."),
        (["--save", ""], "Invalid value for --save: it must not be empty."),
        (["--save", "g.json", "--compare-prompts", ""], "Invalid value for --compare-prompts: it must not be empty."),
        (["--save", "g.json", "--rows", "0"], "--rows must be at least 1, not 0."),
        (["--save", "g.json", "--nodes", "33"], "--nodes must be at most 32, not 33."),
        (["--save", "no/g.json"], "--save no/g.json cannot be written: it must name a file in a folder that exists."),
        (["--save", "g.json", "--workers", "2"], "Unknown option: --workers."),
        (["--save", "g.json", "--compare-prompts", "x"], "--compare-prompts needs --compare"),
        (["--save", "g.json", "--prompts", "no.jsonl"], "no.jsonl"),
        (["--save", "g.json", "--compare", "5", "--rows", "96"], "more than 96 are needed"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    args: list[str], sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert calibrate.main(args) == 2
    told = capsys.readouterr().err.strip()
    assert sentence in told
    assert "\n" not in told
    assert not list(tmp_path.iterdir())


def test_profile_writes_tables_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profile"
    args = ["--save", str(out), "--rows", "2", "--drafts", "2", "--draft-counts", "1", "--draft-counts", "2"]
    args += [
        "--deltas",
        "0",
        "--deltas",
        "0.3",
        "--delta-times",
        "0.1",
        "--max-new-tokens",
        "16",
        "--answer-column",
        "answer",
    ]
    assert profile.main(args) == 0
    for name in ("residuals", "ripple", "delta", "delta_time", "drafts"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    shares = pq.read_table(out / "residuals.parquet").to_pylist()
    first = {(r["depth"], r["threshold"]): r["share"] for r in shares if r["layer"] == 0 and r["stage"] == "entry"}
    assert first[1, 0.0] == 31 / 32, "before the first layer a draft differs from its parent in its one new token"
    ripple = pq.read_table(out / "ripple.parquet").to_pylist()
    layer0 = {r["distance"]: r["mean"] for r in ripple if r["layer"] == 0 and r["steps_since"] == 0}
    assert layer0[0] > 0.5
    assert set(layer0.values()) == {layer0[0], 0.0}
    deeper = {r["distance"]: r["mean"] for r in ripple if r["layer"] == 5 and r["steps_since"] == 0}
    assert deeper[0] > deeper[5] > 0
    delta = pq.read_table(out / "delta.parquet").to_pylist()
    at = {(r["mode"], r["ffn_gate"], r["delta"]): r for r in delta}
    assert at["specfold", "own", 0.0]["agreement"] == at["spiffy", None, None]["agreement"] == 1.0
    assert at["specfold", "own", 0.3]["fold_rate"] > at["specfold", "own", 0.0]["fold_rate"] > 0
    time = {(r["mode"], r["ffn_gate"]): r for r in pq.read_table(out / "delta_time.parquet").to_pylist()}
    assert set(time) == {
        ("vanilla", None), ("specfold", None), ("sub-block cache", None),
        *((mode, gate) for mode in ("vanilla", "specfold") for gate in ("own", "entry")),
    }  # fmt: skip
    alone, plain = time["vanilla", "own"], time["vanilla", None]
    assert alone["forwards"] == pytest.approx(plain["forwards"], rel=0.1)
    assert 0.4 < alone["time_fold_rate"] < 1
    assert alone["qkv_rows_per_token"] < 0.6 * plain["qkv_rows_per_token"]
    assert time["specfold", "own"]["qkv_rows_per_token"] < time["specfold", None]["qkv_rows_per_token"]
    drafts = pq.read_table(out / "drafts.parquet").to_pylist()
    pruned = next(r for r in drafts if r["mode"] == "spiffy" and r["pruned_from"] == 2)
    assert pruned["drafts"] == 1
    assert pruned["proposed_per_forward"] <= 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["share_below"]["entry"]["0.3"] > 0.5


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--drafts", "0"], "--drafts 0 leaves no drafts to profile."),
        (["--deltas", "nan"], "delta must be a number up to 10, not nan."),
        (["--delta-times", "2000"], "delta_time must be a number up to 10 or left out, not 2000.0."),
        (["--answer-column", "x"], "--answer-column names the column 'x', which does not exist. The columns are prompt,"
         " answer."),
    ],
)  # fmt: skip
def test_profile_refuses_at_once(
    args: list[str], reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert profile.main(["--save", str(tmp_path / "p"), *args]) == 2
    assert capsys.readouterr().err.strip() == f"error: {reason}"


def test_profile_does_not_take_an_empty_name_for_the_current_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert profile.main(["--save", " "]) == 2
    assert capsys.readouterr().err.strip() == "error: Invalid value for --save: it must not be empty."
    assert not list(tmp_path.iterdir())


def test_profile_needs_drafts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert profile.main(["--save", str(tmp_path / "p"), "--mode", "vanilla"]) == 2
    assert capsys.readouterr().err.strip() == "error: --mode vanilla has no drafts to profile."
    assert not list(tmp_path.iterdir())
