"""Carried columns when rows come after the types were fixed: what does not fit is told, never lost or changed."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.config import JobConfig
from cluster.input.rows import RowPreparer
from cluster.input.schema import carried_schema
from cluster.input.source import open_input
from tests.cluster.make_inputs import make_model, write_lines


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def test_values_after_the_types_were_fixed(tmp_path: Path, model: Path) -> None:
    """The types of a run stay what they were when rows are appended; what does not fit is told, not lost."""
    config = JobConfig(prompts=str(write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "x": 1, "y": [1]}])))
    schema = carried_schema(open_input(config), config)
    later = [{"prompt": "b", "x": 2.5, "y": [2]}, {"prompt": "c", "new": 1}, {"prompt": "d", "new": None, "y": [3]}]
    write_lines(tmp_path / "a.jsonl", later)
    rows, table = RowPreparer(config, str(model), schema).prepare(next(open_input(config).shards(10)))
    assert [(row.error_kind, row.error) for row in rows] == [
        ("wrong_type", "Column 'x' holds a number, but its type was fixed as int64 before."),
        ("wrong_type", "Column 'new' came after the output's columns were fixed; name those to keep with --carry."),
        (None, None),
    ]
    assert table.to_pydict() == {"x": [None, None, None], "y": [[2], None, [3]]}


def test_csv_values_after_the_types_were_fixed(tmp_path: Path, model: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,x\na,1\n")
    config = JobConfig(prompts=str(tmp_path / "a.csv"))
    schema = carried_schema(open_input(config), config)
    (tmp_path / "a.csv").write_text("prompt,x\na,2\nb,\nc,7.5\n")
    rows, table = RowPreparer(config, str(model), schema).prepare(next(open_input(config).shards(10)))
    assert rows[2].error == "Column 'x' holds '7.5', but its type was fixed as int64 before."
    assert table["x"].to_pylist() == [2, None, None]


def test_parquet_values_after_the_types_were_fixed(tmp_path: Path, model: Path) -> None:
    config = JobConfig(prompts=str(tmp_path / "a.parquet"))
    pq.write_table(pa.table({"prompt": ["a"], "x": pa.array([1], pa.int8()), "gone": ["g"]}), tmp_path / "a.parquet")
    schema = carried_schema(open_input(config), config)
    pq.write_table(pa.table({"prompt": ["b", "c"], "x": [5, 1000]}), tmp_path / "a.parquet")
    rows, table = RowPreparer(config, str(model), schema).prepare(next(open_input(config).shards(10)))
    assert [row.error for row in rows] == [
        None,
        "Column 'x' holds a value of type int64, but its type was fixed as int8 before.",
    ]
    assert table.to_pydict() == {"x": [5, None], "gone": [None, None]}
