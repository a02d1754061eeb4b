"""Right answers are graded right, wrong and hostile ones wrong, and as other people's graders do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from grading import trials

from cluster.errors import UserError
from cluster.evaluation.graders import code, ifeval, math_answer
from cluster.evaluation.pool import grade
from cluster.evaluation.records import Item, Output
from cluster.evaluation.task import load_task

MATH_ROWS = [json.loads(line) for line in (trials.DATA / "math_rows.jsonl").read_text().splitlines()]


def equal(answer: str, text: str) -> bool:
    return bool(math_answer.judge({"answer": answer}, text).scores["equal"])


def test_all_right_answers_of_gsm8k_are_right(shared: Path) -> None:
    for split in ("test", "train"):
        task = load_task("gsm8k")
        grades = trials.grade_gold(task, shared, split)
        assert len(grades) == {"test": 1319, "train": 7473}[split]
        assert all(metric.of(grades) == 1.0 for metric in task.metrics.values())


def test_right_answers_to_math_rows_are_right(tmp_path: Path) -> None:
    path = tmp_path / "math.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in MATH_ROWS))
    task = load_task("math500")
    items = list(task.items(str(path)))
    assert len(items) >= 30
    grades = list(grade(task, [Output(item, item.gold or "") for item in items]))
    assert [grade.id for grade in grades if not grade.correct] == []


@pytest.mark.parametrize("row", MATH_ROWS, ids=lambda row: row["unique_id"])
def test_math_knows_other_forms_and_other_answers(row: dict) -> None:
    for form in row["right"]:
        assert equal(row["answer"], f"Some steps.\n\nSo it is $\\boxed{{{form}}}$."), form
    for form in row["wrong"]:
        assert not equal(row["answer"], f"Some steps.\n\nSo it is $\\boxed{{{form}}}$."), form


@pytest.mark.parametrize(
    "text", ["", "\\boxed{", "\\frac{", "$$$$", "\\boxed{\\frac{1}{0}}", "{" * 5000, "\\left(" * 3000, "$" * 10_001]
)
def test_broken_latex_is_wrong(text: str) -> None:
    assert not equal("1", text)


@pytest.mark.parametrize("text", trials.instruction_texts(), ids=lambda text: text["instruction"])
def test_every_instruction_tells_good_from_bad(text: dict) -> None:
    reference = {
        "prompt": "Where do swifts sleep?", "instructions": [text["instruction"]], "arguments": [text["arguments"]]
    }  # fmt: skip
    ifeval.check([reference])
    assert ifeval.judge(reference, text["good"]).scores["prompt_level_strict_acc"] is True
    assert ifeval.judge(reference, text["bad"]).scores["prompt_level_strict_acc"] is False
    assert not any(ifeval.judge(reference, "").scores.values())


def test_instructions_count_singly_and_loosely() -> None:
    task = load_task("ifeval")
    names = ["punctuation:no_comma", "keywords:existence", "startend:end_checker"]
    arguments = [{}, {"keywords": ["harbor"]}, {"end_phrase": "The end."}]
    two = Item("a", {"prompt": "?", "instructions": names[:2], "arguments": arguments[:2]})
    three = Item("b", {"prompt": "?", "instructions": names, "arguments": arguments})
    outputs = [Output(two, "Sure, here it is:\nThe harbor."), Output(three, "Nothing"), Output(two, "A harbor.", 1)]
    grades = list(grade(task, outputs, workers=1))
    scores = {name: metric.of(grades) for name, metric in task.metrics.items()}
    assert scores == {
        "prompt_level_strict_acc": 1 / 3, "inst_level_strict_acc": 4 / 7,
        "prompt_level_loose_acc": 2 / 3, "inst_level_loose_acc": 5 / 7,
    }  # fmt: skip
    assert [(grade.id, grade.sample_id, grade.correct) for grade in grades] == [
        ("a", 0, False), ("b", 0, False), ("a", 1, True)
    ]  # fmt: skip


def test_missing_sentence_data_is_said_before_anything_is_graded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nltk.data.path", [])
    monkeypatch.setattr("nltk.download", lambda *_, **__: pytest.fail("it was downloaded"))
    needs = {"prompt": "?", "instructions": ["length_constraints:number_sentences"], "arguments": [{}]}
    with pytest.raises(UserError, match=r"python -m nltk\.downloader punkt_tab"):
        grade(load_task("ifeval"), [Output(Item("a", needs), "One. Two.")])


@pytest.mark.parametrize(("name", "every"), [("gsm8k", 1), ("ifeval", 4), ("humaneval", 24)])
def test_grades_are_those_of_other_graders(name: str, every: int, shared: Path) -> None:
    if load_task(name).needs_code_execution:
        trials.skip_without_sandbox()
    count, found = trials.differences(name, shared, every)
    assert count >= 250 // every
    assert found == []


@pytest.mark.parametrize(("name", "split", "every"), [("humaneval", None, 16), ("mbpp", "all", 80)])
def test_right_programs_pass(name: str, split: str | None, every: int, shared: Path) -> None:
    trials.skip_without_sandbox()
    grades = trials.grade_gold(load_task(name), shared, split, every)
    assert [(grade.id, grade.problem) for grade in grades if not grade.correct] == []


def test_set_up_code_of_mbpp_comes_after_the_solution(shared: Path) -> None:
    trials.skip_without_sandbox()
    task = load_task("mbpp")
    wanted = {"MBPP/367", "MBPP/927"}
    items = [item for item in task.items(str(shared / "data"), split="all", fewshot=0) if item.id in wanted]
    grades = list(grade(task, [Output(item, item.gold or "") for item in items], allow_code_execution=True))
    assert [grade.problem for grade in grades] == [None, None]


SOLUTION = "def f(x):\n    return x + 1\n"


@pytest.mark.parametrize(
    "text",
    [
        SOLUTION,
        f"```python\n{SOLUTION}```",
        f"Here it is:\n\n```\n{SOLUTION}```\nUse it so:\n```python\nprint(f(1))\n```",
        f"First try:\n```python\ndef f(x):\n    return x\n```\nBetter:\n```python\n{SOLUTION}```",
        f"```python\n{SOLUTION}",
        f"  ```python\n{SOLUTION}```",
    ],
)
def test_code_is_found_in_answers(text: str) -> None:
    namespace: dict = {}
    exec(code.code_in(text, ["f"]), namespace)
    assert namespace["f"](1) == 2


def test_a_continuation_ends_where_a_block_begins() -> None:
    assert code.code_in("    return 1\n```\nThat is all.", ["f"]) == "    return 1\n"


def test_code_runs_only_where_it_is_allowed() -> None:
    item = Item("a", {"before": "", "after": "assert f(1) == 2", "defines": ["f"]})
    with pytest.raises(UserError, match="--allow-code-execution"):
        grade(load_task("mbpp"), [Output(item, SOLUTION)])


def test_a_comparison_that_takes_too_long_is_a_problem_on_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_answer, "_TIMEOUT_S", 1)
    judgement = math_answer.judge({"answer": "7"}, r"\boxed{10!!!!!}")
    assert not judgement.scores["equal"]
    assert judgement.problem == "Comparing took more than 1 seconds."
    assert math_answer.judge({"answer": "7"}, r"\boxed{8}").problem is None


@pytest.mark.parametrize(
    ("check", "reference", "sentence"),
    [
        (ifeval.check, {"instructions": [], "arguments": []}, "no list of instructions"),
        (ifeval.check, {"instructions": None, "arguments": []}, "no list of instructions"),
        (code.check, {"before": "", "after": "assert f('''"}, "tests are not Python"),
        (code.check, {"before": None, "after": "assert f(1)"}, "is no text"),
    ],
)
def test_a_row_that_cannot_be_graded_is_one_sentence(check: Any, reference: dict, sentence: str) -> None:
    """Else the task's fault would count as the model's, or come as a traceback after all decoding."""
    with pytest.raises(UserError, match=sentence):
        check([reference])
