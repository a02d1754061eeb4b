"""The LM head: logits to the chosen token, its confidence and the top J, a slice of rows at a time.

R rows, E hidden width, V vocabulary, J kept tokens. Logits of all rows never stand in memory together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.linear import ROW_TILE, linear_rows
from kernels.noise import gumbel_noise

MAX_LOGITS = 1 << 24
"""Logits held at once (64 MiB in float32)."""


class HeadOutput(NamedTuple):
    """What decoding needs of the logits of each row."""

    token_R: torch.Tensor
    """Chosen token: argmax, or the Gumbel maximum where the temperature is above 0. Never the mask id."""
    confidence_R: torch.Tensor
    """Its probability, by the family's rule."""
    top_token_RJ: torch.Tensor
    top_logprob_RJ: torch.Tensor
    """The J most likely tokens at temperature 1, best first, the mask id left out; they serve drafts only."""
    invalid_R: torch.Tensor
    """The logits hold NaN or infinity."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling settings and noise counters of each row; temperature 0 is greedy."""

    temperature_R: torch.Tensor
    top_p_R: torch.Tensor
    top_k_R: torch.Tensor
    key_R2: torch.Tensor
    sample_R: torch.Tensor
    position_R: torch.Tensor
    masks_left_R: torch.Tensor

    def rows(self, index: torch.Tensor | slice) -> RowSampling:
        """The settings of some rows."""
        return RowSampling(*(getattr(self, name)[index] for name in self.__slots__))


def head_rows(
    h_RE: torch.Tensor,
    weight_VE: torch.Tensor,
    mask_id: int,
    num_top: int,
    sampling: RowSampling,
    plain_confidence: bool,
) -> HeadOutput:
    """Decides a token for every row of final hidden states (after the last norm).

    Confidence of a sampled token: its plain softmax probability where ``plain_confidence``, else its probability after
    temperature, top-k and top-p. Ties go to the lowest token id.
    """
    step = max(ROW_TILE, MAX_LOGITS // len(weight_VE) // ROW_TILE * ROW_TILE)
    parts = []
    for start in range(0, max(len(h_RE), 1), step):
        rows = slice(start, start + step)
        logits = linear_rows(h_RE[rows], weight_VE).float()
        parts.append(_decide(logits, mask_id, num_top, sampling.rows(rows), plain_confidence))
    return HeadOutput(*map(torch.cat, zip(*parts, strict=True)))


def _decide(
    logits_RV: torch.Tensor, mask_id: int, num_top: int, sampling: RowSampling, plain_confidence: bool
) -> HeadOutput:
    total_R = torch.logsumexp(logits_RV, dim=-1)
    invalid_R = ~torch.isfinite(total_R)
    logits_RV[:, mask_id] = -torch.inf
    token_R = logits_RV.argmax(dim=-1)
    confidence_R = torch.exp(logits_RV.gather(1, token_R[:, None]).squeeze(1) - total_R)
    top = logits_RV.topk(min(num_top, logits_RV.shape[1] - 1), dim=-1)
    sampled = (sampling.temperature_R > 0).nonzero().squeeze(1)
    if len(sampled):
        token, confidence = _sample(logits_RV[sampled], sampling.rows(sampled))
        token_R[sampled] = token
        if plain_confidence:
            confidence = torch.exp(logits_RV[sampled].gather(1, token[:, None]).squeeze(1) - total_R[sampled])
        confidence_R[sampled] = confidence
    return HeadOutput(token_R, confidence_R, top.indices, top.values - total_R[:, None], invalid_R)


def _sample(logits_RV: torch.Tensor, sampling: RowSampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Gumbel maximum inside top-k and top-p, and the chosen token's probability there."""
    scaled = logits_RV / sampling.temperature_R[:, None]
    scaled = keep_top(scaled, sampling.top_k_R, sampling.top_p_R)
    noise = gumbel_noise(
        sampling.key_R2, sampling.sample_R, sampling.position_R, sampling.masks_left_R, scaled.shape[1]
    )
    token = (scaled + noise).argmax(dim=-1)
    return token, torch.exp(scaled.gather(1, token[:, None]).squeeze(1) - torch.logsumexp(scaled, dim=-1))


def keep_top(logits_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor) -> torch.Tensor:
    """Logits outside the k best, or outside the smallest set that holds probability p, become -inf.

    ``top_k`` 0 and ``top_p`` 1 keep everything; the best token always stays.
    """
    limited = ((top_k_R > 0) | (top_p_R < 1)).nonzero().squeeze(1)
    if not len(limited):
        return logits_RV
    values, order = logits_RV[limited].sort(dim=-1, descending=True, stable=True)
    top_k = top_k_R[limited, None]
    rank = torch.arange(values.shape[1], device=values.device)[None]
    values = values.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf)
    probability = values.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    values = values.masked_fill((before > top_p_R[limited, None]) & (rank > 0), -torch.inf)
    kept = logits_RV.clone()
    kept[limited] = torch.empty_like(values).scatter_(1, order, values)
    return kept
