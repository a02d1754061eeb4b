"""What keeps a sum's order fixed, so that the same row gives the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fixed_arithmetic(deterministic: bool, device: torch.device) -> Iterator[None]:
    """On CPU, deterministic decoding runs on one thread: BLAS splits large products over threads in ways that depend
    on the number of rows, which changes their bits. Workers are the way to use more cores."""
    threads = torch.get_num_threads()
    single = deterministic and device.type == "cpu" and threads > 1
    if single:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if single:
            torch.set_num_threads(threads)
