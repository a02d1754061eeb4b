"""Outputs as models write them, good, bad and odd, made of the benchmarks' own rows. The same in every run.

Only the standard library: the script that grades them with other people's graders runs in an environment of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]


class Answer(NamedTuple):
    """``key``: row and variant."""

    key: str
    row: Row
    text: str


def rows(shared: Path, file: str) -> list[Row]:
    return [json.loads(line) for line in (shared / "data" / file).read_text().splitlines()]


def gsm8k(shared: Path) -> Iterator[Answer]:
    """16 ways of stating a number, 20 rows each."""
    for index, row in enumerate(rows(shared, "gsm8k/test.jsonl")[:20]):
        work, number = row["answer"].split("\n#### ")
        plain = number.replace(",", "")
        other = str(int(plain) + 7)
        for variant, text in {
            "gold": row["answer"],
            "no mark": f"{work}\nThe answer is {number}.",
            "boxed": f"{work} So we get $\\boxed{{{plain}}}$.",
            "dollars": f"{work}\n#### ${number}",
            "cents": f"That makes ${plain}.00 in all.",
            "thousands": f"The answer is {int(plain):,}",
            "bold": f"**Answer:** **{plain}** euros",
            "equation": f"x = {plain}",
            "goes on": f"{row['answer']}\n\nQuestion: What is 3 + 4?\nAnswer: 3 + 4 = 7\n#### 7",
            "afterthought": f"It is {plain}, which took 3 steps.",
            "negative": f"#### -{plain}",
            "wrong": f"{work}\n#### {other}",
            "marked wrong": f"#### {other}\nNo, it is {plain}",
            "words": "I am not sure, perhaps a dozen.",
            "points": f"The result is {plain}... and so on.",
            "empty": "",
        }.items():
            yield Answer(f"{index} {variant}", row, text)


def humaneval(shared: Path) -> Iterator[Answer]:
    """The row's own solution and what becomes of it when one thing is changed."""
    for index, row in enumerate(rows(shared, "humaneval/HumanEval.jsonl")):
        gold = row["canonical_solution"]
        lines = gold.rstrip("\n").split("\n")
        variants = {
            "gold": gold,
            "goes on": f"{gold}\n\ndef unrelated(x):\n    return x + 1\n",
            "comparison": re.sub(r" (<|>) ", r" \1= ", gold, count=1),
            "arithmetic": re.sub(r" \+ ", " - ", gold, count=1),
            "constant": re.sub(r"\b1\b", "2", gold, count=1),
            "cut": gold[: len(gold) * 2 // 3],
            "last line gone": "\n".join(lines[:-1]) + "\n",
            "returns nothing": "    return None\n",
            "redefined": f"{row['prompt']}{gold}",
            "leaves": "    import sys\n    sys.exit(0)\n",
            "raises": "    raise SystemExit\n",
            "prints": f"    print('x' * 1000)\n{gold}",
        }
        names = list(variants)
        for name in ("gold", names[1 + index % 11], names[1 + (index + 5) % 11]):
            yield Answer(f"{index} {name}", row, variants[name])


def ifeval(shared: Path) -> Iterator[Answer]:
    """Every second prompt with a text that follows some instructions and breaks others, and its repetition."""
    for index, row in enumerate(rows(shared, "ifeval/input_data.hf.jsonl")[::2]):
        yield Answer(f"{index} text", row, _TEXTS[index % len(_TEXTS)])
        if index % 3 == 0:
            words = " ".join(str(word) for argument in row["kwargs"] for word in _words(argument))
            yield Answer(
                f"{index} echo", row, f"{row['prompt']}\n\n{words}\n{_TEXTS[(index + 1) % len(_TEXTS)]}\n{words}"
            )


def _words(argument: Row) -> Iterator[str]:
    for value in argument.values():
        yield from value if isinstance(value, list) else [value]


_LONG = " ".join(
    f"The {n}th boat left the harbor before the tide turned and nobody saw it again." for n in range(4, 40)
)
_TEXTS = [
    "Swifts sleep while they fly. They do so high above the ground. P.S. They land only to breed.",
    '"The ship leaves at noon and comes back in the evening."',
    "Sure! Here is the list:\n\n* first the *bread*\n* then the *milk*\n* and *some salt*\n\nIs there anything else?",
    "THE SHIP LEAVES THE HARBOR AT NOON AND COMES BACK IN THE EVENING WITH FISH.",
    "the ship leaves the harbor at noon and comes back in the evening with fish.",
    '```json\n{"city": "Oslo", "rain": [1, 2], "note": "no comma here"}\n```',
    "<<A Walk by the Sea>>\n\nSection 1\nThe tide was out.\n***\nSection 2\n"
    "The tide came in [time] at [place] for [name].",
    "Take the train.\n******\nTake the boat.",
    "Der Zug nach Hamburg fährt heute leider erst eine Stunde später ab, weil die Strecke gesperrt ist.",
    "O trem para o Porto sai hoje uma hora mais tarde porque a linha está fechada.",
    "My answer is maybe.",
    _LONG,
    "\n\n".join(_LONG.split(". ")[:6]),
    "",
    "   \n ",
    "Dear [name],\n\nplease come to [address] on [date] at [time].\n\nP.P.S. Bring the maps.\n\n"
    "Is there anything else?",
    "*A* **bold** *move* it *was* and *so on* and *so forth* it *went*",
]
