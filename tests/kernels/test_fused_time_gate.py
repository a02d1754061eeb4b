"""The gate with folding in time: main branches against their stored rows, beside drafts that fold on their parents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.fused.gate import gate_rows, gate_rows_reference
from kernels.fused.layout import DENOISE, FINAL, Addend, HeadRows, Parts, RowMap, TimeGate
from kernels.fused.norm import head_norm, head_norm_reference
from kernels.norm import rms_norm
from tests.kernels.fused_branches import (
    MIXED,
    empty_map,
    make_branches,
    positions,
    random_addend,
    random_map,
    source_of,
    stored_row,
)
from tests.kernels.fused_inputs import DEVICE, DTYPES, TOLERANCE, on_gpu, poisoned, relative_error

EPS = 1e-6
NEAR = 0.2
ALONE = [[DENOISE], [FINAL], [DENOISE], [DENOISE]]
VALID = (1, 1, 0, 1)
"""The third slot's stored rows may not be used."""
Gate = Callable[..., None]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Case:
    """Inputs of one gate, and by the definition which positions fold."""

    def __init__(
        self, kinds: list[list[int]], stage: str, delta: float, width: int, dtype: torch.dtype, block: int = 6
    ) -> None:
        self.branches = branches = make_branches(kinds, block)
        self.stage, self.delta = stage, delta
        self.by_token = stage == "embedding"
        self.rows = len(branches.slot_A) * block
        self.valid_S = torch.tensor(VALID, dtype=torch.int32, device=DEVICE)[: len(kinds)]
        self.time = TimeGate(NEAR, self.valid_S)
        self.weight = torch.rand(width, device=DEVICE).to(dtype)
        room = self.rows + len(kinds) * block
        self.source = poisoned(7 if self.by_token else self.rows, width, dtype=dtype)
        for p, s, b, t in positions(branches):
            above = int(branches.index_SB[s, branches.parent_B[b]]) * block + t
            if not self.by_token:
                old = torch.zeros(width) if b == 0 else self.source[above].cpu()
                self.source[p] = (old + (1.0 if b == 0 else 0.1) * torch.randn(width)).to(self.source)
        if self.by_token:
            self.source.normal_()
        self.addend = self._addend(width) if stage in ("mapped", "own", "entry") else None
        self.inherit = random_map(branches, 0.6, 0.6) if stage in ("own", "entry") else None
        self.values = {at[1:]: self._value(*at) for at in positions(branches)}
        self.stored = poisoned(room, width, dtype=dtype)
        for (s, b, t), x in self.values.items():
            if b == 0 and self.valid_S[s]:
                far = (0.0, 0.1, 0.4)[t % 3]
                noise = torch.randn(width).to(x.device, torch.float32)
                self.stored[stored_row(branches, s, t)] = (
                    x.float() + far * x.float().norm() / noise.norm() * noise
                ).to(dtype)
        self.folded = {at: self._folds(*at) for at in self.values}

    def _addend(self, width: int) -> Addend:
        if self.stage != "mapped":
            addend = random_addend(self.branches, 3, width, None)
            addend.parts.values_KRN.mul_(0.05)
            return addend
        rows = random_map(self.branches, 0.6, 0.6)
        addend = random_addend(self.branches, 2, width, rows)
        addend.parts.values_KRN.mul_(0.05)
        stored = poisoned(self.branches.start_S.shape[0] * self.branches.tokens_SBT.shape[2], width)
        for _, s, b, t in positions(self.branches):
            row = source_of(rows, self.branches, s, b, t)
            if row >= self.rows:
                stored[row - self.rows] = 0.05 * torch.randn(width)
        return Addend(addend.parts, rows, stored)

    def added(self, p: int, s: int, b: int, t: int) -> torch.Tensor:
        assert self.addend is not None
        row = p if self.addend.rows is None else source_of(self.addend.rows, self.branches, s, b, t)
        if row >= self.rows:
            assert self.addend.stored_XE is not None
            return self.addend.stored_XE[row - self.rows]
        first, *others = self.addend.parts.values_KRN[:, row]
        for part in others:
            first = first + part
        return first

    def _value(self, p: int, s: int, b: int, t: int) -> torch.Tensor:
        x = self.source[self.branches.tokens_SBT[s, b, t] if self.by_token else p]
        return x if self.addend is None else (x.float() + self.added(p, s, b, t)).to(self.source.dtype)

    def _folds(self, s: int, b: int, t: int) -> bool:
        main, denoises = b == 0, int(self.branches.kind_SB[s, b]) == DENOISE
        if not denoises or (not self.valid_S[s] if main else self.delta < 0):
            return False
        if self.inherit is not None and int(self.inherit.keep_ST[s, t]) >> b & 1:
            return False
        if self.stage == "entry":
            return True
        x = self.values[s, b, t].double()
        above = (
            self.stored[stored_row(self.branches, s, t)] if main else self.values[s, int(self.branches.parent_B[b]), t]
        )
        return bool((x - above.double()).norm() <= (NEAR if main else self.delta) * above.double().norm())

    def run(self, gate: Gate) -> tuple[torch.Tensor, RowMap, torch.Tensor]:
        """Stream, map and normed rows."""
        stream, out = self.stored.clone(), empty_map(self.branches)
        normed = poisoned(self.rows, self.source.shape[1], dtype=self.source.dtype)
        retest = self.stage != "entry"
        gate(
            self.source, self.by_token, self.addend, self.branches, self.weight, EPS, self.delta, self.inherit, retest,
            stream, out, normed, time=self.time,
        )  # fmt: skip
        return stream, out, normed

    def check(self, gate: Gate) -> None:
        branches, block = self.branches, self.branches.tokens_SBT.shape[2]
        stream, out, normed = self.run(gate)
        assert torch.equal(stream[self.rows :].nan_to_num(7), self.stored[self.rows :].nan_to_num(7))
        kept = {at: row for at, row in self.values.items() if not self.folded[at]}
        rows = {(s, b, t): int(out.row_SBT[s, b, t]) for s, b, t in kept}
        assert sorted(rows.values()) == list(range(int(out.count_1)))
        for (s, b, t), x in self.values.items():
            p = int(branches.index_SB[s, b]) * block + t
            assert torch.equal(stream[p], x)
            assert (int(out.keep_ST[s, t]) >> b & 1) == (not self.folded[s, b, t])
            if not self.folded[s, b, t]:
                row = rows[s, b, t]
                assert int(out.position_R[row]) == p
                assert relative_error(normed[row], rms_norm(x[None], self.weight, EPS)[0]) <= TOLERANCE[x.dtype]
            elif b == 0:
                assert int(out.row_SBT[s, 0, t]) == stored_row(branches, s, t)
        for s, count in enumerate(out.slot_count_S.tolist()):
            assert sorted(out.slot_rows_SX[s, :count].tolist()) == sorted(r for at, r in rows.items() if at[0] == s)
        assert normed[int(out.count_1) :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", ["embedding", "mapped", "own", "entry"])
@pytest.mark.parametrize(
    ("kinds", "delta"),
    [(ALONE, 0.1), (ALONE[:1], 0.1), (MIXED, 0.1), (MIXED, -1.0)],
    ids=["alone", "one slot", "drafts fold", "dense drafts"],
)
def test_main_branches_fold_on_their_stored_rows(
    kinds: list[list[int]], delta: float, stage: str, dtype: torch.dtype
) -> None:
    case = Case(kinds, stage, delta, 24, dtype)
    in_time = {fold for (_, b, _), fold in case.folded.items() if b == 0}
    assert in_time == {True, False}
    for gate in (gate_rows, gate_rows_reference):
        case.check(gate)


def test_all_can_fold_and_nan_never_does() -> None:
    branches = make_branches([[DENOISE, DENOISE]], block=2)
    stream, weight = torch.ones(6, 16, device=DEVICE), torch.ones(16, device=DEVICE)
    for gate in (gate_rows, gate_rows_reference):
        for spoilt, want in ((None, [[0, 0]]), (1, [[0, 0b11]])):
            source = torch.ones(4, 16, device=DEVICE)
            if spoilt is not None:
                source[spoilt] = torch.nan
            out = empty_map(branches)
            time = TimeGate(0.0, torch.ones(1, dtype=torch.int32, device=DEVICE))
            gate(
                source,
                False,
                None,
                branches,
                weight,
                EPS,
                0.0,
                None,
                False,
                stream.clone(),
                out,
                source.clone(),
                time=time,
            )
            assert out.keep_ST.tolist() == want
            assert int(out.count_1) == bin(want[0][1]).count("1")
            assert out.row_SBT[0, 0].tolist()[:1] == [4]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_last_norm_reads_stored_sums(dtype: torch.dtype) -> None:
    case = Case(MIXED, "mapped", 0.1, 24, dtype)
    assert case.addend is not None
    at = positions(case.branches)
    numbers = torch.zeros((6, len(at)), dtype=torch.int32, device=DEVICE)
    numbers[0] = torch.tensor([p for p, *_ in at])
    rows = HeadRows(torch.tensor([len(at)], dtype=torch.int32, device=DEVICE), *numbers)
    want = rms_norm(torch.stack([case.values[key[1:]] for key in at]), case.weight, EPS)
    assert any(source_of(case.addend.rows, case.branches, *key[1:]) >= case.rows for key in at)  # type: ignore[arg-type]
    for norm in (head_norm, head_norm_reference):
        out = poisoned(len(at), 24, dtype=dtype)
        norm(case.source, case.addend, case.branches, rows, case.weight, EPS, out)
        assert relative_error(out, want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("programs", [2048, 5])
@pytest.mark.parametrize("mapped", [True, False])
def test_the_sub_block_cache_leaves_positions_out(
    mapped: bool, programs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get their stored row and nothing else: nothing of theirs is read, as nothing is there."""
    monkeypatch.setattr("kernels.fused.gate.MAX_PROGRAMS", programs)
    branches, block, width = make_branches(ALONE, 6), 6, 24
    valid_S = torch.tensor(VALID, dtype=torch.int32, device=DEVICE)
    pattern = empty_map(branches)
    pattern.keep_ST.copy_(torch.arange(block, device=DEVICE) // 2 == 1)
    num_rows = len(branches.slot_A) * block
    earlier = empty_map(branches)
    earlier.row_SBT.fill_(2**30)
    source, parts = poisoned(num_rows, width, dtype=dtype), poisoned(2, num_rows, width)
    kept = {}
    for row, (p, s, b, t) in enumerate(positions(branches)):
        if VALID[s] and int(branches.kind_SB[s, b]) == DENOISE and t // 2 != 1:
            continue
        kept[p] = (s, t)
        earlier.row_SBT[s, b, t] = row
        source[p], parts[:, row if mapped else p] = torch.randn(2, width)[0].to(source), torch.randn(2, width).to(parts)
    addend = Addend(Parts(parts), earlier if mapped else None)
    weight = torch.rand(width, device=DEVICE).to(dtype)
    for gate in (gate_rows, gate_rows_reference):
        stream, out, normed = poisoned(num_rows, width, dtype=dtype), empty_map(branches), source.clone()
        settings = (weight, EPS, -1.0, pattern, False, stream, out, normed)
        gate(source, False, addend, branches, *settings, time=TimeGate(-1.0, valid_S, skips=True))
        assert int(out.count_1) == len(kept)
        for p, s, _, t in positions(branches):
            assert (p in kept) == (not stream[p].isnan().any()) == bool(out.keep_ST[s, t])
            if p not in kept:
                assert int(out.row_SBT[s, 0, t]) == stored_row(branches, s, t)
        want = torch.stack([rms_norm(stream[p][None], weight, EPS)[0] for p in out.position_R[: len(kept)].tolist()])
        assert relative_error(normed[: len(kept)], want) <= TOLERANCE[dtype]


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1536, 3072, 4096, 5120])
@pytest.mark.parametrize("stage", ["embedding", "mapped", "own"])
def test_real_widths(stage: str, width: int, dtype: torch.dtype) -> None:
    for kinds in ([[DENOISE]] * 4, [[DENOISE] * 9, [DENOISE, DENOISE, FINAL, *[0] * 6]]):
        Case(kinds, stage, 0.1, width, dtype, block=8).check(gate_rows)
