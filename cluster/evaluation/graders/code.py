"""HumanEval, MBPP and their like: the code in the output is run, with what goes before and the tests after it."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Collection, Sequence
from functools import lru_cache

from cluster.errors import UserError
from cluster.evaluation.graders import Judgement, Reference
from cluster.evaluation.sandbox import run_program

_FENCE = re.compile(r"^[ \t]*```[^\n`]*$\n?", re.MULTILINE)


def check(references: Sequence[Reference]) -> None:
    """The sandbox is tried before; here, whether the tests can be read, lest their faults count as the model's."""
    for reference in references:
        before, after = reference["before"], reference["after"]
        if not isinstance(before, str) or not isinstance(after, str):
            raise UserError("A row's code before or after the answer is no text.")
        if not reference.get("defines"):
            try:
                ast.parse(after)
            except (SyntaxError, ValueError) as error:
                raise UserError(f"A row's tests are not Python ({error}): {after[:60]!r}.") from None


def judge(reference: Reference, text: str) -> Judgement:
    program, code = _program(reference, text)
    if not code.strip():
        return Judgement({"passed": False})
    verdict = run_program(program)
    return Judgement({"passed": verdict.passed}, extracted=code, problem=verdict.problem)


def blank(reference: Reference) -> Judgement:
    return Judgement({"passed": False})


def _program(reference: Reference, text: str) -> tuple[str, str]:
    """The whole program, and the part of it that the model wrote."""
    names = reference.get("defines") or _called(reference["after"])
    code = code_in(text, names)
    # A whole function replaces the one that was begun before; anything else goes on where the prompt ended.
    between = "\n" if _defines(code, names) else ""
    return f"{reference['before']}{between}{code}\n{reference['after']}", code


def code_in(text: str, names: Collection[str]) -> str:
    """The code of an answer: the last Markdown block that defines one of ``names``, else the first, else all of it.

    Text that begins indented continues a raw prompt, and ends where a block begins. A block without an end goes on to
    the end of the text.
    """
    first, *rest = _FENCE.split(text)
    if not rest or first[:1] in (" ", "\t"):
        return first
    blocks = rest[::2]
    return next((block for block in reversed(blocks) if _defines(block, names)), blocks[0])


def _defines(code: str, names: Collection[str]) -> bool:
    """Read as text, since a continuation or a cut answer is no valid program."""
    pattern = "|".join(map(re.escape, names))
    return re.search(rf"^(?:async )?(?:def|class) +(?:{pattern})\b|^(?:{pattern}) *=", code, re.MULTILINE) is not None


@lru_cache(maxsize=1024)
def _called(tests: str) -> frozenset[str]:
    """Names that the tests call."""
    calls = (node.func for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Call))
    return frozenset(func.id for func in calls if isinstance(func, ast.Name) and not hasattr(builtins, func.id))
