"""Committed keys and values against the reference, and position by position."""

from __future__ import annotations

import pytest
import torch

from kernels.fused.cache import commit_kv, commit_kv_reference
from tests.kernels.fused_branches import GARBAGE
from tests.kernels.fused_inputs import DEVICE, DTYPES, poisoned

PAGE = 4
CASES = {
    # Committed branch, its length and start, by slot.
    "mixed": ([-1, 2, 0, -1, 1], [GARBAGE, 5, 9, 3, 1], [GARBAGE, 6, 0, 2, 11]),
    "none": ([-1, -1], [3, 3], [0, 4]),
    "more slots than groups": ([0] * 11, [3] * 11, list(range(11))),
    "empty": ([1], [0], [4]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 24), (1, 16)])
def test_commit_kv(case: str, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    branch_S, length_S, start_S = CASES[case]
    num_layers, num_slots, num_branches, block, entries = 2, len(branch_S), 3, 9, 6
    num_rows = num_slots * num_branches * block
    k, v = torch.randn(2, num_layers, num_rows, kv_heads, head_dim, device=DEVICE).to(dtype)
    rows = torch.full((num_layers, num_slots, num_branches, block), GARBAGE, dtype=torch.int32)
    for s, b in enumerate(branch_S):
        for layer in range(num_layers):
            rows[layer, s, b] = torch.randperm(num_rows)[:block].int() if b >= 0 else GARBAGE
    table = torch.randperm(num_slots * entries).view(num_slots, entries)
    want_k, want_v = (
        poisoned(num_layers, num_slots * entries, PAGE, kv_heads, head_dim, dtype=dtype) for _ in range(2)
    )
    for s, b in enumerate(branch_S):
        for t in range(length_S[s] if b >= 0 else 0):
            page, offset = table[s, (start_S[s] + t) // PAGE], (start_S[s] + t) % PAGE
            for layer in range(num_layers):
                want_k[layer, page, offset] = k[layer, rows[layer, s, b, t]]
                want_v[layer, page, offset] = v[layer, rows[layer, s, b, t]]
    on_device = (
        rows.to(DEVICE),
        torch.tensor(branch_S, dtype=torch.int32, device=DEVICE),
        torch.tensor(length_S, device=DEVICE),
        torch.tensor(start_S, device=DEVICE),
        table.to(DEVICE),
    )
    for commit in (commit_kv, commit_kv_reference):
        got_k, got_v = poisoned(*want_k.shape, dtype=dtype), poisoned(*want_v.shape, dtype=dtype)
        commit(k, v, *on_device, got_k, got_v)
        assert torch.equal(got_k.nan_to_num(9), want_k.nan_to_num(9))
        assert torch.equal(got_v.nan_to_num(9), want_v.nan_to_num(9))
