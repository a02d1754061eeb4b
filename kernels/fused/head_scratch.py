"""Working memory of the LM head: what one slice of rows leaves between the passes over its logits.

R rows of a slice, V vocabulary, N vocabulary tiles, C chunks of the vocabulary in which tokens are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

VOCAB_TILE = 128
NUM_CHUNKS = 16
CHUNK_STEP = 1024
"""Tokens a chunk handles at once; chunks hold whole steps."""
KEPT_LOGITS = 1 << 27
"""Logits of one slice (512 MiB in float32) where they have to be kept; without drafts and sampling they are not."""


def chunk_size(vocab: int) -> int:
    """Tokens of a chunk."""
    return -(-vocab // (NUM_CHUNKS * CHUNK_STEP)) * CHUNK_STEP


@dataclass(frozen=True, slots=True)
class HeadScratch:
    """Undefined between calls. Only one slice of rows uses it at a time."""

    best_RN: torch.Tensor
    """float32: largest logit of a tile, the mask id left out."""
    at_RN: torch.Tensor
    """int32: its token, the lowest of equals."""
    sum_RN: torch.Tensor
    """float32: sum of ``exp(logit - best)`` over the tile, the mask id left out."""
    mask_logit_R: torch.Tensor
    """float32."""
    logits_RV: torch.Tensor
    """float32, -inf at the mask id; empty where they need not be kept."""
    value_RC: torch.Tensor
    """float32: largest noisy logit of a chunk at the row's temperature."""
    token_RC: torch.Tensor
    """int32: its token."""
    mass_RC: torch.Tensor
    """float32: sum of ``exp((logit - row's best) / temperature)`` over a chunk."""
    num_keys_RC: torch.Tensor
    """int32: candidates of a chunk, for rows under top-k or top-p."""
    keys_RK: torch.Tensor
    """int64: the candidates, logit at temperature above and token below, K = C chunks of V / C places; or empty."""

    @property
    def num_rows(self) -> int:
        """R, the rows of a slice."""
        return self.best_RN.shape[0]

    @classmethod
    def make(
        cls, num_rows: int, vocab: int, num_top: int, sampled: bool, limited: bool, device: torch.device | str
    ) -> HeadScratch:
        """For calls of up to ``num_rows`` rows, in slices where all their logits would be too many."""
        kept = num_top > 0 or sampled
        if kept:
            num_rows = min(num_rows, max(128, KEPT_LOGITS // vocab // 128 * 128 // (3 if limited else 1)))
        rows = min(num_rows, 4096)
        tiles = -(-vocab // VOCAB_TILE)

        def make(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty((rows, width), dtype=dtype, device=device)

        chunks = NUM_CHUNKS if sampled else 0
        return cls(
            make(tiles),
            make(tiles, torch.int32),
            make(tiles),
            make(1).squeeze(1),
            make(vocab if kept else 0),
            make(chunks),
            make(chunks, torch.int32),
            make(chunks),
            make(chunks, torch.int32),
            make(NUM_CHUNKS * chunk_size(vocab) if limited else 0, torch.int64),
        )
