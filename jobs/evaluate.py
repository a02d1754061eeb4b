"""Benchmarks through the main job: decode, grade, compare.

    python jobs/evaluate.py --tasks gsm8k --compare vanilla,spiffy,specfold:0.1,specfold:0.2
    python jobs/evaluate.py --tasks humaneval,mbpp --allow-code-execution --model ./model --output out
    python jobs/evaluate.py --tasks gsm8k --task-data ../shared/data --limit 100 --num-samples 8 --temperature 0.7

Every flag of the main job works. The same command again goes on where it stopped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if __name__ == "__main__":
    if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        # Run by hand: modules lie one folder up, and a file in jobs/ must not hide one of the standard library.
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from jobs.stopping import stop_at_once

    stop_at_once()

from cyclopts import Parameter

from cluster.config import JobConfig
from cluster.errors import UserError
from cluster.evaluation.settings import EvaluationConfig, require_free
from jobs.cli import CONFIG, Command, complete, job_flags, named, parse

if TYPE_CHECKING:
    from cluster.evaluation.evaluate import Evaluation

HELP = """Run benchmarks through the main job and score them, in one mode or in several that are compared.

Tasks are graded on this machine once everything is decoded. The same command again goes on where it stopped."""
EPILOGUE = """All other flags are those of jobs/generate.py. On a cluster: ray job submit --working-dir . -- \
python jobs/evaluate.py --tasks gsm8k --output /shared/out.

Exit codes: 0 every row is there and graded; 1 rows are missing, run it again; 2 the command or its input is wrong; \
3 every row is there, but more of them failed than --max-failed allows; 130 and 143 interrupted, run it again."""


def main(argv: Sequence[str]) -> int:
    """Run the evaluation; the exit code as the help lists them. A user's mistake is one line on stderr."""
    try:
        evaluation = load_evaluation(argv, os.environ)
        return 0 if evaluation is None else evaluation.run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def load_evaluation(argv: Sequence[str], environment: Mapping[str, str]) -> Evaluation | None:
    """The evaluation that this call describes; None when help was asked for and printed. Raises ``UserError``."""
    flags = [*job_flags(), *(field.name for field in fields(EvaluationConfig))]
    parsed = parse(argv, Command("python jobs/evaluate.py", HELP, EPILOGUE, flags, _settings))
    if parsed is None:
        return None
    (config, evaluation), given = parsed
    require_free(given)
    others = [evaluation.task_data, config.split, evaluation.fewshot]
    config = complete(config, environment, lambda config: named(config, "scores", others))
    # Imported here: --help and a mistyped flag need not wait for Ray.
    from cluster.evaluation.evaluate import Evaluation

    return Evaluation(config, evaluation, given)


def _settings(
    *,
    evaluation: Annotated[EvaluationConfig | None, Parameter(name="*")] = None,
    config: Annotated[JobConfig | None, Parameter(name="*")] = None,
    config_file: Annotated[Path | None, CONFIG] = None,
) -> tuple[JobConfig, EvaluationConfig]:
    """
    Parameters
    ----------
    config_file
        YAML file with any of these flags as keys; flags on the command line win.
    """
    return config or JobConfig(), evaluation or EvaluationConfig()


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    if exit_code > 128:
        from cluster.driver import leave

        leave(exit_code)
    sys.exit(exit_code)
