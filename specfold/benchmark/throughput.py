"""Whole rows from prompt to last token, so that everything between two steps is in the time."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from specfold.config import DecodeConfig
from specfold.engine import Engine
from specfold.request import Request
from specfold.stats import DecodeStats


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rows that follow one another through ``batch_size`` slots, the first of them left out (they start the engine)."""

    mode: str
    batch_size: int
    drafts: int
    rows: int
    tokens_per_s: float
    tokens_per_forward: float
    forwards_per_row: float
    ms_per_forward: float
    """Wall time over the forwards that one slot took part in, prefill included."""

    def to_dict(self) -> dict[str, Any]:
        return {name: round(v, 4) if isinstance(v, float) else v for name, v in asdict(self).items()}


def measure_throughput(
    engine: Engine, config: DecodeConfig, batch_size: int, rounds: int, prompt_len: int
) -> Throughput:
    """Decodes ``rounds`` batches of random prompts of one length, and one more before the clock starts."""
    generator = torch.Generator().manual_seed(3)
    num_rows = batch_size * (rounds + 1)
    prompts = torch.randint(0, engine.vocab_size - 4, (num_rows, prompt_len), generator=generator).tolist()
    requests = (Request(prompt, row_id=i) for i, prompt in enumerate(prompts))
    stats, tokens, counted, start = DecodeStats(), 0, 0, 0.0
    for number, completion in enumerate(engine.stream(requests, config, batch_size), 1):
        if number > batch_size:
            stats.add(completion.stats)
            tokens += len(completion.token_ids)
            counted += 1
        elif number == batch_size:
            start = time.perf_counter()
    seconds = time.perf_counter() - start
    forwards = stats.num_forwards / counted
    return Throughput(
        mode=config.mode,
        batch_size=batch_size,
        drafts=config.num_drafts,
        rows=counted,
        tokens_per_s=tokens / seconds,
        tokens_per_forward=tokens / stats.num_forwards,
        forwards_per_row=forwards,
        ms_per_forward=1e3 * seconds * batch_size / stats.num_forwards,
    )
