"""How many drafts pay: which numbers are tried, when a further one cannot win, and which is taken.

Knows no engine: ``specfold.autotune`` measures. More drafts bring more tokens a forward, each less than the one before,
and make every forward dearer, so the speed has one peak: a coarse pass finds where it is, the numbers beside the best
are tried next, and what lies close together is measured again, in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specfold.config import AUTO_DRAFTS

BUDGETS = (0, 1, 2, 3, 4, 6, AUTO_DRAFTS)
COARSE = (0, 2, 4, AUTO_DRAFTS)
TIE = 0.02
"""Speeds this close are equal, and fewer drafts win."""
SECONDS = 60.0
SAMPLE_ROWS = 64
"""First rows of a run that a choice looks at."""
_NEAR, _FINALISTS, _ROUNDS = 0.12, 3, 3
"""What is measured again: numbers within 12% of the best, three at most, until each has been measured three times."""
_HOPE = 1.03
"""An estimate is taken for too low by so much before a number is ruled out."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What short runs with one number of drafts measured."""

    drafts: int
    tokens_per_forward: float
    """Of one row."""
    seconds_per_forward: float
    """With all slots full, prompts and captured graphs left out."""
    rows_at_once: int
    rows: int
    """Rows that were decoded for it."""
    fold_rate: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.rows_at_once * self.tokens_per_forward / self.seconds_per_forward


@dataclass(frozen=True, slots=True)
class Choice:
    """The number of drafts that was chosen, and from what."""

    drafts: int
    batch_size: int
    device: str
    seconds: float
    """What choosing took."""
    trials: tuple[Trial, ...]
    left_out: dict[int, str] = field(default_factory=dict)
    """Numbers that were not tried, and why."""

    @property
    def line(self) -> str:
        """What was measured and chosen, for people."""
        speeds = ", ".join(f"{t.drafts}: {t.tokens_per_second:,.1f}" for t in self.trials)
        reasons = dict.fromkeys(self.left_out.values())
        why = [
            f"; {_listed([n for n, r in self.left_out.items() if r == reason])} not tried, {reason}"
            for reason in reasons
        ]
        drafts = {0: "no drafts", 1: "1 draft"}.get(self.drafts, f"{self.drafts} drafts")
        rows = "1 row" if self.batch_size == 1 else f"{self.batch_size:,} rows"
        return f"Chose {drafts} for {rows} at a time in {self.seconds:.0f} s (drafts: tokens/s {speeds}{''.join(why)})."

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, for ``run.json``."""
        trials = [
            {name: _rounded(value) for name, value in asdict(trial).items()}
            | {"tokens_per_second": _rounded(trial.tokens_per_second)}
            for trial in self.trials
        ]
        left_out = {str(drafts): reason for drafts, reason in self.left_out.items()}
        return asdict(self) | {"seconds": round(self.seconds, 1), "trials": trials, "left_out": left_out}


Measure = Callable[[int, int], Trial | None]
"""Number of drafts and round (from 0) -> what was measured on that round's rows; None: it does not fit in memory."""


def search(
    measure: Measure,
    most: int = AUTO_DRAFTS,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Trial], dict[int, str]]:
    """Trials by number of drafts, up to ``most``, and the numbers left out with the reason.

    0 drafts are always measured. No trial begins that would end after ``seconds`` if it took as long as the longest.
    Raises ValueError if nothing fits in memory, not even without drafts.
    """
    run = _Search(measure, seconds, clock)
    run.try_one(0)
    if 0 not in run.rounds:
        raise ValueError("nothing could be measured without drafts")
    for drafts in [n for n in COARSE if 0 < n <= most]:
        run.try_one(drafts)
    budgets = [n for n in BUDGETS if n <= most]
    run.climb(budgets)
    run.repeat()
    run.climb(budgets)  # measured better, another number may be the best
    reasons = dict(run.left_out)
    for drafts in budgets:
        if drafts not in run.rounds and drafts not in reasons:
            beside = _beside(drafts, budgets)
            measured = any(n in run.rounds for n in beside)
            run.left_out[drafts] = "as its neighbours are slower" if measured else reasons[beside[0]]
    return run.trials, dict(sorted(run.left_out.items()))


def best_trial(trials: Sequence[Trial]) -> Trial:
    """The one with most tokens a second; among those within 2% of it the fewest drafts."""
    most = max(trial.tokens_per_second for trial in trials)
    close = [trial for trial in trials if trial.tokens_per_second >= (1 - TIE) * most]
    return min(close, key=lambda trial: trial.drafts)


class _Search:
    """What has been measured so far."""

    def __init__(self, measure: Measure, seconds: float, clock: Callable[[], float]) -> None:
        self._measure, self._clock = measure, clock
        self._end, self._longest = clock() + seconds, 0.0
        self.rounds: dict[int, list[Trial]] = {}
        self.left_out: dict[int, str] = {}

    @property
    def trials(self) -> list[Trial]:
        return [_merged(self.rounds[drafts]) for drafts in sorted(self.rounds)]

    @property
    def best(self) -> int:
        return max(self.trials, key=lambda trial: trial.tokens_per_second).drafts

    def try_one(self, drafts: int) -> None:
        """Measure a number for the first time, unless there is a reason not to."""
        below = [trial for trial in self.trials if trial.drafts < drafts]
        highest = max(self.rounds, default=0)
        if self.rounds and not self._in_time():
            self.left_out[drafts] = "for want of time"
        elif drafts > highest and not _may_win(below, drafts):
            self.left_out[drafts] = "as it cannot win"
        elif not self._run(drafts, 0):
            self.left_out[drafts] = "for want of memory"

    def climb(self, budgets: Sequence[int]) -> None:
        """Measure the numbers beside the best one until it is better than both."""
        while todo := [n for n in _beside(self.best, budgets) if n not in self.rounds and n not in self.left_out]:
            self.try_one(todo[0])

    def repeat(self) -> None:
        """Measure the best numbers again, in turn, so that a machine that slows down or speeds up hits all alike."""
        for number in range(1, _ROUNDS):
            trials = sorted(self.trials, key=lambda trial: -trial.tokens_per_second)[:_FINALISTS]
            least = (1 - _NEAR) * trials[0].tokens_per_second
            close = [trial.drafts for trial in trials if trial.tokens_per_second >= least]
            # A round is measured whole or not at all.
            if len(close) < 2 or not self._in_time(len(close)):
                return
            for drafts in sorted(close):
                self._run(drafts, number)

    def _run(self, drafts: int, number: int) -> bool:
        start = self._clock()
        trial = self._measure(drafts, number)
        self._longest = max(self._longest, self._clock() - start)
        if trial is not None:
            self.rounds.setdefault(drafts, []).append(trial)
        return trial is not None

    def _in_time(self, times: int = 1) -> bool:
        return self._clock() + times * self._longest <= self._end


def _may_win(below: Sequence[Trial], drafts: int) -> bool:
    """Whether more drafts could still be the fastest, judged by the last three numbers, of which 0 may be one.

    At best each further draft brings as much as the last ones did and costs no more than the cheapest did so far.
    """
    if len(below) < 3:
        return True
    first, middle, last = below[-3:]

    def slope(name: str, a: Trial, b: Trial) -> float:
        return max((getattr(b, name) - getattr(a, name)) / (b.drafts - a.drafts), 0.0)

    more = drafts - last.drafts
    gain = slope("tokens_per_forward", middle, last)
    cost = min(slope("seconds_per_forward", first, middle), slope("seconds_per_forward", middle, last))
    hoped = (last.tokens_per_forward + more * gain) / (last.seconds_per_forward + more * cost)
    return _HOPE * last.rows_at_once * hoped >= max(trial.tokens_per_second for trial in below)


def _merged(rounds: Sequence[Trial]) -> Trial:
    """Rounds of one number in one: the median speed of a forward, and what all rows together brought."""
    if len(rounds) == 1:
        return rounds[0]
    tokens = sum(t.tokens_per_forward * t.rows for t in rounds) / sum(t.rows for t in rounds)
    times = sorted(t.seconds_per_forward for t in rounds)
    half = len(times) // 2
    rates = [t.fold_rate for t in rounds if t.fold_rate is not None]
    return Trial(
        drafts=rounds[0].drafts,
        tokens_per_forward=tokens,
        seconds_per_forward=times[half] if len(times) % 2 else (times[half - 1] + times[half]) / 2,
        rows_at_once=min(t.rows_at_once for t in rounds),
        rows=sum(t.rows for t in rounds),
        fold_rate=sum(rates) / len(rates) if rates else None,
    )


def _beside(drafts: int, budgets: Sequence[int]) -> list[int]:
    """The next smaller and the next larger number."""
    at = list(budgets).index(drafts)
    return [budgets[n] for n in (at - 1, at + 1) if 0 <= n < len(budgets)]


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join([", ".join(map(str, numbers[:-1])), str(numbers[-1])]) if len(numbers) > 1 else str(numbers[0])


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
