"""SIGINT and SIGTERM: a sentence, an exit code, and an end within two seconds whatever the driver is doing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

CLEAN_UP_AFTER_S, EXIT_WITHIN_S = 1.3, 1.8
_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_HOLD_EVERY_S = 0.005
_SIGACTION_BYTES = 256
"""More than a ``struct sigaction`` has anywhere; it is only read and written as a whole."""


class Interrupted(Exception):
    """SIGINT or SIGTERM arrived; ``exit_code`` is 130 or 143."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.exit_code = 128 + number


def leave(exit_code: int) -> NoReturn:
    """End the process, at once if a signal has: the interpreter's own end was seen to wait 5 s for a Ray that had only
    half started, or that had lost a node."""
    if exit_code > 128:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


class StopSignals:
    """SIGINT and SIGTERM set ``number``; the process ends within two seconds whatever it is doing.

    ``last_words`` run if the main thread has not come to an end by itself in time. Signals cannot be caught outside the
    main thread; there this does nothing.

    A thread hears of signals through Python's wake-up descriptor: a handler alone would wait until the main thread
    comes back from C code, which may be a connection attempt of Ray that takes a minute.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None, *, resumable: bool = True) -> None:
        self.number: int | None = None
        self.last_words: list[Callable[[], None]] = []
        self._wake, self._resumable = wake, resumable
        self._before: dict[int, Any] = {}
        self._told = threading.Lock()
        self._pipe: tuple[int, int] | None = None
        self._wakeup_before = -1

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in _NUMBERS}
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            threading.Thread(target=self._listen, args=(self._pipe[0],), name="signals", daemon=True).start()
            self._arm()
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._pipe[1])  # ends the thread, which closes the other end
            for number, handler in self._before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While Ray starts and while it ends, which takes SIGTERM away behind Python's back: the start for C++ that
        prints a stack and dies, the end for the kernel, which kills without a word. Either lasts a second and more, in
        which Python's handler is put back all the time; from any thread, as ``signal.signal`` could not."""
        if self._pipe is None:
            yield
            return
        libc, action, over = ctypes.CDLL(None), ctypes.create_string_buffer(_SIGACTION_BYTES), threading.Event()
        libc.sigaction(signal.SIGTERM, None, action)

        def hold() -> None:
            while not over.wait(_HOLD_EVERY_S):
                libc.sigaction(signal.SIGTERM, action, None)

        holding = threading.Thread(target=hold, name="signals held", daemon=True)
        holding.start()
        try:
            yield
        finally:
            over.set()
            holding.join()
            self._arm()  # Ray has a handler in Python, too

    def _arm(self) -> None:
        for number in _NUMBERS:
            signal.signal(number, lambda *_: None)  # the thread does the rest

    def check(self) -> None:
        """Raise ``Interrupted`` if a signal has come."""
        if self.number is not None:
            raise Interrupted(self.number)

    def tell(self, number: int, say: Callable[[str], None] = print) -> None:
        """Say once what ends the process."""
        if self._told.acquire(blocking=False):
            how = "; the same command goes on from here." if self._resumable else "."
            say(f"Stopped by {signal.Signals(number).name}{how}")

    def _listen(self, source: int) -> None:
        with open(source, "rb", buffering=0) as pipe:
            while byte := pipe.read(1):
                if byte[0] in _NUMBERS:
                    self._receive(byte[0])

    def _receive(self, number: int) -> None:
        code = 128 + number
        if self.number is not None:
            os._exit(code)
        self.number = number
        for delay, call in ((CLEAN_UP_AFTER_S, partial(self._end, number)), (EXIT_WITHIN_S, partial(os._exit, code))):
            timer = threading.Timer(delay, call)
            timer.daemon = True
            timer.start()
        self._wake()

    def _end(self, number: int) -> None:
        with contextlib.suppress(Exception):
            self.tell(number)
        for call in self.last_words:
            with contextlib.suppress(Exception):
                call()
        sys.stdout.flush()
        os._exit(128 + number)
