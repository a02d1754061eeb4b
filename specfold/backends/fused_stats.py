"""A row's counters from the device to the host without waiting for the step in flight."""

from __future__ import annotations

from dataclasses import fields

import torch

from kernels.fused.control import Counters
from specfold.stats import DecodeStats


class CounterCopy:
    """The counters of one slot as they stand when the work queued so far is done."""

    def __init__(self, counters: Counters, slot: int, has_drafts: bool, carried_block: int = 0) -> None:
        """``carried_block``: the block's size where steps inherit from one another, else 0."""
        self._carried_block = carried_block
        self._names = [f.name for f in fields(counters)]
        parts = [getattr(counters, name)[slot] for name in self._names]
        self._shapes = [part.shape for part in parts]
        self._has_drafts = has_drafts
        flat = torch.cat([part.flatten() for part in parts])
        self._arrived: torch.cuda.Event | None = None
        if flat.is_cuda:
            self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._host = flat

    def ready(self) -> bool:
        return self._arrived is None or self._arrived.query()

    def read(self) -> DecodeStats:
        if self._arrived is not None:
            self._arrived.synchronize()
        sizes = [shape.numel() for shape in self._shapes]
        parts = [part.view(shape) for part, shape in zip(self._host.split(sizes), self._shapes, strict=True)]
        c = {name.rsplit("_S", 1)[0]: part.tolist() for name, part in zip(self._names, parts, strict=True)}
        return DecodeStats(
            denoise_forwards=c["denoise"],
            commit_forwards=c["commit"],
            drafts_proposed=sum(c["proposed"]),
            drafts_accepted=sum(c["accepted"]),
            proposed_by_depth=c["proposed"],
            accepted_by_depth=c["accepted"],
            run_lengths=c["run_lengths"] if self._has_drafts else [],
            recomputed_qkv_rows=c["qkv_rows"],
            recomputed_ffn_rows=c["ffn_rows"],
            draft_rows=c["draft_rows"],
            folded_qkv=c["folded_qkv"] if self._has_drafts else [],
            folded_ffn=c["folded_ffn"] if self._has_drafts else [],
            main_rows=c["denoise"] * self._carried_block,
            main_folded_qkv=c["main_qkv"] if self._carried_block else [],
            main_folded_ffn=c["main_ffn"] if self._carried_block else [],
        )
