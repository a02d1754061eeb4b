"""Time whole decoding steps at real shapes on a GPU, kernel by kernel, and the LM head's plans alone.

    python -m tests.kernels.time_step --shapes fast-dllm-v2-1.5b nemotron-8b --cases 1:0 1:8:0.85 64:0:0:0.73 --kernels
    python -m tests.kernels.time_step --head --out head.json

A case is slots:drafts[:share of draft positions that fold[:share of main positions that fold in time]]. Random weights,
one CUDA graph a step. A kernel that starts early waits for the one before, so beside its duration stands what it adds:
from the end of the one before to its own.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from kernels.fused.head_plan import FEW_ROWS, HeadPlan, plan
from kernels.fused.head_scratch import HeadScratch
from kernels.fused.head_tiles import logit_tiles
from kernels.fused.layout import HeadRows, Predictions
from specfold.backends.fused_step import FusedStep, empty_head_rows, empty_predictions
from specfold.benchmark.forward_cost import kept_state, measure_step, ready_step
from specfold.benchmark.shapes import PEAK_BYTES_PER_S, SHAPES, random_engine
from specfold.engine import Engine
from tests.kernels.gpu_timing import replay_us
from tests.kernels.tune_linear import cublas_all

BF16 = torch.bfloat16
PROFILED_STEPS = 5
HEAD_ROWS = (
    (8, 32, 0),
    (32, 32, 0),
    (72, 144, 4),
    (108, 144, 4),
    (144, 144, 4),
    (72, 288, 4),
    (150, 288, 4),
    (270, 288, 4),
    (1152, 1152, 4),
)
"""Rows, room for rows and kept tokens of the head's launches."""


def parse_case(text: str) -> tuple[int, int, float | None, float | None]:
    slots, drafts, *shares = text.split(":")
    fold, in_time = (*(float(share) for share in shares), None, None)[:2]
    return int(slots), int(drafts), fold, in_time


LAUNCHES = {"_project_kernel": ("qkv", "o", "gate_up", "down"), "gate_kernel": ("qkv", "ffn")}
"""What the launches of a kernel are for, in the order that they have in every layer."""


def override(text: str) -> None:
    """Sets a module's constant for this run: ``kernels.fused.linear_plan.PREFETCH=0``."""
    name, value = text.split("=", 1)
    module, constant = name.rsplit(".", 1)
    found = importlib.import_module(module)
    assert hasattr(found, constant), f"{module} has no {constant}"
    setattr(found, constant, ast.literal_eval(value))


def kernel_spans(step: FusedStep, restore: Callable[[], None]) -> list[tuple[str, float, float]]:
    """Name, duration and added time of every kernel of one step, in microseconds and in order."""
    restore()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step.run(False, False)
        torch.cuda.synchronize()
    events = [e for e in profiled.events() if e.device_type == DeviceType.CUDA]
    spans = sorted((e.time_range.end, e.time_range.start, e.name) for e in events)
    found, before = [], spans[0][1]
    seen: Counter[str] = Counter()
    for end, start, name in spans:
        if purposes := LAUNCHES.get(name):
            purpose = purposes[seen[name] % len(purposes)]
            seen[name] += 1
            name = f"{name} {purpose}"
        found.append((name, end - start, end - before))
        before = end
    return found


def profile_step(step: FusedStep) -> list[dict[str, Any]]:
    """One entry a kernel: launches a step, mean duration, mean added time, and that as a share of the step."""
    restore = kept_state(step)
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for i in range(PROFILED_STEPS + 1):
        for name, duration, added in kernel_spans(step, restore):
            if i > 0:  # The profiler's first run is slow.
                spans[name].append((duration, added))
    total = sum(added for values in spans.values() for _, added in values)
    table = [
        {
            "kernel": name,
            "launches": len(values) / PROFILED_STEPS,
            "us": round(sum(duration for duration, _ in values) / len(values), 2),
            "added_us": round(sum(added for _, added in values) / len(values), 2),
            "share": round(sum(added for _, added in values) / total, 4),
        }
        for name, values in spans.items()
    ]
    return sorted(table, key=lambda entry: -entry["share"])


def time_case(engine: Engine, shape: str, case: str, options: argparse.Namespace) -> dict[str, Any]:
    slots, drafts, share, in_time = parse_case(case)
    cost = measure_step(engine, slots, drafts, share, options.prompt_len, options.repeats, time_share=in_time)
    record: dict[str, Any] = {"shape": shape, "case": case} | cost.to_dict()
    print(
        f"{shape} {case}: {cost.step_ms:.3f} ms +- {cost.spread_ms:.3f}, weights {cost.floor_ms:.2f}, "
        f"{cost.positions} positions, {cost.qkv_rows:.0f} and {cost.ffn_rows:.0f} rows",
        flush=True,
    )
    if options.kernels:
        step = ready_step(engine, slots, drafts, share, options.prompt_len, time_share=in_time)
        record["kernels"] = profile_step(step)
        for entry in record["kernels"]:
            print(
                f"    {entry['kernel'][:40]:40} {entry['launches']:5.0f} x {entry['us']:8.2f} us, "
                f"adds {entry['added_us']:8.2f}, {100 * entry['share']:5.1f}%"
            )
    return record


def time_steps(options: argparse.Namespace, time_left: Callable[[], float]) -> Iterator[dict[str, Any]]:
    for shape in options.shapes:
        if time_left() <= 0:
            print(f"out of time at {shape}")
            return
        engine = random_engine(shape, "cuda", BF16, "triton")
        for case in options.cases:
            if time_left() <= 0:
                print(f"out of time at {shape} {case}")
                return
            try:
                yield time_case(engine, shape, case, options)
            except Exception as error:  # The other cases are still worth their time.
                print(f"{shape} {case} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
                yield {"shape": shape, "case": case, "error": str(error)}
            free_memory()
        del engine
        free_memory()


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def head_plans(room: int, width: int) -> dict[str, HeadPlan]:
    """The head's own plan first, then what differs from it in one choice."""
    base = plan(room, width, BF16)
    found = {
        "plan": base,
        "no prefetch": replace(base, prefetched_lines=0),
        "nested" if base.flatten else "flat": replace(base, flatten=not base.flatten),
        "k128": replace(base, tile_k=128),
    }
    if base.max_registers:
        found["all registers"] = replace(base, max_registers=None)
    if room == 144:
        found["many"] = plan(FEW_ROWS + 1, width, BF16)
    if room > FEW_ROWS:
        found["two of 160"] = replace(base, heights=(64, 128, 160))
        found["h256"] = replace(base, heights=(64, 128, 192, 256))
    else:
        found["copies"] = replace(base, tma=False)
    return found


def run_head(
    hidden_DE: torch.Tensor, weight_VE: torch.Tensor, rows: HeadRows, num_top: int, scratch: HeadScratch,
    out: Predictions, tiles: HeadPlan,
) -> None:  # fmt: skip
    for start in range(0, len(hidden_DE), scratch.num_rows):
        logit_tiles(hidden_DE, weight_VE, rows, 0, num_top, num_top > 0, start, scratch, out, tiles)


def time_head(shape: str, time_left: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Every plan at every number of rows beside cuBLAS, which computes bfloat16 logits and reduces nothing."""
    width, vocab = SHAPES[shape]["hidden_size"], SHAPES[shape]["vocab_size"]
    weight_VE = torch.randn(vocab, width, device="cuda", dtype=BF16) * 0.02
    out = empty_predictions(9, 32, 4, weight_VE.device)
    for count, room, num_top in HEAD_ROWS:
        hidden_DE = torch.randn(room, width, device="cuda", dtype=BF16)
        rows = empty_head_rows(room, torch.tensor([count], device="cuda", dtype=torch.int32))
        cublas = replay_us(partial(cublas_all, hidden_DE[:count], [weight_VE]))
        line = {"floor": weight_VE.nbytes / PEAK_BYTES_PER_S * 1e6, "cuBLAS": cublas}
        want: list[torch.Tensor] | None = None
        for name, tiles in head_plans(room, width).items():
            if time_left() <= 0:
                break
            scratch = HeadScratch.make(room, vocab, num_top, False, False, "cuda")
            try:
                line[name] = replay_us(partial(run_head, hidden_DE, weight_VE, rows, num_top, scratch, out, tiles))
            except Exception as error:  # Too little shared memory, say; the other plans are still worth timing.
                print(f"{shape} cannot use {name}: {type(error).__name__}: {str(error)[:200]}")
                continue
            got = [x[: min(count, scratch.num_rows)].clone() for x in (scratch.best_RN, scratch.sum_RN)]
            want = want or got
            if not all(torch.equal(x, y) for x, y in zip(got, want, strict=True)):
                print(f"BITS DIFFER: {shape} {count} rows, {name}")
            yield {"shape": shape, "rows": count, "room": room, "plan": name, "us": line[name]} | asdict(tiles)
        print(f"{shape} {count:4} of {room:4}: " + ", ".join(f"{k} {us:.1f}" for k, us in line.items()), flush=True)
        free_memory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["fast-dllm-v2-1.5b", "nemotron-8b"])
    parser.add_argument("--cases", nargs="*", default=["1:0", "1:8", "1:8:0.85", "4:8", "4:8:0.85"])
    parser.add_argument("--kernels", action="store_true", help="a table of kernels for every case")
    parser.add_argument("--head", action="store_true", help="the head's plans instead of steps")
    parser.add_argument("--prompt-len", type=int, default=500, help="tokens")
    parser.add_argument("--repeats", type=int, default=30, help="steps of a case")
    parser.add_argument("--budget", type=float, default=300, help="seconds after which nothing new starts")
    parser.add_argument("--out", type=Path, default=None, help="JSON with every measurement")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="MODULE.CONSTANT=VALUE", help="another choice of a plan"
    )
    options = parser.parse_args()
    for text in options.set:
        override(text)
    begin = time.monotonic()

    def time_left() -> float:
        return options.budget - (time.monotonic() - begin)

    records: list[dict[str, Any]] = []
    source = (r for shape in options.shapes for r in time_head(shape, time_left)) if options.head else None
    for record in source or time_steps(options, time_left):
        records.append(record)
        if options.out:  # Rewritten each time: what is measured stays, whatever ends the run.
            options.out.write_text(json.dumps(records))
    steps = [r["step_ms"] for r in records if "step_ms" in r]
    print(f"{len(records)} records, median step {median(steps):.3f} ms" if steps else f"{len(records)} records")
    print(f"done after {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
