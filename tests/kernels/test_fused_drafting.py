"""The branches of a step, fused, against the reference and the torch engine."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from kernels.fused.control import Slots
from kernels.fused.drafting import build_branches, build_branches_reference
from kernels.fused.layout import VOID, Branches, HeadRows, Predictions
from specfold.branches import build_branches as oracle_branches
from specfold.predict import needed
from tests.kernels.control_inputs import (
    MASK,
    NUM_TOP,
    STOP_IDS,
    VARIANTS,
    clone,
    empty_branches,
    empty_head,
    empty_predictions,
    graph_tensors,
    oracle_rules,
    oracle_slots,
    random_slots,
)

BUILDERS = {"triton": build_branches, "reference": build_branches_reference}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("builder", BUILDERS)
def test_branches_are_those_of_the_torch_engine(builder: str, variant: str) -> None:
    rules, drafts = VARIANTS[variant]
    _, oracle_graph = graph_tensors(drafts)
    for seed in range(4):
        slots = random_slots(seed, rules, 6, NUM_TOP if len(drafts) else 0)
        before = clone(slots)
        branches, head, predictions = build(builder, variant, slots)
        for f in fields(Slots):
            assert torch.equal(getattr(slots, f.name).nan_to_num(), getattr(before, f.name).nan_to_num())
        table = oracle_branches(oracle_slots(slots), oracle_graph, oracle_rules(rules), MASK, STOP_IDS)
        assert torch.equal(branches.kind_SB, table.kind_SB.int())
        live = table.kind_SB != VOID
        assert torch.equal(branches.tokens_SBT[live], table.tokens_SBT[live])
        check_list(branches, live)
        check_predictions(branches, predictions)
        check_head(slots, branches, head, variant)


@pytest.mark.parametrize(
    ("variant", "budget"), [("fast", 1), ("fast", 5), ("nemotron threshold, odd block", 2), ("sampled", 3)]
)
@pytest.mark.parametrize("builder", BUILDERS)
def test_pruned_branches_are_those_of_the_torch_engine(builder: str, variant: str, budget: int) -> None:
    rules, drafts = VARIANTS[variant]
    _, oracle_graph = graph_tensors(drafts, budget)
    pruned = 0
    for seed in range(2):
        slots = random_slots(seed, rules, 6, NUM_TOP)
        branches, head, predictions = build(builder, variant, slots, budget)
        table = oracle_branches(oracle_slots(slots), oracle_graph, oracle_rules(rules), MASK, STOP_IDS)
        assert torch.equal(branches.kind_SB, table.kind_SB.int())
        live = table.kind_SB != VOID
        assert (live[:, 1:].sum(-1) <= budget).all()
        parent = oracle_graph.parent_B
        assert (live <= live[:, parent]).all(), "a draft without the one that it folds on"
        assert torch.equal(branches.tokens_SBT[live], table.tokens_SBT[live])
        check_list(branches, live)
        check_predictions(branches, predictions)
        check_head(slots, branches, head, variant)
        whole, _, _ = build("reference", variant, slots)
        pruned += int(whole.num_live_1) - int(branches.num_live_1)
    assert pruned > 3


def build(
    builder: str, variant: str, slots: Slots, budget: int | None = None
) -> tuple[Branches, HeadRows, Predictions]:
    rules, drafts = VARIANTS[variant]
    graph, _ = graph_tensors(drafts, budget)
    out = empty_branches(slots, graph), empty_head(slots, graph), empty_predictions(slots, graph)
    BUILDERS[builder](slots, graph, rules, STOP_IDS, *out)
    return out


def check_list(branches: Branches, live_SB: torch.Tensor) -> None:
    count = int(branches.num_live_1)
    listed = list(zip(branches.slot_A[:count].tolist(), branches.branch_A[:count].tolist(), strict=True))
    assert sorted(listed) == [tuple(x) for x in live_SB.nonzero().tolist()]
    assert [branches.index_SB[s, b] for s, b in listed] == list(range(count))
    places = [[i for i, (s, _) in enumerate(listed) if s == slot] for slot in range(len(live_SB))]
    for at in places:
        assert at == list(range(at[0], at[0] + len(at))) if at else True
        assert [listed[i][1] for i in at] == sorted(listed[i][1] for i in at)
    assert (branches.slot_A[count:] == -1).all()
    assert (branches.index_SB[~live_SB] == -(1 << 30)).all()


def check_predictions(branches: Branches, predictions: Predictions) -> None:
    count = int(branches.num_live_1)
    for x in (predictions.confidence_AT, predictions.top_logprob_ATJ):
        assert (x[:count] == -torch.inf).all()
        assert x[count:].isnan().all()
    assert (predictions.invalid_A[:count] == 0).all()
    assert (predictions.invalid_A[count:] == -1).all()


def check_head(slots: Slots, branches: Branches, head: HeadRows, variant: str) -> None:
    rules, drafts = VARIANTS[variant]
    graph, _ = graph_tensors(drafts)
    count, block = int(branches.num_live_1), rules.block_size
    slot_A, branch_A = branches.slot_A[:count].long(), branches.branch_A[:count].long()
    tokens_AT = branches.tokens_SBT[slot_A, branch_A]
    masked_AT = tokens_AT == MASK
    final_A = ~masked_AT.any(-1)
    need_AT = needed(masked_AT, oracle_rules(rules), graph.num_ranks) & ~final_A[:, None]
    room = branches.tokens_SBT.shape[0] * branches.tokens_SBT.shape[1]
    want = []
    for a, t in need_AT.nonzero().tolist():
        left = 0 if rules.verify_draft else int(masked_AT[a].sum())
        p = a * block + t
        want.append((p - rules.logit_shift, p, int(slot_A[a]), int(slots.start_S[slot_A[a]]) + t, left, 0))
    for a in final_A.nonzero().squeeze(1).tolist() if rules.seeded else ():
        for t in range(0 if rules.verify_draft else block - 1, block):
            p = a * block + t
            greedy = int(not rules.seed_sampled)
            position = int(slots.start_S[slot_A[a]]) + t + 1
            want.append((p, room * block + p, int(slot_A[a]), position, 0, greedy))
    columns = [getattr(head, f.name) for f in fields(HeadRows)[1:]]
    num_rows = int(head.count_1)
    got = list(zip(*(x[:num_rows].tolist() for x in columns), strict=True))
    assert sorted(got) == sorted(want)
    assert all((x[num_rows:] == -1).all() for x in columns)


def test_drafts_of_the_random_slots_are_not_all_void() -> None:
    for variant, least in (("fast", 5), ("fast threshold", 3), ("sampled", 5)):
        rules, _ = VARIANTS[variant]
        live = sum(int(build("reference", variant, random_slots(s, rules, 6, NUM_TOP))[0].num_live_1) for s in range(4))
        assert live > 4 * (6 + least)
