"""The bench runs as a script and ends with one line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_bench(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "jobs" / "bench.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)


def test_the_last_line_is_json_with_all_modes() -> None:
    done = run_bench("--size", "bundled", "--prompts", "2", "--repeats", "1", "--max-new-tokens", "24")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    rows = {row["name"]: row for row in report["results"]["bundled"]}
    assert rows["spiffy"]["agreement"] == 1.0
    assert rows["spiffy"]["forwards"] < rows["vanilla"]["forwards"]
    assert rows["specfold"]["recomputed_qkv_rows_per_token"] < rows["spiffy"]["recomputed_qkv_rows_per_token"]
    assert 0 < rows["specfold"]["fold_rate"] < 1


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
    ):
        done = run_bench(*args)
        assert done.returncode == 2
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr
