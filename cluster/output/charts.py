"""Charts as plain shapes with a table of the same numbers; the page's template draws them. Knows no HTML and no run.

Shapes lie in a box of ``WIDTH`` by a chart's height that the page stretches to any width; labels stay outside of it,
so that they can be read on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

WIDTH = 1000.0
HEIGHT = 300.0
LANE = 24.0
MAX_LANES, MAX_LAYERS, MAX_DEPTHS, MAX_BINS = 60, 128, 16, 24
_MAX_RATES = 100
_PIXEL_S = 400
"""A gap in a timeline shorter than this share of its length cannot be seen and is not drawn."""


@dataclass(frozen=True)
class Rect:
    """``tip`` is shown by a pointer resting on it."""

    x: float
    y: float
    width: float
    height: float
    style: str = "bar"
    opacity: float = 1.0
    tip: str = ""


@dataclass(frozen=True)
class Line:
    """``points``: an SVG path."""

    points: str
    style: str


@dataclass(frozen=True)
class Chart:
    """One chart. Without shapes there is nothing to draw, and ``description`` says why."""

    id: str
    title: str
    description: str
    rects: Sequence[Rect] = ()
    lines: Sequence[Line] = ()
    y_labels: Sequence[str] = ()
    """From top to bottom, evenly spaced: at the edges of a scale, or one for each lane."""
    x_labels: Sequence[str] = ()
    cells: bool = False
    """Whether ``x_labels`` stand below the middle of equal cells, or at ticks from edge to edge."""
    lanes: bool = False
    height: float = HEIGHT
    header: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.rects and not self.lines


def rate_chart(id: str, title: str, unit: str, points: Sequence[Sequence[float]], column: int) -> Chart:
    """Speed over time, from ``points`` of (seconds, counts…); ``column`` is the count."""
    steps = _spaced([[0.0] * len(points[0]), *points] if points else [])
    rates = [(a[0], b[0], max(b[column] - a[column], 0) / (b[0] - a[0])) for a, b in pairwise(steps) if b[0] > a[0]]
    if not rates:
        return Chart(id, title, "Too short a run to show how its speed went.")
    begin, end, top = rates[0][0], rates[-1][1], nice(max(rate for *_, rate in rates))
    x = [(t - begin) / (end - begin) * WIDTH for t in (begin, *(until for _, until, _ in rates))]
    y = [HEIGHT * (1 - rate / top) for *_, rate in rates]
    path = f"M{x[0]:.1f} {y[0]:.1f}" + "".join(f"H{b:.1f}V{v:.1f}" for b, v in zip(x[1:], [*y[1:], y[-1]], strict=True))
    spoken = f"Between {min(r for *_, r in rates):,.0f} and {max(r for *_, r in rates):,.0f} {unit} over {span(end)}."
    return Chart(
        id, title, spoken,
        lines=[Line(f"{path}V{HEIGHT:g}H{x[0]:.1f}Z", "area"), Line(path, "line")],
        y_labels=_scale(top), x_labels=[span(begin + (end - begin) * i / 4) for i in range(5)],
        header=("from", "to", unit), rows=[(span(a), span(b), f"{rate:,.1f}") for a, b, rate in rates],
    )  # fmt: skip


def share_chart(id: str, title: str, description: str, what: str, shares: Sequence[tuple[str, float, str]]) -> Chart:
    """Bars of shares between 0 and 1: (label, share, counts as text)."""
    cell = WIDTH / max(len(shares), 1)
    rects = [
        Rect(
            cell * (i + 0.15),
            HEIGHT * (1 - share),
            cell * 0.7,
            HEIGHT * share,
            tip=f"{label}: {percent(share)} {counts}",
        )
        for i, (label, share, counts) in enumerate(shares)
    ]
    return Chart(
        id, title, description, rects=rects, cells=True,
        y_labels=("100%", "50%", "0"), x_labels=[f"{label}\n{percent(share)}" for label, share, _ in shares],
        header=(what, "share", "counts"), rows=[(label, percent(share), counts) for label, share, counts in shares],
    )  # fmt: skip


def histogram(
    id: str, title: str, description: str, header: tuple[str, str], bins: dict[float, int], unit: float = 1
) -> Chart:
    """Counts by value; ``bins`` maps the smallest value of a bin to its count, and no bin is wider than ``unit``.

    Joined to at most ``MAX_BINS`` bars, each some whole units wide: so none is empty only because bins lie beside it.
    """
    if not bins:
        return Chart(id, title, "Nothing to count yet.")
    low, high = min(bins), max(bins)
    step = unit * max(math.ceil((high - low) / unit / (MAX_BINS - 2) - 1e-9), 1)
    start = math.floor(low / step + 1e-9) * step
    counts = [0] * (int((high - start) / step + 1e-9) + 1)
    for value, count in bins.items():
        counts[min(int((value - start) / step + 1e-9), len(counts) - 1)] += count
    top, cell = nice(max(counts)), WIDTH / len(counts)
    names = [_between(start + i * step, step) for i in range(len(counts))]
    rects = [
        Rect(cell * (i + 0.05), HEIGHT * (1 - n / top), cell * 0.9, HEIGHT * n / top, tip=f"{name}: {n:,}")
        for i, (n, name) in enumerate(zip(counts, names, strict=True))
        if n
    ]
    few = len(counts) <= 6
    edges = [f"{start + step * len(counts) * i / 4:,.4g}" for i in range(5)]
    return Chart(
        id, title, description, rects=rects, cells=few, y_labels=_scale(top), x_labels=names if few else edges,
        header=header, rows=[(name, f"{n:,}") for name, n in zip(names, counts, strict=True)],
    )  # fmt: skip


def heat_chart(id: str, title: str, description: str, grid: Sequence[Sequence[float]]) -> Chart:
    """Shares between 0 and 1 by layer (left to right) and draft depth (top to bottom): ``grid[layer][depth]``."""
    layers = [row[:MAX_DEPTHS] for row in grid[:MAX_LAYERS]]
    depths = max(map(len, layers), default=0)
    if not depths:
        return Chart(id, title, "No drafts that could fold.")
    width, height = WIDTH / len(layers), HEIGHT / depths
    low, high = min(map(min, layers)), max(map(max, layers))
    rects = [
        Rect(
            width * i, height * k, width, height, "heat", round(0.1 + 0.9 * (share - low) / (high - low or 1), 3),
            f"layer {i}, {k + 1} ahead: {percent(share)}",
        )
        for i, row in enumerate(layers)
        for k, share in enumerate(row)
    ]  # fmt: skip
    marks = sorted({round((len(layers) - 1) * i / 4) for i in range(5)})
    few = len(layers) <= 8
    return Chart(
        id, title, f"{description} Palest {percent(low)}, fullest {percent(high)}.", rects=rects, lanes=True,
        cells=few, y_labels=[f"{k + 1} ahead" for k in range(depths)],
        x_labels=[f"{i}" for i in (range(len(layers)) if few else marks)],
        header=("layer", *(f"{k + 1} ahead" for k in range(depths))),
        rows=[(i, *map(percent, row)) for i, row in enumerate(layers)],
    )  # fmt: skip


def timeline(id: str, title: str, begin: float, end: float, busy: dict[str, list[tuple[float, float]]]) -> Chart:
    """A lane per name with its spans of work; what is left pale is idle. Seconds since any moment."""
    length = end - begin
    if not busy or length <= 0:
        return Chart(id, title, "No part was finished in this session.")
    merged = {name: merge(spans, length / _PIXEL_S) for name, spans in busy.items()}
    idle = {name: length - sum(b - a for a, b in spans) for name, spans in merged.items()}
    shown = sorted(sorted(merged, key=lambda name: -idle[name])[:MAX_LANES], key=_natural)
    rects, lines, rows = [], [], []
    for lane, name in enumerate(shown):
        y = lane * LANE
        rects.append(Rect(0, y + 3, WIDTH, LANE - 6, "idle"))
        middle, spans = y + LANE / 2, merged[name]
        path = "".join(
            f"M{(a - begin) / length * WIDTH:.1f} {middle:g}H{(b - begin) / length * WIDTH:.1f}" for a, b in spans
        )
        lines.append(Line(path, "busy"))
        at, gap = _longest_gap(spans, begin, end)
        rows.append(
            (name, len(busy[name]), span(length - idle[name]), span(idle[name]), f"{span(gap)} from {span(at)} on")
        )
    left_out = f" The {MAX_LANES} of {len(merged):,} workers with most idle time." if len(merged) > MAX_LANES else ""
    share = sum(idle.values()) / (length * len(idle))
    return Chart(
        id, title, f"Filled: at work on a part; pale: idle, starting or gone, {percent(share)} of the time.{left_out}",
        rects=rects, lines=lines, y_labels=shown, lanes=True, height=LANE * len(shown),
        x_labels=[span(length * i / 4) for i in range(5)],
        header=("worker", "parts", "at work", "idle", "longest gap"), rows=rows,
    )  # fmt: skip


def nice(value: float) -> float:
    """The smallest of 1, 2, 2.5, 5, 10 times a power of ten that is at least ``value``."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= value * (1 - 1e-9))


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}%"


def span(seconds: float) -> str:
    """``4000`` -> ``1h07m``."""
    if seconds < 10:
        return f"{max(seconds, 0):.1f}".removesuffix(".0") + "s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d{hours % 24:02d}h"
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if m else f"{s}s"


def _scale(top: float) -> list[str]:
    return [
        f"{top:,.4g}" if top < 10_000 else f"{top:,.0f}",
        f"{top / 2:,.4g}" if top < 20_000 else f"{top / 2:,.0f}",
        "0",
    ]


def _spaced(points: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Points at least two seconds and a hundredth of the whole apart: rows end in bursts."""
    if len(points) < 2:
        return []
    apart = max((points[-1][0] - points[0][0]) / _MAX_RATES, 2.0)
    chosen = [points[0]]
    for point in points[1:]:
        if point[0] - chosen[-1][0] >= apart:
            chosen.append(point)
    if len(chosen) > 1:  # what is left is too short for a step of its own
        chosen[-1] = points[-1]
    return chosen


def _between(low: float, step: float) -> str:
    if step == 1 and float(low).is_integer():
        return f"{low:,.0f}"
    return f"{low:,.0f}–{low + step - 1:,.0f}" if float(step).is_integer() else f"{low:.4g}–{low + step:.4g}"


def merge(spans: Sequence[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """The union, with gaps closed that are too short to be seen."""
    merged: list[tuple[float, float]] = []
    for a, b in sorted(spans):
        if merged and a - merged[-1][1] <= gap:
            merged[-1] = merged[-1][0], max(b, merged[-1][1])
        else:
            merged.append((a, b))
    return merged


def _longest_gap(spans: Sequence[tuple[float, float]], begin: float, end: float) -> tuple[float, float]:
    """When the longest gap began, since ``begin``, and its length."""
    edges = [begin, *(edge for pair in spans for edge in pair), end]
    length, start = max((b - a, a) for a, b in zip(edges[::2], edges[1::2], strict=True))
    return start - begin, length


def _natural(name: str) -> tuple[str, float, str]:
    """``worker-10`` after ``worker-9``."""
    head, _, number = name.rpartition("-")
    return (head, float(number), name) if number.replace(".", "", 1).isdigit() else (name, 0.0, name)
