"""What one training step predicts: a clean copy and two noisy copies of each row, side by side in one sequence.

The copies are ``[clean | noisy A | noisy B]``. A block of a noisy copy sees the clean tokens before the block and
all of itself, as in decoding. The clean copy stands for prefill and commit: block-causal for Fast-dLLM-v2, causal for
Nemotron-Labs-Diffusion. Position 0 of a block is never masked: in decoding it comes from the clean forward before it.

Letters: B rows, L positions of one copy, T = 3 L, N blocks of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from reference_training.model import BLOCK, FAST_DLLM_V2

SEED_WEIGHT = 3.0  # a block has one position 0 and up to 31 masked ones


class Objective(NamedTuple):
    tokens_BT: Tensor
    mask_BTT: Tensor
    targets_BT: Tensor
    weights_BT: Tensor


class Blocks(NamedTuple):
    """Which block a position lies in, and where in it. Blocks may start anywhere before position 0 of the row."""

    index_BL: Tensor
    offset_BL: Tensor


def locate_blocks(family: str, prompt_len_B: Tensor, length: int, generator: torch.Generator) -> Blocks:
    """Blocks from position 0 (Fast-dLLM-v2), or from the prompt's end (Nemotron-Labs-Diffusion).

    For Nemotron every second row starts its blocks some positions later, as linear speculation does.
    """
    device = prompt_len_B.device
    shift_B = torch.zeros_like(prompt_len_B)
    if family != FAST_DLLM_V2:
        late_B = torch.randint(BLOCK, prompt_len_B.shape, generator=generator, device=device)
        late_B[::2] = 0
        shift_B = -(prompt_len_B + late_B) % BLOCK
    place_BL = torch.arange(length, device=device) + shift_B[:, None]
    return Blocks(place_BL // BLOCK, place_BL % BLOCK)


def draw_noise(blocks: Blocks, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Masks [B, L] of the two noisy copies, still without regard to prompt and length.

    Half of the rows: each block with its own share of masks, the second copy the complement of the first.
    The other half: states that decoding really visits, known on the left, open on the right, mixed between.
    """
    index_BL, offset_BL = blocks
    shape_BN = (index_BL.shape[0], int(index_BL.shape[1] // BLOCK + 1))
    device = index_BL.device

    def uniform(shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def decoding_state() -> Tensor:
        left_BL, width_BL, share_BL = (uniform(shape_BN).gather(1, index_BL) for _ in range(3))
        left_BL, width_BL = left_BL * BLOCK, width_BL * BLOCK / 2
        mixed_BL = uniform(index_BL.shape) < share_BL
        return (offset_BL >= left_BL + width_BL) | ((offset_BL >= left_BL) & mixed_BL)

    first_BL = uniform(index_BL.shape) < uniform(shape_BN).gather(1, index_BL)
    as_decoded_B1 = torch.arange(index_BL.shape[0], device=device)[:, None] % 4 < 2
    return (
        torch.where(as_decoded_B1, decoding_state(), first_BL),
        torch.where(as_decoded_B1, decoding_state(), ~first_BL),
    )


def build_objective(
    family: str, tokens_BL: Tensor, prompt_len_B: Tensor, total_len_B: Tensor, mask_id: int, generator: torch.Generator
) -> Objective:
    """Inputs, attention mask, targets and loss weights of one step; rows end with stop tokens to full length."""
    length = tokens_BL.shape[1]
    position_L = torch.arange(length, device=tokens_BL.device)
    blocks = locate_blocks(family, prompt_len_B, length, generator)
    index_BL, offset_BL = blocks
    last_block_B1 = index_BL.gather(1, total_len_B[:, None] - 1)
    answer_BL = (position_L >= prompt_len_B[:, None]) & (index_BL <= last_block_B1)
    noise = [masked_BL & answer_BL & (offset_BL > 0) for masked_BL in draw_noise(blocks, generator)]

    next_BL = tokens_BL.roll(-1, dims=1)
    if family == FAST_DLLM_V2:  # token shift: position i is predicted at i - 1, block starts by the clean copy
        clean_BL = SEED_WEIGHT * (answer_BL & (offset_BL == 0)).roll(-1, dims=1)
        noisy = [masked_BL.roll(-1, dims=1).float() for masked_BL in noise]
        targets = [next_BL, next_BL, next_BL]
    else:
        real_BL = answer_BL & (position_L < total_len_B[:, None])
        clean_BL = real_BL.roll(-1, dims=1).float()
        noisy = [masked_BL.float() for masked_BL in noise]
        targets = [next_BL, tokens_BL, tokens_BL]
    return Objective(
        torch.cat([tokens_BL, *(tokens_BL.masked_fill(masked_BL, mask_id) for masked_BL in noise)], dim=1),
        attention_mask(family, index_BL),
        torch.cat(targets, dim=1),
        torch.cat([clean_BL, *noisy], dim=1),
    )


def attention_mask(family: str, index_BL: Tensor) -> Tensor:
    """Who sees whom [B or 1, T, T]; Fast-dLLM-v2's blocks are the same in every row, so one row serves all."""
    if family == FAST_DLLM_V2:
        index_BL = index_BL[:1]
    query_BL1, key_B1L = index_BL[:, :, None], index_BL[:, None, :]
    earlier, same = query_BL1 > key_B1L, query_BL1 == key_B1L
    clean = earlier | same if family == FAST_DLLM_V2 else torch.ones_like(same).tril()
    never = torch.zeros_like(same)
    rows = ([clean, never, never], [earlier, same, never], [earlier, never, same])
    return torch.cat([torch.cat(row, dim=2) for row in rows], dim=1)
