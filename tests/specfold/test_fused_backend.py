"""The fused backend against the torch one: same tokens, same counters; and on a GPU the same bits in every mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specfold import Completion, ConfigError, DecodeConfig, Engine, Request, reference_models
from specfold.backends.fused_backend import FusedBackend
from specfold.backends.memory import plan_memory
from specfold.backends.select import check_backend
from specfold.decoder import Decoder
from tests.specfold.random_models import FAMILY_NAMES, MASK, random_engine

few = settings(max_examples=30, deadline=None, derandomize=True)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

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


def with_backend(engine: Engine, backend: str) -> Engine:
    return Engine(engine.model, engine.info, engine.tokenizer, backend)


def decode(engine: Engine, rows: list[Request], config: DecodeConfig, batch_size: int) -> dict[int, Completion]:
    return {c.row_id: c for c in engine.stream(iter(rows), config, batch_size)}


def counters(completion: Completion) -> dict[str, Any]:
    """All but the time."""
    return completion.stats.to_dict() | {"seconds": 0}


@pytest.mark.parametrize("family", FAMILY_NAMES)
@given(data=st.data())
@few
def test_the_fixed_sequence_decodes_like_the_oracle(family: str, data: st.DataObject) -> None:
    """The references of the kernels, in the order of the captured step: every token and every counter."""
    engine = random_engine(family, data.draw(st.integers(0, 3)))
    mode, changes = data.draw(st.sampled_from(modes_of(family)))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True))
    rows = [Request([(7 * i + n) % MASK for i in range(n)], row_id=i) for i, n in enumerate(lengths)]
    config = DecodeConfig(mode=mode, max_new_tokens=data.draw(st.integers(1, 24)), **changes)  # type: ignore[arg-type]
    want = decode(engine, rows, config, 2)
    got = decode(with_backend(engine, "reference"), rows, config, 3)
    for row_id, completion in want.items():
        assert got[row_id].token_ids == completion.token_ids
        assert got[row_id].finish_reason == completion.finish_reason
        assert counters(got[row_id]) == counters(completion)


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


def on_device(engine: Engine, dtype: torch.dtype) -> Engine:
    """The same weights on the GPU."""
    model = engine.model

    def move(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.to("cuda", dtype)

    layers = [replace(layer, **{n: move(getattr(layer, n)) for n in layer.__slots__}) for layer in model.layers]
    moved = replace(
        model, embedding_VE=move(model.embedding_VE), layers=layers, norm_E=move(model.norm_E),
        head_VE=move(model.head_VE), _rope=(),
    )  # fmt: skip
    return Engine(moved, engine.info, engine.tokenizer, engine.backend)


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
def test_warming_up_leaves_no_trace(family: str) -> None:
    fused = with_backend(on_device(random_engine(family, 2), torch.float32), "triton")
    rows = [Request([(5 * i + n) % MASK for i in range(n)], row_id=n) for n in (3, 11, 40)]
    config = DecodeConfig(drafts=3, max_new_tokens=30)
    want = {row_id: c.token_ids for row_id, c in decode(fused, rows, config, 2).items()}
    fused.warm_up(config, 2)
    assert {row_id: c.token_ids for row_id, c in decode(fused, rows, config, 2).items()} == want


@on_gpu
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_all_lossless_modes_have_the_same_bits(family: str) -> None:
    """The main branch's confidences, by row and state, at bfloat16: vanilla alone, spiffy and delta 0 in batches."""
    engine = Engine.from_pretrained(reference_models.path(family), "cuda", "bfloat16", "triton")
    text = "Tom has 3 apples and buys 4 more. How many apples does Tom have now?"
    ids = engine.tokenizer(text)["input_ids"]
    prompts = [ids[: 5 + 3 * i] for i in range(6)]
    vanilla = DecodeConfig(mode="vanilla", max_new_tokens=64)
    want = confidences(engine, prompts, vanilla, 1)
    assert len(want) >= 40
    for config, batch in (
        (vanilla, 6),
        (replace(vanilla, mode="spiffy", drafts=8), 4),
        (replace(vanilla, mode="specfold", delta=0.0, drafts=3), 6),
        (replace(vanilla, mode="specfold", delta=0.0, drafts=8), 1),
    ):
        got = confidences(engine, prompts, config, batch)
        assert got.keys() <= want.keys()
        assert len(got) >= 20
        for key, value in got.items():
            # With drafts the head looks further ahead: the next group's masks too.
            asked = want[key] > -torch.inf
            assert torch.equal(value[asked], want[key][asked]), config


def confidences(
    engine: Engine, prompts: list[list[int]], config: DecodeConfig, batch_size: int
) -> dict[tuple[int, ...], torch.Tensor]:
    """Confidences of the main branch before every step, by the row's length and the block's place and state."""
    decoder = Decoder(engine, config, batch_size)
    backend = decoder.backend
    assert isinstance(backend, FusedBackend)
    step, found, waiting = backend.fused_step, {}, list(prompts)
    while waiting or not decoder.idle:
        while waiting and decoder.has_free_slot:
            decoder.admit(Request(waiting.pop()))
        decoder.prepare()
        slots = backend.slots
        before = slots.active_S.tolist(), slots.start_S.tolist(), slots.state_ST.tolist(), slots.prompt_len_S.tolist()
        decoder.decode()
        for slot, (active, start, state, prompt) in enumerate(zip(*before, strict=True)):
            if active and engine.mask_token_id in state:
                at = int(step.branches.index_SB[slot, 0])
                found[prompt, start, *state] = step.predictions.confidence_AT[at].clone()
    return found


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
        while waiting and decoder.has_free_slot:
            assert decoder.admit(waiting.pop(0)) is None
        waited |= None in decoder.rows and not decoder.has_free_slot
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
