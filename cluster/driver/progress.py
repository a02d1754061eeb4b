"""Where a job is: its counts, how fast it goes now and went over the run, and how long it will take."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.driver.roster import Live, WorkerLine

WARM_UP_S = 20.0
"""Rows decode this long before they tell a job's speed."""
WINDOW_S, NOW_S = 300.0, 60.0
"""Rows of the last five minutes tell the time left, tokens of the last minute the speed now."""


@dataclass(frozen=True)
class Counts:
    """What is done. Tokens and drafts are those of this session, rows and failures of the whole run."""

    rows: int
    total_rows: int | None
    rows_failed: int
    output_tokens: int
    drafts_proposed: int
    drafts_accepted: int
    recomputed_rows: int
    foldable: int
    folded: int


@dataclass(frozen=True)
class Snapshot:
    """The job at a moment."""

    counts: Counts
    tokens_per_s: float
    """Over the last minute."""
    run_tokens_per_s: float
    """Since this session began, its start included."""
    eta_s: float | None
    """Seconds left; None while nothing is known."""
    workers_wanted: int
    workers: Mapping[str, WorkerLine] = field(default_factory=dict)
    workers_up: int = 0

    @property
    def acceptance(self) -> float | None:
        return _share(self.counts.drafts_accepted, self.counts.drafts_proposed)

    @property
    def fold_rate(self) -> float | None:
        return _share(self.counts.folded, self.counts.foldable)

    @property
    def computed_per_token(self) -> float | None:
        """Positions whose QKV was computed, over layers and forwards, for each output token."""
        return _share(self.counts.recomputed_rows, self.counts.output_tokens)

    def doing(self) -> Counter[str]:
        """Workers by what they are at."""
        return Counter(line.doing for line in self.workers.values())

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, for ``summary.json``: what only a running job can tell."""
        counts = self.counts
        return {
            "rows": counts.rows,
            "failed": counts.rows_failed,
            "tokens_per_second": {"now": round(self.tokens_per_s, 4), "run": round(self.run_tokens_per_s, 4)},
            "acceptance": _rounded(self.acceptance),
            "fold_rate": _rounded(self.fold_rate),
            "computed_per_token": _rounded(self.computed_per_token),
            "eta_seconds": None if self.eta_s is None else round(self.eta_s, 1),
            "workers_up": self.workers_up,
            "workers_wanted": self.workers_wanted,
            "workers": {name: _worker(line) for name, line in self.workers.items()},
        }


class Progress:
    """Turns counters into snapshots; remembers the last five minutes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._pace = Pace(clock)
        self._was_up = False

    def snapshot(self, counts: Counts, live: Live, wanted: int) -> Snapshot:
        if not self._was_up:
            self._pace.restart()  # loading is no part of the speed: the time left would begin far too long
        self._was_up = self._was_up or live.workers_up > 0
        self._pace.add(counts)
        return Snapshot(
            counts,
            tokens_per_s=self._pace.tokens_per_s,
            run_tokens_per_s=counts.output_tokens / max(self._clock() - self._began, 1e-6),
            eta_s=self._pace.eta_s(counts),
            workers_wanted=wanted,
            workers=live.workers,
            workers_up=live.workers_up,
        )


class Pace:
    """Speeds over the last minutes, and the time left by them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._points: deque[tuple[float, int, int]] = deque()

    def restart(self) -> None:
        """Forget what came before."""
        self._points.clear()

    def add(self, counts: Counts) -> None:
        now = self._clock()
        self._points.append((now, counts.rows, counts.output_tokens))
        while len(self._points) > 2 and now - self._points[0][0] > WINDOW_S:
            self._points.popleft()

    @property
    def tokens_per_s(self) -> float:
        return self._slope(2, NOW_S)

    def eta_s(self, counts: Counts) -> float | None:
        """Seconds left; None while nothing is known."""
        speed = self._slope(1, WINDOW_S)
        if counts.total_rows is None or speed <= 0:
            return None
        return max(counts.total_rows - counts.rows, 0) / speed

    def _slope(self, column: int, window_s: float) -> float:
        if len(self._points) < 2:
            return 0.0
        last = self._points[-1]
        first = next(point for point in self._points if point is self._points[-2] or last[0] - point[0] <= window_s)
        # Counts can fall when a worker dies with unfinished rows.
        return max(last[column] - first[column], 0) / max(last[0] - first[0], 1e-6)


class WarmUp:
    """Says once how long a job will take, when its first rows have shown how fast it goes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._pace = clock, Pace(clock)
        self._rows: int | None = None
        self._began: float | None = None
        self._said = False

    def estimate(self, counts: Counts) -> str | None:
        """The sentence, at the one call where it is due; jobs that are nearly done need none."""
        self._rows = counts.rows if self._rows is None else self._rows
        # Rows of an earlier session stand there from the start, and loading is no part of the speed.
        if self._said or counts.rows <= self._rows:
            return None
        self._pace.add(counts)
        self._began = self._clock() if self._began is None else self._began
        left = self._pace.eta_s(counts)
        if left is None or self._clock() - self._began < WARM_UP_S:
            return None
        self._said = True
        if left < WARM_UP_S:
            return None
        return f"About {duration(left)} to go, by the speed of the first {WARM_UP_S:.0f} seconds of decoding."


def duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if m else f"{s}s"


def _worker(line: WorkerLine) -> dict[str, Any]:
    state = line.state
    return {
        "doing": line.doing,
        "node": line.node,
        "rows": state.rows_done,
        "failed": state.rows_failed,
        "output_tokens": state.output_tokens,
        "active_rows": state.active_rows,
        "waiting_rows": state.waiting_rows,
        "batch_size": state.batch_size,
        "busy_seconds": round(state.busy_s, 3),
        "idle_seconds": round(state.idle_s, 3),
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
