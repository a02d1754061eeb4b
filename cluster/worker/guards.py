"""Guards: what is suspicious about an output, read off its tokens, its text and why it ended.

=================  ==================================================================================================
flag               set when
=================  ==================================================================================================
``empty``          the text is blank (of a model without a tokenizer: there are no tokens)
``mask_left``      a mask token is among the output tokens, which decoding promises never to leave
``special_flood``  at least 8 special tokens (padding, ends of turns, roles), which are half of the output or more, or
                   8 of them in a row
``repetition``     up to 64 tokens repeat without a change, at least 4 times: over 64 tokens or more, or over half of
                   the output and at least 24 tokens; or one character stands 128 times in a row; or a longer
                   passage comes 3 times, or one with numbers that count up 6 times, in half of the output or at
                   its end (``loops.py``)
``no_stop``        the output was cut at its length and not ended by the model
=================  ==================================================================================================

False alarms of ``repetition`` with Qwen2.5's tokenizer: see ``docs/log.md``. An error row has no output and no flag.
Pure functions; knows no engine, no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.worker.loops import has_character_run, has_counting_loop, has_loop, longest_run
from specfold.request import ERROR, LENGTH, Completion

GUARDS_VERSION = 2
"""Part of a run's identity: to be raised when the same output may get other flags."""
EMPTY, MASK_LEFT, SPECIAL_FLOOD, REPETITION, NO_STOP = "empty", "mask_left", "special_flood", "repetition", "no_stop"
FLAGS = (EMPTY, MASK_LEFT, SPECIAL_FLOOD, REPETITION, NO_STOP)
QUARANTINED = frozenset(FLAGS) - {NO_STOP}
"""Flags that move a row with ``--quarantine``. A cut output is often good as far as it goes, and where
``--max-new-tokens`` is short nearly every row is cut: ``no_stop`` alone moves none."""

_MIN_SPECIAL = 8


@dataclass(frozen=True)
class Specials:
    """What the guards must know of the model. ``special`` holds padding, stop and role tokens, not the mask."""

    mask: int
    special: frozenset[int] = frozenset()
    has_text: bool = True
    """False: the model has no tokenizer, so that every text is empty."""

    @classmethod
    def of(cls, tokenizer: Any | None, mask: int, stops: Iterable[int]) -> Specials:
        special = set(stops) | set(tokenizer.all_special_ids if tokenizer is not None else ())
        if tokenizer is not None:
            special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        return cls(mask, frozenset(special - {mask}), tokenizer is not None)


def flags_of(completion: Completion, specials: Specials) -> list[str]:
    """The flags of one output, in the order of ``FLAGS``; most have none."""
    if completion.finish_reason == ERROR:
        return []
    ids, text, found = completion.token_ids, completion.text, []
    if not (text and not text.isspace()) and (specials.has_text or not ids):
        found.append(EMPTY)
    if specials.mask in ids:
        found.append(MASK_LEFT)
    if is_flooded(ids, specials.special):
        found.append(SPECIAL_FLOOD)
    if has_loop(ids) or has_character_run(text) or has_counting_loop(text):
        found.append(REPETITION)
    if completion.finish_reason == LENGTH:
        found.append(NO_STOP)
    return found


def is_flooded(ids: Sequence[int], special: frozenset[int]) -> bool:
    """Whether special tokens are half of the output or stand in a long row."""
    if len(ids) < _MIN_SPECIAL or special.isdisjoint(ids):
        return False
    hits = np.fromiter((token in special for token in ids), bool, len(ids))
    count = int(hits.sum())
    return count >= _MIN_SPECIAL and (2 * count >= len(ids) or longest_run(hits) >= _MIN_SPECIAL)
