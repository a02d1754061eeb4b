"""What the check before a job has found, as the ``preflight`` of ``summary.json``: for the page and for programs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from cluster.config import JobConfig
from cluster.driver.check import RowCheck
from cluster.driver.footprint import Footprint
from cluster.output.sink import length_bins

# Measured: 256 worked solutions of arithmetic problems as text and ids; parts of 8 and of 96 rows of the bundled model.
_TOKEN_BYTES, _ROW_BYTES, _PART_BYTES = 2.5, 40, 6_000


def findings(found: RowCheck, config: JobConfig, total_rows: int | None, footprint: Footprint) -> dict[str, Any]:
    """All that the check of a job's first rows tells; ``config`` is settled, ``total_rows`` None for a stream."""
    shard_rows, rows = config.shard_rows or 1, found.rows if total_rows is None else total_rows
    memory = {"weights": footprint.weights, "token": footprint.position, "logits": footprint.logits}
    return {
        "rows_checked": found.rows,
        "rows_total": total_rows,
        "failed": found.num_failed,
        "failed_by_kind": dict(found.failed.most_common()),
        "first_failed": {kind: {"row_id": row, "error": error} for kind, (row, error) in found.first.items()},
        "repeated_ids": found.repeated_ids,
        "repeated_prompts": found.repeated_prompts,
        "with_stop_token": found.with_stop,
        "prompt_tokens": _lengths(found.lengths) if found.lengths else None,
        "outputs": rows * config.num_samples,
        "parts": -(-rows // shard_rows),
        "shard_rows": shard_rows,
        "most_tokens_of_checked": found.new_tokens * config.num_samples,
        "most_bytes_of_checked": round(most_bytes(found, config)),
        "memory_bytes": None if footprint.problem else memory,
    }


def most_bytes(found: RowCheck, config: JobConfig) -> float:
    """Size of the checked rows' parts if every output is as long as it may be, carried columns not counted."""
    outputs, tokens = found.rows * config.num_samples, found.new_tokens * config.num_samples
    num_parts = -(-found.rows // (config.shard_rows or 1))
    return tokens * _TOKEN_BYTES + outputs * _ROW_BYTES + num_parts * _PART_BYTES


def quantile(lengths: Counter[int], share: float) -> int:
    """The length that at least this share of the rows does not exceed."""
    left = share * lengths.total()
    for length in sorted(lengths):
        left -= lengths[length]
        if left <= 0:
            return length
    return 0


def mean(lengths: Counter[int]) -> float:
    return sum(length * n for length, n in lengths.items()) / lengths.total()


def _lengths(lengths: Counter[int]) -> dict[str, Any]:
    values = np.repeat(np.fromiter(lengths.keys(), np.int64), np.fromiter(lengths.values(), np.int64))
    return {
        "least": min(lengths),
        "median": quantile(lengths, 0.5),
        "mean": round(mean(lengths), 1),
        "most": max(lengths),
        "bins": length_bins(values),
    }
