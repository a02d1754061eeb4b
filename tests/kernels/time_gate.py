"""Time the gates alone at real shapes, for a handful of programs, numbers of partial sums and shares of kept rows.

    python -m tests.kernels.time_gate --budget 30 --out time_gate.json

A CUDA graph holds 20 gates, each with buffers of its own, that read partial sums of an output projection ("own") or of
a down projection through a row map ("mapped"). Medians in microseconds a launch; inputs mostly come from the L2 cache,
as they do in a step. One line a case: every variant, the default first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch

from kernels.fused import gate, residual
from kernels.fused.layout import DENOISE, Addend, Branches, Parts, RowMap
from tests.kernels.gpu_timing import replay_us

BF16 = torch.bfloat16
BLOCK, LAUNCHES, DELTA = 32, 20, 0.1
WIDTHS = {"1.5B": 1536, "8B": 4096}
SHAPES = ((1, 1, 1.0), (1, 9, 0.15), (1, 9, 1.0), (4, 9, 0.15))
"""Slots, branches, share of the drafts' positions that are kept."""


@dataclass(frozen=True)
class Case:
    model: str
    num_slots: int
    num_branches: int
    kept: float
    mapped: bool
    parts: int

    @property
    def name(self) -> str:
        kind = "mapped" if self.mapped else "own"
        return f"{self.model:4} {self.num_slots} x {self.num_branches} kept {self.kept:.2f} {kind:6} {self.parts} parts"


@dataclass(frozen=True)
class Variant:
    """Values of the constants in ``kernels.fused.residual`` and ``kernels.fused.gate``."""

    name: str
    warps: int = residual.MAX_WARPS
    registers: int | None = gate.MAX_REGISTERS
    eager: int = gate.MAX_EAGER


VARIANTS = (
    Variant("default"),
    Variant("free", registers=None),
    Variant("not eager", eager=0),
    Variant("w16 r64", warps=16, registers=64),
    Variant("w16 r40", warps=16, registers=40),
)
CASES = [
    Case(model, *shape, mapped, parts)
    for model, shape, mapped in product(WIDTHS, SHAPES, (False, True))
    for parts in ((1,) if shape[0] > 1 else (2, 4) if model == "1.5B" else (1, 2, 4))
]


@contextmanager
def constants(variant: Variant) -> Iterator[None]:
    kept = residual.MAX_WARPS, gate.MAX_REGISTERS, gate.MAX_EAGER
    residual.MAX_WARPS, gate.MAX_REGISTERS, gate.MAX_EAGER = variant.warps, variant.registers, variant.eager
    try:
        yield
    finally:
        residual.MAX_WARPS, gate.MAX_REGISTERS, gate.MAX_EAGER = kept


class Bench:
    """Inputs of a case: a star of drafts, whose kept positions lie far from their parents and the others near."""

    def __init__(self, case: Case) -> None:
        S, B, T = case.num_slots, case.num_branches, BLOCK
        self.size, self.width, self.case = S * B * T, WIDTHS[case.model], case
        self.random = torch.Generator("cuda").manual_seed(0)
        options = {"device": "cuda", "dtype": torch.int32}
        bit_B = 1 << torch.arange(B, device="cuda")
        self.branches = Branches(
            tokens_SBT=torch.zeros((S, B, T), dtype=torch.long, device="cuda"),
            kind_SB=torch.full((S, B), DENOISE, **options),
            index_SB=torch.arange(S * B, **options).view(S, B),
            num_live_1=torch.tensor([S * B], **options),
            slot_A=torch.arange(S, **options).repeat_interleave(B),
            branch_A=torch.arange(B, **options).repeat(S),
            start_S=torch.full((S,), 500, device="cuda"),
            parent_B=torch.zeros(B, **options),
            ancestors_B=bit_B | 1,
        )
        self.kept_SBT = torch.rand((S, B, T), device="cuda", generator=self.random) < case.kept
        self.kept_SBT[:, 0] = True
        self.weight = torch.ones(self.width, device="cuda", dtype=BF16)
        self.layers = [self.buffers() for _ in range(4)]

    def empty_map(self) -> RowMap:
        S, B, T = self.kept_SBT.shape
        options = {"device": "cuda", "dtype": torch.int32}
        keep = torch.zeros((S, T), dtype=torch.long, device="cuda")
        row, count, slot_count = (torch.zeros(size, **options) for size in ((S, B, T), (1,), (S,)))
        return RowMap(
            keep, row, count, torch.zeros(self.size, **options), slot_count, torch.zeros((S, B * T), **options)
        )

    def buffers(self) -> tuple[torch.Tensor, Addend, RowMap, RowMap, torch.Tensor, torch.Tensor]:
        """Stream, what is added, the map before, the map to be filled, stream and normed rows to be written."""
        S, B, T = self.kept_SBT.shape
        options = {"device": "cuda", "generator": self.random}
        main = torch.randn((S, 1, T, self.width), **options)
        near = 0.01 + 0.5 * self.kept_SBT[..., None]
        near[:, 0] = 0.0
        source = (main + near * torch.randn((S, B, T, self.width), **options)).to(BF16).view(self.size, self.width)
        parts = 0.01 * torch.randn((self.case.parts, self.size, self.width), **options)
        before = self.empty_map()
        before.keep_ST.copy_((self.kept_SBT * (1 << torch.arange(B, device="cuda"))[:, None]).sum(1))
        before.row_SBT.copy_((self.kept_SBT.flatten().cumsum(0) - 1).view(S, B, T))
        out = torch.empty_like(source), torch.empty_like(source)
        return source, Addend(Parts(parts), before if self.case.mapped else None), before, self.empty_map(), *out

    def run(self, launches: int = LAUNCHES) -> None:
        for i in range(launches):
            source, addend, before, filled, stream, normed = self.layers[i % len(self.layers)]
            inherit = None if self.case.mapped else before
            gate.gate_rows(
                source, False, addend, self.branches, self.weight, 1e-6, DELTA, inherit, True, stream, filled, normed
            )

    def clear(self) -> None:
        for *_, filled, _, _ in self.layers:
            for x in (filled.keep_ST, filled.count_1, filled.slot_count_S):
                x.zero_()


def launch_us(bench: Bench) -> float:
    """Median time of a launch. The maps are cleared before every group of launches that fills each once."""

    def run() -> None:
        for _ in range(LAUNCHES // len(bench.layers)):
            bench.clear()
            bench.run(len(bench.layers))

    def only_clear() -> None:
        for _ in range(LAUNCHES // len(bench.layers)):
            bench.clear()

    return (replay_us(run) - replay_us(only_clear)) / LAUNCHES


def compile_one(job: tuple[Case, Variant]) -> None:
    """Leave the kernel in the cache on disk."""
    case, variant = job
    bench = Bench(case)
    with constants(variant):
        bench.run(1)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=30, help="seconds, compilation included")
    parser.add_argument("--out", type=Path, default=None, help="JSON with every measurement")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    options = parser.parse_args()
    begin = time.monotonic()
    jobs = list(product([case for case in CASES if case.kept != 0.15 or case.num_slots > 1], VARIANTS))
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs))
    print(f"{len(jobs)} gates compiled after {time.monotonic() - begin:.0f} s", flush=True)
    records = []
    for case in CASES:
        if time.monotonic() - begin > options.budget:
            print(f"out of time at {case.name}")
            break
        bench, times = Bench(case), {}
        for variant in VARIANTS:
            with constants(variant):
                times[variant.name] = launch_us(bench)
        kept = int(bench.layers[0][3].count_1)
        print(f"{case.name}, {kept} rows: " + ", ".join(f"{name} {us:.1f}" for name, us in times.items()), flush=True)
        records.append({**asdict(case), "rows": kept, "us": times})
    if options.out:
        options.out.write_text(json.dumps(records))
    print(f"done after {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
