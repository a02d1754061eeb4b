"""Time prefix and block attention alone, and one after the other as in a step, for a handful of plans.

    python -m tests.kernels.time_attention --budget 40 --out time_attention.json

A CUDA graph holds 20 launches (or pairs) over as many layers; the median replay counts, in microseconds a launch. Keys
and values stay in the L2 cache, where a step leaves none; "cold" is a pair after a write that is larger than the cache,
without the time of the write. One line a case: the default plan, then the best three pairs. The JSON has all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from kernels.fused import launch
from kernels.fused.block_attention import block_attention
from kernels.fused.layout import DENOISE, Branches, RowMap
from kernels.fused.prefix_attention import prefix_attention
from kernels.fused.prefix_state import PLANS, AttentionPlan, PrefixState
from specfold.backends.fused_forward import SPLIT_ROWS
from tests.kernels.gpu_timing import replay_us

HEADS = {"1.5B": (12, 2), "8B": (32, 8)}
"""Query and key/value heads by model, of 128 each."""
HEAD_DIM, BLOCK, WIDTH, LAYERS = 128, 32, 32, 20
BF16 = torch.bfloat16
FLUSHED_BYTES = 128 << 20


@dataclass(frozen=True)
class Case:
    model: str
    num_slots: int
    num_branches: int
    rows: int
    """A slot's recomputed rows, those of the main branch included."""
    prefix: int

    @property
    def name(self) -> str:
        return f"{self.model:4} {self.num_slots:2} x {self.rows:3} of {self.num_branches * BLOCK:3} +{self.prefix}"


@dataclass(frozen=True)
class Variant:
    name: str
    plan: AttentionPlan
    split: bool = True
    early: bool = False


@dataclass(frozen=True)
class Record:
    case: str
    variant: str
    prefix_us: float
    block_us: float
    pair_us: float
    cold_us: float | None
    same_bits: bool
    """As the default plan."""


SAME_BITS = (
    "early", "whole", "keys0", "keys16", "tall", "s2", "one tile", "more tiles", "registers free",
)  # fmt: skip
"""Variants that must have the bits of the default plan."""
SHAPES = ((1, 1, 32), (1, 9, 72), (1, 9, 288), (4, 9, 75), (64, 1, 32))
CASES = [Case(m, *shape, prefix) for prefix, shape, m in product((500, 4000, 100), SHAPES, HEADS)]


def variants() -> list[Variant]:
    """The default first."""
    base = PLANS[BF16]
    change = partial(replace, base)
    return [
        Variant("default", base),
        Variant("early", base, early=True),
        Variant("whole", base, split=False),
        Variant("chunk64", change(min_chunk=64)),
        Variant("chunk256", change(min_chunk=256)),
        Variant("keys0", change(keys_a_tile=0)),
        Variant("keys16", change(keys_a_tile=16)),
        Variant("tall", change(query_tile=128, num_warps=8, num_stages=2)),
        Variant("s2", change(num_stages=2)),
        Variant("one tile", change(block_programs=1 << 30)),
        Variant("more tiles", change(block_programs=132)),
        Variant("registers free", change(block_registers=None)),
        Variant("block w4", change(block_warps=4, block_registers=None)),
        Variant("block q32", change(block_query_tile=32, block_registers=None)),
    ]


class Bench:
    """Inputs of a case in all layers: a star of drafts, whose kept positions are any."""

    def __init__(self, case: Case, layers: int = LAYERS) -> None:
        num_heads, num_kv = HEADS[case.model]
        S, B, T = case.num_slots, case.num_branches, BLOCK
        random = torch.Generator("cuda").manual_seed(0)
        options = {"device": "cuda", "dtype": torch.int32}
        rows, pages = S * case.rows, S * -(-case.prefix // WIDTH)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn((layers, *shape), device="cuda", dtype=BF16, generator=random)

        kept_SBT = torch.zeros((S, B, T), dtype=torch.bool, device="cuda")
        kept_SBT[:, 0] = True
        drafts = torch.rand((S, (B - 1) * T), device="cuda", generator=random).argsort(1) < case.rows - T
        kept_SBT[:, 1:] = drafts.view(S, B - 1, T)
        row_SBT = (kept_SBT.flatten().cumsum(0) - 1).view(S, B, T).int()
        bit_B = 1 << torch.arange(B, device="cuda")
        slot_rows_SX = torch.zeros((S, B * T), **options)
        slot_rows_SX[:, : case.rows] = torch.arange(rows, **options).view(S, -1)
        self.rows = RowMap(
            (kept_SBT * bit_B[:, None]).sum(1), row_SBT, torch.tensor([rows], **options), torch.zeros(rows, **options),
            torch.full((S,), case.rows, **options), slot_rows_SX,
        )  # fmt: skip
        self.branches = Branches(
            tokens_SBT=torch.zeros((S, B, T), dtype=torch.long, device="cuda"),
            kind_SB=torch.full((S, B), DENOISE, **options),
            index_SB=torch.arange(S * B, **options).view(S, B),
            num_live_1=torch.tensor([S * B], **options),
            slot_A=torch.arange(S, **options).repeat_interleave(B),
            branch_A=torch.arange(B, **options).repeat(S),
            start_S=torch.full((S,), case.prefix, device="cuda"),
            parent_B=torch.zeros(B, **options),
            ancestors_B=bit_B | 1,
        )
        self.pages_SP = torch.randperm(pages, device="cuda", generator=random).view(S, -1)
        room = S * B * T
        self.q, self.k, self.v = (numbers(room, n, HEAD_DIM) for n in (num_heads, num_kv, num_kv))
        self.k_pages, self.v_pages = (numbers(pages, WIDTH, num_kv, HEAD_DIM) for _ in range(2))
        self.out = torch.empty((room, num_heads * HEAD_DIM), device="cuda", dtype=BF16)
        self.layers = layers

    def state(self, variant: Variant) -> PrefixState:
        launch.EARLY = variant.early  # Every use of a variant begins here.
        split = variant.split and self.q.shape[1] <= SPLIT_ROWS
        return PrefixState.allocate(self.q[0], self.k.shape[2], split, variant.plan)

    def prefix(self, state: PrefixState, layer: int) -> None:
        pages = self.k_pages[layer], self.v_pages[layer], self.pages_SP
        prefix_attention(self.q[layer], self.rows, *pages, self.branches.start_S, HEAD_DIM**-0.5, state)

    def block(self, state: PrefixState, layer: int) -> None:
        qkv = self.q[layer], self.k[layer], self.v[layer]
        block_attention(*qkv, state, self.rows, self.branches, BLOCK, HEAD_DIM**-0.5, self.out)

    def each_layer(self, *operations: Callable[[int], object]) -> None:
        for layer in range(self.layers):
            for operation in operations:
                operation(layer)


def measure(bench: Bench, case: Case, variant: Variant, want: torch.Tensor | None, cold: bool) -> Record:
    state = bench.state(variant)
    prefix, block = partial(bench.prefix, state), partial(bench.block, state)
    bench.out.fill_(torch.nan)
    prefix(0)
    block(0)
    same = want is None or torch.equal(bench.out, want)
    times = [replay_us(partial(bench.each_layer, *ops)) / LAYERS for ops in ((prefix,), (block,), (prefix, block))]
    cold_us = None
    if cold:
        large = torch.empty(FLUSHED_BYTES, device="cuda", dtype=torch.uint8)
        flush = large.fill_

        def write_only(layer: int) -> None:
            flush(layer)

        both = replay_us(partial(bench.each_layer, write_only, prefix, block))
        cold_us = (both - replay_us(partial(bench.each_layer, write_only))) / LAYERS
    return Record(case.name, variant.name, *times, cold_us, same)


def compile_one(job: tuple[Case, Variant]) -> str | None:
    """Leave the kernels in the cache on disk; what went wrong, if anything."""
    case, variant = job
    try:
        bench = Bench(case, layers=1)
        state = bench.state(variant)
        bench.prefix(state, 0)
        bench.block(state, 0)
        torch.cuda.synchronize()
    except Exception as error:  # Whatever it is, the other variants are still worth timing.
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def summary(records: list[Record]) -> str:
    def numbers(r: Record) -> str:
        cold = "" if r.cold_us is None else f" cold {r.cold_us:.1f}"
        return f"{r.prefix_us:5.1f} + {r.block_us:4.1f}, pair {r.pair_us:5.1f}{cold}"

    best = sorted(records, key=lambda r: r.pair_us)[:3]
    return f"{records[0].case}: {numbers(records[0])} | " + " | ".join(f"{r.variant}: {numbers(r)}" for r in best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=40, help="seconds, compilation included")
    parser.add_argument("--out", type=Path, default=None, help="JSON with every measurement")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--variants", nargs="*", default=None, help="names; all of them if left out")
    options = parser.parse_args()
    begin = time.monotonic()

    tried = [v for v in variants() if options.variants is None or v.name in (*options.variants, "default")]
    # Kernels do not depend on the prefix or on how many rows are kept.
    shapes = list({(c.model, c.num_slots, c.num_branches): c for c in CASES if c.prefix == 4000}.values())
    jobs = [(case, variant) for variant in tried for case in shapes]
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        errors = dict(zip(jobs, pool.map(compile_one, jobs), strict=True))
    broken = {(variant.name, error) for (_, variant), error in errors.items() if error}
    for name, error in sorted(broken):
        print(f"cannot use {name}: {error}")
    usable = [v for v in tried if v.name not in {name for name, _ in broken}]
    print(f"{len(jobs)} pairs of kernels compiled after {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{'slots x rows of positions + prefix':24}: default prefix + block | the best pairs")

    records = []
    for case in CASES:
        if time.monotonic() - begin > options.budget:
            print(f"out of time at {case.name}")
            break
        bench, want, here = Bench(case), None, []
        for variant in usable:
            record = measure(bench, case, variant, want, cold=variant.name in ("default", "early"))
            if want is None:
                want = _output(bench, variant)
            if not record.same_bits and variant.name in SAME_BITS:
                print(f"BITS DIFFER: {case.name} {variant.name}")
            here.append(record)
        print(summary(here), flush=True)
        records += here
    if options.out:
        options.out.write_text(json.dumps([asdict(record) for record in records]))
    print(f"done after {time.monotonic() - begin:.0f} s")


def _output(bench: Bench, variant: Variant) -> torch.Tensor:
    """Output of the first layer."""
    state = bench.state(variant)
    bench.prefix(state, 0)
    bench.block(state, 0)
    return bench.out.clone()


if __name__ == "__main__":
    main()
