"""What a program in the sandbox can do, and all that it cannot."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from grading import trials

from cluster.evaluation.sandbox import Limits, Verdict, run_program

LIMITS = Limits(cpu_s=1, wall_s=20.0)
IMPATIENT = Limits(cpu_s=1, wall_s=1.5)
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module", autouse=True)
def _sandbox() -> None:
    trials.skip_without_sandbox()


def run(source: str, limits: Limits = LIMITS) -> Verdict:
    return run_program(source, limits)


@pytest.mark.parametrize(
    "source",
    [
        "assert sum(range(5)) == 10",
        "import json, re, math, heapq, itertools, collections, datetime, decimal, random, typing",
        "import numpy\nassert numpy.arange(3).sum() == 3",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 1\nassert A().x == 1",
        "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()",
        "open('notes', 'w').write('a')\nassert open('notes').read() == 'a'",
        "print('x' * 100_000_000)",
    ],
)
def test_ordinary_programs_run(source: str) -> None:
    assert run(source, Limits(cpu_s=10, wall_s=60.0)) == Verdict(True, None)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("while True: pass", "1 seconds of processor time"),
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "processor time"),
        ("import os\nos._exit(0)", "left before its end"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("x = bytearray(1 << 31)", "MemoryError"),
        ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
        ("def f(:", "SyntaxError"),
        ("assert 1 == 2, 'not equal'", "AssertionError: not equal"),
        ("input()", "EOFError"),
        ("import sys\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nf()", ""),
        ("open('big', 'wb').write(b'1' * (17 << 20))", "File too large"),
        ("for i in range(9): open(str(i), 'wb').write(b'1' * (10 << 20))", "No space left"),
        ("import socket\nsocket.create_connection(('1.1.1.1', 80), timeout=5)", "unreachable"),
        ("import os\nos.setuid(0)", "PermissionError"),
        ("import os\nos.memfd_create('memory')", "PermissionError"),
        (
            "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
            "assert libc.shmget(0, 1 << 20, 0o1600) >= 0, ctypes.get_errno()",
            "AssertionError: 1",
        ),
        (
            "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
            "assert libc.unshare(0x10020000) == 0, ctypes.get_errno()",
            "AssertionError: 1",
        ),
        ("import os, signal\nos.kill(-1, signal.SIGKILL)", "ProcessLookupError"),
        (
            "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        x = bytearray(b'1') * (300 << 20)\n"
            "        time.sleep(99)\ntime.sleep(99)",
            "too much memory",
        ),
        ("import os\nfor fd in range(3, 99):\n    try: os.write(fd, b'x' * 99)\n    except OSError: pass", "x"),
        (
            "import os\nfor fd in range(3, 99):\n    try: os.write(fd, b'{\"passed\": true}')\n"
            "    except OSError: pass\nos._exit(0)",
            "passed",
        ),
    ],
)  # fmt: skip
def test_hostile_programs_fail_in_time(source: str, problem: str) -> None:
    start = time.monotonic()
    verdict = run(source)
    assert not verdict.passed
    assert problem in (verdict.problem or "")
    assert time.monotonic() - start < LIMITS.wall_s


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.sleep(1000)",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import os\nfor fd in range(3, 9):\n    try:\n        while True: os.write(fd, b'x')\n    except OSError: pass",
        "import threading\nwhile True:\n    threading.Event().wait()",
    ],
)
def test_programs_that_never_end_are_ended(source: str) -> None:
    start = time.monotonic()
    assert run(source, IMPATIENT) == Verdict(False, "It was not done after 1.5 seconds.")
    assert time.monotonic() - start < 60


def test_a_program_sees_nothing_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    paths = [
        str(tmp_path / "secret"),
        str(ROOT / "README.md"),
        "/etc/passwd",
        "/proc/1/environ",
        "/sys",
        "/home",
        "/var",
    ]
    assert run(f"import os\nassert [p for p in {paths} if os.path.exists(p)] == []") == Verdict(True, None)
    assert run("import os\nassert set(os.environ) <= {'LC_CTYPE'}, dict(os.environ)") == Verdict(True, None)


@pytest.mark.parametrize("place", ["/", "/dev", "/usr", os.path.dirname(os.__file__), sys.prefix])
def test_a_program_writes_only_to_its_own_folder(place: str) -> None:
    verdict = run(f"open({place + '/escaped'!r}, 'w')")
    assert not verdict.passed
    assert not os.path.exists(f"{place}/escaped")


def test_nothing_is_left_behind() -> None:
    before = set(os.listdir("/tmp"))
    assert run("open('/tmp/left-behind-by-a-program', 'w').write('x')").passed
    assert run(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    open('/tmp/marker-7f3a', 'w')\n    time.sleep(77)"
    ).passed
    assert not {"left-behind-by-a-program", "marker-7f3a"} & (set(os.listdir("/tmp")) - before)
    # The process namespace ends with the program, and with it the child that had left its session.
    assert not any(_runs_jailer(int(pid)) for pid in os.listdir("/proc") if pid.isdigit())


def _runs_jailer(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"sandbox/jailer.py" in command and parent == os.getpid()


def test_the_network_of_this_machine_is_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        verdict = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)")
    assert not verdict.passed


TRIAL = """
from cluster.errors import UserError
from cluster.evaluation.sandbox import require_sandbox, run_program
try:
    require_sandbox()
    assert run_program("import os\\nassert os.getuid() == 65534").passed
    assert not run_program("open('/usr/escaped', 'w')").passed
    print("held")
except UserError as error:
    print(error)
"""


def _try_as(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, sys.executable, "-c", TRIAL], env=environment, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="gives up being root")
def test_it_holds_without_root() -> None:
    assert _try_as("unshare", "-U", "--map-user=1000", "--map-group=1000") == "held"


@pytest.mark.skipif(os.getuid() != 0, reason="gives up being root")
def test_where_it_cannot_hold_it_refuses_in_a_sentence() -> None:
    said = _try_as("setpriv", "--bounding-set=-sys_admin")
    assert said.startswith("This machine cannot hold code that a model wrote (PermissionError")
    assert "\n" not in said


def test_programs_side_by_side_do_not_share_their_limits() -> None:
    waits = "import os, time\nfor _ in range(9):\n    if os.fork() == 0:\n        time.sleep(30)\ntime.sleep(1)"
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(run, [waits] * 3)) == [Verdict(True, None)] * 3
