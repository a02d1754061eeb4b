"""What a run chooses for itself (``--draft-graph auto``, ``--drafts auto``): once, from its first rows, then kept."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TypeVar

from cluster.config import AUTO_GRAPH, JobConfig
from cluster.driver.session import ray_map, worker_environment
from cluster.input.shards import InputSource
from cluster.models import ModelRef
from cluster.output.rundir import RunFile
from cluster.worker.choices import SAMPLE_ROWS, JobChoices, choose_for_job
from specfold.config import AUTO

Settings = TypeVar("Settings", bound=JobConfig)


def is_open(config: JobConfig) -> bool:
    """Whether the settings leave something for the run to choose."""
    return config.draft_graph == AUTO_GRAPH or config.drafts == AUTO


def choose_by_first_rows(
    config: JobConfig, model: ModelRef, source: InputSource, engine_factory: str, resources: dict[str, float]
) -> JobChoices:
    """Decodes the first rows in a helper task with a worker's ``resources``, so that no engine lives in the driver."""
    first = next(source.shards(SAMPLE_ROWS, config.limit))
    call = partial(choose_for_job, config, model, engine_factory)
    [found] = ray_map("choose", worker_environment(), call, [first], resources)
    return found


def with_kept(config: Settings, run: RunFile) -> Settings:
    """The settings with what an earlier session of the run has chosen; what it has not stays open."""
    graph = run.config.get("draft_graph_text") if config.draft_graph == AUTO_GRAPH else config.draft_graph_text
    drafts = run.config.get("chosen_drafts") if config.drafts == AUTO else None
    return replace(config, draft_graph_text=graph, chosen_drafts=drafts)
