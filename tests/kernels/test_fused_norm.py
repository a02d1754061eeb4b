"""The final norm against its reference and the plain engine's norm."""

from __future__ import annotations

import pytest
import torch
from triton import jit
from triton import language as tl

from kernels.fused.layout import Addend, HeadRows
from kernels.fused.norm import head_norm, head_norm_reference
from kernels.fused.residual import highest_bit
from kernels.norm import rms_norm
from tests.kernels.fused_branches import (
    GARBAGE,
    MIXED,
    counted,
    make_branches,
    positions,
    random_addend,
    random_map,
    source_of,
)
from tests.kernels.fused_inputs import DEVICE, DTYPES, TOLERANCE, poisoned, relative_error

EPS = 1e-5


def head_rows(hidden: list[int], room: int) -> HeadRows:
    hidden_D = torch.full((room,), GARBAGE, dtype=torch.int32)
    hidden_D[: len(hidden)] = torch.tensor(hidden, dtype=torch.int32)
    count = torch.tensor([len(hidden)], dtype=torch.int32, device=DEVICE)
    return HeadRows(count, hidden_D.to(DEVICE), *[poisoned(room, dtype=torch.int32) for _ in range(5)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "num_parts", "mapped"), [(24, 1, True), (40, 3, True), (64, 2, False)])
def test_head_norm(width: int, num_parts: int, mapped: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    branches = make_branches(MIXED, block=4)
    rows = random_map(branches, 0.6) if mapped else None
    addend = random_addend(branches, num_parts, width, rows)
    stream = torch.randn(len(branches.slot_A) * 4, width, device=DEVICE).to(dtype)
    weight = torch.rand(width, device=DEVICE).to(dtype)
    chosen = [at for at in positions(branches) if torch.rand(()) < 0.4]
    want = []
    for p, s, b, t in chosen:
        row = source_of(rows, branches, s, b, t) if rows else p
        total = addend.parts.values_KRN[0, row]
        for part in addend.parts.values_KRN[1:, row]:
            total = total + part
        want.append((stream[p].float() + total).to(dtype))
    wanted = rms_norm(torch.stack(want), weight, EPS)
    outputs = []
    for norm in (head_norm, head_norm_reference):
        out = poisoned(len(stream), width, dtype=dtype)
        norm(stream, addend, branches, head_rows([at[0] for at in chosen], len(stream)), weight, EPS, out)
        assert relative_error(out[: len(chosen)], wanted) <= TOLERANCE[dtype]
        assert out[len(chosen) :].isnan().all()
        outputs.append(out)
    # The same rows in another order, fewer of them, their sums counted: the same bits.
    addend = Addend(counted(addend.parts.values_KRN), rows)
    few = poisoned(len(stream), width, dtype=dtype)
    head_norm(stream, addend, branches, head_rows([at[0] for at in chosen[3::-1]], len(stream)), weight, EPS, few)
    assert torch.equal(few[:4], outputs[0][:4].flip(0))


def test_highest_bit_of_every_bit_set() -> None:
    torch.manual_seed(0)
    top = torch.arange(62, device=DEVICE)
    bits = (1 << top) | (torch.randint(2**62, (62,), device=DEVICE) & ((1 << top) - 1))
    got = poisoned(64, dtype=torch.int32)
    _highest_bit_kernel[(1,)](torch.cat((bits, bits[:2] * 0)), got)
    assert got.tolist() == [*range(62), 0, 0]


@jit
def _highest_bit_kernel(p_bits, p_out):
    o_x = tl.arange(0, 64)
    tl.store(p_out + o_x, highest_bit(tl.load(p_bits + o_x)))
