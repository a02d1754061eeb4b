"""A fixed sequence of kernel launches: captured as a CUDA graph on a GPU, simply called elsewhere."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


class Replay:
    """Calls ``launch`` again and again. The first call happens at once, to compile kernels, and must change nothing
    that matters: make it while no slot is active."""

    def __init__(self, launch: Callable[[], None], device: torch.device) -> None:
        self._launch = launch
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            launch()
            torch.cuda.synchronize(device)
            # An older graph that the collector destroyed in the middle would spoil this one.
            gc.collect()
            gc.disable()
            try:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                    launch()
            finally:
                gc.enable()

    def __call__(self) -> None:
        if self._graph is None:
            self._launch()
        else:
            self._graph.replay()
