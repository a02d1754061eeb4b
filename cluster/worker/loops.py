"""Loops in an output: tokens or passages over and over, also where only numbers in them count, and one character.

Thresholds were set so that texts written by people are not called loops; ``docs/log.md`` has the measurements. Each
search begins with a count of repeated 4-grams, which costs a few microseconds and rules out nearly every good output.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

_MAX_PERIOD, _MIN_REPEATS = 64, 4
_LONG_LOOP, _SHORT_LOOP = 64, 24
_PASSAGES, _CANDIDATES = 3, 8
_COUNTS, _MIN_UNITS, _MIN_WORDS = 6, 64, 2
_PROBE, _PROBES = 12, 3
"""Characters, and how often they stand in a loop of that many units at the least, whatever its period."""
_GRAM = 4
_SAME_CHARACTERS = 128
_CHARACTER_RUN = re.compile(rf"(.)\1{{{_SAME_CHARACTERS - 1}}}", re.DOTALL)
_NUMBER = re.compile("[0-9]+")
_UNIT = re.compile(r"[0-9]+|[^\W\d_]+|[^\w\s]|[_\n]")
_DIGITS = 15
"""Of a number, so that it fits in 64 bits."""

Bools: TypeAlias = np.ndarray[Any, Any]
Ints: TypeAlias = np.ndarray[Any, Any]


def has_loop(ids: Sequence[int]) -> bool:
    """Whether a stretch of the tokens repeats itself.

    With a period of up to 64: anywhere, at least four times. With a longer one: at least three times, and the loop is
    half of the output or goes on to its end.
    """
    size = len(ids)
    needed = max(min(_LONG_LOOP, -(-size // 2)), _SHORT_LOOP)
    # A loop of that length over at least four periods repeats three quarters of its tokens, and nearly as many
    # 4-grams. Counting them is 20 times cheaper than looking for every period.
    spare = needed - needed // _MIN_REPEATS - _GRAM
    if size < needed or size - len(set(ids)) < spare or _repeated_grams(ids) < spare:
        return False
    tokens = np.asarray(ids)
    for period in range(1, min(_MAX_PERIOD, size // _MIN_REPEATS) + 1):
        # A run of k matches at this distance is a stretch of k + period tokens.
        if longest_run(tokens[period:] == tokens[:-period]) + period >= max(needed, _MIN_REPEATS * period):
            return True
    return any(
        _takes_over(tokens[period:] == tokens[:-period], period, _PASSAGES * period) is not None
        for period in _periods(tokens, _MAX_PERIOD + 1)
    )


def has_counting_loop(text: str) -> bool:
    """Whether a passage comes back at least six times with the same words and with numbers that stay or grow evenly.

    ``Step 17: add 3.\\nStep 18: add 3.\\n…``: it is half of the output or goes on to its end, and no table: there are
    words in it.
    """
    if len(text) < _MIN_UNITS or not _comes_back(text):
        return False
    words = _UNIT.findall(text)
    names = {word: i for i, word in enumerate(dict.fromkeys(words))}
    is_number = [word[0] in "0123456789" for word in words]
    units = [-1 if number else names[word] for word, number in zip(words, is_number, strict=True)]
    if len(units) < _MIN_UNITS or _repeated_grams(units) < _MIN_UNITS - _MIN_UNITS // _COUNTS - _GRAM:
        return False
    values = [int(word[:_DIGITS]) if number else 0 for word, number in zip(words, is_number, strict=True)]
    u, v = np.asarray(units), np.asarray(values)
    for period in _periods(u, 1):
        same, grown = u[period:] == u[:-period], v[period:] - v[:-period]
        # Three in a row are needed to see that a number grows by as much again.
        even = same[period:] & same[:-period] & (grown[period:] == grown[:-period])
        start = _takes_over(even, 2 * period, max(_COUNTS * period, _MIN_UNITS), period)
        if start is not None and len(set(filter(str.isalpha, words[start : start + period]))) >= _MIN_WORDS:
            return True
    return False


def has_character_run(text: str) -> bool:
    """Whether one character stands 128 times in a row, spaces and line ends included."""
    half = _SAME_CHARACTERS // 2
    # Such a run covers two neighbours among every 64th character: seldom equal, so the search is seldom made.
    sample = text[::half]
    if len(text) < _SAME_CHARACTERS or all(a != b for a, b in pairwise(sample)):
        return False
    return _CHARACTER_RUN.search(text) is not None


def _repeated_grams(units: Sequence[int]) -> int:
    return len(units) - len(set(zip(units, units[1:], units[2:], units[3:], strict=False)))


def _periods(tokens: Ints, least: int) -> list[int]:
    """Periods from ``least`` on that a loop could have which covers the middle or the end, as one does that takes
    over."""
    found: list[int] = []
    for at in (tokens.size // 2, tokens.size - _GRAM):
        hits = np.ones(tokens.size - _GRAM + 1, bool)
        for k in range(_GRAM):
            hits &= tokens[k : tokens.size - _GRAM + 1 + k] == tokens[at + k]
        distances = np.unique(np.abs(np.flatnonzero(hits) - at))
        found += distances[distances >= least][:_CANDIDATES].tolist()
    return found


def _comes_back(text: str) -> bool:
    """Whether what stands in the middle or at the end stands there often, but for numbers and spaces."""
    bare = _NUMBER.sub("0", "".join(text.split()))
    middle = len(bare) // 2
    return any(bare.count(probe) >= _PROBES for probe in (bare[-_PROBE:], bare[middle : middle + _PROBE]))


def _takes_over(hits: Bools, reach: int, needed: int, period: int = 0) -> int | None:
    """Where a stretch begins that is half of all or goes on to within a period of the end; None if there is none.

    ``hits[i]``: what stands at i + ``reach`` repeats what stood before, back to i. A run of k hits is a stretch of
    k + ``reach``.
    """
    period = period or reach
    size = hits.size + reach
    ends = np.flatnonzero(~np.concatenate(([False], hits, [False])))
    starts, lengths = ends[:-1], np.diff(ends) - 1 + reach
    fits = (lengths > reach) & (lengths >= needed) & ((2 * lengths >= size) | (starts + lengths > size - period))
    return int(starts[fits.argmax()]) if fits.any() else None


def longest_run(hits: Bools) -> int:
    """Length of the longest stretch of True."""
    ends = np.flatnonzero(~hits)
    if not ends.size:
        return int(hits.size)
    return int(max(ends[0], (np.diff(ends) - 1).max(initial=0), hits.size - 1 - ends[-1]))
