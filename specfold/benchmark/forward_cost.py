"""What a decoding step costs at a given shape, batch and number of drafts: the step that jobs run, timed as a graph.

S slots, B branches, T block positions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from specfold.backends.fused_backend import FusedBackend
from specfold.backends.fused_step import FusedStep
from specfold.benchmark.shapes import weight_floor_s
from specfold.config import DecodeConfig, Mode
from specfold.decoder import Decoder
from specfold.engine import Engine
from specfold.request import Request


@dataclass(frozen=True, slots=True)
class StepCost:
    """Median time of one step of all slots, LM head and bookkeeping included."""

    batch_size: int
    drafts: int
    fold_share: float | None
    """Share of draft positions that were made to fold; None: dense verification."""
    time_share: float | None
    """Share of main positions that were made to inherit from the step before; None: without folding in time."""
    step_ms: float
    spread_ms: float
    """Distance of the quartiles."""
    floor_ms: float
    """Every weight read once."""
    masks_left: int
    """Masks of each row's block: what the LM head computes follows from them."""
    positions: int
    """Positions of all computed branches."""
    qkv_rows: float
    """Rows that were recomputed, mean over layers."""
    ffn_rows: float

    def to_dict(self) -> dict[str, Any]:
        return {name: round(v, 4) if isinstance(v, float) else v for name, v in asdict(self).items()}


def measure_step(
    engine: Engine,
    batch_size: int,
    drafts: int,
    fold_share: float | None,
    prompt_len: int,
    repeats: int,
    masks_left: int | None = None,
    time_share: float | None = None,
) -> StepCost:
    """Times steps as ``ready_step`` gives them, always from the same state."""
    step = ready_step(engine, batch_size, drafts, fold_share, prompt_len, masks_left, time_share)
    masks = int((step.slots.state_ST[0] == engine.mask_token_id).sum())
    times = time_steps(step, repeats, engine.device)
    rows = rows_of_step(step, engine.info.spec.num_layers)
    quartiles = statistics.quantiles(times, n=4)
    return StepCost(
        batch_size=batch_size,
        drafts=drafts,
        fold_share=fold_share if drafts else None,
        time_share=time_share,
        step_ms=statistics.median(times),
        spread_ms=quartiles[2] - quartiles[0],
        floor_ms=1e3 * weight_floor_s(engine.model),
        masks_left=masks,
        positions=rows[0],
        qkv_rows=rows[1],
        ffn_rows=rows[2],
    )


def ready_step(
    engine: Engine,
    batch_size: int,
    drafts: int,
    fold_share: float | None,
    prompt_len: int,
    masks_left: int | None = None,
    time_share: float | None = None,
) -> FusedStep:
    """The step of ``batch_size`` samples of one random prompt, inside their first blocks.

    ``masks_left`` in each block, by default half of it, which is a block's mean. ``fold_share`` forces a pattern: each
    draft recomputes a window of positions, as if round a token just unmasked; ``time_share`` one of main branches.
    """
    mode: Mode = "vanilla" if not drafts else "spiffy" if fold_share is None else "specfold"
    config = DecodeConfig(mode=mode, drafts=drafts, delta_time=None if time_share is None else 0.1, max_new_tokens=96)
    with forced_folding(fold_share if drafts else None, time_share):
        decoder = Decoder(engine, config, batch_size)
    backend = decoder.backend
    assert isinstance(backend, FusedBackend), "step costs are those of the fused backend"
    step = backend.fused_step
    prompt = torch.randint(0, engine.vocab_size - 4, (prompt_len,), generator=torch.Generator().manual_seed(1)).tolist()
    for sample in range(batch_size):
        decoder.admit(Request(prompt, sample_id=sample))
    while not all(row is not None and row.opened for row in decoder.rows):
        decoder.prepare()
    wanted = engine.info.spec.block_size // 2 if masks_left is None else masks_left
    decoder.decode()
    # The next step unmasks one more, and leaves a distribution to draft from.
    fill_blocks(step.slots.state_ST, engine.mask_token_id, wanted + 1)
    decoder.decode()
    return step


def fill_blocks(state_ST: torch.Tensor, mask_id: int, masks_left: int) -> None:
    """Puts some token in place of the first masks of each block, so that ``masks_left`` stay."""
    masked_ST = state_ST == mask_id
    after_ST = masked_ST.flip(1).cumsum(1).flip(1)
    state_ST[masked_ST & (after_ST > masks_left)] = 0


@contextmanager
def forced_folding(fold_share: float | None, time_share: float | None) -> Iterator[None]:
    """Steps made in its scope fold by a pattern, as ``force_folding`` says."""
    make = FusedStep.__init__

    def forced(step: FusedStep, *args: Any, **settings: Any) -> None:
        make(step, *args, **settings)
        if fold_share is not None or time_share is not None:
            force_folding(step, fold_share, time_share)

    setattr(FusedStep, "__init__", forced)  # noqa: B010
    try:
        yield
    finally:
        setattr(FusedStep, "__init__", make)  # noqa: B010


def force_folding(step: FusedStep, fold_share: float | None, time_share: float | None) -> None:
    """From now on every draft recomputes a window of ``1 - fold_share`` of its positions, and every main branch one of
    ``1 - time_share`` (all of them in a block's first step); the others fold. None leaves the step's own gate off."""
    num_slots, num_branches, block = step.shape.num_slots, step.shape.num_branches, step.shape.block
    kept = [1 - (share or 0.0) for share in (time_share, *[fold_share] * (num_branches - 1))]
    width_B = (torch.tensor(kept) * block).round()
    generator = torch.Generator().manual_seed(2)
    first_SB = torch.randint(0, block, (num_slots, num_branches), generator=generator)
    offset_SBT = (torch.arange(block) - first_SB[..., None]) % block
    bits_SBT = (offset_SBT < width_B[:, None]).long() << torch.arange(num_branches)[:, None]
    keep_ST = bits_SBT.sum(1).to(step.result.packed_SN.device)
    step.forward.may_fold = replace(step.forward.maps.of(0, 0), keep_ST=keep_ST)
    # Any residual passes, so the pattern alone decides.
    always = 1e9
    step.folding = replace(
        step.folding,
        delta=-1.0 if fold_share is None else always,
        time_delta=-1.0 if time_share is None else always,
    )


def time_steps(step: FusedStep, repeats: int, device: torch.device) -> list[float]:
    """Milliseconds of single steps, all from the present state."""
    restore = kept_state(step)

    def run() -> None:
        step.run(False, False)

    return _time_on_gpu(run, restore, repeats) if device.type == "cuda" else _time_on_cpu(run, restore, repeats)


def kept_state(step: FusedStep) -> Callable[[], None]:
    """What brings the slots back to where they are now."""
    tensors = [getattr(step.slots, f.name) for f in fields(step.slots)]
    if step.carry is not None:
        tensors += [step.carry.steps_S, step.carry.valid_S]
    kept = [tensor.clone() for tensor in tensors]

    def restore() -> None:
        for tensor, value in zip(tensors, kept, strict=True):
            tensor.copy_(value)

    return restore


def _time_on_gpu(run: Callable[[], None], restore: Callable[[], None], repeats: int) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    restore()
    run()
    for start, end in events:
        restore()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def _time_on_cpu(run: Callable[[], None], restore: Callable[[], None], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        restore()
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def rows_of_step(step: FusedStep, num_layers: int) -> tuple[int, float, float]:
    """Computed positions of the last step, and its recomputed QKV and feed-forward rows, mean over layers."""
    counts_K = step.forward.maps.counts_LKX[..., 0].sum(0).tolist()
    return step.num_live * step.shape.block, counts_K[0] / num_layers, counts_K[1] / num_layers
