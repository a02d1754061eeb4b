"""Counting of recomputed and folded positions, fused, against the reference and a count by hand."""

from __future__ import annotations

from dataclasses import fields

import torch

from kernels.fused.control import Counters
from kernels.fused.layout import DENOISE, FINAL, VOID
from kernels.fused.tally import tally_folds, tally_folds_reference
from tests.kernels.control_inputs import CHAINS, VARIANTS, empty_branches, graph_tensors, random_slots
from tests.kernels.fused_inputs import DEVICE


def test_folds_are_counted_by_layer_and_depth() -> None:
    graph, _ = graph_tensors(CHAINS)
    slots = random_slots(0, VARIANTS["nemotron threshold, odd block"][0], 4, 1)
    branches = empty_branches(slots, graph)
    num_layers, (num_slots, block), num_branches = 3, slots.state_ST.shape, graph.num_branches
    g = torch.Generator().manual_seed(0)
    branches.kind_SB.copy_(torch.randint(0, 3, (num_slots, num_branches), generator=g))
    branches.kind_SB[0] = VOID
    kept = torch.rand(num_layers, 2, num_slots, num_branches, block, generator=g).to(DEVICE) < 0.4
    kept |= ((branches.kind_SB == FINAL) & (branches.kind_SB != VOID))[..., None]
    kept[:, :, :2, 0] = True
    kept &= (branches.kind_SB != VOID)[..., None]
    keep = (kept.long() << torch.arange(num_branches, device=DEVICE)[:, None]).sum(-2)
    counted = []
    for tally in (tally_folds, tally_folds_reference):
        counters = Counters.empty(num_slots, num_branches, num_layers, graph.num_depths, DEVICE)
        for _ in range(2):
            tally(branches, graph, keep, counters, carries=True)
        counted.append(counters)
    assert all(torch.equal(getattr(counted[0], f.name), getattr(counted[1], f.name)) for f in fields(Counters))
    for slot in range(num_slots):
        assert int(counted[0].qkv_rows_S[slot]) == 2 * int(kept[:, 0, slot].sum())
        assert int(counted[0].ffn_rows_S[slot]) == 2 * int(kept[:, 1, slot].sum())
        for layer in range(num_layers):
            in_time = ~kept[layer, 1, slot, 0] & (branches.kind_SB[slot, 0] == DENOISE)
            assert int(counted[0].main_ffn_SL[slot, layer]) == 2 * int(in_time.sum())
            for depth in range(1, graph.num_depths + 1):
                drafts = (branches.kind_SB[slot] == DENOISE) & (graph.depth_B == depth)
                drafts[0] = False
                want = 2 * int((~kept[layer, 1, slot][drafts]).sum())
                assert int(counted[0].folded_ffn_SLK[slot, layer, depth - 1]) == want
