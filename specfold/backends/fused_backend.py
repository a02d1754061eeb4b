"""The backend of fused kernels: a step is one graph, and the host looks at a step's results while the next one runs.

S slots, B branches, T block positions, A = S * B, E hidden width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.fused.control import FLAGS, Result
from specfold.backends.base import RowReport, RowStart, RunSetup, fill_slot
from specfold.backends.fused_prefill import FusedPrefill, prefill_slots
from specfold.backends.fused_stats import CounterCopy
from specfold.backends.fused_step import FusedStep
from specfold.backends.memory import MemoryPlan, free_device_memory, plan_memory
from specfold.backends.operations import Operations
from specfold.pages import PAGE_SIZE, PagePool, pages_for
from specfold.prefill import Prefill
from specfold.slots import SlotState

CPU_PAGES = 4096
"""Room for pages where there is no GPU, which is for tests alone."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that was launched and whose results are being copied to the host."""

    number: int
    result: Result
    arrived: torch.cuda.Event | None


class FusedBackend:
    """Reports every step when the next one has been launched."""

    def __init__(self, setup: RunSetup, ops: Operations) -> None:
        model, device = setup.model, setup.model.device
        spec, rules = model.spec, setup.rules
        self._setup, self._device = setup, device
        self.num_prompts = prefill_slots(setup)
        self.memory = plan_run(setup)
        self.pool = PagePool(spec, device, model.dtype, self.memory.num_pages, fixed=True)
        positions = min(setup.context_length + rules.block_size, self.memory.num_pages * PAGE_SIZE)
        table = pages_for(positions)
        self.slots = SlotState.empty(setup.batch_size, rules.block_size, setup.num_top, table, 1, device)
        self.fused_step = FusedStep(ops, setup, self.pool, self.slots, positions)
        self._prefill = FusedPrefill(ops, setup, self.pool, self.fused_step, table, positions)
        self._hosts = [Result.empty(setup.batch_size, rules.block_size, "cpu", device.type == "cuda") for _ in range(2)]
        self._in_flight: deque[_InFlight] = deque()
        self._number = 0
        self._first_step: dict[int, int] = {}
        """First step of the row in each open slot: a report of an earlier step belongs to the row before it."""
        self._drawing: dict[int, tuple[bool, bool]] = {}
        """Per open slot, whether its row draws tokens, and whether from a limited set."""

    @torch.inference_mode()
    def prefill(self, prefills: Sequence[Prefill]) -> None:
        self._prefill.advance(prefills)

    @torch.inference_mode()
    def open(self, slot: int, row: RowStart) -> RowReport | None:
        fill_slot(self.slots, slot, row)
        self.fused_step.counters.clear(slot)
        draws = row.temperature > 0
        self._drawing[slot] = draws, draws and (row.top_k > 0 or row.top_p < 1)
        self.fused_step.prepare(*self._variant())
        first_new = len(row.prefill.prompt_ids) - row.prefill.length
        seeded = self._setup.rules.seeded and row.prefill.last_hidden_E is not None and not first_new
        self.fused_step.open_block(slot, self._prefill.seed(row.prefill, slot) if seeded else None)
        self._first_step[slot] = self._number
        return None

    @torch.inference_mode()
    def step(self) -> list[RowReport]:
        launched = bool(self._first_step)
        if launched:
            self._launch()
        if len(self._in_flight) > launched:
            return self._read(self._in_flight.popleft())
        return []

    @torch.inference_mode()
    def close(self, slot: int) -> CounterCopy:
        self.slots.active_S[slot].fill_(False)
        del self._first_step[slot], self._drawing[slot]
        setup = self._setup
        carried_block = setup.rules.block_size if setup.config.carries else 0
        return CounterCopy(self.fused_step.counters, slot, bool(len(setup.graph)), carried_block)

    def _variant(self) -> tuple[bool, bool]:
        """Whether any open row draws its tokens, and whether any does from a limited set."""
        return any(draws for draws, _ in self._drawing.values()), any(limits for _, limits in self._drawing.values())

    def _launch(self) -> None:
        self.fused_step.run(*self._variant())
        host = self._hosts[self._number % 2]
        host.packed_SN.copy_(self.fused_step.result.packed_SN, non_blocking=True)
        arrived = None
        if self._device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
        self._in_flight.append(_InFlight(self._number, host, arrived))
        self._number += 1

    def _read(self, step: _InFlight) -> list[RowReport]:
        if step.arrived is not None:
            step.arrived.synchronize()
        packed = step.result.packed_SN.tolist()
        block = self._setup.rules.block_size
        return [
            report
            for slot, first in self._first_step.items()
            if first <= step.number and (report := _report(slot, packed[slot], block)) is not None
        ]


def _report(slot: int, row: list[int], block: int) -> RowReport | None:
    """One slot's part of a step's results; None for a slot that took no part."""
    flags = dict(zip(FLAGS, row, strict=False))
    if not (flags["active"] or flags["done"]):
        return None
    finished, state = row[len(FLAGS) : len(FLAGS) + block], row[len(FLAGS) + block :]
    if flags["invalid"]:
        return RowReport(slot, invalid=True)
    committed = finished[flags["block_first_new"] : flags["length"]] if flags["committed"] else []
    if not flags["done"]:
        return RowReport(slot, committed)
    tail = state[flags["first_new"] : flags["end"]]
    return RowReport(slot, committed, done=True, stopped=bool(flags["stopped"]), tail=tail)


def plan_run(setup: RunSetup) -> MemoryPlan:
    """What the run's buffers take, and how many pages stay."""
    model, rules = setup.model, setup.rules
    spec, item = model.spec, model.dtype.itemsize
    page_bytes = 2 * spec.num_layers * PAGE_SIZE * spec.num_kv_heads * spec.head_dim * item
    longest = pages_for(setup.context_length + rules.block_size)
    # A prompt's pages stand once more where its ragged end is copied.
    useful = (setup.batch_size + prefill_slots(setup) - 1) * (longest + 1)
    if model.device.type != "cuda":
        return MemoryPlan(model.num_bytes, 0, page_bytes, min(useful, CPU_PAGES))
    step = FusedStep.num_bytes(setup) + FusedPrefill.num_bytes(setup)
    least = pages_for(setup.config.max_new_tokens + rules.block_size) + 1
    return plan_memory(free_device_memory(model.device), model.num_bytes, step, page_bytes, useful, least)
