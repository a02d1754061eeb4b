"""SpecFold: a decoding engine for diffusion language models with exact speculation and folded drafts.

Knows no Ray, no datasets and no Parquet. ``Engine`` is imported when it is first asked for: it brings torch, which
takes seconds and hundreds of megabytes, and who only looks at settings or at a model's small files needs none.
"""

from typing import TYPE_CHECKING, Any

from specfold.config import ConfigError, DecodeConfig
from specfold.families.base import ModelError
from specfold.request import Completion, Request
from specfold.stats import DecodeStats

if TYPE_CHECKING:
    from specfold.engine import Engine

ENGINE_VERSION = 1
"""Raised by hand when the same settings may give other tokens than before; part of a run's identity."""

__all__ = [
    "ENGINE_VERSION",
    "Completion",
    "ConfigError",
    "DecodeConfig",
    "DecodeStats",
    "Engine",
    "ModelError",
    "Request",
]


def __getattr__(name: str) -> Any:
    if name != "Engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from specfold.engine import Engine

    return Engine
