"""Draft graphs: the default ones, files, and what makes a graph unsound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specfold import ConfigError, DecodeConfig
from specfold.config import MAX_DRAFTS
from specfold.drafts import FORMAT, build_graph, default_graph, load_graph


@pytest.mark.parametrize("num_drafts", range(MAX_DRAFTS + 1))
def test_default_graphs_have_the_drafts_asked_for(num_drafts: int) -> None:
    graph = default_graph(num_drafts)
    assert len(graph) == num_drafts
    for n, formula in enumerate(graph.formulas):
        assert len(formula) == 1 or graph.parents[n], "every longer formula is reached step by step"


def test_a_node_keeps_all_its_parents_and_folds_on_the_nearest() -> None:
    graph = build_graph(
        [[(0, 0)], [(1, 0)], [(0, 0), (1, 0)], [(0, 0), (1, 0), (2, 0)], [(3, 0), (0, 0), (1, 0), (2, 1)]], "t"
    )
    assert [sorted(f) for f in graph.formulas[:3]] == [[(0, 0)], [(1, 0)], [(0, 0), (1, 0)]]
    assert graph.parents[2] == (0, 1)
    assert graph.fold_parent(2) == 0
    assert graph.fold_parent(4) == 2, "formulas of two tokens a step hang on the largest subset"
    assert [graph.depth(n) for n in range(5)] == [0, 0, 1, 2, 2]


def test_a_file_gives_the_graph_back(tmp_path: Path) -> None:
    graph = default_graph(8)
    graph.save(tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json") == graph
    assert load_graph((tmp_path / "graph.json").read_text()) == graph
    with pytest.raises(ConfigError, match="has 8 nodes, fewer than the 9 drafts asked for"):
        load_graph(tmp_path / "graph.json", 9)


@pytest.mark.parametrize(
    ("nodes", "sentence"),
    [
        ([{"formula": []}], "Node 0 of the draft graph has an empty formula"),
        ([{"formula": [[0, 0]]}, {"formula": [[0, 0]]}], "Two nodes of the draft graph have the same formula"),
        ([{"formula": [[0, 0], [0, 1]]}], "Node 0 of the draft graph names a position twice"),
        ([{"formula": [[0, 64]]}], r"Node 0 of the draft graph has a rank outside 0\.\.63"),
        ([{"formula": [[0, 0]], "parents": [0]}], "Node 0 of the draft graph has parent 0, which does not come before"),
        (
            [{"formula": [[0, 0]]}, {"formula": [[1, 0]], "parents": [0]}],
            "Node 1 of the draft graph does not contain its parent 0",
        ),
        ([{"formula": [[i, 0]]} for i in range(33)], "A draft graph has at most 32 nodes, not 33"),
        ([{"form": 1}], "is not sound: Node 0 has no formula"),
        ([5], "is not sound: Node 0 has no formula"),
        ([{"formula": ["ab"]}], "is not sound: Node 0 has no formula"),
        ([{"formula": [[0, 0.7]]}], "is not sound: Node 0 has no formula"),
        ([{"formula": [[0, float("inf")]]}], "is not sound: Node 0 has no formula"),
        ([{"formula": [[0, 0]], "parents": None}], "is not sound: The parents of node 0 are not a list"),
        (7, "is not sound: It has no list of nodes"),
    ],
)
def test_an_unsound_file_gets_one_sentence(tmp_path: Path, nodes: Any, sentence: str) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({"format": FORMAT, "nodes": nodes}))
    with pytest.raises(ConfigError, match=sentence):
        load_graph(path)


def test_text_that_is_no_graph_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match=r"^The draft graph cannot be read: Expecting value[^\n]*$"):
        load_graph("# A page\n" * 1000)


def test_a_file_that_is_no_graph(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_graph(path)
    for text in ("{", "[]", '{"format": "other"}', "[" * 100_000, '{"a":' * 100_000):
        path.write_text(text)
        for source in (path, text):
            with pytest.raises(ConfigError, match=r"cannot be read|is not of format") as caught:
                load_graph(source)
            assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mode": "fast"}, "mode must be one of vanilla, spiffy, specfold, ar, linear_spec, not 'fast'"),
        ({"drafts": 33}, "drafts must be between 0 and 32, not 33"),
        ({"drafts": "all"}, "drafts must be a whole number or auto, not 'all'"),
        ({"delta": "a"}, "delta must be a number, not 'a'"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number, not 2.5"),
        ({"seed": True}, "seed must be a whole number, not True"),
        ({"delta": float("nan")}, "delta must be a number"),
        ({"threshold": 1.5}, "threshold must be between 0 and 1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"temperature": -1.0}, "temperature must be between 0 and 100"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"stop": ("",)}, "stop strings must not be empty"),
        ({"stop": "abc"}, "stop must be a tuple of strings, not 'abc'"),
        ({"stop": (1,)}, r"stop must be a tuple of strings, not \(1,\)"),
        ({"threshold": "high"}, "threshold must be a number or left out, not 'high'"),
        ({"block_size": 8.0}, "block_size must be a whole number or left out, not 8.0"),
        ({"deterministic": "no"}, r"deterministic must be on or off \(True or False\), not 'no'"),
        ({"temperature": 1e-38}, r"temperature must be 0 \(greedy\) or at least 1e-06, not 1e-38"),
        ({"top_k": 10**20}, "top_k must be at most 1073741824, not 1000"),
        ({"refresh_every": 10**20, "delta_time": 0.1}, "refresh_every must be at most 1073741824"),
        ({"max_thinking_tokens": 10**20, "end_think_token_id": 1}, "max_thinking_tokens must be at most 1073741824"),
        ({"max_thinking_tokens": 5}, "max_thinking_tokens and end_think_token_id must be given together"),
    ],
)
def test_impossible_settings_get_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        DecodeConfig(**changes)
