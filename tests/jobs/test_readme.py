"""The README names every flag with its default, and nothing that does not exist."""

from __future__ import annotations

import re
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest

from cluster.config import flag_fields
from cluster.evaluation.settings import EvaluationConfig
from jobs.calibrate import calibrate

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_every_flag_is_in_the_table() -> None:
    rows = dict(re.findall(r"^\| `--([a-z-]+)` \| (.*?) \|", README, flags=re.MULTILINE))
    flags = {f.name.replace("_", "-"): f.default for f in (*flag_fields(), *fields(EvaluationConfig))}
    assert set(rows) == set(flags) | {"config"}
    for name, default in flags.items():
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert float(rows[name]) == default, name


def test_the_two_commands_open_the_readme() -> None:
    head = README[:600]
    assert head.index("make demo") < head.index("make test")


def test_no_flag_is_mentioned_that_does_not_exist() -> None:
    names = {f.name for f in (*flag_fields(), *fields(EvaluationConfig))} | set(signature(calibrate).parameters)
    flags = {f"--{name.replace('_', '-')}" for name in names | {"config", "working_dir"}}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) <= flags


def test_the_library_example_answers_right(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    assert code is not None
    exec(code[1], {})
    assert "The answer is 24. stop" in capsys.readouterr().out
