r"""MATH: the last ``\boxed{}`` answer, or the last expression, compared with the right one by math-verify."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from cluster.evaluation.graders import Judgement, Reference

_BOXED_FIRST = LatexExtractionConfig(boxed_match_priority=0)
_TIMEOUT_S = 5
"""Of one reading or comparison, in whole seconds; the library then says no more than that they are not equal."""
_SPACES = re.compile(r"\s+|\\[,;:! ]")


def check(references: Sequence[Reference]) -> None:
    """Nothing is needed."""


def judge(reference: Reference, text: str) -> Judgement:
    start = time.monotonic()
    answer = str(reference["answer"])
    found = parse(text, [_BOXED_FIRST, ExprExtractionConfig()], parsing_timeout=_TIMEOUT_S)
    extracted = str(found[-1]) if found else None
    equal = extracted is not None and (_same_text(extracted, answer) or _same_value(answer, found))
    was_cut = not equal and time.monotonic() - start >= _TIMEOUT_S
    problem = f"Comparing took more than {_TIMEOUT_S} seconds." if was_cut else None
    return Judgement({"equal": equal}, extracted=extracted, problem=problem)


def blank(reference: Reference) -> Judgement:
    return Judgement({"equal": False})


def _same_value(answer: str, found: list[Any]) -> bool:
    gold = parse(f"\\boxed{{{answer}}}", [_BOXED_FIRST], parsing_timeout=_TIMEOUT_S)
    return bool(gold) and bool(verify(gold, found, timeout_seconds=_TIMEOUT_S))


def _same_text(first: str, second: str) -> bool:
    """Answers that no parser makes sense of (a name, a list of letters) are right where they are the same."""
    return _SPACES.sub("", first) == _SPACES.sub("", second)
