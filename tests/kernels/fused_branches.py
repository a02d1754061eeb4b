"""Random branches, maps and addends for the row operations' tests; whatever is undefined holds garbage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.fused.layout import DENOISE, FINAL, VOID, Addend, Branches, Parts, RowMap
from tests.kernels.fused_inputs import DEVICE, poisoned

GARBAGE = 2**30
"""Far outside of every buffer."""


def make_branches(kind_SB: Sequence[Sequence[int]], block: int, vocab: int = 7) -> Branches:
    """Branches of given kinds; each draft's parent is half its number; the list holds the slots in reverse order."""
    kind = torch.tensor(kind_SB, dtype=torch.int32)
    num_slots, num_branches = kind.shape
    room = num_slots * num_branches
    index = torch.full_like(kind, GARBAGE)
    slot_A = torch.full((room,), GARBAGE, dtype=torch.int32)
    branch_A = slot_A.clone()
    live = [(s, b) for s in reversed(range(num_slots)) for b in range(num_branches) if kind[s, b] != VOID]
    for a, (s, b) in enumerate(live):
        index[s, b], slot_A[a], branch_A[a] = a, s, b
    parent = [b // 2 for b in range(num_branches)]
    ancestors = [1]
    for b in range(1, num_branches):
        ancestors.append(ancestors[parent[b]] | 1 << b)
    tokens = torch.randint(vocab, (num_slots, num_branches, block))
    # Most of a draft's tokens are its parent's.
    for b in range(1, num_branches):
        tokens[:, b] = torch.where(torch.rand(num_slots, block) < 0.7, tokens[:, parent[b]], tokens[:, b])
    fields = (
        tokens,
        kind,
        index,
        torch.tensor([len(live)], dtype=torch.int32),
        slot_A,
        branch_A,
        torch.randint(40, (num_slots,)),
        torch.tensor(parent, dtype=torch.int32),
        torch.tensor(ancestors),
    )
    return Branches(*(field.to(DEVICE) for field in fields))


def empty_map(branches: Branches) -> RowMap:
    """A cleared map."""
    num_slots, num_branches, block = branches.tokens_SBT.shape
    size = num_branches * block
    out = RowMap(
        poisoned(num_slots, block, dtype=torch.int64),
        poisoned(num_slots, num_branches, block, dtype=torch.int32),
        poisoned(1, dtype=torch.int32),
        poisoned(num_slots * size, dtype=torch.int32),
        poisoned(num_slots, dtype=torch.int32),
        poisoned(num_slots, size, dtype=torch.int32),
    )
    for tensor in (out.keep_ST, out.count_1, out.slot_count_S):
        tensor.zero_()
    return out


def positions(branches: Branches) -> list[tuple[int, int, int, int]]:
    """List position, slot, branch and block position of everything that is computed."""
    block = branches.tokens_SBT.shape[2]
    count = int(branches.num_live_1)
    slot, branch = branches.slot_A[:count].tolist(), branches.branch_A[:count].tolist()
    return [(a * block + t, slot[a], branch[a], t) for a in range(count) for t in range(block)]


def random_map(branches: Branches, share_folded: float, share_in_time: float = 0.0) -> RowMap:
    """A map that folds a share of the drafts' positions, and one of the main branches'; rows in random order."""
    out = empty_map(branches)
    out.row_SBT.fill_(GARBAGE)
    kept = []
    for p, s, b, t in positions(branches):
        share = share_folded if b else share_in_time
        if branches.kind_SB[s, b] != DENOISE or torch.rand(()) >= share:
            kept.append((p, s, b, t))
        elif b == 0:
            out.row_SBT[s, 0, t] = stored_row(branches, s, t)
    rows = torch.randperm(len(kept)).tolist()
    for row, (p, s, b, t) in zip(rows, kept, strict=True):
        out.keep_ST[s, t] |= 1 << b
        out.row_SBT[s, b, t], out.position_R[row] = row, p
        out.slot_rows_SX[s, out.slot_count_S[s]] = row
        out.slot_count_S[s] += 1
    out.count_1.fill_(len(kept))
    return out


def random_addend(branches: Branches, num_parts: int, width: int, rows: RowMap | None) -> Addend:
    """Partial sums for every row in use, NaN elsewhere. By position, some drafts' equal their parents'."""
    count = len(positions(branches)) if rows is None else int(rows.count_1)
    parts = poisoned(num_parts, branches.slot_A.shape[0] * branches.tokens_SBT.shape[2], width)
    parts[:, :count] = torch.randn(num_parts, count, width).to(DEVICE)
    for p, s, b, t in positions(branches):
        if rows is None and torch.rand(()) < 0.6:
            above = int(branches.index_SB[s, branches.parent_B[b]]) * branches.tokens_SBT.shape[2] + t
            parts[:, p] = parts[:, above]
    return Addend(Parts(parts), rows)


def counted(parts_KRN: torch.Tensor) -> Parts:
    """The same sums, followed by a place that is not used."""
    unused = torch.full_like(parts_KRN[:1], torch.nan)
    used_1 = torch.tensor([len(parts_KRN)], dtype=torch.int32, device=parts_KRN.device)
    return Parts(torch.cat([parts_KRN, unused]), used_1)


def stored_row(branches: Branches, slot: int, t: int) -> int:
    """Row of what is stored of a position."""
    num_slots, num_branches, block = branches.tokens_SBT.shape
    return num_slots * num_branches * block + slot * block + t


def source_of(rows: RowMap, branches: Branches, slot: int, branch: int, t: int) -> int:
    """Row that serves a position, found by walking up its ancestors."""
    while branch and not int(rows.keep_ST[slot, t]) >> branch & 1:
        branch = int(branches.parent_B[branch])
    return int(rows.row_SBT[slot, branch, t])


MIXED = [[DENOISE, DENOISE, DENOISE, FINAL, VOID], [VOID] * 5, [FINAL, VOID, VOID, VOID, VOID], [DENOISE] * 5]
"""Kinds of four slots with up to five branches."""
