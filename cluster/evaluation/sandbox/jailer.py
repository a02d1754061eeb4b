"""Builds the jail, runs the program in it, and tells how that ended. Started by ``run.py`` as a program of its own.

Three processes. The *jailer* leaves the machine's namespaces (network, processes, …), watches memory and time, and
answers; it ends with whoever asked. The *keeper* is the first process of the new process namespace and sees only the
new root: when it ends, for whatever reason, the kernel kills all that the program started. The *prisoner* has an
unprivileged user and no capabilities, and executes the program.

Only the standard library is used here, as this starts anew for every program and may run as root.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

sys.path.append(str(Path(__file__).parent))

import confinement
import parent_death

_LOOK_S = 0.05
_PAGE = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    order = json.load(sys.stdin)
    user = confinement.leave_namespaces()
    parent_death.end_with(int(sys.argv[1]))
    token = os.urandom(16).hex().encode()
    answer_in, answer_out = os.pipe()
    trouble_in, trouble_out = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        os.close(answer_in)
        os.close(trouble_in)
        _keep(order, user, token, answer_out, trouble_out)
    os.close(answer_out)
    os.close(trouble_out)
    problem = _watch(keeper, order["limits"])
    trouble, answer = _read(trouble_in), _read(answer_in)
    passed = problem is None and answer == token.decode()
    verdict = {"passed": passed, "problem": None if passed else problem or answer or "It left before its end."}
    sys.stdout.write(json.dumps({"cannot": trouble} if trouble else verdict))


def _keep(order: dict, user: int, token: bytes, answer_out: int, trouble_out: int) -> NoReturn:
    """Build the root, start the prisoner, wait for it, and exit with the signal that killed it or 0."""
    try:
        confinement.build_root(order["visible"], user, order["limits"]["file_bytes"])
        if _is_unread(answer_out):
            os._exit(0)
        prisoner = os.fork()
        if prisoner == 0:
            _serve(order, user, token, answer_out, trouble_out)
    except BaseException as error:
        _report(trouble_out, error)
    os.close(answer_out)
    while True:
        pid, status = os.waitpid(-1, 0)  # orphans of the program end up here, too
        if pid == prisoner:
            os._exit(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)


def _is_unread(pipe: int) -> bool:
    """Whether nobody holds the other end: the jailer died before the keeper had asked to be killed with it."""
    poll = select.poll()
    poll.register(pipe, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _serve(order: dict, user: int, token: bytes, answer_out: int, trouble_out: int) -> NoReturn:
    """Give up every right, then execute the program. The token is written if it ran to its end."""
    try:
        namespace = _prepare(order["import_path"])
        confinement.give_up_rights(order["limits"], user, keep=(answer_out, trouble_out))
    except BaseException as error:
        _report(trouble_out, error)
    os.close(trouble_out)
    write, leave = os.write, os._exit  # the program may replace what modules hold
    try:
        exec(compile(order["source"], "<program>", "exec"), namespace)
        write(answer_out, token)
    except BaseException as error:
        write(answer_out, f"{type(error).__name__}: {error}"[:200].encode(errors="replace"))
    leave(0)


def _prepare(import_path: list[str]) -> dict:
    """The namespace of a module that is registered, as dataclasses and pickle look modules up by name."""
    module = type(sys)("solution")
    sys.modules["solution"] = module
    sys.path[:] = import_path
    sys.argv = ["solution"]
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.putenv(name, "1")
    return module.__dict__


def _report(trouble_out: int, error: BaseException) -> NoReturn:
    os.write(trouble_out, f"{type(error).__name__}: {error}"[:500].encode(errors="replace"))
    os._exit(0)


def _watch(keeper: int, limits: dict) -> str | None:
    """Wait for the keeper's end, or bring it about. Returns why the program did not end by itself."""
    ends = time.monotonic() + limits["wall_s"]
    problem = None
    keeper_fd = os.pidfd_open(keeper)
    while not select.select([keeper_fd], [], [], _LOOK_S)[0]:
        if time.monotonic() > ends:
            problem = f"It was not done after {limits['wall_s']:g} seconds."
        elif _resident_bytes(keeper) > limits["memory_bytes"]:
            problem = "Its processes used too much memory."
        if problem is not None:
            os.kill(keeper, signal.SIGKILL)
            break
    _, status = os.waitpid(keeper, 0)
    killed_by = os.waitstatus_to_exitcode(status)
    if problem is None and killed_by > 0:
        used_up = killed_by in (signal.SIGXCPU, signal.SIGKILL)
        problem = f"It used {limits['cpu_s']} seconds of processor time." if used_up else _signal_name(killed_by)
    return problem


def _signal_name(number: int) -> str:
    return f"It was ended by {signal.Signals(number).name}."


def _resident_bytes(root: int) -> int:
    """Memory of a process and all below it; what two of them share counts twice."""
    total, left = 0, [root]
    while left:
        process = f"/proc/{left.pop()}"
        try:
            with open(f"{process}/statm") as file:
                total += int(file.read().split()[1]) * _PAGE
            for thread in os.listdir(f"{process}/task"):
                with open(f"{process}/task/{thread}/children") as file:
                    left += map(int, file.read().split())
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    return total


def _read(pipe: int) -> str:
    """What fits into a pipe. The other end is closed, as whoever held it is dead."""
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, 1 << 16).decode(errors="replace")
    except BlockingIOError:
        return ""


if __name__ == "__main__":
    main()
