"""Short runs that measure what drafts cost and bring on an engine, with all slots full; their results are thrown away.

What a job's throughput depends on is measured apart: a forward's time where every slot is taken and no prompt is being
read, and the forwards that whole rows take. Either is steadier than tokens a second of so short a run.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from specfold.arithmetic import fixed_arithmetic
from specfold.config import AUTO, AUTO_DRAFTS, ConfigError, DecodeConfig
from specfold.decoder import Decoder
from specfold.draft_search import SECONDS, Choice, Trial, best_trial, search
from specfold.drafts import load_graph
from specfold.request import ERROR, Request
from specfold.stats import DecodeStats

if TYPE_CHECKING:
    from specfold.engine import Engine

_LEAST_ROWS = 16
"""Rows of one trial where fewer decode together."""
_MOST_TOKENS, _LEAST_TOKENS, _PROBE_TOKENS = 64, 16, 8
"""Of each row: two blocks at most, less where steps are slow; few to see how slow they are."""
_SHARE = 0.1
"""Of the time, for one trial without drafts."""
_SETTLE = 2
"""Turns after a change until a step's time is its own: a device works one step ahead of the host."""
_CUT = 0.1
"""Share of the fastest and of the slowest steps that are left out: what else runs on a machine hits a few."""


def choose_drafts(
    engine: Engine,
    requests: Sequence[Request],
    config: DecodeConfig,
    batch_size: int,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Choice:
    """The number of drafts with which ``config`` brings most tokens a second in ``batch_size`` slots.

    ``requests``: the first rows of what is to be decoded; they are taken again where they do not fill the slots.
    ``config`` has ``drafts="auto"``; with a ``draft_graph`` no more drafts are tried than it has nodes. About
    ``seconds`` long at most, unless a single trial takes longer; compiling on a GPU, which is once for a machine, comes
    on top. Raises ConfigError where no row can be decoded, or
    where memory does not even hold a step without drafts.
    """
    if config.drafts != AUTO:
        raise ConfigError(f"drafts must be {AUTO} to be chosen, not {config.drafts}.")
    start = clock()
    engine.check_config(config)
    rows, problem = _decodable(engine, requests, config)
    if not rows:
        raise ConfigError(f"drafts {AUTO} finds no row that can be decoded to choose by: {problem}")
    most = min(AUTO_DRAFTS, len(load_graph(config.draft_graph)) if config.draft_graph else AUTO_DRAFTS)
    bench = _Bench(engine, rows, config, batch_size, seconds, clock)
    bench.probe()
    trials, left_out = search(bench.measure, most, seconds - (bench.measuring_clock() - start), bench.measuring_clock)
    return Choice(
        drafts=best_trial(trials).drafts,
        batch_size=batch_size,
        device=_device_name(engine),
        seconds=clock() - start,
        trials=tuple(trials),
        left_out=left_out,
    )


@dataclass(slots=True)
class _Wave:
    """What rows that started together showed."""

    stats: DecodeStats = field(default_factory=DecodeStats)
    decoded: int = 0
    problem: str | None = None
    steps: list[float] = field(default_factory=list)
    """Seconds of each step with every slot taken."""
    others: list[float] = field(default_factory=list)
    """Seconds of all further turns, for rows so short that there is no such step."""
    most_rows: int = 0


class _Bench:
    """Measures trials of one engine at one batch size. Round n of every number of drafts has the same rows."""

    def __init__(
        self,
        engine: Engine,
        rows: Sequence[Request],
        config: DecodeConfig,
        batch_size: int,
        seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._rows, self._config, self._batch_size = engine, rows, config, batch_size
        self._seconds, self._clock = seconds, clock
        self._num_tokens = _PROBE_TOKENS
        self._num_rows = max(batch_size, _LEAST_ROWS)
        self._compiled: set[int] = set()
        self._compiling_s = 0.0

    def measuring_clock(self) -> float:
        """Stands still while kernels compile."""
        return self._clock() - self._compiling_s

    def probe(self) -> None:
        """See how slow steps are, and make trials as long as time allows. Compiles and allocates on the way."""
        wave = self._decode(0, self._sample(0)[: self._batch_size])
        if wave is None:
            raise ConfigError(
                f"the device's memory does not hold {self._batch_size} rows even without drafts: lower the batch size."
            )
        if not wave.decoded:
            raise ConfigError(f"no row could be decoded to choose the drafts by: {wave.problem}")
        step = statistics.median(wave.steps or wave.others)  # the first one compiles
        affordable = int(_SHARE * self._seconds / step)
        per_wave = min(max(affordable, _LEAST_TOKENS), _MOST_TOKENS)
        self._num_tokens = per_wave
        waves = max(affordable // per_wave, 1)
        self._num_rows = min(self._num_rows, waves * self._batch_size)

    def measure(self, drafts: int, number: int) -> Trial | None:
        """One trial; None where memory runs out."""
        wave = self._decode(drafts, self._sample(number))
        if wave is None or not wave.decoded:
            return None
        return Trial(
            drafts=drafts,
            tokens_per_forward=wave.stats.output_tokens / max(wave.stats.num_forwards, 1),
            seconds_per_forward=_typical(wave.steps or wave.others),
            rows_at_once=wave.most_rows,
            rows=wave.decoded,
            fold_rate=wave.stats.fold_rate,
        )

    def _sample(self, number: int) -> list[Request]:
        """The rows of a round, cut to a trial's length; samples of their own where rows are taken again."""
        first = number * self._num_rows
        chosen = []
        for place in range(first, first + self._num_rows):
            again, index = divmod(place, len(self._rows))
            row = self._rows[index]
            longest = min(row.max_new_tokens or self._config.max_new_tokens, self._num_tokens)
            chosen.append(replace(row, sample_id=row.sample_id + again, max_new_tokens=longest))
        return chosen

    def _decode(self, drafts: int, requests: Sequence[Request]) -> _Wave | None:
        """Waves of rows that start together; None where memory runs out."""
        config = replace(self._config, drafts=drafts)
        self._compile(config, drafts)
        wave = _Wave()
        try:
            decoder = Decoder(self._engine, config, self._batch_size)
            with fixed_arithmetic(config.deterministic, self._engine.device):
                for start in range(0, len(requests), self._batch_size):
                    self._run_wave(decoder, requests[start : start + self._batch_size], wave)
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            return None
        finally:
            # The next one divides the device's memory anew.
            decoder = None  # type: ignore[assignment]
            gc.collect()
        return wave

    def _compile(self, config: DecodeConfig, drafts: int) -> None:
        if drafts not in self._compiled:
            start = self._clock()
            self._engine.warm_up(config, self._batch_size)
            self._compiling_s += self._clock() - start
            self._compiled.add(drafts)

    def _run_wave(self, decoder: Decoder, requests: Sequence[Request], wave: _Wave) -> None:
        waiting, quiet, rows_before = deque(requests), 0, 0
        last = self._clock()
        while waiting or not decoder.idle:
            changed = False
            while waiting and decoder.has_room:
                decoder.admit(waiting.popleft())
                changed = True
            changed |= any(row is not None and not row.opened for row in decoder.rows)
            finished = decoder.advance()
            self._engine.num_steps += 1
            now = self._clock()
            rows = sum(row is not None for row in decoder.rows)
            wave.most_rows = max(wave.most_rows, rows)
            quiet = 0 if changed or rows != rows_before else quiet + 1
            full = quiet > _SETTLE and rows == wave.most_rows
            (wave.steps if full else wave.others).append(now - last)
            last, rows_before = now, rows
            for _, completion in finished:
                if completion.finish_reason == ERROR:
                    wave.problem = completion.error
                else:
                    wave.stats.add(completion.stats)
                    wave.decoded += 1


def _decodable(engine: Engine, requests: Sequence[Request], config: DecodeConfig) -> tuple[list[Request], str | None]:
    """The rows that can be decoded, and what is wrong with the first that cannot."""
    rows, problem = [], "there is none."
    for request in requests:
        longest = config.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
        bad = engine.check_prompt(request.prompt_ids, longest)
        if bad is None:
            rows.append(request)
        else:
            problem = bad[1]
    return rows, problem


def _typical(times: Sequence[float]) -> float:
    """The mean without the fastest and slowest tenth. Not the median: what a step costs follows how much of a block is
    masked, and all of that counts."""
    ordered = sorted(times)
    cut = int(_CUT * len(ordered))
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def _is_out_of_memory(error: Exception) -> bool:
    """The device's or the host's memory ran out, or the plan of it says that not one row fits."""
    return isinstance(error, MemoryError) or type(error).__name__ in ("OutOfMemoryError", "ConfigError")


def _device_name(engine: Engine) -> str:
    import torch

    return torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "cpu"
