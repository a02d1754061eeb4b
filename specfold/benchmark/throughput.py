"""Whole rows from prompt to last token, so that everything between two steps is in the time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch

from specfold.backends.fused_step import FusedStep
from specfold.benchmark.forward_cost import forced_folding
from specfold.config import DecodeConfig
from specfold.engine import Engine
from specfold.request import Request
from specfold.stats import DecodeStats

StepEvents = list[tuple[torch.cuda.Event, torch.cuda.Event]]


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rows that follow one another through ``batch_size`` slots, the first of them left out (they start the engine)."""

    mode: str
    batch_size: int
    drafts: int
    fold_rate: float | None
    time_fold_rate: float | None
    """Share of main positions that inherited from the step before."""
    rows_per_token: float
    """QKV rows computed for one output token, mean over layers."""
    rows: int
    tokens_per_s: float
    tokens_per_forward: float
    forwards_per_row: float
    ms_per_forward: float
    """Wall time over the forwards that one slot took part in, prefill included."""
    step_ms: float | None
    """Mean time of a step on the GPU, from its first kernel to its last."""
    efficiency: float | None
    """Tokens/s over what steps alone would give: 1 without prefill, waiting and empty slots."""
    idle_us: float | None
    """Median time between the end of a step and the start of the next one, in which the GPU also copies the result."""

    def to_dict(self) -> dict[str, Any]:
        return {name: round(v, 4) if isinstance(v, float) else v for name, v in asdict(self).items()}


def measure_throughput(
    engine: Engine,
    config: DecodeConfig,
    batch_size: int,
    rounds: int,
    prompt_len: int,
    forced: tuple[float | None, float | None] = (None, None),
    name: str = "",
) -> Throughput:
    """Decodes ``rounds`` batches of random prompts of one length, and one more before the clock starts.

    ``forced``: shares of draft and of main positions that are made to fold, whatever random weights say.
    """
    generator = torch.Generator().manual_seed(3)
    num_rows = batch_size * (rounds + 1)
    prompts = torch.randint(0, engine.vocab_size - 4, (num_rows, prompt_len), generator=generator).tolist()
    requests = (Request(prompt, row_id=i) for i, prompt in enumerate(prompts))
    stats, tokens, counted, start = DecodeStats(), 0, 0, 0.0
    with timed_steps(engine.device) as events, forced_folding(*forced):
        for number, completion in enumerate(engine.stream(requests, config, batch_size), 1):
            if number > batch_size:
                stats.add(completion.stats)
                tokens += len(completion.token_ids)
                counted += 1
            elif number == batch_size:
                start = time.perf_counter()
                events.clear()
        seconds = time.perf_counter() - start
    forwards = stats.num_forwards / counted
    step_ms, idle_us = mean_step(events)
    per_forward = tokens / stats.num_forwards
    return Throughput(
        mode=name or config.mode,
        batch_size=batch_size,
        drafts=config.num_drafts,
        fold_rate=stats.fold_rate,
        time_fold_rate=stats.time_fold_rate,
        rows_per_token=stats.recomputed_qkv_rows / engine.info.spec.num_layers / tokens,
        rows=counted,
        tokens_per_s=tokens / seconds,
        tokens_per_forward=per_forward,
        forwards_per_row=forwards,
        ms_per_forward=1e3 * seconds * batch_size / stats.num_forwards,
        step_ms=step_ms,
        efficiency=tokens / seconds / (batch_size * per_forward / (1e-3 * step_ms)) if step_ms else None,
        idle_us=idle_us,
    )


@contextmanager
def timed_steps(device: torch.device) -> Iterator[StepEvents]:
    """Start and end of every step of the fused backend; none without a GPU."""
    events: StepEvents = []
    run = FusedStep.run

    def timed(step: FusedStep, sampled: bool, limited: bool) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run(step, sampled, limited)
        end.record()
        events.append((start, end))

    if device.type == "cuda":
        setattr(FusedStep, "run", timed)  # noqa: B010
    try:
        yield events
    finally:
        setattr(FusedStep, "run", run)  # noqa: B010


def mean_step(events: StepEvents) -> tuple[float | None, float | None]:
    """Mean milliseconds of a step, and median microseconds between two that follow one another."""
    if len(events) < 2:
        return None, None
    torch.cuda.synchronize()
    steps = [start.elapsed_time(end) for start, end in events]
    gaps = [1e3 * a[1].elapsed_time(b[0]) for a, b in pairwise(events)]
    return statistics.fmean(steps), statistics.median(gaps)
