"""The softmax states over the prefix that ``prefix_attention`` leaves and ``block_attention`` adds the block to.

The prefix is cut into at most C chunks. Where there are few rows each chunk is a program's, and leaves a state of its
own; where there are many, one program merges the chunks of a row, in ascending order. ``block_attention`` merges what
it finds by the same operations in the same order, so a row's bits do not depend on who did.

R rows, H query heads, G key/value heads, Y = H / G, D head width, C chunks. States lie head by head, so that
the queries of consecutive rows follow one another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_CHUNKS = 8
"""Every state is read again, so more chunks end no sooner."""
MAX_BLOCK_TILES = 4


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Tiles of both kernels, one plan for all of a run. The last three fields do not show in the bits; nor does a
    ``query_tile`` of 128 with ``num_warps`` of 8 instead of 64 with 4: a warp group has 64 queries in both."""

    query_tile: int
    key_tile: int
    """At most two pages, and whole pages or a part of one."""
    num_warps: int
    num_stages: int
    block_query_tile: int
    block_warps: int
    """A tile has fewer queries than keys, so the warps share the keys of a score and the columns of a sum."""
    max_chunks: int = MAX_CHUNKS
    min_chunk: int = 128
    """Chunks are multiples of it; a multiple of the key tile. Two tiles of keys are on their way at once."""
    split_tiles: int = 132
    """Chunks are side by side in slots that would make fewer query tiles than this, if all slots were like them."""
    keys_a_tile: int = 8
    """And only where the prefix has more keys than this times the query tiles: a chunk's state is written once and read
    by each branch, a tile of 64 keys costs a program half a microsecond."""
    block_registers: int | None = 80
    """A thread's in block attention: three programs of 256 threads fit on a multiprocessor."""
    block_programs: int = 264
    """Where block attention would have more programs, each takes several query tiles of a branch, up to
    ``MAX_BLOCK_TILES``, and reads the block's keys and values once."""


PLANS = {
    torch.bfloat16: AttentionPlan(64, 64, 4, 3, block_query_tile=16, block_warps=8),
    torch.float32: AttentionPlan(16, 64, 4, 2, block_query_tile=16, block_warps=4),
}


def chunk_keys(plan: AttentionPlan, prefix_len: int) -> int:
    """Keys of one chunk. The kernels compute the same."""
    return plan.min_chunk * max(1, -(-prefix_len // (plan.max_chunks * plan.min_chunk)))


@triton.jit
def cut_prefix(
    num_queries, length, num_slots, G: tl.constexpr, BM: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    SPLIT_TILES: tl.constexpr, KEYS_A_TILE: tl.constexpr,
):  # fmt: skip
    """Keys of a slot's chunks, and how many states its rows have: one a chunk, or one; none without a prefix."""
    chunk = tl.maximum((length + CHUNKS * CHUNK - 1) // (CHUNKS * CHUNK), 1) * CHUNK
    tiles = (num_queries + BM - 1) // BM * G * num_slots
    is_split = (tiles < SPLIT_TILES) & (tiles * KEYS_A_TILE < length)
    return chunk, tl.where(is_split, (length + chunk - 1) // chunk, tl.minimum(length, 1))


@dataclass(frozen=True, slots=True)
class PrefixState:
    """Softmax over the prefix before normalisation, float32: one state a chunk, or only the first, for all chunks.

    ``l = sum(2 ** (score - m))`` and ``acc = sum(2 ** (score - m) * v)``, with scores and m in base 2. Undefined for
    rows whose prefix is empty. The torch references use the first state only.
    """

    m_CGRY: torch.Tensor
    l_CGRY: torch.Tensor
    acc_CGRYD: torch.Tensor
    plan: AttentionPlan

    @classmethod
    def allocate(cls, q_RHD: torch.Tensor, num_kv: int, split: bool, plan: AttentionPlan | None = None) -> PrefixState:
        """State for rows like ``q``; ``split`` allows a state a chunk, which pays where there may be few rows."""
        plan = plan or PLANS[q_RHD.dtype]
        num_rows, num_heads, head_dim = q_RHD.shape
        shape = (plan.max_chunks if split else 1, num_kv, num_rows, num_heads // num_kv)
        m, total = (q_RHD.new_empty(shape, dtype=torch.float32) for _ in range(2))
        acc = q_RHD.new_empty((*shape, head_dim), dtype=torch.float32)
        assert acc.numel() < 2**31, "the kernels count elements in 32 bits"
        return cls(m, total, acc, plan)

    @property
    def split_tiles(self) -> int:
        return self.plan.split_tiles if len(self.m_CGRY) > 1 else 0


def padded_width(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))
