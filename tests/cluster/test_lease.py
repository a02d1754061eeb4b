"""One driver per output."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from cluster.errors import UserError
from cluster.output.lease import LEASE, Lease, holds, is_held
from cluster.output.storage import Store
from tests.waiting import wait_until


def lease(store: Store, token: str, **times: Any) -> Lease:
    return Lease(store, token, lambda _: None, **({"renew_s": 0.05, "stale_s": 0.5, "settle_s": 0.05} | times))


def write_lease(store: Store, **holder: Any) -> None:
    store.write(LEASE, orjson.dumps({"token": "other", "host": "elsewhere", "pid": 1, "machine": "other"} | holder))


def test_a_held_lease_is_refused_by_name(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "out"))
    first = lease(store, "one")
    first.acquire()
    assert is_held(store)
    with pytest.raises(UserError, match=r"another driver .* is writing to .*out; stop it or choose another --output"):
        lease(store, "two").acquire()
    first.release()
    lease(store, "two").acquire()
    assert holds(store, "two")


def test_the_lease_of_a_dead_process_is_taken_at_once(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    code = (
        "import os, sys; from cluster.output.storage import Store; from cluster.output.lease import Lease;"
        "Lease(Store(sys.argv[1]), 'dead').acquire(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])
    assert holds(store, "dead")
    begin = time.monotonic()
    lease(store, "alive", stale_s=60).acquire()
    assert time.monotonic() - begin < 30
    assert holds(store, "alive")


def test_a_lease_from_elsewhere_is_taken_only_when_it_has_stood_still(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    write_lease(store)
    begin = time.monotonic()
    lease(store, "mine").acquire()
    assert time.monotonic() - begin >= 0.5
    assert holds(store, "mine")


def test_a_lease_from_elsewhere_that_is_renewed_is_refused(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    write_lease(store)
    said: list[str] = []

    def renew(message: str) -> None:
        said.append(message)
        write_lease(store, renewals=1)

    with pytest.raises(UserError, match="process 1 on elsewhere"):
        Lease(store, "mine", renew, stale_s=0.5).acquire()
    assert "waiting for a sign of life" in said[0]


def test_a_holder_whose_lease_was_taken_says_so(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    mine = lease(store, "mine")
    mine.acquire()
    write_lease(store)
    lost = wait_until("it does not notice", lambda: mine.lost)
    assert lost is not None
    assert "another driver has taken over" in lost
    mine.release()
    assert holds(store, "other")
