"""Random slots, draft graphs and distributions for the tests of the step's control kernels.

S slots, B branches, A room for computed branches, T block positions, J kept tokens, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from kernels.fused.control import NEVER, Graph, Rules, Slots
from kernels.fused.layout import VOID, Branches, HeadRows, Predictions
from specfold.branches import GraphTensors
from specfold.drafts import DraftGraph, build_graph, default_graph
from specfold.families.base import BlockRules
from specfold.slots import SlotState
from tests.kernels.fused_inputs import DEVICE, poisoned

VOCAB, MASK, END_THINK, NUM_TOP = 24, 23, 5, 4
STOP_IDS = torch.tensor([3, 11], device=DEVICE)
NO_DRAFTS = default_graph(0)
CHAINS = default_graph(8)
SETS = build_graph([[(0, 0), (1, 0)], [(0, 0), (1, 0), (2, 1)], [(0, 1)], [(i, 0) for i in range(5)]], "sets")
"""Several tokens a step, as under a threshold."""


def rules(
    block: int = 8,
    group: int = 8,
    threshold: float | None = None,
    strict: bool = False,
    shift: int = 0,
    seeded: bool = True,
    verify: bool = False,
    sampled: bool = False,
) -> Rules:
    return Rules(
        block_size=block,
        group_size=group,
        threshold=threshold,
        strict=strict,
        logit_shift=shift,
        seeded=seeded,
        seed_sampled=verify,
        verify_draft=verify,
        mask_id=MASK,
        end_think_id=END_THINK,
        sampled=sampled,
    )


VARIANTS = {
    "fast": (rules(group=4, strict=True, shift=1), CHAINS),
    "fast threshold": (rules(group=4, strict=True, threshold=0.5, shift=1), SETS),
    "nemotron": (rules(), CHAINS),
    "nemotron threshold, odd block": (rules(block=13, group=13, threshold=0.5, seeded=False), SETS),
    "no drafts": (rules(group=4), NO_DRAFTS),
    "few ranks": (rules(group=4, shift=1), default_graph(2)),
    "sampled": (rules(group=4, sampled=True), CHAINS),
    "ar": (rules(block=1, group=1, verify=True), NO_DRAFTS),
    "linear_spec": (rules(threshold=0.0, verify=True), NO_DRAFTS),
}


def oracle_rules(r: Rules) -> BlockRules:
    """The same rules as the torch engine has them."""
    shared = {f.name: getattr(r, f.name) for f in fields(BlockRules) if hasattr(r, f.name)}
    return BlockRules(**shared, aligned=False, prefill_mask="full", final_mask="full", plain_confidence=True)


def graph_tensors(drafts: DraftGraph, budget: int | None = None) -> tuple[Graph, GraphTensors]:
    """A graph for the kernels and for the torch engine."""
    theirs = GraphTensors.build(drafts, torch.device(DEVICE), budget=budget)
    ours = Graph.build(theirs.token_rank_BI.tolist(), theirs.parent_B.tolist(), DEVICE, budget, theirs.place_B.tolist())
    assert ours.depth_B.tolist() == theirs.depth_B.tolist()
    return ours, theirs


def oracle_slots(slots: Slots) -> SlotState:
    """The same slots as the torch engine has them, with an empty output that starts at the first new position."""
    num_slots, block, num_top = slots.guess_token_STJ.shape
    theirs = SlotState.empty(num_slots, block, num_top, 1, 20 * block, torch.device(DEVICE))
    for f in fields(Slots):
        if hasattr(theirs, f.name):
            setattr(theirs, f.name, getattr(slots, f.name).clone())
    theirs.prompt_len_S = slots.start_S + slots.first_new_S
    theirs.output_SC.fill_(-1)
    return theirs


def clone(tensors: Slots) -> Slots:
    return Slots(*(getattr(tensors, f.name).clone() for f in fields(Slots)))


def random_slots(seed: int, r: Rules, num_slots: int, num_top: int) -> Slots:
    """Blocks in every state of progress: fresh, finished, with stop tokens, limits inside, idle ones full of junk."""
    g = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, (num_slots, *shape), generator=g)

    def flip(share: float, *shape: int) -> torch.Tensor:
        return torch.rand(num_slots, *shape, generator=g) < share

    block = r.block_size
    offset = torch.arange(block)
    first_new = torch.where(flip(0.5), 0, ints(0, max(block // 2, 1)))
    masked = flip(0.6, block) & flip(0.9)[:, None] & (offset >= first_new[:, None])
    masked[:, : int(r.seeded)] = False
    special = torch.where(offset < first_new[:, None], flip(0.3, block), flip(0.04, block))
    known = torch.where(special, torch.where(flip(0.5, block), 3, END_THINK), ints(12, MASK, block))
    state = torch.where(masked, MASK, known)
    logprob = torch.randn(num_slots, block, num_top, generator=g).log_softmax(-1).sort(-1, descending=True).values
    logprob = logprob.round(decimals=1).masked_fill((~masked | flip(0.1, block))[..., None], -torch.inf)
    logprob[..., 1:] = logprob[..., 1:].masked_fill(flip(0.1, block)[..., None], -torch.inf)
    start = ints(0, 50)
    limit = start + torch.where(flip(0.3), ints(1, block + 1), ints(1, 4 * block + 1))
    think = torch.where(flip(0.5), NEVER, start + ints(-block, 2 * block))
    slots = Slots(
        active_S=flip(0.85),
        pending_S=torch.zeros(num_slots, dtype=torch.bool),
        state_ST=state,
        start_S=start,
        first_new_S=first_new,
        limit_S=limit,
        think_S=think,
        key_S2=ints(0, 2**32, 2),
        sample_S=ints(0, 5),
        temperature_S=torch.where(flip(0.7), 0.8, 0.0) if r.sampled else torch.zeros(num_slots),
        has_guess_S=flip(0.85) & (num_top > 0),
        guess_token_STJ=torch.rand(num_slots, block, MASK, generator=g).argsort(-1)[..., :num_top].contiguous(),
        guess_logprob_STJ=logprob,
    )
    slots.guess_logprob_STJ[~slots.has_guess_S] = torch.nan
    return Slots(*(getattr(slots, f.name).to(DEVICE) for f in fields(Slots)))


def empty_branches(slots: Slots, graph: Graph) -> Branches:
    """Tables full of junk, counts at zero."""
    num_slots, block = slots.state_ST.shape
    room = num_slots * graph.num_branches
    return Branches(
        tokens_SBT=poisoned(num_slots, graph.num_branches, block, dtype=torch.int64),
        kind_SB=poisoned(num_slots, graph.num_branches, dtype=torch.int32),
        index_SB=poisoned(num_slots, graph.num_branches, dtype=torch.int32) << 30,
        num_live_1=torch.zeros(1, dtype=torch.int32, device=DEVICE),
        slot_A=poisoned(room, dtype=torch.int32),
        branch_A=poisoned(room, dtype=torch.int32),
        start_S=slots.start_S,
        parent_B=graph.parent_B,
        ancestors_B=graph.ancestors_B,
    )


def empty_head(slots: Slots, graph: Graph) -> HeadRows:
    count = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    return HeadRows(
        count, *(poisoned(slots.state_ST.numel() * graph.num_branches, dtype=torch.int32) for _ in "123456")
    )


def empty_predictions(slots: Slots, graph: Graph) -> Predictions:
    num_slots, block = slots.state_ST.shape
    shape = (num_slots * graph.num_branches, block)
    kept = (*shape, slots.guess_token_STJ.shape[2])
    return Predictions(
        token_AT=poisoned(*shape, dtype=torch.int64),
        confidence_AT=poisoned(*shape),
        top_token_ATJ=poisoned(*kept, dtype=torch.int64),
        top_logprob_ATJ=poisoned(*kept),
        next_AT=poisoned(*shape, dtype=torch.int64),
        invalid_A=poisoned(shape[0], dtype=torch.int32),
    )


@dataclass
class Answers:
    """What a model might say of every branch, by slot and number."""

    token_SBT: torch.Tensor
    confidence_SBT: torch.Tensor
    top_token_SBTJ: torch.Tensor
    top_logprob_SBTJ: torch.Tensor
    next_SBT: torch.Tensor
    invalid_SB: torch.Tensor

    @classmethod
    def random(cls, seed: int, slots: Slots, tokens_SBT: torch.Tensor) -> Answers:
        """Mostly what the slots' guesses led the drafts to expect, so that drafts come true."""
        g = torch.Generator().manual_seed(seed)
        shape = tuple(tokens_SBT.shape)
        num_top = slots.guess_token_STJ.shape[2]

        def ints(*size: int) -> torch.Tensor:
            return torch.randint(0, MASK, size, generator=g)

        def flip(share: float, *size: int) -> torch.Tensor:
            return torch.rand(*size, generator=g) < share

        # Few values: ties occur, and 0.5 stands on the threshold.
        confidence = torch.randint(1, 5, shape, generator=g) / 4
        token = torch.where(flip(0.1, *shape), 3, ints(*shape))
        if num_top:
            expected = flip(0.85, shape[0], 1, shape[2]).expand(shape) & flip(0.95, *shape)
            guess, logprob = slots.guess_token_STJ.cpu()[:, None, :, 0], slots.guess_logprob_STJ.cpu()[:, None, :, 0]
            expected = expected & torch.isfinite(logprob)
            token, confidence = torch.where(expected, guess, token), torch.where(expected, logprob.exp(), confidence)
        following = torch.where(flip(0.8, *shape), tokens_SBT.cpu().roll(-1, -1), ints(*shape))
        following = torch.where(flip(0.1, *shape), 3, following)
        top_logprob = torch.randn(*shape, num_top, generator=g).sort(-1, descending=True).values
        top_token = torch.rand(*shape, MASK, generator=g).argsort(-1)[..., :num_top]
        answers = (token, confidence, top_token, top_logprob, following, flip(0.03, *shape[:2]).int())
        return cls(*(x.to(DEVICE) for x in answers))

    def fill(self, predictions: Predictions, branches: Branches, head: HeadRows) -> None:
        """Plays the LM head: answers where the head's rows ask."""
        s, b = (branches.kind_SB != VOID).nonzero(as_tuple=True)
        a = branches.index_SB[s, b].long()
        room, block = predictions.token_AT.shape
        target = head.target_D[: int(head.count_1)].long()
        asked = torch.zeros(2, room, block, dtype=torch.bool, device=DEVICE)
        asked.view(-1)[target] = True
        for name, kind in (("token", 0), ("confidence", 0), ("top_token", 0), ("top_logprob", 0), ("next", 1)):
            suffix = "TJ" if name.startswith("top") else "T"
            into, answer = getattr(predictions, f"{name}_A{suffix}"), getattr(self, f"{name}_SB{suffix}")[s, b]
            wanted = asked[kind, a].view(len(a), block, *(1,) * (answer.dim() - 2))
            into[a] = torch.where(wanted, answer, into[a])
        predictions.invalid_A[a] = self.invalid_SB[s, b]
