"""Counter-based noise: Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

The noise of a token is a function of its key and counter alone, so any batch, order or retry draws the same.
"""

from __future__ import annotations

import torch

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox_4x32(counter: list[torch.Tensor], key: list[torch.Tensor]) -> list[torch.Tensor]:
    """Four 32-bit words a counter. ``counter``: four, ``key``: two int64 tensors of values below 2**32, broadcastable.

    Counter 0 and key 0 give 6627e8d5 e169c58d bc57ac4c 9b00dbd8 (Random123's known answer).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product of two 32-bit words wraps in int64, but its bits are right; the shift's sign bits are masked off.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, low0 = (product0 >> 32) & _MASK32, product0 & _MASK32
        high1, low1 = (product1 >> 32) & _MASK32, product1 & _MASK32
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return [c0, c1, c2, c3]


def gumbel_noise(
    key_R2: torch.Tensor, sample_R: torch.Tensor, position_R: torch.Tensor, masks_left_R: torch.Tensor, vocab: int
) -> torch.Tensor:
    """Standard Gumbel noise for every token of each row, float32 [R, vocab]. All inputs int64, below 2**32."""
    words = torch.arange(-(-vocab // 4), device=key_R2.device)[None]
    counter = [words, position_R[:, None], masks_left_R[:, None], sample_R[:, None]]
    bits = torch.stack(philox_4x32(counter, [key_R2[:, :1], key_R2[:, 1:]]), dim=-1).flatten(1)[:, :vocab]
    return _gumbel(bits)


def gumbel_noise_of(
    key_R2: torch.Tensor,
    sample_R: torch.Tensor,
    position_R: torch.Tensor,
    masks_left_R: torch.Tensor,
    token_RJ: torch.Tensor,
) -> torch.Tensor:
    """The same noise for chosen tokens only, float32 [R, J]."""
    counter = [token_RJ // 4, position_R[:, None], masks_left_R[:, None], sample_R[:, None]]
    bits = torch.stack(philox_4x32(counter, [key_R2[:, :1], key_R2[:, 1:]]), dim=-1)
    return _gumbel(bits.gather(-1, (token_RJ % 4).unsqueeze(-1)).squeeze(-1))


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    """-log(-log(1 - u)). Large noise needs u near 0, where float32 keeps all 32 bits; u stays below 1."""
    u = ((bits.double() + 0.5) * 2.0**-32).float().clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-u))
