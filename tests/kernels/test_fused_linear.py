"""Projections of compacted rows: against the reference and float64, and that a row's bits know no neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.fused import linear
from kernels.fused.layout import Parts
from kernels.fused.linear_plan import (
    HALF,
    NUM_SMS,
    PARALLEL_ROWS,
    SIDE_BY_SIDE_ROWS,
    Plan,
    make_parts,
    num_splits,
    parts_size,
    plan,
    split_width,
)
from tests.kernels.fused_inputs import DEVICE, DTYPES, TOLERANCE, on_gpu, poisoned, relative_error

REAL_WEIGHTS = [
    *((2048, 1536), (1536, 1536), (1536, 8960)),
    *((6144, 3072), (3072, 4096), (3072, 9216)),
    *((4608, 3584), (3584, 3584), (3584, 18944)),
    *((6144, 4096), (4096, 4096), (4096, 14336)),
    *((7168, 5120), (5120, 5120), (5120, 16384)),
]
"""(N, K) of qkv, o and down of the models of 1.5B, 3B, 7B, 8B and 14B parameters."""
COPIES = Plan(heights=(32, 48, 64, 96), tile_n=64, tile_k=32, num_warps=4, shared=HALF, tma=False)
ONE_HEIGHT = replace(COPIES, heights=(32,))
TMA = replace(COPIES, tma=True)


def inputs(
    R: int, N: int, K: int, dtype: torch.dtype, count: int, rows_per_count: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (NaN beyond the counted rows), weight, count."""
    generator = torch.Generator().manual_seed(R + N + K)
    x_RK = torch.randn(R, K, generator=generator)
    x_RK[count * rows_per_count :] = float("nan")
    weight_NK = torch.randn(N, K, generator=generator) / K**0.5
    count_1 = torch.tensor([count], dtype=torch.int32, device=DEVICE)
    return x_RK.to(DEVICE, dtype), weight_NK.to(DEVICE, dtype), count_1


def cases(N: int, K: int, dtype: torch.dtype) -> list[int]:
    return sorted({1, num_splits(N, K, dtype)})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiles", [None, COPIES, TMA], ids=["planned", "copies", "tma"])
@pytest.mark.parametrize(("N", "K"), [(48, 40), (136, 288)])
@pytest.mark.parametrize(("R", "count", "rows_per_count"), [(5, 5, 1), (75, 7, 10), (130, 130, 1), (64, 0, 8)])
def test_linear_matches(
    dtype: torch.dtype, tiles: Plan | None, N: int, K: int, R: int, count: int, rows_per_count: int
) -> None:
    x_RK, weight_NK, count_1 = inputs(R, N, K, dtype, count, rows_per_count)
    rows = count * rows_per_count
    want_rN = x_RK[:rows].double() @ weight_NK.double().T
    for parts in cases(N, K, dtype):
        got, reference = poisoned(parts, R, N), poisoned(parts, R, N)
        linear.linear_rows(x_RK, weight_NK, count_1, rows_per_count, Parts(got), tiles)
        linear.linear_rows_reference(x_RK, weight_NK, count_1, rows_per_count, Parts(reference))
        assert got[:, rows:].isnan().all()
        assert reference[:, rows:].isnan().all()
        # Sums stay float32 whatever the inputs are, so the tolerance is that of float32.
        assert relative_error(got[:, :rows], reference[:, :rows]) < 2e-5
        assert relative_error(got[:, :rows].sum(0), want_rN) < 2e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiles", [None, COPIES, TMA], ids=["planned", "copies", "tma"])
@pytest.mark.parametrize(("I", "E"), [(24, 40), (80, 160)])
@pytest.mark.parametrize(("R", "count", "rows_per_count"), [(5, 5, 1), (75, 7, 10), (130, 130, 1), (64, 0, 8)])
def test_swiglu_matches(
    dtype: torch.dtype, tiles: Plan | None, I: int, E: int, R: int, count: int, rows_per_count: int  # noqa: E741
) -> None:  # fmt: skip
    x_RE, gate_up_2IE, count_1 = inputs(R, 2 * I, E, dtype, count, rows_per_count)
    rows = count * rows_per_count
    gate, up = (x_RE[:rows].double() @ gate_up_2IE.double().T).chunk(2, dim=-1)
    got, reference = poisoned(R, I, dtype=dtype), poisoned(R, I, dtype=dtype)
    linear.swiglu_rows(x_RE, gate_up_2IE, count_1, rows_per_count, got, tiles)
    linear.swiglu_rows_reference(x_RE, gate_up_2IE, count_1, rows_per_count, reference)
    assert got[rows:].isnan().all()
    assert reference[rows:].isnan().all()
    assert relative_error(got[:rows], reference[:rows]) < TOLERANCE[dtype]
    assert relative_error(got[:rows], gate * gate.sigmoid() * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("height", [32, 96], ids=["one piece", "two pieces"])
@pytest.mark.parametrize("K", [768, 640, 600], ids=["equal slices", "narrower last slice", "ends in a tile"])
def test_splits_in_one_program_add_up_to_the_bits_of_their_sum(dtype: torch.dtype, height: int, K: int) -> None:
    N, R, splits = 96, 70, 3
    assert split_width(K, splits) == 256
    x_RK, weight_NK, count_1 = inputs(R, N, K, dtype, R)
    parts, whole = poisoned(splits, R, N), poisoned(1, R, N)
    for tma in (False, True):
        tiles = replace(ONE_HEIGHT, heights=(height,), tma=tma)
        for out in (parts, whole):
            linear.project_rows(x_RK, weight_NK, count_1, 1, Parts(out), N, splits, False, tiles)
        in_order = parts[0].clone()
        for part_RN in parts[1:]:
            in_order += part_RN
        assert torch.equal(whole[0], in_order)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_depend_neither_on_its_place_nor_on_other_rows(dtype: torch.dtype) -> None:
    N, K, R = 96, 288, 100
    x_RK, weight_NK, _ = inputs(R, N, K, dtype, R)
    alone = run_both(x_RK[:1], weight_NK, ONE_HEIGHT)
    for order in (torch.arange(R), torch.arange(R).flip(0), torch.arange(R).roll(37)):
        place = int((order == 0).nonzero())
        among = run_both(x_RK[order.to(DEVICE)], weight_NK, ONE_HEIGHT)
        assert torch.equal(alone[0][:, 0], among[0][:, place])
        assert torch.equal(alone[1][0], among[1][place])


@on_gpu
@pytest.mark.parametrize(("N", "K"), [(1536, 1536), (4608, 3584), (200, 328)])
def test_no_plan_changes_bits(N: int, K: int) -> None:
    x_RK, weight_NK, _ = inputs(700, N, K, torch.bfloat16, 700)
    tall = replace(COPIES, heights=(32, 64, 96, 128, 160, 192, 256, 288), tile_n=64, tile_k=64, num_warps=8)
    plans = [replace(tall, shared=2 * HALF, tma=tma) for tma in (False, True)]
    plans += [replace(plans[1], tile_k=128, heights=(64, 128)), replace(plans[1], num_warps=4, heights=(32, 160))]
    sums = replace(plans[1], num_warps=4, shared=HALF, heights=(48, 80, 144))
    plans += [sums, replace(sums, prefetch=1 << 20)]
    plans += [plan(N, K, torch.bfloat16, rows, gated=gated) for rows in (32, 300, 4000) for gated in (False, True)]
    want = run_both(x_RK, weight_NK, plans[0])
    for tiles in plans:
        for R in (1, 31, 32, 64, 90, 130, 170, 256, 270, 300, 700):
            got = run_both(x_RK[:R], weight_NK, tiles)
            assert torch.equal(got[0], want[0][:, :R]), (tiles, R)
            assert torch.equal(got[1], want[1][:R]), (tiles, R)


def run_both(x_RK: torch.Tensor, weight_NK: torch.Tensor, tiles: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows through ``linear_rows`` and, with the weight's halves as gate and up, through ``swiglu_rows``."""
    (N, K), R = weight_NK.shape, x_RK.shape[0]
    parts_KRN = poisoned(num_splits(N, K, x_RK.dtype), R, N)
    hidden_RI = poisoned(R, N // 2, dtype=x_RK.dtype)
    count_1 = torch.tensor([R], dtype=torch.int32, device=DEVICE)
    linear.linear_rows(x_RK.contiguous(), weight_NK, count_1, 1, Parts(parts_KRN), tiles)
    linear.swiglu_rows(x_RK.contiguous(), weight_NK, count_1, 1, hidden_RI, tiles)
    return parts_KRN, hidden_RI


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tma", [False, True], ids=["copies", "tma"])
def test_the_number_of_rows_decides_whether_sums_stand_side_by_side(dtype: torch.dtype, tma: bool) -> None:
    N, K, room, place = 96, 640, 200, 70
    x_RK, weight_NK, _ = inputs(room, N, K, dtype, room)
    splits = num_splits(N, K, dtype)
    assert splits > 1
    tiles = replace(COPIES, heights=(32, 64), slots=NUM_SMS, tma=tma)
    in_turn = poisoned(1, room, N)
    everything = torch.tensor([room], dtype=torch.int32, device=DEVICE)
    linear.linear_rows(x_RK, weight_NK, everything, 1, Parts(in_turn), ONE_HEIGHT)
    for count in (0, 1, place, place + 1, room):
        count_1 = torch.tensor([count], dtype=torch.int32, device=DEVICE)
        used_1 = torch.full((1,), -1, dtype=torch.int32, device=DEVICE)
        buffer = poisoned((splits - 1) * place + room, N)
        parts = Parts(buffer.as_strided((splits, room, N), (place * N, N, 1)), used_1)
        linear.linear_rows(x_RK, weight_NK, count_1, 1, parts, tiles)
        assert int(used_1) == (splits if 0 < count <= place else 1), "so small a product leaves most of the chip idle"
        assert torch.equal(parts.total(slice(count)), in_turn[0, :count])
        reference = Parts(poisoned(1, room, N), torch.empty_like(used_1))
        linear.linear_rows_reference(x_RK, weight_NK, count_1, 1, reference)
        assert int(reference.used_1) == 1
        assert relative_error(parts.total(slice(count)), reference.total(slice(count))) < 2e-5


@pytest.mark.parametrize(
    ("N", "K", "room", "pairs"),
    [
        pytest.param(40, 640, 641, True, id="short slices"),
        pytest.param(40, 2176, 641, False, id="long slices"),
        *(pytest.param(1536, 1536, room, True, id=f"o of 1.5B, room {room}", marks=on_gpu) for room in (2048, 10240)),
        pytest.param(2048, 1536, 2048, True, id="qkv of 1.5B", marks=on_gpu),
        pytest.param(1536, 8960, 2048, False, id="down of 1.5B", marks=on_gpu),
        pytest.param(6144, 4096, 2048, False, id="qkv of 8B", marks=on_gpu),
        pytest.param(4608, 3584, 2048, False, id="qkv of 7B", marks=on_gpu),
    ],
)
def test_counted_sums_of_the_default_plan_have_the_bits_of_sums_in_turn(N: int, K: int, room: int, pairs: bool) -> None:
    x_RK, weight_NK, _ = inputs(room, N, K, torch.bfloat16, room)
    tiles, splits = plan(N, K, torch.bfloat16, room), num_splits(N, K, torch.bfloat16)
    assert tiles.slots == (2 * NUM_SMS if pairs else NUM_SMS)
    in_turn = poisoned(1, room, N)
    everything = torch.tensor([room], dtype=torch.int32, device=DEVICE)
    linear.linear_rows(x_RK, weight_NK, everything, 1, Parts(in_turn), replace(ONE_HEIGHT, tile_k=tiles.tile_k))
    used = {}
    for count in sorted({60, SIDE_BY_SIDE_ROWS + 1, room}):
        count_1 = torch.tensor([count], dtype=torch.int32, device=DEVICE)
        used_1 = torch.full((1,), -1, dtype=torch.int32, device=DEVICE)
        parts = make_parts(poisoned(parts_size(N, K, torch.bfloat16, room)), used_1, N, K, torch.bfloat16, room)
        linear.linear_rows(x_RK, weight_NK, count_1, 1, parts, tiles)
        used[count] = int(used_1)
        assert torch.equal(parts.total(slice(count)), in_turn[0, :count]), count
        assert parts.values_KRN[used[count] - 1, count:].isnan().all(), count
    assert used[60] == splits > 1, "so few rows leave most of the chip idle"
    assert used[SIDE_BY_SIDE_ROWS + 1] == used[room] == 1


@pytest.mark.parametrize(("E", "per_multiprocessor"), [(72, 2), (2120, 1)], ids=["pairs", "alone"])
def test_the_gated_default_plan_of_many_rows_has_the_bits_of_one_height(E: int, per_multiprocessor: int) -> None:
    R, I = PARALLEL_ROWS + 1, 40  # noqa: E741
    x_RE, gate_up_2IE, count_1 = inputs(R, 2 * I, E, torch.bfloat16, R - 40)
    tiles = plan(I, E, torch.bfloat16, R, gated=True)
    assert tiles.slots == per_multiprocessor * NUM_SMS
    got, want = poisoned(R, I, dtype=torch.bfloat16), poisoned(R, I, dtype=torch.bfloat16)
    linear.swiglu_rows(x_RE, gate_up_2IE, count_1, 1, got)
    linear.swiglu_rows(x_RE, gate_up_2IE, count_1, 1, want, replace(ONE_HEIGHT, tile_k=tiles.tile_k))
    assert torch.equal(got[: R - 40], want[: R - 40])
    assert got[R - 40 :].isnan().all()


@pytest.mark.parametrize("rows", [32, PARALLEL_ROWS, PARALLEL_ROWS + 1, 1152, 18432])
@pytest.mark.parametrize(("N", "K"), REAL_WEIGHTS)
def test_places_of_partial_sums_lie_in_their_buffer(N: int, K: int, rows: int) -> None:
    dtype = torch.bfloat16
    buffer, used_1 = torch.empty(parts_size(N, K, dtype, rows), device="meta"), torch.ones(1, device="meta")
    parts = make_parts(buffer, used_1, N, K, dtype, rows)
    splits = num_splits(N, K, dtype)
    assert parts.values_KRN.shape == (splits, rows, N)
    assert (parts.used_1 is not None) == (splits > 1 and rows > PARALLEL_ROWS)
    assert parts.stride == (rows if rows <= PARALLEL_ROWS else min(rows, SIDE_BY_SIDE_ROWS))
    assert (splits - 1) * parts.stride * N + rows * N == buffer.numel()


@pytest.mark.parametrize(("N", "K"), REAL_WEIGHTS)
def test_splits_of_real_weights_fill_the_chip_and_none_is_empty(N: int, K: int) -> None:
    splits = num_splits(N, K, torch.bfloat16)
    assert (splits - 1) * split_width(K, splits) < K <= splits * split_width(K, splits)
    tile_n = plan(N, K, torch.bfloat16, 288).tile_n
    assert NUM_SMS * 0.35 <= N / tile_n * splits <= 2 * NUM_SMS, "two programs reside on a multiprocessor"
