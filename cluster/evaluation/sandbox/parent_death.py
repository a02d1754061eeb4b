"""A process that ends with the one that started it, however that ends. Only the standard library: the jailer, too."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """From now on the kernel kills this process when the thread of ``parent`` ends that started it.

    So that thread must live as long as this process is wanted. Ends this process at once if ``parent`` has gone before.
    To be called after any change of user or namespace, which undoes it. Does nothing on systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")
    if os.getppid() != parent:
        os._exit(1)
