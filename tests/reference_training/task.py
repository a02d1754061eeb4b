"""The reference models' task: short arithmetic word problems, worked in steps, ending in "The answer is N."

Wording varies by template, the worked answer follows from the question alone, so a right greedy answer is unique in
its number and almost unique in its words. Whether a problem is held out of training depends on its text only.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

HELDOUT_SHARE = 0.02
HELDOUT_SEED = 20_000_003

PEOPLE = (
    ("Mia", "She"), ("Tom", "He"), ("Ann", "She"), ("Ben", "He"), ("Eva", "She"), ("Sam", "He"),
    ("Zoe", "She"), ("Leo", "He"), ("Ivy", "She"), ("Max", "He"), ("Kim", "She"), ("Dan", "He"),
    ("Amy", "She"), ("Joe", "He"), ("Sue", "She"), ("Ray", "He"),
)  # fmt: skip
THINGS = ["apples", "books", "coins", "stamps", "cards", "pens", "shells", "marbles", "cookies", "tickets"]
GOODS = ["pen", "book", "cup", "hat", "ball", "kite", "lamp", "cake"]
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You solve word problems step by step.",
    "Answer the question and show your work.",
    "You are a careful teacher of arithmetic.",
    "Think first, then give the answer.",
    "Please reason step by step and finish with the final number.",
)  # fmt: skip
WORK = (("reads", "pages"), ("runs", "miles"), ("bakes", "pies"), ("paints", "signs"))


class Problem(NamedTuple):
    question: str
    solution: str
    answer: int


def is_heldout(question: str) -> bool:
    """True for the fixed share of all problems that training never sees; a function of the text alone."""
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELDOUT_SHARE * 2**64


def training_problems(seed: int) -> Iterator[Problem]:
    """Endless stream of problems outside the held-out share."""
    return (p for p in _problems(seed) if not is_heldout(p.question))


def heldout_problems(count: int) -> list[Problem]:
    """The first ``count`` distinct held-out problems, always the same ones; the bundled prompts are the first 96."""
    chosen: dict[str, Problem] = {}
    for problem in _problems(HELDOUT_SEED):
        if is_heldout(problem.question):
            chosen.setdefault(problem.question, problem)
        if len(chosen) == count:
            break
    return list(chosen.values())


def is_right(text: str, answer: int) -> bool:
    """Whether a decoded answer ends with the right number."""
    return text.strip().endswith(f"The answer is {answer}.")


def _problems(seed: int) -> Iterator[Problem]:
    rng = random.Random(seed)
    while True:
        question, steps, answer = rng.choice(KINDS)(rng)
        yield Problem(" ".join(question), " ".join([*steps, f"The answer is {answer}."]), answer)


Draw = tuple[list[str], list[str], int]


def _holdings(rng: random.Random) -> Draw:
    """A stock of things that grows and shrinks."""
    (name, they), (friend, _) = rng.sample(PEOPLE, 2)
    things, n = rng.choice(THINGS), rng.randint(5, 50)
    question = [rng.choice((f"{name} has {n} {things}.", f"There are {n} {things} in {name}'s box."))]
    steps = [f"{name} starts with {n} {things}."]
    for _ in range(rng.choice((2, 2, 3))):
        sentence, step, n = _holdings_event(rng, they, friend, things, n)
        question.append(sentence)
        steps.append(step)
    ask = rng.choice((f"How many {things} does {name} have now?", f"How many {things} does {name} have in the end?"))
    return [*question, ask], steps, n


def _holdings_event(rng: random.Random, they: str, friend: str, things: str, n: int) -> tuple[str, str, int]:
    """One change of the stock: the sentence of the question, the step of the solution, the new number."""
    kind = rng.randrange(5)
    if kind == 0 and n <= 50:
        return f"Then the number of {things} doubles.", f"Doubling gives 2 * {n} = {2 * n}.", 2 * n
    if kind == 1 and n > 5:
        m = rng.randint(2, min(n - 2, 40))
        verb = rng.choice(("loses", "sells"))
        return f"{they} {verb} {m} of them.", f"{they} {verb} {m}, so {n} - {m} = {n - m}.", n - m
    if kind == 2 and n > 5:
        m = rng.randint(2, min(n - 2, 40))
        return f"{they} gives {m} of them to {friend}.", f"{they} gives away {m}, so {n} - {m} = {n - m}.", n - m
    if kind == 3:
        bags, each = rng.randint(2, 5), rng.randint(2, 9)
        total = bags * each
        step = f"The bags hold {bags} * {each} = {total}, so {n} + {total} = {n + total}."
        return f"{friend} brings {bags} bags with {each} in each.", step, n + total
    m = rng.randint(2, 40)
    verb = rng.choice(("buys", "finds", "gets"))
    return f"{they} {verb} {m} more.", f"{they} {verb} {m}, so {n} + {m} = {n + m}.", n + m


def _shopping(rng: random.Random) -> Draw:
    """Two kinds of goods, sometimes with change from a note."""
    name, they = rng.choice(PEOPLE)
    a, b = rng.sample(GOODS, 2)
    price_a, price_b, count_a, count_b = (rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 5), rng.randint(2, 5))
    cost_a, cost_b = price_a * count_a, price_b * count_b
    total = cost_a + cost_b
    question = [
        rng.choice((
            f"A {a} costs {price_a} dollars and a {b} costs {price_b} dollars.",
            f"A shop sells a {a} for {price_a} dollars and a {b} for {price_b} dollars.",
        )),
        f"{name} buys {count_a} {a}s and {count_b} {b}s.",
    ]  # fmt: skip
    steps = [
        f"The {a}s cost {count_a} * {price_a} = {cost_a} dollars.",
        f"The {b}s cost {count_b} * {price_b} = {cost_b} dollars.",
        f"Together that is {cost_a} + {cost_b} = {total} dollars.",
    ]
    if rng.random() < 0.5:
        ask = rng.choice((f"How many dollars does {name} pay?", "How many dollars is that in all?"))
        return [*question, ask], steps, total
    they_ = they.lower()
    ask = rng.choice((f"How many dollars does {they_} get back?", f"How much change does {they_} get?"))
    question += [f"{they} pays with 100 dollars.", ask]
    return question, [*steps, f"The change is 100 - {total} = {100 - total} dollars."], 100 - total


def _ages(rng: random.Random) -> Draw:
    """A chain of three ages."""
    (first, _), (second, _), (third, _) = rng.sample(PEOPLE, 3)
    start = age = rng.randint(20, 45)
    question = [f"{first} is {age} years old."]
    steps = []
    for name, other in ((second, first), (third, second)):
        gap, before = rng.randint(2, 9), age
        sign, word = rng.choice((("+", "older"), ("-", "younger")))
        age += gap if sign == "+" else -gap
        question.append(f"{name} is {gap} years {word} than {other}.")
        steps.append(f"{name} is {before} {sign} {gap} = {age} years old.")
    if rng.random() < 0.5:
        return [*question, f"How old is {third}?"], steps, age
    total = start + age
    ask = f"How old are {first} and {third} together?"
    return [*question, ask], [*steps, f"Together they are {start} + {age} = {total} years old."], total


def _bus(rng: random.Random) -> Draw:
    """Passengers over two stops."""
    vehicle = rng.choice(("bus", "train", "boat"))
    n = rng.randint(12, 60)
    question = [f"A {vehicle} starts with {n} passengers."]
    steps = [f"The {vehicle} starts with {n}."]
    for stop in ("first", "second"):
        off, on = rng.randint(2, min(n - 2, 20)), rng.randint(2, 20)
        question.append(
            rng.choice((
                f"At the {stop} stop {off} get off and {on} get on.",
                f"At the {stop} stop {off} people leave and {on} people enter.",
            ))
        )  # fmt: skip
        steps.append(f"At the {stop} stop {n} - {off} = {n - off} and {n - off} + {on} = {n - off + on}.")
        n += on - off
    return [*question, f"How many passengers are on the {vehicle} now?"], steps, n


def _sharing(rng: random.Random) -> Draw:
    """Two stocks put together and shared out equally."""
    (a, _), (b, _) = rng.sample(PEOPLE, 2)
    things, friends, each = rng.choice(THINGS), rng.randint(2, 6), rng.randint(3, 12)
    total = friends * each
    n = rng.randint(2, total - 2)
    question = [
        f"{a} has {n} {things} and {b} has {total - n} {things}.",
        rng.choice((
            f"They share all of them equally among {friends} friends.",
            f"They put them together and make {friends} equal piles.",
        )),
    ]  # fmt: skip
    part = "friend" if question[1].endswith("friends.") else "pile"
    steps = [
        f"Together {a} and {b} have {n} + {total - n} = {total} {things}.",
        f"Each {part} gets {total} / {friends} = {each} {things}.",
    ]
    return [*question, f"How many {things} does each {part} get?"], steps, each


def _days(rng: random.Random) -> Draw:
    """Amounts of three days added up."""
    name, they = rng.choice(PEOPLE)
    verb, unit = rng.choice(WORK)
    monday, extra, wednesday = rng.randint(5, 30), rng.randint(2, 15), rng.randint(5, 40)
    question = [f"On Monday {name} {verb} {monday} {unit}."]
    if rng.random() < 0.4:
        tuesday, rule = 2 * monday, f"2 * {monday}"
        question.append(f"On Tuesday {they.lower()} {verb} twice as many.")
    else:
        tuesday, rule = monday + extra, f"{monday} + {extra}"
        question.append(f"On Tuesday {they.lower()} {verb} {extra} {unit} more than on Monday.")
    question.append(f"On Wednesday {they.lower()} {verb} {wednesday} {unit}.")
    both = monday + tuesday
    steps = [
        f"On Tuesday {name} {verb} {rule} = {tuesday} {unit}.",
        f"Monday and Tuesday make {monday} + {tuesday} = {both} {unit}.",
        f"With Wednesday it is {both} + {wednesday} = {both + wednesday} {unit}.",
    ]
    ask = rng.choice((f"How many {unit} is that in three days?", f"How many {unit} is that in all?"))
    return [*question, ask], steps, both + wednesday


KINDS: tuple[Callable[[random.Random], Draw], ...] = (_holdings, _holdings, _shopping, _ages, _bus, _sharing, _days)
