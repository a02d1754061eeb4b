"""System calls that a program in the sandbox cannot make: those that get memory no limit sees, or new namespaces.

A filter of the kernel's (seccomp, ``man 2 seccomp``), a list of instructions over the call's number and arguments.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in what the filter sees of a call."""
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_NEW_NAMESPACES = 0x7E020000
"""All CLONE_NEW flags of clone but that of time, which clone cannot make."""
_FOREIGN_FROM = 0x40000000
"""On x86-64, calls of another convention (x32) begin here."""
_NAMES = (
    "memfd_create", "memfd_secret", "shmget", "msgget", "semget", "unshare", "setns", "mount", "fsopen", "bpf",
    "userfaultfd", "perf_event_open",
)  # fmt: skip
_MACHINES = {
    "x86_64": (0xC000003E, 56, (319, 447, 29, 68, 64, 272, 308, 165, 430, 321, 323, 298)),
    "aarch64": (0xC00000B7, 220, (279, 447, 194, 186, 190, 97, 268, 40, 430, 280, 282, 241)),
}
"""By machine: its number, that of clone, and those of ``_NAMES``."""
_CLONE3 = 435
"""On both. Its flags lie in memory, out of the filter's sight; C libraries go on with clone where it is missing."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def call_filter() -> _Program:
    """The filter as the kernel takes it. Raises ``OSError`` on a machine whose calls are not known here."""
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}")
    architecture, clone, numbers = _MACHINES[machine]
    refuse, missing = _REFUSE | errno.EPERM, _REFUSE | errno.ENOSYS
    # (operation, value, instructions to skip where it holds, and where it does not)
    lines = [
        (_LOAD, _ARCHITECTURE, 0, 0), (_IF_EQUAL, architecture, 1, 0), (_RETURN, refuse, 0, 0),
        (_LOAD, _NUMBER, 0, 0), (_IF_AT_LEAST, _FOREIGN_FROM, 0, 1), (_RETURN, refuse, 0, 0),
        (_IF_EQUAL, _CLONE3, 0, 1), (_RETURN, missing, 0, 0),
    ]  # fmt: skip
    for number in numbers:
        lines += [(_IF_EQUAL, number, 0, 1), (_RETURN, refuse, 0, 0)]
    lines += [
        (_IF_EQUAL, clone, 0, 3), (_LOAD, _FIRST_ARGUMENT, 0, 0), (_IF_ANY_BIT, _NEW_NAMESPACES, 0, 1),
        (_RETURN, refuse, 0, 0), (_RETURN, _ALLOW, 0, 0),
    ]  # fmt: skip
    packed = b"".join(struct.pack("HBBI", operation, yes, no, value) for operation, value, yes, no in lines)
    return _Program(len(lines), packed)
