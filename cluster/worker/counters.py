"""A worker's live counters: rows, tokens, and seconds with and without a row in the engine."""

from __future__ import annotations

import time
from operator import attrgetter

from cluster.messages import COUNTED
from specfold.request import ERROR, Completion

_SUMMED = {
    "forwards": "num_forwards", "drafts_proposed": "drafts_proposed", "drafts_accepted": "drafts_accepted",
    "recomputed_rows": "recomputed_qkv_rows", "foldable": "foldable", "folded": "folded",
}  # fmt: skip
"""Live counters, and the rows' own that they are the sums of."""


class LiveCounters:
    """Not safe for threads: the decode loop's lock is around it."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = dict.fromkeys(COUNTED, 0)
        self._uncounted: list[Completion] = []
        """Done rows whose counters are not in ``_counts`` yet: many at once are added in a fraction of the time."""
        self._seconds = [0.0, 0.0]  # idle, busy
        self._since = time.monotonic()
        self.busy = False
        """The engine has a row."""

    def add(self, completion: Completion) -> None:
        """A row is done."""
        self._uncounted.append(completion)

    def add_failed(self, rows: int) -> None:
        """Rows have failed before they were decoded."""
        self._counts["rows_done"] += rows
        self._counts["rows_failed"] += rows

    def switch(self, busy: bool) -> None:
        """Close the books on the time since the last change from idle to busy or back."""
        now = time.monotonic()
        self._seconds[self.busy] += now - self._since
        self.busy, self._since = busy, now

    def read(self) -> dict[str, int]:
        """All of ``COUNTED``, up to now."""
        done, self._uncounted = self._uncounted, []
        stats = [completion.stats for completion in done if completion.finish_reason != ERROR]
        counts = self._counts
        counts["rows_done"] += len(done)
        counts["rows_failed"] += len(done) - len(stats)
        counts["output_tokens"] += sum(len(c.token_ids) for c in done if c.finish_reason != ERROR)
        for name, field_name in _SUMMED.items():
            counts[name] += sum(map(attrgetter(field_name), stats))
        return counts

    def read_seconds(self) -> tuple[float, float]:
        """Idle and busy seconds up to now."""
        self.switch(self.busy)
        return self._seconds[0], self._seconds[1]
