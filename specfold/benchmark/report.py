"""Parts of a measurement: one JSON object each, merged where chip and sources are the same, as tables and as a plot."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from specfold.benchmark.targets import target_table
from specfold.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SAME = ("chip", "torch", "sources")
"""What parts must share to be merged: otherwise their numbers do not belong together."""


def make_part(kind: str, device: str, settings: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    """The records of one call with all that decides them."""
    is_gpu = device.startswith("cuda")
    chip = torch.cuda.get_device_name() if is_gpu else platform.processor() or platform.machine()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "chip": chip,
        "torch": torch.__version__,
        "sources": source_hash(),
        "parts": [{"kind": kind, "settings": settings, "records": records}],
    }


def source_hash() -> str:
    """Hash of everything that decides a measurement."""
    folders = (ROOT / "specfold", ROOT / "kernels")
    files = [ROOT / "jobs" / "bench.py", *(file for folder in folders for file in folder.rglob("*.py"))]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def read_parts(paths: Iterable[Path]) -> dict[str, Any]:
    """Merges the last lines of files. Raises ConfigError for what is no part, or where parts do not belong together."""
    merged: dict[str, Any] = {}
    for path in paths:
        try:
            part = json.loads(path.read_text().strip().splitlines()[-1])
            values = {name: part[name] for name in (*SAME, "date", "parts")}
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            raise ConfigError(f"{path} does not end with a line of JSON that jobs/bench.py wrote.") from None
        for name in SAME:
            if merged and merged[name] != values[name]:
                raise ConfigError(f"{path} has {name} {values[name]}, the parts before it {merged[name]}.")
        values["parts"] = merged.get("parts", []) + values["parts"]
        merged = values
    return merged


def print_tables(report: dict[str, Any]) -> None:
    """One table for every part."""
    for part in report["parts"]:
        shown = ", ".join(f"{k} {v}" for k, v in part["settings"].items() if v is not None)
        print(f"\n{part['kind']} ({report['chip']}, {report['date']}; {shown})")
        print_table(part["records"])
    if targets := target_table(report):
        print("\ntargets")
        print_table(targets)


def print_table(records: Sequence[dict[str, Any]]) -> None:
    """Columns are the keys of the first record; long lists are left to the JSON."""
    if not records:
        return
    columns = [name for name, value in records[0].items() if not isinstance(value, list | dict)]
    cells = [[_cell(record.get(name)) for name in columns] for record in records]
    widths = [max(len(name), *(len(row[i]) for row in cells)) for i, name in enumerate(columns)]
    for row in (columns, *cells):
        print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))


def plot_steps(report: dict[str, Any], path: Path) -> None:
    """Step time against drafts, dense and folded, one panel a shape and batch size."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a plot needs matplotlib: install the extra 'plots'.") from None
    records = [r for part in report["parts"] if part["kind"] == "step" for r in part["records"]]
    if not records:
        raise ConfigError("none of the parts has step times to plot.")
    shapes = list(dict.fromkeys(r["shape"] for r in records))
    batches = sorted({r["batch_size"] for r in records})
    figure = Figure(figsize=(3.2 * len(batches), 2.4 * len(shapes)), layout="constrained")
    panels = figure.subplots(len(shapes), len(batches), squeeze=False)
    for i, shape in enumerate(shapes):
        for j, batch in enumerate(batches):
            here = [r for r in records if r["shape"] == shape and r["batch_size"] == batch]
            panels[i][j].set_visible(bool(here))
            _plot_panel(panels[i][j], here)
            panels[i][j].set_title(f"{shape}, {batch} rows" if batch > 1 else f"{shape}, 1 row", fontsize=9)
    panels[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _plot_panel(panel: Any, records: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import MultipleLocator

    plain = [r for r in records if not r["drafts"] and r.get("time_share") is None]
    for label, marker, chosen in (
        ("dense", "o", [r for r in records if r["drafts"] and r["fold_share"] is None]),
        ("folded", "s", [r for r in records if r["fold_share"] is not None and r.get("time_share") is None]),
        ("folded in time, too", "^", [r for r in records if r.get("time_share") is not None]),
    ):
        if not chosen and marker == "^":
            continue
        line = sorted((plain if marker != "^" else []) + chosen, key=lambda r: r["drafts"])
        panel.plot([r["drafts"] for r in line], [r["step_ms"] for r in line], marker=marker, label=label)
    if records:
        panel.axhline(records[0]["floor_ms"], linestyle="--", color="grey", label="weights read once")
    panel.set_ylim(bottom=0)
    panel.set_xlim(-0.5, max((r["drafts"] for r in records), default=0) + 0.5)
    panel.xaxis.set_major_locator(MultipleLocator(2))
    panel.set_xlabel("drafts", fontsize=8)
    panel.set_ylabel("step, ms", fontsize=8)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
