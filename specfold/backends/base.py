"""What the host side of a decoding run asks of a backend, and what it gets back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from specfold.config import DecodeConfig
from specfold.drafts import DraftGraph
from specfold.families.base import BlockRules, Family
from specfold.model import Model
from specfold.pages import PagePool
from specfold.prefill import Prefill
from specfold.slots import SlotState
from specfold.stats import DecodeStats
from specfold.watch import Watch


@dataclass(frozen=True, slots=True)
class RunSetup:
    """What a backend needs to know of a run."""

    model: Model
    family: Family
    rules: BlockRules
    graph: DraftGraph
    config: DecodeConfig
    batch_size: int
    mask_id: int
    stop_ids: tuple[int, ...]
    vocab_size: int
    """Ids below it can be decoded to text; the head may be larger."""
    context_length: int
    """Prompt and new tokens together."""
    watch: Watch | None = None
    """Looks on, in the torch backend alone."""

    @property
    def num_top(self) -> int:
        """Tokens of each distribution that are kept for drafts; none without drafts."""
        wanted = max(self.graph.num_tokens, self.watch.num_tokens if self.watch else 0)
        if not wanted:
            return 0
        # Under sampling the noise may lift a token from below the graph's ranks.
        wanted = max(wanted, 8) if self.config.temperature > 0 else wanted
        return min(wanted, self.vocab_size - 1)


@dataclass(frozen=True, slots=True)
class RowStart:
    """A prefilled row that is about to open its first block."""

    prefill: Prefill
    pages: list[int]
    """All pages that the row will need; the first ones hold its prompt."""
    limit: int
    """Absolute position at which it ends whatever happens."""
    think: int
    """Absolute position where the end-of-thinking token is due, or NEVER."""
    noise_key: tuple[int, int]
    sample_id: int
    temperature: float
    top_p: float
    top_k: int


@dataclass(frozen=True, slots=True)
class RowReport:
    """What a step brought to the row of one slot."""

    slot: int
    committed: list[int] = field(default_factory=list)
    """Output tokens of a block that was finished."""
    invalid: bool = False
    """A distribution that was needed held NaN or infinity; the row cannot go on."""
    done: bool = False
    stopped: bool = False
    """A stop token ended it, not the length."""
    tail: list[int] = field(default_factory=list)
    """With ``done``: output tokens of the block it ended in."""


class PendingStats(Protocol):
    """A row's counters on their way from the device."""

    def ready(self) -> bool: ...

    def read(self) -> DecodeStats:
        """The counters; waits for them if need be."""


class Backend(Protocol):
    """Computes the steps of one run. Slots are numbered; the host decides which row has which."""

    pool: PagePool
    slots: SlotState
    num_prompts: int
    """Prompts that it caches at the cost of little more than one."""

    def prefill(self, prefills: Sequence[Prefill]) -> None:
        """Computes and caches the next chunk of each of these prompts."""

    def open(self, slot: int, row: RowStart) -> RowReport | None:
        """Opens the first block of a row in a free slot; a report if that already ends the row and is known."""

    def step(self) -> list[RowReport]:
        """One step of all open rows. May report the step before, so that the host never waits for the device."""

    def close(self, slot: int) -> PendingStats:
        """Frees a slot, whose row gets no further report."""


def fill_slot(slots: SlotState, slot: int, row: RowStart) -> None:
    """Writes a row's settings and the ragged end of its prompt into a slot that is not active yet."""
    prompt, start = row.prefill.prompt_ids, row.prefill.length
    device = slots.state_ST.device
    first_new = len(prompt) - start
    slots.state_ST[slot, :first_new] = to_device(prompt[start:], device)
    slots.page_table_SP[slot, : len(row.pages)] = to_device(row.pages, device)
    slots.key_S2[slot] = to_device(row.noise_key, device)
    # To assign a number to an element would wait for the device.
    slots.start_S[slot].fill_(start)
    slots.first_new_S[slot].fill_(first_new)
    slots.prompt_len_S[slot].fill_(len(prompt))
    slots.limit_S[slot].fill_(row.limit)
    slots.think_S[slot].fill_(row.think)
    slots.sample_S[slot].fill_(row.sample_id)
    slots.temperature_S[slot].fill_(row.temperature)
    slots.top_p_S[slot].fill_(row.top_p)
    slots.top_k_S[slot].fill_(row.top_k)


def to_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """The values as int64. The host goes on at once: a copy from ordinary memory would wait for all that is queued."""
    pinned = torch.tensor(list(values), dtype=torch.int64, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)
