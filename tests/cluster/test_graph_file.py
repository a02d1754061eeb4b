"""A draft graph's file: what is no graph is one sentence with the file's name, before anything else is done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.config import JobConfig
from cluster.errors import UserError
from cluster.graph_file import notes_on_graph
from cluster.models import ModelRef
from specfold.drafts import build_graph, default_graph

GRAPH = default_graph(6).to_json()
MODEL = ModelRef("ours", path="/ours", content_hash="sha256:1")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("null", "must hold a JSON object, as python jobs/calibrate.py writes one."),
        ("5", "must hold a JSON object, as python jobs/calibrate.py writes one."),
        ("[]", "must hold a JSON object, as python jobs/calibrate.py writes one."),
        ("", "is not valid JSON: Expecting value: line 1 column 1 (char 0)."),
        ("\x1b[2J\x07", "is not valid JSON: Expecting value: line 1 column 1 (char 0)."),
        ("/etc/passwd", "is not valid JSON: Expecting value: line 1 column 1 (char 0)."),
        ("[" * 100_000, "is not valid JSON: "),
        ("{}", "is not of format 'specfold-draft-graph/1'."),
        (json.dumps(GRAPH | {"nodes": [{}]}), "is not sound: Node 0 has no formula, "),
        (json.dumps(GRAPH), "has 6 nodes, fewer than the 8 drafts asked for."),
    ],
)
def test_a_broken_file_is_one_sentence_with_its_name(content: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    file.write_text(content)
    with pytest.raises(UserError) as refused:
        JobConfig(draft_graph=str(file), drafts=8).with_files()
    assert str(refused.value).startswith(f"--draft-graph {file} {sentence}")
    assert str(refused.value).isprintable()


def test_a_sound_file_is_taken_however_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    for text in (json.dumps(GRAPH), "\n " + json.dumps(GRAPH, indent=1)):
        file.write_text(text)
        assert JobConfig(draft_graph=str(file), drafts=6).with_files().decode.draft_graph == text


def test_only_a_graph_of_another_model_is_noted() -> None:
    def graph(origin: str | dict[str, str]) -> str:
        return json.dumps(build_graph([[(0, 0)]], origin).to_json())

    assert notes_on_graph(None, MODEL) == []
    assert notes_on_graph(graph("by hand"), MODEL) == []
    assert notes_on_graph(graph({"model": "ours", "content": "sha256:1"}), MODEL) == []
    [note] = notes_on_graph(graph({"model": "theirs", "content": "sha256:2"}), MODEL)
    assert "'theirs'" in note
    assert note.endswith("its drafts may come true less often.")
