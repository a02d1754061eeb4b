"""What a job chooses for itself before its first part, on its own kind of device: a draft graph, a number of drafts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from cluster.config import AUTO_GRAPH, JobConfig
from cluster.errors import UserError
from cluster.flags import as_flags
from cluster.input.sample import prepare_rows
from cluster.input.shards import RawShard
from cluster.messages import RowKey
from cluster.models import ModelRef, local_folder
from cluster.worker.requests import make_request
from cluster.worker.worker import import_factory, use_one_thread
from specfold import draft_search
from specfold.config import AUTO, ConfigError

CALIBRATION_ROWS = 50
SAMPLE_ROWS = max(CALIBRATION_ROWS, draft_search.SAMPLE_ROWS)


@dataclass(frozen=True)
class JobChoices:
    """What a run keeps of it."""

    config: JobConfig
    """The job's settings with the choices in them."""
    told: dict[str, Any] = field(default_factory=dict)
    """How they came about, for ``run.json``."""
    lines: tuple[str, ...] = ()
    """The same for people."""


def choose_for_job(config: JobConfig, model: ModelRef, engine_factory: str, raw: RawShard) -> JobChoices:
    """Make the choices that ``config`` leaves open, by decoding rows of ``raw``; every other ``auto`` is settled.

    The graph comes first, for the drafts are measured with it. Raises ``UserError`` if none of the rows can be decoded.
    """
    # Imported here, where an engine is: the driver only names this function, and needs no torch for it.
    from cluster.worker.calibration import calibrate_job
    from specfold import autotune

    folder = local_folder(model)
    rows, problem = prepare_rows(config, folder, [raw], SAMPLE_ROWS)
    if not rows:
        name = "--drafts" if config.drafts == AUTO else "--draft-graph"
        raise UserError(f"{name} auto finds no row to decode: {problem}")
    factory = import_factory(engine_factory)
    if config.device == "cpu":
        use_one_thread()
    engine = factory(
        folder, device=config.device, dtype=config.dtype, backend=config.backend,
        mask_token_id=config.mask_token_id, stop_token_ids=config.stop_token_ids,
    )  # fmt: skip
    told: dict[str, Any] = {}
    lines = []
    if config.draft_graph == AUTO_GRAPH:
        graph = calibrate_job(config, model, engine, rows[:CALIBRATION_ROWS])
        config = replace(config, draft_graph_text=graph.text)
        told["draft_graph"] = graph.line
        lines.append(graph.line)
    if config.drafts == AUTO:
        requests = [make_request(RowKey(row.row_id, 0), row) for row in rows]
        try:
            choice = autotune.choose_drafts(engine, requests, config.decode, config.batch_size)
        except ConfigError as error:
            raise UserError(as_flags(str(error))) from None
        config = replace(config, chosen_drafts=choice.drafts)
        told["drafts"] = choice.to_dict()
        lines.append(choice.line)
    return JobChoices(config, told, tuple(lines))
