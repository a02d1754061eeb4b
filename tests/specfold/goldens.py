"""Golden vectors: what the official decoders did on tiny checkpoints."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from safetensors.torch import load_file

from specfold import DecodeConfig, Engine, Request
from specfold.decoder import Decoder
from specfold.request import Completion
from tests.conftest import SHARED

GOLDEN = SHARED / "golden"
DEVICE = os.environ.get("SPECFOLD_TEST_DEVICE", "cpu")
BACKEND = os.environ.get("SPECFOLD_TEST_BACKEND", "torch")
"""Tokens must be the official ones on any device, through either backend."""
CASES = [
    "fast_dllm_v2/a_base",
    "fast_dllm_v2/b_tied",
    "fast_dllm_v2/c_headdim24",
    "nemotron_labs_diffusion/a_base",
    "nemotron_labs_diffusion/b_trained",
    "nemotron_labs_diffusion/c_short_yarn",
]
NO_STOP = -1
"""A stop id that no vocabulary has."""


@dataclass(frozen=True)
class Case:
    """One golden case with its engine."""

    name: str
    data: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    engine: Engine

    @property
    def is_fast_dllm(self) -> bool:
        return self.name.startswith("fast_dllm")

    def entries(self, *kinds: str) -> list[dict[str, Any]]:
        """Generation entries that ask for at least one new token."""
        return [entry for kind in kinds for entry in self.data.get(kind, []) if entry["n_new"]]

    def engine_for(self, stop: int) -> Engine:
        """The engine with another stop token."""
        return Engine(self.engine.model, replace(self.engine.info, stop_token_ids=(stop,)), None, BACKEND)


@cache
def load_case(name: str) -> Case:
    folder = GOLDEN / name
    data = json.loads((folder / "golden.json").read_text())
    engine = Engine.from_pretrained(folder, device=DEVICE, mask_token_id=data["mask_id"])
    # One case has a shorter context than its longest entries need; the official decoders do not check.
    spec = replace(engine.info.spec, context_length=4096)
    engine = Engine(engine.model, replace(engine.info, spec=spec), None, BACKEND)
    return Case(name, data, load_file(folder / "golden.safetensors"), engine)


def settings(entry: dict[str, Any], **changes: Any) -> tuple[DecodeConfig, int]:
    """Our configuration for an entry, and its stop token. The limit is the golden's number of new tokens."""
    if "args" in entry:
        args = entry["args"]
        known = {
            name: args[name]
            for name in ("threshold", "causal_context", "max_thinking_tokens", "end_think_token_id")
            if name in args
        }
        config = DecodeConfig(
            mode="vanilla", block_size=args.get("block_length"), max_new_tokens=entry["n_new"], **known
        )
        stop = args["eos_token_id"]
    else:
        config = DecodeConfig(
            mode="vanilla",
            threshold=entry["threshold"],
            small_block_size=entry["small_block_size"],
            block_size=entry["block_size"],
            max_new_tokens=entry["n_new"],
        )
        stop = entry["stop_token"]
    return replace(config, **changes), stop


def expected_ids(entry: dict[str, Any], stop: int) -> tuple[list[int], str]:
    """Our tokens and finish reason for an entry: the stop token ends the golden's and is left out of ours."""
    ids = entry["new_ids"]
    return (ids[:-1], "stop") if ids[-1] == stop else (ids, "length")


@dataclass
class Trace:
    """A row decoded alone, with the block's state before every forward."""

    completion: Completion
    states: list[list[int]]


def trace(engine: Engine, config: DecodeConfig, prompt_ids: list[int]) -> Trace:
    decoder = Decoder(engine, config, 1)
    refused = decoder.admit(Request(prompt_ids))
    assert refused is None, refused
    states: list[list[int]] = []
    while True:
        finished = decoder.prepare()
        if not finished:
            if bool(decoder.backend.slots.active_S[0]):
                states.append(decoder.backend.slots.state_ST[0].tolist())
            finished = decoder.decode()
        if finished:
            return Trace(finished[0][1], states)


@cache
def trace_alone(case_name: str, entry_name: str, mode: str) -> Trace:
    """A generation entry decoded alone; kept, because several tests compare with it."""
    case = load_case(case_name)
    entry = next(e for e in case.entries("generate", "generate_prompt_eq_block") if e["name"] == entry_name)
    config, stop = settings(entry, mode=mode, delta=0.1, drafts=4)
    return trace(case.engine_for(stop), config, entry["prompt_ids"])


def decode_together(
    case: Case, entries: list[dict[str, Any]], batch_size: int, **changes: Any
) -> dict[str, Completion]:
    """Decodes entries in as few batches as their settings allow; completions by entry name."""
    groups: dict[tuple[DecodeConfig, int], list[dict[str, Any]]] = {}
    for entry in entries:
        config, stop = settings(entry, **changes)
        groups.setdefault((replace(config, max_new_tokens=1), stop), []).append(entry)
    results = {}
    for (config, stop), group in groups.items():
        requests = [Request(e["prompt_ids"], row_id=i, max_new_tokens=e["n_new"]) for i, e in enumerate(group)]
        for completion in case.engine_for(stop).stream(iter(requests), config, batch_size):
            results[group[completion.row_id]["name"]] = completion
    return results
