"""Whole decoding runs, mode against mode on the same prompts."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specfold.config import ConfigError, DecodeConfig
from specfold.engine import Engine
from specfold.request import ERROR, Completion, Request
from specfold.stats import DecodeStats

WARM_UP = -1
"""Row id of the row before the clock starts."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as token ids, and the number that its answer ends with, if known."""

    prompt_ids: list[int]
    answer: str | None


@dataclass(frozen=True, slots=True)
class Measurement:
    """One configuration's counters and median time over repeats."""

    name: str
    seconds: float
    stats: DecodeStats
    agreement: float
    """Share of rows whose tokens equal the first configuration's."""
    accuracy: float | None
    """Share of rows whose last number is the expected answer; None where no answers are known."""

    def to_dict(self) -> dict[str, Any]:
        stats, tokens = self.stats, self.stats.output_tokens
        return {
            "name": self.name,
            "seconds": round(self.seconds, 3),
            "ms_per_token": round(1e3 * self.seconds / tokens, 4) if tokens else None,
            "tokens_per_second": round(tokens / self.seconds, 2),
            "output_tokens": tokens,
            "forwards": stats.num_forwards,
            "tokens_per_forward": stats.tokens_per_forward,
            "recomputed_qkv_rows_per_token": round(stats.recomputed_qkv_rows / tokens, 2) if tokens else None,
            "recomputed_ffn_rows_per_token": round(stats.recomputed_ffn_rows / tokens, 2) if tokens else None,
            "acceptance_by_depth": [round(a, 4) for a in stats.acceptance_by_depth],
            "fold_rate": stats.fold_rate,
            "time_fold_rate": stats.time_fold_rate,
            "agreement": self.agreement,
            "accuracy": self.accuracy,
        }


def compare(
    engine: Engine,
    questions: Sequence[Question],
    configs: dict[str, DecodeConfig],
    batch_size: int,
    repeats: int,
) -> list[Measurement]:
    """Decodes the questions under every configuration in turn, ``repeats`` times, so that drifts hit all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    tokens: dict[str, list[list[int]]] = {}
    accuracy: dict[str, float | None] = {}
    stats: dict[str, DecodeStats] = {}
    for _ in range(repeats):
        for name, config in configs.items():
            elapsed, completions = _decode(engine, questions, config, batch_size)
            seconds[name].append(elapsed)
            tokens[name] = [c.token_ids for c in completions]
            accuracy[name] = _accuracy(questions, [c.text for c in completions])
            stats[name] = DecodeStats()
            for completion in completions:
                stats[name].add(completion.stats)
    reference = tokens[next(iter(configs))]

    def agreement(name: str) -> float:
        return sum(a == b for a, b in zip(tokens[name], reference, strict=True)) / max(len(reference), 1)

    return [Measurement(n, statistics.median(seconds[n]), stats[n], agreement(n), accuracy[n]) for n in configs]


def _decode(
    engine: Engine, questions: Sequence[Question], config: DecodeConfig, batch_size: int
) -> tuple[float, list[Completion]]:
    """Seconds and completions in the order of the questions.

    A short row goes first and the clock starts when it is done: a job captures its graphs once, not once a few rows.
    Raises ConfigError for a row that fails: failures would agree with one another.
    """
    start: list[float] = []

    def requests() -> Iterator[Request | None]:
        yield Request(questions[0].prompt_ids, row_id=WARM_UP, max_new_tokens=1)
        while not start:
            yield None
        for i, question in enumerate(questions):
            yield Request(question.prompt_ids, row_id=i)

    completions = []
    for completion in engine.stream(requests(), config, batch_size):
        if completion.finish_reason == ERROR:
            number = 1 if completion.row_id == WARM_UP else completion.row_id + 1
            raise ConfigError(f"prompt {number} cannot be decoded, so nothing is measured: {completion.error}")
        if completion.row_id == WARM_UP:
            start.append(time.perf_counter())
        else:
            completions.append(completion)
    return time.perf_counter() - start[0], sorted(completions, key=lambda c: c.row_id)


def _accuracy(questions: Sequence[Question], texts: Sequence[str]) -> float | None:
    known = [(question.answer, text) for question, text in zip(questions, texts, strict=True) if question.answer]
    right = [answer == (re.findall(r"-?\d+", text) or [None])[-1] for answer, text in known]
    return sum(right) / len(right) if right else None


def read_questions(engine: Engine, path: Path, count: int) -> list[Question]:
    """The first prompts of a JSONL file, as one user turn each, with their ``answer`` if they have one."""
    if engine.tokenizer is None:
        raise ConfigError("The bench needs a model with a tokenizer.")
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()[:count]]
        turns = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path} cannot be read as JSONL with a prompt in every line: {e!r}.") from None
    if not turns:
        raise ConfigError(f"{path} holds no prompts.")
    render = engine.tokenizer.apply_chat_template
    texts = [render(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    ids = [engine.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    answers = [None if row.get("answer") is None else str(row["answer"]) for row in rows]
    return [Question(prompt, answer) for prompt, answer in zip(ids, answers, strict=True)]
