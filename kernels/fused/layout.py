"""The tensors that the fused kernels share: branches of a step, rows they recompute, rows of the LM head.

S slots, B branches a slot (0 the main one), T block positions, A = S * B room for computed branches, X = B * T,
R recomputed rows, D head rows, J kept tokens. With folding in time S * T stored rows follow the room for recomputed
ones: row ``A * T + s * T + t`` holds what the state accepted last has for position t of slot s. Everything is made
once, for the largest step; how much of it a step uses is a count on the device, and what lies beyond the count is
undefined.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

VOID, DENOISE, FINAL = 0, 1, 2
"""Kinds of a branch: not computed, being denoised, a finished block."""


@dataclass(frozen=True, slots=True)
class Branches:
    """Branches by slot and number, and the list of those that are computed.

    A position of the list is ``p = a * T + t``. A branch's parent is never void unless the branch is.
    """

    tokens_SBT: torch.Tensor
    """int64."""
    kind_SB: torch.Tensor
    """int32: VOID, DENOISE or FINAL."""
    index_SB: torch.Tensor
    """int32: place in the list; undefined where void."""
    num_live_1: torch.Tensor
    """int32: length of the list."""
    slot_A: torch.Tensor
    """int32."""
    branch_A: torch.Tensor
    """int32. The branches of one slot stand together, in ascending order; slots stand in any order."""
    start_S: torch.Tensor
    """int64: first position of the slot's block, which is also the length of its prefix."""
    parent_B: torch.Tensor
    """int32: branch to fold on; 0 for the main one."""
    ancestors_B: torch.Tensor
    """int64 bit set of a branch's ancestors along ``parent_B``, itself included; bit n is branch n."""


@dataclass(frozen=True, slots=True)
class RowMap:
    """Which positions are recomputed in one layer, and the row where each result lies.

    A folded position's result is that of its nearest kept ancestor: since parents have lower numbers than children,
    branch ``highest bit of (keep[s, t] & ancestors[b])``, row ``row[s, that branch, t]``. Where there is none, the main
    branch itself was folded, in time: then ``row[s, 0, t]`` is the stored row. Rows stand in no particular
    order: a row's result depends on nothing but itself. ``keep``, ``count`` and ``slot_count`` must be zero before
    ``gate_rows`` fills the map.
    """

    keep_ST: torch.Tensor
    """int64 bit set of the branches that are recomputed at a position."""
    row_SBT: torch.Tensor
    """int32: row of a kept position, and of each of the main branch; undefined elsewhere."""
    count_1: torch.Tensor
    """int32: number of rows."""
    position_R: torch.Tensor
    """int32: list position ``p`` of each row."""
    slot_count_S: torch.Tensor
    """int32: rows of each slot."""
    slot_rows_SX: torch.Tensor
    """int32: the rows of each slot, ``slot_count`` of them."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The output of a projection: K partial sums over slices of the inner dimension, to be added in order."""

    values_KRN: torch.Tensor
    """float32; rows and columns are contiguous."""
    used_1: torch.Tensor | None = None
    """int32: how many of the sums there are. The projection decides by the number of rows: with few, whose sums must
    end before the next one's place, side by side; else all in the first place. None: K."""

    @property
    def stride(self) -> int:
        """Rows from one sum to the next."""
        return self.values_KRN.stride(0) // self.values_KRN.shape[2]

    def total(self, rows_N: torch.Tensor | slice) -> torch.Tensor:
        """The sums of some rows n added in order, float32 [n, N]; waits for ``used_1``."""
        used = len(self.values_KRN) if self.used_1 is None else int(self.used_1)
        first, *others = (part_RN[rows_N] for part_RN in self.values_KRN[:used])
        for part in others:
            first = first + part
        return first


@dataclass(frozen=True, slots=True)
class Addend:
    """The output of a projection, to be added to the residual stream.

    Where ``rows`` is None the row of list position p is p itself, otherwise the position's source row by that map.
    """

    parts: Parts
    rows: RowMap | None
    stored_XE: torch.Tensor | None = None
    """float32, with folding in time: the sums of the stored rows, which follow the parts' rows."""

    def total(self, rows_N: torch.Tensor) -> torch.Tensor:
        """What is added by some rows, float32 [n, E]; int64 ``rows_N``."""
        if self.stored_XE is None:
            return self.parts.total(rows_N)
        room = self.parts.values_KRN.shape[1]
        is_stored = rows_N >= room
        stored = self.stored_XE[torch.where(is_stored, rows_N - room, 0)]
        return torch.where(is_stored[:, None], stored, self.parts.total(torch.where(is_stored, 0, rows_N)))


@dataclass(frozen=True, slots=True)
class TimeGate:
    """When a position of the main branch inherits from the state accepted before: the gate's side."""

    delta: float
    valid_S: torch.Tensor
    """int32: 1 where the slot's stored rows may be inherited from in this step."""
    skips: bool = False
    """The sub-block cache: a position of a main branch that the given map folds is left out altogether; nothing but its
    stored row's key and value is asked for."""


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Positions for which the LM head decides a token, and where the answer goes."""

    count_1: torch.Tensor
    """int32."""
    hidden_D: torch.Tensor
    """int32: list position whose hidden state predicts."""
    target_D: torch.Tensor
    """int32: ``p`` for the masked position p; ``A * T + p`` for the token that follows position p of a final branch."""
    slot_D: torch.Tensor
    """int32."""
    position_D: torch.Tensor
    """int32: absolute position of the predicted token; keys its noise."""
    masks_left_D: torch.Tensor
    """int32: masks in the branch's block; keys the noise."""
    greedy_D: torch.Tensor
    """int32: 1 where the argmax is wanted whatever the row's temperature."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings and noise key of each slot; temperature 0 is greedy."""

    temperature_S: torch.Tensor
    """float32."""
    top_p_S: torch.Tensor
    """float32; 1 keeps everything."""
    top_k_S: torch.Tensor
    """int64; 0 keeps everything."""
    key_S2: torch.Tensor
    """int64, two words below 2**32."""
    sample_S: torch.Tensor
    """int64."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """Answers of the LM head by list position. Where no head row asked, the two probabilities are -inf."""

    token_AT: torch.Tensor
    """int64."""
    confidence_AT: torch.Tensor
    """float32."""
    top_token_ATJ: torch.Tensor
    """int64: the J most likely tokens at temperature 1, best first, without the mask id."""
    top_logprob_ATJ: torch.Tensor
    """float32."""
    next_AT: torch.Tensor
    """int64: the token that follows each position of a final branch (only where asked for)."""
    invalid_A: torch.Tensor
    """int32: 1 where a head row of the branch had NaN or infinite logits."""
