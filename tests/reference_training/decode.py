"""A plain vanilla decoder, written for certainty and not for speed: no cache, every step forwards the whole row.

It answers held-out prompts at the end of training, independently of the engine that the models are meant to test.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference_training.model import BLOCK, FAST_DLLM_V2, ReferenceModel

SMALL_BLOCK = 8


@torch.no_grad()
def decode(
    model: ReferenceModel, family: str, prompts: list[list[int]], max_new_tokens: int, mask_id: int, stop_id: int
) -> tuple[list[list[int]], float]:
    """Greedy block decoding, one token a step. Returns new tokens (no stop) and the mean number of forwards a row."""
    device = next(model.parameters()).device
    prompt_len_B = torch.tensor([len(p) for p in prompts], device=device)
    length = ((int(prompt_len_B.max()) + max_new_tokens) // BLOCK + 1) * BLOCK
    tokens_BL = torch.full((len(prompts), length), mask_id, device=device)
    for row, prompt in enumerate(prompts):
        tokens_BL[row, : len(prompt)] = torch.tensor(prompt, device=device)
    position_L = torch.arange(length, device=device)
    limit_B1 = (prompt_len_B + max_new_tokens)[:, None]
    start_B1 = prompt_len_B[:, None].clone()
    if family == FAST_DLLM_V2:
        start_B1 -= start_B1 % BLOCK
    forwards_B = torch.zeros(len(prompts), device=device)
    active_B = torch.ones(len(prompts), dtype=torch.bool, device=device)
    while active_B.any():
        masks_BL = tokens_BL == mask_id
        logits_BLV = model(tokens_BL, position_L, decoding_mask(family, position_L, start_B1))
        logits_BLV[..., mask_id] = -torch.inf
        confidence_BL, choice_BL = logits_BLV.softmax(-1).max(-1)
        shifted = (confidence_BL.roll(1, dims=1), choice_BL.roll(1, dims=1))
        at_start_BL = position_L == start_B1
        if family == FAST_DLLM_V2:
            confidence_BL, choice_BL = shifted
        else:
            choice_BL = torch.where(at_start_BL, shifted[1], choice_BL)
        best_B1 = next_position(family, masks_BL, confidence_BL, start_B1, position_L)
        found_B1 = torch.where(active_B[:, None], choice_BL.gather(1, best_B1), tokens_BL.gather(1, best_B1))
        tokens_BL.scatter_(1, best_B1, found_B1)
        forwards_B += active_B
        open_BL = tokens_BL == mask_id
        ends_BL = ((tokens_BL == stop_id) & (position_L >= prompt_len_B[:, None])) | (position_L >= limit_B1)
        first_end_B1 = ends_BL.int().argmax(1, keepdim=True)
        active_B &= (open_BL & (position_L < first_end_B1)).any(1)
        block_BL = (position_L >= start_B1) & (position_L < start_B1 + BLOCK)
        start_B1 += BLOCK * ~(open_BL & block_BL).any(1, keepdim=True)
    ends = first_end_B1[:, 0].tolist()
    outputs = [tokens_BL[row, len(p) : end].tolist() for row, (p, end) in enumerate(zip(prompts, ends, strict=True))]
    return outputs, forwards_B.mean().item()


def decoding_mask(family: str, position_L: Tensor, start_B1: Tensor) -> Tensor:
    """Block-causal, or causal with the block at ``start_B1`` open to both sides [B or 1, L, L]."""
    query_L1, key_L = position_L[:, None], position_L
    if family == FAST_DLLM_V2:
        return (query_L1 // BLOCK >= key_L // BLOCK)[None]
    end_B11 = start_B1[..., None] + BLOCK
    in_block_BL1 = (query_L1 >= start_B1[..., None]) & (query_L1 < end_B11)
    return (query_L1 >= key_L) | (in_block_BL1 & (key_L < end_B11))


def next_position(family: str, masks_BL: Tensor, confidence_BL: Tensor, start_B1: Tensor, position_L: Tensor) -> Tensor:
    """The position each row unmasks [B, 1]: a block's first if open, else the most confident eligible one."""
    offset_BL = position_L - start_B1
    open_BL = masks_BL & (offset_BL >= 0) & (offset_BL < BLOCK)
    eligible_BL = open_BL
    if family == FAST_DLLM_V2:
        part_BL = torch.where(open_BL, offset_BL // SMALL_BLOCK, BLOCK)
        eligible_BL = open_BL & (part_BL == part_BL.amin(1, keepdim=True))
    score_BL = torch.where(eligible_BL, confidence_BL, -1.0) + 2.0 * (open_BL & (offset_BL == 0))
    return score_BL.argmax(1, keepdim=True)


@torch.no_grad()
def decode_autoregressively(
    model: ReferenceModel, prompts: list[list[int]], max_new_tokens: int, stop_id: int
) -> list[list[int]]:
    """Greedy next-token decoding with a causal mask (Nemotron-Labs-Diffusion)."""
    device = next(model.parameters()).device
    prompt_len_B = torch.tensor([len(p) for p in prompts], device=device)
    length = int(prompt_len_B.max()) + max_new_tokens
    tokens_BL = torch.full((len(prompts), length), stop_id, device=device)
    for row, prompt in enumerate(prompts):
        tokens_BL[row, : len(prompt)] = torch.tensor(prompt, device=device)
    position_L = torch.arange(length, device=device)
    causal = (position_L[:, None] >= position_L)[None]
    for step in range(max_new_tokens):
        at_B1 = prompt_len_B[:, None] + step
        logits_BLV = model(tokens_BL, position_L, causal)
        tokens_BL.scatter_(1, at_B1, logits_BLV.argmax(-1).gather(1, at_B1 - 1))
    rows = [tokens_BL[row, len(p) : len(p) + max_new_tokens].tolist() for row, p in enumerate(prompts)]
    return [row[: row.index(stop_id)] if stop_id in row else row for row in rows]
