"""Two runs side by side: settings that differ, speed, acceptance, and outputs that changed.

    python jobs/compare_runs.py runs/a runs/b
    python jobs/compare_runs.py s3://bucket/a s3://bucket/b --examples 20

Rows are joined by row_id and sample_id. Prints tables and ends with one line of JSON. Exit code 0 whether or not the
runs agree, 2 if one of the two is no run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if sys.path and Path(sys.path[0]).resolve() == ROOT / "jobs":
    sys.path[0] = str(ROOT)  # a file in jobs/ must not hide a library's module of its name

if __name__ == "__main__":
    from jobs.stopping import stop_at_once

    stop_at_once()  # the imports below take seconds

from rich.console import Console  # noqa: E402
from rich.table import Column, Table  # noqa: E402
from rich.text import Text  # noqa: E402

from cluster.errors import UserError  # noqa: E402
from cluster.output.compare import compare_rows, compare_settings, open_run  # noqa: E402
from cluster.words import count  # noqa: E402


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    try:
        _check(args)
        a, b = open_run(args.a), open_run(args.b)
        settings, rows = compare_settings(a, b), compare_rows(a, b, args.examples).to_dict()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    totals = {name: (a.totals.get(name), b.totals.get(name)) for name in {**a.totals, **b.totals}}
    console = Console()
    console.print(f"A: {a.store.url}\nB: {b.store.url}", markup=False, highlight=False, soft_wrap=True)
    if settings:
        console.print(_table("Settings that differ", settings))
    else:
        console.print("The settings are the same.")
    console.print(_table("Totals", totals))
    for line in describe_rows(rows):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    print(json.dumps({"a": a.store.url, "b": b.store.url, "settings": settings, "totals": totals, "rows": rows}))
    return 0


def _check(args: argparse.Namespace) -> None:
    if not args.a.strip() or not args.b.strip():
        raise UserError("A run's folder or URL must not be empty.")
    if args.examples < 0:
        raise UserError(f"--examples must be 0 or more, not {args.examples}.")


def describe_rows(rows: dict[str, Any]) -> list[str]:
    """The comparison of rows in sentences; outputs are quoted, so that none can move the cursor."""
    agreement = "" if rows["agreement"] is None else f", {100 * rows['agreement']:.2f}% of them the same"
    lines = [f"Rows: {rows['both']:,} in both{agreement}; {rows['only_a']:,} only in A, {rows['only_b']:,} only in B."]
    if rows["other_prompts"]:
        others = count(rows["other_prompts"], "row")
        lines.append(f"Warning: the prompts of {others} differ in length: the inputs differ.")
    if rows["failed_only_a"] or rows["failed_only_b"]:
        lines.append(f"Errors only in A: {rows['failed_only_a']:,}; only in B: {rows['failed_only_b']:,}.")
    first = rows["first_difference"]
    if first:
        others = count(first["rows"], "row")
        lines.append(
            f"Other tokens: {others}; the first that differs is at position {first['median']:,} in the median "
            f"({first['least']:,} to {first['most']:,})."
        )
    for example in rows["examples"]:
        where = "" if example["position"] is None else f", from token {example['position']:,} on"
        lines.append(f"Row {example['row_id']}, sample {example['sample_id']}{where}:")
        for name in ("a", "b"):
            side = example[name]
            lines.append(f"  {name.upper()} ({side['ending']}, {count(side['tokens'], 'token')}): {side['text']!r}")
    return lines


def _table(title: str, values: dict[str, tuple[Any, Any]]) -> Table:
    columns = [Column(name, overflow="fold") for name in ("", "A", "B")]
    table = Table(*columns, title=title, title_justify="left")
    for name, (a, b) in values.items():
        table.add_row(Text(name), Text(_show(a)), Text(_show(b)))
    return table


def _show(value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(_show, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) and value.isprintable() else repr(value)
    return f"{value:,}"


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", help="folder or URL of a run")
    parser.add_argument("b", help="folder or URL of the run to hold against it")
    parser.add_argument("--examples", type=int, default=5, help="changed rows to show (default 5)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
