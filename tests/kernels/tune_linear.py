"""Time the projections' plans beside cuBLAS on real weight shapes, and check that none of them changes a bit.

    python -m tests.kernels.tune_linear --budget 90 --out tune_linear.json

Weights are rotated over copies larger than the L2 cache; a CUDA graph runs all of them, the median replay counts. One
line a shape and number of rows, in microseconds: cuBLAS (a plain product, also for gate and up) and the default plan,
then for every number of partial sums the best plan with its bandwidth over the weights or its arithmetic rate. Every
other time is in the JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from kernels.fused.layout import Parts
from kernels.fused.linear import project_rows
from kernels.fused.linear_plan import (
    FULL,
    HALF,
    NUM_SMS,
    PARALLEL_ROWS,
    SIDE_BY_SIDE_ROWS,
    THIRD,
    Plan,
    num_splits,
    plan,
)
from tests.kernels.gpu_timing import replay_us

SHAPES = {
    "1.5B": {"gate_up": (8960, 1536), "down": (1536, 8960), "qkv": (2048, 1536), "o": (1536, 1536)},
    "8B": {"gate_up": (14336, 4096), "down": (4096, 14336), "qkv": (6144, 4096), "o": (4096, 4096)},
    "7B": {"gate_up": (18944, 3584), "down": (3584, 18944), "qkv": (4608, 3584), "o": (3584, 3584)},
    "14B": {"gate_up": (16384, 5120), "down": (5120, 16384), "qkv": (7168, 5120), "o": (5120, 5120)},
    "3B": {"gate_up": (9216, 3072), "down": (3072, 9216), "qkv": (6144, 3072), "o": (3072, 4096)},
}
"""(N, K) by model and weight; N of gate and of up each. The first models are timed first."""
WEIGHTS = ("gate_up", "down", "qkv", "o")
ROOMS = {32: (32,), 288: (72, 96, 288), 2304: (288, 576, 1152, 2304)}
"""Rows to time by the room of the buffers, which decides among plans."""
ROTATED_BYTES = 200e6
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Candidate:
    tiles: Plan
    gated: bool
    sequential: bool = False
    """Splits one after another, or as the number of rows decides where the plan has slots."""

    @property
    def name(self) -> str:
        t = self.tiles
        how = ("tma" if t.tma else "cp") + (" seq" if self.sequential else "") + (" cut" if t.slots else "")
        early = f" early {t.prefetch >> 20}M" if t.prefetch else ""
        return f"n{t.tile_n} h{t.tall}/{len(t.heights)} k{t.tile_k} w{t.num_warps} {t.shared // 1024}K {how}{early}"


@dataclass(frozen=True)
class Record:
    rows: int
    plan: str
    splits: int
    us: float


def candidates(room: int, gated: bool) -> list[Candidate]:
    """Plans worth a try; the default of ``linear_plan.plan`` need not be among them."""
    low = (32, 64, 80, 96, 128, 144, 160)
    few = Plan(heights=low, tile_n=64, tile_k=64, num_warps=4, shared=HALF, tma=True)
    if room == 32:
        base = replace(few, heights=(32,))
        tiles = [base, replace(base, tile_k=128), replace(base, tile_k=128, shared=FULL)]
        early = [replace(t, prefetch=size << 20) for t in tiles[:2] for size in (4, 8, 16)]
        return [Candidate(t, gated) for t in tiles + early]
    if room == 288:
        wide = replace(few, tile_n=128, num_warps=8, shared=FULL)
        # A third of a multiprocessor's memory, and of its registers: tiles of at most 96 rows.
        third = replace(few, heights=low[:4], shared=THIRD)
        tiles = [few, replace(few, shared=FULL), wide, replace(wide, shared=HALF, heights=low[:-1])]
        tiles += [third, replace(third, tile_k=32)] if gated else [replace(wide, heights=(*low, 288))]
        return [Candidate(t, gated) for t in tiles]
    if gated:
        square = replace(few, heights=(64, 96, 128), num_warps=8)
        tiles = [replace(few, slots=2 * NUM_SMS), few, square, replace(square, slots=2 * NUM_SMS)]
        return [Candidate(t, True) for t in tiles]
    wide = replace(few, heights=(64, 96, 128), tile_n=128, num_warps=8, shared=FULL)
    tall = replace(wide, heights=(64, 96, 128, 192))
    cut = [replace(t, slots=NUM_SMS) for t in (wide, tall)] + [replace(few, slots=2 * NUM_SMS)]
    return [Candidate(t, False, True) for t in (*cut, wide, few)]


def default_of(N: int, K: int, room: int, gated: bool) -> Candidate:
    sequential = not gated and room > PARALLEL_ROWS
    return Candidate(plan(N, K, BF16, room, gated=gated), gated, sequential)


def every_candidate(rooms: list[int]) -> list[Candidate]:
    """Defaults first."""
    weights = [(name == "gate_up", shape) for model in SHAPES.values() for name, shape in model.items()]
    found = [default_of(*shape, room, gated) for room in rooms for gated, shape in weights]
    found += [c for room, gated in itertools.product(rooms, (True, False)) for c in candidates(room, gated)]
    return list(dict.fromkeys(found))


def call(
    candidate: Candidate, x_RK: torch.Tensor, weight: torch.Tensor, count_1: torch.Tensor, splits: int,
    out: Parts,
) -> None:  # fmt: skip
    N = weight.shape[0] // (2 if candidate.gated else 1)
    project_rows(x_RK, weight, count_1, 1, out, N, 1 if candidate.gated else splits, candidate.gated, candidate.tiles)


def call_all(
    candidate: Candidate, x_RK: torch.Tensor, weights: list[torch.Tensor], count_1: torch.Tensor, splits: int,
    out: Parts,
) -> None:  # fmt: skip
    for weight in weights:
        call(candidate, x_RK, weight, count_1, splits, out)


def cublas_all(x_RK: torch.Tensor, weights: list[torch.Tensor]) -> None:
    for weight in weights:
        F.linear(x_RK, weight)


def output(candidate: Candidate, R: int, N: int, splits: int) -> Parts:
    if candidate.gated:
        return Parts(torch.full((1, R, N), torch.nan, device="cuda", dtype=BF16))
    if candidate.sequential and candidate.tiles.slots and splits > 1:
        stride = min(SIDE_BY_SIDE_ROWS, R)
        buffer = torch.full((((splits - 1) * stride + R) * N,), torch.nan, device="cuda")
        used_1 = torch.ones(1, device="cuda", dtype=torch.int32)
        return Parts(buffer.as_strided((splits, R, N), (stride * N, N, 1)), used_1)
    return Parts(torch.full((1 if candidate.sequential else splits, R, N), torch.nan, device="cuda"))


def compile_one(candidate: Candidate) -> str | None:
    """Leave the kernel in the cache on disk; what went wrong, if anything."""
    try:
        weight = torch.zeros(512, 1024, device="cuda", dtype=BF16)
        x_RK = torch.zeros(candidate.tiles.tall, 1024, device="cuda", dtype=BF16)
        count_1 = torch.zeros(1, device="cuda", dtype=torch.int32)
        N = 256 if candidate.gated else 512
        call(candidate, x_RK, weight, count_1, 4, output(candidate, len(x_RK), N, 4))
        torch.cuda.synchronize()
    except Exception as error:  # Whatever it is, the other candidates are still worth timing.
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def changed_bits(candidate: Candidate) -> list[str]:
    """Calls whose rows differ from those of the first plan in a call of 304 rows."""
    first = Candidate(candidates(288, candidate.gated)[0].tiles, candidate.gated)
    found = []
    for N, K in ((1536, 1536), (4608, 3584)):
        generator = torch.Generator("cuda").manual_seed(N)
        x_RK = torch.randn(304, K, device="cuda", dtype=BF16, generator=generator)
        rows_n = N * (2 if candidate.gated else 1)
        weight = torch.randn(rows_n, K, device="cuda", dtype=BF16, generator=generator) * K**-0.5
        splits = num_splits(N, K, BF16)
        want = output(first, 304, N, splits)
        call(first, x_RK, weight, torch.tensor([304], device="cuda", dtype=torch.int32), splits, want)
        for rows, room in ((32, 32), (32, 304), (70, 96), (96, 304), (160, 160), (230, 304), (304, 304)):
            got = output(candidate, room, N, splits)
            call(candidate, x_RK[:room], weight, torch.tensor([rows], device="cuda", dtype=torch.int32), splits, got)
            if not torch.equal(got.total(slice(rows)), want.total(slice(rows))):
                found.append(f"{N}x{K} rows {rows} of {room}")
    return found


def split_choices(candidate: Candidate, N: int, K: int, room: int) -> list[int]:
    """The default first, then others."""
    default = num_splits(N, K, BF16)
    if candidate.gated:
        return [1]
    return [default, *(splits for splits in (4, 3, 2, 1) if splits != default and room <= 288)]


def time_shape(N: int, K: int, gated: bool, room: int, usable: set[Candidate]) -> Iterator[Record]:
    """One record for every number of rows, candidate and number of splits; the default is the first of ours."""
    weight_rows = 2 * N if gated else N
    copies = min(28, max(3, int(ROTATED_BYTES / (weight_rows * K * 2))))
    weights = [torch.randn(weight_rows, K, device="cuda", dtype=BF16) * K**-0.5 for _ in range(copies)]
    x_RK = torch.randn(room, K, device="cuda", dtype=BF16)
    count_1 = torch.zeros(1, device="cuda", dtype=torch.int32)
    tried = [c for c in dict.fromkeys([default_of(N, K, room, gated), *candidates(room, gated)]) if c in usable]
    for rows in ROOMS[room]:
        count_1.fill_(rows)
        yield Record(rows, "cuBLAS", 1, replay_us(partial(cublas_all, x_RK[:rows], weights)) / copies)
        for candidate in tried:
            for splits in split_choices(candidate, N, K, room):
                out = output(candidate, room, N, splits)
                us = replay_us(partial(call_all, candidate, x_RK, weights, count_1, splits, out))
                yield Record(rows, candidate.name, splits, us / copies)


def summary(title: str, weight_bytes: int, records: list[Record]) -> str:
    lines = []
    for rows, group in itertools.groupby(records, key=lambda record: record.rows):
        cublas, *ours = group
        if ours:
            lines.append(f"{title:12} {rows:4} {cublas.us:6.1f} {ours[0].us:6.1f}")
            for splits, plans in itertools.groupby(sorted(ours, key=lambda r: r.splits), key=lambda r: r.splits):
                best = min(plans, key=lambda record: record.us)
                rate = weight_bytes / best.us / 1e6
                speed = f"{rate:.2f} TB/s" if rows <= 288 else f"{rate * rows:.0f} TFLOP/s"
                lines.append(f"{'':18} s{splits} {best.us:6.1f} {speed} {best.plan}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=90, help="seconds, compilation included")
    parser.add_argument("--out", type=Path, default=None, help="JSON with every measurement")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rooms", nargs="+", type=int, choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    options = parser.parse_args()
    begin = time.monotonic()

    found = every_candidate(options.rooms)
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        errors = dict(zip(found, pool.map(compile_one, found), strict=True))
    usable = {candidate for candidate, error in errors.items() if error is None}
    for candidate in found:
        if candidate not in usable:
            print(f"cannot use {candidate.name} gated={candidate.gated}: {errors[candidate]}")
    print(f"{len(usable)} plans compiled after {time.monotonic() - begin:.0f} s", flush=True)

    changed = {f"{c.name} gated={c.gated}": changed_bits(c) for c in found if c in usable}
    bad = {name: calls for name, calls in changed.items() if calls}
    print(f"BITS DIFFER: {bad}" if bad else "no plan changes a bit")
    print(f"{'':12} rows cuBLAS default, after {time.monotonic() - begin:.0f} s", flush=True)

    records = []
    for model, room, name in itertools.product(options.models, options.rooms, WEIGHTS):
        if time.monotonic() - begin > options.budget:
            print(f"out of time at {model}")
            break
        (N, K), gated = SHAPES[model][name], name == "gate_up"
        here = list(time_shape(N, K, gated, room, usable))
        records += [{"model": model, "weight": name, "N": N, "K": K, "room": room} | asdict(record) for record in here]
        print(summary(f"{model} {name}", N * K * (4 if gated else 2), here), flush=True)
    if options.out:
        plans = {f"{c.name} gated={c.gated}": asdict(c.tiles) for c in found}
        options.out.write_text(json.dumps({"bits_differ": bad, "plans": plans, "records": records}))
    print(f"done after {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
