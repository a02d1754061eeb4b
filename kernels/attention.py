"""Branch attention: a shared prefix in pages, and each branch's own block.

Softmax over prefix and block is split: the prefix part of a query is a streaming state (running maximum m, sum l of
exponentials, weighted sum acc of values) that a folded query takes from its source; the block part is computed for
every branch with its own keys and merged in. Nothing is subtracted, so the result is exact.

A branches, T block positions, R recomputed rows, H query heads, G key/value heads, D head width, S slots,
P pages of W positions a slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.linear import ROW_TILE


class PrefixState(NamedTuple):
    """Softmax over the prefix, before normalisation, in float32."""

    m_RH: torch.Tensor
    l_RH: torch.Tensor
    acc_RHD: torch.Tensor


def prefix_attention(
    q_RHD: torch.Tensor,
    slot_R: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table_SP: torch.Tensor,
    prefix_len_S: torch.Tensor,
    scale: float,
) -> PrefixState:
    """Streaming state of every query over its slot's prefix; ``m`` is -inf where the prefix is empty.

    ``k_pages``, ``v_pages``: [pages, W, G, D]. ``slot_R`` is sorted. Queries of one slot are padded to whole tiles and
    see exactly ``prefix_len`` keys, so a query's bits depend on nothing outside its slot.
    """
    num_rows, num_heads, head_dim = q_RHD.shape
    width, num_kv = k_pages.shape[1], k_pages.shape[2]
    group = num_heads // num_kv
    m = q_RHD.new_full((num_rows, num_heads), -torch.inf, dtype=torch.float32)
    total = torch.zeros_like(m)
    acc = q_RHD.new_zeros((num_rows, num_heads, head_dim), dtype=torch.float32)
    counts = torch.bincount(slot_R, minlength=len(prefix_len_S)).tolist()
    start = 0
    for slot, (count, length) in enumerate(zip(counts, prefix_len_S.tolist(), strict=True)):
        rows = slice(start, start + count)
        start += count
        if not count or not length:
            continue
        pages = page_table_SP[slot, : -(-length // width)]
        k = k_pages[pages].flatten(0, 1)[:length].transpose(0, 1)
        v = v_pages[pages].flatten(0, 1)[:length].transpose(0, 1)
        padded = -(-count // ROW_TILE) * ROW_TILE
        q = q_RHD.new_zeros((num_kv, padded, group, head_dim))
        q[:, :count] = q_RHD[rows].view(count, num_kv, group, head_dim).transpose(0, 1)
        scores = torch.bmm(q.view(num_kv, padded * group, head_dim), k.transpose(1, 2)).float() * scale
        peak = scores.amax(dim=-1, keepdim=True)
        weights = torch.exp(scores - peak)
        values = torch.bmm(weights.to(v.dtype), v).float()

        def per_row(x: torch.Tensor, count: int = count) -> torch.Tensor:
            return x.view(num_kv, -1, group, x.shape[-1])[:, :count].transpose(0, 1).reshape(count, num_heads, -1)

        m[rows] = per_row(peak).squeeze(-1)
        total[rows] = per_row(weights.sum(dim=-1, keepdim=True)).squeeze(-1)
        acc[rows] = per_row(values)
    return PrefixState(m, total, acc)


def merge_block_attention(
    q_RHD: torch.Tensor,
    k_RGD: torch.Tensor,
    v_RGD: torch.Tensor,
    prefix: PrefixState,
    source_AT: torch.Tensor,
    mask_ATT: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention output of every branch position, [A, T, H, D], in the dtype of ``q``.

    Position n of a branch takes query and prefix state from row ``source[a, n]`` and sees the keys and values of rows
    ``source[a, :]`` where ``mask[a, n, :]`` allows it (None: all).
    """
    num_branches, block = source_AT.shape
    num_heads, head_dim = q_RHD.shape[1:]
    num_kv = k_RGD.shape[1]
    group = num_heads // num_kv

    def by_kv_head(x_AT: torch.Tensor) -> torch.Tensor:
        """[A, T, G * g, X] -> [A * G, g * T, X]"""
        x = x_AT.reshape(num_branches, block, num_kv, -1, x_AT.shape[-1]).permute(0, 2, 3, 1, 4)
        return x.reshape(num_branches * num_kv, -1, x_AT.shape[-1])

    q, k, v = (by_kv_head(x[source_AT]) for x in (q_RHD, k_RGD, v_RGD))
    m_prefix = by_kv_head(prefix.m_RH[source_AT].unsqueeze(-1))
    l_prefix = by_kv_head(prefix.l_RH[source_AT].unsqueeze(-1))
    acc_prefix = by_kv_head(prefix.acc_RHD[source_AT])
    scores = torch.bmm(q, k.transpose(1, 2)).float() * scale
    if mask_ATT is not None:
        allowed = mask_ATT[:, None, None].expand(-1, num_kv, group, -1, -1).reshape_as(scores)
        scores = scores.masked_fill(~allowed, -torch.inf)
    m = torch.maximum(scores.amax(dim=-1, keepdim=True), m_prefix)
    weights = torch.exp(scores - m)
    keep = torch.exp(m_prefix - m)
    total = l_prefix * keep + weights.sum(dim=-1, keepdim=True)
    out = (acc_prefix * keep + torch.bmm(weights.to(v.dtype), v).float()) / total
    out = out.view(num_branches, num_kv, group, block, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(num_branches, block, num_heads, head_dim).to(q_RHD.dtype)
