"""The gate against its reference and against the plain engine's gate and norm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.fused.gate import gate_rows, gate_rows_reference
from kernels.fused.layout import DENOISE, FINAL, Addend, Branches, Parts, RowMap
from kernels.norm import rms_norm
from tests.kernels.fused_branches import (
    MIXED,
    counted,
    empty_map,
    make_branches,
    positions,
    random_addend,
    random_map,
    source_of,
)
from tests.kernels.fused_inputs import DEVICE, DTYPES, TOLERANCE, on_gpu, poisoned, relative_error

EPS = 1e-6
Gate = Callable[..., None]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_source(branches: Branches, by_token: bool, width: int, dtype: torch.dtype) -> torch.Tensor:
    """An embedding table, or a stream in which drafts lie at various distances from their parents."""
    if by_token:
        return torch.randn(7, width, dtype=dtype, device=DEVICE)
    block = branches.tokens_SBT.shape[2]
    source = poisoned(len(branches.slot_A) * block, width, dtype=dtype)
    for p, s, b, t in positions(branches):
        above = int(branches.index_SB[s, branches.parent_B[b]]) * block + t
        far = float(torch.randint(3, ())) * 0.15
        source[p] = torch.randn(width).to(source) if b == 0 else source[above] + far * torch.randn(width).to(source)
    return source


def run(gate: Gate, source: torch.Tensor, branches: Branches, *settings: object, **options: object) -> tuple:
    """Stream, map and normed rows of one gate over fresh buffers."""
    by_token, addend, weight, delta, inherit, retest = settings
    num_positions = len(branches.slot_A) * branches.tokens_SBT.shape[2]
    stream = poisoned(num_positions, source.shape[1], dtype=source.dtype)
    out, normed = empty_map(branches), poisoned(num_positions, source.shape[1], dtype=source.dtype)
    gate(source, by_token, addend, branches, weight, EPS, delta, inherit, retest, stream, out, normed, **options)
    return stream, out, normed


def check_map(out: RowMap, branches: Branches) -> None:
    """Every kept position has one row, and row, position and slot lists agree."""
    kept = [at for at in positions(branches) if int(out.keep_ST[at[1], at[3]]) >> at[2] & 1]
    rows = [int(out.row_SBT[s, b, t]) for _, s, b, t in kept]
    assert sorted(rows) == list(range(int(out.count_1)))
    assert [int(out.position_R[row]) for row in rows] == [at[0] for at in kept]
    for s in range(len(out.slot_count_S)):
        mine = sorted(row for row, at in zip(rows, kept, strict=True) if at[1] == s)
        assert sorted(out.slot_rows_SX[s, : int(out.slot_count_S[s])].tolist()) == mine


def rows_by_position(out: RowMap, normed: torch.Tensor) -> torch.Tensor:
    """Normed rows in the order of the list."""
    count = int(out.count_1)
    return normed[:count][out.position_R[:count].argsort()]


def expected(
    source: torch.Tensor,
    branches: Branches,
    by_token: bool,
    addend: Addend | None,
    delta: float,
    inherit: RowMap | None,
    retest: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stream values of all computed positions and whether they fold, one position after another."""
    values, folded = [], []
    where = {at[1:]: i for i, at in enumerate(positions(branches))}
    for p, s, b, t in positions(branches):
        x = source[branches.tokens_SBT[s, b, t] if by_token else p]
        if addend is not None:
            row = p if addend.rows is None else source_of(addend.rows, branches, s, b, t)
            total = addend.parts.values_KRN[0, row]
            for part in addend.parts.values_KRN[1:, row]:
                total = total + part
            x = (x.float() + total).to(source.dtype)
        values.append(x)
        fold = b > 0 and int(branches.kind_SB[s, b]) == DENOISE and delta >= 0
        if inherit is not None:
            fold = fold and not int(inherit.keep_ST[s, t]) >> b & 1
        if fold and (inherit is None or retest):
            above = values[where[s, int(branches.parent_B[b]), t]].double()
            fold = bool((x.double() - above).norm() <= delta * above.norm())
        folded.append(fold)
    return torch.stack(values), torch.tensor(folded, device=DEVICE)


STAGES = ["embedding", "mapped", "own", "entry"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("delta", [-1.0, 0.0, 0.1, 10.0])
@pytest.mark.parametrize("stage", STAGES)
def test_gate_agrees_with_its_reference_and_the_definition(stage: str, delta: float, dtype: torch.dtype) -> None:
    width = 24 if stage == "embedding" else 40
    branches = make_branches(MIXED, block=5)
    source = make_source(branches, stage == "embedding", width, dtype)
    earlier = random_map(branches, 0.6 if delta >= 0 else 0.0)
    addend = {"embedding": None, "mapped": random_addend(branches, 2, width, earlier)}.get(
        stage, random_addend(branches, 3, width, None)
    )
    if addend is not None:
        addend.parts.values_KRN.mul_(0.05)
    inherit = earlier if stage in ("own", "entry") else None
    weight = torch.rand(width, device=DEVICE).to(dtype)
    settings = (stage == "embedding", addend, weight, delta, inherit, stage == "own")

    values, folded = expected(source, branches, stage == "embedding", addend, delta, inherit, stage == "own")
    count = len(values)
    assert bool(folded.any()) == (delta >= 0)
    for gate in (gate_rows, gate_rows_reference):
        stream, out, normed = run(gate, source, branches, *settings)
        check_map(out, branches)
        assert torch.equal(stream[:count], values)
        assert stream[count:].isnan().all()
        kept = rows_by_position(out, torch.arange(len(normed), device=DEVICE))
        at = out.position_R[kept].long()
        assert torch.equal(at, (~folded).nonzero().flatten())
        want = rms_norm(values[at], weight, EPS)
        assert relative_error(rows_by_position(out, normed), want) <= TOLERANCE[dtype]
        assert normed[int(out.count_1) :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", STAGES[:3])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_main_branches_alone(num_slots: int, stage: str, dtype: torch.dtype) -> None:
    branches = make_branches([[DENOISE], [FINAL], [DENOISE]][:num_slots], block=5)
    by_token, width = stage == "embedding", 40
    source = make_source(branches, by_token, width, dtype)
    rows = random_map(branches, 0.0) if stage == "mapped" else None
    addend = None if by_token else random_addend(branches, 2, width, rows)
    settings = (by_token, addend, torch.rand(width, device=DEVICE).to(dtype), 0.1, None, True)
    values, _ = expected(source, branches, by_token, addend, -1.0, None, True)
    stream, out, normed = run(gate_rows, source, branches, *settings)
    check_map(out, branches)
    assert int(out.count_1) == len(values)
    assert torch.equal(stream[: len(values)], values)
    want = rms_norm(values, settings[2], EPS)
    assert relative_error(rows_by_position(out, normed), want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_and_among_others(dtype: torch.dtype) -> None:
    """A main branch alone without folding, and the same among drafts and other slots, at any number of parts."""
    width, block = 56, 4
    many, alone = make_branches(MIXED, block), make_branches([[DENOISE]], block)
    source, parts = make_source(many, False, width, dtype), random_addend(many, 2, width, None)
    weight = torch.rand(width, device=DEVICE).to(dtype)
    stream, out, normed = run(gate_rows, source, many, False, parts, weight, 0.1, None, False)
    for slot in (0, 3):
        at = int(many.index_SB[slot, 0]) * block
        summed = (parts.parts.values_KRN[0] + parts.parts.values_KRN[1])[None, at : at + block].contiguous()
        addend = Addend(counted(summed) if slot else Parts(summed), None)
        mine = run(gate_rows, source[at : at + block].contiguous(), alone, False, addend, weight, -1.0, None, False)
        assert torch.equal(mine[0], stream[at : at + block])
        assert torch.equal(rows_by_position(mine[1], mine[2]), normed[out.row_SBT[slot, 0].long()])


def test_positions_beyond_the_length_are_left_out() -> None:
    branches = make_branches([[FINAL], [FINAL]], block=6)
    source = make_source(branches, True, 16, torch.float32)
    length = torch.tensor([4, 0], device=DEVICE)
    weight = torch.rand(16, device=DEVICE)
    first = int(branches.index_SB[0, 0]) * 6
    for gate in (gate_rows, gate_rows_reference):
        stream, out, normed = run(gate, source, branches, True, None, weight, -1.0, None, False, length_S=length)
        check_map(out, branches)
        assert out.slot_count_S.tolist() == [4, 0]
        assert torch.equal(stream[first : first + 4], source[branches.tokens_SBT[0, 0, :4]])
        assert int(stream.isnan().any(-1).sum()) == len(stream) - 4
        assert int(normed.isnan().any(-1).sum()) == len(normed) - 4


def test_nan_is_never_folded() -> None:
    branches = make_branches([[DENOISE, DENOISE]], block=2)
    source = torch.ones(4, 16, device=DEVICE)
    source[1] = float("nan")
    for gate in (gate_rows, gate_rows_reference):
        _, out, _ = run(gate, source, branches, False, None, torch.ones(16, device=DEVICE), 0.5, None, False)
        assert out.keep_ST.tolist() == [[0b01, 0b11]]


def test_a_main_branch_is_kept_even_where_it_is_zero() -> None:
    """No parent is read for it, and nothing is near nothing."""
    branches = make_branches([[DENOISE, DENOISE]], block=2)
    for gate in (gate_rows, gate_rows_reference):
        source, weight = torch.zeros(4, 16, device=DEVICE), torch.ones(16, device=DEVICE)
        _, out, normed = run(gate, source, branches, False, None, weight, 0.5, None, False)
        assert out.keep_ST.tolist() == [[0b01, 0b01]]
        assert normed[:2].tolist() == [[0.0] * 16] * 2


def test_no_live_branch_makes_no_row() -> None:
    branches = make_branches([[0, 0]], block=2)
    for gate in (gate_rows, gate_rows_reference):
        weight = torch.ones(16, device=DEVICE)
        stream, out, _ = run(gate, torch.randn(7, 16, device=DEVICE), branches, True, None, weight, 0.1, None, False)
        assert int(out.count_1) == 0
        assert stream.isnan().all()


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1536, 3072, 3584, 4096, 5120])
def test_real_widths(width: int, dtype: torch.dtype) -> None:
    branches = make_branches([[DENOISE] * 9, [DENOISE, DENOISE, FINAL, *[0] * 6]], block=32)
    source = make_source(branches, False, width, dtype)
    addend = random_addend(branches, 4, width, random_map(branches, 0.7))
    addend.parts.values_KRN.mul_(0.02)
    weight = torch.rand(width, device=DEVICE).to(dtype)
    settings = (False, addend, weight, 0.1, None, False)
    stream, out, normed = run(gate_rows, source, branches, *settings)
    reference_stream, reference_out, reference_normed = run(gate_rows_reference, source, branches, *settings)
    check_map(out, branches)
    live = int(branches.num_live_1) * 32
    assert torch.equal(stream[:live], reference_stream[:live])
    assert torch.equal(out.keep_ST, reference_out.keep_ST)
    got, want = rows_by_position(out, normed), rows_by_position(reference_out, reference_normed)
    assert relative_error(got, want) <= TOLERANCE[dtype]
