"""Gates with more positions than programs: each walks over several, and every bit is as with a program a position."""

from __future__ import annotations

import pytest
import torch

from kernels.fused import gate
from kernels.fused.layout import Addend, RowMap, TimeGate
from tests.kernels.fused_branches import MIXED, counted, empty_map, random_map
from tests.kernels.fused_inputs import DTYPES, poisoned
from tests.kernels.test_fused_time_gate import ALONE, Case

EPS = 1e-6
BLOCK, WIDTH = 3, 24
PROGRAMS = 2
Results = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def by_position(stream: torch.Tensor, out: RowMap, normed: torch.Tensor) -> Results:
    """All that a gate says, whatever the order of its rows."""
    count = int(out.count_1)
    at = out.position_R[:count].long()
    order = at.argsort()
    slots = [at[out.slot_rows_SX[s, :n].long()].sort().values for s, n in enumerate(out.slot_count_S.tolist())]
    row = out.row_SBT.flatten().clone()
    assert at.unique().numel() == count
    assert sorted(row[(row >= 0) & (row < len(normed))].tolist()) == list(range(count))
    row[(row >= 0) & (row < len(normed))] = 0
    return {"stream": stream, "keep": out.keep_ST, "at": at[order], "normed": normed[:count][order], "row": row,
            "slots": torch.cat(slots)}  # fmt: skip


def run(case: Case, time: TimeGate | None) -> Results:
    stream, out = case.stored.clone(), empty_map(case.branches)
    normed = poisoned(case.rows, WIDTH, dtype=case.source.dtype)
    retest = case.stage != "entry"
    gate.gate_rows(
        case.source, case.by_token, case.addend, case.branches, case.weight, EPS, case.delta, case.inherit, retest,
        stream, out, normed, time=time,
    )  # fmt: skip
    return by_position(stream, out, normed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("stage", "used"), [("embedding", 0), ("mapped", 1), ("mapped", 2), ("own", 3), ("entry", 1)])
@pytest.mark.parametrize(
    ("kinds", "delta", "in_time"),
    [(ALONE, -1.0, True), (MIXED, 0.1, False), (MIXED, 0.1, True), (ALONE, -1.0, False), (ALONE[:1], 0.1, True)],
    ids=["time", "drafts", "both", "no folding", "one slot"],
)
def test_several_positions_a_program(
    kinds: list[list[int]],
    delta: float,
    in_time: bool,
    stage: str,
    used: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(kinds, stage, delta, WIDTH, dtype, BLOCK)
    if not in_time and case.inherit:
        case.inherit = random_map(case.branches, 0.6)
    if case.addend:
        values, rows, stored = case.addend.parts.values_KRN, case.addend.rows, case.addend.stored_XE
        if not in_time and rows:
            rows, stored = random_map(case.branches, 0.6), None
            values = 0.05 * torch.randn_like(values)
        case.addend = Addend(counted(values[:used]), rows, stored)
    time = case.time if in_time else None
    once = run(case, time)
    assert len(once["at"]) > 0
    monkeypatch.setattr(gate, "WALKING_WARPS", PROGRAMS * gate.row_config(WIDTH)["num_warps"])
    monkeypatch.setattr(gate, "MAX_PROGRAMS", PROGRAMS)
    walked = run(case, time)
    for name, want in once.items():
        assert torch.equal(walked[name].nan_to_num(7), want.nan_to_num(7)), name
