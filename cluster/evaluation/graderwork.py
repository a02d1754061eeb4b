"""What a grading process does. Imports little, as every process pays for it; ``cluster.evaluation.pool`` starts it."""

from __future__ import annotations

import logging
import resource
import sys
from multiprocessing.connection import Connection

from cluster.errors import UserError
from cluster.evaluation.graders import GRADERS, GraderKind, Judgement, Reference
from cluster.evaluation.sandbox.parent_death import end_with

READY = "ready"
_MEMORY_BYTES = 8 << 30
"""Address space of a grading process; some libraries reserve a few GB and use little of it."""


def main() -> None:
    """``graderwork KIND FD PARENT``: say that it is ready, then answer one ``(reference, text)`` after the other."""
    end_with(int(sys.argv[3]))
    kind, connection = GRADERS[sys.argv[1]], Connection(int(sys.argv[2]))
    logging.disable(logging.CRITICAL)  # libraries report every odd output as an error of theirs
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, _MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    kind.load()
    answer: Judgement | UserError | str = READY
    while True:
        try:
            connection.send(answer)
            reference, text = connection.recv()
        except (EOFError, OSError):  # whoever asked has gone
            return
        answer = _answer(kind, reference, text)


def failed(kind: GraderKind, reference: Reference, problem: str) -> Judgement:
    """The judgement of an output that could not be graded: it earns nothing."""
    blank = kind.load().blank(reference)
    return Judgement(blank.scores, blank.weights, problem=problem)


def _answer(kind: GraderKind, reference: Reference, text: str) -> Judgement | UserError:
    try:
        return kind.load().judge(reference, text)
    except UserError as error:
        return error
    except Exception as error:  # whatever a library makes of a strange output
        return failed(kind, reference, f"The grader failed: {type(error).__name__}: {error}"[:300])


if __name__ == "__main__":
    main()
