"""How rows are decoded: one frozen, validated configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

Mode = Literal["vanilla", "spiffy", "specfold", "ar", "linear_spec"]
FfnGate = Literal["own", "entry"]
DRAFTING: tuple[Mode, ...] = ("spiffy", "specfold")
"""Modes that have drafts."""
MAX_DRAFTS = 32
MAX_COUNT = 2**30
"""Above any count that makes sense; sums of two such still fit 32 bits."""
MIN_TEMPERATURE = 1e-6
"""Below it logits over temperature lose the noise and, further down, are no longer finite."""
AUTO: Final = "auto"
AUTO_DRAFTS = 8
"""The most drafts that ``auto`` chooses."""


class ConfigError(ValueError):
    """A setting that cannot work; the message is one sentence that names the setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """Settings that decide which tokens come out and how they are found.

    ``mode``: ``vanilla`` denoises step by step; ``spiffy`` verifies drafts densely and gives the same tokens;
    ``specfold`` folds drafts on their parents. ``ar`` and ``linear_spec`` exist for Nemotron-Labs-Diffusion only.
    ``delta``: largest relative residual at which a draft position inherits (SpecFold, paper default 0.1); below 0
    nothing folds. ``ffn_gate``: ``own`` tests the residual again before the FFN, ``entry`` is the paper's rule.
    ``drafts``: branches beside the main one, or ``auto``: an engine measures how many pay (``specfold.autotune``);
    ``draft_graph``: a JSON file (or its text) that replaces the default
    graph; ``draft_budget``: of those drafts, each step verifies only so many, the likeliest ones (None: all).
    ``threshold``: unmask every position at least this confident, and always the best one; None: one token a step
    (``linear_spec``: None fills the whole draft at once).
    ``delta_time``: largest relative change since its last computation at which a position of the main branch inherits
    from the step before (folding in time; None or below 0: off), in every mode that denoises; ``refresh_every``: every
    so many steps of a block compute everything again (0: never). ``use_block_cache``: Fast-dLLM-v2's sub-block cache.
    ``max_new_tokens`` is exact: the stop token counts, nothing beyond it is returned.
    """

    mode: Mode = "specfold"
    delta: float = 0.1
    ffn_gate: FfnGate = "own"
    drafts: int | Literal["auto"] = 4
    draft_graph: str | None = None
    draft_budget: int | None = None
    delta_time: float | None = None
    refresh_every: int = 0
    use_block_cache: bool = False
    threshold: float | None = None
    small_block_size: int = 8
    block_size: int | None = None
    causal_context: bool = True
    max_thinking_tokens: int | None = None
    end_think_token_id: int | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    deterministic: bool = True

    def __post_init__(self) -> None:
        def require(ok: bool, message: str) -> None:
            if not ok:
                raise ConfigError(message)

        self._check_types(require)
        modes = Mode.__args__  # type: ignore[attr-defined]
        require(self.mode in modes, f"mode must be one of {', '.join(modes)}, not {self.mode!r}.")
        require(self.ffn_gate in ("own", "entry"), f"ffn_gate must be own or entry, not {self.ffn_gate!r}.")
        drafts, budget = self.drafts, self.draft_budget
        require(drafts == AUTO or type(drafts) is int, f"drafts must be a whole number or {AUTO}, not {drafts!r}.")
        if isinstance(drafts, str):
            require(self.mode in DRAFTING, f"drafts {AUTO} needs mode spiffy or specfold, not {self.mode}.")
            require(budget is None, f"draft_budget needs a number of drafts, which {AUTO} is not.")
            drafts = AUTO_DRAFTS
        require(0 <= drafts <= MAX_DRAFTS, f"drafts must be between 0 and {MAX_DRAFTS}, not {drafts}.")
        require(
            budget is None or 1 <= budget <= max(drafts, 1),
            f"draft_budget must be between 1 and drafts ({self.drafts}) or left out, not {budget!r}.",
        )
        require(self.delta == self.delta and self.delta <= 10, f"delta must be a number up to 10, not {self.delta}.")
        time = self.delta_time
        require(
            time is None or time <= 10,
            f"delta_time must be a number up to 10 or left out, not {time!r}.",
        )
        require(
            self.threshold is None or 0 <= self.threshold <= 1,
            f"threshold must be between 0 and 1 or left out, not {self.threshold}.",
        )
        require(self.small_block_size >= 1, f"small_block_size must be at least 1, not {self.small_block_size}.")
        require(
            self.block_size is None or 1 <= self.block_size <= 256,
            f"block_size must be between 1 and 256, not {self.block_size}.",
        )
        require(self.max_new_tokens >= 1, f"max_new_tokens must be at least 1, not {self.max_new_tokens}.")
        require(0 <= self.temperature <= 100, f"temperature must be between 0 and 100, not {self.temperature}.")
        require(
            self.temperature == 0 or self.temperature >= MIN_TEMPERATURE,
            f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, not {self.temperature}.",
        )
        require(0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, not {self.top_p}.")
        require(self.top_k >= 0, f"top_k must be 0 (off) or more, not {self.top_k}.")
        require(-(2**63) <= self.seed < 2**63, f"seed must fit 64 bits, not {self.seed}.")
        texts = isinstance(self.stop, tuple) and all(isinstance(text, str) for text in self.stop)
        require(texts, f"stop must be a tuple of strings, not {self.stop!r}.")
        require(all(self.stop), "stop strings must not be empty.")
        require(
            (self.max_thinking_tokens is None) == (self.end_think_token_id is None),
            "max_thinking_tokens and end_think_token_id must be given together.",
        )
        require(
            self.max_thinking_tokens is None or self.max_thinking_tokens >= 0,
            f"max_thinking_tokens must be 0 or more, not {self.max_thinking_tokens}.",
        )
        self._check_inheritance(require)

    def _check_types(self, require: Callable[[bool, str], None]) -> None:
        """What is left out is None by default; no number is so large that a tensor does not hold it."""
        for names, types, kind in (
            (_WHOLE, (int,), "a whole number"),
            (_NUMBERS, (int, float), "a number"),
            (_SWITCHES, (bool,), "on or off (True or False)"),
        ):
            for name in names:
                value = getattr(self, name)
                optional = type(self).__dataclass_fields__[name].default is None
                require(
                    type(value) in types or (optional and value is None),
                    f"{name} must be {kind}{' or left out' if optional else ''}, not {value!r}.",
                )
        for name in _WHOLE:
            value = getattr(self, name)
            require(
                name == "seed" or value is None or value <= MAX_COUNT,
                f"{name} must be at most {MAX_COUNT}, not {value}.",
            )

    def _check_inheritance(self, require: Callable[[bool, str], None]) -> None:
        """What a step takes over from the step before."""
        require(self.refresh_every >= 0, f"refresh_every must be 0 (never) or more, not {self.refresh_every}.")
        require(
            not self.refresh_every or self.delta_time is not None,
            "refresh_every needs delta_time: without folding in time every step computes everything.",
        )
        other = self.mode if self.mode in ("ar", "linear_spec") else None
        require(
            other is None or self.time_delta < 0,
            f"delta_time goes with modes vanilla, spiffy and specfold: mode {other} does not denoise step by step.",
        )
        if self.use_block_cache:
            require(other is None, f"use_block_cache needs mode vanilla; mode {other} has no sub-blocks.")
            require(not self.num_drafts, "use_block_cache takes no drafts: give mode vanilla.")
            require(self.time_delta < 0, "use_block_cache and delta_time are two ways to save work; give one of them.")

    @property
    def num_drafts(self) -> int:
        """Draft branches that the mode really uses; with ``auto`` the most that may be chosen."""
        if self.mode not in DRAFTING:
            return 0
        return AUTO_DRAFTS if isinstance(self.drafts, str) else self.drafts

    @property
    def fold_delta(self) -> float:
        """The gate's threshold; negative where the mode does not fold."""
        return self.delta if self.mode == "specfold" else -1.0

    @property
    def time_delta(self) -> float:
        """The gate's threshold between steps; negative where the main branch does not fold."""
        return -1.0 if self.delta_time is None else self.delta_time

    @property
    def carries(self) -> bool:
        """Whether a step takes over work of the step before, so that even the main branch is no longer exact."""
        return self.time_delta >= 0 or self.use_block_cache

    def plain(self) -> DecodeConfig:
        """Step-by-step decoding without drafts and without inheritance: what every other way is held against."""
        drafts = 0 if self.drafts == AUTO else self.drafts
        return replace(self, mode="vanilla", drafts=drafts, delta_time=None, refresh_every=0, use_block_cache=False)


_WHOLE = (
    "draft_budget", "refresh_every", "small_block_size", "block_size", "max_thinking_tokens", "end_think_token_id",
    "max_new_tokens", "top_k", "seed",
)  # fmt: skip
_NUMBERS = ("delta", "delta_time", "threshold", "temperature", "top_p")
_SWITCHES = ("use_block_cache", "causal_context", "deterministic")
