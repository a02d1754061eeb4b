"""State of the rows that decode together, one slot a row, as tensors on the device.

S slots, T block positions, J kept tokens, P pages a slot, C output capacity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class SlotState:
    """Everything a step reads and changes. ``start`` is both the block's first position and the cached length."""

    active_S: torch.Tensor
    state_ST: torch.Tensor
    """Token ids of the block, the mask id where undecided."""
    start_S: torch.Tensor
    first_new_S: torch.Tensor
    """Offset in the block of the first generated position (the prompt's ragged end stands before it)."""
    prompt_len_S: torch.Tensor
    limit_S: torch.Tensor
    """Absolute position at which the row ends whatever happens."""
    think_S: torch.Tensor
    """Absolute position where the end-of-thinking token is due; NEVER when it is off or has been written."""
    page_table_SP: torch.Tensor
    key_S2: torch.Tensor
    sample_S: torch.Tensor
    temperature_S: torch.Tensor
    top_p_S: torch.Tensor
    top_k_S: torch.Tensor
    steps_S: torch.Tensor
    """Steps that the block has gone through."""
    has_guess_S: torch.Tensor
    """The block has a last accepted distribution to draft from."""
    guess_token_STJ: torch.Tensor
    guess_logprob_STJ: torch.Tensor
    """That distribution: the J best tokens of each position and their log-probabilities, -inf where not computed."""
    output_SC: torch.Tensor
    """Committed tokens, from the prompt's end on."""

    @classmethod
    def empty(
        cls, num_slots: int, block: int, num_top: int, num_pages: int, capacity: int, device: torch.device
    ) -> SlotState:
        """``num_slots`` free slots."""

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros((num_slots, *shape), dtype=torch.long, device=device)

        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros((num_slots, *shape), dtype=torch.float32, device=device)

        def flags() -> torch.Tensor:
            return torch.zeros(num_slots, dtype=torch.bool, device=device)

        return cls(
            active_S=flags(),
            state_ST=ints(block),
            start_S=ints(),
            first_new_S=ints(),
            prompt_len_S=ints(),
            limit_S=ints(),
            think_S=ints(),
            page_table_SP=ints(num_pages),
            key_S2=ints(2),
            sample_S=ints(),
            temperature_S=floats(),
            top_p_S=floats(),
            top_k_S=ints(),
            steps_S=ints(),
            has_guess_S=flags(),
            guess_token_STJ=ints(block, num_top),
            guess_logprob_STJ=floats(block, num_top),
            output_SC=ints(capacity),
        )

    def reserve(self, num_pages: int, capacity: int) -> None:
        """Widens the page table and the output to at least these sizes."""
        self.page_table_SP = _widen(self.page_table_SP, num_pages)
        self.output_SC = _widen(self.output_SC, capacity)

    @property
    def num_slots(self) -> int:
        return len(self.active_S)

    @property
    def block_size(self) -> int:
        return self.state_ST.shape[1]


def _widen(x_SN: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(x_SN, (0, max(width - x_SN.shape[1], 0)))


@dataclass(frozen=True, slots=True)
class Ending:
    """Whether a state ends its row, and where its tokens end."""

    done_S: torch.Tensor
    end_S: torch.Tensor
    """Offset in the block behind the last token that counts; the stop token does not."""
    stopped_S: torch.Tensor
    """A stop token ended it, not the length."""


def ending(
    tokens_ST: torch.Tensor,
    masked_ST: torch.Tensor,
    first_new_S: torch.Tensor,
    limit_S: torch.Tensor,
    stop_ids: torch.Tensor,
) -> Ending:
    """A row is done when a stop token, or the length limit, has no mask before it.

    ``limit_S`` is counted from the block's start; stop ids before ``first_new`` (the prompt's) never count. Works for
    any leading shape, written S here.
    """
    block = tokens_ST.shape[-1]
    offset = torch.arange(block, device=tokens_ST.device)
    is_stop = torch.isin(tokens_ST, stop_ids) & ~masked_ST & (offset >= first_new_S[..., None])
    first_stop = torch.where(is_stop, offset, block).amin(-1)
    first_mask = torch.where(masked_ST, offset, block).amin(-1)
    stopped = (first_stop < block) & (first_mask > first_stop) & (first_stop < limit_S)
    full = (limit_S <= block) & (first_mask >= limit_S)
    end = torch.where(stopped, first_stop, torch.minimum(limit_S, torch.full_like(limit_S, block)))
    return Ending(stopped | full, end, stopped)
