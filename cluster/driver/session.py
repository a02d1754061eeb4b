"""The Ray side of a driver's life: joining or starting Ray, one driver per output, helper tasks."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ray

from cluster.config import without_secrets
from cluster.driver.signals import Interrupted, StopSignals
from cluster.errors import UserError
from specfold import ConfigError, ModelError

NAMESPACE = "specfold"
_KEEPER_WAIT_S = 5.0
_PROBE_S = 10.0
_LOCAL_RAY = {
    # Helper processes may end once they are idle: Ray would keep one a core, with all that it has loaded, for the rest
    # of the job. The peak, which is at the start, is not lower by it.
    "num_workers_soft_limit": 0,
    # Workers are as urgent as the command itself: with Ray's own niceness of 15 they wait for whatever else the machine
    # computes, minutes for what takes seconds.
    "worker_niceness": 0,
}


@contextlib.contextmanager
def ray_session(address: str | None, workers: int | None, signals: StopSignals) -> Iterator[None]:
    """Join the cluster at ``address``, or start a local Ray; leave alone what was running before.

    A bare ``ray.init()`` would join any head on the machine, hence ``local``. Raises ``UserError`` or ``Interrupted``.
    """
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False}
    if address is None:
        # Workers that were asked for must all find a place; more than the cores is the user's choice.
        options |= {"address": "local", "num_cpus": max(os.cpu_count() or 1, workers or 1)}
        options |= {"logging_level": logging.ERROR, "_system_config": _LOCAL_RAY}
    else:
        _probe(address)
        options |= {"address": address, "logging_level": logging.WARNING}
    try:
        with signals.held():
            ray.init(**options)
    except (ConnectionError, ValueError) as error:
        raise UserError(f"the Ray cluster at {address} cannot be reached: {error}", 1) from None
    except SystemExit:  # Ray's own handler, which is in place while it starts
        raise Interrupted(signals.number or signal.SIGTERM) from None
    try:
        signals.check()
        yield
    finally:
        with signals.held():
            ray.shutdown()


def _probe(address: str) -> None:
    """Raise ``UserError`` if nothing listens there: Ray itself tries for minutes and then kills the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"no Ray cluster answers at {address}: {reason}.") from None


def worker_environment() -> dict[str, Any]:
    """Runtime environment of workers and helper tasks: what makes this program importable there.

    Ray adds the script's folder and the working directory by itself, and a submitted job's. Nothing is asked for where
    that is enough: a process with an environment of its own starts a second later. Threads need no setting: Ray gives
    a process of one CPU one OpenMP thread.
    """
    root = Path(__file__).resolve().parents[2]
    known = {Path.cwd(), Path(sys.argv[0]).resolve().parent}
    if root in known or "site-packages" in root.parts or ray.get_runtime_context().runtime_env.get("working_dir"):
        return {}
    return {"env_vars": {"PYTHONPATH": str(root)}}


class OutputKeeper:
    """A named actor that exists as long as the driver of an output does, so that one cluster has one."""

    def __init__(self, url: str, held_elsewhere: Callable[[], bool]) -> None:
        self._name = f"output {without_secrets(url)}"
        self._url, self._held_elsewhere = url, held_elsewhere
        self._actor: Any = None

    def acquire(self) -> None:
        """``UserError`` if another driver in this cluster has the output; a dead one's actor takes a moment to go."""
        keeper: Any = ray.remote(OutputLock)
        options = {"name": self._name, "namespace": NAMESPACE, "num_cpus": 0, "max_restarts": 0}
        deadline = time.monotonic() + _KEEPER_WAIT_S
        while True:
            try:
                self._actor = keeper.options(**options).remote()
                return
            except ValueError:
                if self._held_elsewhere() or time.monotonic() > deadline:
                    raise UserError(
                        f"another driver in this Ray cluster is writing to {self._url}; stop it or choose another "
                        "--output."
                    ) from None
                time.sleep(0.5)

    def release(self) -> None:
        if self._actor is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self._actor)


class OutputLock:
    """Does nothing but exist. Its name is what Ray's dashboard shows."""


def ray_map(
    name: str,
    environment: dict[str, Any],
    call: Callable[[Any], Any],
    items: Iterable[Any],
    resources: dict[str, float] | None = None,
) -> Iterator[Any]:
    """``map`` in helper tasks: results in order, a bounded number of items under way. ``resources``: one CPU each."""
    task: Any = ray.remote(_apply)
    task = task.options(name=name, runtime_env=environment, max_retries=2, **resources or {"num_cpus": 1})
    call_ref = ray.put(call)
    limit = 2 * max(int(ray.cluster_resources().get("CPU", 1)), 1)
    running: deque[Any] = deque()
    for item in items:
        if len(running) >= limit:
            yield _result(running.popleft())
        running.append(task.remote(call_ref, item))
    while running:
        yield _result(running.popleft())


def _apply(call: Callable[[Any], Any], item: Any) -> Any:
    return call(item)


def _result(ref: Any) -> Any:
    """A task's result, or the error that it raised."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError | ConfigError | ModelError):
            raise UserError(str(error.cause), getattr(error.cause, "exit_code", 2)) from None
        raise
    except ray.exceptions.RayError as error:
        raise UserError(f"a helper task could not be run: {str(error).splitlines()[0]}", 1) from None
