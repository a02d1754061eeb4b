"""Committed keys and values against the reference, and position by position."""

from __future__ import annotations

import pytest
import torch

from kernels.fused.cache import commit_kv, commit_kv_reference, store_keys, store_keys_reference
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_of_a_step_are_stored_for_the_next(dtype: torch.dtype) -> None:
    """Of computed positions of slots that go on; what a stored row served stays as it is."""
    torch.manual_seed(0)
    layers, slots, block, rows = 2, 3, 5, 15
    branch_S = torch.tensor([0, -1, 0], dtype=torch.int32, device=DEVICE)
    stored = rows + torch.arange(slots * block).view(slots, block)
    row_LST = torch.stack([torch.randperm(rows).view(slots, block) for _ in range(layers)])
    row_LST[:, :, ::2] = stored[:, ::2]
    row_LST = row_LST.int().to(DEVICE)
    start = [torch.randn(layers, rows + slots * block, 2, 8).to(DEVICE, dtype) for _ in range(2)]
    for store in (store_keys, store_keys_reference):
        k, v = (x.clone() for x in start)
        store(k, v, row_LST, branch_S)
        for got, before in ((k, start[0]), (v, start[1])):
            assert torch.equal(got[:, :rows], before[:, :rows])
            for layer in range(layers):
                for s in range(slots):
                    for t in range(block):
                        row = int(row_LST[layer, s, t]) if s != 1 else int(stored[s, t])
                        assert torch.equal(got[layer, stored[s, t]], before[layer, row])
