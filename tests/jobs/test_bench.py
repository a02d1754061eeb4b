"""The bench runs as a script and ends with one line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import bench

ROOT = Path(__file__).resolve().parents[2]


def run_bench(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "jobs" / "bench.py"), *args]
    # Users do not run Triton in its interpreter, as the tests' own process does.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment, check=False)


def test_the_last_line_is_json_with_all_modes(tmp_path: Path) -> None:
    lines = (ROOT / "jobs" / "prompts.jsonl").read_text().splitlines()
    (tmp_path / "two.jsonl").write_text("\n".join(lines[:2]))
    done = run_bench(
        "--size", "model", "--prompts", "500", "--prompt-file", str(tmp_path / "two.jsonl"), "--repeats", "1",
        "--max-new-tokens", "96", "--delta-time", "0.1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    (part,) = report["parts"]
    assert part["settings"]["prompts"] == 2  # those that were there
    rows = {row["name"]: row for row in part["records"]}
    assert rows["spiffy"]["agreement"] == 1.0
    assert rows["vanilla"]["accuracy"] == 1.0
    assert rows["spiffy"]["forwards"] < rows["vanilla"]["forwards"]
    assert rows["specfold 0.1"]["recomputed_qkv_rows_per_token"] < rows["spiffy"]["recomputed_qkv_rows_per_token"]
    assert 0 < rows["specfold 0.1"]["fold_rate"] < 1
    computed = [
        rows[name]["recomputed_qkv_rows_per_token"] for name in ("delta_time 0.1", "sub-block cache", "vanilla")
    ]
    assert computed == sorted(computed)
    assert 0 < rows["specfold 0.1, delta_time 0.1"]["time_fold_rate"] < 1


def test_what_auto_chooses_stands_beside_the_fixed_numbers(tmp_path: Path) -> None:
    few = ["--prompts", "2", "--repeats", "1", "--max-new-tokens", "8", "--choose-seconds", "2"]
    done = run_bench("auto", "--batch-size", "2", "--drafts", "2", *few)
    assert done.returncode == 0, done.stderr
    (part,) = json.loads(done.stdout.splitlines()[-1])["parts"]
    plain, two, auto = part["records"]
    assert [r["name"] for r in part["records"]] == ["0", "2", "auto"]
    assert plain["over_vanilla"] == 1.0
    assert two["tokens_per_forward"] > plain["tokens_per_forward"]
    assert max(plain["over_best"], two["over_best"]) == 1.0
    assert auto["drafts"] == auto["choice"]["drafts"]
    assert auto["drafts"] in {trial["drafts"] for trial in auto["choice"]["trials"]}
    (tmp_path / "auto.json").write_text(done.stdout)
    done = run_bench("report", str(tmp_path / "auto.json"), "--plot", str(tmp_path / "plot.png"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_model_is_one_sentence() -> None:
    done = run_bench("--model", "/nothing/here")
    assert done.returncode == 2
    assert done.stderr.strip() == "error: The model folder /nothing/here does not exist."


def test_wrong_settings_are_one_sentence(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    for args, sentence in (
        (["--repeats", "0"], "argument --repeats: it must be at least 1, not 0"),
        (["--prompt-file", str(empty)], f"error: {empty} holds no prompts."),
        (["--prompt-file", "/nothing"], "error: /nothing cannot be read as JSONL"),
        (["--draft-graph", "/nothing"], "error: The draft graph /nothing cannot be read"),
        (["--max-new-tokens", "99999", "--prompts", "1"], "error: prompt 1 cannot be decoded, so nothing is"),
    ):
        done = run_bench(*args)
        assert done.returncode == 2
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr


def test_random_weights_on_no_device_or_of_no_type_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for args, sentence in (
        (["--device", "nothing"], "error: device 'nothing' is not a device torch knows."),
        (
            ["--device", "cpu", "--dtype", "float"],
            "error: dtype must be one of float32, bfloat16, float16, not 'float'.",
        ),
    ):
        assert bench.main(["step", *args]) == 2
        assert capsys.readouterr().err.strip() == sentence
    with pytest.raises(SystemExit) as refused:
        bench.main(["auto", "--choose-seconds", "nan"])
    assert refused.value.code == 2
    assert "argument --choose-seconds: it must be above 0, not nan" in capsys.readouterr().err


def test_parts_of_the_same_sources_merge(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    part = {"date": "2026-01-01", "chip": "X", "torch": "2", "sources": "abc"}
    record = {"shape": "s", "batch_size": 1, "drafts": 0, "fold_share": None, "step_ms": 2.0, "floor_ms": 1.0}
    step = {"kind": "step", "settings": {"repeats": 3}, "records": [record]}
    paths[0].write_text("a table\n" + json.dumps(part | {"parts": [step]}))
    paths[1].write_text(json.dumps(part | {"parts": [step]}))
    paths[2].write_text(json.dumps(part | {"parts": [step], "sources": "other"}))
    done = run_bench("report", str(paths[0]), str(paths[1]), "--plot", str(tmp_path / "plot.png"))
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])["parts"]) == 2
    done = run_bench("report", str(paths[0]), "--plot", str(tmp_path / "plot.words"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: the plot {tmp_path / 'plot.words'} cannot be written: Format 'words'")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    done = run_bench("report", *map(str, paths))
    assert done.returncode == 2
    assert done.stderr.strip() == f"error: {paths[2]} has sources other, the parts before it abc."
    done = run_bench("report", __file__)
    assert "does not end with a line of JSON" in done.stderr


def test_a_step_needs_a_gpu() -> None:
    done = run_bench("step", "--device", "cpu", "--shape", "nemotron-3b")
    assert done.returncode == 2
    assert done.stderr.strip() == "error: backend triton needs a CUDA device, not cpu; torch runs everywhere."


def test_a_report_sets_what_was_measured_beside_the_targets(tmp_path: Path) -> None:
    def step(drafts: int, fold: float | None, ms: float) -> dict[str, object]:
        known = {"shape": "nemotron-8b", "batch_size": 1, "floor_ms": 3.0}
        return known | {"drafts": drafts, "fold_share": fold, "step_ms": ms}

    steps = [step(0, None, 5.1), step(8, None, 9.0), step(8, 0.85, 6.0)]
    run = {"shape": "nemotron-8b", "batch_size": 1, "mode": "vanilla", "over_official": 5.0}
    parts = [
        {"kind": "step", "settings": {}, "records": steps},
        {"kind": "throughput", "settings": {}, "records": [run | {"efficiency": 0.95, "idle_us": 25.0}]},
    ]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"date": "2026-01-01", "chip": "X", "torch": "2", "sources": "abc", "parts": parts}))
    done = run_bench("report", str(path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\ntargets\n")[1].splitlines()[1:-1]
    assert [line.split()[-3:] for line in lines] == [
        ["5.100", "5.000", "no"],
        ["6.000", "6.200", "yes"],
        ["1.500", "1.400", "yes"],
        ["5.000", "4.800", "yes"],
        ["0.950", "0.900", "yes"],
        ["25.000", "20.000", "no"],
    ]
