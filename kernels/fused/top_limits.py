"""Top-k and top-p without a sort, for ``sampling``.

Tokens are ordered by a 64-bit key, logit at temperature above and token id below, so no two are equal and a cut-off
key describes a kept set exactly; bisection finds it. Only candidates are searched: tokens above a bound that the
maxima of the vocabulary's tiles give. C chunks of the vocabulary keep their candidates apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.fused.launch import wait_for_inputs
from kernels.fused.noise import gumbel


@triton.jit
def _order(b_x):
    """int64 below 2**31 in magnitude that orders as the float32 does; both zeros are one."""
    b_bits = (b_x + 0.0).to(tl.int32, bitcast=True)
    return (b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _key(b_x, b_token):
    """Descending by value, then ascending by token: larger keys come first."""
    return _order(b_x) * 4294967296 + (4294967295 - b_token.to(tl.int64))


@triton.jit
def _key_value(b_key):
    b_order = (b_key >> 32).to(tl.int32)
    return (b_order ^ ((b_order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key_token(b_key):
    return (4294967295 - (b_key & 4294967295)).to(tl.int32)


@triton.jit
def _middle(low, high):
    """Floor of the mean, without overflow."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def bound_kept(b_best, i_n, top_k, top_p, NUM_TILES: tl.constexpr, V: tl.constexpr):
    """A logit below which nothing is kept. ``b_best``: tile maxima at the row's temperature, -inf beyond the tiles."""
    bound = float("-inf")
    best = tl.max(b_best, axis=0)
    if top_k > 0:
        # The k-th largest of all logits is no less than the k-th largest tile maximum.
        if top_k <= NUM_TILES:
            b_order = tl.where(i_n < NUM_TILES, _order(b_best), -4294967296)
            low = _order(tl.min(tl.where(i_n < NUM_TILES, b_best, best), axis=0)) - 1
            high = _order(best)
            while low + 1 < high:
                middle = _middle(low, high)
                enough = tl.sum((b_order > middle).to(tl.int32), axis=0) >= top_k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
            bound = _key_value(high * 4294967296)
    else:
        # Tokens whose probability is at most (1 - p) / V hold at most 1 - p together, so p is reached before them;
        # the tile maxima alone bound the total from below. The slack of 0.01 covers rounding.
        total = tl.sum(tl.exp(b_best - best), axis=0)
        bound = best + tl.log(total * (1.0 - top_p) / V) - 0.01
    return bound


@triton.jit
def collect_candidates(
    p_logits,
    p_keys,
    p_num_keys,
    p_mass,
    temperature,
    best,
    bound,
    first,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b_mass = tl.zeros([BLOCK], tl.float32)
    count = 0
    for o_v in range(first, tl.minimum(first + CHUNK, V), BLOCK):
        i_v = o_v + tl.arange(0, BLOCK)
        b_scaled = tl.div_rn(tl.load(p_logits + i_v, mask=i_v < V, other=float("-inf")), temperature)
        b_mass += tl.exp(b_scaled - best)
        b_keep = ((b_scaled >= bound) & (b_scaled > float("-inf"))).to(tl.int32)
        found = tl.sum(b_keep, axis=0)
        if found > 0:
            tl.store(p_keys + count + tl.cumsum(b_keep, axis=0) - 1, _key(b_scaled, i_v), mask=b_keep > 0)
            count += found
    tl.store(p_num_keys, count)
    tl.store(p_mass, tl.sum(b_mass, axis=0))


@triton.jit
def _above(p_keys, b_num, most, cut, best, CHUNK: tl.constexpr, C: tl.constexpr, W: tl.constexpr):
    """Candidates whose key is above ``cut``: their number and their sum of ``exp(value - best)``."""
    b_count = tl.zeros([C, W], tl.int32)
    b_mass = tl.zeros([C, W], tl.float32)
    for o_w in range(0, most, W):
        i_w = o_w + tl.arange(0, W)[None, :]
        b_live = i_w < b_num[:, None]
        b_key = tl.load(p_keys + tl.arange(0, C)[:, None] * CHUNK + i_w, mask=b_live, other=0)
        b_live = b_live & (b_key > cut)
        b_count += b_live.to(tl.int32)
        b_mass += tl.where(b_live, tl.exp(_key_value(b_key) - best), 0.0)
    return tl.sum(b_count), tl.sum(b_mass)


@triton.jit
def draw_limited(
    p_count,
    p_slot,
    p_position,
    p_left,
    p_greedy,
    p_temperature,
    p_top_p,
    p_top_k,
    p_key,
    p_sample,
    p_best,
    p_value,
    p_token,
    p_mass,
    p_num_keys,
    p_keys,
    start,
    NUM_TILES: tl.constexpr,
    NT: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    W: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A row under top-k or top-p: the smallest key that is kept, then the noisy maximum down to it."""
    wait_for_inputs(OVERLAP)
    i_r = tl.program_id(0)
    i_d = start + i_r
    if i_d >= tl.load(p_count):
        return
    slot = tl.load(p_slot + i_d)
    temperature = tl.load(p_temperature + slot)
    top_k = tl.load(p_top_k + slot)
    top_p = tl.load(p_top_p + slot)
    limits = (top_k > 0) | (top_p < 1)
    if (temperature <= 0) | (tl.load(p_greedy + i_d) != 0) | (not limits):
        return
    i_n = tl.arange(0, NT)
    b_best = tl.load(p_best + i_r * NUM_TILES + i_n, mask=i_n < NUM_TILES, other=float("-inf"))
    best = tl.div_rn(tl.max(b_best, axis=0), temperature)
    i_c = tl.arange(0, C)
    b_num = tl.load(p_num_keys + i_r * C + i_c)
    most = tl.max(b_num, axis=0)
    p_keys += i_r.to(tl.int64) * (C * CHUNK)
    # Kept are the keys above ``low``. Bisection ends as soon as a single candidate lies between its ends: the last
    # kept one, since the upper end always keeps too few.
    low = _order(tl.full([], float("-inf"), tl.float32)) * 4294967296
    highest = _order(best) * 4294967296 + 4294967295
    num_low = tl.sum(b_num, axis=0)
    mass = tl.sum(tl.load(p_mass + i_r * C + i_c), axis=0)
    if top_k > 0:
        high = highest
        num_high = 0
        while (num_low - num_high > 1) & (low + 1 < high):
            middle = _middle(low, high)
            num, _ = _above(p_keys, b_num, most, middle, best, CHUNK, C, W)
            enough = num >= top_k
            low = tl.where(enough, middle, low)
            num_low = tl.where(enough, num, num_low)
            high = tl.where(enough, high, middle)
            num_high = tl.where(enough, num_high, num)
        num_low, mass = _above(p_keys, b_num, most, low, best, CHUNK, C, W)
    if top_p < 1:
        # A token stays while the tokens before it hold no more than p.
        limit = top_p * mass
        high = highest
        num_high = 0
        while (num_low - num_high > 1) & (low + 1 < high):
            middle = _middle(low, high)
            num, above = _above(p_keys, b_num, most, middle, best, CHUNK, C, W)
            enough = above > limit
            low = tl.where(enough, middle, low)
            num_low = tl.where(enough, num, num_low)
            high = tl.where(enough, high, middle)
            num_high = tl.where(enough, num_high, num)
        _, mass = _above(p_keys, b_num, most, low, best, CHUNK, C, W)
    b_value = tl.full([C, W], float("-inf"), tl.float32)
    b_token = tl.full([C, W], 2147483647, tl.int32)
    for o_w in range(0, most, W):
        i_w = o_w + tl.arange(0, W)[None, :]
        b_live = i_w < b_num[:, None]
        b_key = tl.load(p_keys + i_c[:, None] * CHUNK + i_w, mask=b_live, other=0)
        b_drawn = _key_token(b_key)
        b_noise = gumbel(
            b_drawn, tl.load(p_position + i_d), tl.load(p_left + i_d), tl.load(p_sample + slot),
            tl.load(p_key + slot * 2), tl.load(p_key + slot * 2 + 1),
        )  # fmt: skip
        b_noisy = tl.where(b_live & (b_key > low), _key_value(b_key) + b_noise, float("-inf"))
        b_token = tl.where(b_noisy > b_value, b_drawn, b_token)
        b_value = tl.maximum(b_noisy, b_value)
    value = tl.max(b_value)
    # A chunk holds the answer, the others lose; a broken row (NaN) has no candidates and answers 0.
    token = tl.min(tl.where(b_value == value, b_token, 2147483647))
    token = tl.where(token == 2147483647, 0, token)
    tl.store(p_value + i_r * C + i_c, tl.where(i_c == 0, value, float("-inf")))
    tl.store(p_token + i_r * C + i_c, token + i_c * 0)
    tl.store(p_mass + i_r * C + i_c, tl.where(i_c == 0, mass, 0.0))
