"""The official decoders' outputs, token for token, and their forwards, block states, logits and hidden states."""

from __future__ import annotations

import pytest
import torch

from kernels.norm import rms_norm
from specfold import DecodeConfig
from specfold.forward import ForwardOutput
from specfold.pages import PagePool
from specfold.prefill import Prefill, forward_sequence, write_final_kv
from tests.specfold.goldens import (
    CASES,
    Case,
    decode_together,
    expected_ids,
    load_case,
    settings,
    trace,
    trace_alone,
)

pytestmark = pytest.mark.usefixtures("shared")
ATOL = 1e-3
"""The goldens' own float32 error against float64 is up to 1.5e-4 at logits of size 25."""


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return load_case(request.param)


def golden_states(case: Case, entry: dict, stop: int) -> list[list[int]]:
    """Block states before the denoising forwards that decide something: the official Nemotron decoder goes on behind
    a stop token that stands first in a block."""
    states = case.tensors.get(f"gen/{entry['name']}/trajectory", torch.empty(0, 0)).tolist()
    last = entry["step_block"][-1] if entry["step_block"] else -1
    in_last = [i for i, block in enumerate(entry["step_block"]) if block == last]
    if in_last and not case.is_fast_dllm and states[in_last[0]][0] == stop:
        return states[: in_last[0]]
    return states


def golden_forwards(case: Case, entry: dict, stop: int) -> dict[str, int]:
    """Forwards behind those states, and the commits whose result is used: Nemotron's last one is not."""
    counts = entry.get("nfe") or entry["forward_counts"]
    unused = 0 if case.is_fast_dllm else 1
    return {"denoise": len(golden_states(case, entry, stop)), "commit": counts["commit"] - unused}


def test_vanilla_reproduces_tokens_forwards_and_states(case: Case) -> None:
    for entry in case.entries("generate", "generate_prompt_eq_block"):
        _, stop = settings(entry)
        got = trace_alone(case.name, entry["name"], "vanilla")
        ids, reason = expected_ids(entry, stop)
        assert (got.completion.token_ids, got.completion.finish_reason) == (ids, reason), entry["name"]
        want = golden_forwards(case, entry, stop)
        stats = got.completion.stats
        assert {"denoise": stats.denoise_forwards, "commit": stats.commit_forwards} == want, entry["name"]
        states = [state for state in got.states if case.engine.mask_token_id in state]
        assert states == golden_states(case, entry, stop), entry["name"]


@pytest.mark.parametrize("changes", [{"mode": "spiffy", "drafts": 4}, {"mode": "specfold", "drafts": 8, "delta": 0.0}])
def test_lossless_modes_give_the_same_tokens_with_fewer_forwards(case: Case, changes: dict) -> None:
    entries = case.entries("generate", "generate_prompt_eq_block")
    got = decode_together(case, entries, batch_size=8, **changes)
    saved = 0
    for entry in entries:
        _, stop = settings(entry)
        completion = got[entry["name"]]
        assert completion.token_ids == expected_ids(entry, stop)[0], entry["name"]
        want = sum(golden_forwards(case, entry, stop).values())
        assert completion.stats.num_forwards <= want, entry["name"]
        saved += want - completion.stats.num_forwards
    assert saved > 0


@pytest.mark.parametrize("mode", ["vanilla", "specfold"])
def test_a_batch_gives_what_each_row_gives_alone(case: Case, mode: str) -> None:
    """Rows of all lengths in different phases; three slots, so that rows join while others decode."""
    entries = case.entries("generate")[:: 1 if mode == "vanilla" else 3]
    together = decode_together(case, entries, batch_size=3, mode=mode, delta=0.1, drafts=4)
    for entry in entries:
        alone = trace_alone(case.name, entry["name"], mode).completion
        got = together[entry["name"]]
        assert got.token_ids == alone.token_ids, entry["name"]
        for counter in ("denoise_forwards", "accepted_by_depth", "recomputed_qkv_rows", "folded_qkv", "folded_ffn"):
            assert getattr(got.stats, counter) == getattr(alone.stats, counter), (entry["name"], counter)


def test_two_prompts_at_once_match_the_official_batch(case: Case) -> None:
    for entry in case.data.get("generate_batch2", []):
        if not entry["equals_alone"]:
            continue
        lengths = [len(out) - len(prompt) for out, prompt in zip(entry["output_ids"], entry["prompt_ids"], strict=True)]
        config = DecodeConfig(
            mode="vanilla",
            threshold=entry["threshold"],
            small_block_size=entry["small_block_size"],
            max_new_tokens=lengths[0],
        )
        got = case.engine_for(entry["stop_token"]).generate(entry["prompt_ids"], config)
        for completion, output, prompt in zip(got, entry["output_ids"], entry["prompt_ids"], strict=True):
            assert completion.token_ids == output[len(prompt) :]


def test_autoregressive_mode(case: Case) -> None:
    for entry in case.entries("ar_generate"):
        config, stop = settings(entry, mode="ar")
        got = trace(case.engine_for(stop), config, entry["prompt_ids"]).completion
        assert (got.token_ids, got.finish_reason) == expected_ids(entry, stop), entry["name"]
        assert got.stats.num_forwards == entry["forward_counts"].get("decode", 0)


def test_linear_self_speculation(case: Case) -> None:
    for entry in case.entries("linear_spec_generate"):
        limit = entry["args"]["max_new_tokens"]
        config, stop = settings(entry, mode="linear_spec", max_new_tokens=limit, threshold=entry["args"]["threshold"])
        got = trace(case.engine_for(stop), config, entry["prompt_ids"]).completion
        ids, _ = expected_ids(entry, stop)
        assert got.token_ids == ids[:limit], entry["name"]
        counts = entry["forward_counts"]
        assert got.stats.denoise_forwards == counts.get("draft", 0), entry["name"]
        assert got.stats.commit_forwards == counts.get("verify", 0), entry["name"]


def run_forward(case: Case, entry: dict, hidden: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Logits of an entry's forwards through the engine's own layers and cache."""
    engine = case.engine
    model, spec = engine.model, engine.info.spec
    rules = engine.info.family.rules(spec, DecodeConfig())
    pool = PagePool(spec, model.device, model.dtype)
    prefill = Prefill(tuple(entry["prefix_ids"]), len(entry["prefix_ids"]))
    prefill.pages = pool.allocate(8)
    start = 0

    def logits_of(output: ForwardOutput) -> torch.Tensor:
        normed = rms_norm(output.hidden_ATE[0], model.norm_E, spec.rms_eps)
        hidden["norm"] = normed
        return normed @ model.head_VE.T

    def write(ids: list[int], kind: str) -> torch.Tensor:
        nonlocal start
        output = forward_sequence(model, pool, ids, start, prefill.pages, kind, rules)
        table = torch.tensor([prefill.pages], device=model.device)
        first = torch.zeros(1, dtype=torch.long, device=model.device)
        write_final_kv(pool, output, first, table, start, len(ids))
        start += len(ids)
        return logits_of(output)

    got = {}
    bidirectional = entry["name"] in ("noncausal_prefix_block", "bidir_seq")
    kind = "full" if bidirectional else rules.prefill_mask
    if entry["prefix_ids"]:
        got["prefill_logits_last_block"] = write(entry["prefix_ids"], kind)[-rules.block_size :]
        got["cache_k"] = torch.stack([k[prefill.pages].flatten(0, 1)[:start].transpose(0, 1) for k in pool.k])
        got["cache_v"] = torch.stack([v[prefill.pages].flatten(0, 1)[:start].transpose(0, 1) for v in pool.v])
    if entry.get("commit_ids"):
        got["commit_logits"] = write(entry["commit_ids"], kind)
    whole_sequence = entry["name"] in ("causal_seq", "seq_nocache")
    output = forward_sequence(
        model,
        pool,
        entry["input_ids"],
        start,
        prefill.pages,
        kind if whole_sequence else "full",
        rules,
        observe=lambda name, x: hidden.__setitem__(name, x[0]),
    )
    got["logits"] = logits_of(output)
    return got


@torch.inference_mode()
def test_logits_caches_and_hidden_states(case: Case) -> None:
    compared = 0
    for entry in case.data["forward"]:
        if entry["name"] == "block_cache_partial":
            continue
        hidden: dict[str, torch.Tensor] = {}
        got = run_forward(case, entry, hidden)
        for name, value in got.items():
            if name in entry:
                keys = entry[name]
                want = case.tensors[keys] if isinstance(keys, str) else torch.stack([case.tensors[k] for k in keys])
                torch.testing.assert_close(value.cpu(), want, atol=ATOL, rtol=0)
                compared += 1
        for name, key in entry.get("hidden", {}).items():
            torch.testing.assert_close(hidden[name].cpu(), case.tensors[key], atol=ATOL, rtol=0)
            compared += 1
    assert compared >= 10
