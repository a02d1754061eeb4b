"""The engine's public face: load a checkpoint, decode prompts."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from specfold.arithmetic import fixed_arithmetic
from specfold.autotune import choose_drafts
from specfold.backends.select import check_backend, plan_backend
from specfold.checkpoint import ModelInfo, load_model, load_tokenizer, local_model_folder, read_model_info
from specfold.config import AUTO, ConfigError, DecodeConfig
from specfold.decoder import Decoder, refusal, run_setup
from specfold.draft_search import SAMPLE_ROWS, Choice
from specfold.model import Model
from specfold.request import Completion, Request
from specfold.watch import Watch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
IDLE_S = 0.002
_END = object()
Refused = tuple[Request, Completion]


class Engine:
    """One model on one device. Not thread-safe: one thread owns an engine."""

    def __init__(self, model: Model, info: ModelInfo, tokenizer: Any | None, backend: str = "torch") -> None:
        self.model = model
        self.backend = backend
        self.info = info
        self.tokenizer = tokenizer
        self.num_steps = 0
        """Steps since the start: a pulse for whoever watches an engine from another thread."""
        self.choices: dict[tuple[DecodeConfig, int], Choice] = {}
        """The drafts chosen for ``drafts="auto"``, by settings and batch size: once, as tokens may depend on them."""

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        device: str = "cpu",
        dtype: str = "float32",
        backend: str = "torch",
        mask_token_id: int | None = None,
        stop_token_ids: Sequence[int] | None = None,
        revision: str | None = None,
    ) -> Engine:
        """Loads a model folder or hub id. Raises ModelError or ConfigError, one sentence each."""
        if dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}.")
        where = usable_device(device)
        check_backend(backend, where)
        folder = local_model_folder(name, revision)
        tokenizer = load_tokenizer(folder)
        stops = None if stop_token_ids is None else tuple(stop_token_ids)
        info = read_model_info(folder, tokenizer, mask_token_id, stops)
        return cls(load_model(folder, info, where, DTYPES[dtype]), info, tokenizer, backend)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def family(self) -> str:
        return self.info.family.name

    @property
    def context_length(self) -> int:
        """Prompt and new tokens together must fit."""
        return self.info.context_length

    @property
    def vocab_size(self) -> int:
        return self.info.vocab_size

    @property
    def mask_token_id(self) -> int:
        return self.info.mask_token_id

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.info.stop_token_ids

    def check_config(self, config: DecodeConfig) -> None:
        """Raises ConfigError for a setting that this model cannot decode with."""
        self.info.check_config(config)
        if config.stop and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer, and the model folder has none.")

    def plan_memory(self, config: DecodeConfig, batch_size: int) -> str | None:
        """How a run would divide the device's memory, in one line; None where nothing is planned.

        Raises ConfigError if not even one row fits.
        """
        plan = plan_backend(self.backend, run_setup(self, config, batch_size))
        new = min(config.max_new_tokens, self.context_length - 1)
        return None if plan is None else plan.describe(min(1024, self.context_length - new), new)

    def warm_up(self, config: DecodeConfig, batch_size: int) -> None:
        """Decodes one short row and throws it away: kernels compile now, and no row waits for them. On a GPU only.

        Memory that does not suffice is left for the run itself to find.
        """
        if self.device.type != "cuda":
            return
        self.check_config(config)
        token = next(i for i in range(self.vocab_size) if i not in (self.mask_token_id, *self.stop_token_ids))
        length = min(2 * self.info.spec.block_size, self.context_length - 1)
        request = Request([token] * max(length // 2, 1), max_new_tokens=max(length // 2, 1))
        with suppress(torch.OutOfMemoryError), fixed_arithmetic(config.deterministic, self.device):
            decoder = Decoder(self, config, batch_size)
            decoder.admit(request)
            while not decoder.idle:
                decoder.advance()

    def check_prompt(self, prompt_ids: Sequence[int], max_new_tokens: int) -> tuple[str, str] | None:
        """Kind and sentence of what is wrong with a prompt, or None."""
        return self.info.check_prompt(prompt_ids, max_new_tokens)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        config: DecodeConfig | None = None,
        row_ids: Sequence[int] | None = None,
        batch_size: int = 8,
    ) -> list[Completion]:
        """Decodes prompts of token ids; results in the order of the prompts.

        With ``drafts="auto"`` short runs of the first prompts choose the drafts before the first call decodes.
        ``row_ids`` (default: the index) key the sampling noise. A bad prompt gives a completion with an error.
        """
        ids = range(len(prompts)) if row_ids is None else row_ids
        if len(ids) != len(prompts):
            raise ConfigError(f"row_ids has {len(ids)} entries for {len(prompts)} prompts.")
        # The row id keys the noise and may repeat; the place in the list does not.
        requests = [Request(prompt, row_id=row_id) for prompt, row_id in zip(prompts, ids, strict=True)]
        place = {id(request): i for i, request in enumerate(requests)}
        results: list[Completion | None] = [None] * len(requests)
        for request, completion in self._run(iter(requests), config or DecodeConfig(), batch_size):
            results[place[id(request)]] = completion
        return [completion for completion in results if completion is not None]

    def stream(
        self,
        requests: Iterable[Request | None],
        config: DecodeConfig | None = None,
        batch_size: int = 8,
        watch: Watch | None = None,
    ) -> Iterator[Completion]:
        """Yields rows as they finish; pulls the next request when one of ``batch_size`` slots is free.

        (The triton backend pulls up to seven more, whose prompts it caches together.) A None from the iterator means
        that no request is there at the moment: the engine goes on with the rows it has and asks again. With no row
        active the iterator may block. ``watch`` looks on (torch backend only).
        """
        for _, completion in self._run(iter(requests), config or DecodeConfig(), batch_size, watch):
            yield completion

    def _run(
        self,
        requests: Iterator[Request | None],
        config: DecodeConfig,
        batch_size: int,
        watch: Watch | None = None,
    ) -> Iterator[tuple[Request, Completion]]:
        if type(batch_size) is not int or batch_size < 1:
            raise ConfigError(f"batch_size must be a whole number from 1 on, not {batch_size!r}.")
        self.check_config(config)
        if config.drafts == AUTO:
            config, requests = yield from self._choose(requests, config, batch_size)
        decoder = Decoder(self, config, batch_size, watch)
        exhausted = False
        while True:
            while decoder.has_room and not exhausted:
                request = next(requests, _END)
                if request is _END:
                    exhausted = True
                elif request is None:
                    if decoder.idle:
                        time.sleep(IDLE_S)
                    break
                elif not isinstance(request, Request):
                    raise ConfigError(f"stream takes specfold.Request items or None, not {type(request).__name__}.")
                else:
                    refused = decoder.admit(request)
                    if refused is not None:
                        yield request, refused
            if not decoder.idle:
                with fixed_arithmetic(config.deterministic, self.device):
                    finished = decoder.advance()
                self.num_steps += 1
                yield from finished
            elif exhausted:
                return

    def _choose(
        self, requests: Iterator[Request | None], config: DecodeConfig, batch_size: int
    ) -> Generator[Refused, None, tuple[DecodeConfig, Iterator[Request | None]]]:
        """The settings with their drafts chosen, now or by an earlier run, and the requests that are still to decode.

        Yields requests that cannot be decoded: nothing is to be learnt from them.
        """
        key = config, batch_size
        if key not in self.choices:
            first, requests = yield from self._look_ahead(requests, config)
            if not first:
                return replace(config, drafts=0), requests
            self.choices[key] = choose_drafts(self, first, config, batch_size)
        return replace(config, drafts=self.choices[key].drafts), requests

    def _look_ahead(
        self, requests: Iterator[Request | None], config: DecodeConfig
    ) -> Generator[Refused, None, tuple[list[Request], Iterator[Request | None]]]:
        """The first requests that are there and can be decoded, at least one if there ever is one, and an iterator
        that begins with them."""
        first: list[Request] = []
        taken: list[Request | None] = []
        for request in requests:
            if request is None and not first:
                time.sleep(IDLE_S)
                continue
            if isinstance(request, Request) and (refused := refusal(self, config, request)):
                yield request, refused
                continue
            taken.append(request)
            if not isinstance(request, Request):
                break
            first.append(request)
            if len(first) == SAMPLE_ROWS:
                break
        return first, chain(taken, requests)


def usable_device(name: str) -> torch.device:
    """The device of this name. Raises ConfigError if torch does not know it or sees none."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is not a device torch knows.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but torch sees no CUDA device.")
    return device
