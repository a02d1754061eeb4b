"""The fused attention over prefix and block: Triton, its torch reference, the plain formula and the torch engine's."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.attention import merge_block_attention
from kernels.attention import prefix_attention as oracle_prefix_attention
from kernels.fused.block_attention import block_attention, block_attention_reference
from kernels.fused.layout import FINAL
from kernels.fused.prefix_attention import prefix_attention, prefix_attention_reference
from kernels.fused.prefix_state import MAX_CHUNKS, PLANS, PrefixState, chunk_keys
from tests.kernels.attention_inputs import WIDTH, Inputs, Shape, make_inputs
from tests.kernels.fused_inputs import DEVICE, DTYPES, TOLERANCE, on_gpu, relative_error


def exact(x: Inputs, unit: int, length_S: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax over prefix and block at once in float64; NaN where there is no position."""
    num_heads = x.q_RHD.shape[1]
    group = num_heads // x.k_RGD.shape[1]
    block = x.source_AT.shape[1]
    out = x.output().double()
    for a in range(x.num_live):
        slot, branch = int(x.branches.slot_A[a]), int(x.branches.branch_A[a])
        length = block if length_S is None else int(length_S[slot])
        at = torch.arange(int(x.branches.start_S[slot]), device=out.device)
        pages = x.page_table_SP[slot, at // WIDTH], at % WIDTH
        source = x.source_AT[a, :length]
        keys = torch.cat((x.k_PWGD[pages], x.k_RGD[source])).double().repeat_interleave(group, 1)
        values = torch.cat((x.v_PWGD[pages], x.v_RGD[source])).double().repeat_interleave(group, 1)
        scores = torch.einsum("thd,jhd->htj", x.q_RHD[source].double(), keys) * x.scale
        step = unit if int(x.branches.kind_SB[slot, branch]) == FINAL else block
        for t in range(length):
            scores[:, t, len(at) + min(length, (t // step + 1) * step) :] = -torch.inf
        attended = torch.einsum("htj,jhd->thd", scores.softmax(-1), values)
        out[a * block : a * block + length] = attended.flatten(1)
    return out


def run(x: Inputs, unit: int, split: bool, length_S: torch.Tensor | None = None) -> tuple[PrefixState, torch.Tensor]:
    state, out = x.state(split), x.output()
    prefix_attention(*x.prefix_arguments(), state)
    block_attention(*x.block_arguments(state, unit), out, length_S)
    return state, out


def run_reference(x: Inputs, unit: int, length_S: torch.Tensor | None = None) -> tuple[PrefixState, torch.Tensor]:
    state, out = x.state(split=False), x.output()
    prefix_attention_reference(*x.prefix_arguments(), state)
    block_attention_reference(*x.block_arguments(state, unit), out, length_S)
    return state, out


def merged(x: Inputs, state: PrefixState) -> list[torch.Tensor]:
    """The states of every row as one: maximum, sum and weighted values, equal numbers for the rows left alone."""
    written = ~state.m_CGRY.isnan()
    assert torch.equal(written[0], x.has_prefix_R[None, :, None].expand_as(written[0]))
    m_CGRY = state.m_CGRY.masked_fill(~written, -torch.inf)
    m = m_CGRY.amax(0)
    weights = torch.exp2(m_CGRY - m).nan_to_num()
    total = (state.l_CGRY.nan_to_num() * weights).sum(0)
    acc = (state.acc_CGRYD.nan_to_num() * weights[..., None]).sum(0)
    return [m.masked_fill(~written[0], 0.0), total, acc]


def check(x: Inputs, unit: int, length_S: torch.Tensor | None = None) -> None:
    """All three agree; what does not exist is left alone; splitting changes no bit."""
    tolerance = TOLERANCE[x.q_RHD.dtype]
    state, out = run(x, unit, split=True, length_S=length_S)
    state_reference, out_reference = run_reference(x, unit, length_S)
    want = exact(x, unit, length_S)
    written = ~want.isnan()
    for got in (out, out_reference):
        assert torch.equal(~got.isnan(), written)
        assert relative_error(got[written], want[written]) < tolerance
    state_whole, out_whole = run(x, unit, split=False, length_S=length_S)
    wanted = merged(x, state_reference)
    for tried in (state, state_whole):
        for got, reference in zip(merged(x, tried), wanted, strict=True):
            assert relative_error(got, reference) < tolerance
    assert torch.equal(out.nan_to_num(), out_whole.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("prefix_lens", "shape"),
    [
        ([0, 31], Shape()),
        ([1, 0, 270], Shape(num_heads=5, num_kv=1, head_dim=24, num_branches=2)),
        ([0], Shape(num_heads=6, num_kv=2, head_dim=24, num_branches=1, block=16)),
        ([130], Shape(num_heads=7, num_kv=1, num_branches=5, block=4)),
        ([33], Shape(folded=1.0)),
        ([40], Shape(folded=0.0, block=5)),
    ],
    ids=["short", "head-24", "one-branch", "void-branch", "all-folded", "none-folded"],
)
def test_agrees_with_the_formula(prefix_lens: list[int], shape: Shape, dtype: torch.dtype) -> None:
    check(make_inputs(prefix_lens, shape, dtype), unit=shape.block)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit", [1, 4, 8])
def test_final_branches_have_their_own_mask(unit: int, dtype: torch.dtype) -> None:
    check(make_inputs([0, 20], Shape(), dtype, seed=1), unit)


@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_beyond_the_length_do_not_exist(dtype: torch.dtype) -> None:
    """Prefill: one final branch, longer than a tile of keys, whose end may be empty."""
    shape = Shape(num_heads=2, num_kv=1, num_branches=1, block=40)
    x = make_inputs([17], shape, dtype)
    x.branches.kind_SB.fill_(FINAL)
    for length in (1, 33, 40):
        length_S = torch.tensor([length], device=x.q_RHD.device)
        check(x, unit=8 if length == 33 else 1, length_S=length_S)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_prefix(dtype: torch.dtype) -> None:
    shape = Shape(num_heads=2, num_kv=1, num_branches=2, block=4)
    for length in (1024, 1025, 4095):
        check(make_inputs([length], shape, dtype), unit=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_who_merges_the_chunks_changes_no_bit(dtype: torch.dtype) -> None:
    """Slots with few rows for their prefix leave a state a chunk, slots with many one, and the outputs are the same."""
    plan = PLANS[dtype]
    # Drafts' positions in the second slot only, so many that they make another tile of queries.
    x = make_inputs([130, 270], Shape(num_heads=2, num_kv=1, block=plan.query_tile // 2, folded=0.0), dtype, seed=3)
    group, num_slots = 2, 2
    tiles = [-(-n * group // plan.query_tile) * num_slots for n in x.rows.slot_count_S.tolist()]
    assert tiles[0] < tiles[1]
    outputs = []
    cuts = ((1, 0, []), (tiles[1], 0, [0]), (tiles[1] + 1, 0, [0, 1]), (tiles[1] + 1, 269 // tiles[1], [1]))
    for split_tiles, keys_a_tile, slots in cuts:
        mine = dataclasses.replace(plan, min_chunk=64, split_tiles=split_tiles, keys_a_tile=keys_a_tile)
        state = x.state(split=True, plan=mine)
        prefix_attention(*x.prefix_arguments(), state)
        assert x.slots_with_chunks(state) == slots
        out = x.output()
        block_attention(*x.block_arguments(state, 8), out)
        outputs.append(out.nan_to_num())
    for out in outputs[1:]:
        assert torch.equal(outputs[0], out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_free_choices_of_a_plan_change_no_bit(dtype: torch.dtype) -> None:
    """Tall tiles, few or many programs, registers; the compiler must give a row the same instructions in each."""
    real = DEVICE == "cuda"
    shape = Shape(12, 2, 128, num_branches=9, block=32, folded=0.8) if real else Shape(block=12)
    x = make_inputs([1100, 31] if real else [150, 40], shape, dtype)
    changes: list[dict[str, int | None]] = [{}, {"block_programs": 1}, {"block_programs": 1, "keys_a_tile": 1000}]
    if real and dtype == torch.bfloat16:
        tall = {"query_tile": 128, "num_warps": 8, "num_stages": 2}
        changes += [tall, {**tall, "split_tiles": 0}, {"block_registers": None}, {"num_stages": 2}]
    outputs = []
    for change in changes:
        state, out = x.state(split=True, plan=dataclasses.replace(PLANS[dtype], **change)), x.output()
        prefix_attention(*x.prefix_arguments(), state)
        block_attention(*x.block_arguments(state, 12), out)
        outputs.append(out.nan_to_num())
    assert [torch.equal(outputs[0], out) for out in outputs] == [True] * len(outputs)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 1024, 1025, 4095, 4096, 100_000])
def test_chunks_are_few_and_cover_the_prefix(length: int) -> None:
    size = chunk_keys(PLANS[torch.bfloat16], length)
    assert size % PLANS[torch.bfloat16].key_tile == 0
    assert (-(-length // size) - 1) * size < length
    assert -(-length // size) <= MAX_CHUNKS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", [False, True])
def test_a_row_depends_on_nothing_but_itself(split: bool, dtype: torch.dtype) -> None:
    """The main branch alone, on its rows in another order, has the bits that it has among its drafts."""
    x = make_inputs([150, 40], Shape(block=12), dtype)
    state, out = run(x, 12, split)
    slot = 0
    listed = int(((x.branches.slot_A == slot) & (x.branches.branch_A == 0)).nonzero()[0, 0])
    main_rows = x.rows.row_SBT[slot, 0]
    slot_rows = torch.full_like(x.rows.slot_rows_SX, 1 << 29)
    slot_rows[slot, : len(main_rows)] = main_rows.flip(0)
    counts = torch.tensor([len(main_rows), 0], dtype=torch.int32, device=main_rows.device)
    rows = dataclasses.replace(x.rows, slot_rows_SX=slot_rows, slot_count_S=counts)
    branches = dataclasses.replace(
        x.branches,
        num_live_1=torch.ones_like(x.branches.num_live_1),
        slot_A=torch.full_like(x.branches.slot_A, slot),
        branch_A=torch.zeros_like(x.branches.branch_A),
    )
    state_alone, out_alone = run(dataclasses.replace(x, rows=rows, branches=branches), 12, split)
    served = main_rows.long()
    for name in ("m_CGRY", "l_CGRY", "acc_CGRYD"):
        alone, among = (getattr(y, name)[:, :, served].nan_to_num() for y in (state_alone, state))
        assert torch.equal(alone, among)
    assert torch.equal(out_alone[:12], out[listed * 12 : listed * 12 + 12])
    assert out_alone[12:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_the_torch_engine(dtype: torch.dtype) -> None:
    shape = Shape(num_branches=4)
    x = make_inputs([70, 9], shape, dtype, seed=2)
    _, out = run(x, 1, split=True)
    count_S = x.rows.slot_count_S.long()
    order = torch.cat([x.rows.slot_rows_SX[s, : count_S[s]].long() for s in range(2)])
    slot_R = torch.arange(2, device=order.device).repeat_interleave(count_S)
    place_R = torch.empty(len(x.q_RHD), dtype=torch.long, device=order.device)
    place_R[order] = torch.arange(len(order), device=order.device)
    q, k, v = (y[order] for y in (x.q_RHD, x.k_RGD, x.v_RGD))
    pages = x.k_PWGD, x.v_PWGD, x.page_table_SP
    prefix = oracle_prefix_attention(q, slot_R, *pages, x.branches.start_S, x.scale)
    live = slice(0, x.num_live)
    final_A = x.branches.kind_SB[x.branches.slot_A[live].long(), x.branches.branch_A[live].long()] == FINAL
    causal_TT = torch.ones((shape.block, shape.block), dtype=torch.bool, device=order.device).tril()
    mask_ATT = causal_TT | ~final_A[:, None, None]
    want = merge_block_attention(q, k, v, prefix, place_R[x.source_AT], mask_ATT, x.scale)
    got = out[: x.num_live * shape.block]
    assert relative_error(got, want.flatten(2).flatten(0, 1)) < TOLERANCE[dtype]


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv", "head_dim"), [(32, 8, 128), (12, 2, 128), (28, 4, 128), (8, 4, 64)])
def test_real_shapes(num_heads: int, num_kv: int, head_dim: int, dtype: torch.dtype) -> None:
    shape = Shape(num_heads, num_kv, head_dim, num_branches=9, block=32, folded=0.8)
    for prefix_lens in ([500], [31, 4095, 0, 1100]):
        check(make_inputs(prefix_lens, shape, dtype), unit=32)
