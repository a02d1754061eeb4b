"""Grading in parallel processes: an output that crashes or hangs its grader costs that output only."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from cluster.evaluation import graderwork
from cluster.evaluation.graders import GRADERS, Judgement, Reference
from cluster.evaluation.records import Grade, Output
from cluster.evaluation.sandbox import require_sandbox
from cluster.evaluation.task import Task

_START_S = 180.0
_ROOT = Path(graderwork.__file__).parents[2]
"""Where ``python -m`` finds this package."""


def grade(
    task: Task, outputs: Iterable[Output], workers: int | None = None, allow_code_execution: bool = False
) -> Iterator[Grade]:
    """One grade an output, in their order. ``workers``: processes, one for each core unless given.

    Raises ``UserError`` at once where the outputs cannot be graded: code would have to be run, which is not allowed or
    which this machine cannot hold, or data that a grader needs is missing.
    """
    kind = GRADERS[task.grader]
    outputs = list(outputs)
    if kind.runs_code:
        if not allow_code_execution:
            raise UserError(f"Grading {task.name} runs code that a model wrote; allow it with --allow-code-execution.")
        require_sandbox()
    kind.load().check([output.item.reference for output in outputs])
    count = min(workers or len(os.sched_getaffinity(0)), len(outputs))
    main = next(iter(task.metrics.values())).score
    return _graded(task.grader, main, outputs, count)


def _graded(name: str, main: str, outputs: Sequence[Output], count: int) -> Iterator[Grade]:
    jobs = [(output.item.reference, output.text) for output in outputs]
    for output, judgement in zip(outputs, _judge_all(name, jobs, count), strict=True):
        correct = bool(judgement.scores[main])
        yield Grade(
            output.item.id, output.sample_id, correct, judgement.scores, judgement.weights, judgement.extracted,
            judgement.problem,
        )  # fmt: skip


def _judge_all(name: str, jobs: Sequence[tuple[Reference, str]], count: int) -> Iterator[Judgement]:
    """Judgements in the order of the jobs."""
    waiting = deque(range(len(jobs)))
    done: dict[int, Judgement] = {}
    crashed: set[int] = set()
    workers: list[_Worker] = []
    try:
        workers = [_Worker(name) for _ in range(count)]
        for index in range(len(jobs)):
            while index not in done:
                for worker in workers:
                    if worker.is_idle and waiting:
                        worker.give(waiting[0], *jobs[waiting.popleft()])
                _await_any(workers)
                for worker in workers:
                    try:
                        done |= worker.collect(jobs)
                    except _Crashed as lost:
                        # Somebody may have killed the process, for want of memory say: once is nobody's fault.
                        if lost.job in crashed:
                            done[lost.job] = graderwork.failed(GRADERS[name], jobs[lost.job][0], "The grader crashed.")
                        else:
                            waiting.appendleft(lost.job)
                        crashed.add(lost.job)
            yield done.pop(index)
    finally:
        for worker in workers:
            worker.stop()


class _Crashed(Exception):
    """A grading process died over its job."""

    def __init__(self, job: int) -> None:
        super().__init__(job)
        self.job = job


class _Worker:
    """One grading process, replaced when it dies or has to be killed."""

    def __init__(self, name: str) -> None:
        self._name, self._kind = name, GRADERS[name]
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        # A new interpreter: a fork would inherit the driver's threads and locks, and multiprocessing's spawn would
        # import the driver's main program once more, with all that it needs.
        self._process = subprocess.Popen(
            [sys.executable, "-m", graderwork.__name__, self._name, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()], cwd=_ROOT, stdin=subprocess.DEVNULL, process_group=0,
        )  # fmt: skip
        theirs.close()
        self.connection = Connection(ours.detach())
        self._job: int | None = None
        self._is_ready = False
        self.deadline = time.monotonic() + _START_S

    @property
    def is_idle(self) -> bool:
        return self._is_ready and self._job is None

    def give(self, job: int, reference: Reference, text: str) -> None:
        self._job = job
        self.deadline = time.monotonic() + self._kind.timeout_s
        with contextlib.suppress(OSError):  # it has just died, which collect finds
            self.connection.send((reference, text))

    def collect(self, jobs: Sequence[tuple[Reference, str]]) -> dict[int, Judgement]:
        """The judgement of its job, if there is one by now or cannot be one any more. Raises ``_Crashed``."""
        if self.is_idle:
            return {}
        try:
            if self.connection.poll():
                return self._received(self.connection.recv())
        except (EOFError, OSError):
            job = self._restart()
            if job is not None:
                raise _Crashed(job) from None
            return {}
        if time.monotonic() > self.deadline:
            problem = f"The grader was not done after {self._kind.timeout_s:g} seconds."
            job = self._restart()
            return {} if job is None else {job: graderwork.failed(self._kind, jobs[job][0], problem)}
        return {}

    def _received(self, answer: Any) -> dict[int, Judgement]:
        if isinstance(answer, UserError):
            raise answer
        if answer == graderwork.READY:
            self._is_ready = True
            return {}
        job, self._job = self._job, None
        assert job is not None
        return {job: answer}

    def _restart(self) -> int | None:
        """A new process; the job that the old one had."""
        if not self._is_ready:
            raise UserError("A grading process did not start; its error is above.", exit_code=1)
        job = self._job
        self.stop()
        self._start()
        return job

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self.connection.close()


def _await_any(workers: Sequence[_Worker]) -> None:
    """Until a busy worker answered or died, or one ran out of time."""
    busy = [worker for worker in workers if not worker.is_idle]
    left = min((worker.deadline for worker in busy), default=0.0) - time.monotonic()
    wait([worker.connection for worker in busy], max(left, 0.0) + 0.01)
