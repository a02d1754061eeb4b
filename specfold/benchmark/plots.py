"""What a report's parts measured, as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specfold.config import AUTO, ConfigError

Records = list[dict[str, Any]]


def plot_report(report: dict[str, Any], path: Path) -> None:
    """Step times if there are any, else the speeds of fixed and chosen numbers of drafts. Raises ConfigError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a plot needs matplotlib: install the extra 'plots'.") from None
    for kind, plot in (("step", _plot_steps), ("auto", _plot_choices)):
        records = [r for part in report["parts"] if part["kind"] == kind for r in part["records"]]
        if records:
            try:
                plot(records, Figure).savefig(path, dpi=120)
            except (OSError, ValueError) as error:
                raise ConfigError(f"the plot {path} cannot be written: {error}.") from None
            return
    raise ConfigError("none of the parts has step times or chosen drafts to plot.")


def _plot_choices(records: Records, figures: type[Any]) -> Any:
    """Speed over vanilla against the number of drafts, a line a batch size, one panel a size; stars were chosen."""
    sizes = list(dict.fromkeys(r["size"] for r in records))
    figure = figures(figsize=(4 * len(sizes), 3), layout="constrained")
    for panel, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        for batch in sorted({r["batch_size"] for r in records}):
            here = [r for r in records if r["size"] == size and r["batch_size"] == batch]
            fixed = [r for r in here if r["name"] != AUTO]
            label = f"{batch} rows" if batch > 1 else "1 row"
            (line,) = panel.plot(
                [r["drafts"] for r in fixed], [r["over_vanilla"] for r in fixed], marker=".", label=label
            )
            chosen = [r for r in here if r["name"] == AUTO]
            style = {"marker": "*", "markersize": 13, "linestyle": "", "color": line.get_color()}
            panel.plot([r["drafts"] for r in chosen], [r["over_vanilla"] for r in chosen], **style)
        panel.axhline(1.0, linestyle="--", color="grey")
        panel.set_ylim(bottom=0)
        panel.set_title(f"{size}: stars are what auto chose", fontsize=9)
        panel.set_xlabel("drafts", fontsize=8)
        panel.set_ylabel("tokens/s over vanilla", fontsize=8)
        panel.legend(fontsize=8)
    return figure


def _plot_steps(records: Records, figures: type[Any]) -> Any:
    """Step time against drafts, dense and folded, one panel a shape and batch size."""
    shapes = list(dict.fromkeys(r["shape"] for r in records))
    batches = sorted({r["batch_size"] for r in records})
    figure = figures(figsize=(3.2 * len(batches), 2.4 * len(shapes)), layout="constrained")
    panels = figure.subplots(len(shapes), len(batches), squeeze=False)
    for i, shape in enumerate(shapes):
        for j, batch in enumerate(batches):
            here = [r for r in records if r["shape"] == shape and r["batch_size"] == batch]
            panels[i][j].set_visible(bool(here))
            _plot_panel(panels[i][j], here)
            panels[i][j].set_title(f"{shape}, {batch} rows" if batch > 1 else f"{shape}, 1 row", fontsize=9)
    panels[0][0].legend(fontsize=8)
    return figure


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
