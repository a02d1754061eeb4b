"""The operations of a fused step as one table, so that the same step runs on Triton kernels or on their references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

Operation = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Operations:
    """One function for every operation of ``kernels.fused``; all write into buffers that the caller made."""

    build_branches: Operation
    gate_rows: Operation
    linear_rows: Operation
    rope_rows: Operation
    prefix_attention: Operation
    block_attention: Operation
    swiglu_rows: Operation
    head_norm: Operation
    head_rows: Operation
    accept: Operation
    commit_kv: Operation
    tally_folds: Operation
    store_accepted: Operation
    store_keys: Operation
    open_block: Operation


_MODULES = {
    "build_branches": "drafting",
    "gate_rows": "gate",
    "linear_rows": "linear",
    "rope_rows": "rope",
    "prefix_attention": "prefix_attention",
    "block_attention": "block_attention",
    "swiglu_rows": "linear",
    "head_norm": "norm",
    "head_rows": "head",
    "accept": "acceptance",
    "commit_kv": "cache",
    "tally_folds": "tally",
    "store_accepted": "storing",
    "store_keys": "cache",
    "open_block": "opening",
}


def load_operations(reference: bool = False) -> Operations:
    """The Triton kernels, or with ``reference`` their twins in torch. Imported late: a CPU job needs no Triton."""
    found = {}
    for field in fields(Operations):
        module = import_module(f"kernels.fused.{_MODULES[field.name]}")
        found[field.name] = getattr(module, field.name + "_reference" * reference)
    return Operations(**found)
