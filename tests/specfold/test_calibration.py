"""Calibrated draft graphs: traces tell exactly what a graph saves, and selection picks what pays."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specfold import ConfigError, DecodeConfig, Engine, Request, reference_models
from specfold.benchmark.decoding import read_questions
from specfold.calibration import Counts, calibrated_graph, compare_graphs, select_formulas
from specfold.drafts import Formula, build_graph, default_graph, load_graph
from specfold.stats import DecodeStats
from specfold.trajectory import BlockTrace, Trajectories, record_trajectories
from tests.specfold.random_models import FAMILY_NAMES, MASK, random_engine
from tests.specfold.strategies import graphs, sampling

PROMPTS = Path(__file__).resolve().parents[2] / "jobs" / "prompts.jsonl"
few = settings(max_examples=12)


@pytest.mark.parametrize("family", FAMILY_NAMES)
@given(data=st.data())
@few
def test_traces_tell_the_forwards_of_any_graph(family: str, data: st.DataObject) -> None:
    """At any threshold and temperature: what the engine takes with a graph, without running it."""
    engine = random_engine(family, data.draw(st.integers(0, 3)))
    chosen = data.draw(sampling())
    rows = [Request([(7 * i + n) % MASK for i in range(n)], row_id=n) for n in (3, 17, 30)]
    graph = data.draw(graphs)
    config = DecodeConfig(mode="spiffy", drafts=len(graph), draft_graph=json.dumps(graph.to_json()), **chosen)
    found = record_trajectories(engine, rows, config, batch_size=2)
    plain = engine.stream(iter(rows), replace(config, mode="vanilla", draft_graph=None), 3)
    assert found.forwards() == sum(c.stats.num_forwards for c in plain) == found.stats.num_forwards
    done = engine.stream(iter(rows), config, 3)
    assert found.forwards(frozenset(graph.formulas)) == sum(c.stats.num_forwards for c in done)


def test_under_a_threshold_sets_are_learnt_and_save_what_chains_cannot() -> None:
    """A sure model fills whole groups of 8 at a time, which no chain of single tokens foresees."""
    engine = Engine.from_pretrained(reference_models.path("fast_dllm_v2"))
    rows = [Request(q.prompt_ids, row_id=i) for i, q in enumerate(read_questions(engine, PROMPTS, 6))]
    config = DecodeConfig(mode="spiffy", drafts=8, threshold=0.9, max_new_tokens=64)
    found = record_trajectories(engine, rows, config)
    graph = calibrated_graph(found, 8, "forwards", {"data": "bundled"})
    assert len(max(graph.formulas, key=len)) == 8
    calibrated = replace(config, draft_graph=json.dumps(graph.to_json()))
    done = list(engine.stream(iter(rows), calibrated, 6))
    assert sum(c.stats.num_forwards for c in done) == found.forwards(frozenset(graph.formulas))
    assert found.forwards(frozenset(graph.formulas)) < 0.8 * found.forwards(frozenset(default_graph(8).formulas))


@cache
def bundled(family: str) -> tuple[Trajectories, Trajectories]:
    """What a bundled model does on prompts to learn from, and on others."""
    engine = Engine.from_pretrained(reference_models.path(family))
    requests = [Request(q.prompt_ids, row_id=i) for i, q in enumerate(read_questions(engine, PROMPTS, 30))]
    config = DecodeConfig(max_new_tokens=64)
    fit, held_out = (record_trajectories(engine, part, config, 10) for part in (requests[:20], requests[20:]))
    return fit, held_out


@pytest.mark.parametrize("family", reference_models.NAMES)
def test_a_calibrated_graph_is_nearly_the_best_on_other_prompts(family: str) -> None:
    fit, held_out = bundled(family)
    records = compare_graphs(fit, held_out, (2, 4, 6, 8))
    share = {(r["drafts"], r["graph"]): r["share_of_oracle"] for r in records}
    for drafts in (2, 4, 6, 8):
        assert share[drafts, "oracle"] == 1.0
        assert max(share.values()) == 1.0
        assert share[drafts, "forwards"] >= 0.97
    forwards = {r["drafts"]: r["forwards"] for r in records if r["graph"] == "forwards"}
    assert forwards[8] < forwards[4] < forwards[2] < held_out.forwards()


def formula(*candidates: tuple[int, int]) -> Formula:
    return frozenset(candidates)


A, B, AB, ABC = formula((0, 0)), formula((1, 0)), formula((0, 0), (1, 0)), formula((0, 0), (1, 0), (2, 0))


def traces(*chains: tuple[tuple[Formula, ...], int]) -> Trajectories:
    """Blocks that each make one guess; a chain and how often it comes true."""
    blocks = [BlockTrace((chain, *((),) * len(chain)), False) for chain, times in chains for _ in range(times)]
    return Trajectories(tuple(blocks), DecodeStats(output_tokens=100))


def test_counts_and_the_rules_of_accumulation() -> None:
    found = traces(((A, AB, ABC), 4), ((B, AB), 3), ((A,), 2))
    counts = Counts.of(found)
    assert counts.count == {A: 6, B: 3, AB: 7, ABC: 4}
    assert counts.parents[AB] == {A, B}
    assert counts.ancestors(ABC) == {A, B, AB}
    assert select_formulas(found, 4, "degree-0") == [A, AB, ABC, B]
    assert select_formulas(found, 3, "degree-1") == [A, AB, ABC]  # 6, 7 + 9, 4 + 7; B has 3
    assert select_formulas(found, 3, "total") == [A, AB, ABC]
    assert select_formulas(found, 3, "forwards") == [A, AB, B]  # B brings AB into reach: 6 forwards, not 4


def test_a_node_is_reached_before_it_is_chosen_and_few_traces_are_filled_up() -> None:
    found = traces(((B, AB), 3), ((A,), 1))
    chosen = select_formulas(found, 8, "degree-1")
    assert len(set(chosen)) == 8
    assert chosen.index(B) < chosen.index(AB)
    assert set(chosen) > {A, B, AB}


def test_a_smaller_graph_is_the_best_part_of_a_larger_one(tmp_path: Path) -> None:
    graph = build_graph([A, AB, B, ABC], {"model": "m"})
    assert [sorted(f) for f in graph.prefix(3).formulas] == [sorted(f) for f in (A, B, AB)]
    assert graph.prefix(2).formulas == (A, AB)
    graph.save(tmp_path / "g.json")
    assert load_graph(tmp_path / "g.json") == graph
    assert load_graph(tmp_path / "g.json").prefix(2).formulas == (A, AB)
    assert graph.places == [0, 2, 1, 3]
    value = json.loads((tmp_path / "g.json").read_text()) | {"order": [0, 0, 1, 2]}
    with pytest.raises(ConfigError, match="order does not name every node once"):
        load_graph(json.dumps(value))
    assert default_graph(8).prefix(8) == default_graph(8)


def test_what_cannot_be_recorded_is_one_sentence() -> None:
    engine = random_engine("nemotron_labs_diffusion", 0)
    with pytest.raises(ConfigError, match="mode ar has no drafts"):
        record_trajectories(engine, [Request([1])], DecodeConfig(mode="ar"))
    with pytest.raises(ConfigError, match="no prompt could be decoded to record from: The prompt has no tokens"):
        record_trajectories(engine, [Request([])], DecodeConfig())
    watched = Engine(engine.model, engine.info, None, "reference")
    with pytest.raises(ConfigError, match="only backend torch can be watched"):
        list(watched.stream(iter([Request([1])]), DecodeConfig(mode="vanilla"), 1, _watch()))


def _watch() -> object:
    from specfold.watch import Watch

    return Watch()
