"""Where workers run: on which kind of device, with what share of it, and how many of them."""

from __future__ import annotations

from typing import Literal

import ray

from cluster.config import JobConfig
from cluster.errors import UserError


def choose_device(config: JobConfig) -> Literal["cpu", "cuda"]:
    """The GPUs if the cluster has any, unless the user has said so."""
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    if config.gpus_per_worker == 0:
        if config.device == "cuda":
            raise UserError("--device cuda needs GPUs, but --gpus-per-worker is 0.")
        return "cpu"
    if not has_gpus and config.ray_address is None and (config.device == "cuda" or config.gpus_per_worker):
        # On a cluster one may join; here workers would wait for it for ever.
        asked = "--device cuda" if config.device == "cuda" else f"--gpus-per-worker {config.gpus_per_worker:g}"
        raise UserError(f"{asked} was given, but Ray finds no GPU on this machine.")
    if config.device != "auto":
        return config.device
    device: Literal["cpu", "cuda"] = "cuda" if has_gpus or config.gpus_per_worker else "cpu"
    if device == "cpu" and config.backend == "triton":
        raise UserError("--backend triton needs a GPU, and Ray finds none; leave --backend out or give torch.")
    return device


def worker_resources(config: JobConfig) -> dict[str, float]:
    """What Ray sets aside for a worker."""
    if config.device == "cpu":
        return {"num_cpus": 1}
    return {"num_cpus": 1, "num_gpus": 1 if config.gpus_per_worker is None else config.gpus_per_worker}


def most_workers(config: JobConfig, num_shards: int, num_outputs: int) -> int:
    """More would find nothing to do: what is left has a batch of rows for so many, as rows of a shard may be lent."""
    return max(num_shards, -(-num_outputs // config.batch_size))


def worker_count(config: JobConfig, most: int | None) -> int:
    """How many workers to have now: what was asked for or what the cluster holds, never more than ``most``."""
    resources = ray.cluster_resources()
    if config.workers is not None:
        count = config.workers
    elif config.device == "cpu":
        count = int(resources.get("CPU", 1))
    else:
        gpus = worker_resources(config)["num_gpus"] or 1
        count = int(resources.get("GPU", 0)) * int(1 / gpus) if gpus < 1 else int(resources.get("GPU", 0) / gpus)
    return max(count if most is None else min(count, most), 1)
