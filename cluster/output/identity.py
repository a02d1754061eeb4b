"""What makes two runs the same: all that can change a token or a column, and how a difference is told."""

from __future__ import annotations

import hashlib
import platform
import sys
from dataclasses import replace
from importlib import metadata
from typing import Any, Literal, TypeVar

import orjson

from cluster.config import JobConfig
from cluster.models import ModelRef, pinned
from cluster.worker.guards import GUARDS_VERSION

Settings = TypeVar("Settings", bound=JobConfig)
DEVICE = "device"
_PACKAGES = ("torch", "triton", "transformers", "tokenizers")
_DEPENDENT = {"batch_size"}
"""Counts with some other settings only: where one side has it and the other has not, those are what differs."""
_RECORDED = ("ray", "pyarrow", "datasets", "numpy", "specfold")


def resolve(config: Settings, device: Literal["cpu", "cuda"], shard_rows: int) -> Settings:
    """The settings with every ``auto`` choice made; they are kept in ``run.json``."""
    return replace(
        config,
        device=device,
        shard_rows=shard_rows,
        dtype=("bfloat16" if device == "cuda" else "float32") if config.dtype == "auto" else config.dtype,
        backend=("triton" if device == "cuda" else "torch") if config.backend == "auto" else config.backend,
    )


def run_identity(config: JobConfig, model: ModelRef) -> dict[str, Any]:
    """The identity of a resolved job, but for the device kind, which the first worker tells."""
    from specfold import ENGINE_VERSION

    versions = {"engine": ENGINE_VERSION, "guards": GUARDS_VERSION} | token_versions()
    return config.identity() | {"model": pinned(model)} | versions


def identity_hash(identity: dict[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(identity, option=orjson.OPT_SORT_KEYS)).hexdigest()


def differences(run: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One text per differing key, as ``delta: 0.1 in the run, 0.2 now``."""
    keys = [key for key in sorted(run.keys() | now.keys()) if run.get(key) != now.get(key)]
    told = [key for key in keys if key not in _DEPENDENT or (key in run and key in now)]
    return [f"{key}: {_show(run.get(key))} in the run, {_show(now.get(key))} now" for key in told or keys]


def token_versions() -> dict[str, str | None]:
    """Versions of the packages that can change a token."""
    return {name: _version(name) for name in _PACKAGES}


def other_versions() -> dict[str, str | None]:
    """Versions that are recorded only."""
    return {"python": platform.python_version()} | {name: _version(name) for name in _RECORDED}


def device_kind(device: str) -> str:
    """The GPU's name, or the instruction set that arithmetic on a CPU depends on where the engine has brought torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return platform.machine()
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _show(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()
