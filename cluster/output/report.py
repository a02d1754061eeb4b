"""``report.html``: a page that tells people what a run has brought, made of the summary, the run file and a few rows.

Whatever comes from a model or an input is text for the template, which escapes it; the page has no script, and its
policy allows none.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from cluster.config import JobConfig
from cluster.errors import UserError
from cluster.output.charts import (
    MAX_LANES,
    Chart,
    heat_chart,
    histogram,
    percent,
    rate_chart,
    share_chart,
    span,
    timeline,
)
from cluster.output.examples import Example, find_errors, find_flagged, find_outputs, shorten
from cluster.output.lease import is_held
from cluster.output.rundir import RUN, RunDir
from cluster.output.sink import PartError, read_record
from cluster.output.storage import Store
from cluster.output.summary import ShardLine, Tally, read_summary

REPORT = "report.html"
RUNNING, KILLED = "running", "killed"
MAX_EXAMPLES, MAX_SLOWEST, MAX_NAMED, MAX_SESSIONS = 3, 10, 20, 20
_READERS = 16
_SETTING = 2_000


class Report:
    """The page of a run. Keeps the examples that it has read, so that a refresh reads little."""

    def __init__(self, store: Store, tally: Tally) -> None:
        self._store, self._tally = store, tally
        self._run: dict[str, Any] = {}
        self._read: dict[Any, list[Example]] = {}

    def write(self, summary: dict[str, Any]) -> None:
        """Publish the page; ``summary`` is what ``summary.json`` says."""
        page = self.render(summary).encode(errors="replace")
        self._store.write(REPORT, page, durable=summary["state"] != RUNNING)

    def render(self, summary: dict[str, Any]) -> str:
        self._run = self._run or orjson.loads(self._store.read(RUN))
        lines = self._tally.lines()
        return _template().render(
            summary=summary,
            run=self._run,
            verdict=verdict(summary),
            charts=charts(summary, lines, self._run["config"]["max_new_tokens"]),
            slowest_rows=sorted(lines, key=lambda line: -line.slowest_row_seconds)[:MAX_SLOWEST],
            slowest_shards=summary["slowest_shards"][:MAX_SLOWEST],
            errors=[
                (kind, count, self._errors(kind))
                for kind, count in sorted(summary["rows"]["failed_by_kind"].items(), key=lambda item: -item[1])
            ],
            flags=[
                (flag, count, self._flagged(flag))
                for flag, count in sorted(summary.get("flags", {}).items(), key=lambda item: -item[1])
                if count
            ],
            outputs=self._outputs(lines, summary["state"]),
            changed=settings(self._run["config"], changed=True),
            unchanged=settings(self._run["config"], changed=False),
            max_sessions=MAX_SESSIONS,
            max_named=MAX_NAMED,
            max_lanes=MAX_LANES,
        )

    def _outputs(self, lines: list[ShardLine], state: str) -> list[Example]:
        """Rows of the first part, and at the end also of the middle and the last one."""
        good = [line.shard for line in lines if line.failed < line.rows]
        places = good[:1] if state == RUNNING else sorted({good[0], good[len(good) // 2], good[-1]} if good else ())
        found = []
        for index in places:
            found += self._cached(("output", index), lambda index=index: find_outputs(self._store, index, 2))
        return found

    def _errors(self, kind: str) -> list[Example]:
        return self._examples(kind, self._tally.failed_in, lambda i, n: find_errors(self._store, i, kind, n))

    def _flagged(self, flag: str) -> list[Example]:
        return self._examples(flag, self._tally.flagged_in, lambda i, n: find_flagged(self._store, i, flag, n))

    def _examples(self, name: str, places: dict[str, list[int]], find: Any) -> list[Example]:
        found: list[Example] = []
        for index in places.get(name, ()):
            if len(found) < MAX_EXAMPLES:
                found += self._cached((name, index), lambda index=index: find(index, MAX_EXAMPLES))
        return found[:MAX_EXAMPLES]

    def _cached(self, key: Any, find: Any) -> list[Example]:
        if key not in self._read:
            self._read[key] = find()
        return self._read[key]


def rebuild(store: Store) -> None:
    """Make the page anew from what is in the folder, also of a run that was killed. ``UserError`` if it is no run's."""
    rundir = RunDir(store)
    run = rundir.read()
    if run is None:
        raise UserError(f"{store.url} holds no run.")
    tally = Tally()
    with ThreadPoolExecutor(_READERS) as pool:
        for record in pool.map(lambda index: _record(store, index), rundir.parts()):
            if record is not None and record.identity == run.hash:
                tally.add(record, fresh=False)
    known = read_summary(store)
    # Only the driver could count these; everything else is in the parts.
    kept = (
        "workers",
        "tokens_per_second",
        "state",
        "error",
        "missing_shards",
        "updated",
        "sessions",
        "history",
        "audit",
    )
    summary = tally.to_dict(0.0) | {name: known[name] for name in kept if name in known}
    summary["rows"] = {"total": known.get("rows", {}).get("total")} | summary["rows"]
    if summary.get("state", RUNNING) == RUNNING and not is_held(store):
        summary["state"] = KILLED
    Report(store, tally).write({"missing_shards": "", "updated": "", "sessions": [], "history": []} | summary)


def verdict(summary: dict[str, Any]) -> tuple[str, str]:
    """How the run stands: a class for its colour (good, fair, bad, live) and a sentence."""
    rows, state = summary["rows"], summary["state"]
    done, failed, total = rows["done"], rows["failed"], rows["total"]
    left = "" if total is None else f"{max(total - done, 0):,} of {total:,} rows are not done. "
    again = "The same command goes on from here."
    if state == RUNNING:
        share = f" of {total:,}" if total else ""
        return "live", (
            f"Running: {done:,}{share} rows are done, {failed:,} of them failed. Reload the page for newer numbers. "
            f"This one was made at {summary['updated']}; if that is long past, the job was killed. {again}"
        )
    if state == KILLED:
        return "bad", f"Killed before its end. {left}{again}"
    if state != "done":
        if summary.get("error"):
            return (
                "bad",
                f"Stopped before its end: {summary['error']} {left}Once that is mended, the same command goes on.",
            )
        return "bad", f"Stopped before its end ({state}). {left}{again}"
    if (summary["sessions"] or [{}])[-1].get("exit_code"):
        return "bad", f"All {done:,} rows are there, but {failed:,} of them failed: more than --max-failed allows."
    if failed:
        return "fair", f"All {done:,} rows are there; {failed:,} of them failed."
    if rows["quarantined"]:
        return "fair", f"All {done:,} rows are there and none failed; {rows['quarantined']:,} are in quarantine."
    return "good", f"All {done:,} rows are there and none failed."


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
        (reason, count / max(rows["done"], 1), f"{count:,} rows")
        for reason, count in rows["by_finish_reason"].items()
        if rows["done"]
    ]
    forwards: dict[float, int] = {}
    for line in lines:
        if line.tokens_per_forward is not None:
            bin = math.floor(line.tokens_per_forward * 10) / 10
            forwards[bin] = forwards.get(bin, 0) + 1
    lengths = {float(length): count for length, count in summary["output_lengths"].items()}
    bin_width = 2 ** max(
        int(max(lengths, default=1)).bit_length() - 4, 0
    )  # of the longest outputs: see sink.length_bins
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
        histogram(
            "lengths", "Output lengths", f"Rows by the tokens of their output (at most {max_new_tokens:,}).",
            ("tokens", "rows"), lengths, bin_width,
        ),
        share_chart("finish", "Finish reasons", "Share of the rows by what ended them.", "reason", reasons),
        worker_chart(summary, lines),
    ]  # fmt: skip
    return {chart.id: chart for chart in found}


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


def settings(config: dict[str, Any], *, changed: bool) -> list[tuple[str, str]]:
    """The run's settings that differ from the defaults, or those that do not."""
    defaults = {f.name: f.default for f in fields(JobConfig)}

    def plain(value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    def text(value: Any) -> str:
        return "–" if value in (None, [], "") else shorten(value if isinstance(value, str) else _json(value), _SETTING)

    return [
        (name.replace("_", "-"), text(value))
        for name, value in config.items()
        if (value != plain(defaults.get(name))) == changed
    ]


def _epoch(text: str | None) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None


def _record(store: Store, index: int) -> Any:
    try:
        return read_record(store, index)
    except PartError:
        return None


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _counts(found: list[tuple[str, int, list[Example]]]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count, _ in found)


@lru_cache(1)
def _template() -> Template:
    folder = Path(__file__).with_name("templates")
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": _number, "percent": percent, "span": span, "counts": _counts, "json": _json, "short": shorten
    }  # fmt: skip
    return environment.get_template("report.html.j2")
