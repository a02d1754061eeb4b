"""SpecFold: a decoding engine for diffusion language models with exact speculation and folded drafts.

Knows no Ray, no datasets and no Parquet.
"""

from specfold.config import ConfigError, DecodeConfig
from specfold.engine import Engine
from specfold.families.base import ModelError
from specfold.request import Completion, Request
from specfold.stats import DecodeStats

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
