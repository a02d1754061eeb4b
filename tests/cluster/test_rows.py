"""Rows: every form of prompt, and every way in which a row can be wrong, which is an error row and nothing more."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.config import JobConfig
from cluster.input.rows import INPUT_ERROR_KINDS, RowPreparer
from specfold import ConfigError, ModelError
from tests.cluster.make_inputs import (
    CONTEXT,
    MASK_ID,
    PAD_ID,
    STOP_ID,
    VOCAB,
    as_text,
    make_model,
    prepare_all,
    user_turn,
    write_lines,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def one(tmp_path: Path, model: Path, row: Any, **settings: Any) -> Any:
    """The row prepared, between two good ones that must not notice it."""
    good = {"prompt": "good", "question": "good", "id": 1}
    prompts = [good, row, good]
    (before, middle, after), table = prepare_all(write_lines(tmp_path / "rows.jsonl", prompts), model, **settings)
    assert [before.row_id, middle.row_id, after.row_id] == [0, 1, 2]
    assert before.error is after.error is None
    if "id" in table.column_names:
        assert table["id"].to_pylist()[::2] == [1, 1]
    return middle


def test_a_prompt_is_a_users_turn(tmp_path: Path, model: Path) -> None:
    assert as_text(one(tmp_path, model, {"prompt": "Hé?\n"}).prompt_ids) == user_turn("Hé?\n")
    assert as_text(one(tmp_path, model, {"prompt": "a"}, system_prompt="Brief.").prompt_ids) == user_turn("a", "Brief.")


def test_raw_prompts(tmp_path: Path, model: Path) -> None:
    row = one(tmp_path, model, {"prompt": "<|im_start|>a"}, chat_template="none")
    assert as_text(row.prompt_ids) == "[[<|im_start|>]]a"


def test_messages(tmp_path: Path, model: Path) -> None:
    system, user = {"role": "system", "content": "S"}, {"role": "user", "content": "U"}
    assert as_text(one(tmp_path, model, {"messages": [system, user]}).prompt_ids) == user_turn("U", "S")
    row = one(tmp_path, model, {"messages": [system, user]}, system_prompt="other")
    assert as_text(row.prompt_ids) == user_turn("U", "S")
    assert as_text(one(tmp_path, model, {"messages": [user]}, system_prompt="X").prompt_ids) == user_turn("U", "X")
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert as_text(one(tmp_path, model, {"messages": parts}).prompt_ids) == user_turn("ab")


def test_token_ids_are_taken_as_they_are(tmp_path: Path, model: Path) -> None:
    """Stop and pad ids in a prompt are legal."""
    row = one(tmp_path, model, {"prompt_token_ids": [5, STOP_ID, PAD_ID, 5]})
    assert row.prompt_ids == [5, STOP_ID, PAD_ID, 5]


def test_prompt_column_and_template(tmp_path: Path, model: Path) -> None:
    row = {"question": "Q", "prompt": "other", "n": 3}
    assert as_text(one(tmp_path, model, row, prompt_column="question").prompt_ids) == user_turn("Q")
    template = "{{ question }}/{{ prompt }}/{{ n + 1 if n is defined else '' }}/{{ row['question'] }}\n"
    assert as_text(one(tmp_path, model, row, prompt_template=template).prompt_ids) == user_turn("Q/other/4/Q\n")


BAD_ROWS = [
    (b'{"prompt": ', "invalid_json", "The line is not valid JSON: unexpected end of data at character 12."),
    (b'{"prompt": NaN}', "invalid_json", "The line is not valid JSON: unexpected character, expected a JSON value"),
    (b'{"prompt": "\xff"}', "invalid_utf8", "The line is not UTF-8: byte 13 is 0xff."),
    (b'{"prompt": "\\ud800"}', "invalid_utf8", "The line holds a lone surrogate, which is no character."),
    (b'["prompt"]', "wrong_type", "The line holds a list, not a JSON object."),
    (b"17", "wrong_type", "The line holds a number, not a JSON object."),
    ({"id": 5}, "missing_prompt", "The row has none of prompt, messages and prompt_token_ids."),
    ({"prompt": None}, "missing_prompt", "The row has none of prompt, messages and prompt_token_ids."),
    ({"prompt": "a", "messages": []}, "ambiguous_prompt", "The row has prompt and messages; one is allowed."),
    ({"prompt": "a", "prompt_token_ids": [1]}, "ambiguous_prompt", "The row has prompt and prompt_token_ids; one is"),
    ({"prompt": 3}, "wrong_type", "The column prompt must be a string, not a number."),
    ({"prompt": ["a"]}, "wrong_type", "The column prompt must be a string, not a list."),
    ({"messages": "hi"}, "wrong_type", "The column messages must be a list, not a string."),
    ({"messages": ["hi"]}, "wrong_type", "A message must be an object with role and content, not a string."),
    ({"messages": [{"content": "a"}]}, "wrong_type", "A message's role must be a string, not null."),
    ({"messages": [{"role": "user"}]}, "wrong_type", "A message's content must be a string, not null."),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "wrong_type",
        "A part of a message's content is not text.",
    ),
    (
        {"messages": [{"role": "forbidden", "content": "a"}]},
        "template_error",
        "The chat template fails: no such role.",
    ),
    ({"messages": []}, "empty_prompt", "The list of messages is empty."),
    ({"prompt": ""}, "empty_prompt", "The prompt is empty."),
    ({"prompt_token_ids": []}, "empty_prompt", "The prompt has no tokens."),
    ({"prompt_token_ids": [1, 2.5]}, "wrong_type", "The column prompt_token_ids must be a list of whole numbers."),
    ({"prompt_token_ids": [True]}, "wrong_type", "The column prompt_token_ids must be a list of whole numbers."),
    ({"prompt_token_ids": [1, VOCAB]}, "invalid_token_id", "The prompt holds a token id outside 0..299."),
    ({"prompt_token_ids": [-1]}, "invalid_token_id", "The prompt holds a token id outside 0..299."),
    ({"prompt_token_ids": [1, MASK_ID]}, "mask_in_prompt", "The prompt holds the mask token (id 259)."),
    (
        {"prompt_token_ids": [1] * (CONTEXT - 15)},
        "too_long",
        "497 prompt tokens and 16 new ones exceed the context of 512.",
    ),
    ({"prompt": "x" * CONTEXT}, "too_long", "531 prompt tokens and 16 new ones exceed the context of 512."),
]


@pytest.mark.parametrize(("row", "kind", "sentence"), BAD_ROWS)
def test_a_bad_row_is_an_error_row(tmp_path: Path, model: Path, row: Any, kind: str, sentence: str) -> None:
    prepared = one(tmp_path, model, row)
    assert prepared.error_kind == kind
    assert kind in INPUT_ERROR_KINDS
    assert prepared.error.startswith(sentence)
    assert prepared.prompt_ids is None


def test_the_longest_prompt_that_fits(tmp_path: Path, model: Path) -> None:
    assert one(tmp_path, model, {"prompt_token_ids": [1] * (CONTEXT - 16)}).error is None


def test_a_broken_line_has_null_columns(tmp_path: Path, model: Path) -> None:
    lines = [{"prompt": "a", "id": 1}, b"{", {"prompt": "", "id": 3}]
    _, table = prepare_all(write_lines(tmp_path / "a.jsonl", lines), model)
    assert table["id"].to_pylist() == [1, None, 3]


def test_only_broken_lines(tmp_path: Path, model: Path) -> None:
    rows, table = prepare_all(write_lines(tmp_path / "a.jsonl", [b"{", b"}"]), model)
    assert [row.error_kind for row in rows] == ["invalid_json"] * 2
    assert table.column_names == []


def test_template_failures(tmp_path: Path, model: Path) -> None:
    row = one(tmp_path, model, {"prompt": "p"}, prompt_template="{{ question }}")
    assert (row.error_kind, row.error) == ("template_error", "The prompt template fails: 'question' is undefined.")
    row = one(tmp_path, model, {"question": "", "id": 2}, prompt_template="{{ question }}")
    assert (row.error_kind, row.error) == ("empty_prompt", "The prompt is empty.")
    attack = "{{ question.__class__.__mro__ if id == 2 else question }}"
    row = one(tmp_path, model, {"question": "q", "id": 2}, prompt_template=attack)
    assert row.error_kind == "template_error"
    assert "unsafe" in row.error


def test_messages_need_a_chat_template(tmp_path: Path, model: Path) -> None:
    messages = {"messages": [{"role": "user", "content": "a"}]}
    row = one(tmp_path, model, messages, chat_template="none")
    assert (row.error_kind, row.error) == (
        "template_error", "The row has messages, but there is no chat template to write them with.",
    )  # fmt: skip


def test_a_model_without_a_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    bare = make_model(tmp_path / "bare", with_tokenizer=False)
    lines = [{"prompt_token_ids": [1, 2]}, {"prompt": "a"}]
    (ids, text), _ = prepare_all(write_lines(tmp_path / "a.jsonl", lines), bare)
    assert ids.prompt_ids == [1, 2]
    assert (text.error_kind, text.error) == (
        "wrong_type", "The prompt is text, but the model has no tokenizer; give prompt_token_ids.",
    )  # fmt: skip


def test_csv_rows(tmp_path: Path, model: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'prompt,n,t\n"a\nb",1,x\nonly\n\xff,3,y\n,4,z\n"q",,"",\nlast,6,w\n')
    rows, table = prepare_all(tmp_path / "a.csv", model, shard_rows=10)
    assert [row.error_kind for row in rows] == [
        None, "invalid_csv", "invalid_utf8", "empty_prompt", "invalid_csv", None,
    ]  # fmt: skip
    assert rows[1].error == "The record has 1 fields where the header has 3."
    assert as_text(rows[0].prompt_ids) == user_turn("a\nb")
    assert table["n"].to_pylist() == [1, None, None, 4, None, 6]
    assert table["t"].to_pylist() == ["x", None, None, "z", None, "w"]


def test_text_lines(tmp_path: Path, model: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\xff\nthree\n")
    rows, table = prepare_all(tmp_path / "a.txt", model)
    assert [row.error_kind for row in rows] == [None, "invalid_utf8", None]
    assert table.column_names == []
    _, table = prepare_all(tmp_path / "a.txt", model, carry="prompt")
    assert table["prompt"].to_pylist() == ["one", None, "three"]


def test_parquet_rows_keep_their_types(tmp_path: Path, model: Path) -> None:
    day = datetime.date(2024, 1, 31)
    messages = [[{"role": "user", "content": "m"}], None]
    table = pa.table({"prompt": [None, "p"], "messages": messages, "day": pa.array([day, day], pa.date32())})
    pq.write_table(table.append_column("small", pa.array([1, None], pa.int8())), tmp_path / "a.parquet")
    rows, carried = prepare_all(tmp_path / "a.parquet", model)
    assert [as_text(row.prompt_ids) for row in rows] == [user_turn("m"), user_turn("p")]
    assert carried.schema.equals(pa.schema({"day": pa.date32(), "small": pa.int8()}))
    assert carried["day"].to_pylist() == [day, day]
    rows, _ = prepare_all(tmp_path / "a.parquet", model, prompt_template="{{ day.year }}")
    assert as_text(rows[0].prompt_ids) == user_turn("2024")


def test_text_in_parquet_that_is_not_utf8(tmp_path: Path, model: Path) -> None:
    broken = pa.array([b"good", b"\xff", b"fine"]).view(pa.string())
    pq.write_table(pa.table({"prompt": broken, "n": [1, 2, 3]}), tmp_path / "a.parquet")
    rows, table = prepare_all(tmp_path / "a.parquet", model)
    assert [row.error_kind for row in rows] == [None, "invalid_utf8", None]
    assert table["n"].to_pylist() == [1, None, 3]


def test_equal_rows_are_all_run(tmp_path: Path, model: Path) -> None:
    rows, table = prepare_all(write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "id": 7}] * 3), model)
    assert [row.row_id for row in rows] == [0, 1, 2]
    assert all(row.error is None for row in rows)
    assert table["id"].to_pylist() == [7, 7, 7]


def test_batch_lines(tmp_path: Path, model: Path) -> None:
    def batch(**body: Any) -> dict[str, Any]:
        return {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}

    message = [{"role": "user", "content": "hi"}]
    options = {"max_tokens": 5, "temperature": 1, "top_p": 0.5, "stop": "X", "seed": 3, "model": "m"}
    lines = [
        batch(messages=message, **options), batch(prompt="raw", stop=["A", "B"], temperature=None),
        batch(prompt=[1, 2]), batch(messages=message, top_k=3), batch(messages=message, max_tokens="5"),
        batch(messages=message, temperature=-1), batch(messages=message, max_tokens=0), batch(max_tokens=3),
        batch(messages=message, prompt="a"), batch(prompt="a", max_tokens=CONTEXT),
        batch(prompt="a") | {"prompt": "b"}, {"custom_id": "c", "prompt": "plain", "body": "column"},
    ]  # fmt: skip
    rows, table = prepare_all(write_lines(tmp_path / "a.jsonl", lines), model)
    assert as_text(rows[0].prompt_ids) == user_turn("hi")
    assert (rows[0].max_new_tokens, rows[0].temperature, rows[0].top_p, rows[0].stop, rows[0].seed) == (
        5, 1.0, 0.5, ("X",), 3,
    )  # fmt: skip
    assert as_text(rows[1].prompt_ids) == user_turn("raw")
    assert (rows[1].stop, rows[1].temperature) == (("A", "B"), None)
    assert rows[2].prompt_ids == [1, 2]
    assert [(row.error_kind, row.error) for row in rows[3:]] == [
        ("unsupported_option", "The option 'top_k' in the row's body is not supported."),
        ("wrong_type", "The option 'max_tokens' in the row's body must be a whole number, not a string."),
        ("wrong_type", "In the row's body temperature must be between 0 and 100, not -1.0."),
        ("wrong_type", "In the row's body max_tokens must be at least 1, not 0."),
        ("missing_prompt", "The row has none of prompt, messages and prompt_token_ids."),
        ("ambiguous_prompt", "The row has prompt and messages; one is allowed."),
        ("too_long", "20 prompt tokens and 512 new ones exceed the context of 512."),
        ("ambiguous_prompt", "The row has a body and a prompt beside it; one is allowed."),
        (None, None),
    ]
    assert table.column_names == ["custom_id", "method", "url"]


@pytest.mark.parametrize("format", ["jsonl", "json", "csv", "parquet"])
def test_every_format_gives_the_same_prompts(tmp_path: Path, model: Path, format: str) -> None:
    rows = [{"prompt": f"p{i}", "n": i, "s": f"s{i}"} for i in range(9)]
    path = tmp_path / f"a.{format}"
    if format == "jsonl":
        write_lines(path, rows)
    elif format == "json":
        path.write_text(json.dumps(rows))
    elif format == "csv":
        path.write_text("prompt,n,s\n" + "".join(f"{r['prompt']},{r['n']},{r['s']}\n" for r in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    prepared, table = prepare_all(path, model, input_prefix="in_")
    assert [as_text(row.prompt_ids) for row in prepared] == [user_turn(f"p{i}") for i in range(9)]
    assert table.to_pydict() == {"in_n": list(range(9)), "in_s": [f"s{i}" for i in range(9)]}


def test_settings_that_the_model_cannot_decode_with(model: Path) -> None:
    with pytest.raises(ConfigError, match="mode ar exists for Nemotron-Labs-Diffusion only"):
        RowPreparer(JobConfig(mode="ar"), str(model), pa.schema([]))


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is not a model folder: it has no config\.json\."):
        RowPreparer(JobConfig(), str(tmp_path), pa.schema([]))
