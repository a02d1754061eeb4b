"""The charts of a run's page, made of its summary and the lines of its parts."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

from cluster.output.charts import Chart, heat_chart, histogram, rate_chart, share_chart, timeline
from cluster.output.summary import ShardLine
from cluster.words import count as counted

RUNNING = "running"


def charts(summary: dict[str, Any], lines: list[ShardLine], max_new_tokens: int) -> dict[str, Chart]:
    """Every chart by its id."""
    stats, rows = summary["stats"], summary["rows"]
    depths = list(zip(stats["proposed_by_depth"], stats["accepted_by_depth"], strict=True))
    acceptance = [
        (f"{k + 1} ahead", accepted / proposed, f"{accepted:,} of {proposed:,}")
        for k, (proposed, accepted) in enumerate(depths)
        if proposed
    ]
    runs = sum(stats["run_lengths"])
    none = "No drafts in this run." if rows["done"] else "Nothing to count yet."
    reasons = [
        (reason, count / max(rows["done"], 1), counted(count, "row"))
        for reason, count in rows["by_finish_reason"].items()
        if rows["done"]
    ]
    forwards: dict[float, int] = {}
    for line in lines:
        if line.tokens_per_forward is not None:
            bin = math.floor(line.tokens_per_forward * 10) / 10
            forwards[bin] = forwards.get(bin, 0) + 1
    prompts = (summary.get("preflight") or {}).get("prompt_tokens") or {}
    found = [
        rate_chart("throughput", "Throughput over time", "tokens/s", summary["history"], 2),
        share_chart(
            "acceptance", "Acceptance by depth", "Share of the proposed drafts that were accepted, by how many steps "
            "ahead they look." if acceptance else none, "depth", acceptance,
        ),
        heat_chart(
            "folding", "Fold rate by layer and depth", "Share of the drafts' positions that took over their parent's "
            "work; layers from left to right.", fold_grid(stats),
        ),
        share_chart(
            "runs", "Drafts accepted in a row", "Share of the drafted forwards by how many drafts they accepted."
            if runs else none, "accepted",
            [(f"{k}", n / runs, f"{n:,} forwards") for k, n in enumerate(stats["run_lengths"])] if runs else [],
        ),
        histogram(
            "forwards", "Tokens per forward", "Parts of the output by their mean tokens per forward.",
            ("tokens per forward", "parts"), forwards, 0.1,
        ),
        _length_chart(
            "prompts", "Prompt lengths", "Input rows by the tokens of their prompt, as checked before decoding.",
            prompts.get("bins", {}),
        ),
        _length_chart(
            "lengths", "Output lengths", f"Rows by the tokens of their output (at most {max_new_tokens:,}).",
            summary["output_lengths"],
        ),
        share_chart("finish", "Finish reasons", "Share of the rows by what ended them.", "reason", reasons),
        worker_chart(summary, lines),
    ]  # fmt: skip
    return {chart.id: chart for chart in found}


def _length_chart(id: str, title: str, description: str, counts: dict[str, int]) -> Chart:
    bins = {float(length): count for length, count in counts.items()}
    width = 2 ** max(int(max(bins, default=1)).bit_length() - 4, 0)  # of the longest ones: see sink.length_bins
    return histogram(id, title, description, ("tokens", "rows"), bins, width)


def fold_grid(stats: dict[str, Any]) -> list[list[float]]:
    """Fold rate by layer and depth: mean of the QKV and the FFN share."""
    totals = stats["draft_rows"]
    depths = [k for k, total in enumerate(totals) if total]
    if not depths:
        return []
    pairs = zip(stats["folded_qkv"], stats["folded_ffn"], strict=True)
    return [[(qkv[k] + ffn[k]) / (2 * totals[k]) for k in depths] for qkv, ffn in pairs]


def worker_chart(summary: dict[str, Any], lines: list[ShardLine]) -> Chart:
    """When each worker was at work on parts, in the last session."""
    begin = _epoch((summary["sessions"] or [{}])[-1].get("started")) or min(
        (line.started / 1000 for line in lines), default=0.0
    )
    busy: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        if line.started / 1000 >= begin - 1:
            at = max(line.started / 1000, begin)
            busy.setdefault(line.worker, []).append((at, max(at, line.started / 1000 + line.seconds)))
    end = max((b for spans in busy.values() for _, b in spans), default=begin)
    if summary["state"] == RUNNING:
        end = max(end, _epoch(summary["updated"]) or end)
    return timeline("workers", "Workers over time", begin, end, busy)


def _epoch(text: str | None) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None
