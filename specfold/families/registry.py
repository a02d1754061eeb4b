"""The known families, found by a checkpoint's config."""

from __future__ import annotations

from typing import Any

from specfold.families.base import Family, ModelError
from specfold.families.fast_dllm_v2 import FastDllmV2
from specfold.families.nemotron_labs_diffusion import NemotronLabsDiffusion

FAMILIES: tuple[Family, ...] = (FastDllmV2(), NemotronLabsDiffusion())


def family_of(config: dict[str, Any]) -> Family:
    """The family of a config.json. Raises ModelError for an unknown one."""
    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    for family in FAMILIES:
        if model_type == family.model_type or family.architecture in architectures:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise ModelError(f"config.json has model_type {model_type!r}; supported are {known}.")
