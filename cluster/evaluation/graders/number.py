"""GSM8K: the answer is a number, compared as text.

Both ways of finding it and the comparison are those of the task gsm8k (version 3) of lm-evaluation-harness: *strict*
takes the first number behind ``####``, *flexible* the last number anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cluster.evaluation.graders import Judgement, Reference

_AFTER_MARK = re.compile(r"#### (-?[0-9.,]+)")
_ANYWHERE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")


def check(references: Sequence[Reference]) -> None:
    """Nothing is needed."""


def judge(reference: Reference, text: str) -> Judgement:
    gold = _normal(str(reference["answer"]))
    marked, numbers = _AFTER_MARK.search(text), _ANYWHERE.findall(text)
    last = numbers[-1] if numbers else None
    strict = marked is not None and _normal(marked[1]) == gold
    return Judgement({"flexible": last is not None and _normal(last) == gold, "strict": strict}, extracted=last)


def blank(reference: Reference) -> Judgement:
    return Judgement({"flexible": False, "strict": False})


def _normal(number: str) -> str:
    """Without thousands separators, currency, and the full stop of the sentence."""
    return number.replace(",", "").replace("$", "").removesuffix(".").lower()
