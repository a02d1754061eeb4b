"""The main job.

python jobs/generate.py
python jobs/generate.py --config run.yaml
python jobs/generate.py --model ./model --prompts 'prompts/*.parquet' --output out --mode specfold --drafts 8
ray job submit --working-dir . -- python jobs/generate.py --output /shared/out
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Run the job; the exit code as the help lists them. A user's mistake is one line on stderr."""
    from cluster.errors import UserError
    from jobs.cli import load_config

    try:
        config = load_config(argv, os.environ)
        if config is None:
            return 0
        # Imported here: --help and a mistyped flag need not wait for Ray.
        from cluster.driver import check_job, run_job

        return check_job(config) if config.check else run_job(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except ValueError as error:
        from specfold import ConfigError, ModelError

        if not isinstance(error, ConfigError | ModelError):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def _find_modules() -> None:
    """Run by hand, Python looks for modules beside this script, and they lie one folder up.

    The entry is replaced: a file in jobs/ must not hide a module of the standard library that has its name.
    """
    here = Path(__file__).resolve().parent
    if sys.path and Path(sys.path[0]).resolve() == here:
        sys.path[0] = str(here.parent)


if __name__ == "__main__":
    _find_modules()
    from jobs.stopping import stop_at_once

    stop_at_once()
    exit_code = main(sys.argv[1:])
    if exit_code > 128:
        from cluster.driver import leave

        leave(exit_code)
    sys.exit(exit_code)
