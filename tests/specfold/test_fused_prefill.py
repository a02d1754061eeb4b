"""Prompts that are cached in one forward: the same bits as alone, and fewer forwards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from specfold import DecodeConfig, Engine, Request
from specfold.backends.fused_prefill import _Chunks
from specfold.decoder import Decoder
from specfold.pages import PAGE_SIZE
from specfold.prefill import Prefill
from tests.specfold.fused_checks import DEVICE, decode, on_device, with_backend
from tests.specfold.random_models import FAMILY_NAMES, MASK, random_engine

CONFIG = DecodeConfig(mode="spiffy", drafts=2, max_new_tokens=9)


def prompt(length: int) -> list[int]:
    return [(5 * i + length) % MASK for i in range(length)]


def cached(engine: Engine, batch_size: int, lengths: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
    """Keys, values and last hidden state of prompts that ``batch_size`` slots take in at once."""
    decoder = Decoder(engine, CONFIG, batch_size)
    for length in lengths:
        assert decoder.admit(Request(prompt(length))) is None
    prefills = [row.prefill for row in decoder.rows if row is not None]
    while not all(prefill.finished for prefill in prefills):
        decoder.backend.prefill([prefill for prefill in prefills if not prefill.finished])
    pool, found = decoder.backend.pool, []
    for prefill in prefills:
        at = torch.arange(prefill.length)
        page = torch.tensor(prefill.pages)[at // PAGE_SIZE]
        k, v = (pages[:, page, at % PAGE_SIZE].clone() for pages in (pool.k, pool.v))
        found.append((k, v, torch.zeros(0) if prefill.last_hidden_E is None else prefill.last_hidden_E))
    return found


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_prompt_is_cached_alone_or_among_others_in_the_same_bits(
    family: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = random_engine(family, 3)
    lengths: tuple[int, ...] = (40, 290, 65, 17, 400, 33)
    if DEVICE == "cuda":
        if backend == "reference":
            pytest.skip("a CUDA graph cannot hold what waits for the device")
        engine = on_device(engine, torch.bfloat16)
    elif backend == "triton":
        if family != FAMILY_NAMES[0]:
            pytest.skip("the interpreter is slow, and families differ only in what the operations are told")
        # Full chunks take the interpreter half a minute.
        lengths = (11, 21)
        for module in ("specfold.backends.fused_prefill", "specfold.prefill"):
            monkeypatch.setattr(f"{module}.CHUNK", 16)
    engine = with_backend(engine, backend)
    together = cached(engine, 8, lengths)
    for length, got in zip(lengths, together, strict=True):
        (alone,) = cached(engine, 1, [length])
        for mine, want in zip(got, alone, strict=True):
            assert torch.equal(mine, want), length


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_rows_ahead_of_the_slots_share_forwards(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards: list[int] = []
    run = _Chunks.run

    def counted(self: _Chunks, prefills: Sequence[Prefill], lengths: Sequence[int]) -> torch.Tensor:
        forwards.append(len(prefills))
        return run(self, prefills, lengths)

    monkeypatch.setattr(_Chunks, "run", counted)
    engine = random_engine(family, 1)
    # Every prompt thrice: the samples of one share what is cached.
    rows = [Request(prompt(33 + 7 * (i // 3)), row_id=i, max_new_tokens=3 + i % 5) for i in range(60)]
    got = decode(with_backend(engine, "reference"), rows, CONFIG, 8)
    taken, count = sum(forwards), len(forwards)
    want = decode(engine, rows, CONFIG, 8)
    assert {row_id: c.token_ids for row_id, c in got.items()} == {row_id: c.token_ids for row_id, c in want.items()}
    assert taken < len(rows), "samples of one prompt were not cached once"
    assert count < 0.7 * taken
