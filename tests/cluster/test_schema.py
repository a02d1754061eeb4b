"""Carried columns: their names, and types that hold every value unchanged."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import JobConfig
from cluster.errors import UserError
from cluster.input.coltypes import Facts
from cluster.input.schema import OUTPUT_COLUMNS, carried_schema, schema_from_json, schema_to_json
from cluster.input.source import open_input
from cluster.input.unify import is_json
from tests.cluster.make_inputs import make_model, prepare_all, write_lines


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def carried(path: Path, **settings: Any) -> dict[str, str]:
    config = JobConfig(prompts=str(path), **settings)
    schema = carried_schema(open_input(config), config)
    assert schema_from_json(json.loads(json.dumps(schema_to_json(schema)))).equals(schema, check_metadata=True)
    return {field.name: "json" if is_json(field) else str(field.type) for field in schema}


def types_of(tmp_path: Path, values: list[Any]) -> str:
    rows = [{"prompt": "p", "x": value} for value in values]
    return carried(write_lines(tmp_path / "types.jsonl", rows))["x"]


@pytest.mark.parametrize(
    ("values", "type"),
    [
        (["a", None], "string"),
        (["2024-01-31", "2024-01-31T10:00:00Z"], "string"),
        ([1, -2], "int64"),
        ([1, 2**63], "decimal128(38, 0)"),
        ([1, 10**40], "json"),
        ([1, 2.5], "double"),
        ([2**53 + 1, 2.5], "json"),
        ([True, False], "bool"),
        ([True, 1], "json"),
        ([1, "1"], "json"),
        ([[1], [], None], "list<item: int64>"),
        ([[]], "list<item: string>"),
        ([[1, "a"]], "json"),
        ([{"a": 1, "b": "x"}, {"b": "y", "a": 2}], "struct<a: int64, b: string>"),
        ([{"a": 1}, {"a": 1, "b": None}], "json"),
        ([{}], "json"),
        ([None, None], "string"),
    ],
)
def test_json_types(tmp_path: Path, values: list[Any], type: str) -> None:
    assert types_of(tmp_path, values) == type


@pytest.mark.parametrize(
    ("values", "type"),
    [
        (["1", "-20", ""], "int64"),
        (["007", "1"], "string"),
        (["+1"], "string"),
        (["1", "0.5"], "double"),
        (["1.10"], "string"),
        (["true", "false", ""], "bool"),
        (["true", "False"], "string"),
        (["2024-01-31"], "string"),
        (["10:30"], "string"),
        (["9" * 30], "decimal128(38, 0)"),
        (["9" * 50], "string"),
        (["", ""], "string"),
        (["NA", "null"], "string"),
    ],
)
def test_csv_types(tmp_path: Path, values: list[str], type: str) -> None:
    (tmp_path / "a.csv").write_text("prompt,x\n" + "".join(f"p,{value}\n" for value in values))
    assert carried(tmp_path / "a.csv")["x"] == type


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


def same(before: Any, after: Any) -> bool:
    """Equal as JSON: a decimal or a float that equals an integer is that integer."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(same(before[name], after[name]) for name in before)
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(same, before, after))
    if isinstance(after, Decimal):
        return after == before
    return before == after and isinstance(before, bool) == isinstance(after, bool)


@settings(max_examples=150)
@given(values=st.lists(JSON, min_size=1, max_size=6))
def test_the_types_never_change_a_json_value(
    tmp_path_factory: pytest.TempPathFactory, model: Path, values: list[Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "property.jsonl"
    rows, table = prepare_all(write_lines(path, [{"prompt": "p", "x": value} for value in values]), model)
    assert all(row.error is None for row in rows)
    field = table.schema.field("x")
    after = [json.loads(v) if is_json(field) and v is not None else v for v in table["x"].to_pylist()]
    assert all(map(same, values, after))
    pq.write_table(table, path.with_suffix(".parquet"))
    assert pq.read_table(path.with_suffix(".parquet"))["x"].to_pylist() == table["x"].to_pylist()


NUMBERS = st.integers().map(str) | st.floats().map(repr) | st.decimals().map(str)
FIELDS = NUMBERS | st.sampled_from(["", "true", "True", "false", "007", "1.0", "-0", "1e5", "2020-01-01"])


@settings(max_examples=200)
@given(values=st.lists(FIELDS, min_size=1, max_size=5))
def test_the_types_never_change_a_csv_field(values: list[str]) -> None:
    facts = Facts()
    column = pa.chunked_array([values], pa.string())
    facts.observe_text(column)
    type = facts.arrow_type() or pa.string()
    for text in filter(None, values):
        if pa.types.is_floating(type):
            value = pa.array([text]).cast(type)[0].as_py()
            assert repr(value) == text or value == int(text)
        elif not pa.types.is_string(type) and not pa.types.is_boolean(type):
            assert str(pa.array([text]).cast(type)[0].as_py()) == text


@given(a=st.lists(JSON, max_size=4), b=st.lists(JSON, max_size=4))
def test_facts_of_parts_add_up_to_those_of_the_whole(a: list[Any], b: list[Any]) -> None:
    whole, first, second = Facts(), Facts(), Facts()
    whole.observe(a + b)
    first.observe(a)
    second.observe(b)
    first.merge(second)
    assert first.arrow_type() == whole.arrow_type()


def test_parquet_keeps_its_types_and_conflicts_become_json(tmp_path: Path) -> None:
    one = pa.table({"prompt": ["p"], "d": pa.array([1], pa.date32()), "i": pa.array([1], pa.int8()), "c": [1]})
    two = pa.table({"prompt": ["q"], "d": pa.array([2], pa.date32()), "i": pa.array([2], pa.int32()), "c": ["x"]})
    pq.write_table(one, tmp_path / "1.parquet")
    pq.write_table(two.append_column("late", pa.array([1.5])), tmp_path / "2.parquet")
    types = carried(tmp_path)
    assert types == {"d": "date32[day]", "i": "int32", "c": "json", "late": "double"}


def test_values_of_conflicting_parquet_files_survive(tmp_path: Path, model: Path) -> None:
    pq.write_table(pa.table({"prompt": ["p"], "c": [1]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"prompt": ["q"], "c": ["x"]}), tmp_path / "2.parquet")
    _, table = prepare_all(tmp_path, model)
    assert table["c"].to_pylist() == ["1", '"x"']


def test_which_columns_are_carried(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "p", "messages": None, "a": 1, "b": "x"}])
    assert list(carried(path)) == ["a", "b"]
    assert list(carried(path, carry="none")) == []
    assert list(carried(path, carry="b, prompt")) == ["b", "prompt"]
    assert list(carried(path, prompt_column="b")) == ["prompt", "a"]
    assert list(carried(path, prompt_template="{{ a }}")) == ["prompt", "messages", "a", "b"]
    assert list(carried(path, input_prefix="in_")) == ["in_a", "in_b"]
    batch = write_lines(tmp_path / "b.jsonl", [{"custom_id": "1", "url": "/v1", "body": {"prompt": "p"}}])
    assert list(carried(batch)) == ["custom_id", "url"]


def mistake(path: Path, **settings: Any) -> str:
    with pytest.raises(UserError) as error:
        carried(path, **settings)
    return str(error.value)


def test_missing_columns(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"question": "p", "answer": "x"}])
    assert mistake(path) == (
        "The input has none of the columns prompt, messages and prompt_token_ids; name the one to use with "
        "--prompt-column. The columns are question, answer."
    )
    assert mistake(path, prompt_column="qestion") == "--prompt-column qestion does not exist. Did you mean question?"
    assert mistake(path, prompt_column="zzz") == (
        "--prompt-column zzz does not exist. The columns are question, answer."
    )
    assert mistake(path, prompt_column="question", carry="a,anwser") == (
        "--carry names the column 'a', which does not exist. The columns are question, answer."
    )


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("name", ["row_id", "error", "output_text"])
def test_a_column_named_like_an_output_column_is_refused(tmp_path: Path, format: str, name: str) -> None:
    path = tmp_path / f"a.{format}"
    if format == "jsonl":
        write_lines(path, [{"prompt": "p", name: 1}])
    elif format == "csv":
        path.write_text(f"prompt,{name}\np,1\n")
    else:
        pq.write_table(pa.table({"prompt": ["p"], name: [1]}), path)
    assert mistake(path) == (
        f"The input column {name!r} is named like an output column; choose another --input-prefix, such as in_, or "
        "leave the column out with --carry."
    )
    assert carried(path, input_prefix="in_") == {f"in_{name}": "int64"}
    assert carried(path, carry="none") == {}


def test_a_prefix_may_collide_too(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "p", "text": 1}])
    assert "With --input-prefix output_ the input column 'output_text'" in mistake(path, input_prefix="output_")
    assert "output_text" in OUTPUT_COLUMNS


def test_types_do_not_depend_on_a_small_limit(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "p", "x": i if i < 9 else "late"} for i in range(10)])
    assert carried(path, limit=3) == carried(path) == {"x": "json"}


def test_the_pass_may_be_spread(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "p", "x": i} for i in range(5000)])
    config = JobConfig(prompts=str(path))
    calls = []

    def spread(function: Any, shards: Any) -> Any:
        for raw in shards:
            calls.append(raw.num_rows)
            yield function(raw)

    schema = carried_schema(open_input(config), config, spread)
    assert str(schema.field("x").type) == "int64"
    assert sum(calls) == 5000
    assert len(calls) > 1
