"""``report.html``: a page that tells people what a run has brought, made of the summary, the run file and a few rows.

Whatever comes from a model or an input is text for the template, which escapes it; the page has no script, and its
policy allows none.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from cluster.config import flag_fields
from cluster.errors import UserError
from cluster.output.charts import MAX_LANES, percent, span
from cluster.output.examples import Example, find_errors, find_flagged, find_outputs, shorten
from cluster.output.footers import whole_records
from cluster.output.lease import is_held
from cluster.output.run_charts import RUNNING, charts
from cluster.output.rundir import RUN, RunDir
from cluster.output.storage import Store
from cluster.output.summary import Parts, ShardLine, Tally, read_summary
from cluster.output.told import describe_audit, divergence_lines, preflight_lines
from cluster.words import count, verb

REPORT = "report.html"
KILLED = "killed"
MAX_EXAMPLES, MAX_SLOWEST, MAX_NAMED, MAX_SESSIONS = 3, 10, 20, 20
_SETTING = 2_000


class Report:
    """The page of a run. Keeps the examples that it has read, so that a refresh reads little."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._run: dict[str, Any] = {}
        self._read: dict[Any, list[Example]] = {}

    def write(self, summary: dict[str, Any], parts: Parts) -> None:
        """Publish the page; ``summary`` is what ``summary.json`` says."""
        page = self.render(summary, parts).encode(errors="replace")
        self._store.write(REPORT, page, durable=summary["state"] != RUNNING)

    def render(self, summary: dict[str, Any], parts: Parts) -> str:
        self._run = self._run or orjson.loads(self._store.read(RUN))
        return _template().render(
            summary=summary,
            run=self._run,
            verdict=verdict(summary),
            charts=charts(summary, parts.lines, self._run["config"]["max_new_tokens"]),
            slowest_rows=summary["slowest_rows"],
            preflight=list(preflight_lines(summary["preflight"])) if summary.get("preflight") else [],
            audit=describe_audit(summary["audit"]) if summary.get("audit") else "",
            divergences=list(divergence_lines(summary["audit"])) if summary.get("audit") else [],
            slowest_shards=summary["slowest_shards"][:MAX_SLOWEST],
            errors=[
                (kind, count, self._errors(kind, parts))
                for kind, count in sorted(summary["rows"]["failed_by_kind"].items(), key=lambda item: -item[1])
            ],
            flags=[
                (flag, count, self._flagged(flag, parts))
                for flag, count in sorted(summary.get("flags", {}).items(), key=lambda item: -item[1])
                if count
            ],
            outputs=self._outputs(parts.lines, summary["state"]),
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

    def _errors(self, kind: str, parts: Parts) -> list[Example]:
        return self._examples(kind, parts.failed_in, lambda i, n: find_errors(self._store, i, kind, n))

    def _flagged(self, flag: str, parts: Parts) -> list[Example]:
        return self._examples(flag, parts.flagged_in, lambda i, n: find_flagged(self._store, i, flag, n))

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
    run = rundir.read() if store.exists(RUN) else None
    if run is None:
        raise UserError(f"{store.url} is not the output of a run: it has no {RUN}.")
    tally = Tally()
    for record in whole_records(rundir, run.hash):
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
        "preflight",
    )
    summary = tally.to_dict(0.0) | {name: known[name] for name in kept if name in known}
    summary["rows"] = {"total": known.get("rows", {}).get("total")} | summary["rows"]
    if summary.get("state", RUNNING) == RUNNING and not is_held(store):
        summary["state"] = KILLED
    base = {"missing_shards": "", "updated": "", "sessions": [], "history": []}
    Report(store).write(base | summary, tally.parts())


def verdict(summary: dict[str, Any]) -> tuple[str, str]:
    """How the run stands: a class for its colour (good, fair, bad, live) and a sentence."""
    rows, state = summary["rows"], summary["state"]
    done, failed, total = rows["done"], rows["failed"], rows["total"]
    left = "" if total is None else f"{max(total - done, 0):,} of {count(total, 'row')} are not done. "
    again = "The same command goes on from here."
    if state == RUNNING:
        share = f"{done:,} of {count(total, 'row')} are" if total else f"{count(done, 'row')} {verb(done, 'is', 'are')}"
        return "live", (
            f"Running: {share} done, {failed:,} of them failed. Reload the page for newer numbers. "
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
    whole = f"All {count(done, 'row')} are there" if done != 1 else "The one row is there"
    if (summary["sessions"] or [{}])[-1].get("exit_code"):
        return "bad", f"{whole}, but {failed:,} of them failed: more than --max-failed allows."
    aside = rows.get("quarantined", 0)
    moved = f"{aside:,} {verb(aside, 'is', 'are')} in quarantine"
    if aside and aside == done:
        return "bad", f"{whole}, and every one is in quarantine: data/ holds none."
    if failed:
        return "fair", f"{whole}; {failed:,} of them failed" + (f" and {moved}." if aside else ".")
    if aside:
        return "fair", f"{whole} and none failed; {moved}."
    return "good", f"{whole} and none failed."


def settings(config: dict[str, Any], *, changed: bool) -> list[tuple[str, str]]:
    """The run's flags that differ from the defaults, or those that do not."""
    defaults = {f.name: f.default for f in flag_fields()}

    def plain(value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    def text(value: Any) -> str:
        return "–" if value in (None, [], "") else shorten(value if isinstance(value, str) else _json(value), _SETTING)

    if config.get("chosen_drafts") is not None:
        config = config | {"drafts": f"{config['drafts']} ({config['chosen_drafts']})"}
    return [
        (name.replace("_", "-"), text(value))
        for name, value in config.items()
        if name in defaults and (value != plain(defaults[name])) == changed
    ]


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
        "counted": count, "number": _number, "percent": percent, "span": span, "counts": _counts, "json": _json,
        "short": shorten,
    }  # fmt: skip
    return environment.get_template("report.html.j2")
