"""Timing of captured launches, for the tools beside this."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch


def replay_us(run: Callable[[], None]) -> float:
    """Median time of a graph that holds one run, in microseconds."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return median(times[2:])
