"""Folding in time and the sub-block cache on the fused backend against the torch engine: same tokens, same counters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specfold import DecodeConfig, Request
from tests.specfold.random_models import FAMILY_NAMES, MASK, random_engine
from tests.specfold.test_fused_backend import DEVICE, counters, decode, on_device, on_gpu, with_backend

few = settings(max_examples=25, deadline=None, derandomize=True)

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
    """The references of the kernels, in the order of the captured step: every token and every counter."""
    engine = random_engine(family, data.draw(st.integers(0, 3)))
    mode, changes = data.draw(st.sampled_from(modes_of(family)))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True))
    rows = [Request([(7 * i + n) % MASK for i in range(n)], row_id=i) for i, n in enumerate(lengths)]
    config = DecodeConfig(mode=mode, max_new_tokens=data.draw(st.integers(8, 32)), **changes)  # type: ignore[arg-type]
    want = decode(engine, rows, config, 2)
    got = decode(with_backend(engine, "reference"), rows, config, 3)
    for row_id, completion in want.items():
        assert got[row_id].token_ids == completion.token_ids
        assert got[row_id].finish_reason == completion.finish_reason
        assert counters(got[row_id]) == counters(completion)


@pytest.mark.parametrize(
    ("family", "mode", "changes"),
    [
        ("fast_dllm_v2", "specfold", {"delta_time": 0.2, "drafts": 2, "delta": 0.1, "max_new_tokens": 4}),
        ("nemotron_labs_diffusion", "vanilla", {"delta_time": 0.2, "max_new_tokens": 4}),
        ("fast_dllm_v2", "vanilla", {"use_block_cache": True, "small_block_size": 4, "max_new_tokens": 4}),
    ],
)
def test_the_kernels_decode_like_the_oracle(
    family: str, mode: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Full chunks take the interpreter half a minute.
    monkeypatch.setattr("specfold.backends.fused_prefill.CHUNK", 16)
    engine = random_engine(family, 1)
    if DEVICE == "cuda":
        engine = on_device(engine, torch.float32)
    rows = [Request([(5 * i + n) % MASK for i in range(n)], row_id=n) for n in (11,)]
    config = DecodeConfig(mode=mode, **changes)  # type: ignore[arg-type]
    want = decode(engine, rows, config, 2)
    got = decode(with_backend(engine, "triton"), rows, config, 2)
    for row_id, completion in want.items():
        assert got[row_id].token_ids == completion.token_ids
        assert counters(got[row_id]) == counters(completion)
