"""What tests of the fused backend share: the same engine on another backend or device, and the checks against the torch
engine, the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from specfold import Completion, DecodeConfig, Engine, Request, reference_models
from specfold.backends.fused_backend import FusedBackend
from specfold.decoder import Decoder
from tests.specfold.random_models import MASK, random_engine

Modes = Sequence[tuple[str, dict[str, Any]]]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def with_backend(engine: Engine, backend: str) -> Engine:
    return Engine(engine.model, engine.info, engine.tokenizer, backend)


def decode(engine: Engine, rows: list[Request], config: DecodeConfig, batch_size: int) -> dict[int, Completion]:
    return {c.row_id: c for c in engine.stream(iter(rows), config, batch_size)}


def counters(completion: Completion) -> dict[str, Any]:
    """All but the time."""
    return completion.stats.to_dict() | {"seconds": 0}


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


def hold(got: dict[int, Completion], want: dict[int, Completion], case: Any = None) -> None:
    """The same rows with the same tokens, ends and counters."""
    assert got.keys() == want.keys(), case
    for row_id, completion in want.items():
        assert got[row_id].token_ids == completion.token_ids, case
        assert got[row_id].finish_reason == completion.finish_reason, case
        assert counters(got[row_id]) == counters(completion), case


def hold_fixed_sequence(family: str, modes: Modes, data: st.DataObject, max_new_tokens: st.SearchStrategy[int]) -> None:
    """The references of the kernels, in the order of the captured step, on any prompts and one of the modes."""
    engine = random_engine(family, data.draw(st.integers(0, 3)))
    mode, changes = data.draw(st.sampled_from(modes))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True))
    rows = [Request([(7 * i + n) % MASK for i in range(n)], row_id=i) for i, n in enumerate(lengths)]
    config = DecodeConfig(mode=mode, max_new_tokens=data.draw(max_new_tokens), **changes)  # type: ignore[arg-type]
    hold(decode(with_backend(engine, "reference"), rows, config, 3), decode(engine, rows, config, 2))


def hold_kernels(family: str, mode: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels on one short row, in the interpreter where there is no GPU."""
    # Full chunks take the interpreter half a minute.
    monkeypatch.setattr("specfold.backends.fused_prefill.CHUNK", 16)
    engine = random_engine(family, 1)
    if DEVICE == "cuda":
        engine = on_device(engine, torch.float32)
    rows = [Request([(5 * i + 11) % MASK for i in range(11)], row_id=11)]
    config = DecodeConfig(mode=mode, **changes)  # type: ignore[arg-type]
    hold(decode(with_backend(engine, "triton"), rows, config, 2), decode(engine, rows, config, 2))


def hold_modes_on_gpu(family: str, modes: Modes) -> None:
    """Every mode at float32, prompts of several chunks included."""
    engine = on_device(random_engine(family, 2), torch.float32)
    rows = [Request([(5 * i + n) % MASK for i in range(n)], row_id=n) for n in (3, 11, 40, 300)]
    for mode, changes in modes:
        config = DecodeConfig(mode=mode, max_new_tokens=30, **changes)  # type: ignore[arg-type]
        want = decode(engine, rows, config, 3)
        # Eight slots take several prompts in one forward.
        for batch_size in (3, 8):
            hold(decode(with_backend(engine, "triton"), rows, config, batch_size), want, (mode, changes))


def hold_bits(family: str, cases: Sequence[tuple[dict[str, Any], int]]) -> None:
    """The main branch's confidences at bfloat16, by row and state: vanilla's alone, and of cases (changes to
    vanilla, and batch size)."""
    engine = Engine.from_pretrained(reference_models.path(family), "cuda", "bfloat16", "triton")
    assert engine.tokenizer is not None
    ids = engine.tokenizer("Tom has 3 apples and buys 4 more. How many apples does Tom have now?")["input_ids"]
    prompts = [ids[: 5 + 3 * i] for i in range(6)]
    vanilla = DecodeConfig(mode="vanilla", max_new_tokens=64)
    want = confidences(engine, prompts, vanilla, 1)
    assert len(want) >= 40
    for changes, batch in cases:
        got = confidences(engine, prompts, replace(vanilla, **changes), batch)
        assert got.keys() <= want.keys()
        assert len(got) >= 20
        for key, value in got.items():
            # With drafts the head looks further ahead: the next group's masks too.
            asked = want[key] > -torch.inf
            assert torch.equal(value[asked], want[key][asked]), changes


def confidences(
    engine: Engine, prompts: list[list[int]], config: DecodeConfig, batch_size: int
) -> dict[tuple[int, ...], torch.Tensor]:
    """Confidences of the main branch before every step, by the row's length and the block's place and state."""
    decoder = Decoder(engine, config, batch_size)
    backend = decoder.backend
    assert isinstance(backend, FusedBackend)
    step, found, waiting = backend.fused_step, {}, list(prompts)
    while waiting or not decoder.idle:
        while waiting and decoder.has_room:
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
