"""The backends by name."""

from __future__ import annotations

from specfold.backends.base import Backend, RunSetup
from specfold.backends.torch_backend import TorchBackend

BACKENDS = ("torch",)


def make_backend(name: str, setup: RunSetup) -> Backend:
    """A backend for one run; ``name`` is one of ``BACKENDS``."""
    return TorchBackend(setup)
