"""The draft graph of ``--draft-graph auto``: made once from the first rows, then kept with the run."""

from __future__ import annotations

from functools import partial

from cluster.config import JobConfig
from cluster.driver.session import ray_map, worker_environment
from cluster.input.shards import InputSource
from cluster.models import ModelRef
from cluster.output.rundir import RunFile
from cluster.worker.calibration import CALIBRATION_ROWS, CalibratedGraph, calibrate_job


def calibrate_first_rows(
    config: JobConfig, model: ModelRef, source: InputSource, engine_factory: str, resources: dict[str, float]
) -> CalibratedGraph:
    """Decodes the first rows in a helper task with a worker's ``resources``, so that no engine lives in the driver."""
    first = next(source.shards(CALIBRATION_ROWS, config.limit))
    call = partial(calibrate_job, config, model, engine_factory)
    [found] = ray_map("calibrate", worker_environment(), call, [first], resources)
    return found


def kept_graph(run: RunFile) -> str | None:
    """The text of the graph that a run was started with; None if it has the default one."""
    return run.config.get("draft_graph_text")
