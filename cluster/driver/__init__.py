"""The driver: shards to workers that have room, the dead replaced, every row accounted for."""

from cluster.driver.commands import DEFAULT_ENGINE, check_job, run_job

__all__ = ["DEFAULT_ENGINE", "check_job", "run_job"]
