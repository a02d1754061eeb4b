"""Plots of a profile: residuals, their ripple around new tokens, and the two sweeps. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specfold.config import ConfigError

Records = Sequence[dict[str, Any]]


def require_matplotlib() -> None:
    """Raises ConfigError where it is missing, before anything is measured for it."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("the plots need matplotlib: install the extra 'plots'.") from None


def plot_shares(shares: Records, path: Path) -> None:
    """Cumulative distribution of the residual ratio: by layer on the left, by depth of the draft on the right."""
    figure = _figure(9, 3.6)
    panels = figure.subplots(1, 2, sharey=True)
    chosen = [r for r in shares if r["stage"] == "entry" and r["threshold"] > 0]
    for panel, key in zip(panels, ("layer", "depth"), strict=True):
        values = sorted({r[key] for r in chosen})
        for n, value in enumerate(values):
            points = _weighted([r for r in chosen if r[key] == value])
            color = _shade(n, len(values))
            panel.plot(list(points), list(points.values()), marker=".", color=color, label=f"{key} {value}")
        panel.set_xscale("log")
        panel.set_xlabel("relative residual at most")
        for threshold in (0.1, 0.3):
            panel.axvline(threshold, color="grey", linewidth=0.7, linestyle=":")
        panel.legend(fontsize=7, ncols=2)
    panels[0].set_ylabel("share of draft positions")
    figure.savefig(path, dpi=120)


def plot_ripple(ripple: Records, path: Path) -> None:
    """Mean residual by layer and distance from a newly unmasked token, one panel a step since it was unmasked."""
    steps = sorted({r["steps_since"] for r in ripple})
    layers = sorted({r["layer"] for r in ripple})
    reach = max(abs(r["distance"]) for r in ripple)
    figure = _figure(3.2 * len(steps) + 1, 2.6)
    panels = figure.subplots(1, len(steps), squeeze=False, sharey=True)[0]
    for panel, since in zip(panels, steps, strict=True):
        means = [[float("nan")] * (2 * reach + 1) for _ in layers]
        for r in ripple:
            if r["steps_since"] == since:
                means[layers.index(r["layer"])][r["distance"] + reach] = r["mean"]
        image = panel.imshow(
            means, aspect="auto", origin="lower", vmin=0, vmax=0.5, cmap="viridis",
            extent=(-reach - 0.5, reach + 0.5, layers[0] - 0.5, layers[-1] + 0.5),
        )  # fmt: skip
        panel.set_title(f"unmasked {since} steps before" if since else "just unmasked", fontsize=9)
        panel.set_xlabel("distance")
    panels[0].set_ylabel("layer")
    figure.colorbar(image, ax=list(panels), label="mean residual, 0.5 and above")
    figure.savefig(path, dpi=120)


def plot_delta(records: Records, path: Path, timed: bool = True) -> None:
    """Quality, folding and forwards over delta, for both FFN gates; Spiffy and vanilla as lines; ``timed``: speed."""
    names = [
        ("agreement", "rows like vanilla's"), ("accuracy", "accuracy"), ("fold_rate", "folded share"),
        ("forwards_per_token", "forwards a token"), ("qkv_rows_per_token", "QKV rows a token"),
        ("speed", "speed over vanilla"),
    ]  # fmt: skip
    names = [(name, title) for name, title in names if records[0][name] is not None or name == "fold_rate"]
    names = names if timed else names[:-1]
    _sweep(records, path, "delta", names, ("ffn_gate",))


def plot_time(records: Records, path: Path, timed: bool = True) -> None:
    """Quality, folding and cost over delta_time, for both FFN gates, alone and with drafts; the rest as lines."""
    names = [
        ("agreement", "rows like vanilla's"), ("accuracy", "accuracy"), ("time_fold_rate", "folded in time"),
        ("qkv_rows_per_token", "QKV rows a token"), ("ffn_rows_per_token", "FFN rows a token"),
        ("speed", "speed over vanilla"),
    ]  # fmt: skip
    names = names if timed else names[:-1]
    names = [(name, title) for name, title in names if records[0][name] is not None or name == "time_fold_rate"]
    _sweep(records, path, "delta_time", names, ("mode", "ffn_gate"))


def plot_drafts(records: Records, path: Path, timed: bool = True) -> None:
    """What each number of drafts brings and costs, as a graph of that size and pruned from the largest."""
    names = [
        ("accepted_per_forward", "accepted a forward"), ("forwards_per_token", "forwards a token"),
        ("qkv_rows_per_token", "QKV rows a token"), ("speed", "speed over vanilla"),
    ]  # fmt: skip
    _sweep(records, path, "drafts", names if timed else names[:-1], ("mode", "pruned_from"))


def _sweep(records: Records, path: Path, over: str, names: list[tuple[str, str]], by: tuple[str, ...]) -> None:
    """``records``: vanilla first; what has no value of ``over`` is drawn as a line."""
    figure = _figure(3.1 * len(names), 3)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    swept = [r for r in records[1:] if r[over] is not None]
    groups = sorted({tuple(str(r[key]) for key in by) for r in swept})
    for panel, (name, title) in zip(panels, names, strict=True):
        for n, group in enumerate(groups):
            line = [r for r in swept if tuple(str(r[key]) for key in by) == group]
            label = " ".join(_label(key, value) for key, value in zip(by, group, strict=True)).strip()
            panel.plot([r[over] for r in line], [r[name] for r in line], marker="o", ms=3, color=f"C{n}", label=label)
        for r in records:
            if r not in swept and r[name] is not None:
                style = {"vanilla": ":", "sub-block cache": "-."}.get(r["mode"], "--")
                panel.axhline(r[name], color="grey", linestyle=style, linewidth=0.9, label=r["mode"])
        panel.set_title(title, fontsize=9)
        panel.set_xlabel(over, fontsize=8)
    panels[0].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def _label(key: str, value: str) -> str:
    if key == "pruned_from":
        return "" if value == "None" else f"pruned from {value}"
    return f"{value} gate" if key == "ffn_gate" else value


def _weighted(records: Records) -> dict[float, float]:
    """Share by threshold over several groups of draft positions."""
    below: dict[float, float] = {}
    total: dict[float, int] = {}
    for r in records:
        below[r["threshold"]] = below.get(r["threshold"], 0.0) + r["share"] * r["count"]
        total[r["threshold"]] = total.get(r["threshold"], 0) + r["count"]
    return {threshold: below[threshold] / total[threshold] for threshold in sorted(below)}


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _shade(n: int, count: int) -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"](n / max(count - 1, 1) * 0.9)
