"""One decoding run: rows enter free slots, advance together, and leave as completions.

The host side of the engine: it gives out slots and pages, runs prefill chunks between steps and collects finished rows.
What is computed, and where, is the backend's business. Where that caches several prompts at the cost of one, as many
rows wait ahead of the slots, so that when a prompt is due others can go with it.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from kernels.fused.control import NEVER
from specfold.backends.base import Backend, PendingStats, RowReport, RowStart, RunSetup
from specfold.backends.select import make_backend
from specfold.config import AUTO, ConfigError, DecodeConfig
from specfold.drafts import graph_for
from specfold.pages import PAGE_SIZE, pages_for
from specfold.prefill import Prefill, prefill_length
from specfold.request import ERROR, LENGTH, STOP, Completion, Request
from specfold.text import cut_at_stop, decode_text
from specfold.watch import Watch

if TYPE_CHECKING:
    from specfold.engine import Engine

Finished = tuple[Request, Completion]


@dataclass(slots=True)
class Row:
    """A row in a slot, or ahead of one."""

    request: Request
    prefill: Prefill
    pages: list[int]
    stop: tuple[str, ...]
    began_s: float = 0.0
    """When it got its slot."""
    opened: bool = False
    tokens: list[int] = field(default_factory=list)
    """Output of the finished blocks."""


@dataclass(slots=True)
class _Leaving:
    """A row whose slot is free and whose counters are still on their way."""

    row: Row
    completion: Completion
    stats: PendingStats
    prefill_tokens: int


class Decoder:
    """Decodes rows under one configuration in ``batch_size`` slots."""

    def __init__(self, engine: Engine, config: DecodeConfig, batch_size: int, watch: Watch | None = None) -> None:
        self.engine = engine
        self.config = config
        setup = run_setup(engine, config, batch_size, watch)
        self.rules = setup.rules
        self.backend: Backend = make_backend(engine.backend, setup)
        self.rows: list[Row | None] = [None] * batch_size
        self._ahead: deque[Row] = deque()
        """Rows that have their pages and no slot yet."""
        self._waiting: Request | None = None
        """A request that found no pages."""
        self._leaving: list[_Leaving] = []

    @property
    def idle(self) -> bool:
        return not (any(self.rows) or self._ahead or self._leaving or self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether it takes another request."""
        return self._waiting is None and self._num_rows < len(self.rows) + self.backend.num_prompts - 1

    @property
    def _num_rows(self) -> int:
        return len(self.rows) - self.rows.count(None) + len(self._ahead)

    def admit(self, request: Request) -> Completion | None:
        """Puts a request into a free slot, or ahead of the slots; a bad one comes back as an error completion.

        While pages are short the request waits for rows to leave, and there is no room for others.
        """
        bad = refusal(self.engine, self.config, request)
        if bad is not None:
            return bad
        if self._place(request):
            return None
        if self._num_rows:
            self._waiting = request
            return None
        return _too_large(request)

    def advance(self) -> list[Finished]:
        """One chunk of every waiting prompt, then one step of all decoding rows; returns the rows that ended."""
        return self.prepare() + self.decode()

    def prepare(self) -> list[Finished]:
        """Caches the next chunk of every prompt in a slot and opens the first block of those that are ready."""
        too_large = self._place_waiting()
        self._fill_slots()
        self.backend.prefill(self._due_prompts())
        for slot, row in enumerate(self.rows):
            if row is not None and not row.opened and row.prefill.finished:
                row.opened = True
                report = self.backend.open(slot, self._start(row))
                if report is not None:
                    self._apply(report)
        return too_large + self._collect()

    def decode(self) -> list[Finished]:
        """One step of all rows that stand in a block."""
        for report in self.backend.step():
            self._apply(report)
        return self._collect()

    def _max_new_tokens(self, request: Request) -> int:
        return _either(request.max_new_tokens, self.config.max_new_tokens)

    def _place(self, request: Request) -> bool:
        """Gives a request all the pages it will need and, in its turn, a slot; False while pages are short."""
        prompt, pool = tuple(request.prompt_ids), self.backend.pool
        rows = chain((row for row in self.rows if row is not None), self._ahead)
        prefill = next((row.prefill for row in rows if row.prefill.prompt_ids == prompt), None)
        length = prefill_length(len(prompt), self.rules)
        shared = length // PAGE_SIZE
        own = pages_for(len(prompt) + self._max_new_tokens(request) + self.rules.block_size) - shared
        if not pool.has_room(own + (pages_for(length) if prefill is None else 0)):
            return False
        if prefill is None:
            prefill = Prefill(prompt, length, pool.allocate(pages_for(length)))
        prefill.owners += 1
        pages = pool.share(prefill.pages[:shared]) + pool.allocate(own)
        stop = self.config.stop if request.stop is None else tuple(request.stop)
        self._ahead.append(Row(request, prefill, pages, stop))
        self._fill_slots()
        return True

    def _place_waiting(self) -> list[Finished]:
        """Places the request that waits for pages; it ends if all pages are free and still too few."""
        request = self._waiting
        if request is None:
            return []
        placed = self._place(request)
        if not placed and self._num_rows:
            return []
        self._waiting = None
        return [] if placed else [(request, _too_large(request))]

    def _fill_slots(self) -> None:
        """Free slots to the rows ahead, in their order."""
        while self._ahead and None in self.rows:
            row = self._ahead.popleft()
            row.began_s = time.perf_counter()
            self.rows[self.rows.index(None)] = row

    def _due_prompts(self) -> list[Prefill]:
        """Unfinished prompts of the slots, and of the rows ahead as many as a forward takes beside them."""
        due = {id(row.prefill): row.prefill for row in self.rows if row is not None and not row.prefill.finished}
        room = -len(due) % self.backend.num_prompts
        for row in self._ahead:
            if room and not row.prefill.finished and id(row.prefill) not in due:
                due[id(row.prefill)] = row.prefill
                room -= 1
        return list(due.values())

    def _start(self, row: Row) -> RowStart:
        """What the backend needs to open a prefilled row; copies the page that the prompt shares with its output."""
        config, request, prefill = self.config, row.request, row.prefill
        if prefill.length % PAGE_SIZE:
            last = prefill.length // PAGE_SIZE
            self.backend.pool.copy(prefill.pages[last], row.pages[last])
        prompt_len, budget = len(prefill.prompt_ids), config.max_thinking_tokens
        return RowStart(
            prefill=prefill,
            pages=row.pages,
            limit=prompt_len + self._max_new_tokens(request),
            think=NEVER if budget is None else prompt_len + budget,
            noise_key=noise_key(_either(request.seed, config.seed), request.row_id),
            sample_id=request.sample_id,
            temperature=_either(request.temperature, config.temperature),
            top_p=_either(request.top_p, config.top_p),
            top_k=_either(request.top_k, config.top_k),
        )

    def _apply(self, report: RowReport) -> None:
        """Takes in what a step brought to a row; a row that ended leaves."""
        row = self.rows[report.slot]
        assert row is not None
        row.tokens += report.committed
        if report.invalid:
            message = "The model returned NaN or infinite logits."
            self._leave(report.slot, [], "", ERROR, message, "nan_logits")
        elif report.done or (report.committed and row.stop and self._stop_string_in(row)):
            tokens, text, cut = cut_at_stop(self.engine.tokenizer, row.tokens + report.tail, row.stop)
            self._leave(report.slot, tokens, text, STOP if cut or report.stopped else LENGTH)

    def _leave(
        self, slot: int, tokens: list[int], text: str, reason: str, error: str | None = None, kind: str | None = None
    ) -> None:
        """Frees a slot and its pages."""
        row = self.rows[slot]
        assert row is not None
        self.rows[slot] = None
        stats = self.backend.close(slot)
        self.backend.pool.release(row.pages)
        row.prefill.owners -= 1
        # A shared prefill counts once, with the last row that held it.
        prefill_tokens = 0 if row.prefill.owners else row.prefill.length
        if not row.prefill.owners:
            self.backend.pool.release(row.prefill.pages)
        request = row.request
        completion = Completion(request.row_id, request.sample_id, tokens, text, reason, error, kind)
        self._leaving.append(_Leaving(row, completion, stats, prefill_tokens))

    def _collect(self) -> list[Finished]:
        """Rows that left and whose counters have arrived; all of them when there is nothing else to wait for."""
        wait = not any(self.rows)
        ready = [leaving for leaving in self._leaving if wait or leaving.stats.ready()]
        self._leaving = [leaving for leaving in self._leaving if leaving not in ready]
        return [_finished(leaving) for leaving in ready]

    def _stop_string_in(self, row: Row) -> bool:
        text = decode_text(self.engine.tokenizer, row.tokens)
        return any(stop in text for stop in row.stop)


def refusal(engine: Engine, config: DecodeConfig, request: Request) -> Completion | None:
    """The error completion of a request that cannot be decoded, or None."""
    option = request.problem(config)
    if option is not None:
        bad: tuple[str, str] | None = ("unsupported_option", option)
    else:
        bad = engine.check_prompt(request.prompt_ids, _either(request.max_new_tokens, config.max_new_tokens))
    if bad is None:
        return None
    kind, message = bad
    return Completion(request.row_id, request.sample_id, [], "", ERROR, message, kind)


def _too_large(request: Request) -> Completion:
    """The error completion of a request for which there are too few pages even alone."""
    message = "The row's keys and values do not fit into the device's memory, even alone."
    return Completion(request.row_id, request.sample_id, [], "", ERROR, message, "no_memory")


def run_setup(engine: Engine, config: DecodeConfig, batch_size: int, watch: Watch | None = None) -> RunSetup:
    """What a backend needs to know of a run. Raises ConfigError if the drafts are still to be chosen."""
    if config.drafts == AUTO:
        raise ConfigError(f"drafts {AUTO} must be chosen before anything is decoded.")
    return RunSetup(
        model=engine.model,
        family=engine.info.family,
        rules=engine.info.family.rules(engine.info.spec, config),
        graph=graph_for(config),
        config=config,
        batch_size=batch_size,
        mask_id=engine.mask_token_id,
        stop_ids=engine.stop_token_ids,
        vocab_size=engine.vocab_size,
        context_length=engine.context_length,
        watch=watch,
    )


def _finished(leaving: _Leaving) -> Finished:
    row, stats = leaving.row, leaving.stats.read()
    stats.prompt_tokens = len(row.request.prompt_ids)
    stats.output_tokens = len(leaving.completion.token_ids)
    stats.prefill_tokens = leaving.prefill_tokens
    stats.seconds = time.perf_counter() - row.began_s
    return row.request, replace(leaving.completion, stats=stats)


def noise_key(seed: int, row_id: int) -> tuple[int, int]:
    """Philox key of a row: 64 bits of a hash of the job's seed and the row's id."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, row_id), digest_size=8).digest()
    first, second = struct.unpack("<II", digest)
    return first, second


T = TypeVar("T")


def _either(value: T | None, default: T) -> T:
    return default if value is None else value
