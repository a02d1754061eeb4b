"""The live view: a bar and a table of workers on a terminal, a plain line every few seconds in a log."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from cluster.driver.progress import Snapshot, duration
from cluster.driver.roster import DECODING, STATES
from cluster.words import count

LINE_S = 5.0
MAX_WORKERS = 8
"""More workers than these are counted on a terminal, not listed."""


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
        self._last = time.monotonic()

    def show(self, snapshot: Snapshot) -> None:
        if time.monotonic() - self._last >= self._every_s:
            self._last = time.monotonic()
            self.say(describe(snapshot))

    def say(self, message: str) -> None:
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()

    def close(self) -> None:
        pass


class BarView:
    """For terminals: one bar, and below it the workers."""

    def __init__(self, console: Console) -> None:
        # The bar takes what its texts leave; whatever else there is to tell wraps below it on a narrow terminal.
        columns = (TextColumn("{task.fields[head]}"), BarColumn(bar_width=None), TextColumn("{task.fields[left]}"))
        self._bar = Progress(*columns, console=console, expand=True)
        self._task = self._bar.add_task("", total=None, head="starting", left="", start=True)
        self._told: RenderableType = self._bar
        self._live = Live(self._bar, console=console, auto_refresh=False)
        self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        counts, head, left = snapshot.counts, _rows(snapshot), _left(snapshot)
        self._bar.update(self._task, completed=counts.rows, total=counts.total_rows, head=head, left=left)
        self._told = Group(self._bar, Text(", ".join(_details(snapshot))))
        few = 0 < len(snapshot.workers) <= MAX_WORKERS
        self._live.update(Group(self._told, _table(snapshot)) if few else self._told, refresh=True)

    def say(self, message: str) -> None:
        self._live.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.update(self._told, refresh=True)
        self._live.stop()


def describe(snapshot: Snapshot) -> str:
    """One line: rows, speed now and over the run, acceptance, fold rate, positions computed for a token,
    failures, workers and their state, time left."""
    return ", ".join(filter(None, [_rows(snapshot), *_details(snapshot), _left(snapshot)]))


def _rows(snapshot: Snapshot) -> str:
    counts = snapshot.counts
    if not counts.total_rows:
        return count(counts.rows, "row")
    return f"{counts.rows:,}/{counts.total_rows:,} rows ({counts.rows / counts.total_rows:.0%})"


def _left(snapshot: Snapshot) -> str:
    return "" if snapshot.eta_s is None else f"{duration(snapshot.eta_s)} left"


def _details(snapshot: Snapshot) -> list[str]:
    """What stands between the rows and the time left."""
    counts = snapshot.counts
    parts = [f"{snapshot.tokens_per_s:,.0f} tokens/s ({snapshot.run_tokens_per_s:,.0f} over the run)"]
    if snapshot.acceptance is not None:
        parts.append(f"acceptance {snapshot.acceptance:.0%}")
    if snapshot.fold_rate is not None:
        parts.append(f"{snapshot.fold_rate:.0%} folded")
    if snapshot.computed_per_token:
        parts.append(f"{snapshot.computed_per_token:,.0f} computed/token")
    if counts.rows_failed:
        parts.append(f"{counts.rows_failed:,} failed")
    parts.append(_workers(snapshot))
    return parts


def _workers(snapshot: Snapshot) -> str:
    """``3 of 4 workers up (2 decoding, 1 idle, 1 loading)``; what goes without saying is left out."""
    doing = snapshot.doing()
    told = [f"{doing[state]} {state}" for state in STATES if doing[state]]
    text = f"{snapshot.workers_up} of {count(snapshot.workers_wanted, 'worker')} up"
    return text if doing.keys() <= {DECODING} else f"{text} ({', '.join(told)})"


def _table(snapshot: Snapshot) -> Table:
    names = ("worker", "node", "", "rows", "failed", "in the engine", "waiting")
    columns = [Column(name, justify="left" if i < 3 else "right") for i, name in enumerate(names)]
    table = Table(*columns, box=None, padding=(0, 2))
    for name, line in snapshot.workers.items():
        state = line.state
        numbers = (state.rows_done, state.rows_failed, state.active_rows, state.waiting_rows)
        table.add_row(name, line.node, line.doing, *(f"{number:,}" for number in numbers))
    return table
