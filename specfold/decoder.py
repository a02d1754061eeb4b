"""One decoding run: rows enter free slots, advance together, and leave as completions.

The host side of the engine: it fills slots, runs prefill chunks between steps and collects finished rows.
"""

from __future__ import annotations

import hashlib
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from specfold.branches import GraphTensors
from specfold.config import DecodeConfig
from specfold.drafts import graph_for
from specfold.forward import Folding
from specfold.pages import PAGE_SIZE, PagePool
from specfold.predict import seed_token
from specfold.prefill import Prefill, prefill_chunk, prefill_length
from specfold.request import ERROR, LENGTH, STOP, Completion, Request
from specfold.slots import NEVER, Ending, SlotState
from specfold.step import StepContext, open_block, opening_ending, step
from specfold.tally import Tally
from specfold.text import cut_at_stop, decode_text

if TYPE_CHECKING:
    from specfold.engine import Engine


@dataclass(slots=True)
class Row:
    """A row in a slot."""

    request: Request
    prefill: Prefill
    pages: list[int]
    stop: tuple[str, ...]
    admitted_s: float


class Decoder:
    """Decodes rows under one configuration in ``batch_size`` slots."""

    def __init__(self, engine: Engine, config: DecodeConfig, batch_size: int) -> None:
        model, device = engine.model, engine.device
        self.engine = engine
        self.config = config
        rules = engine.info.family.rules(engine.info.spec, config)
        graph = graph_for(config)
        # Under sampling the noise may lift a token from below the graph's ranks.
        num_top = max(graph.num_tokens, 8) if len(graph) else 0
        num_top = min(num_top, engine.vocab_size - 1)
        self.pool = PagePool(engine.info.spec, device, model.dtype)
        self.context = StepContext(
            model=model,
            family=engine.info.family,
            rules=rules,
            pool=self.pool,
            graph=GraphTensors.build(graph, device),
            folding=Folding(config.fold_delta, config.ffn_gate),
            mask_id=engine.mask_token_id,
            stop_ids=torch.tensor(engine.stop_token_ids, dtype=torch.long, device=device),
            num_top=max(num_top, 1),
            end_think_id=config.end_think_token_id,
        )
        self.slots = SlotState.empty(batch_size, rules.block_size, num_top, 1, 1, device)
        self.tally = Tally(batch_size, engine.info.spec.num_layers, rules.block_size, self.context.graph)
        self.rows: list[Row | None] = [None] * batch_size

    @property
    def idle(self) -> bool:
        return not any(self.rows)

    @property
    def has_free_slot(self) -> bool:
        return None in self.rows

    def admit(self, request: Request) -> Completion | None:
        """Puts a request into a free slot; a bad one comes back as an error completion and takes none."""
        max_new = self._max_new_tokens(request)
        bad = self.engine.check_prompt(request.prompt_ids, max_new)
        if bad is not None:
            kind, message = bad
            return Completion(request.row_id, request.sample_id, [], "", ERROR, message, kind)
        prompt = tuple(request.prompt_ids)
        prefill = self._prefill_of(prompt)
        prefill.owners += 1
        stop = self.config.stop if request.stop is None else tuple(request.stop)
        self.rows[self.rows.index(None)] = Row(request, prefill, [], stop, time.perf_counter())
        return None

    def advance(self) -> list[tuple[Request, Completion]]:
        """One chunk of every waiting prompt, then one step of all decoding rows; returns the rows that ended."""
        return self.prepare() + self.decode()

    @torch.inference_mode()
    def prepare(self) -> list[tuple[Request, Completion]]:
        """Caches the next chunk of every waiting prompt and opens the first block of those that are ready."""
        waiting = {id(r.prefill): r.prefill for r in self.rows if r is not None and not r.prefill.finished}
        for prefill in waiting.values():
            prefill_chunk(self.context.model, self.pool, prefill, self.context.rules)
        finished = []
        for slot, row in enumerate(self.rows):
            if row is not None and not row.pages and row.prefill.finished:
                self._open_row(slot, row)
                opening = opening_ending(self.slots, self.context)
                if bool(opening.done_S[slot]):
                    finished.append(self._finish(slot, opening))
        return finished

    @torch.inference_mode()
    def decode(self) -> list[tuple[Request, Completion]]:
        """One step of all rows that stand in a block."""
        if not bool(self.slots.active_S.any()):
            return []
        result = step(self.slots, self.context)
        self.tally.add(result)
        finished = []
        done, invalid, committed = (
            flags.tolist() for flags in (result.ending.done_S, result.invalid_S, result.committed_S)
        )
        for slot, row in enumerate(self.rows):
            if row is None or not row.pages:
                continue
            if invalid[slot]:
                finished.append(self._fail(slot, "nan_logits", "The model returned NaN or infinite logits."))
            elif done[slot] or (committed[slot] and row.stop and self._stop_string_in(slot, row)):
                finished.append(self._finish(slot, result.ending))
        return finished

    def _max_new_tokens(self, request: Request) -> int:
        return self.config.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens

    def _prefill_of(self, prompt: tuple[int, ...]) -> Prefill:
        """The prefill of a prompt, shared with a row that has the same one."""
        for row in self.rows:
            if row is not None and row.prefill.prompt_ids == prompt:
                return row.prefill
        return Prefill(prompt, prefill_length(len(prompt), self.context.rules))

    def _open_row(self, slot: int, row: Row) -> None:
        """Gives a prefilled row its pages and opens its first block."""
        slots, rules, request = self.slots, self.context.rules, row.request
        prompt, start = row.prefill.prompt_ids, row.prefill.length
        limit = len(prompt) + self._max_new_tokens(request)
        whole = start // PAGE_SIZE
        row.pages = [self.pool.share(page) for page in row.prefill.pages[:whole]]
        row.pages += [self.pool.copy(page) for page in row.prefill.pages[whole:]]
        num_pages = -(-(limit + rules.block_size) // PAGE_SIZE)
        row.pages += [self.pool.allocate() for _ in range(num_pages - len(row.pages))]
        slots.reserve(num_pages, limit - len(prompt) + rules.block_size)
        config = self.config
        first_new = len(prompt) - start
        slots.active_S[slot] = True
        slots.state_ST[slot, :first_new] = torch.tensor(prompt[start:], dtype=torch.long)
        slots.start_S[slot] = start
        slots.first_new_S[slot] = first_new
        slots.prompt_len_S[slot] = len(prompt)
        slots.limit_S[slot] = limit
        budget = config.max_thinking_tokens
        slots.think_S[slot] = NEVER if budget is None else len(prompt) + budget
        slots.page_table_SP[slot, :num_pages] = torch.tensor(row.pages)
        slots.key_S2[slot] = torch.tensor(noise_key(_either(request.seed, config.seed), request.row_id))
        slots.sample_S[slot] = request.sample_id
        slots.temperature_S[slot] = _either(request.temperature, config.temperature)
        slots.top_p_S[slot] = _either(request.top_p, config.top_p)
        slots.top_k_S[slot] = _either(request.top_k, config.top_k)
        slots.output_SC[slot] = -1
        open_block(slots, torch.tensor([slot], device=slots.state_ST.device), self._seed(row, slot), self.context)

    def _seed(self, row: Row, slot: int) -> torch.Tensor | None:
        """The token after the cached prompt, if the first block starts with it."""
        hidden_E = row.prefill.last_hidden_E
        if not self.context.rules.seeded or hidden_E is None or int(self.slots.first_new_S[slot]):
            return None
        return seed_token(self.context.model, hidden_E, self.slots, slot, self.context.rules, self.context.mask_id)

    def _finish(self, slot: int, ending: Ending) -> tuple[Request, Completion]:
        row = self.rows[slot]
        assert row is not None
        tokens = self._committed(slot)
        if bool(ending.done_S[slot]):
            first, end = int(self.slots.first_new_S[slot]), int(ending.end_S[slot])
            tokens += self.slots.state_ST[slot, first:end].tolist()
        reason = STOP if bool(ending.stopped_S[slot]) and bool(ending.done_S[slot]) else LENGTH
        tokens, text, cut = cut_at_stop(self.engine.tokenizer, tokens, row.stop)
        return self._leave(slot, tokens, text, STOP if cut else reason)

    def _fail(self, slot: int, kind: str, message: str) -> tuple[Request, Completion]:
        return self._leave(slot, [], "", ERROR, message, kind)

    def _leave(
        self, slot: int, tokens: list[int], text: str, reason: str, error: str | None = None, kind: str | None = None
    ) -> tuple[Request, Completion]:
        """Frees a slot and its pages."""
        row = self.rows[slot]
        assert row is not None
        self.rows[slot] = None
        self.slots.active_S[slot] = False
        self.pool.release(row.pages)
        row.prefill.owners -= 1
        if not row.prefill.owners:
            self.pool.release(row.prefill.pages)
        stats = self.tally.take(slot)
        stats.prompt_tokens = len(row.request.prompt_ids)
        stats.output_tokens = len(tokens)
        # A shared prefill counts once, with the last row that held it.
        stats.prefill_tokens = 0 if row.prefill.owners else row.prefill.length
        stats.seconds = time.perf_counter() - row.admitted_s
        request = row.request
        return request, Completion(request.row_id, request.sample_id, tokens, text, reason, error, kind, stats)

    def _committed(self, slot: int) -> list[int]:
        """Output tokens of the finished blocks."""
        count = max(int(self.slots.start_S[slot] - self.slots.prompt_len_S[slot]), 0)
        return self.slots.output_SC[slot, :count].tolist()

    def _stop_string_in(self, slot: int, row: Row) -> bool:
        text = decode_text(self.engine.tokenizer, self._committed(slot))
        return any(stop in text for stop in row.stop)


def noise_key(seed: int, row_id: int) -> tuple[int, int]:
    """Philox key of a row: 64 bits of a hash of the job's seed and the row's id."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, row_id), digest_size=8).digest()
    first, second = struct.unpack("<II", digest)
    return first, second


T = TypeVar("T")


def _either(value: T | None, default: T) -> T:
    return default if value is None else value
