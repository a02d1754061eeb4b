"""What ``drafts="auto"`` chooses, beside every fixed number of drafts on the same prompts in the same minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specfold.autotune import choose_drafts
from specfold.benchmark.decoding import Measurement, Question, compare
from specfold.config import AUTO, DecodeConfig
from specfold.draft_search import SAMPLE_ROWS
from specfold.engine import Engine
from specfold.request import Request

_VANILLA, _ROUNDS = "0", 2
"""Without drafts; and how often every slot gets a row at the least, so that the last rows' end is not all of a run."""


def measure_choice(
    engine: Engine,
    questions: Sequence[Question],
    config: DecodeConfig,
    batch_size: int,
    counts: Sequence[int],
    repeats: int,
    seconds: float,
) -> list[dict[str, Any]]:
    """One record for each of ``counts`` drafts, 0 among them, and a last one for what was chosen, in a run of its own.

    The choice sees the first questions only, as a job's does, and takes about ``seconds``. Questions are taken again
    where they do not fill the slots twice.
    """
    first = [Request(question.prompt_ids, row_id=i) for i, question in enumerate(questions[:SAMPLE_ROWS])]
    choice = choose_drafts(engine, first, replace(config, drafts=AUTO), batch_size, seconds)
    configs = {str(n): replace(config, drafts=n) for n in sorted({0, *counts})}
    configs[AUTO] = replace(config, drafts=choice.drafts)
    times = -(-_ROUNDS * batch_size // len(questions))
    measured = {m.name: m for m in compare(engine, [*questions] * max(times, 1), configs, batch_size, repeats)}
    best = max(_speed(m) for name, m in measured.items() if name != AUTO)
    vanilla = _speed(measured[_VANILLA])
    records = [
        {"batch_size": batch_size, "name": name, "drafts": configs[name].num_drafts}
        | {"tokens_per_second": round(_speed(m), 2)}
        | {"over_best": round(_speed(m) / best, 4), "over_vanilla": round(_speed(m) / vanilla, 4)}
        | {"tokens_per_forward": m.stats.tokens_per_forward, "fold_rate": m.stats.fold_rate}
        | {"agreement": m.agreement, "accuracy": m.accuracy}
        for name, m in measured.items()
    ]
    records[-1]["choice"] = choice.to_dict()
    return records


def _speed(measured: Measurement) -> float:
    return measured.stats.output_tokens / measured.seconds
