"""Try the graders on all right answers, and on all outputs that other people's graders have graded.

    python tests/evaluate_graders.py              # ten minutes on two cores; the test suite takes a sample of it

Prints one line of JSON for each; the exit code is 1 if a right answer is graded wrong or two graders differ.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from grading.trials import differences, grade_gold, has_sentence_data  # noqa: E402

from cluster.evaluation.task import load_task  # noqa: E402

SHARED = Path(os.environ.get("SPECFOLD_SHARED", ROOT.parent / "shared"))
GOLD = (("gsm8k", None), ("gsm8k", "train"), ("humaneval", None), ("mbpp", "all"))


def main() -> int:
    is_sound = True
    for name, split in GOLD:
        for chat in (True, False):
            start = time.monotonic()
            grades = grade_gold(load_task(name), SHARED, split, chat=chat)
            wrong = [(grade.id, grade.problem) for grade in grades if not grade.correct]
            _say(trial="gold", task=name, split=split, chat=chat, rows=len(grades), wrong=wrong, start=start)
            is_sound &= not wrong
    for name in ("gsm8k", "ifeval", "humaneval"):
        start = time.monotonic()
        count, found = differences(name, SHARED)
        _say(trial="others", task=name, rows=count, differences=found, sentences=has_sentence_data(), start=start)
        is_sound &= not found
    return 0 if is_sound else 1


def _say(start: float, **values: Any) -> None:
    print(json.dumps({**values, "seconds": round(time.monotonic() - start, 1)}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
