"""The driver: shards to workers that have room, the dead replaced, every row accounted for."""

from cluster.driver.commands import DEFAULT_ENGINE, check_job, run_job
from cluster.driver.signals import leave

__all__ = ["DEFAULT_ENGINE", "check_job", "leave", "run_job"]
