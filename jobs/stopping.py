"""Ctrl-C and SIGTERM where nothing has to be ended first: one sentence, and exit code 130 or 143.

Imports next to nothing: an entry point calls this before all else, as its imports take seconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def stop_at_once() -> None:
    """From now on SIGINT and SIGTERM end this process at once, whatever it computes or imports.

    A job has handlers of its own while it runs. No exception is raised: libraries in between would swallow it, end
    with a code of theirs, or print where it struck.
    """
    command = os.getpid()

    def stop(number: int, _: object) -> None:
        if os.getpid() != command:  # forked by a library: the command speaks for it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        with contextlib.suppress(Exception):  # it may have come in the middle of a print, or nobody reads any more
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            os.write(1, f"Stopped by {signal.Signals(number).name}.\n".encode())
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
