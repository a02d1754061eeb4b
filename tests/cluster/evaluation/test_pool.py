"""Grading in processes: order, and what a crash or a hang costs."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import UserError
from cluster.evaluation import pool
from cluster.evaluation.graders import GRADERS, GraderKind
from cluster.evaluation.records import Item, Output
from cluster.evaluation.task import load_task

LIMIT_S = 4.0
GRADER = """
import os, time
from cluster.errors import UserError
from cluster.evaluation.graders import Judgement
def check(references): pass
def blank(reference): return Judgement({"flexible": False, "strict": False})
def judge(reference, text):
    if text == "crash": os._exit(1)
    if text == "killed once" and not os.path.exists("killed"):
        open("killed", "w").close()
        os._exit(1)
    if text == "hang":
        while True: pass
    if text == "sleepy": time.sleep(0.3)
    if text == "raise": raise ValueError("odd output")
    if text == "memory": bytearray(1 << 40)
    return Judgement({"flexible": text != "wrong", "strict": False}, extracted=text)
"""


@pytest.fixture
def strange(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A task whose grader does what the output says."""
    package = tmp_path / "cluster" / "evaluation"
    source = Path(pool.__file__).parent
    package.mkdir(parents=True)
    (tmp_path / "cluster" / "__init__.py").touch()
    (package / "__init__.py").touch()
    for name in ("graderwork.py", "records.py"):
        (package / name).write_text((source / name).read_text())
    shutil.copytree(source / "sandbox", package / "sandbox")
    (tmp_path / "cluster" / "errors.py").write_text((source.parent / "errors.py").read_text())
    (package / "graders").mkdir()
    (package / "graders" / "__init__.py").write_text(
        (source / "graders" / "__init__.py").read_text()
        + f'\nGRADERS["number"] = GraderKind("strange", ("flexible", "strict"), ("answer",), {LIMIT_S})\n'
    )
    (package / "graders" / "strange.py").write_text(GRADER)
    monkeypatch.setattr(pool, "_ROOT", tmp_path)  # where grading processes find the package
    number = GRADERS["number"]
    monkeypatch.setitem(GRADERS, "number", GraderKind(number.module, number.scores, number.reference, LIMIT_S))
    return load_task("gsm8k")


def outputs(*texts: str) -> list[Output]:
    return [Output(Item(str(index), {"answer": "1"}), text) for index, text in enumerate(texts)]


def test_a_crash_or_a_hang_costs_one_output(strange: Any) -> None:
    texts = ["sleepy", "a", "crash", "b", "hang", "c", "raise", "d", "memory", "e", "crash", "wrong", "f"]
    start = time.monotonic()
    grades = list(pool.grade(strange, outputs(*texts), workers=2))
    assert time.monotonic() - start < 60
    assert [grade.id for grade in grades] == [str(index) for index in range(len(texts))]
    failed = {
        "crash": "crashed",
        "hang": f"not done after {LIMIT_S:g} seconds",
        "raise": "odd output",
        "memory": "MemoryError",
    }
    for grade, text in zip(grades, texts, strict=True):
        assert grade.correct == (text not in failed and text != "wrong")
        assert failed.get(text, "") in (grade.problem or "")
        assert set(grade.scores) == {"flexible", "strict"}


def test_an_output_whose_grader_was_killed_is_graded_again(strange: Any) -> None:
    grades = list(pool.grade(strange, outputs("a", "killed once", "b"), workers=1))
    assert [(grade.correct, grade.problem) for grade in grades] == [(True, None)] * 3


def test_no_process_outlives_the_grading(strange: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    popen = pool.subprocess.Popen
    monkeypatch.setattr(pool.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    grades = pool.grade(strange, outputs("a", "hang", "b"), workers=2)
    assert next(grades).correct
    grades.close()  # type: ignore[attr-defined]
    assert started
    assert all(process.poll() is not None for process in started)


def test_a_process_that_cannot_start_ends_the_grading(strange: Any) -> None:
    (pool._ROOT / "cluster" / "evaluation" / "graders" / "strange.py").write_text("import nowhere_to_be_found\n")
    with pytest.raises(UserError, match="did not start"):
        list(pool.grade(strange, outputs("a"), workers=1))


def test_nothing_to_grade_is_no_grade() -> None:
    assert list(pool.grade(load_task("gsm8k"), [])) == []
