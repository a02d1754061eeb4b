"""Whole decoding runs over a range of settings: what delta costs and brings, and what each further draft does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from specfold.benchmark.decoding import Measurement, Question, compare
from specfold.benchmark.residuals import ResidualWatch
from specfold.config import DecodeConfig, FfnGate, Mode
from specfold.engine import Engine
from specfold.request import Request

GATES: tuple[FfnGate, ...] = ("own", "entry")


def residuals(engine: Engine, questions: Sequence[Question], config: DecodeConfig, batch_size: int) -> ResidualWatch:
    """The residuals of all drafts over the questions, with nothing folded; decoded by the torch backend."""
    watch = ResidualWatch(engine.info.spec.num_layers)
    watched = Engine(engine.model, engine.info, engine.tokenizer, "torch")
    requests = (Request(question.prompt_ids, row_id=i) for i, question in enumerate(questions))
    for _ in watched.stream(requests, replace(config.plain(), mode="spiffy"), batch_size, watch):
        pass
    return watch


def sweep_delta(
    engine: Engine,
    questions: Sequence[Question],
    config: DecodeConfig,
    deltas: Sequence[float],
    batch_size: int,
    repeats: int = 1,
) -> list[dict[str, Any]]:
    """Vanilla, Spiffy, and SpecFold at every delta under both FFN gates. One record a setting, vanilla first."""
    plain = config.plain()
    configs = {"vanilla": plain, "spiffy": replace(plain, mode="spiffy")}
    keys: dict[str, dict[str, Any]] = {name: {"mode": name, "ffn_gate": None, "delta": None} for name in configs}
    for gate in GATES:
        for delta in deltas:
            name = f"specfold {gate} {delta:g}"
            configs[name] = replace(plain, mode="specfold", ffn_gate=gate, delta=delta)
            keys[name] = {"mode": "specfold", "ffn_gate": gate, "delta": delta}
    measured = compare(engine, questions, configs, batch_size, repeats)
    return [keys[m.name] | _record(m, measured[0]) for m in measured]


def sweep_time(
    engine: Engine,
    questions: Sequence[Question],
    config: DecodeConfig,
    deltas: Sequence[float],
    batch_size: int,
    repeats: int = 1,
) -> list[dict[str, Any]]:
    """Folding in time at every delta_time under both FFN gates, alone and with folded drafts. One record a setting:
    vanilla first, then what does without it, and the sub-block cache where the family has one."""
    plain = config.plain()
    modes: dict[Mode, DecodeConfig] = {"vanilla": plain, "specfold": replace(plain, mode="specfold")}
    configs: dict[str, DecodeConfig] = dict(modes.items())
    if engine.info.family.has_sub_blocks:
        configs["sub-block cache"] = replace(plain, use_block_cache=True)
    keys: dict[str, dict[str, Any]] = {name: {"mode": name, "ffn_gate": None, "delta_time": None} for name in configs}
    for mode, base in modes.items():
        for gate in GATES:
            for delta in deltas:
                name = f"{mode} {gate} {delta:g}"
                refresh = config.refresh_every
                configs[name] = replace(base, ffn_gate=gate, delta_time=delta, refresh_every=refresh)
                keys[name] = {"mode": mode, "ffn_gate": gate, "delta_time": delta}
    measured = compare(engine, questions, configs, batch_size, repeats)
    return [keys[m.name] | _record(m, measured[0]) for m in measured]


def sweep_drafts(
    engine: Engine,
    questions: Sequence[Question],
    config: DecodeConfig,
    counts: Sequence[int],
    batch_size: int,
    repeats: int = 1,
) -> list[dict[str, Any]]:
    """Spiffy and SpecFold with every number of drafts: first as graphs of that size, then as the largest graph pruned
    to a budget of that size at every step. One record a setting; vanilla is the one without drafts."""
    plain = config.plain()
    configs = {"vanilla": plain}
    keys: dict[str, dict[str, Any]] = {"vanilla": {"mode": "vanilla", "drafts": 0, "pruned_from": None}}
    most = max(counts)
    modes: tuple[Literal["spiffy", "specfold"], ...] = ("spiffy", "specfold")
    for mode in modes:
        for count in counts:
            for whole in (count, most):
                name = f"{mode} {count} of {whole}"
                budget = None if whole == count else count
                configs[name] = replace(plain, mode=mode, drafts=whole, draft_budget=budget)
                keys[name] = {"mode": mode, "drafts": count, "pruned_from": whole if whole != count else None}
    measured = compare(engine, questions, configs, batch_size, repeats)
    return [keys[m.name] | _record(m, measured[0]) for m in measured]


def _record(measured: Measurement, first: Measurement) -> dict[str, Any]:
    """What the tables and plots show of a run; ``speed`` is over the first one's, as clocks of shared machines lie."""
    stats, tokens = measured.stats, max(measured.stats.output_tokens, 1)
    return {
        "agreement": measured.agreement,
        "accuracy": measured.accuracy,
        "forwards": stats.num_forwards,
        "forwards_per_token": stats.num_forwards / tokens,
        "accepted_per_forward": stats.drafts_accepted / max(stats.num_forwards, 1),
        "proposed_per_forward": stats.drafts_proposed / max(stats.num_forwards, 1),
        "fold_rate": stats.fold_rate,
        "time_fold_rate": stats.time_fold_rate,
        "qkv_rows_per_token": stats.recomputed_qkv_rows / tokens,
        "ffn_rows_per_token": stats.recomputed_ffn_rows / tokens,
        "tokens_per_second": tokens / measured.seconds,
        "speed": first.seconds * tokens / max(first.stats.output_tokens, 1) / measured.seconds,
    }
