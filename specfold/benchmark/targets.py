"""What the engine is built to reach on an H200, beside what a report's parts measured.

Times follow from cuBLAS's times for the projections plus 12 microseconds a layer for all other work, 26 with nine
branches; ratios of dense over folded from what reading the weights once allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Records = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ShapeTargets:
    vanilla_ms: float
    """One step of one row."""
    folded_ms: float
    """The same with 8 drafts whose positions fold to 85%; at most."""
    dense_over_folded: float
    """Step time without folding over that with it, 8 drafts, one row; at least."""
    dense_over_folded_4: float
    """The same with four rows."""
    over_official: float
    """Tokens/s of vanilla decoding over those of the checkpoint's own decoder; at least."""


TARGETS = {
    "fast-dllm-v2-1.5b": ShapeTargets(1.6, 2.1, 1.1, 1.6, 10.0),
    "nemotron-3b": ShapeTargets(2.7, 3.4, 1.3, 1.9, 7.0),
    "fast-dllm-v2-7b": ShapeTargets(4.6, 5.4, 1.4, 2.0, 3.6),
    "nemotron-8b": ShapeTargets(5.0, 6.2, 1.4, 2.0, 4.8),
    "nemotron-14b": ShapeTargets(7.5, 9.0, 1.4, 2.0, 4.0),
}
EFFICIENCY, IDLE_US = 0.9, 20.0
"""Least tokens/s over what steps alone would give, and most microseconds between two steps."""


def target_table(report: dict[str, Any]) -> Records:
    """One record a target and shape that the parts have a measurement for."""
    steps = _records(report, "step")
    runs = _records(report, "throughput")
    table: Records = []
    for shape, target in TARGETS.items():
        of_shape = [r for r in steps if r["shape"] == shape]
        vanilla, folded = _step(of_shape, 1, 0, False), _step(of_shape, 1, 8, True)
        _add(table, shape, "step, vanilla, 1 row, ms", vanilla, target.vanilla_ms, at_most=True)
        _add(table, shape, "step, 8 drafts folded, 1 row, ms", folded, target.folded_ms, at_most=True)
        for batch, least in ((1, target.dense_over_folded), (4, target.dense_over_folded_4)):
            dense, folded = _step(of_shape, batch, 8, False), _step(of_shape, batch, 8, True)
            ratio = dense / folded if dense and folded else None
            _add(table, shape, f"dense over folded, 8 drafts, {batch} row{'s' * (batch > 1)}", ratio, least)
        alone = [r for r in runs if r["shape"] == shape and r["batch_size"] == 1]
        official = _only(r["over_official"] for r in alone if r["mode"] == "vanilla")
        _add(table, shape, "vanilla tokens/s over the official decoder", official, target.over_official)
        for record in (r for r in runs if r["shape"] == shape):
            name = f"{record['mode']}, {record['batch_size']} row{'s' * (record['batch_size'] > 1)}"
            _add(table, shape, f"efficiency, {name}", record["efficiency"], EFFICIENCY)
            _add(table, shape, f"idle between steps, {name}, us", record["idle_us"], IDLE_US, at_most=True)
    return table


def _records(report: dict[str, Any], kind: str) -> Records:
    return [record for part in report["parts"] if part["kind"] == kind for record in part["records"]]


def _step(records: Records, batch: int, drafts: int, folded: bool) -> float | None:
    def wanted(record: dict[str, Any]) -> bool:
        same = record["batch_size"] == batch and record["drafts"] == drafts and record.get("time_share") is None
        return same and (record["fold_share"] is not None) == folded

    return _only(record["step_ms"] for record in records if wanted(record))


def _only(values: Any) -> float | None:
    """The last of several measurements of the same thing; None without any."""
    found = list(values)
    return found[-1] if found else None


def _add(table: Records, shape: str, what: str, value: float | None, target: float, at_most: bool = False) -> None:
    if value is None:
        return
    better: Callable[[float, float], bool] = float.__le__ if at_most else float.__ge__
    met = better(float(value), float(target))
    table.append({"shape": shape, "what": what, "measured": round(value, 3), "target": target, "met": met})
