"""Streaming softmax over keys: what the attention kernels share.

A state is the running maximum m, the sum l of exponentials and the weighted sum acc of values, in float32. Scores are
in base 2: the product of query and key times ``scale_log2 = scale * log2(e)``. Products that are added are spelled as
fma, so that no two compilations contract them differently: a row has the same bits from every kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_keys(b_q, b_k, b_v, b_visible, b_m, b_l, b_acc, scale_log2):
    """The state after one more tile of keys; every query must have seen a key by then (m of -inf gives NaN)."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [BM, BN]
    b_s = tl.where(b_visible, b_s, float("-inf"))
    b_m_new = tl.maximum(b_m, tl.max(b_s, 1) * scale_log2)
    b_p = tl.exp2(tl.fma(b_s, scale_log2, -b_m_new[:, None]))
    b_keep = tl.exp2(b_m - b_m_new)
    b_l = tl.fma(b_l, b_keep, tl.sum(b_p, 1))
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_keep[:, None], input_precision="ieee")
    return b_m_new, b_l, b_acc


@triton.jit
def no_keys(BM: tl.constexpr, BD: tl.constexpr):
    """The empty state."""
    return tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM, BD], tl.float32)


@triton.jit
def merge_keys(b_m, b_l, b_acc, b_m_next, b_l_next, b_acc_next):
    """The state of two runs of keys; adding to the empty state (-inf, 0, 0) changes no bit."""
    b_m_new = tl.maximum(b_m, b_m_next)
    b_keep = tl.exp2(b_m - b_m_new)
    b_add = tl.exp2(b_m_next - b_m_new)
    b_l = tl.fma(b_l, b_keep, b_l_next * b_add)
    b_acc = tl.fma(b_acc, b_keep[:, None], b_acc_next * b_add[:, None])
    return b_m_new, b_l, b_acc
