"""Task files: the questions that they make of rows, and what is said of a wrong one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from cluster.errors import UserError
from cluster.evaluation.task import bundled_tasks, data_fingerprint, load_task

ROWS = [{"n": n, "question": f"What is {n} + 1?", "total": str(n + 1)} for n in range(6)]
FORM: dict[str, Any] = {
    "description": "Sums.",
    "data": {
        "splits": {
            "few": {"file": "sums/rows.jsonl", "where": "n < 2"},
            "rest": {"file": "sums/rows.jsonl", "where": "n >= 2"},
        }
    },
    "split": "rest",
    "id": "sum-{{ n }}",
    "prompt": "Q: {{ question }}\nA:",
    "chat_prompt": "{{ question }}",
    "answer": " {{ total }}",
    "reference": {"answer": "{{ total }}"},
    "fewshot": {"count": 1, "split": "few"},
    "raw_stop": ["Q:"],
    "max_new_tokens": 8,
    "grader": "number",
    "metrics": {"exact_match": {"score": "flexible"}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "sums.yaml"
    path.write_text(yaml.safe_dump({**FORM, **changes}, sort_keys=False))
    return path


def test_one_file_is_all_that_a_new_task_takes(folder: Path) -> None:
    items = list(load_task(write(folder)).items(str(folder)))
    assert [item.id for item in items] == ["sum-2", "sum-3", "sum-4", "sum-5"]
    assert items[0].messages == [
        {"role": "user", "content": "What is 0 + 1?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "What is 2 + 1?"},
    ]
    assert items[0].prompt is None
    assert items[0].reference == {"answer": "3"}


def test_raw_prompts_are_continued_after_their_examples(folder: Path) -> None:
    [item] = load_task(write(folder)).items(str(folder), limit=1, fewshot=2, chat=False)
    assert item.prompt == "Q: What is 0 + 1?\nA: 1\n\nQ: What is 1 + 1?\nA: 2\n\nQ: What is 2 + 1?\nA:"
    assert item.messages is None


def test_a_question_is_not_its_own_example(folder: Path) -> None:
    first, second = load_task(write(folder)).items(str(folder), split="few", fewshot=2)
    assert [turn["content"] for turn in first.messages or []] == ["What is 1 + 1?", "2", "What is 0 + 1?"]
    assert [turn["content"] for turn in second.messages or []] == ["What is 0 + 1?", "1", "What is 1 + 1?"]


def test_rows_may_come_from_any_file_and_are_the_same(folder: Path) -> None:
    task = load_task(write(folder))
    pq.write_table(pa.Table.from_pylist(ROWS[2:]), folder / "mine.parquet")
    mine = list(task.items(str(folder / "mine.parquet"), fewshot=0))
    theirs = list(task.items(str(folder), fewshot=0))
    assert mine == theirs
    assert data_fingerprint(mine) == data_fingerprint(theirs)
    assert data_fingerprint(list(task.items(str(folder), fewshot=1))) != data_fingerprint(theirs)


def test_columns_keep_their_values_and_lose_the_nulls_that_tables_put_in(folder: Path) -> None:
    rows = [{"n": 2, "total": "3", "question": "?", "extra": [{"a": 1, "b": None}, {"a": None, "b": "x"}]}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "mine.parquet")
    task = load_task(write(folder, reference={"answer": "{{ total }}", "extra": {"column": "extra"}}))
    [item] = task.items(str(folder / "mine.parquet"), fewshot=0)
    assert item.reference["extra"] == [{"a": 1}, {"b": "x"}]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"promt": "x"}, ["promt", "did you mean prompt"]),
        ({"grader": "nobody"}, ["nobody", "number, math, code, instructions"]),
        ({"split": "elsewhere"}, ["elsewhere"]),
        ({"max_new_tokens": 0}, ["max_new_tokens"]),
        ({"max_new_tokens": "8"}, ["max_new_tokens"]),
        ({"metrics": {"exact_match": {"score": "passed"}}}, ["exact_match", "flexible, strict"]),
        ({"reference": {"gold": "x"}}, ["reference.answer"]),
        ({"prompt": "{{ question"}, ["prompt", "Jinja2"]),
        ({"data": {"splits": {"rest": {"where": "n >"}}}}, ["file or hub"]),
        ({"data": {"splits": {"rest": {"file": "a", "where": "n >"}, "few": {"file": "a"}}}}, ["where", "Jinja2"]),
        ({"answer": None}, ["answer"]),
    ],
)
def test_a_wrong_file_is_one_clear_sentence(folder: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load_task(write(folder, **changes))
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)


def test_a_key_that_stands_twice_is_refused(folder: Path) -> None:
    path = Path(write(folder))
    path.write_text(path.read_text() + "\ngrader: number\n")
    with pytest.raises(UserError, match=r"^The task file .* has the key 'grader' twice, again in line \d+\.$"):
        load_task(str(path))


def test_wrong_data_is_one_clear_sentence(folder: Path) -> None:
    task = load_task(write(folder))
    cases: list[tuple[Any, str]] = [
        (lambda: task.items(str(folder / "sums"), split="other"), "no 'other'"),
        (lambda: task.items(str(folder / "nowhere")), "does not exist"),
        (lambda: task.items(None), "not on the hub"),
        (lambda: task.items(str(folder), fewshot=3), "2 examples, fewer than the 3"),
        (lambda: task.items(str(folder / "sums" / "rows.jsonl")), "a single file does not hold"),
        (lambda: load_task(write(folder, chat_prompt="{{ missing }}")).items(str(folder)), "'missing' is undefined"),
        (lambda: load_task(write(folder, id="same")).items(str(folder)), "the id 'same'"),
    ]
    for items, words in cases:
        with pytest.raises(UserError) as error:
            list(items())
        assert words in str(error.value)
        assert "\n" not in str(error.value)
    (folder / "sums" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[1:4]) + '{"n": \n')
    with pytest.raises(UserError, match=r"Row 4 of .* cannot be read"):
        list(task.items(str(folder), fewshot=0))


def test_the_bundled_tasks_ask_what_the_benchmarks_ask(shared: Path) -> None:
    assert bundled_tasks() == ["gsm8k", "humaneval", "ifeval", "math500", "mbpp"]
    data = str(shared / "data")
    sizes = {name: len(list(load_task(name).items(data))) for name in ("gsm8k", "humaneval", "ifeval", "mbpp")}
    assert sizes == {"gsm8k": 1319, "humaneval": 164, "ifeval": 541, "mbpp": 500}
    [gsm8k] = load_task("gsm8k").items(data, limit=1, chat=False)
    assert (gsm8k.prompt or "").count("Question: ") == 6
    [mbpp] = load_task("mbpp").items(data, limit=1, chat=False)
    assert (mbpp.prompt or "").count("[DONE]") == 3
    assert mbpp.id == "MBPP/11"


def test_an_unknown_task_names_those_that_exist() -> None:
    with pytest.raises(UserError, match="gsm8k, humaneval, ifeval, math500, mbpp"):
        load_task("gsm9k")
