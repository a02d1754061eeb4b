"""The torch backend: every operation as it comes. The oracle of the fused one, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specfold.backends.base import RowReport, RowStart, RunSetup, fill_slot
from specfold.branches import GraphTensors
from specfold.folding import Folding
from specfold.pages import PagePool
from specfold.predict import seed_token
from specfold.prefill import Prefill, prefill_chunk
from specfold.slots import Ending, SlotState
from specfold.stats import DecodeStats
from specfold.step import StepContext, open_block, opening_ending, step
from specfold.stored import StoredBranch
from specfold.tally import Tally


@dataclass(frozen=True, slots=True)
class _Stats:
    stats: DecodeStats

    def ready(self) -> bool:
        return True

    def read(self) -> DecodeStats:
        return self.stats


class TorchBackend:
    """Reports every step at once."""

    num_prompts = 1

    def __init__(self, setup: RunSetup) -> None:
        model, config, device = setup.model, setup.config, setup.model.device
        watch = setup.watch
        self.pool = PagePool(model.spec, device, model.dtype)
        self.slots = SlotState.empty(setup.batch_size, setup.rules.block_size, setup.num_top, 1, 1, device)
        folding, block = Folding.of(config), setup.rules.block_size
        stored = None
        if folding.carries:
            stored = StoredBranch(model.spec, setup.batch_size, block, folding, model.dtype, device)
        self._context = StepContext(
            model=model,
            family=setup.family,
            rules=setup.rules,
            pool=self.pool,
            graph=GraphTensors.build(setup.graph, device, watch.num_ranks if watch else 0, config.draft_budget),
            folding=folding,
            mask_id=setup.mask_id,
            stop_ids=torch.tensor(setup.stop_ids, dtype=torch.long, device=device),
            num_top=max(setup.num_top, 1),
            end_think_id=config.end_think_token_id,
            stored=stored,
            watch=watch,
        )
        num_layers, graph = model.spec.num_layers, self._context.graph
        self._tally = Tally(setup.batch_size, num_layers, block, graph, folding.carries)
        self._num_output = [0] * setup.batch_size

    @torch.inference_mode()
    def prefill(self, prefills: Sequence[Prefill]) -> None:
        for prefill in prefills:
            prefill_chunk(self._context.model, self.pool, prefill, self._context.rules)

    @torch.inference_mode()
    def open(self, slot: int, row: RowStart) -> RowReport | None:
        slots, context = self.slots, self._context
        slots.reserve(len(row.pages), row.limit - len(row.prefill.prompt_ids) + context.rules.block_size)
        fill_slot(slots, slot, row)
        slots.active_S[slot] = True
        slots.output_SC[slot] = -1
        self._num_output[slot] = 0
        open_block(slots, torch.tensor([slot], device=slots.state_ST.device), self._seed(slot, row), context)
        opening = opening_ending(slots, context)
        return self._report(slot, opening, False) if bool(opening.done_S[slot]) else None

    @torch.inference_mode()
    def step(self) -> list[RowReport]:
        active = self.slots.active_S.tolist()
        if not any(active):
            return []
        result = step(self.slots, self._context)
        self._tally.add(result)
        invalid = result.invalid_S.tolist()
        return [self._report(slot, result.ending, invalid[slot]) for slot, is_active in enumerate(active) if is_active]

    def close(self, slot: int) -> _Stats:
        self.slots.active_S[slot] = False
        return _Stats(self._tally.take(slot))

    def _seed(self, slot: int, row: RowStart) -> torch.Tensor | None:
        """The token after the cached prompt, if the first block starts with it."""
        context, hidden_E = self._context, row.prefill.last_hidden_E
        if not context.rules.seeded or hidden_E is None or int(self.slots.first_new_S[slot]):
            return None
        return seed_token(context.model, hidden_E, self.slots, slot, context.rules, context.mask_id)

    def _report(self, slot: int, ending: Ending, invalid: bool) -> RowReport:
        slots, before = self.slots, self._num_output[slot]
        count = max(int(slots.start_S[slot] - slots.prompt_len_S[slot]), 0)
        self._num_output[slot] = count
        committed = slots.output_SC[slot, before:count].tolist() if count > before else []
        if invalid or not bool(ending.done_S[slot]):
            return RowReport(slot, committed, invalid)
        first, end = int(slots.first_new_S[slot]), int(ending.end_S[slot])
        tail = slots.state_ST[slot, first:end].tolist()
        return RowReport(slot, committed, done=True, stopped=bool(ending.stopped_S[slot]), tail=tail)
