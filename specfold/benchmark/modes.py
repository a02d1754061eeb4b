"""The ways of decoding that benches hold against each other, by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from specfold.config import DecodeConfig

MODES = ("vanilla", "block-cache", "spiffy", "specfold", "time", "both")
"""``block-cache``: vanilla with Fast-dLLM-v2's sub-block cache; ``time``: vanilla, folded in time; ``both``: drafts
folded on their parents, and main branches in time."""


def mode_configs(
    modes: Iterable[str], base: DecodeConfig, deltas: Sequence[float], delta_times: Sequence[float], entry: bool = False
) -> dict[str, DecodeConfig]:
    """One configuration a mode, or one for each of its thresholds. ``base`` is vanilla and brings the drafts;
    ``entry``: the last of each kind of folding with the paper's gate, too."""
    configs: dict[str, DecodeConfig] = {}
    for mode in modes:
        if mode == "vanilla":
            configs[mode] = base
        elif mode == "block-cache":
            configs["sub-block cache"] = replace(base, use_block_cache=True)
        elif mode == "spiffy":
            configs[mode] = replace(base, mode="spiffy")
        elif mode == "specfold":
            found = {f"specfold {delta:g}": replace(base, mode="specfold", delta=delta) for delta in deltas}
            configs |= _with_entry(found, "specfold", entry)
        elif mode == "time":
            found = {f"delta_time {time:g}": replace(base, delta_time=time) for time in delta_times}
            configs |= _with_entry(found, "delta_time", entry)
        else:
            folded = replace(base, mode="specfold", delta=deltas[0])
            name = f"specfold {deltas[0]:g}, delta_time"
            configs |= {f"{name} {time:g}": replace(folded, delta_time=time) for time in delta_times}
    return configs


def _with_entry(configs: dict[str, DecodeConfig], mode: str, entry: bool) -> dict[str, DecodeConfig]:
    last = list(configs.values())[-1]
    return configs | ({f"{mode}, entry gate": replace(last, ffn_gate="entry")} if entry else {})
