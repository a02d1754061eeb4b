"""The live view: a bar on a terminal, a plain line every few seconds in a log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from cluster.words import count

WARM_UP_S = 20.0
"""Rows decode this long before they tell a job's speed."""
WINDOW_S = 300.0
LINE_S = 5.0


@dataclass(frozen=True)
class Snapshot:
    """The job at a moment. Tokens, drafts and forwards are those of this session."""

    rows: int
    total_rows: int | None
    rows_failed: int
    output_tokens: int
    drafts_proposed: int
    drafts_accepted: int
    recomputed_rows: int
    workers_up: int
    workers: int


class Pace:
    """Speeds over the last five minutes, and the time left by them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._points: deque[tuple[float, int, int]] = deque()

    def add(self, snapshot: Snapshot) -> None:
        now = self._clock()
        self._points.append((now, snapshot.rows, snapshot.output_tokens))
        while len(self._points) > 2 and now - self._points[0][0] > WINDOW_S:
            self._points.popleft()

    @property
    def tokens_per_s(self) -> float:
        return self._slope(2)

    def eta_s(self, snapshot: Snapshot) -> float | None:
        """Seconds left; None while nothing is known."""
        speed = self._slope(1)
        if snapshot.total_rows is None or speed <= 0:
            return None
        return max(snapshot.total_rows - snapshot.rows, 0) / speed

    def _slope(self, column: int) -> float:
        if len(self._points) < 2:
            return 0.0
        (first, last) = self._points[0], self._points[-1]
        # Counts can fall when a worker dies with unfinished rows.
        return max(last[column] - first[column], 0) / max(last[0] - first[0], 1e-6)


class WarmUp:
    """Says once how long a job will take, when its first rows have shown how fast it goes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._pace = clock, Pace(clock)
        self._rows: int | None = None
        self._began: float | None = None
        self._said = False

    def estimate(self, snapshot: Snapshot) -> str | None:
        """The sentence, at the one call where it is due; jobs that are nearly done need none."""
        self._rows = snapshot.rows if self._rows is None else self._rows
        # Rows of an earlier session stand there from the start, and loading is no part of the speed.
        if self._said or snapshot.rows <= self._rows:
            return None
        self._pace.add(snapshot)
        self._began = self._clock() if self._began is None else self._began
        left = self._pace.eta_s(snapshot)
        if left is None or self._clock() - self._began < WARM_UP_S:
            return None
        self._said = True
        if left < WARM_UP_S:
            return None
        return f"About {duration(left)} to go, by the speed of the first {WARM_UP_S:.0f} seconds of decoding."


class View(Protocol):
    """Shows the job's progress to a person."""

    def show(self, snapshot: Snapshot) -> None: ...

    def say(self, message: str) -> None:
        """A line that stays."""
        ...

    def close(self) -> None: ...


def open_view(console: Console) -> View:
    return BarView(console) if console.is_terminal else LineView(console)


class LineView:
    """For logs: a line every few seconds."""

    def __init__(self, console: Console, every_s: float = LINE_S) -> None:
        self._console, self._every_s = console, every_s
        self._pace = Pace()
        self._last = time.monotonic()

    def show(self, snapshot: Snapshot) -> None:
        self._pace.add(snapshot)
        if time.monotonic() - self._last >= self._every_s:
            self._last = time.monotonic()
            self.say(describe(snapshot, self._pace))

    def say(self, message: str) -> None:
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()

    def close(self) -> None:
        pass


class BarView:
    """For terminals: one bar."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("{task.fields[head]}"), BarColumn(), TextColumn("{task.fields[tail]}"), console=console
        )
        self._task = self._bar.add_task("", total=None, head="starting", tail="", start=True)
        self._pace = Pace()
        self._bar.start()

    def show(self, snapshot: Snapshot) -> None:
        self._pace.add(snapshot)
        head, _, tail = describe(snapshot, self._pace).partition(", ")
        self._bar.update(self._task, completed=snapshot.rows, total=snapshot.total_rows, head=head, tail=tail)

    def say(self, message: str) -> None:
        self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


def describe(snapshot: Snapshot, pace: Pace) -> str:
    """One line: rows, tokens/s, acceptance, positions computed for a token, failures, workers up, time left."""
    parts = [count(snapshot.rows, "row")]
    if snapshot.total_rows:
        parts = [f"{snapshot.rows:,}/{snapshot.total_rows:,} rows ({snapshot.rows / snapshot.total_rows:.0%})"]
    parts.append(f"{pace.tokens_per_s:,.0f} tokens/s")
    if snapshot.drafts_proposed:
        parts.append(f"acceptance {snapshot.drafts_accepted / snapshot.drafts_proposed:.0%}")
    if snapshot.output_tokens and snapshot.recomputed_rows:
        parts.append(f"{snapshot.recomputed_rows / snapshot.output_tokens:,.0f} computed/token")
    if snapshot.rows_failed:
        parts.append(f"{snapshot.rows_failed:,} failed")
    parts.append(f"{snapshot.workers_up} of {count(snapshot.workers, 'worker')} up")
    eta = pace.eta_s(snapshot)
    if eta is not None:
        parts.append(f"{duration(eta)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if m else f"{s}s"
