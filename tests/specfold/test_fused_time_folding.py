"""Folding in time and the sub-block cache on the fused backend against the torch engine: same tokens, same counters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specfold import DecodeConfig, Engine, Request, reference_models
from specfold.backends.fused_forward import ForwardShape, FusedForward, forward_bytes
from specfold.backends.operations import load_operations
from specfold.folding import Folding
from specfold.pages import PagePool
from tests.specfold.random_models import FAMILY_NAMES, MASK, random_engine
from tests.specfold.test_fused_backend import DEVICE, confidences, counters, decode, on_device, on_gpu, with_backend

few = settings(max_examples=16, deadline=None, derandomize=True)

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
        ("fast_dllm_v2", "specfold", {"delta_time": 0.2, "drafts": 1, "delta": 0.1, "max_new_tokens": 4}),
        ("nemotron_labs_diffusion", "vanilla", {"delta_time": 0.2, "max_new_tokens": 3}),
        ("fast_dllm_v2", "vanilla", {"use_block_cache": True, "small_block_size": 4, "max_new_tokens": 3}),
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


@on_gpu
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_mode_on_a_gpu_decodes_like_the_oracle(family: str) -> None:
    engine = on_device(random_engine(family, 2), torch.float32)
    fused = with_backend(engine, "triton")
    rows = [Request([(5 * i + n) % MASK for i in range(n)], row_id=n) for n in (3, 11, 40, 300)]
    for mode, changes in modes_of(family):
        config = DecodeConfig(mode=mode, max_new_tokens=30, **changes)  # type: ignore[arg-type]
        want, got = decode(engine, rows, config, 3), decode(fused, rows, config, 3)
        for row_id, completion in want.items():
            assert got[row_id].token_ids == completion.token_ids, (mode, changes)
            assert counters(got[row_id]) == counters(completion), (mode, changes)


@on_gpu
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_at_a_threshold_of_0_all_bits_are_vanillas(family: str) -> None:
    """The main branch's confidences at bfloat16, by row and state, whoever else is in the batch."""
    engine = Engine.from_pretrained(reference_models.path(family), "cuda", "bfloat16", "triton")
    assert engine.tokenizer is not None
    ids = engine.tokenizer("Tom has 3 apples and buys 4 more. How many apples does Tom have now?")["input_ids"]
    prompts = [ids[: 5 + 3 * i] for i in range(6)]
    vanilla = DecodeConfig(mode="vanilla", max_new_tokens=64)
    want = confidences(engine, prompts, vanilla, 1)
    folded = replace(vanilla, delta_time=0.0)
    for config, batch in (
        (folded, 6),
        (replace(folded, refresh_every=4), 1),
        (replace(folded, mode="specfold", delta=0.0, drafts=4), 4),
    ):
        got = confidences(engine, prompts, config, batch)
        assert got.keys() <= want.keys()
        assert len(got) >= 20
        for key, value in got.items():
            # With drafts the head looks further ahead: the next group's masks too.
            asked = want[key] > -torch.inf
            assert torch.equal(value[asked], want[key][asked]), config


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
