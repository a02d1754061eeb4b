"""IFEval: were the instructions followed? Checked by if-verifiable, which follows the benchmark's own code.

*Strict* looks at the output as it is. *Loose* is content if one of eight variants follows: without the first line, the
last line, or both, each with and without asterisks. Prompts count as a whole, or instruction by instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import langdetect
import nltk
from if_verifiable import evaluate_output_for_sample
from if_verifiable.ifeval import INSTRUCTION_DICT

from cluster.errors import UserError
from cluster.evaluation.graders import Judgement, Reference

_CUTS_SENTENCES = {"length_constraints:number_sentences", "change_case:capital_word_frequency"}
_SENTENCE_DATA = "tokenizers/punkt_tab/english/"


def check(references: Sequence[Reference]) -> None:
    for reference in references:
        instructions, arguments = reference["instructions"], reference["arguments"]
        if not (isinstance(instructions, list) and isinstance(arguments, list) and instructions):
            raise UserError("A row has no list of instructions, or none of their arguments.")
        if len(instructions) != len(arguments):
            raise UserError(f"A row has {len(instructions)} instructions, but not as many arguments.")
    used = {name for reference in references for name in reference["instructions"]}
    unknown = sorted(used - set(INSTRUCTION_DICT))
    if unknown:
        raise UserError(f"There is no check for the instruction {unknown[0]}.")
    if used & _CUTS_SENTENCES:
        try:
            nltk.data.find(_SENTENCE_DATA)
        except LookupError:
            raise UserError(
                "Counting sentences needs NLTK's data punkt_tab, which is not on this machine and is never downloaded "
                "unasked: run python -m nltk.downloader punkt_tab, or name the folder that holds tokenizers/punkt_tab "
                "in the environment variable NLTK_DATA."
            ) from None


def judge(reference: Reference, text: str) -> Judgement:
    langdetect.DetectorFactory.seed = 0  # else the same text may be taken for another language the next time
    total = len(reference["instructions"])
    sample = SimpleNamespace(
        prompt=reference["prompt"], instruction_id_list=reference["instructions"], kwargs=reference["arguments"]
    )
    results, _ = evaluate_output_for_sample("ifeval", sample, text)
    strict = sum(result.strict_pass for result in results)
    loose = sum(result.loose_pass for result in results)
    missed = [result.instruction_id for result in results if not result.strict_pass]
    return _judgement(strict, loose, total, f"not followed: {', '.join(missed)}" if missed else None)


def blank(reference: Reference) -> Judgement:
    return _judgement(0, 0, len(reference["instructions"]), None)


def _judgement(strict: int, loose: int, total: int, missed: str | None) -> Judgement:
    return Judgement(
        {
            "prompt_level_strict_acc": strict == total,
            "inst_level_strict_acc": strict / total,
            "prompt_level_loose_acc": loose == total,
            "inst_level_loose_acc": loose / total,
        },
        {"inst_level_strict_acc": float(total), "inst_level_loose_acc": float(total)},
        extracted=missed,
    )
