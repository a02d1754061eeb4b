"""What ``--check`` prints, and the one line of it that opens a job: rows, lengths, parts, memory and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.config import JobConfig
from cluster.driver.check import RowCheck
from cluster.driver.footprint import Footprint
from cluster.driver.progress import duration
from cluster.output.sink import DATA, QUARANTINE
from cluster.output.storage import Store
from cluster.output.summary import read_summary

# Measured: 256 worked solutions of arithmetic problems as text and ids; parts of 8 and of 96 rows of the bundled model.
_TOKEN_BYTES, _ROW_BYTES, _PART_BYTES = 2.5, 40, 6_000
_BAR_WIDTH = 40
_LABEL_WIDTH = 10
_MAX_BINS = 12
_WIDTHS = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]


@dataclass(frozen=True)
class EarlierRun:
    """What an output folder tells of the runs before: sums over its rows, and the speed of the last that decoded."""

    rows: int
    output_tokens: int
    num_bytes: int
    tokens_per_s: float | None
    workers: int


@dataclass(frozen=True)
class JobPlan:
    """How the job would be run."""

    config: JobConfig
    """With every ``auto`` choice made."""
    workers: int
    footprint: Footprint
    earlier: EarlierRun | None = None
    """The output folder's run."""
    goes_on: bool = False
    """The job would keep that run's rows."""


def earlier_run(store: Store) -> EarlierRun | None:
    """The run whose summary is in the folder; None if there is none that decoded a token."""
    values = read_summary(store)
    tokens = values.get("output_tokens", 0)
    if not tokens:
        return None
    sessions = [session for session in values.get("sessions", ()) if session.get("output_tokens")]
    speed = (values.get("tokens_per_second") or {}).get("decode")
    if not speed and sessions and sessions[-1].get("seconds"):
        speed = sessions[-1]["output_tokens"] / sessions[-1]["seconds"]
    workers = sessions[-1].get("workers", 0) if sessions else 0
    size = sum(map(store.num_bytes, (DATA, QUARANTINE)))
    return EarlierRun(values["rows"]["done"], tokens, size, speed, workers)


def full_report(found: RowCheck, plan: JobPlan) -> list[str]:
    """All lines of ``--check``."""
    lines = [*found.report(), ""]
    if found.lengths:
        lines += [*_histogram(found.lengths), ""]
    sections = [
        ("Output", _output(found, plan)),
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
    rows = f"{found.rows:,} input rows"
    if total_rows != found.rows:
        rows = f"the first {rows}" + (f" of {total_rows:,}" if total_rows else "")
    lengths = f", prompts of {_span(found.lengths)} tokens" if found.lengths else ""
    num_rows = total_rows or found.rows
    return f"Checked {rows}{lengths}: {_parts(num_rows, config)}."


def _parts(num_rows: int, config: JobConfig) -> str:
    shard_rows = config.shard_rows or 1
    return (
        f"{num_rows * config.num_samples:,} outputs in {-(-num_rows // shard_rows):,} parts of {shard_rows:,} "
        "input rows"
    )


def _histogram(lengths: Counter[int]) -> Iterator[str]:
    """Prompt lengths, a bar for each bin."""
    count = lengths.total()
    mean = sum(length * n for length, n in lengths.items()) / count
    yield f"Prompt tokens: {_span(lengths)}, median {_quantile(lengths, 0.5):,}, mean {mean:,.1f}."
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
    yield f"{_parts(found.rows, config)}, {plan.workers:,} workers."
    if num_parts < plan.workers:
        yield f"{plan.workers - num_parts:,} workers would have no part to decode; a smaller --shard-rows makes more."
    outputs, tokens = found.rows * config.num_samples, found.new_tokens * config.num_samples
    size = tokens * _TOKEN_BYTES + outputs * _ROW_BYTES + num_parts * _PART_BYTES
    yield f"At most {tokens:,} tokens and about {_bytes(size)}, carried columns not counted."
    if earlier and earlier.rows:
        mean = earlier.output_tokens / earlier.rows
        yield (
            f"Like the run in the folder ({mean:,.1f} tokens a row): about {round(mean * outputs):,} tokens and "
            f"{_bytes(earlier.num_bytes / earlier.rows * outputs)}."
        )
    if found.with_stop:
        yield f"{found.with_stop:,} prompts hold a stop token (as a chat template writes it); there it ends nothing."


def _memory(found: RowCheck, plan: JobPlan) -> Iterator[str]:
    footprint, config = plan.footprint, plan.config
    if footprint.problem:
        yield f"The model cannot be loaded: {footprint.problem}"
        return
    yield f"Weights {_bytes(footprint.weights)} in each worker ({config.dtype})."
    if found.lengths:
        typical, longest = (
            (length + config.max_new_tokens) * footprint.position
            for length in (_quantile(found.lengths, 0.5), max(found.lengths))
        )
        yield (
            f"Keys and values {_bytes(footprint.position)} a token: {_bytes(typical)} for a typical row, "
            f"{_bytes(longest)} for the longest,"
        )
        yield f"{_bytes(config.batch_size * longest)} for {config.batch_size:,} such rows at once."
    yield f"Logits of a step at most {_bytes(footprint.logits)}."


def _time(found: RowCheck, plan: JobPlan) -> Iterator[str]:
    earlier, outputs = plan.earlier, found.rows * plan.config.num_samples
    left = max(outputs - earlier.rows, 0) if earlier and plan.goes_on else outputs
    if plan.goes_on and not left:
        yield "None: every row is there."
    elif earlier is None or not earlier.tokens_per_s:
        yield "Unknown: no run in the output folder tells a speed; a job shows it after its first rows."
    else:
        seconds = left * earlier.output_tokens / max(earlier.rows, 1) / earlier.tokens_per_s
        yield (
            f"About {duration(seconds)} for {left:,} outputs, at the {earlier.tokens_per_s:,.0f} tokens/s that the run "
            f"in the folder had with {earlier.workers:,} workers."
        )


def _span(lengths: Counter[int]) -> str:
    low, high = min(lengths), max(lengths)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _quantile(lengths: Counter[int], share: float) -> int:
    """The length that at least this share of the rows does not exceed."""
    left = share * lengths.total()
    for length in sorted(lengths):
        left -= lengths[length]
        if left <= 0:
            return length
    return 0


def _bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
