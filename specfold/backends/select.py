"""The backends by name."""

from __future__ import annotations

import torch

from specfold.backends.base import Backend, RunSetup
from specfold.backends.memory import MemoryPlan
from specfold.backends.torch_backend import TorchBackend
from specfold.config import ConfigError

BACKENDS = ("torch", "triton", "reference")
"""``torch``: the oracle, on any device. ``triton``: captured graphs of fused kernels, on a CUDA device.
``reference``: the fused backend on the torch twins of its kernels, for tests."""


def check_backend(name: str, device: torch.device) -> None:
    """Raises ConfigError for a backend that does not exist or cannot run on the device."""
    if name not in BACKENDS:
        raise ConfigError(f"backend must be torch or triton, not {name!r}.")
    if name == "triton" and device.type != "cuda" and not _interpreting():
        raise ConfigError(f"backend triton needs a CUDA device, not {device}; torch runs everywhere.")


def make_backend(name: str, setup: RunSetup) -> Backend:
    """A backend for one run; ``name`` is one of ``BACKENDS``."""
    if name == "torch":
        return TorchBackend(setup)
    if setup.watch is not None:
        raise ConfigError(f"only backend torch can be watched, not {name}.")
    # Imported late: a CPU job needs no Triton.
    from specfold.backends.fused_backend import FusedBackend
    from specfold.backends.operations import load_operations

    return FusedBackend(setup, load_operations(reference=name == "reference"))


def plan_backend(name: str, setup: RunSetup) -> MemoryPlan | None:
    """How a run's memory would be divided; None for the torch backend, which takes it as it comes."""
    if name == "torch":
        return None
    from specfold.backends.fused_backend import plan_run

    return plan_run(setup)


def _interpreting() -> bool:
    """Whether Triton runs its kernels in its interpreter, as tests do on machines without a GPU."""
    try:
        from triton import knobs
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)
