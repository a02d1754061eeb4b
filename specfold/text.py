"""Tokens to text, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def decode_text(tokenizer: Any | None, token_ids: Sequence[int]) -> str:
    """Text of output tokens without special tokens; empty where the model has no tokenizer."""
    if tokenizer is None:
        return ""
    return tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def cut_at_stop(tokenizer: Any | None, token_ids: list[int], stop: Sequence[str]) -> tuple[list[int], str, bool]:
    """Tokens, text, and whether a stop string cut them.

    The text ends before the earliest stop string, the tokens with the last one that begins before it.
    """
    text = decode_text(tokenizer, token_ids)
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    if not found:
        return token_ids, text, False
    cut = min(found)
    low, high = 0, len(token_ids)
    # Smallest number of tokens whose text reaches the cut.
    while low < high:
        middle = (low + high) // 2
        if len(decode_text(tokenizer, token_ids[:middle])) >= cut:
            high = middle
        else:
            low = middle + 1
    return token_ids[:low], text[:cut], True
