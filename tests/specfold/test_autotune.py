"""``drafts="auto"``: the search finds the fastest number of drafts, and trials measure what decoding does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specfold import ConfigError, DecodeConfig, Engine, Request, reference_models
from specfold.autotune import choose_drafts
from specfold.benchmark.decoding import read_questions
from specfold.draft_search import BUDGETS, Trial, best_trial, search
from specfold.drafts import default_graph
from tests.specfold.random_models import FAMILY_NAMES, random_engine

PROMPTS = Path(__file__).resolve().parents[2] / "jobs" / "prompts.jsonl"
ACCEPTED = {0: 0.0, 1: 0.80, 2: 1.42, 3: 1.85, 4: 2.2, 6: 2.7, 8: 3.1}


class Machine:
    """Forwards whose cost is known, and a clock that only they move."""

    def __init__(self, cost: Callable[[int], float], accepted: dict[int, float] = ACCEPTED, slow: float = 1.0) -> None:
        self.cost, self.accepted, self.slow = cost, accepted, slow
        self.now, self.calls = 0.0, []

    def measure(self, drafts: int, number: int) -> Trial | None:
        self.calls.append((drafts, number))
        self.now += self.slow
        return Trial(drafts, 1 + self.accepted[drafts], self.cost(drafts), 4, 16)

    def choose(self, **settings: float) -> int:
        trials, self.left_out = search(self.measure, clock=lambda: self.now, **settings)
        return best_trial(trials).drafts

    def fastest(self) -> int:
        return max(BUDGETS, key=lambda n: (1 + self.accepted[n]) / self.cost(n))


@pytest.mark.parametrize("price", [0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.9, 1.2])
@pytest.mark.parametrize("entry", [0.0, 0.15])
def test_the_fastest_number_of_drafts_is_found(price: float, entry: float) -> None:
    """``price``: of each draft, in plain forwards; ``entry``: of drafting at all."""
    machine = Machine(lambda n: 1 + price * n + entry * (n > 0))
    chosen, fastest = machine.choose(), machine.fastest()
    speed = {n: (1 + ACCEPTED[n]) / machine.cost(n) for n in BUDGETS}
    assert speed[chosen] >= 0.98 * speed[fastest]
    assert all(speed[n] < 0.98 * speed[fastest] for n in BUDGETS if n < chosen), "of near equals the fewest"


def test_nothing_is_drafted_where_it_does_not_pay_and_dear_drafts_are_not_even_tried() -> None:
    machine = Machine(lambda n: 1 + 1.1 * n)
    assert machine.choose() == 0
    assert (8, 0) not in machine.calls
    assert machine.left_out[8] == "as it cannot win"
    equal = Machine(lambda n: (1 + ACCEPTED[n]) / 1.01 if n else 1.0)  # each is 1% faster than none
    assert equal.choose() == 0


def test_steps_in_the_cost_do_not_mislead_it() -> None:
    """Tiles make some numbers as dear as the next larger one."""
    machine = Machine(lambda n: {0: 1.0, 1: 1.6, 2: 1.6, 3: 2.0, 4: 2.0, 6: 2.0, 8: 2.6}[n])
    assert machine.choose() == machine.fastest() == 6


def test_close_ones_are_measured_again_in_turn_and_far_ones_are_not() -> None:
    machine = Machine(lambda n: 1 + 0.3 * n)
    machine.choose()
    again = [drafts for drafts, number in machine.calls if number == 2]
    assert again == sorted(again)
    assert 2 <= len(again) <= 3
    assert 0 not in again


def test_time_is_kept_and_a_larger_graph_than_there_is_is_not_asked_for() -> None:
    machine = Machine(lambda n: 1 + 0.02 * n, slow=10.0)
    assert machine.choose(seconds=35.0) == 4
    assert [drafts for drafts, _ in machine.calls] == [0, 2, 4]
    assert machine.left_out[8] == "for want of time"
    late = Machine(lambda n: 1.0, slow=100.0)
    assert late.choose(seconds=60.0) == 0, "without drafts is measured always"
    assert set(late.left_out.values()) == {"for want of time"}, "nobody knows whether anything is slower"
    few = Machine(lambda n: 1 + 0.02 * n)
    assert few.choose(most=3) == 3
    assert max(drafts for drafts, _ in few.calls) == 3


def test_what_does_not_fit_in_memory_is_not_chosen() -> None:
    machine = Machine(lambda n: 1 + 0.02 * n)
    fits = machine.measure
    machine.measure = lambda n, r: fits(n, r) if n <= 4 else None  # type: ignore[method-assign]
    assert machine.choose() == 4
    assert machine.left_out[6] == machine.left_out[8] == "for want of memory"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(reference_models.path("fast_dllm_v2"))


@pytest.fixture(scope="module")
def rows(engine: Engine) -> list[Request]:
    return [Request(q.prompt_ids, row_id=i) for i, q in enumerate(read_questions(engine, PROMPTS, 6))]


def test_trials_measure_what_decoding_does(engine: Engine, rows: list[Request]) -> None:
    """By a clock on which every step takes as long, most drafts win, by the forwards that a run really needs."""
    config = DecodeConfig(mode="spiffy", drafts="auto", max_new_tokens=12)
    choice = choose_drafts(engine, rows, config, 6, 400.0, clock=lambda: float(engine.num_steps))
    assert choice.drafts in (6, 8)
    assert choice.batch_size == 6
    for trial in choice.trials[:2]:
        again = DecodeConfig(mode="spiffy", drafts=trial.drafts, max_new_tokens=12)
        stats = [c.stats for c in engine.stream(iter(rows), again, 6)]
        plain = sum(s.output_tokens for s in stats) / sum(s.num_forwards for s in stats)
        assert trial.tokens_per_forward == pytest.approx(plain, rel=0.02)
        assert trial.seconds_per_forward == 1.0
        assert trial.rows_at_once == 6
    assert json.loads(json.dumps(choice.to_dict()))["trials"][0]["drafts"] == 0
    assert choice.line.startswith(f"Chose {choice.drafts} drafts for 6 rows at a time")


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_library_chooses_once_and_changes_no_token(family: str) -> None:
    """Also with the fused backend's order of events, in which a step is reported one turn later."""
    engine = random_engine(family, 1)
    engine = Engine(engine.model, engine.info, None, "reference")
    prompts = [[3, 4, 5], [7] * 9, []]
    auto = DecodeConfig(mode="spiffy", drafts="auto", max_new_tokens=4)
    plain = engine.generate(prompts, DecodeConfig(mode="vanilla", max_new_tokens=4), batch_size=2)
    found = engine.generate(prompts, auto, batch_size=2)
    assert [c.token_ids for c in found] == [c.token_ids for c in plain]
    assert found[2].error_kind == "empty_prompt"
    (choice,) = engine.choices.values()
    assert choice.trials[0].drafts == 0
    assert choice.trials[0].rows_at_once == 2

    def later() -> Iterator[Request | None]:
        yield None
        yield Request(prompts[0])

    steps = engine.num_steps
    (again,) = engine.stream(later(), auto, 2)
    assert again.token_ids == plain[0].token_ids
    assert engine.num_steps - steps < 30, "it has not measured again"
    assert list(engine.stream(iter([]), auto, 3)) == []


def test_a_graph_of_few_nodes_limits_the_choice(engine: Engine, rows: list[Request]) -> None:
    graph = json.dumps(default_graph(2).to_json())
    config = DecodeConfig(drafts="auto", draft_graph=graph, max_new_tokens=6)
    choice = choose_drafts(engine, rows, config, 6, 100.0, clock=lambda: float(engine.num_steps))
    assert max(trial.drafts for trial in choice.trials) == 2


def test_what_cannot_be_chosen_is_one_sentence(engine: Engine) -> None:
    for settings, sentence in (
        ({"mode": "vanilla"}, "drafts auto needs mode spiffy or specfold, not vanilla."),
        ({"draft_budget": 2}, "draft_budget needs a number of drafts, which auto is not."),
        ({"drafts": "many"}, "drafts must be a whole number or auto, not 'many'."),
    ):
        with pytest.raises(ConfigError) as refused:
            DecodeConfig(**{"drafts": "auto"} | settings)  # type: ignore[arg-type]
        assert str(refused.value) == sentence
    with pytest.raises(ConfigError, match="drafts auto finds no row that can be decoded to choose by: The prompt has"):
        choose_drafts(engine, [Request([])], DecodeConfig(drafts="auto"), 2)
    with pytest.raises(ConfigError, match="drafts auto must be chosen before anything is decoded"):
        engine.plan_memory(DecodeConfig(drafts="auto"), 2)
