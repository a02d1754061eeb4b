"""What an accepted branch leaves in the stored rows, and that attention from there has the bits it would have had."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.fused.arena import Arena, ArenaSize
from kernels.fused.block_attention import block_attention, block_attention_reference
from kernels.fused.layout import DENOISE, Branches, Parts, RowMap
from kernels.fused.prefix_attention import prefix_attention
from kernels.fused.prefix_state import PLANS
from kernels.fused.storing import store_accepted, store_accepted_reference
from tests.kernels.attention_inputs import Inputs, Shape, make_inputs
from tests.kernels.fused_branches import MIXED, make_branches, random_map, source_of, stored_row
from tests.kernels.fused_inputs import DEVICE, DTYPES, TOLERANCE, relative_error

LAYERS, HEADS, WIDTH, INNER, BLOCK = 3, (6, 2, 8), 24, 160, 4
FIELDS = ("stream_LKXE", "q_LXHD", "k_LXGD", "v_LXGD", "m_LCGXY", "l_LCGXY", "acc_LCGXYD", "parts_LM", "ffn_LZE")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_arena(branches: Branches, dtype: torch.dtype, split: bool) -> Arena:
    """Random numbers everywhere; NaN in the states of the other chunks."""
    num_slots, num_branches, block = branches.tokens_SBT.shape
    stored = num_slots * block
    size = ArenaSize(LAYERS, num_branches * stored, stored, WIDTH, INNER, *HEADS)
    arena = Arena.allocate(size, split, dtype, DEVICE)
    for name in FIELDS:
        getattr(arena, name).normal_()
    for name in FIELDS[4:7]:
        getattr(arena, name)[:, 1:] = torch.nan
    return arena


def stacked(maps: list[list[RowMap]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Maps [L][K] as the tensors of a forward."""
    keep = torch.stack([torch.stack([m.keep_ST for m in layer]) for layer in maps])
    rows = torch.stack([torch.stack([layer[k].row_SBT for layer in maps]) for k in range(2)])
    counts = torch.stack([torch.stack([torch.cat((m.count_1, m.slot_count_S)) for m in layer]) for layer in maps])
    return keep, rows, counts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kinds", [MIXED, [[DENOISE]] * 2], ids=["drafts", "alone"])
@pytest.mark.parametrize("is_counted", [True, False])
def test_each_position_takes_what_serves_the_accepted_branch(
    is_counted: bool, kinds: list[list[int]], dtype: torch.dtype
) -> None:
    branches = make_branches(kinds, BLOCK)
    maps = [[random_map(branches, 0.5, 0.5) for _ in range(2)] for _ in range(LAYERS)]
    accepted = [2, -1, -1, 4] if len(kinds) > 2 else [-1, 0]
    branch_S = torch.tensor(accepted, dtype=torch.int32, device=DEVICE)
    num_rows = len(branches.slot_A) * BLOCK
    start = make_arena(branches, dtype, split=False)
    down = start.parts(0, torch.empty(WIDTH, INNER, dtype=dtype))
    assert len(down.values_KRN) > 1
    if is_counted:
        start.used_L.copy_(torch.tensor([1, 2, 1]))
        down = replace(down, used_1=start.used_L[:1])
    for store in (store_accepted, store_accepted_reference):
        arena = replace(start, **{name: getattr(start, name).clone() for name in FIELDS})
        store(arena, *stacked(maps), branches, branch_S, down)
        want = {name: getattr(start, name).clone() for name in FIELDS}
        for layer in range(LAYERS):
            for slot, branch in enumerate(accepted):
                for t in range(BLOCK if branch >= 0 else 0):
                    put(want, layer, slot, branch, t, maps[layer], branches, parts_of(start, down, layer))
        for name in FIELDS:
            got = getattr(arena, name)
            if name in FIELDS[4:7]:
                # Nothing is there to store of a slot without a prefix.
                has_prefix = (branches.start_S > 0).repeat_interleave(BLOCK)
                got, want[name] = (
                    got[:, :1, :, num_rows:][:, :, :, has_prefix],
                    want[name][:, :1, :, num_rows:][:, :, :, has_prefix],
                )
            assert torch.equal(got, want[name]), name


def parts_of(arena: Arena, down: Parts, layer: int) -> Parts:
    values = arena.parts_LM[layer].as_strided(down.values_KRN.shape, down.values_KRN.stride())
    return Parts(values, None if down.used_1 is None else arena.used_L[layer : layer + 1])


def put(
    want: dict[str, torch.Tensor],
    layer: int,
    slot: int,
    branch: int,
    t: int,
    maps: list[RowMap],
    branches: Branches,
    down: Parts,
) -> None:
    """One position's stored rows, by the definition."""
    to = stored_row(branches, slot, t)
    for stage in range(2):
        row, at = source_of(maps[stage], branches, slot, branch, t), branch
        if row >= len(branches.slot_A) * BLOCK:
            continue
        while not int(maps[stage].keep_ST[slot, t]) >> at & 1:
            at = int(branches.parent_B[at])
        stream = want["stream_LKXE"][layer, stage]
        stream[to] = stream[int(branches.index_SB[slot, at]) * BLOCK + t]
        if stage == 1:
            want["ffn_LZE"][layer, slot * BLOCK + t] = down.total(torch.tensor([row], device=DEVICE))[0]
            continue
        for name in FIELDS[1:4]:
            want[name][layer, to] = want[name][layer, row]
        for name in FIELDS[4:7]:
            want[name][layer, 0, :, to] = want[name][layer, 0, :, row]


def arena_of(x: Inputs) -> Arena:
    """One layer that holds these queries, keys and values."""
    num_rows = len(x.branches.slot_A) * x.branches.tokens_SBT.shape[2]
    heads = (x.q_RHD.shape[1], *x.k_RGD.shape[1:])
    size = ArenaSize(1, num_rows, len(x.q_RHD) - num_rows, 16, 32, *heads)
    arena = Arena.allocate(size, True, x.q_RHD.dtype, DEVICE)
    for to, source in ((arena.q_LXHD, x.q_RHD), (arena.k_LXGD, x.k_RGD), (arena.v_LXGD, x.v_RGD)):
        to[0] = source
    for name in ("m_LCGXY", "l_LCGXY", "acc_LCGXYD", "stream_LKXE", "parts_LM", "ffn_LZE"):
        getattr(arena, name).fill_(torch.nan)
    return arena


def attend(x: Inputs, arena: Arena, rows: RowMap) -> torch.Tensor:
    out = x.output()
    pages = x.k_PWGD, x.v_PWGD, x.page_table_SP
    q, k, v = arena.q_LXHD[0], arena.k_LXGD[0], arena.v_LXGD[0]
    prefix_attention(q, rows, *pages, x.branches.start_S, x.scale, arena.prefix(0))
    block_attention(q, k, v, arena.prefix(0), rows, x.branches, q.shape[0], x.scale, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_from_stored_rows_has_the_same_bits(dtype: torch.dtype) -> None:
    """A branch is computed, accepted and stored; then main branches fold altogether, and drafts on them."""
    shape = Shape(num_heads=4, num_kv=2, head_dim=24, num_branches=3, block=8, folded=0.5, in_time=1e-9)
    # Short, of one chunk and of several.
    x = make_inputs([0, 100, 700], shape, dtype, seed=2)
    x.branches.kind_SB.fill_(DENOISE)
    arena, block, num_slots = arena_of(x), shape.block, 3
    plan = replace(PLANS[dtype], keys_a_tile=1)
    arena = replace(arena, plan=plan)
    rows = x.rows
    before = attend(x, arena, rows)
    assert bool(arena.m_LCGXY[0, 1].isfinite().any()), "no chunks were side by side"
    accepted = [0, 2, 1]
    branch_S = torch.tensor(accepted, dtype=torch.int32, device=DEVICE)
    counts = torch.cat((rows.count_1, rows.slot_count_S)).expand(1, 2, -1).contiguous()
    down = arena.parts(0, torch.empty(16, 32, dtype=dtype))
    maps = rows.keep_ST.expand(1, 2, -1, -1).contiguous(), rows.row_SBT.expand(2, 1, -1, -1, -1).contiguous()
    store_accepted(arena, *maps, counts, x.branches, branch_S, down)
    # Of the recomputed rows nothing is left that could be read.
    want = torch.stack([position_rows(before, x, slot, branch) for slot, branch in enumerate(accepted)])
    stored_ST = (arena.num_rows + torch.arange(num_slots * block, device=DEVICE)).view(num_slots, block)
    for arranged in (arena.q_LXHD, arena.k_LXGD, arena.v_LXGD):
        arranged[:, : arena.num_rows] = torch.nan
    for states in (arena.m_LCGXY, arena.l_LCGXY, arena.acc_LCGXYD):
        states[:, :, :, : arena.num_rows] = torch.nan
    empty = replace(
        rows,
        keep_ST=torch.zeros_like(rows.keep_ST),
        row_SBT=torch.cat((stored_ST[:, None].int(), torch.full_like(rows.row_SBT[:, 1:], -(2**30))), 1),
        count_1=torch.zeros_like(rows.count_1),
        slot_count_S=torch.zeros_like(rows.slot_count_S),
    )
    after = attend(x, arena, empty)
    for slot in range(num_slots):
        for branch in range(shape.num_branches):
            assert torch.equal(position_rows(after, x, slot, branch), want[slot])


def position_rows(out: torch.Tensor, x: Inputs, slot: int, branch: int) -> torch.Tensor:
    """A branch's part of what attention writes."""
    block = x.branches.tokens_SBT.shape[2]
    at = int(x.branches.index_SB[slot, branch]) * block
    return out[at : at + block]


@pytest.mark.parametrize("dtype", DTYPES)
def test_main_branches_folded_in_part(dtype: torch.dtype) -> None:
    """Against the reference, whose states know nothing of chunks: some rows stored, some of this step."""
    x = make_inputs([0, 130, 300], Shape(in_time=0.6, block=6), dtype, seed=4)
    num_rows = len(x.branches.slot_A) * 6
    stored = x.source_AT >= num_rows
    assert bool(stored.any())
    assert not bool(stored.all())
    split, whole = x.state(True, replace(PLANS[dtype], keys_a_tile=1)), x.state(False)
    for state in (split, whole):
        prefix_attention(*x.prefix_arguments(), state)
        for values in (state.m_CGRY, state.l_CGRY, state.acc_CGRYD):
            values[0][:, num_rows:] = torch.rand(
                values[0][:, num_rows:].shape, generator=torch.Generator().manual_seed(1)
            ).to(DEVICE)
    outs = [x.output() for _ in range(3)]
    block_attention(*x.block_arguments(split, 6), outs[0])
    block_attention(*x.block_arguments(whole, 6), outs[1])
    block_attention_reference(*x.block_arguments(whole, 6), outs[2])
    assert torch.equal(outs[0].nan_to_num(), outs[1].nan_to_num())
    written = ~outs[2].isnan()
    assert torch.equal(~outs[1].isnan(), written)
    assert relative_error(outs[1][written], outs[2][written]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_the_sub_block_cache_queries_are_the_rows(dtype: torch.dtype) -> None:
    """The same output as by list position, at the rows of the positions that have one."""
    shape = Shape(num_branches=1, in_time=0.5, block=8)
    x = make_inputs([0, 70], shape, dtype, seed=5)
    state, by_position = x.state(False), x.output()
    prefix_attention(*x.prefix_arguments(), state)
    for states in (state.m_CGRY, state.l_CGRY, state.acc_CGRYD):
        states[0][:, len(by_position) :] = 1.0
    block_attention(*x.block_arguments(state, 8), by_position)
    own = x.source_AT.flatten() < len(by_position)
    assert bool(own.any())
    assert not bool(own.all())
    # A query needs its own row alone.
    queries = x.q_RHD[: len(by_position)].contiguous()
    x = replace(x, q_RHD=queries)
    state = x.state(False)
    prefix_attention(*x.prefix_arguments(), state)
    for attend_rows in (block_attention, block_attention_reference):
        out = x.output()
        attend_rows(*x.block_arguments(state, 8), out, by_row=True)
        rows = x.source_AT.flatten()[own]
        assert relative_error(out[rows], by_position[own]) < TOLERANCE[dtype]
        assert int(out.isnan().any(-1).sum()) == int((~own).sum())
