"""Random prompts, draft graphs and sampling settings for property tests."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import strategies as st

from specfold import DecodeConfig, Engine, Request
from specfold.drafts import build_graph
from tests.specfold.random_models import MASK, random_engine

prompts = st.lists(st.integers(0, MASK - 1), min_size=1, max_size=40)
formulas = st.sets(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=3).filter(
    lambda f: len({i for i, _ in f}) == len(f)
)
graphs = st.lists(formulas, min_size=1, max_size=8, unique_by=frozenset).map(lambda fs: build_graph(fs, "test"))


@st.composite
def sampling(draw: st.DrawFn) -> dict[str, Any]:
    """Threshold and sampling settings."""
    temperature = draw(st.sampled_from([0.0, 0.0, 0.7, 1.5]))
    return {
        "threshold": draw(st.sampled_from([None, None, 0.3, 0.9])),
        "temperature": temperature,
        "top_p": draw(st.sampled_from([1.0, 0.8])),
        "top_k": draw(st.sampled_from([0, 5])),
        "seed": draw(st.integers(0, 5)),
        "small_block_size": draw(st.sampled_from([2, 4, 8])),
        "max_new_tokens": draw(st.integers(1, 30)),
    }


class Drawn(NamedTuple):
    """A random model, rows and settings, and what plain decoding makes of them."""

    engine: Engine
    rows: list[Request]
    num_nodes: int
    graph: str
    """Its file."""
    vanilla: DecodeConfig
    want: dict[int, Any]


def draw_run(family: str, data: st.DataObject, folder: Any) -> Drawn:
    """Anything that can be decoded. ``folder``: pytest's factory of temporary folders."""
    engine = random_engine(family, data.draw(st.integers(0, 3)))
    chosen = data.draw(sampling())
    causal = data.draw(st.booleans()) if family != "fast_dllm_v2" else True
    rows = [Request(p, row_id=i) for i, p in enumerate(data.draw(st.lists(prompts, min_size=1, max_size=4)))]
    graph = data.draw(graphs)
    path = folder.mktemp("graph") / "graph.json"
    graph.save(path)
    vanilla = DecodeConfig(mode="vanilla", causal_context=causal, **chosen)
    want = {c.row_id: c for c in engine.stream(iter(rows), vanilla, batch_size=1)}
    return Drawn(engine, rows, len(graph), str(path), vanilla, want)


def replace_seconds(stats: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in stats.items() if name != "seconds"}
