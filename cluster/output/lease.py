"""One driver per output: a file that its holder renews and others respect. Knows nothing of Ray."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import orjson

from cluster.errors import UserError
from cluster.output.storage import StorageError, Store

LEASE = ".lease"
RENEW_S, STALE_S, SETTLE_S = 10.0, 60.0, 1.0


class Lease:
    """The right to write to an output folder.

    A lease may be taken from a holder whose process is known to be dead (same machine), or that has not renewed it for
    ``stale_s`` by the taker's own clock. A holder that cannot renew sets ``lost`` and must stop.
    """

    def __init__(
        self,
        store: Store,
        token: str,
        say: Callable[[str], None] = print,
        *,
        renew_s: float = RENEW_S,
        stale_s: float = STALE_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        self.lost: str | None = None
        """Why the lease is held no longer, in one sentence."""
        self._store, self._token, self._say = store, token, say
        self._renew_s, self._stale_s, self._settle_s = renew_s, stale_s, settle_s
        self._holder = {"token": token} | _this_process()
        self._renewals = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def acquire(self) -> None:
        """Take the lease and keep it renewed. ``UserError`` if another driver has it."""
        if not self._store.create(LEASE, self._content()):
            self._await_stale()
            self._store.write(LEASE, self._content())
            time.sleep(self._settle_s)  # two takers: the later one stays, the earlier one sees it here
            if not holds(self._store, self._token):
                raise _refusal(self._store, _read(self._store))
        self._thread.start()

    def release(self) -> None:
        """Give the lease back, if it is still ours."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(1.0)
        with contextlib.suppress(StorageError):
            if holds(self._store, self._token):
                self._store.delete(LEASE)

    def _content(self) -> bytes:
        return orjson.dumps(self._holder | {"renewals": self._renewals})

    def _await_stale(self) -> None:
        first = _read(self._store)
        if first is None or _is_dead(first):
            return
        if _is_alive(first):
            raise _refusal(self._store, first)
        self._say(f"Another driver ({_name(first)}) may be writing to {self._store.url}; waiting for a sign of life.")
        deadline = time.monotonic() + self._stale_s
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._stale_s / 10))
            now = _read(self._store)
            if now is None:
                return
            if now != first:
                raise _refusal(self._store, now)

    def _keep(self) -> None:
        """Renew until released. Half the stale time without success is the end: others may take over from then on."""
        renewed = time.monotonic()
        while not self._stop.wait(self._renew_s):
            try:
                if not holds(self._store, self._token):
                    self.lost = f"another driver has taken over {self._store.url}."
                    return
                self._renewals += 1
                self._store.write(LEASE, self._content(), durable=False)
                renewed = time.monotonic()
            except StorageError as error:
                if time.monotonic() - renewed > self._stale_s / 2:
                    self.lost = str(error)
                    return


def holds(store: Store, token: str) -> bool:
    """Whether the folder's lease is that of the driver ``token``."""
    holder = _read(store)
    return holder is not None and holder.get("token") == token


def is_held(store: Store) -> bool:
    """Whether the lease is that of a process which is known to run, on this machine."""
    holder = _read(store)
    return holder is not None and _is_alive(holder)


def _read(store: Store) -> dict[str, Any] | None:
    try:
        value = orjson.loads(store.read(LEASE))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _this_process() -> dict[str, Any]:
    return {"host": os.uname().nodename, "pid": os.getpid(), "machine": _machine(), "born": birth(os.getpid())}


def _machine() -> str | None:
    """Names this boot of this machine and this process namespace; None where that cannot be told."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def birth(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; None if there is none (a zombie counts as none)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[19] if fields[0] not in "ZX" else None


def _is_here(holder: dict[str, Any]) -> bool:
    return holder.get("machine") is not None and holder["machine"] == _machine() and isinstance(holder.get("pid"), int)


def _is_alive(holder: dict[str, Any]) -> bool:
    return _is_here(holder) and birth(holder["pid"]) == holder.get("born")


def _is_dead(holder: dict[str, Any]) -> bool:
    return _is_here(holder) and birth(holder["pid"]) != holder.get("born")


def _name(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid', '?')} on {holder.get('host', 'an unknown host')}"


def _refusal(store: Store, holder: dict[str, Any] | None) -> UserError:
    return UserError(
        f"another driver ({_name(holder or {})}) is writing to {store.url}; stop it or choose another --output."
    )
