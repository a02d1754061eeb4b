"""The outcome for people: one table a task on the terminal and in Markdown, and what it says in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Column, Table
from rich.text import Text

from cluster.evaluation.comparison import Against, TaskResult, VariantResult
from cluster.evaluation.scores import Score

_SIGNIFICANT = 0.05


def comparison_rows(result: TaskResult) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table that answers whether a variant is free."""
    header = ["", f"{result.main_metric} (95%)"]
    if result.against:
        header += ["difference (95%)", "p", "same outputs", "first difference"]
    header += ["forwards", "tokens / forward", "tokens/s"]
    lines = []
    for place, variant in enumerate(result.variants):
        line = [variant.run.variant.label, _score(variant.scores[result.main_metric])]
        if result.against:
            line += _held_against(result.against[place - 1]) if place else ["", "", "", ""]
        lines.append(line + _cost(variant))
    return header, lines


def other_scores(result: TaskResult) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the scores beside the main one; no lines where there are none."""
    names = [name for name in result.first.scores if name != result.main_metric]
    lines = [
        [variant.run.variant.label, *(_score(variant.scores[name]) for name in names)] for variant in result.variants
    ]
    return ["", *names], lines if names else []


def sentences(result: TaskResult) -> list[str]:
    """What the table says, and what a reader should know before believing it."""
    lines = [_verdict(result, place) for place in range(1, len(result.variants))]
    for variant in result.variants:
        label, graded = variant.run.variant.label, variant.graded
        if variant.num_failed:
            lines.append(f"{label}: {variant.num_failed:,} of {len(graded.answers):,} rows failed and count as wrong.")
        if variant.num_cut:
            lines.append(
                f"{label}: {variant.num_cut:,} of {len(graded.answers):,} outputs were cut at "
                f"{variant.run.config.max_new_tokens:,} tokens."
            )
        if variant.problems:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in variant.problems.items())
            lines.append(f"{label}: problems while grading: {kinds}.")
    return lines


def title(result: TaskResult) -> str:
    config = result.first.run.config
    samples = "" if config.num_samples == 1 else f", {config.num_samples} samples each"
    return f"{result.name}: {len(result.first.run.items):,} questions{samples}"


def terminal_tables(result: TaskResult) -> list[Table]:
    """The tables for a terminal. Cells are plain text whatever they hold."""
    tables = [(title(result), *comparison_rows(result))]
    header, lines = other_scores(result)
    if lines:
        tables.append(("Other scores", header, lines))
    return [_rich(*table) for table in tables]


def markdown(results: Sequence[TaskResult]) -> str:
    """The same as a page."""
    model = results[0].first.run.config.model
    page = ["# Evaluation", "", f"Model: `{model}`. Each run's folder holds its rows, its settings and its grades."]
    for result in results:
        page += ["", f"## {title(result)}", "", *_markdown_table(*comparison_rows(result))]
        header, lines = other_scores(result)
        if lines:
            page += ["", *_markdown_table(header, lines)]
        page += ["", *(f"- {line}" for line in sentences(result))]
    page += ["", *_NOTES]
    return "\n".join(page) + "\n"


_NOTES = (
    "Intervals have 95% confidence: Wilson's for a share of right answers, a bootstrap over questions otherwise. "
    "Differences are in percentage points against the first line, over the same questions; p is McNemar's exact test, "
    "or a paired permutation test with several samples. *First difference* is the median position of the first token "
    "that differs. Tokens/s counts output tokens over the time in which parts were decoded.",
)


def _verdict(result: TaskResult, place: int) -> str:
    first, variant, against = result.first, result.variants[place], result.against[place - 1]
    difference = against.difference
    chance = "a difference beyond chance" if difference.p < _SIGNIFICANT else "no difference beyond chance"
    if difference.only_first is None:
        counts = ""
    else:
        counts = f", {difference.only_first:,} questions lost and {difference.only_second:,} won"
    parts = [
        f"{variant.run.variant.label} against {first.run.variant.label}: {_points(difference.value)} points "
        f"({_points(difference.low)} to {_points(difference.high)}), {chance} ({_p(difference.p, 'p = ')}){counts}"
    ]
    if first.cost.forwards:
        parts.append(f"{variant.cost.forwards / first.cost.forwards:.2f} of the forwards")
    speeds = first.cost.tokens_per_second, variant.cost.tokens_per_second
    if speeds[0] and speeds[1]:
        parts.append(f"{speeds[1] / speeds[0]:.2f} times the tokens/s")
    return "; ".join(parts) + "."


def _held_against(against: Against) -> list[str]:
    difference, rows = against.difference, against.rows.to_dict()
    interval = f"{_points(difference.value)} ({_points(difference.low)} to {_points(difference.high)})"
    first = rows["first_difference"]
    agreement = "-" if rows["agreement"] is None else f"{100 * rows['agreement']:.1f}%"
    return [interval, _p(difference.p), agreement, "-" if first is None else f"{first['median']:,}"]


def _cost(variant: VariantResult) -> list[str]:
    cost = variant.cost
    per_forward, speed = cost.tokens_per_forward, cost.tokens_per_second
    return [
        f"{cost.forwards:,}",
        "-" if per_forward is None else f"{per_forward:.2f}",
        "-" if speed is None else f"{speed:,.1f}",
    ]


def _score(score: Score) -> str:
    return f"{100 * score.value:.1f}% ({100 * score.low:.1f} to {100 * score.high:.1f})"


def _points(value: float) -> str:
    return f"{100 * value:+.2f}"


def _p(value: float, name: str = "") -> str:
    return f"{name.replace('=', '<') or '<'}0.001" if value < 0.001 else f"{name}{value:.3f}"


def _rich(name: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    columns = [
        Column(column, overflow="fold", justify="left" if not place else "right") for place, column in enumerate(header)
    ]
    table = Table(*columns, title=Text(name), title_justify="left")
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def _markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *("---:" for _ in header[1:])]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (header, rule, *lines)]
