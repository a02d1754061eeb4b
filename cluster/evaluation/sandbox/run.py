"""The caller's side of the sandbox: one process a program, killed with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.errors import UserError

_JAILER = Path(__file__).with_name("jailer.py")
_GRACE_S = 5.0
"""Beyond the program's wall time the jailer gets this long to tidy up before it is killed itself."""


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    cpu_s: int = 10
    """Processor seconds of each of its processes. This, not the clock, should end an endless loop: a program's result
    must not depend on what else runs on the machine. MBPP's slowest own solution takes 2.6."""
    wall_s: float = 30.0
    memory_bytes: int = 1 << 30
    """Of each process, and of all together."""
    file_bytes: int = 16 << 20
    """Of one file; all files together may have four times as much."""
    processes: int = 16
    """Processes and threads."""


@dataclass(frozen=True)
class Verdict:
    """``passed``: the program ran to its end and raised nothing. ``problem``: why not, in a few words."""

    passed: bool
    problem: str | None


def run_program(source: str, limits: Limits | None = None) -> Verdict:
    """Run a Python program in a jail of its own. Never raises for what the program does.

    It sees the standard library and this environment's packages read-only, an empty temporary folder as its working
    directory, ``/dev/null``, zeros and random bytes, and nothing else: no other files, no network, no other processes.
    Its output goes nowhere. Raises ``UserError`` where the machine cannot hold it that way.
    """
    limits = limits or Limits()
    order = {"source": source, "limits": asdict(limits), "visible": _interpreter_folders(), "import_path": _packages()}
    answer = _ask_jailer(order, limits.wall_s + _GRACE_S)
    if answer is None:
        return Verdict(False, "The jail died with the program.")
    if "cannot" in answer:
        raise UserError(_refusal(answer["cannot"]))
    return Verdict(answer["passed"], answer["problem"])


def require_sandbox() -> None:
    """Raise ``UserError`` unless this machine can hold a program: tried with one that must fail to get out."""
    if not sys.platform.startswith("linux"):
        raise UserError(_refusal("it is not Linux"))
    verdict = run_program(_ESCAPES)
    if not verdict.passed:
        raise UserError(_refusal(verdict.problem or "the trial failed"))


def _refusal(reason: str) -> str:
    return (
        f"This machine cannot hold code that a model wrote ({reason}), so it is not run: grade on Linux as root, or as "
        "a user who may make user namespaces."
    )


_ESCAPES = """
import os, socket
assert os.getuid() != 0 and os.getgid() != 0, "the user is root"
for path in ("/etc/hostname", "/home", "/var", "/proc/1"):
    assert not os.path.exists(path), path + " is visible"
try:
    socket.create_connection(("127.0.0.1", 9), timeout=1)
except ConnectionRefusedError:
    raise AssertionError("the loopback network is up") from None
except OSError:
    pass
try:
    open("/escaped", "w")
except OSError:
    pass
else:
    raise AssertionError("the root folder can be written")
open("kept", "w").write("its own folder can be written")
"""


def _ask_jailer(order: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
    # -I and -S: neither the environment, nor the working directory, nor the packages reach the process that is root.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_JAILER), str(os.getpid())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/", env={}, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(json.dumps(order).encode(), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode == 0 and out:
        return dict(json.loads(out))
    if err:  # the jailer's own failure, never the program's: its error output goes elsewhere
        return {"cannot": err.decode(errors="replace").strip().splitlines()[-1]}
    return None


def _interpreter_folders() -> list[str]:
    """What a program needs to see to run Python: its installation, this environment, the system's libraries."""
    folders = [sys.base_prefix, sys.prefix, "/usr", "/lib", "/lib64", "/bin"]
    return [folder for folder in dict.fromkeys(folders) if os.path.isdir(folder)]


def _packages() -> list[str]:
    roots = (os.path.join(sys.prefix, ""), os.path.join(sys.base_prefix, ""))
    return [entry for entry in sys.path if entry.startswith(roots)]
