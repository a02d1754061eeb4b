"""Folding in time, on any model and setting: what a step takes over from the step before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import linear
from specfold import DecodeConfig, Engine, Request
from specfold.branches import BranchList
from specfold.decoder import Decoder
from specfold.prefill import forward_sequence
from specfold.request import Completion
from specfold.slots import SlotState
from specfold.step import StepContext, StepResult
from specfold.stored import Inheritance
from specfold.watch import Watch
from tests.specfold.random_models import FAMILY_NAMES, MASK, random_engine
from tests.specfold.strategies import draw_run, replace_seconds

few = settings(max_examples=15)
VANILLA = DecodeConfig(mode="vanilla", max_new_tokens=24)
PROMPTS = [[1, 2, 3], list(range(20)), [5] * 33, [7, 8, 9, 10, 11]]


def counters(completion: Completion) -> dict[str, Any]:
    return replace_seconds(completion.stats.to_dict())


@pytest.mark.parametrize("family", FAMILY_NAMES)
@given(data=st.data())
@few
def test_at_zero_any_graph_and_any_sampling_gives_vanillas_tokens(
    family: str, data: st.DataObject, tmp_path_factory: Any
) -> None:
    engine, rows, num_nodes, graph, vanilla, want = draw_run(family, data, tmp_path_factory)
    folded = replace(vanilla, delta_time=0.0, refresh_every=data.draw(st.sampled_from([0, 0, 1, 3])))
    drafted = replace(folded, drafts=num_nodes, draft_graph=graph)
    for config in (folded, replace(drafted, mode="spiffy"), replace(drafted, mode="specfold", delta=0.0)):
        for got in engine.stream(iter(rows), config, batch_size=3):
            assert got.token_ids == want[got.row_id].token_ids, config.mode
            assert got.finish_reason == want[got.row_id].finish_reason, config.mode


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("mode", ["vanilla", "spiffy", "specfold"])
def test_below_zero_nothing_is_carried_over(family: str, mode: str) -> None:
    engine = random_engine(family, 2)
    config = replace(VANILLA, mode=mode, temperature=0.7)
    for off, plain in zip(
        engine.generate(PROMPTS, replace(config, delta_time=-0.5)), engine.generate(PROMPTS, config), strict=True
    ):
        assert off.token_ids == plain.token_ids
        assert counters(off) == counters(plain)
        assert off.stats.time_fold_rate is None


@pytest.mark.parametrize(
    "changes",
    [{"delta_time": 0.3}, {"delta_time": 0.2, "mode": "specfold", "delta": 0.3}, {"use_block_cache": True}],
    ids=str,
)
def test_a_row_depends_on_nothing_outside_it(changes: dict[str, Any]) -> None:
    """Tokens and every counter, for rows alone, together, in another order and in another number of slots."""
    engine = random_engine("fast_dllm_v2", 1)
    config = replace(VANILLA, temperature=0.8, small_block_size=4, **changes)
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 7, 8, 9, 30, 33, 64, 5]
    rows = [
        Request(torch.randint(0, MASK, (n,), generator=generator).tolist(), row_id=i, sample_id=i % 2)
        for i, n in enumerate(lengths)
    ]

    def decode(order: list[Request], batch_size: int) -> dict[int, Any]:
        done = engine.stream(iter(order), config, batch_size)
        return {c.row_id: (c.token_ids, c.finish_reason, counters(c)) for c in done}

    want = decode(rows, 1)
    assert sum(sum(stats["main_folded_qkv"]) for _, _, stats in want.values()) > 100
    assert decode(rows, 8) == want
    assert decode(rows[::-1], 3) == want


@pytest.mark.parametrize("gate", ["own", "entry"])
def test_refreshing_every_step_is_not_folding(gate: str) -> None:
    engine = random_engine("nemotron_labs_diffusion", 2)
    config = replace(VANILLA, mode="specfold", ffn_gate=gate, delta=0.2)
    plain = engine.generate(PROMPTS, config)
    refreshed = engine.generate(PROMPTS, replace(config, delta_time=5.0, refresh_every=1))
    seldom = engine.generate(PROMPTS, replace(config, delta_time=5.0, refresh_every=3))
    never = engine.generate(PROMPTS, replace(config, delta_time=5.0))
    assert [c.token_ids for c in refreshed] == [c.token_ids for c in plain]
    assert [c.stats.recomputed_qkv_rows for c in refreshed] == [c.stats.recomputed_qkv_rows for c in plain]
    rates = [sum(c.stats.time_fold_rate for c in runs) / len(PROMPTS) for runs in (refreshed, seldom, never)]
    assert rates[0] == 0 < rates[1] < rates[2] < 1


class Recorder(Watch):
    """What every step looked like."""

    def __init__(self) -> None:
        self.steps: list[tuple[BranchList, torch.Tensor]] = []
        self.results: list[StepResult] = []

    def on_branches(self, branches: BranchList, slots: SlotState, context: StepContext) -> None:
        self.steps.append((branches, slots.steps_S.clone()))

    def after_step(self, slots: SlotState, result: StepResult) -> None:
        self.results.append(result)


def watched(engine: Engine, config: DecodeConfig, rows: Iterable[list[int]], batch_size: int) -> Recorder:
    recorder = Recorder()
    requests = (Request(ids, row_id=i) for i, ids in enumerate(rows))
    for _ in engine.stream(requests, config, batch_size, recorder):
        pass
    return recorder


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_nothing_is_inherited_across_borders_of_blocks_and_rows(family: str) -> None:
    """At an absurd tolerance everything folds but in a block's first step, in refreshes and in finished blocks; a slot
    that a new row takes over starts anew."""
    config = replace(VANILLA, delta_time=10.0, refresh_every=3, max_new_tokens=20)
    recorder = watched(random_engine(family, 1), config, PROMPTS * 2, batch_size=2)
    block, seen = 8, set()
    for (branches, steps_S), result in zip(recorder.steps, recorder.results, strict=True):
        for a, slot in enumerate(branches.slot_A.tolist()):
            final, number = bool(branches.final_A[a]), int(steps_S[slot])
            folded = result.fold_qkv_LSB[:, slot, 0].tolist()
            if final or number % 3 == 0:
                assert folded == [0, 0]
            else:
                # At this tolerance next to nothing is computed, but for the tokens just unmasked.
                assert folded[0] >= block - 2
            seen.add((final, min(number, 4)))
    assert {(False, n) for n in range(5)} <= seen
    assert any(final for final, _ in seen)


@pytest.mark.parametrize("gate", ["own", "entry"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
@torch.inference_mode()
def test_committed_keys_and_values_are_exact(family: str, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever folding made of the tokens, the cache holds what an unfolded forward over them computes, bit for bit."""
    engine = random_engine(family, 3)
    config = replace(VANILLA, mode="specfold", delta=0.3, delta_time=0.5, ffn_gate=gate, max_new_tokens=40)
    prompt = list(range(20))
    decoder = Decoder(engine, config, 1)
    assert decoder.admit(Request(prompt)) is None
    pool, slots, rules = decoder.backend.pool, decoder.backend.slots, decoder.rules
    decoder.prepare()
    checked, folded = 0, 0
    while not decoder.idle:
        start = int(slots.start_S[0])
        done = decoder.advance()
        if done:
            folded = sum(done[0][1].stats.main_folded_qkv)
            break
        if int(slots.start_S[0]) == start:
            continue
        pages = slots.page_table_SP[0].tolist()
        ids = (prompt + slots.output_SC[0].tolist())[start : start + rules.block_size]
        exact = forward_sequence(engine.model, pool, ids, start, pages, rules.final_mask, rules)
        at = torch.arange(start, start + len(ids))
        page = slots.page_table_SP[0][at // 32]
        for layer, (k, v) in enumerate(exact.final_kv):
            assert torch.equal(pool.k[layer][page, at % 32], k[0])
            assert torch.equal(pool.v[layer][page, at % 32], v[0])
        checked += 1
    assert checked >= 3
    assert folded > 100


def planted(h_NE: torch.Tensor, changes: dict[int, float]) -> torch.Tensor:
    """Residual streams that differ from the stored ones by a known share of their length at some positions."""
    h = h_NE.clone()
    for n, change in changes.items():
        h[n] = h[n] * (1 + change)
    return h


@torch.inference_mode()
def test_planted_changes_fold_by_the_tolerance_and_by_nothing_else() -> None:
    """Only open main branches fold, at most the tolerance, against what the position was last computed from."""
    stored = torch.randn(16, 12, generator=torch.Generator().manual_seed(0))
    rows = torch.arange(16).view(2, 8)
    # Branches: slot 0's main one, its draft, slot 1's main one, which may not fold.
    row_AT = rows[torch.tensor([0, 0, 1])]
    changes = {0: 0.0, 1: 0.09, 2: 0.11, 3: -0.09, 4: float("nan"), 5: 1e-4, 6: -0.2, 7: 0.0}
    h_ATE = planted(stored, changes)[row_AT]
    offered = Inheritance([], 0.1, torch.tensor([0]), row_AT, None)
    fold = offered.gate(h_ATE, stored)
    assert fold[0].tolist() == [True, True, False, True, False, True, False, True]
    assert not fold[1:].any()
    zero = replace(offered, delta=0.0).gate(h_ATE, stored)
    assert zero[0].tolist() == [True, False, False, False, False, False, False, True]


class SourceWatch(Watch):
    """Works out by hand, position by position, which residual stream served the accepted branch at one layer's gate."""

    layer = 1

    def __init__(self, delta: float, time_delta: float) -> None:
        self._deltas = delta, time_delta
        self.served_by: dict[str, int] = {"stored": 0, "self": 0, "ancestor": 0}

    def before_step(self, slots: SlotState, context: StepContext) -> None:
        self._context, self._old = context, self._stored(context)
        self._first = int(slots.steps_S[0]) == 0

    def on_branches(self, branches: BranchList, slots: SlotState, context: StepContext) -> None:
        self._branches = branches

    def on_hidden(self, layer: int, stage: str, h_ATE: torch.Tensor) -> None:
        if (layer, stage) == (self.layer, "entry"):
            self._h_ATE = h_ATE

    def after_step(self, slots: SlotState, result: StepResult) -> None:
        if bool(result.committed_S[0]):
            return
        # Drafts of the default graph are a chain, so the last accepted one has the highest number.
        accepted = max(result.accepted_SB[0].nonzero().flatten().tolist(), default=0)
        at = int(self._branches.index_SB[0, accepted])
        now_TE = self._stored(self._context)
        for t in range(8):
            kind, expected = self._source(at, t)
            self.served_by["self" if kind == at else "stored" if kind < 0 else "ancestor"] += 1
            assert torch.equal(now_TE[t], expected)

    def _source(self, a: int, t: int) -> tuple[int, torch.Tensor]:
        h, parent = self._h_ATE[a, t], int(self._branches.parent_A[a])
        is_main = parent == a
        reference = self._old[t] if is_main else self._h_ATE[parent, t]
        delta = self._deltas[1 if is_main else 0]
        may = not (is_main and self._first) and delta >= 0
        if may and (h - reference).double().norm() <= delta * reference.double().norm():
            return (-1, self._old[t]) if is_main else self._source(parent, t)
        return a, h

    def _stored(self, context: StepContext) -> torch.Tensor:
        assert context.stored is not None
        return context.stored.layers[self.layer][0].h_RE[:8].clone()


@pytest.mark.parametrize("mode", ["vanilla", "spiffy", "specfold"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_stored_branch_is_what_served_the_accepted_one(family: str, mode: str) -> None:
    """A folded position keeps the stream of its last computation, so that slow drift is measured from there."""
    config = replace(VANILLA, mode=mode, delta=0.3, delta_time=0.25)
    engine = random_engine(family, 1)
    watch = SourceWatch(config.fold_delta, config.time_delta)
    for ids in PROMPTS:
        for _ in engine.stream(iter([Request(ids)]), config, 1, watch):
            pass
    assert watch.served_by["stored"] > 50
    assert watch.served_by["self"] > 30
    assert (watch.served_by["ancestor"] > 10) == (mode == "specfold")


@pytest.mark.parametrize("gate", ["own", "entry"])
@pytest.mark.parametrize("mode", ["vanilla", "spiffy", "specfold"])
def test_folded_rows_are_not_computed(monkeypatch: pytest.MonkeyPatch, gate: str, mode: str) -> None:
    """Rows that enter the projections are those that the statistics count, in all and by branch and layer."""
    engine = random_engine("fast_dllm_v2", 2)
    spec = engine.info.spec
    rows = {"qkv": 0, "ffn": 0}
    plain_linear, plain_swiglu = linear.linear_rows, linear.swiglu_rows

    def count_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows["qkv"] += len(x) if len(weight) == sum(spec.qkv_sizes) else 0
        return plain_linear(x, weight, bias)

    def count_swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        rows["ffn"] += len(x)
        return plain_swiglu(x, gate_up, down)

    monkeypatch.setattr("specfold.forward.linear_rows", count_linear)
    monkeypatch.setattr("specfold.forward.swiglu_rows", count_swiglu)
    config = replace(VANILLA, mode=mode, delta=0.3, delta_time=0.3, ffn_gate=gate, max_new_tokens=14)
    # A prompt shorter than a block is not prefilled, so every counted row belongs to a decoding forward.
    stats = engine.generate([[1, 2, 3]], config)[0].stats
    assert rows == {"qkv": stats.recomputed_qkv_rows, "ffn": stats.recomputed_ffn_rows}
    assert stats.time_fold_rate is not None
    assert 0.05 < stats.time_fold_rate < 1
    assert (stats.fold_rate is None) == (mode == "vanilla")
    if mode == "spiffy":
        assert stats.fold_rate == 0
    # Final branches never fold; the rest is what the statistics by branch and layer hold.
    for part, total in (("qkv", stats.recomputed_qkv_rows), ("ffn", stats.recomputed_ffn_rows)):
        by_branch = sum(map(sum, stats.recomputed_per_forward(part))) * stats.denoise_forwards
        finals = total - by_branch
        assert finals % (spec.num_layers * spec.block_size) == pytest.approx(0)
        assert finals >= stats.commit_forwards * spec.num_layers * spec.block_size
