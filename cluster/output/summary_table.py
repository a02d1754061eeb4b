"""The table that is printed when a job ends."""

from __future__ import annotations

from typing import Any

from rich.table import Column, Table

from cluster.words import count


def summary_table(values: dict[str, Any]) -> Table:
    """What is printed when a job ends."""
    table = Table("", Column(overflow="fold"), title="Summary", title_justify="left", show_header=False)
    rows, speed = values["rows"], values["tokens_per_second"]
    reasons, kinds, flags = (
        ", ".join(f"{number:,} {name}" for name, number in found.items())
        for found in (rows["by_finish_reason"], rows["failed_by_kind"], values["flags"])
    )
    flags = flags or "none"
    if rows["quarantined"]:
        flags += f"; {count(rows['quarantined'], 'row')} in quarantine"
    depth = ", ".join(_percent(share) for share in values["acceptance_by_depth"])
    lines = [
        ("rows", f"{rows['done']:,} ({reasons})"),
        ("failed", f"{rows['failed']:,}" + (f" ({kinds})" if kinds else "")),
        ("flags", flags),
        ("output tokens", f"{values['output_tokens']:,}"),
        ("tokens/s", f"{_number(speed['end_to_end'])} end to end, {_number(speed['decode'])} while decoding"),
        ("tokens per forward", _number(values["tokens_per_forward"])),
        ("acceptance by depth", depth or "no drafts"),
        ("fold rate", _percent(values["fold_rate"]) if values["fold_rate"] is not None else "nothing to fold"),
        ("computed per token", f"{_number(values['recomputed_rows_per_token'])} positions of all layers"),
        ("workers", f"{len(values['workers'])}"),
    ]
    if values["time_fold_rate"] is not None:
        lines.insert(-2, ("folded in time", _percent(values["time_fold_rate"])))
    for name, text in lines:
        table.add_row(name, text, end_section=name in ("flags", "computed per token"))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"
