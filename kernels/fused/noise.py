"""Counter-based Gumbel noise for other kernels: Philox-4x32-10 with the counters and keys of ``kernels.noise``.

The two Triton functions work element by element on int64 or int32 tensors (or scalars) of values below 2**32; their
reference is ``kernels.noise``. Words agree bit for bit, noise to float32 accuracy.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox_words(b_group, position, masks_left, sample, key0, key1):
    """Four uint32 tensors of random words: those of tokens ``4 * b_group`` to ``4 * b_group + 3``."""
    # As tensors: Triton's generator wants one type throughout.
    b_0 = b_group.to(tl.uint32)
    b_position = b_0 * 0 + position.to(tl.uint32)
    b_left = b_0 * 0 + masks_left.to(tl.uint32)
    b_sample = b_0 * 0 + sample.to(tl.uint32)
    b_key0 = b_0 * 0 + key0.to(tl.uint32)
    b_key1 = b_0 * 0 + key1.to(tl.uint32)
    return tl.philox_impl(b_0, b_position, b_left, b_sample, b_key0, b_key1)


@triton.jit
def gumbel_of_words(b_words):
    """Standard Gumbel noise of uint32 words, float32: ``-log(-log1p(-u))`` of ``u = (word + 0.5) / 2**32``."""
    # An odd 33-bit integer, rounded once: the same float32 as the reference's float64 detour.
    b_odd = b_words.to(tl.int64) * 2 + 1
    b_u = tl.minimum(b_odd.to(tl.float32) * 1.1641532182693481e-10, 0.99999994039535522)
    # log1p from log (Kahan): what 1 - u loses to rounding is put right by the quotient. The noise's interesting end
    # is u near 0, where log alone would keep no digit.
    b_rest = 1.0 - b_u
    b_step = 1.0 - b_rest
    b_log = tl.where(b_step == 0.0, b_u, -tl.log(b_rest) * (b_u / tl.where(b_step == 0.0, 1.0, b_step)))
    return -tl.log(b_log)


@triton.jit
def gumbel(b_token, position, masks_left, sample, key0, key1):
    """Standard Gumbel noise of tokens, float32, of the shape of ``b_token``; scalars or tensors elsewhere."""
    b_0, b_1, b_2, b_3 = philox_words(b_token // 4, position, masks_left, sample, key0, key1)
    b_word = b_token % 4
    b_low = tl.where(b_word == 0, b_0, b_1)
    b_high = tl.where(b_word == 2, b_2, b_3)
    return gumbel_of_words(tl.where(b_word < 2, b_low, b_high))
