"""What a step decides, fused, against the reference and the torch engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import specfold.step as engine
from kernels.fused.acceptance import accept, accept_reference
from kernels.fused.control import NEVER, Commit, Counters, Graph, Result, Rules, Slots
from kernels.fused.drafting import build_branches_reference
from kernels.fused.layout import VOID, Branches, Predictions
from kernels.fused.opening import open_block, open_block_reference
from specfold.branches import BranchList, BranchTable, GraphTensors
from specfold.branches import build_branches as oracle_branches
from specfold.families.base import Family
from specfold.predict import Prediction
from specfold.slots import SlotState
from specfold.tally import Tally
from specfold.verify import walk
from tests.kernels.control_inputs import (
    END_THINK,
    MASK,
    NUM_TOP,
    STOP_IDS,
    VARIANTS,
    Answers,
    clone,
    empty_branches,
    empty_head,
    empty_predictions,
    graph_tensors,
    oracle_rules,
    oracle_slots,
    random_slots,
)
from tests.kernels.fused_inputs import DEVICE, poisoned

ACCEPTERS = {"triton": accept, "reference": accept_reference}
OPENERS = {"triton": open_block, "reference": open_block_reference}
SLOTS, LAYERS, STEPS = 6, 2, 3


class Oracle:
    """The torch engine's step, with a model that answers as told."""

    def __init__(self, slots: Slots, rules: Rules, graph: GraphTensors) -> None:
        self.slots: SlotState = oracle_slots(slots)
        self.tally = Tally(len(slots.active_S), LAYERS, rules.block_size, graph)
        self.context = SimpleNamespace(
            rules=oracle_rules(rules),
            graph=graph,
            mask_id=MASK,
            stop_ids=STOP_IDS,
            end_think_id=END_THINK,
            pool=None,
            stored=None,
        )

    def branches(self) -> BranchTable:
        c = self.context
        return oracle_branches(self.slots, c.graph, c.rules, MASK, STOP_IDS)

    def step(self, table: BranchTable, answers: Answers, asked_SBT: torch.Tensor) -> engine.StepResult:
        slots, c = self.slots, self.context
        branches = BranchList.of(table, c.graph, slots.start_S)
        s, b = branches.slot_A, branches.branch_A
        asked = asked_SBT[s, b]
        prediction = Prediction(
            token_AT=answers.token_SBT[s, b],
            confidence_AT=torch.where(asked, answers.confidence_SBT[s, b], -torch.inf),
            top_token_ATJ=answers.top_token_SBTJ[s, b],
            top_logprob_ATJ=torch.where(asked[..., None], answers.top_logprob_SBTJ[s, b], -torch.inf),
            next_AT=answers.next_SBT[s, b],
            invalid_A=answers.invalid_SB[s, b] != 0,
        )
        nothing = [torch.zeros(len(s), slots.block_size, dtype=torch.int64, device=DEVICE)] * LAYERS
        output = SimpleNamespace(fold_qkv_LAT=nothing, fold_ffn_LAT=nothing)
        after = walk(slots, table, branches, prediction, Family(), c.rules, MASK, STOP_IDS)
        engine._commit(slots, after, branches, prediction, output, c)  # type: ignore[arg-type]
        engine._keep(slots, after, branches, prediction, output, c)  # type: ignore[arg-type]
        result = engine._result(slots, after, table, branches, output, c)  # type: ignore[arg-type]
        self.tally.add(result)
        self.branch_S, self.length_S = after.branch_S, after.length_S
        slots.active_S &= ~result.ending.done_S & ~result.invalid_S
        return result


class Fused:
    """The same step by a fused operation, and what the host makes of its reports."""

    def __init__(self, accepter: str, slots: Slots, graph: Graph) -> None:
        self.accepter, self.slots, self.graph = accepter, clone(slots), graph
        num_slots, block = slots.state_ST.shape
        self.result = Result(poisoned(*Result.empty(num_slots, block, DEVICE).packed_SN.shape, dtype=torch.int64))
        self.commit = Commit.empty(num_slots, DEVICE)
        self.counters = Counters.empty(num_slots, graph.num_branches, LAYERS, graph.num_depths, DEVICE)
        self.output: list[list[int]] = [[] for _ in range(num_slots)]

    def branches(self, rules: Rules) -> tuple[Branches, Predictions, torch.Tensor]:
        """The step's table, its predictions before the head, and where the head is asked."""
        slots, graph = self.slots, self.graph
        branches, head = empty_branches(slots, graph), empty_head(slots, graph)
        predictions = empty_predictions(slots, graph)
        build_branches_reference(slots, graph, rules, STOP_IDS, branches, head, predictions)
        self.head = head
        target = head.target_D[: int(head.count_1)].long()
        asked_AT = torch.zeros_like(predictions.token_AT, dtype=torch.bool)
        asked_AT.view(-1)[target[target < asked_AT.numel()]] = True
        live = branches.kind_SB != VOID
        asked_SBT = torch.zeros_like(branches.tokens_SBT, dtype=torch.bool)
        asked_SBT[live] = asked_AT[branches.index_SB[live].long()]
        return branches, predictions, asked_SBT

    def step(self, rules: Rules, branches: Branches, predictions: Predictions, answers: Answers) -> None:
        answers.fill(predictions, branches, self.head)
        ACCEPTERS[self.accepter](
            self.slots, self.graph, rules, STOP_IDS, branches, predictions, self.result, self.commit, self.counters
        )
        for slot in range(len(self.output)):
            report = {name: int(self.result.flag(name)[slot]) for name in ("committed", "length", "block_first_new")}
            if report["committed"]:
                block = self.result.block_ST[slot].tolist()
                self.output[slot] += block[report["block_first_new"] : report["length"]]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("accepter", ACCEPTERS)
def test_steps_are_those_of_the_torch_engine(accepter: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "write_final_kv", lambda *_: None)
    rules, drafts = VARIANTS[variant]
    graph, oracle_graph = graph_tensors(drafts)
    for seed in range(3):
        slots = random_slots(seed, rules, SLOTS, NUM_TOP if len(drafts) else 0)
        oracle, fused = Oracle(slots, rules, oracle_graph), Fused(accepter, slots, graph)
        failed = torch.zeros(SLOTS, dtype=torch.bool, device=DEVICE)
        for step in range(STEPS):
            if not oracle.slots.active_S.any():
                break
            table = oracle.branches()
            branches, predictions, asked = fused.branches(rules)
            answers = Answers.random(100 * seed + step, fused.slots, branches.tokens_SBT)
            taking_part, start = fused.slots.active_S.clone(), fused.slots.start_S.clone()
            assert torch.equal(taking_part, oracle.slots.active_S)
            result = oracle.step(table, answers, asked)
            fused.step(rules, branches, predictions, answers)
            check_report(fused, oracle, result, taking_part, start)
            failed |= taking_part & result.invalid_S
            check_slots(fused.slots, oracle.slots, ~failed)
        check_counters(fused.counters, oracle.tally, ~failed)
        for slot in (~failed).nonzero().squeeze(1).tolist():
            assert fused.output[slot] == [t for t in oracle.slots.output_SC[slot].tolist() if t >= 0]


def check_report(
    fused: Fused, oracle: Oracle, result: engine.StepResult, taking_part: torch.Tensor, start: torch.Tensor
) -> None:
    def flag(name: str, at: torch.Tensor) -> torch.Tensor:
        return fused.result.flag(name)[at]

    assert torch.equal(fused.result.flag("active"), taking_part.long())
    assert torch.equal(flag("invalid", taking_part), result.invalid_S[taking_part].long())
    assert not flag("done", ~taking_part).any()
    assert (fused.commit.branch_S[~taking_part] == -1).all()
    sound = taking_part & ~result.invalid_S
    ending = result.ending
    assert torch.equal(flag("done", sound), ending.done_S[sound].long())
    done = sound & ending.done_S
    assert torch.equal(flag("stopped", done), ending.stopped_S[done].long())
    assert torch.equal(flag("end", done), ending.end_S[done])
    assert torch.equal(flag("committed", sound), result.committed_S[sound].long())
    assert torch.equal(flag("first_new", sound), oracle.slots.first_new_S[sound])
    assert torch.equal(flag("start", sound), oracle.slots.start_S[sound])
    assert torch.equal(fused.result.state_ST[sound], oracle.slots.state_ST[sound])
    committed = sound & result.committed_S
    want = torch.where(committed, oracle.branch_S, -1).int()
    assert torch.equal(fused.commit.branch_S[sound], want[sound])
    assert torch.equal(fused.commit.length_S[committed], oracle.length_S[committed])
    assert torch.equal(fused.commit.start_S[committed], start[committed])


def check_slots(slots: Slots, theirs: SlotState, sound: torch.Tensor) -> None:
    assert torch.equal(slots.active_S, theirs.active_S)
    for name in ("state_ST", "start_S", "first_new_S", "think_S", "has_guess_S"):
        assert torch.equal(getattr(slots, name)[sound], getattr(theirs, name)[sound]), name
    guessing = sound & theirs.has_guess_S
    known = torch.isfinite(theirs.guess_logprob_STJ[guessing])
    assert torch.equal(slots.guess_logprob_STJ[guessing], theirs.guess_logprob_STJ[guessing])
    assert torch.equal(slots.guess_token_STJ[guessing][known], theirs.guess_token_STJ[guessing][known])


def check_counters(counters: Counters, tally: Tally, sound: torch.Tensor) -> None:
    for name in ("denoise_S", "commit_S", "proposed_SK", "accepted_SK", "draft_rows_SK", "run_lengths_SB"):
        got, want = getattr(counters, name), getattr(tally, name.rsplit("_", 1)[0])
        assert torch.equal(got[sound], want[sound]), name


def test_the_random_answers_make_drafts_come_true() -> None:
    rules, drafts = VARIANTS["nemotron"]
    graph, _ = graph_tensors(drafts)
    runs = torch.zeros(graph.num_branches, dtype=torch.int64, device=DEVICE)
    for seed in range(10):
        fused = Fused("reference", random_slots(seed, rules, SLOTS, NUM_TOP), graph)
        branches, predictions, _ = fused.branches(rules)
        fused.step(rules, branches, predictions, Answers.random(seed, fused.slots, branches.tokens_SBT))
        runs += fused.counters.run_lengths_SB.sum(0)
    assert runs[1:3].min() > 0
    assert runs[3:].sum() > 0


def test_not_a_number_ends_the_row_alone() -> None:
    """Confidences that are not numbers choose nothing; the walk must end all the same."""
    rules, drafts = VARIANTS["fast"]
    graph, _ = graph_tensors(drafts)
    slots = random_slots(1, rules, SLOTS, NUM_TOP)
    slots.active_S.fill_(True)
    fused = Fused("triton", slots, graph)
    branches, predictions, _ = fused.branches(rules)
    answers = Answers.random(1, fused.slots, branches.tokens_SBT)
    answers.invalid_SB.zero_()
    answers.confidence_SBT[2] = torch.nan
    answers.invalid_SB[2] = 1
    fused.step(rules, branches, predictions, answers)
    assert fused.result.flag("invalid").tolist() == [int(slot == 2) for slot in range(SLOTS)]
    assert not fused.slots.active_S[2]
    assert fused.commit.branch_S[2] == -1


@pytest.mark.parametrize("accepter", ACCEPTERS)
def test_nothing_of_an_invalid_row_is_committed(accepter: str) -> None:
    fused = finished_block(accepter, [20] * 8, invalid=1)
    assert fused.result.flag("invalid").tolist() == [1]
    assert fused.commit.branch_S.tolist() == [-1]
    assert fused.output == [[]]


@pytest.mark.parametrize("accepter", ACCEPTERS)
def test_an_end_of_thinking_in_the_prompt_ends_no_thinking(accepter: str) -> None:
    for at, due in ((1, True), (4, False)):
        tokens = [20] * 8
        tokens[at] = END_THINK
        fused = finished_block(accepter, tokens)
        assert fused.commit.branch_S.tolist() == [0]
        assert (fused.slots.state_ST[0, 3] == END_THINK) == due
        assert (fused.slots.think_S[0] == NEVER) != due


def finished_block(accepter: str, tokens: list[int], invalid: int = 0) -> Fused:
    """A step of one row whose block is finished, two tokens of it prompt, its thinking due at offset 3 of the next."""
    rules, drafts = VARIANTS["no drafts"]
    graph, _ = graph_tensors(drafts)
    slots = Slots.empty(1, 8, 0, DEVICE)
    slots.active_S.fill_(True)
    slots.state_ST[0] = torch.tensor(tokens, device=DEVICE)
    for name, value in (("first_new_S", 2), ("start_S", 16), ("limit_S", 90), ("think_S", 27)):
        getattr(slots, name).fill_(value)
    fused = Fused(accepter, slots, graph)
    branches, predictions, _ = fused.branches(rules)
    answers = Answers.random(0, fused.slots, branches.tokens_SBT)
    answers.next_SBT.fill_(20)
    answers.invalid_SB.fill_(invalid)
    fused.step(rules, branches, predictions, answers)
    return fused


@pytest.mark.parametrize("variant", ["fast", "nemotron threshold, odd block", "ar", "linear_spec"])
@pytest.mark.parametrize("opener", OPENERS)
def test_opening_is_that_of_the_torch_engine(opener: str, variant: str) -> None:
    rules, _ = VARIANTS[variant]
    graph, oracle_graph = graph_tensors(VARIANTS["no drafts"][1])
    pending = 0
    for seed in range(4):
        slots = random_slots(seed, rules, SLOTS, 0)
        slots.active_S.fill_(False)
        oracle = Oracle(slots, rules, oracle_graph)
        for slot in range(SLOTS):
            seed_1 = torch.tensor([3 if (slot + seed) % 2 else 20], device=DEVICE) if rules.seeded else None
            engine.open_block(oracle.slots, torch.tensor([slot], device=DEVICE), seed_1, oracle.context)  # type: ignore[arg-type]
            opening = engine.opening_ending(oracle.slots, oracle.context)  # type: ignore[arg-type]
            OPENERS[opener](slots, rules, STOP_IDS, slot, seed_1)
            done = bool(opening.done_S[slot])
            pending += done
            assert torch.equal(slots.state_ST, oracle.slots.state_ST)
            assert bool(slots.active_S[slot]) is not done
            assert bool(slots.pending_S[slot]) is done
            assert not slots.has_guess_S[slot]
        if seed == 3 and rules.seeded:
            check_pending(opener, slots, rules, graph, opening)
    assert pending or not rules.seeded


def check_pending(opener: str, slots: Slots, rules: Rules, graph: Graph, opening: object) -> None:
    """Rows that ended when they were opened show in the next report, and only there."""
    fused = Fused(opener, slots, graph)
    waiting = slots.pending_S.clone()
    assert waiting.any()
    for expected in (waiting, torch.zeros_like(waiting)):
        active = fused.slots.active_S.clone()
        branches, predictions, _ = fused.branches(rules)
        answers = Answers.random(5, fused.slots, branches.tokens_SBT)
        answers.invalid_SB.zero_()
        fused.step(rules, branches, predictions, answers)
        assert torch.equal(fused.result.flag("done")[~active], expected[~active].long())
        assert torch.equal(fused.result.flag("end")[expected], opening.end_S[expected])  # type: ignore[attr-defined]
        assert torch.equal(fused.result.flag("stopped")[expected], opening.stopped_S[expected].long())  # type: ignore[attr-defined]
        assert torch.equal(fused.result.state_ST[expected], slots.state_ST[expected])
        assert not fused.slots.pending_S.any()
