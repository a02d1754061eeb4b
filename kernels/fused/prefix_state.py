"""The softmax state over the prefix that ``prefix_attention`` leaves and ``block_attention`` adds the block to.

R rows, H query heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

MAX_CHUNKS = 8
"""An estimate: merging a chunk should cost the last program about what 64 keys cost, so more chunks end no sooner."""
MIN_CHUNK = 128
"""Chunks are multiples of it; a multiple of every key tile."""
QUERY_TILE = {torch.bfloat16: 64, torch.float32: 16}


def chunk_keys(prefix_len: int) -> int:
    """Keys of one chunk. The kernel computes the same."""
    return MIN_CHUNK * max(1, -(-prefix_len // (MAX_CHUNKS * MIN_CHUNK)))


@dataclass(frozen=True, slots=True)
class ChunkStates:
    """Scratch: the chunks' states before they are merged. N query tiles of M queries, slot by slot and head by head."""

    m_NCM: torch.Tensor
    l_NCM: torch.Tensor
    acc_NCMD: torch.Tensor
    """With padded head width."""
    arrived_N: torch.Tensor
    """int32: how many of a tile's chunks are there; zero between calls."""


@dataclass(frozen=True, slots=True)
class PrefixState:
    """Softmax over the prefix before normalisation, float32. Undefined for rows whose prefix is empty.

    ``l = sum(2 ** (score - m))`` and ``acc = sum(2 ** (score - m) * v)``, with scores and m in base 2.
    """

    m_RH: torch.Tensor
    l_RH: torch.Tensor
    acc_RHD: torch.Tensor
    chunks: ChunkStates | None
    """None: one program computes all chunks of a row. The result is the same."""

    @classmethod
    def allocate(cls, q_RHD: torch.Tensor, num_kv: int, num_slots: int, room: int, split: bool) -> PrefixState:
        """State for rows like ``q``, ``room`` of them a slot.

        ``split`` is worth it for few slots (fewer query tiles than processors); its scratch is ``MAX_CHUNKS`` states.
        """
        num_rows, num_heads, head_dim = q_RHD.shape

        def floats(*shape: int) -> torch.Tensor:
            return q_RHD.new_empty(shape, dtype=torch.float32)

        chunks = None
        if split:
            tile = QUERY_TILE[q_RHD.dtype]
            num_tiles = num_slots * num_kv * triton.cdiv(room * (num_heads // num_kv), tile)
            shape = (num_tiles, MAX_CHUNKS, tile)
            arrived_N = q_RHD.new_zeros(num_tiles, dtype=torch.int32)
            chunks = ChunkStates(floats(*shape), floats(*shape), floats(*shape, padded_width(head_dim)), arrived_N)
        return cls(floats(num_rows, num_heads), floats(num_rows, num_heads), floats(*q_RHD.shape), chunks)


def padded_width(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))
