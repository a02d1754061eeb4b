"""A draft graph made for a job from its first rows."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.config import JobConfig, without_secrets
from cluster.input.rows import PreparedRow
from cluster.messages import RowKey
from cluster.models import ModelRef, pinned
from cluster.worker.requests import make_request
from specfold.calibration import Selection, calibrated_graph
from specfold.drafts import default_graph
from specfold.engine import Engine
from specfold.trajectory import Trajectories, record_trajectories

_MAX_NEW_TOKENS = 256
"""More of a row tells nothing new."""
_SETTINGS = (
    "threshold", "small_block_size", "block_size", "causal_context", "temperature", "top_p", "top_k", "seed",
    "max_new_tokens", "dtype", "chat_template", "system_prompt", "prompt_template",
)  # fmt: skip


@dataclass(frozen=True)
class CalibratedGraph:
    """What a job keeps: the graph file's text, and one line for people."""

    text: str
    line: str


def calibrate_job(config: JobConfig, model: ModelRef, engine: Engine, rows: Sequence[PreparedRow]) -> CalibratedGraph:
    """Decode the rows plainly and choose the graph that saves most forwards.

    It has ``config.drafts`` nodes; with auto, as many as may be chosen.
    """
    started = time.monotonic()
    found = record_rows(engine, config, rows)
    nodes = config.decode.num_drafts
    graph = calibrated_graph(found, nodes, "forwards", graph_origin(config, model, len(rows), "forwards", found))
    plain, ours = max(found.forwards(), 1), found.forwards(frozenset(graph.formulas))
    default = found.forwards(frozenset(default_graph(nodes).formulas))
    line = (
        f"Calibrated a draft graph on {len(rows):,} rows in {time.monotonic() - started:.0f} s: {nodes} drafts "
        f"save {1 - ours / plain:.1%} of their forwards, the default graph {1 - default / plain:.1%}."
    )
    return CalibratedGraph(json.dumps(graph.to_json()), line)


def record_rows(engine: Engine, config: JobConfig, rows: Sequence[PreparedRow]) -> Trajectories:
    """What plain decoding of these rows does, at the job's batch size."""
    longest = min(config.max_new_tokens, _MAX_NEW_TOKENS)
    requests = [
        replace(make_request(RowKey(row.row_id, 0), row), max_new_tokens=min(row.max_new_tokens or longest, longest))
        for row in rows
    ]
    return record_trajectories(engine, requests, config.decode, config.batch_size)


def graph_origin(
    config: JobConfig, model: ModelRef, num_rows: int, selection: Selection, found: Trajectories
) -> dict[str, Any]:
    """Where a graph came from, as its file tells it."""
    return {
        "model": model.name,
        "content": pinned(model),
        "prompts": without_secrets(config.prompts),
        "rows": num_rows,
        "selection": selection,
        "settings": {name: getattr(config, name) for name in _SETTINGS},
        "output_tokens": found.stats.output_tokens,
        "plain_forwards": found.forwards(),
    }
