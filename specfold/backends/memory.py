"""How a device's memory is divided before a run: what a step needs first, pages of keys and values from the rest."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from specfold.config import ConfigError
from specfold.pages import pages_for

RESERVE = 768 << 20
"""Left free for the CUDA context's growth, captured graphs and compiled kernels."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, and the pages they leave room for."""

    weights: int
    step: int
    """Buffers of decoding steps and of prefill chunks."""
    page_bytes: int
    num_pages: int

    def rows_of(self, num_positions: int) -> int:
        """Rows of that many positions whose keys and values fit at once."""
        return self.num_pages // pages_for(num_positions)

    def describe(self, prompt_len: int, max_new_tokens: int) -> str:
        """One line for a log."""
        rows = self.rows_of(prompt_len + max_new_tokens)
        return (
            f"Device memory: weights {_gib(self.weights)}, step buffers {_gib(self.step)}, keys and values "
            f"{_gib(self.num_pages * self.page_bytes)}: room for {rows:,} rows at once with prompts of {prompt_len:,} "
            f"and {max_new_tokens:,} new tokens."
        )


def free_device_memory(device: torch.device) -> int:
    """Bytes that an allocation can really get, after what nothing uses any more has been given back.

    Buffers may hang in cycles of references, and what torch keeps for later lies in pieces: neither serves one large
    buffer, so neither may count.
    """
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def plan_memory(free: int, weights: int, step: int, page_bytes: int, useful_pages: int, least_pages: int) -> MemoryPlan:
    """Divides ``free`` bytes (weights are loaded already). Raises ConfigError where not even ``least_pages`` fit.

    ``useful_pages``: more than that no run can use.
    """
    left = free - RESERVE - step
    num_pages = min(useful_pages, max(left, 0) // page_bytes)
    if num_pages < least_pages:
        need = step + RESERVE + least_pages * page_bytes
        raise ConfigError(
            f"the device has {_gib(free)} free beside the weights, but one row needs {_gib(need)}: lower the batch "
            "size, the drafts or max_new_tokens."
        )
    return MemoryPlan(weights, step, page_bytes, num_pages)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
