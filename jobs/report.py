"""Make a run's page anew, for instance of a run that was killed.

python jobs/report.py OUTPUT
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Write OUTPUT/report.html; a mistake is one line and exit code 2."""
    from cluster.errors import UserError
    from cluster.output.report import REPORT, rebuild
    from cluster.output.storage import Store, mistakes_of_place

    if len(argv) != 1 or not argv[0] or argv[0].startswith("-"):
        print("usage: python jobs/report.py OUTPUT, the folder or URL of a run", file=sys.stderr)
        return 0 if argv[:1] == ["--help"] else 2
    try:
        store = Store(argv[0])
        with mistakes_of_place():
            rebuild(store)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(store.path(REPORT))
    return 0


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    if sys.path and Path(sys.path[0]).resolve() == here:
        sys.path[0] = str(here.parent)  # a file in jobs/ must not hide a library's module of its name
    from jobs.stopping import stop_at_once

    stop_at_once()
    sys.exit(main(sys.argv[1:]))
