"""How a setting is written as a flag of the command: its name, its group in the help, how its value is read."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter, Token

from specfold.config import AUTO, DecodeConfig


def _whole(hint: Any, tokens: tuple[Token, ...]) -> int:
    """Read a whole number; the parser's own rule would round 1.5 to 2 without a word."""
    try:
        value = int(tokens[0].value)
    except ValueError:
        raise ValueError(f"it must be a whole number, not {tokens[0].value!r}.") from None
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"it must fit 64 bits, not {value}.")
    return value


def _whole_or_auto(hint: Any, tokens: tuple[Token, ...]) -> int | str:
    """A whole number, or the word that leaves it to the job."""
    value = tokens[0].value
    try:
        return AUTO if value == AUTO else int(value)
    except ValueError:
        raise ValueError(f"it must be a whole number or {AUTO}, not {value!r}.") from None


def _not_empty(hint: Any, tokens: tuple[Token, ...]) -> str:
    """Refuse an empty text, which a shell makes of a variable that is not set: it must not pass for the default."""
    if not tokens[0].value.strip():
        raise ValueError("it must not be empty.")
    return tokens[0].value


def _file(hint: Any, tokens: tuple[Token, ...]) -> Path:
    """An empty path would be the current folder."""
    return Path(_not_empty(hint, tokens))


def _group(name: str, order: int) -> Group:
    return Group(name, sort_key=order)


MODEL, INPUT, PROMPT = _group("Model", 1), _group("Input and output", 2), _group("Prompts", 3)
DECODING, SAMPLING, RUNNING = _group("Decoding", 4), _group("Sampling", 5), _group("Running", 6)

Int = Annotated[int, Parameter(converter=_whole, negative=())]
IntOrAuto = Annotated[int | Literal["auto"], Parameter(converter=_whole_or_auto, negative=())]
Text = Annotated[str, Parameter(converter=_not_empty)]
File = Annotated[Path, Parameter(converter=_file)]
Flag = Parameter(negative=())
HIDDEN = Parameter(parse=False, show=False)
"""Marks a setting that is no flag."""


def flag(name: str) -> str:
    """``max_failed`` -> ``--max-failed``."""
    return "--" + name.replace("_", "-")


def as_flags(message: str) -> str:
    """The engine's sentence with its settings written as flags."""
    names = [f.name for f in fields(DecodeConfig)]
    pattern = "|".join(f"^{name}\\b" if "_" not in name else f"\\b{name}\\b" for name in names)
    return re.sub(pattern, lambda match: flag(match[0]), message)
