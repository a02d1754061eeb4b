"""Random inputs for the tests of the fused attention, with garbage wherever the layout leaves it undefined."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.fused.layout import DENOISE, FINAL, VOID, Branches, RowMap
from kernels.fused.prefix_state import AttentionPlan, PrefixState
from tests.kernels.fused_inputs import DEVICE, poisoned

GARBAGE = 1 << 29
"""An index that faults, or shows, if it is followed."""
WIDTH = 32
"""Positions of a page."""


@dataclass(frozen=True)
class Shape:
    """Heads and branches; ``folded`` is the share of the drafts' positions that inherit, ``in_time`` that of the main
    branches' which are served by stored rows."""

    num_heads: int = 4
    num_kv: int = 2
    head_dim: int = 16
    num_branches: int = 3
    block: int = 8
    folded: float = 0.5
    in_time: float = 0.0


@dataclass(frozen=True)
class Inputs:
    q_RHD: torch.Tensor
    k_RGD: torch.Tensor
    v_RGD: torch.Tensor
    k_PWGD: torch.Tensor
    v_PWGD: torch.Tensor
    page_table_SP: torch.Tensor
    rows: RowMap
    branches: Branches
    source_AT: torch.Tensor
    """Row of every position of the branches in the list."""

    @property
    def scale(self) -> float:
        return self.q_RHD.shape[-1] ** -0.5

    @property
    def num_live(self) -> int:
        return len(self.source_AT)

    @property
    def has_prefix_R(self) -> torch.Tensor:
        """Rows of slots with a prefix."""
        found = torch.zeros(len(self.q_RHD), dtype=torch.bool, device=self.q_RHD.device)
        for s, count in enumerate(self.rows.slot_count_S.tolist()):
            found[self.rows.slot_rows_SX[s, :count].long()] = bool(self.branches.start_S[s] > 0)
        return found

    def slots_with_chunks(self, state: PrefixState) -> list[int]:
        """Slots whose rows have more than one state."""
        counts = enumerate(self.rows.slot_count_S.tolist())
        return [s for s, n in counts if not state.m_CGRY[1][:, self.rows.slot_rows_SX[s, :n].long()].isnan().all()]

    def state(self, split: bool, plan: AttentionPlan | None = None) -> PrefixState:
        """A poisoned state."""
        state = PrefixState.allocate(self.q_RHD, self.k_RGD.shape[1], split, plan)
        for x in (state.m_CGRY, state.l_CGRY, state.acc_CGRYD):
            x.fill_(torch.nan)
        return state

    def output(self) -> torch.Tensor:
        num_heads, head_dim = self.q_RHD.shape[1:]
        num_positions = len(self.branches.slot_A) * self.branches.tokens_SBT.shape[2]
        return poisoned(num_positions, num_heads * head_dim, dtype=self.q_RHD.dtype)

    def prefix_arguments(self) -> tuple[object, ...]:
        pages = self.k_PWGD, self.v_PWGD, self.page_table_SP
        return self.q_RHD, self.rows, *pages, self.branches.start_S, self.scale

    def block_arguments(self, state: PrefixState, unit: int) -> tuple[object, ...]:
        return self.q_RHD, self.k_RGD, self.v_RGD, state, self.rows, self.branches, unit, self.scale


def make_inputs(prefix_lens: list[int], shape: Shape, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """One slot a prefix length; the last draft is final, another one void where it has no children."""
    random = torch.Generator().manual_seed(seed)
    num_slots, num_branches, block = len(prefix_lens), shape.num_branches, shape.block
    parents = [0, *(int(torch.randint(b, (), generator=random)) for b in range(1, num_branches))]
    ancestors = [1]
    for b in range(1, num_branches):
        ancestors.append(ancestors[parents[b]] | 1 << b)
    kind_SB = torch.full((num_slots, num_branches), DENOISE, dtype=torch.int32)
    if num_branches > 1:
        kind_SB[:, -1] = FINAL
    childless = set(range(1, num_branches - 1)) - set(parents)
    if childless:
        kind_SB[0, max(childless)] = VOID
    slot_A, branch_A, index_SB = _list(kind_SB, random)
    folds = torch.rand((num_slots, num_branches, block), generator=random) < shape.folded
    kept_SBT = (~folds | (kind_SB == FINAL)[..., None]) & (kind_SB != VOID)[..., None]
    kept_SBT[:, 0] = torch.rand((num_slots, block), generator=random) >= shape.in_time
    rows, row_SBT = _rows(kept_SBT, index_SB, random)

    source = []
    for s, b in zip(slot_A, branch_A, strict=True):
        sources = []
        for t in range(block):
            branch = b
            while branch and not kept_SBT[s, branch, t]:
                branch = parents[branch]
            sources.append(int(row_SBT[s, branch, t]))
        source.append(sources)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=random).to(DEVICE, dtype)

    def padded(x: list[int]) -> torch.Tensor:
        return torch.tensor(x + [GARBAGE] * (num_slots * num_branches - len(x)), dtype=torch.int32, device=DEVICE)

    branches = Branches(
        tokens_SBT=torch.zeros((num_slots, num_branches, block), dtype=torch.long, device=DEVICE),
        kind_SB=kind_SB.to(DEVICE),
        index_SB=index_SB.to(DEVICE),
        num_live_1=torch.tensor([len(slot_A)], dtype=torch.int32, device=DEVICE),
        slot_A=padded(slot_A),
        branch_A=padded(branch_A),
        start_S=torch.tensor(prefix_lens, device=DEVICE),
        parent_B=torch.tensor(parents, dtype=torch.int32, device=DEVICE),
        ancestors_B=torch.tensor(ancestors, device=DEVICE),
    )
    # Stored rows, where there are any, stand behind the room of the others.
    room = num_slots * (num_branches + (shape.in_time > 0)) * block
    pages_each = -(-max(prefix_lens) // WIDTH) + 1
    used = torch.tensor([-(-length // WIDTH) for length in prefix_lens])
    table_SP = torch.randperm(num_slots * pages_each, generator=random).view(num_slots, pages_each)
    table_SP[torch.arange(pages_each) >= used[:, None]] = GARBAGE
    pages = (num_slots * pages_each, WIDTH, shape.num_kv, shape.head_dim)
    return Inputs(
        q_RHD=numbers(room, shape.num_heads, shape.head_dim),
        k_RGD=numbers(room, shape.num_kv, shape.head_dim),
        v_RGD=numbers(room, shape.num_kv, shape.head_dim),
        k_PWGD=_poison_end(numbers(*pages), table_SP, prefix_lens),
        v_PWGD=_poison_end(numbers(*pages), table_SP, prefix_lens),
        page_table_SP=table_SP.to(DEVICE),
        rows=rows,
        branches=branches,
        source_AT=torch.tensor(source, device=DEVICE),
    )


def _list(kind_SB: torch.Tensor, random: torch.Generator) -> tuple[list[int], list[int], torch.Tensor]:
    """Slots in any order, the branches of each in theirs."""
    num_slots, num_branches = kind_SB.shape
    index_SB = torch.full((num_slots, num_branches), GARBAGE, dtype=torch.int32)
    slots, branches = [], []
    for s in torch.randperm(num_slots, generator=random).tolist():
        for b in range(num_branches):
            if kind_SB[s, b] != VOID:
                index_SB[s, b] = len(slots)
                slots.append(s)
                branches.append(b)
    return slots, branches, index_SB


def _rows(kept_SBT: torch.Tensor, index_SB: torch.Tensor, random: torch.Generator) -> tuple[RowMap, torch.Tensor]:
    """Kept positions on shuffled rows; what is left of the main branches on their stored ones."""
    num_slots, num_branches, block = kept_SBT.shape
    room = num_slots * num_branches * block
    row_SBT = torch.full(kept_SBT.shape, GARBAGE, dtype=torch.int32)
    stored_ST = (room + torch.arange(num_slots * block)).int().view(num_slots, block)
    row_SBT[:, 0] = torch.where(kept_SBT[:, 0], GARBAGE, stored_ST)
    position_R = torch.full((room,), GARBAGE, dtype=torch.int32)
    slot_rows_SX = torch.full((num_slots, num_branches * block), GARBAGE, dtype=torch.int32)
    count_S = torch.zeros(num_slots, dtype=torch.int32)
    kept = kept_SBT.nonzero()
    for row, i in enumerate(torch.randperm(len(kept), generator=random).tolist()):
        s, b, t = kept[i].tolist()
        row_SBT[s, b, t] = row
        position_R[row] = int(index_SB[s, b]) * block + t
        slot_rows_SX[s, count_S[s]] = row
        count_S[s] += 1
    keep_ST = (kept_SBT.long() << torch.arange(num_branches)[:, None]).sum(1)
    count_1 = torch.tensor([len(kept)], dtype=torch.int32)
    tensors = (keep_ST, row_SBT, count_1, position_R, count_S, slot_rows_SX)
    return RowMap(*(x.to(DEVICE) for x in tensors)), row_SBT


def _poison_end(pages: torch.Tensor, table_SP: torch.Tensor, prefix_lens: list[int]) -> torch.Tensor:
    """NaN at the positions of a slot's last page that are not cached yet."""
    for s, length in enumerate(prefix_lens):
        if length % WIDTH:
            pages[table_SP[s, length // WIDTH], length % WIDTH :] = torch.nan
    return pages
