"""What ``--check`` prints, and the one line of it that opens a job: rows, lengths, parts, memory and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster.config import AUTO_GRAPH, JobConfig
from cluster.driver.check import RowCheck
from cluster.driver.findings import mean, most_bytes, quantile
from cluster.driver.footprint import Footprint
from cluster.driver.progress import duration
from cluster.messages import ShardRecord
from cluster.output.charts import merge
from cluster.output.sink import DATA, QUARANTINE
from cluster.output.storage import Store
from cluster.words import count, size, verb
from specfold.config import AUTO, AUTO_DRAFTS

_BAR_WIDTH = 40
_LABEL_WIDTH = 10
_MAX_BINS = 12
_WIDTHS = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]


@dataclass(frozen=True)
class EarlierRun:
    """What the parts in an output folder tell of the run that made them: sums over its rows, and how fast it was."""

    rows: int
    output_tokens: int
    num_bytes: int
    tokens_per_s: float | None
    """Of all workers together, while any was at work on a part."""
    workers: int
    """How many were at work at a time, in the mean."""


@dataclass(frozen=True)
class JobPlan:
    """How the job would be run."""

    config: JobConfig
    """With every ``auto`` choice made."""
    workers: int
    footprint: Footprint
    earlier: EarlierRun | None = None
    """The output folder's run."""
    standing: int = 0
    """Rows of that run that the job would keep."""
    notes: Sequence[str] = ()
    """Lines on what may be a mistake."""


def earlier_run(store: Store, records: Sequence[ShardRecord]) -> EarlierRun | None:
    """The run whose parts have these records, whatever its summary says; None if it decoded no token.

    A run that was killed has an old summary or none, but every part that it finished.
    """
    tokens = sum(record.stats.output_tokens for record in records)
    if not tokens:
        return None
    covered = _covered(records)
    at_work = sum(_covered([r for r in records if r.worker == name]) for name in {r.worker for r in records})
    num_bytes = sum(map(store.num_bytes, (DATA, QUARANTINE)))
    rows = sum(record.rows for record in records)
    speed = tokens / covered if covered else None
    return EarlierRun(rows, tokens, num_bytes, speed, max(round(at_work / covered), 1) if covered else 1)


def _covered(records: Sequence[ShardRecord]) -> float:
    """Seconds in which at least one of the parts was being made."""
    return sum(b - a for a, b in merge([(record.started, record.ended) for record in records], 0.0))


def full_report(found: RowCheck, plan: JobPlan) -> list[str]:
    """All lines of ``--check``."""
    lines = [*found.report(), *plan.notes, ""]
    if found.lengths:
        lines += [*_histogram(found.lengths), ""]
    sections = [
        ("Output", _output(found, plan)),
        ("Drafts", _drafts(plan.config)),
        ("Memory", _memory(found, plan)),
        ("Time", _time(found, plan)),
    ]
    for label, texts in sections:
        for text in texts:
            lines.append(f"{label:<{_LABEL_WIDTH}}{text}")
            label = ""
    return lines


def short_report(found: RowCheck, config: JobConfig, total_rows: int | None) -> str:
    """The line that opens a job; ``total_rows``: input rows of the job, if known."""
    rows = count(found.rows, "input row")
    if total_rows != found.rows:
        rows = f"the first {rows}" + (f" of {total_rows:,}" if total_rows else "")
    tokens = "token" if found.lengths.keys() == {1} else "tokens"
    lengths = f", prompts of {_span(found.lengths)} {tokens}" if found.lengths else ""
    num_rows = total_rows or found.rows
    return f"Checked {rows}{lengths}: {_parts(num_rows, config)}."


def _parts(num_rows: int, config: JobConfig) -> str:
    shard_rows = config.shard_rows or 1
    return (
        f"{count(num_rows * config.num_samples, 'output')} in {count(-(-num_rows // shard_rows), 'part')} of "
        f"{count(shard_rows, 'input row')}"
    )


def _histogram(lengths: Counter[int]) -> Iterator[str]:
    """Prompt lengths, a bar for each bin."""
    yield f"Prompt tokens: {_span(lengths)}, median {quantile(lengths, 0.5):,}, mean {mean(lengths):,.1f}."
    bins = list(_bins(min(lengths), max(lengths)))
    counts = [sum(n for length, n in lengths.items() if low <= length <= high) for low, high in bins]
    for (low, high), n in zip(bins, counts, strict=True):
        label = f"{low:,}-{high:,}" if low < high else f"{low:,}"
        yield f"{label:>16} {n:>12,} {'#' * -(-n * _BAR_WIDTH // max(counts))}".rstrip()


def _bins(least: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges that cover both: of equal round width, or octaves where lengths differ too much for that."""
    if most >= 16 * least:
        for power in range(least.bit_length(), most.bit_length() + 1):
            yield 1 << power >> 1, (1 << power) - 1
        return
    width = next(w for w in _WIDTHS if (most // w - least // w) < _MAX_BINS)
    for low in range(least - least % width, most + 1, width):
        yield low, low + width - 1


def _output(found: RowCheck, plan: JobPlan) -> Iterator[str]:
    config, earlier = plan.config, plan.earlier
    num_parts = -(-found.rows // (config.shard_rows or 1))
    yield f"{_parts(found.rows, config)}, {count(plan.workers, 'worker')}."
    if num_parts < plan.workers:
        idle = count(plan.workers - num_parts, "worker")
        yield f"{idle} would have no part to decode; a smaller --shard-rows makes more."
    outputs, tokens = found.rows * config.num_samples, found.new_tokens * config.num_samples
    yield f"At most {count(tokens, 'token')} and about {size(most_bytes(found, config))}, carried columns not counted."
    if earlier and earlier.rows:
        length = earlier.output_tokens / earlier.rows
        yield (
            f"Like the run in the folder ({length:,.1f} tokens a row): about "
            f"{count(round(length * outputs), 'token')} and "
            f"{size(earlier.num_bytes / earlier.rows * outputs)}."
        )
    if found.with_stop:
        hold = verb(found.with_stop, "holds", "hold")
        yield (
            f"{count(found.with_stop, 'prompt')} {hold} a stop token (as a chat template writes it); there it ends "
            "nothing."
        )


def _drafts(config: JobConfig) -> Iterator[str]:
    """What a run chooses for itself, and whether the one in the folder has done so."""
    if config.draft_graph == AUTO_GRAPH and config.draft_graph_text is None:
        yield "The draft graph will be made from the first rows, before the first part."
    if config.drafts == AUTO and config.chosen_drafts is None:
        yield (
            f"0 to {AUTO_DRAFTS}, as short runs of the first rows will show to be fastest for "
            f"{count(config.batch_size, 'row')} at a time; memory is told for {AUTO_DRAFTS}."
        )
    elif config.chosen_drafts is not None:
        yield f"{config.chosen_drafts}, as the run in the folder has chosen."


def _memory(found: RowCheck, plan: JobPlan) -> Iterator[str]:
    footprint, config = plan.footprint, plan.config
    if footprint.problem:
        yield f"The model cannot be loaded: {footprint.problem}"
        return
    yield f"Weights {size(footprint.weights)} in each worker ({config.dtype})."
    if found.lengths:
        typical, longest = (
            (length + config.max_new_tokens) * footprint.position
            for length in (quantile(found.lengths, 0.5), max(found.lengths))
        )
        yield (
            f"Keys and values {size(footprint.position)} a token: {size(typical)} for a typical row, "
            f"{size(longest)} for the longest,"
        )
        yield f"{size(config.batch_size * longest)} for {config.batch_size:,} such rows at once."
    yield f"Logits of a step at most {size(footprint.logits)}."


def _time(found: RowCheck, plan: JobPlan) -> Iterator[str]:
    earlier, outputs = plan.earlier, found.rows * plan.config.num_samples
    left = max(outputs - plan.standing, 0)
    if plan.standing and not left:
        yield "None: every row is there."
    elif earlier is None or not earlier.tokens_per_s:
        yield "Unknown: no run in the output folder tells a speed; a job shows it after its first rows."
    else:
        seconds = left * earlier.output_tokens / max(earlier.rows, 1) / earlier.tokens_per_s
        yield (
            f"About {duration(seconds)} for {count(left, 'output')}, at the {earlier.tokens_per_s:,.0f} tokens/s that "
            f"the run in the folder had with {count(earlier.workers, 'worker')}."
        )


def _span(lengths: Counter[int]) -> str:
    low, high = min(lengths), max(lengths)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
