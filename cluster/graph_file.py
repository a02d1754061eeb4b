"""A draft graph's file: whether a job can use it, and whose it is."""

from __future__ import annotations

import json
from typing import Any

from cluster.errors import UserError
from cluster.models import ModelRef, pinned
from specfold.config import ConfigError, DecodeConfig
from specfold.drafts import graph_for


def require_graph(text: str, file: str, config: DecodeConfig) -> None:
    """``UserError`` that names the file if its content is no graph for ``config``, which has it as ``draft_graph``."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--draft-graph {file} is not valid JSON: {str(error).splitlines()[0]}.") from None
    if not isinstance(value, dict):
        raise UserError(f"--draft-graph {file} must hold a JSON object, as python jobs/calibrate.py writes one.")
    try:
        graph_for(config)
    except ConfigError as error:
        raise UserError(str(error).replace("The draft graph", f"--draft-graph {file}", 1)) from None


def notes_on_graph(text: str | None, model: ModelRef) -> list[str]:
    """A line if the graph was calibrated on another model; none if on this one, or if it does not tell."""
    origin: Any = json.loads(text).get("origin") if text else None
    content = origin.get("content") if isinstance(origin, dict) else None
    if content is None or content == pinned(model):
        return []
    return [
        f"Note: the draft graph was calibrated on another model than this job's, or other weights of it "
        f"({origin.get('model')!r}); its drafts may come true less often."
    ]
