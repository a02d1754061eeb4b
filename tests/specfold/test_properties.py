"""Properties that decoding must have on any model, prompt and setting."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import linear
from specfold import DecodeConfig, Request
from specfold.branches import DENOISE, FINAL, BranchList, BranchTable, GraphTensors
from specfold.decoder import Decoder
from specfold.drafts import build_graph, default_graph
from specfold.folding import Folding
from specfold.forward import ForwardOutput, PrefixView, forward_branches
from specfold.pages import PagePool
from tests.specfold.random_models import FAMILY_NAMES, MASK, VOCAB, random_engine
from tests.specfold.strategies import draw_run, prompts, replace_seconds, sampling

few = settings(max_examples=40)


@pytest.mark.parametrize("family", FAMILY_NAMES)
@given(data=st.data())
@few
def test_any_graph_and_any_sampling_gives_vanillas_tokens(
    family: str, data: st.DataObject, tmp_path_factory: Any
) -> None:
    engine, rows, num_nodes, graph, vanilla, want = draw_run(family, data, tmp_path_factory)
    variants = {
        "spiffy": replace(vanilla, mode="spiffy", drafts=num_nodes, draft_graph=graph),
        "delta 0": replace(vanilla, mode="specfold", delta=0.0, drafts=num_nodes, draft_graph=graph),
    }
    variants["pruned"] = replace(variants["delta 0"], draft_budget=data.draw(st.integers(1, num_nodes)))
    for name, config in variants.items():
        for got in engine.stream(iter(rows), config, batch_size=3):
            assert got.token_ids == want[got.row_id].token_ids, name
            assert got.finish_reason == want[got.row_id].finish_reason, name
            assert got.stats.num_forwards <= want[got.row_id].stats.num_forwards, name


@pytest.mark.parametrize("family", FAMILY_NAMES)
@given(data=st.data())
@few
def test_a_smaller_limit_gives_a_prefix(family: str, data: st.DataObject) -> None:
    engine = random_engine(family, data.draw(st.integers(0, 3)))
    prompt, chosen = data.draw(prompts), data.draw(sampling())
    mode = data.draw(st.sampled_from(["vanilla", "spiffy"]))
    shorter = data.draw(st.integers(1, chosen["max_new_tokens"]))
    full = engine.generate([prompt], DecodeConfig(mode=mode, **chosen))[0]
    cut = engine.generate([prompt], DecodeConfig(mode=mode, **{**chosen, "max_new_tokens": shorter}))[0]
    assert len(full.token_ids) <= chosen["max_new_tokens"]
    assert cut.token_ids == full.token_ids[:shorter]
    assert cut.finish_reason == ("length" if len(cut.token_ids) == shorter else full.finish_reason)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_row_depends_on_nothing_outside_it_at_any_delta(family: str) -> None:
    """Tokens and every counter, for rows alone, together, in another order and in another number of slots."""
    engine = random_engine(family, 1)
    config = DecodeConfig(mode="specfold", delta=0.3, drafts=4, temperature=0.8, max_new_tokens=20)
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 7, 8, 9, 30, 33, 64, 5]
    rows = [
        Request(torch.randint(0, MASK, (n,), generator=generator).tolist(), row_id=i, sample_id=i % 2)
        for i, n in enumerate(lengths)
    ]

    def decode(order: list[Request], batch_size: int) -> dict[int, Any]:
        results = {}
        for c in engine.stream(iter(order), config, batch_size):
            results[c.row_id] = (c.token_ids, replace_seconds(c.stats.to_dict()))
        return results

    want = decode(rows, 1)
    assert decode(rows, 8) == want
    assert decode(rows[::-1], 3) == want


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_negative_delta_is_the_dense_forward_bit_for_bit(family: str) -> None:
    engine = random_engine(family, 2)
    prompts = [[1, 2, 3], list(range(20))]
    dense = engine.generate(prompts, DecodeConfig(mode="spiffy", drafts=4, max_new_tokens=24))
    off = engine.generate(prompts, DecodeConfig(mode="specfold", delta=-1.0, drafts=4, max_new_tokens=24))
    for a, b in zip(dense, off, strict=True):
        assert a.token_ids == b.token_ids
        assert replace_seconds(a.stats.to_dict()) == replace_seconds(b.stats.to_dict())
        assert b.stats.fold_rate in (0.0, None)


@pytest.mark.parametrize("gate", ["own", "entry"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
@torch.inference_mode()
def test_the_main_and_final_branches_are_exact_at_any_delta(family: str, gate: str) -> None:
    """Their hidden states have the bits that they have alone, however much the other drafts fold."""
    engine = random_engine(family, 1)
    block = engine.info.spec.block_size
    pool = PagePool(engine.info.spec, engine.device, torch.float32)
    graph = GraphTensors.build(default_graph(4), engine.device)
    main = torch.tensor([3, MASK, MASK, 7, MASK, MASK, MASK, 1])
    variants = main.repeat(5, 1)
    variants[1, 1] = 5
    variants[2, 1:3] = 5
    variants[3, 2] = 6
    variants[4] = torch.arange(block)
    kinds = torch.tensor([[DENOISE] * 4 + [FINAL]])
    prefix = PrefixView(pool, torch.zeros((1, 1), dtype=torch.long), torch.tensor([0]))
    causal = torch.ones(block, block, dtype=torch.bool).tril()

    def run(tokens: torch.Tensor, kind: torch.Tensor, delta: float) -> ForwardOutput:
        table = BranchTable(tokens[None], kind)
        branches = BranchList.of(table, graph, torch.tensor([0]))
        return forward_branches(engine.model, branches, prefix, causal, Folding(delta, gate))

    dense, folded = run(variants, kinds, -1.0), run(variants, kinds, 0.8)
    assert sum(int(fold.sum()) for fold in folded.fold_qkv_LAT) > 20
    for exact in (0, 4):
        assert torch.equal(folded.hidden_ATE[exact], dense.hidden_ATE[exact])
        alone = run(variants[exact : exact + 1], kinds[:, exact : exact + 1], -1.0)
        assert torch.equal(folded.hidden_ATE[exact], alone.hidden_ATE[0])
    assert not torch.equal(folded.hidden_ATE[1], dense.hidden_ATE[1])


@pytest.mark.parametrize("gate", ["own", "entry"])
def test_folded_rows_are_not_computed(monkeypatch: pytest.MonkeyPatch, gate: str) -> None:
    """Rows that enter the projections are those that the statistics count."""
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
    config = DecodeConfig(mode="specfold", delta=0.5, ffn_gate=gate, drafts=4, max_new_tokens=24)
    # A prompt shorter than a block is not prefilled, so every counted row belongs to a decoding forward.
    stats = engine.generate([[1, 2, 3]], config)[0].stats
    assert rows == {"qkv": stats.recomputed_qkv_rows, "ffn": stats.recomputed_ffn_rows}
    assert stats.fold_rate is not None
    assert stats.fold_rate > 0.05
    dense = engine.generate([[1, 2, 3]], replace(config, mode="spiffy"))[0].stats
    share = stats.recomputed_qkv_rows / stats.num_forwards
    assert share < dense.recomputed_qkv_rows / dense.num_forwards


@pytest.mark.parametrize("mode", ["ar", "linear_spec"])
def test_linear_speculation_draws_what_ar_draws(mode: str) -> None:
    """The verified tokens are the autoregressive ones at any temperature."""
    engine = random_engine("nemotron_labs_diffusion", 1)
    prompts = [[5, 6, 7], [1], list(range(30))]
    for temperature in (0.0, 0.9):
        ar = engine.generate(prompts, DecodeConfig(mode="ar", temperature=temperature, max_new_tokens=25))
        other = engine.generate(prompts, DecodeConfig(mode=mode, temperature=temperature, max_new_tokens=25))
        assert [c.token_ids for c in ar] == [c.token_ids for c in other]
        if temperature:
            assert len({tuple(c.token_ids) for c in ar}) == len(prompts)


def test_samples_of_a_prompt_differ_and_repeat() -> None:
    engine = random_engine("fast_dllm_v2", 0)
    config = DecodeConfig(mode="specfold", delta=-1.0, temperature=1.0, max_new_tokens=16)
    rows = [Request([3, 4, 5] * 15, row_id=7, sample_id=s) for s in range(6)]
    first = {c.sample_id: c.token_ids for c in engine.stream(iter(rows), config, batch_size=6)}
    again = {c.sample_id: c.token_ids for c in engine.stream(iter(rows[::-1]), config, batch_size=2)}
    assert first == again
    assert len({tuple(ids) for ids in first.values()}) >= 5
    other_seed = {c.sample_id: c.token_ids for c in engine.stream(iter(rows), replace(config, seed=1), batch_size=6)}
    assert other_seed != first


def test_samples_share_their_prompts_pages_and_give_them_back() -> None:
    engine = random_engine("nemotron_labs_diffusion", 0)
    decoder = Decoder(engine, DecodeConfig(mode="vanilla", max_new_tokens=8), 4)
    prompt = [i % MASK for i in range(70)]
    for sample in range(4):
        assert decoder.admit(Request(prompt, sample_id=sample)) is None
    decoder.prepare()
    # 3 pages of the prompt once, and per row a copy of the ragged page (it holds the new tokens too).
    assert decoder.backend.pool.num_used == 3 + 4
    while not decoder.idle:
        decoder.advance()
    assert decoder.backend.pool.num_used == 0


def test_the_mask_id_is_never_chosen_and_nan_ends_the_row() -> None:
    engine = random_engine("fast_dllm_v2", 0)
    head = engine.model.head_VE
    kept = head.clone()
    try:
        # The mask's logit would win everywhere.
        head[MASK] = 50 * head[MASK].sign()
        for temperature in (0.0, 1.0):
            done = engine.generate([[1, 2]], DecodeConfig(max_new_tokens=20, temperature=temperature))[0]
            assert MASK not in done.token_ids
            assert len(done.token_ids) in range(21)
        head[0] = float("nan")
        bad = engine.generate([[1, 2], [3]], DecodeConfig(max_new_tokens=20))
        assert [c.error_kind for c in bad] == ["nan_logits"] * 2
        assert all(c.token_ids == [] for c in bad)
    finally:
        head.copy_(kept)


def test_the_engine_has_a_pulse() -> None:
    engine = random_engine("fast_dllm_v2", 0)
    before = engine.num_steps
    stats = engine.generate([[1, 2, 3]], DecodeConfig(mode="vanilla", max_new_tokens=20))[0].stats
    assert engine.num_steps - before == stats.num_forwards


def test_bad_prompts_come_back_as_errors_and_disturb_nobody() -> None:
    engine = random_engine("fast_dllm_v2", 0)
    good = [1, 2, 3]
    outs = engine.generate([[], good, [MASK], [VOCAB], [0] * 500, [-1]], DecodeConfig(max_new_tokens=20))
    assert [c.error_kind for c in outs] == [
        "empty_prompt",
        None,
        "mask_in_prompt",
        "invalid_token_id",
        "too_long",
        "invalid_token_id",
    ]
    assert outs[1].token_ids == engine.generate([good], DecodeConfig(max_new_tokens=20))[0].token_ids


@pytest.mark.parametrize("settings", [{}, {"mode": "spiffy", "drafts": "auto"}])
def test_a_row_with_impossible_settings_of_its_own_disturbs_nobody(settings: dict[str, Any]) -> None:
    engine = random_engine("nemotron_labs_diffusion", 0)
    config = DecodeConfig(max_new_tokens=4, temperature=0.5, **settings)
    rows = [
        Request([1, 2], row_id=0, temperature=float("nan")),
        Request([1, 2], row_id=1, max_new_tokens=0),
        Request([1, 2], row_id=2, top_k=10**20),
        Request([1, 2], row_id=3, sample_id=2**64),
        Request([1, 2], row_id=4),
    ]
    found = {c.row_id: c for c in engine.stream(iter(rows), config, 2)}
    assert [found[i].error_kind for i in range(5)] == ["unsupported_option"] * 4 + [None]
    assert found[1].error == "max_new_tokens must be at least 1, not 0."
    assert len(found[4].token_ids) == 4 or found[4].finish_reason == "stop"
    every_row_is_bad = list(engine.stream(iter(rows[:4]), config, 3))
    assert sorted(c.row_id for c in every_row_is_bad) == [0, 1, 2, 3]


def test_a_graph_beyond_a_small_vocabulary_changes_no_token() -> None:
    engine = random_engine("fast_dllm_v2", 0)
    graph = json.dumps(build_graph([[(0, 0)], [(0, 63)], [(0, 0), (1, VOCAB)]], "test").to_json())
    vanilla = engine.generate([[1, 2, 3]], DecodeConfig(mode="vanilla", max_new_tokens=12))[0]
    drafted = engine.generate([[1, 2, 3]], DecodeConfig(mode="spiffy", drafts=3, draft_graph=graph, max_new_tokens=12))
    assert drafted[0].token_ids == vanilla.token_ids
    assert len(drafted[0].stats.accepted_by_depth) == 2
