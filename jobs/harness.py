"""lm-evaluation-harness with this engine among its models; every argument is the harness' own.

pip install -e '.[lm_eval]'
python jobs/harness.py run --model specfold --model_args pretrained=./model,mode=specfold,delta=0.1 --tasks gsm8k
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Register the model and hand over to the harness; the exit code."""
    try:
        from lm_eval.__main__ import cli_evaluate

        import cluster.evaluation.harness  # noqa: F401  registers the model
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        print("error: lm-evaluation-harness is not installed; pip install -e '.[lm_eval]' brings it.", file=sys.stderr)
        return 2
    cli_evaluate()
    return 0


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    if Path(sys.path[0]).resolve() == here:  # a file in jobs/ must not hide a module of the standard library
        sys.path[0] = str(here.parent)
    from jobs.stopping import stop_at_once

    stop_at_once()
    sys.exit(main())
