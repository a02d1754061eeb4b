"""The LM head: logits of compact rows to the chosen token, its confidence and the top J, streaming over the vocabulary.

D head rows, E hidden width, V vocabulary, N tiles of the vocabulary, J kept tokens, A branches of T positions.
A slice of rows takes two launches (up to four where tokens are drawn): ``logit_tiles`` multiplies and reduces each
vocabulary tile, ``decide_rows`` merges the tiles of a row in order.
"""

from __future__ import annotations

import torch
import triton

from kernels.fused.head_decide import decide_rows
from kernels.fused.head_plan import plan
from kernels.fused.head_scratch import VOCAB_TILE, HeadScratch
from kernels.fused.head_tiles import logit_tiles
from kernels.fused.launch import overlapped
from kernels.fused.layout import HeadRows, Predictions, Sampling
from kernels.fused.sampling import draw_reference, draw_rows
from kernels.linear import linear_rows


def head_rows(
    hidden_DE: torch.Tensor,
    weight_VE: torch.Tensor,
    rows: HeadRows,
    sampling: Sampling,
    mask_id: int,
    num_top: int,
    plain_confidence: bool,
    sampled: bool,
    limited: bool,
    scratch: HeadScratch,
    out: Predictions,
) -> None:
    """Decides a token for each of the first ``rows.count`` rows of normed hidden states and scatters the answers.

    Logits are float32, never rounded. Greedy rows take the largest, the lowest token of equals; where ``sampled``,
    rows with a temperature above 0 that are not marked greedy take the largest under Gumbel noise; where ``limited``,
    inside top-k and top-p. Confidence of a drawn token: its plain softmax probability where ``plain_confidence``, else
    its probability after temperature, top-k and top-p. The mask id counts in the softmax, but is never chosen nor kept.
    ``out``: confidence, the log-probabilities and ``invalid`` are reset here; other answers are left where no row asks.
    """
    num_rows, width = hidden_DE.shape
    vocab = weight_VE.shape[0]
    assert all(x.is_contiguous() for x in (hidden_DE, weight_VE, out.top_token_ATJ, out.top_logprob_ATJ))
    assert num_top < vocab
    num_branches, block = out.token_AT.shape
    num_tiles = triton.cdiv(vocab, VOCAB_TILE)
    keep = num_top > 0 or sampled
    assert scratch.num_rows * max(vocab, num_tiles) < 2**31
    for start in range(0, num_rows, scratch.num_rows):
        room = min(scratch.num_rows, num_rows - start)
        logit_tiles(
            hidden_DE, weight_VE, rows, mask_id, num_top, keep, start, scratch, out,
            plan(room, width, weight_VE.dtype),
        )  # fmt: skip
        if sampled:
            draw_rows(rows, sampling, start, vocab, plain_confidence, limited, scratch)
        decide_rows[(room,)](
            rows.count_1,
            rows.target_D,
            rows.slot_D,
            rows.greedy_D,
            sampling.temperature_S,
            scratch.logits_RV,
            scratch.best_RN,
            scratch.at_RN,
            scratch.sum_RN,
            scratch.mask_logit_R,
            scratch.value_RC,
            scratch.token_RC,
            scratch.mass_RC,
            out.token_AT,
            out.confidence_AT,
            out.top_token_ATJ,
            out.top_logprob_ATJ,
            out.next_AT,
            out.invalid_A,
            start,
            num_branches * block,
            V=vocab,
            NUM_TILES=num_tiles,
            NT=triton.next_power_of_2(num_tiles),
            T=block,
            J=num_top,
            JP=triton.next_power_of_2(max(num_top, 1)),
            C=scratch.value_RC.shape[1],
            KEEP=keep,
            SAMPLED=sampled,
            PLAIN=plain_confidence,
            BV=VOCAB_TILE,
            num_warps=4,
            **overlapped(hidden_DE),
        )


def head_rows_reference(
    hidden_DE: torch.Tensor,
    weight_VE: torch.Tensor,
    rows: HeadRows,
    sampling: Sampling,
    mask_id: int,
    num_top: int,
    plain_confidence: bool,
    sampled: bool,
    limited: bool,
    scratch: HeadScratch,
    out: Predictions,
) -> None:
    """``head_rows`` in plain torch. Of ``scratch`` only the number of rows is used."""
    out.confidence_AT.fill_(-torch.inf)
    out.top_logprob_ATJ.fill_(-torch.inf)
    out.invalid_A.zero_()
    num_at, block = out.token_AT.numel(), out.token_AT.shape[1]
    count, weight_VE = int(rows.count_1), weight_VE.float()
    for start in range(0, count, scratch.num_rows):
        at = slice(start, min(start + scratch.num_rows, count))
        logits_RV = linear_rows(hidden_DE[at].float(), weight_VE)
        total_R = logits_RV.logsumexp(-1)
        logits_RV[:, mask_id] = -torch.inf
        top_RJ, token_RJ = (x[:, : max(num_top, 1)] for x in logits_RV.sort(dim=-1, descending=True, stable=True))
        token_R, confidence_R = token_RJ[:, 0].clone(), (top_RJ[:, 0] - total_R).exp()
        if sampled:
            draw_reference(logits_RV, total_R, rows, sampling, at, plain_confidence, limited, token_R, confidence_R)
        target_R = rows.target_D[at].long()
        out.invalid_A[target_R[~total_R.isfinite()] % num_at // block] = 1
        here, after = target_R < num_at, target_R >= num_at
        target = target_R[here]
        out.token_AT.view(-1)[target] = token_R[here]
        out.confidence_AT.view(-1)[target] = confidence_R[here]
        if num_top:
            out.top_token_ATJ.view(num_at, num_top)[target] = token_RJ[here]
            out.top_logprob_ATJ.view(num_at, num_top)[target] = (top_RJ - total_R[:, None])[here]
        out.next_AT.view(-1)[target_R[after] - num_at] = token_R[after]
