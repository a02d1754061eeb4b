"""What a run cost, from the records of its parts alone: the same after any number of interruptions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.messages import ShardRecord
from specfold.stats import DecodeStats


@dataclass(frozen=True)
class Cost:
    """Forwards and time of a whole run."""

    forwards: int
    output_tokens: int
    seconds: float
    """In which at least one part was being decoded: no start, no loading, no pause between two sessions."""
    recomputed_rows_per_token: float | None
    fold_rate: float | None
    time_fold_rate: float | None

    @property
    def tokens_per_forward(self) -> float | None:
        return self.output_tokens / self.forwards if self.forwards else None

    @property
    def tokens_per_second(self) -> float | None:
        return self.output_tokens / self.seconds if self.seconds else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "forwards": self.forwards,
            "output_tokens": self.output_tokens,
            "tokens_per_forward": self.tokens_per_forward,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "recomputed_rows_per_token": self.recomputed_rows_per_token,
            "fold_rate": self.fold_rate,
            "time_fold_rate": self.time_fold_rate,
        }


def cost_of(records: Sequence[ShardRecord]) -> Cost:
    """Sums over a run's parts."""
    total = DecodeStats()
    for record in records:
        total.add(record.stats)
    return Cost(
        total.num_forwards,
        total.output_tokens,
        covered_seconds((record.started, record.ended) for record in records),
        total.recomputed_rows_per_token,
        total.fold_rate,
        total.time_fold_rate,
    )


def covered_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of time spans: workers side by side count once."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        covered += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return covered
