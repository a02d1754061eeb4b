"""Engines that need no model, with the shape that the worker expects. Made by name: ``tests.cluster.fake_engine:...``.

Output tokens are a function of the prompt and the row alone, as the real engine's are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specfold import Completion, ConfigError, DecodeConfig, DecodeStats, Request
from specfold.request import ERROR, LENGTH, STOP

MODULE = "tests.cluster.fake_engine"
DECODED, GO, HOLD = "decoded", "go", "hold"
POISON, NAN, HANG, RAISE = 9_001, 9_002, 9_003, 9_004
"""Token ids that, in a prompt, make the process die, the row fail, the engine hang or raise."""
LOOP, BLANK, FLOOD, UNMASKED = 9_005, 9_006, 9_007, 9_008
"""Token ids that, in a prompt, give a degenerate output: one that repeats, one without tokens, one of padding, one with
a mask left."""
UNFAITHFUL = 9_009
"""A prompt with it gets another third token with speculation than without."""


class FakeEngine:
    """Decodes by arithmetic, ``batch_size`` rows at a time, ``step_s`` a step, a few steps a row."""

    vocab_size, context_length, mask_token_id, stop_token_ids, family = 10_000, 4096, 9_999, (1,), "fake"
    tokenizer = None
    device = "cpu"

    def __init__(self, step_s: float = 0.0, cured: bool = False) -> None:
        self._step_s, self._cured = step_s, cured
        self.num_steps = 0

    def check_config(self, config: DecodeConfig) -> None:
        if config.mode == "ar":
            raise ConfigError("mode ar is not for the fake engine.")

    def plan_memory(self, config: DecodeConfig, batch_size: int) -> str | None:
        return None

    def check_prompt(self, prompt_ids: Sequence[int], max_new_tokens: int) -> tuple[str, str] | None:
        return None

    def stream(self, requests: Iterator[Request | None], config: DecodeConfig, batch_size: int) -> Iterator[Completion]:
        active: list[tuple[Request, int]] = []
        open_ended = True
        while open_ended or active:
            while open_ended and len(active) < batch_size:
                try:
                    request = next(requests)
                except StopIteration:
                    open_ended = False
                    break
                if request is None:
                    break
                active.append((request, 0 if self._step_s == 0 else sum(request.prompt_ids) % 3))
            self.num_steps += 1
            if self._step_s:
                time.sleep(self._step_s)
            for request, _ in active:
                _misbehave(request)
            done = [request for request, steps in active if steps == 0]
            active = [(request, steps - 1) for request, steps in active if steps > 0]
            for request in done:
                yield decode(request, config, self._cured)


def decode(request: Request, config: DecodeConfig, cured: bool = False) -> Completion:
    """The row's output; checked by tests row for row. ``cured``: a row that would fail does not."""
    if NAN in request.prompt_ids and not cured:
        return Completion(
            request.row_id, request.sample_id, [], "", ERROR, error="NaN logits.", error_kind="nan_logits"
        )
    limit = request.max_new_tokens or config.max_new_tokens
    first = sum(request.prompt_ids) * 31 + request.row_id * 7 + request.sample_id
    ids = [(first + i) % 8000 + 2 for i in range(min(limit, 5 + first % 11))]
    ids = _degenerate(request.prompt_ids, ids)
    if UNFAITHFUL in request.prompt_ids and config.mode != "vanilla":
        ids[2] += 1
    stats = DecodeStats(
        prompt_tokens=len(request.prompt_ids), output_tokens=len(ids), denoise_forwards=len(ids) // 2 + 1,
        commit_forwards=1, drafts_proposed=4, drafts_accepted=2, proposed_by_depth=[2, 2], accepted_by_depth=[2, 0],
        recomputed_qkv_rows=64, recomputed_ffn_rows=64, draft_rows=[32, 32], folded_qkv=[[20, 10]],
        folded_ffn=[[16, 8]], seconds=0.001,
    )  # fmt: skip
    reason = LENGTH if len(ids) == limit else STOP
    return Completion(request.row_id, request.sample_id, ids, f"row {first}" if ids else "", reason, stats=stats)


def _degenerate(prompt_ids: Sequence[int], ids: list[int]) -> list[int]:
    made = {LOOP: [7, 8, 9] * 30, BLANK: [], FLOOD: [*ids, *[1] * 12], UNMASKED: [*ids, FakeEngine.mask_token_id]}
    return next((output for token, output in made.items() if token in prompt_ids), ids)


def _misbehave(request: Request) -> None:
    if POISON in request.prompt_ids:
        os.kill(os.getpid(), signal.SIGKILL)
    if HANG in request.prompt_ids:
        time.sleep(3600)
    if RAISE in request.prompt_ids:
        raise RuntimeError("the fake engine was told to raise")


def instant(folder: str, **_: Any) -> FakeEngine:
    return FakeEngine()


class EchoEngine(FakeEngine):
    """Returns every prompt as its output: what is left of a job's time is the job runner's own."""

    def stream(self, requests: Iterator[Request | None], config: DecodeConfig, batch_size: int) -> Iterator[Completion]:
        for request in requests:
            if request is not None:
                yield echo(request)


_ECHO_STATS = DecodeStats(prompt_tokens=3, output_tokens=3, denoise_forwards=1)


def echo(request: Request) -> Completion:
    ids = list(request.prompt_ids)
    return Completion(request.row_id, request.sample_id, ids, f"row {ids[0]}", STOP, stats=_ECHO_STATS)


def echoing(folder: str, **_: Any) -> FakeEngine:
    return EchoEngine()


def slow(folder: str, **_: Any) -> FakeEngine:
    return FakeEngine(step_s=0.02)


def slower(folder: str, **_: Any) -> FakeEngine:
    return FakeEngine(step_s=0.2)


class HungryEngine(FakeEngine):
    """Runs out of memory with more than two rows at a time."""

    def stream(self, requests: Iterator[Request | None], config: DecodeConfig, batch_size: int) -> Iterator[Completion]:
        if batch_size <= 2:
            yield from super().stream(requests, config, batch_size)
            return
        taken = [next(requests, None) for _ in range(3)]
        raise MemoryError(f"no room for {len(taken)} rows")


def hungry(folder: str, **_: Any) -> FakeEngine:
    return HungryEngine(step_s=0.02)


class DyingEngine(FakeEngine):
    """Ends its process with the first row in it, as on a broken GPU."""

    def stream(self, requests: Iterator[Request | None], config: DecodeConfig, batch_size: int) -> Iterator[Completion]:
        next(requests)
        os.kill(os.getpid(), signal.SIGKILL)
        yield from ()


def broken_gpu_1(folder: str, **_: Any) -> FakeEngine:
    """A broken GPU under the second worker: whoever is placed there never finishes a row."""
    import ray

    name = ray.get_runtime_context().get_actor_name() or ""
    return DyingEngine() if name.startswith("worker-1") else GatedEngine(folder)


def broken_gpus(folder: str, **_: Any) -> FakeEngine:
    return DyingEngine()


class CountingEngine(FakeEngine):
    """Leaves a file for each process beside the model's folder, a byte for each row that it decoded."""

    def __init__(self, folder: str, step_s: float) -> None:
        super().__init__(step_s)
        place = Path(folder).parent / DECODED
        place.mkdir(exist_ok=True)
        self._file = open(place / str(os.getpid()), "ab", buffering=0)  # noqa: SIM115 (open as long as the process)

    def stream(self, requests: Iterator[Request | None], config: DecodeConfig, batch_size: int) -> Iterator[Completion]:
        for completion in super().stream(requests, config, batch_size):
            self._file.write(b".")
            yield completion


class GatedEngine(CountingEngine):
    """After 40 rows it waits until there is a file ``go`` beside the model's folder."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, 0.02)
        self._go = Path(folder).parent / GO

    def stream(self, requests: Iterator[Request | None], config: DecodeConfig, batch_size: int) -> Iterator[Completion]:
        for count, completion in enumerate(super().stream(requests, config, batch_size)):
            while count >= 40 and not self._go.exists():
                time.sleep(0.05)
            yield completion


class HeldEngine(CountingEngine):
    """Stands still before a row as long as there is a file of its number in ``hold`` beside the model's folder, and
    leaves its process id in it."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, 0.02)
        self._hold = Path(folder).parent / HOLD

    def stream(self, requests: Iterator[Request | None], config: DecodeConfig, batch_size: int) -> Iterator[Completion]:
        yield from super().stream(map(self._when_let_go, requests), config, batch_size)

    def _when_let_go(self, request: Request | None) -> Request | None:
        if request is not None:
            file = self._hold / str(request.row_id)
            while file.exists():
                with contextlib.suppress(FileNotFoundError), file.open("r+") as told:
                    told.write(f"{os.getpid():>10}")  # as wide as the one before: never read in between
                time.sleep(0.02)
        return request


def held(folder: str, **_: Any) -> FakeEngine:
    return HeldEngine(folder)


def gated(folder: str, **_: Any) -> FakeEngine:
    return GatedEngine(folder)


def counting_slowly(folder: str, **_: Any) -> FakeEngine:
    return CountingEngine(folder, 0.1)


def cured(folder: str, **_: Any) -> FakeEngine:
    return FakeEngine(cured=True)


def broken(folder: str, **_: Any) -> FakeEngine:
    raise RuntimeError("this engine never comes up")
