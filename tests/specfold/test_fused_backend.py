"""The fused backend against the torch one: same tokens, same counters; and on a GPU the same bits in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specfold import ConfigError, DecodeConfig, Request
from specfold.backends.memory import plan_memory
from specfold.backends.select import check_backend
from specfold.decoder import Decoder
from tests.specfold.fused_checks import (
    decode,
    hold_bits,
    hold_fixed_sequence,
    hold_kernels,
    hold_modes_on_gpu,
    on_device,
    on_gpu,
    with_backend,
)
from tests.specfold.random_models import FAMILY_NAMES, MASK, random_engine

few = settings(max_examples=30)

MODES: list[tuple[str, dict[str, Any]]] = [
    ("vanilla", {}),
    ("spiffy", {"drafts": 4}),
    ("specfold", {"drafts": 6, "delta": 0.1}),
    ("specfold", {"drafts": 3, "delta": 0.3, "ffn_gate": "entry"}),
    ("specfold", {"drafts": 4, "delta": 0.0, "threshold": 0.3}),
    ("specfold", {"drafts": 8, "draft_budget": 3, "delta": 0.1}),
    ("spiffy", {"drafts": 6, "draft_budget": 2, "temperature": 0.9}),
    ("spiffy", {"drafts": 5, "temperature": 0.9, "top_p": 0.8}),
    ("vanilla", {"temperature": 1.3, "top_k": 5}),
    ("ar", {}),
    ("linear_spec", {}),
    ("vanilla", {"causal_context": False}),
    ("specfold", {"max_thinking_tokens": 3, "end_think_token_id": 7}),
]


def modes_of(family: str) -> list[tuple[str, dict[str, Any]]]:
    """What a family can decode with."""
    if family == "nemotron_labs_diffusion":
        return MODES
    return [(m, kw) for m, kw in MODES if m not in ("ar", "linear_spec") and kw.get("causal_context", True)]


@pytest.mark.parametrize("family", FAMILY_NAMES)
@given(data=st.data())
@few
def test_the_fixed_sequence_decodes_like_the_oracle(family: str, data: st.DataObject) -> None:
    hold_fixed_sequence(family, modes_of(family), data, st.integers(1, 24))


@pytest.mark.parametrize(
    ("family", "mode", "changes"),
    [
        ("fast_dllm_v2", "specfold", {"drafts": 2, "delta": 0.1, "max_new_tokens": 4}),
        ("nemotron_labs_diffusion", "spiffy", {"drafts": 1, "temperature": 0.9, "max_new_tokens": 3}),
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
def test_warming_up_leaves_no_trace(family: str) -> None:
    fused = with_backend(on_device(random_engine(family, 2), torch.float32), "triton")
    rows = [Request([(5 * i + n) % MASK for i in range(n)], row_id=n) for n in (3, 11, 40)]
    config = DecodeConfig(drafts=3, max_new_tokens=30)
    want = {row_id: c.token_ids for row_id, c in decode(fused, rows, config, 2).items()}
    fused.warm_up(config, 2)
    assert {row_id: c.token_ids for row_id, c in decode(fused, rows, config, 2).items()} == want


@on_gpu
def test_the_host_waits_for_no_more_than_the_step_before() -> None:
    engine = with_backend(on_device(random_engine("fast_dllm_v2", 2), torch.float32), "triton")
    config = DecodeConfig(drafts=3, max_new_tokens=40, delta_time=0.1)
    decoder = Decoder(engine, config, 8)
    rows = [Request([(5 * i + n) % MASK for i in range(20 + 3 * n)], row_id=n) for n in range(30)]
    finished, entered = [], 0
    try:
        while rows or not decoder.idle:
            while rows and decoder.has_room:
                decoder.admit(rows.pop())
                entered += 1
            finished += decoder.advance()
            # Compiled and captured by then. From now on any call that waits for all that is queued raises.
            torch.cuda.set_sync_debug_mode("error" if entered > 16 else "default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(finished) == 30


@on_gpu
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_all_lossless_modes_have_the_same_bits(family: str) -> None:
    folding = {"mode": "specfold", "delta": 0.0}
    hold_bits(
        family,
        [
            ({}, 6),
            ({"mode": "spiffy", "drafts": 8}, 4),
            ({}, 24),
            (folding | {"drafts": 3}, 6),
            (folding | {"drafts": 8}, 1),
        ],
    )


def test_a_triton_backend_without_a_gpu_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specfold.backends.select._interpreting", lambda: False)
    with pytest.raises(ConfigError, match="needs a CUDA device, not cpu; torch runs everywhere"):
        check_backend("triton", torch.device("cpu"))
    with pytest.raises(ConfigError, match="must be torch or triton, not 'cuda'"):
        check_backend("cuda", torch.device("cpu"))


def test_memory_is_planned_before_anything_is_allocated() -> None:
    plan = plan_memory(10 << 30, 3 << 30, 1 << 30, 1 << 20, useful_pages=100_000, least_pages=4)
    assert plan.num_pages == (9 << 10) - 768
    assert plan.rows_of(1024) == plan.num_pages // 32
    assert "room for 264 rows at once with prompts of 1,000 and 24 new tokens" in plan.describe(1000, 24)
    assert plan_memory(10 << 30, 0, 1 << 30, 1 << 20, useful_pages=50, least_pages=4).num_pages == 50
    with pytest.raises(ConfigError, match=r"has 1.00 GiB free .* one row needs 1.75 GiB: lower the batch size"):
        plan_memory(1 << 30, 0, 1 << 30, 1 << 20, useful_pages=50, least_pages=4)


def test_rows_wait_for_pages_and_all_come_through() -> None:
    engine = random_engine("fast_dllm_v2", 0)
    rows = [Request([i % MASK for i in range(40 + n)], row_id=n) for n in range(5)]
    config = DecodeConfig(mode="spiffy", drafts=2, max_new_tokens=12)
    decoder = Decoder(with_backend(engine, "reference"), config, 4)
    # Room for one row and a bit: 3 pages of its own and one or two of its prompt.
    decoder.backend.pool.allocate(decoder.backend.pool.num_pages - 6)
    waiting, got, waited = list(rows), {}, False
    while waiting or not decoder.idle:
        while waiting and decoder.has_room:
            assert decoder.admit(waiting.pop(0)) is None
        waited |= None in decoder.rows and not decoder.has_room
        got |= {completion.row_id: completion for _, completion in decoder.advance()}
    assert waited, "there were pages for all"
    want = decode(engine, rows, config, 4)
    assert {row_id: c.token_ids for row_id, c in got.items()} == {row_id: c.token_ids for row_id, c in want.items()}


def test_a_row_that_can_never_fit_is_an_error_row() -> None:
    engine = random_engine("fast_dllm_v2", 0)
    decoder = Decoder(with_backend(engine, "reference"), DecodeConfig(max_new_tokens=12), 2)
    decoder.backend.pool.allocate(decoder.backend.pool.num_pages - 1)
    refused = decoder.admit(Request([1] * 40))
    assert refused is not None
    assert refused.error_kind == "no_memory"


def test_a_row_that_can_never_fit_holds_nobody_up() -> None:
    engine = random_engine("fast_dllm_v2", 0)
    rows = [Request([i % MASK for i in range(n)], row_id=n) for n in (20, 300, 21)]
    config = DecodeConfig(mode="spiffy", drafts=2, max_new_tokens=12)
    decoder = Decoder(with_backend(engine, "reference"), config, 4)
    decoder.backend.pool.allocate(decoder.backend.pool.num_pages - 6)
    waiting, got = list(rows), {}
    for _ in range(200):
        while waiting and decoder.has_room:
            assert decoder.admit(waiting.pop(0)) is None
        got |= {completion.row_id: completion for _, completion in decoder.advance()}
    assert decoder.idle
    assert got.keys() == {20, 300, 21}
    assert got[300].error_kind == "no_memory"
    want = decode(engine, [rows[0], rows[2]], config, 4)
    assert {row_id: got[row_id].token_ids for row_id in want} == {row_id: c.token_ids for row_id, c in want.items()}
