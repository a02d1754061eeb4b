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


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
