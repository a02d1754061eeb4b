"""The training loop: a fixed number of steps on fixed data with fixed seeds, so that a run can be repeated."""

from __future__ import annotations

import math
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_training.dataset import Dataset
from reference_training.model import ReferenceModel
from reference_training.objective import Objective, build_objective

WARMUP_STEPS = 300
REPORT_EVERY = 500


def train(
    model: ReferenceModel, family: str, data: Dataset, mask_id: int, *, steps: int, batch: int, lr: float, seed: int
) -> dict[str, float]:
    """Train in place on the model's device, in bfloat16 there if it is a GPU. Returns the last mean losses."""
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    generator = torch.Generator(device).manual_seed(seed)
    tokens_NL, prompt_len_N, total_len_N = (torch.from_numpy(array).to(device) for array in data)
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.98), weight_decay=0.1, fused=on_gpu)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))
    loss_of = torch.compile(losses, dynamic=False) if on_gpu else losses
    position_T = torch.arange(tokens_NL.shape[1], device=device).repeat(3)
    recent = torch.zeros(2, device=device)
    started = time.perf_counter()
    for step in range(1, steps + 1):
        picked_B = torch.randint(len(tokens_NL), (batch,), generator=generator, device=device)
        rows = (tokens_NL[picked_B].long(), prompt_len_N[picked_B].long(), total_len_N[picked_B].long())
        objective = build_objective(family, *rows, mask_id, generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss, parts = loss_of(model, objective, position_T)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        recent = torch.lerp(recent, parts.detach(), max(1 / step, 0.02))
        if step % REPORT_EVERY == 0 or step in (50, steps):
            clean, noisy = recent.tolist()
            seconds = time.perf_counter() - started
            print(f"step {step} of {steps}: clean {clean:.4f} noisy {noisy:.4f} in {seconds:.1f} s", flush=True)
    return {"clean_loss": clean, "noisy_loss": noisy, "train_seconds": round(seconds, 1)}


def losses(model: ReferenceModel, objective: Objective, position_T: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over all predicted tokens, and the means of the clean and the noisy copies apart."""
    logits_BTV = model(objective.tokens_BT, position_T, objective.mask_BTT)
    loss_BT = F.cross_entropy(logits_BTV.float().flatten(0, 1), objective.targets_BT.flatten(), reduction="none")
    loss_BT = loss_BT.view_as(objective.weights_BT) * objective.weights_BT
    length = loss_BT.shape[1] // 3
    sums, weights = (torch.stack((x[:, :length].sum(), x[:, length:].sum())) for x in (loss_BT, objective.weights_BT))
    return sums.sum() / weights.sum(), sums / weights


def learning_rate(step: int, steps: int) -> float:
    """Share of the peak: linear warm-up, then a cosine down to nothing."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / max(steps - WARMUP_STEPS, 1)))
