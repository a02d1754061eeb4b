"""Folding in time and the sub-block cache on the fused backend against the torch engine: same tokens, same counters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specfold.backends.fused_forward import ForwardShape, FusedForward, forward_bytes
from specfold.backends.operations import load_operations
from specfold.folding import Folding
from specfold.pages import PagePool
from tests.specfold.fused_checks import (
    hold_bits,
    hold_fixed_sequence,
    hold_kernels,
    hold_modes_on_gpu,
    on_gpu,
)
from tests.specfold.random_models import FAMILY_NAMES, random_engine

few = settings(max_examples=16)

MODES: list[tuple[str, dict[str, Any]]] = [
    ("vanilla", {"delta_time": 0.1}),
    ("vanilla", {"delta_time": 0.3, "ffn_gate": "entry"}),
    ("vanilla", {"delta_time": 0.0, "refresh_every": 3, "threshold": 0.2}),
    ("vanilla", {"delta_time": 0.2, "temperature": 1.1, "top_k": 5}),
    ("spiffy", {"delta_time": 0.15, "drafts": 4}),
    ("specfold", {"delta_time": 0.1, "drafts": 6, "delta": 0.1}),
    ("specfold", {"delta_time": 0.3, "drafts": 3, "delta": 0.3, "ffn_gate": "entry"}),
    ("specfold", {"delta_time": 0.05, "drafts": 8, "draft_budget": 3, "refresh_every": 2}),
    ("specfold", {"delta_time": 0.1, "delta": 0.0, "temperature": 0.9, "threshold": 0.3}),
]
BLOCK_CACHE: tuple[str, dict[str, Any]] = ("vanilla", {"use_block_cache": True, "small_block_size": 4})


def modes_of(family: str) -> list[tuple[str, dict[str, Any]]]:
    return [*MODES, BLOCK_CACHE] if family == "fast_dllm_v2" else MODES


@pytest.mark.parametrize("family", FAMILY_NAMES)
@given(data=st.data())
@few
def test_the_fixed_sequence_decodes_like_the_oracle(family: str, data: st.DataObject) -> None:
    hold_fixed_sequence(family, modes_of(family), data, st.integers(8, 32))


@pytest.mark.parametrize(
    ("family", "mode", "changes"),
    [
        ("fast_dllm_v2", "specfold", {"delta_time": 0.2, "drafts": 1, "delta": 0.1, "max_new_tokens": 4}),
        ("nemotron_labs_diffusion", "vanilla", {"delta_time": 0.2, "max_new_tokens": 3}),
        ("fast_dllm_v2", "vanilla", {"use_block_cache": True, "small_block_size": 4, "max_new_tokens": 3}),
    ],
)
def test_the_kernels_decode_like_the_oracle(
    family: str, mode: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_kernels(family, mode, changes, monkeypatch)


@on_gpu
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_mode_on_a_gpu_decodes_like_the_oracle(family: str) -> None:
    hold_modes_on_gpu(family, modes_of(family))


@on_gpu
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_at_a_threshold_of_0_all_bits_are_vanillas(family: str) -> None:
    zero = {"delta_time": 0.0}
    drafts = {"mode": "specfold", "delta": 0.0, "drafts": 4}
    hold_bits(family, [(zero, 6), (zero | {"refresh_every": 4}, 1), (zero | drafts, 4)])


def test_the_memory_plan_counts_all_that_a_forward_keeps() -> None:
    """Against the buffers that are really made."""
    engine = random_engine("fast_dllm_v2", 0)
    spec, pool = engine.info.spec, PagePool(engine.info.spec, torch.device("cpu"), torch.float32, 4, fixed=True)
    ops = load_operations(reference=True)
    for shape in (ForwardShape(3, 5, 8), ForwardShape(40, 4, 8)):
        for folding in (Folding(0.1, "own"), Folding(0.1, "own", time_delta=0.1), Folding(-1, "own", block_cache=True)):
            forward = FusedForward(ops, engine.model, pool, shape, folding)
            found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors_of(forward)}
            counted = forward_bytes(spec, torch.float32, shape, folding)
            assert counted == pytest.approx(sum(found.values()), rel=0.02)


def tensors_of(forward: FusedForward) -> Iterator[torch.Tensor]:
    """All tensors in a forward's own fields, weights and pages left out."""
    for name, value in vars(forward).items():
        if isinstance(value, torch.Tensor):
            yield value
        elif name in ("maps", "arena", "_prefix") and value is not None:
            yield from (x for f in fields(value) if isinstance(x := getattr(value, f.name), torch.Tensor))
