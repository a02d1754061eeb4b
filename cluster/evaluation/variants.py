"""Ways of decoding to hold against each other, such as ``vanilla``, ``specfold:0.1@0.05`` and ``vanilla+cache``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

from cluster.config import AUTO_GRAPH, JobConfig
from cluster.errors import UserError
from cluster.flags import flag
from specfold.config import AUTO, DRAFTING, Mode

MODES = Mode.__args__  # type: ignore[attr-defined]
_FORM = re.compile(r"(?P<mode>\w+)(?::(?P<delta>[^@+:]+))?(?:@(?P<time>[^@+:]+))?(?P<cache>\+cache)?")
_HINT = "a variant is a mode, then :delta, @delta-time and +cache as wanted, such as specfold:0.1"


@dataclass(frozen=True)
class Variant:
    """One column of a comparison: settings that replace those of the command."""

    label: str
    """As people write it: ``specfold:0.1``."""
    settings: dict[str, Any]

    @property
    def folder(self) -> str:
        """The label as a path part: ``specfold-0.1``."""
        return re.sub(r"[:@+]", "-", self.label.replace("@", "@time"))

    def of(self, config: JobConfig) -> JobConfig:
        """The command's settings in this variant. Raises ``UserError`` for what cannot go together.

        What a mode without drafts cannot choose is left at its default.
        """
        chosen: dict[str, Any] = {}
        if self.settings["mode"] not in DRAFTING:
            chosen |= {"drafts": JobConfig.drafts} if config.drafts == AUTO else {}
            chosen |= {"draft_graph": None} if config.draft_graph == AUTO_GRAPH else {}
        return replace(config, **chosen | self.settings)


def parse_variants(text: str | None, config: JobConfig) -> list[Variant]:
    """The variants of ``--compare``, the first being what the others are held against.

    Without ``--compare`` it is the one that the command's own settings describe. Raises ``UserError``.
    """
    if text is None:
        delta = config.delta if config.mode == "specfold" else None
        return [_variant(config.mode, delta, config.delta_time, config.use_block_cache)]
    variants = [_parse(part.strip(), config) for part in text.split(",")]
    labels = [variant.label for variant in variants]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise UserError(f"--compare has {twice} twice.")
    if len(variants) < 2:
        raise UserError("--compare takes at least two variants, such as vanilla,specfold:0.1.")
    return variants


def require_effect(text: str | None, given: Set[str]) -> None:
    """``UserError`` for a flag that the variants of ``--compare`` decide. ``given``: names that the user has set."""
    if text is None:
        return
    found = [match for part in text.split(",") if (match := _FORM.fullmatch(part.strip()))]
    decided = {
        "use_block_cache": "write +cache behind a variant that is to have it",
        "mode": "every variant begins with its mode",
    }
    if all(match["delta"] is not None for match in found if match["mode"] == "specfold"):
        decided["delta"] = "there is no specfold without a delta of its own"
    # --refresh-every is refused without it, and holds for all variants.
    if all(match["time"] is not None for match in found) and "refresh_every" not in given:
        decided["delta_time"] = "every variant has its own"
    for name, reason in decided.items():
        if name in given:
            raise UserError(f"{flag(name)} has no effect beside --compare: {reason}.")


def _parse(text: str, config: JobConfig) -> Variant:
    match = _FORM.fullmatch(text)
    if match is None:
        raise UserError(f"--compare cannot read {text!r}: {_HINT}.")
    mode = match["mode"]
    if mode not in MODES:
        close = difflib.get_close_matches(mode, MODES, 1)
        hint = f"Did you mean {close[0]}?" if close else f"There are {', '.join(MODES)}."
        raise UserError(f"--compare has the unknown mode {mode!r}. {hint}")
    if match["delta"] is not None and mode != "specfold":
        raise UserError(f"--compare {text}: only specfold folds, so only it takes a delta.")
    delta = config.delta if match["delta"] is None else _number(text, match["delta"])
    time = config.delta_time if match["time"] is None else _number(text, match["time"])
    cache = match["cache"] is not None or config.use_block_cache
    variant = _variant(mode, delta if mode == "specfold" else None, time, cache)
    variant.of(config)  # a delta out of range is refused now, and what cannot go together
    return variant


def _variant(mode: str, delta: float | None, time: float | None, cache: bool) -> Variant:
    label = mode
    settings: dict[str, Any] = {"mode": mode}
    if delta is not None:
        label, settings = f"{label}:{_short(delta)}", settings | {"delta": delta}
    if time is not None:
        label, settings = f"{label}@{_short(time)}", settings | {"delta_time": time}
    if cache:
        label, settings = f"{label}+cache", settings | {"use_block_cache": True}
    return Variant(label, settings)


def _short(value: float) -> str:
    """All digits that tell it from other numbers, and no more."""
    return repr(value).removesuffix(".0")


def _number(text: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UserError(f"--compare cannot read {text!r}: {value!r} is not a number.") from None
