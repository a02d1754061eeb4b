"""Prompts into the prefix cache, a chunk at a time, so that a long prompt does not hold the batch up.

Chunks lie at absolute positions, and no row's results depend on another's: what stands in the cache does not depend on
what else decodes. Samples of one prompt share one prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specfold.branches import BranchList
from specfold.families.base import BlockRules
from specfold.folding import Folding
from specfold.forward import ForwardOutput, PrefixView, forward_branches, inside_mask
from specfold.model import Model
from specfold.pages import PAGE_SIZE, PagePool

CHUNK = 256
NO_FOLDING = Folding(-1.0, "own")


@dataclass(slots=True)
class Prefill:
    """One prompt on its way into the cache; ``done`` counts the positions that stand there."""

    prompt_ids: Sequence[int]
    length: int
    """Positions to cache: whole blocks where blocks are aligned, else the whole prompt."""
    pages: list[int] = field(default_factory=list)
    """Room for all of them."""
    done: int = 0
    last_hidden_E: torch.Tensor | None = None
    """Final hidden state (before the last norm) of the last cached position."""
    owners: int = 0

    @property
    def finished(self) -> bool:
        return self.done == self.length


def prefill_length(prompt_len: int, rules: BlockRules) -> int:
    """Positions of a prompt that are cached before its first block."""
    return prompt_len // rules.block_size * rules.block_size if rules.aligned else prompt_len


def prefill_chunk(model: Model, pool: PagePool, prefill: Prefill, rules: BlockRules) -> None:
    """Computes and caches the next chunk of a prompt."""
    start = prefill.done
    end = min(start + chunk_size(prefill, rules), prefill.length)
    output = forward_sequence(
        model, pool, prefill.prompt_ids[start:end], start, prefill.pages, rules.prefill_mask, rules
    )
    write_final_kv(
        pool,
        output,
        torch.zeros(1, dtype=torch.long, device=model.device),
        torch.tensor([prefill.pages], device=model.device),
        start,
        end - start,
    )
    prefill.last_hidden_E = output.hidden_ATE[0, -1]
    prefill.done = end


def forward_sequence(
    model: Model,
    pool: PagePool,
    token_ids: Sequence[int],
    start: int,
    pages: Sequence[int],
    mask_kind: str,
    rules: BlockRules,
    **kwargs: object,
) -> ForwardOutput:
    """One forward over consecutive tokens of one row that sees ``start`` cached positions; writes nothing."""
    device = model.device
    tokens = torch.tensor([list(token_ids)], device=device)
    zero = torch.zeros(1, dtype=torch.long, device=device)
    branches = BranchList(
        slot_A=zero,
        branch_A=zero,
        parent_A=zero,
        depth_A=zero,
        final_A=torch.ones(1, dtype=torch.bool, device=device),
        foldable_A=torch.zeros(1, dtype=torch.bool, device=device),
        tokens_AT=tokens,
        position_AT=start + torch.arange(tokens.shape[1], device=device)[None],
        index_SB=zero[None],
    )
    view = PrefixView(pool, torch.tensor([list(pages)], device=device), torch.tensor([start], device=device))
    mask = inside_mask(mask_kind, tokens.shape[1], rules.block_size, device)
    return forward_branches(model, branches, view, mask, NO_FOLDING, **kwargs)  # type: ignore[arg-type]


def write_final_kv(
    pool: PagePool,
    output: ForwardOutput,
    final_N: torch.Tensor,
    page_table_NP: torch.Tensor,
    start_N: torch.Tensor | int,
    length_N: torch.Tensor | int,
) -> None:
    """Writes the first ``length`` positions of chosen final branches to the pages at ``start``."""
    block = output.hidden_ATE.shape[1]
    offset_T = torch.arange(block, device=page_table_NP.device)
    start = torch.as_tensor(start_N, device=page_table_NP.device).expand(len(final_N))
    length = torch.as_tensor(length_N, device=page_table_NP.device).expand(len(final_N))
    row, offset = (offset_T[None] < length[:, None]).nonzero(as_tuple=True)
    position = start[row] + offset
    page = page_table_NP[row, position // PAGE_SIZE]
    for layer, (k, v) in enumerate(output.final_kv):
        chosen = final_N[row]
        pool.write(layer, page, position % PAGE_SIZE, k[chosen, offset], v[chosen, offset])


def chunk_size(prefill: Prefill, rules: BlockRules) -> int:
    """Positions that one forward caches; a bidirectional prompt cannot be cut."""
    if rules.prefill_mask == "full":
        return prefill.length
    return max(CHUNK // rules.block_size, 1) * rules.block_size
