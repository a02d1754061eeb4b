"""Queries, keys and values against their reference and the plain engine's rotation."""

from __future__ import annotations

import pytest
import torch

from kernels.fused.layout import Branches, Parts, RowMap
from kernels.fused.rope import rope_rows, rope_rows_reference
from kernels.rope import apply_rope
from tests.kernels.fused_branches import MIXED, counted, make_branches, random_map
from tests.kernels.fused_inputs import DEVICE, DTYPES, TOLERANCE, on_gpu, poisoned, relative_error

HEADS = [(4, 1, 24), (6, 3, 16), (5, 1, 64), (3, 1, 128)]


def make_tables(head_dim: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    angle = torch.arange(num_positions)[:, None] * 10000.0 ** -(torch.arange(head_dim // 2) / head_dim * 2)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(DEVICE), angle.sin().to(DEVICE), (1 + torch.rand(num_positions)).to(DEVICE)


def make_parts(rows: RowMap, num_parts: int, width: int) -> torch.Tensor:
    parts = poisoned(num_parts, len(rows.position_R), width)
    parts[:, : int(rows.count_1)] = torch.randn(num_parts, int(rows.count_1), width).to(DEVICE)
    return parts


def run(rope, parts, bias, rows, branches, tables, heads, kv_heads, head_dim, dtype) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    out = [poisoned(len(rows.position_R), n, head_dim, dtype=dtype) for n in (heads, kv_heads, kv_heads)]
    rope(parts if isinstance(parts, Parts) else Parts(parts), bias, rows, branches, *tables, *out)
    return out


def expected(parts, bias, rows: RowMap, branches: Branches, tables, heads, kv_heads, head_dim, dtype):  # type: ignore[no-untyped-def]
    """q, k, v of the rows in use, by the plain engine's rotation of the rounded projection."""
    count, block = int(rows.count_1), branches.tokens_SBT.shape[2]
    projected = sum(parts[1:, :count], start=parts[0, :count])
    projected = (projected if bias is None else projected + bias.float()).to(dtype)
    q, k, v = projected.view(count, -1, head_dim).float().split((heads, kv_heads, kv_heads), dim=1)
    at = torch.tensor(
        [int(branches.start_S[branches.slot_A[p // block]]) + p % block for p in rows.position_R[:count].tolist()],
        device=DEVICE,
    )
    cos, sin, scale = (table[at].float() for table in tables)
    return apply_rope(q, cos, sin) * scale[:, None, None], apply_rope(k, cos, sin), v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("biased", [False, True])
def test_rope_rows(heads: int, kv_heads: int, head_dim: int, biased: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(head_dim)
    branches = make_branches(MIXED, block=3)
    rows = random_map(branches, 0.5)
    width = (heads + 2 * kv_heads) * head_dim
    parts = make_parts(rows, 3 if biased else 1, width)
    bias = torch.randn(width, device=DEVICE).to(dtype) if biased else None
    tables = make_tables(head_dim, 64)
    if biased:
        tables = tuple(table.to(dtype) for table in tables)
    settings = (rows, branches, tables, heads, kv_heads, head_dim, dtype)
    count = int(rows.count_1)
    for rope in (rope_rows, rope_rows_reference):
        for got, want in zip(run(rope, parts, bias, *settings), expected(parts, bias, *settings), strict=True):
            assert relative_error(got[:count], want) <= TOLERANCE[dtype]
            assert got[count:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_depend_neither_on_count_nor_on_place(dtype: torch.dtype) -> None:
    """Small and large tiles, one part or two, first or last: a position's q, k, v are the same."""
    torch.manual_seed(0)
    heads, kv_heads, head_dim = 6, 1, 16
    branches = make_branches([[1, 1]], block=4)
    rows = random_map(branches, 0.0)
    few = make_parts(rows, 2, 8 * head_dim)
    settings = (branches, make_tables(head_dim, 64), heads, kv_heads, head_dim, dtype)
    want = run(rope_rows, few, None, rows, *settings)
    # The launcher sees room for many rows, and the count says how many there are.
    many = poisoned(1, 2000, 8 * head_dim)
    count = int(rows.count_1)
    many[0, :count] = (few[0] + few[1])[:count].flip(0)
    rows.position_R[:count] = rows.position_R[:count].flip(0)
    for got, small in zip(run(rope_rows, many, None, rows, *settings), want, strict=True):
        assert torch.equal(got[:count].flip(0), small[:count])
    # Sums in more places than are used.
    for got, small in zip(run(rope_rows, counted(many), None, rows, *settings), want, strict=True):
        assert torch.equal(got[:count].flip(0), small[:count])


def test_no_row_writes_nothing() -> None:
    branches = make_branches([[0]], block=2)
    rows = random_map(branches, 0.0)
    for rope in (rope_rows, rope_rows_reference):
        settings = (rows, branches, make_tables(16, 8), 2, 1, 16, torch.float32)
        for out in run(rope, make_parts(rows, 1, 64), None, *settings):
            assert out.isnan().all()


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 2), (28, 4), (32, 8), (40, 8)])
def test_real_heads(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    branches = make_branches([[1] * 9] * 4, block=32)
    rows = random_map(branches, 0.7)
    parts = make_parts(rows, 2, (heads + 2 * kv_heads) * 128)
    settings = (rows, branches, make_tables(128, 128), heads, kv_heads, 128, dtype)
    got, want = (run(rope, parts, None, *settings) for rope in (rope_rows, rope_rows_reference))
    for a, b in zip(got, want, strict=True):
        # Sums, products and roundings are the same ones.
        assert torch.equal(a[: int(rows.count_1)], b[: int(rows.count_1)])
