"""Philox and Gumbel noise inside Triton kernels."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernels.fused.noise import gumbel, philox_words
from kernels.noise import gumbel_noise_of
from tests.kernels.fused_inputs import DEVICE, poisoned


@triton.jit
def _words(p_counter, p_key, p_out):
    i = tl.arange(0, 1)
    words = philox_words(
        tl.load(p_counter + i), tl.load(p_counter + 1), tl.load(p_counter + 2), tl.load(p_counter + 3),
        tl.load(p_key), tl.load(p_key + 1),
    )  # fmt: skip
    for j in tl.static_range(4):
        tl.store(p_out + j + i, words[j].to(tl.int64))


@triton.jit
def _noise(p_token, p_counter, p_key, p_out, N: tl.constexpr):
    i_n = tl.arange(0, N)
    b_noise = gumbel(
        tl.load(p_token + i_n), tl.load(p_counter), tl.load(p_counter + 1), tl.load(p_counter + 2),
        tl.load(p_key), tl.load(p_key + 1),
    )  # fmt: skip
    tl.store(p_out + i_n, b_noise)


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ([0, 0, 0, 0], [0, 0], "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_words_are_random123s_known_answers(counter: list[int], key: list[int], want: str) -> None:
    words = poisoned(4, dtype=torch.int64)
    _words[(1,)](torch.tensor(counter, device=DEVICE), torch.tensor(key, device=DEVICE), words)
    assert " ".join(f"{w:08x}" for w in words.tolist()) == want


def test_noise_is_that_of_the_reference() -> None:
    """The same float32 but for the last digits of two logarithms."""
    count = 4096
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 152064, (count,), generator=generator).to(DEVICE)
    counter, key = torch.tensor([1234, 7, 2**31 + 5]), torch.tensor([2**32 - 3, 2**31])
    noise = poisoned(count)
    _noise[(1,)](tokens, counter.to(DEVICE), key.to(DEVICE), noise, count)
    want = gumbel_noise_of(
        key[None].to(DEVICE), *(counter[[i], None].squeeze(1).to(DEVICE) for i in (2, 0, 1)), tokens[None]
    )[0]
    assert torch.allclose(noise, want, rtol=2e-6, atol=1e-6)
