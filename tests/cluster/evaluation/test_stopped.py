"""An evaluation that is stopped or killed while it grades: what it says, and that nothing of it goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from grading import trials

from cluster.evaluation import graderwork
from tests.cluster.processes import descendants
from tests.stopping import ROOT, STOP_S, started, stop
from tests.waiting import PATIENCE_S, wait_until

TASK = """
description: Programs that take a minute, whatever the model answers.
data: {splits: {demo: {file: prompts.jsonl}}}
split: demo
id: "{{ index }}"
prompt: "{{ prompt }}"
answer: "pass"
reference: {before: "import time\\ntime.sleep(60)\\n'''", after: "'''\\n", defines: [f]}
max_new_tokens: 8
grader: code
metrics: {passed: {score: passed}}
"""
GRADING = """
from cluster.evaluation.pool import grade
from cluster.evaluation.records import Item, Output
from cluster.evaluation.task import load_task
item = Item("0", {"before": "import time\\n", "after": "time.sleep(60)", "defines": ["f"]})
list(grade(load_task("humaneval"), [Output(item, "pass")] * 2, 2, True))
"""


def command_line(pid: int) -> str:
    """Empty once the process has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def in_jail(parent: int) -> list[int]:
    """Graders below a process and all that they have started, as soon as two programs run: three processes each."""
    graders = [pid for pid in descendants(parent) if graderwork.__name__ in command_line(pid)]
    below = [pid for grader in graders for pid in descendants(grader)]
    return graders + below if len(below) == 6 else []


def assert_gone(pids: list[int]) -> None:
    since = time.monotonic()
    wait_until("graders or programs go on", lambda: not any(map(command_line, pids)))
    assert time.monotonic() - since < STOP_S  # the programs take a minute


def test_an_evaluation_is_stopped_after_ray_has_left(tmp_path: Path, local_ray: str) -> None:
    """Ray leaves SIGTERM to the kernel, which ends a process without a word."""
    trials.skip_without_sandbox()
    (tmp_path / "slow.yaml").write_text(TASK)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "One and one?"}\n' * 2)
    flags = ["--tasks", str(tmp_path / "slow.yaml"), "--task-data", str(tmp_path), "--output", str(tmp_path / "out")]
    flags += ["--allow-code-execution", "--grading-workers", "2", "--workers", "1", "--device", "cpu"]
    with started(tmp_path, str(ROOT / "jobs" / "evaluate.py"), *flags, RAY_ADDRESS=local_ray) as process:
        left = wait_until("it never grades", lambda: in_jail(process.pid), process)
        assert stop(process, signal.SIGTERM) == "Stopped by SIGTERM; the same command goes on from here."
    assert_gone(left)


def test_graders_and_programs_die_with_whoever_grades(tmp_path: Path) -> None:
    trials.skip_without_sandbox()
    with started(tmp_path, "-c", GRADING) as process:
        left = wait_until("it never grades", lambda: in_jail(process.pid), process)
        process.kill()
        _, err = process.communicate(timeout=STOP_S)  # which a grader that lives holds open
    assert err == ""
    assert_gone(left)


def test_a_grader_says_nothing_when_nobody_waits_for_it() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", graderwork.__name__, "number", str(theirs.fileno()), str(os.getpid())]
    ours.close()
    with theirs:
        ended = subprocess.run(command, cwd=ROOT, pass_fds=[theirs.fileno()], capture_output=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stderr) == (0, b"")
