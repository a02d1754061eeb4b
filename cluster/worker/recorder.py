"""A worker's flight recorder: the rows in its engine, in a file that outlives the process.

A row is noted before the engine gets it and struck out when it is done. The file is mapped memory on the worker's node,
so that noting costs no call and a SIGKILL loses nothing; after a death a task on that node reads it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
from pathlib import Path

from cluster.messages import Flight, RowKey

_HEAD = struct.Struct("<qq")  # rows finished; unused
_ENTRY = struct.Struct("<qii")  # row id, sample id, 1 if in the engine


class FlightRecorder:
    """One slot per row that can be in the engine at a time. Used by the engine's thread alone."""

    def __init__(self, path: str, num_slots: int) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        size = _HEAD.size + num_slots * _ENTRY.size
        with open(path, "w+b") as file:
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        self._path = path
        self._free = list(range(_HEAD.size, size, _ENTRY.size))
        self._finished = 0
        self._slots: dict[RowKey, int] = {}

    def admit(self, key: RowKey) -> None:
        slot = self._slots[key] = self._free.pop()
        _ENTRY.pack_into(self._memory, slot, key.row_id, key.sample_id, 1)

    def release(self, key: RowKey, *, finished: bool = True) -> None:
        slot = self._slots.pop(key)
        _ENTRY.pack_into(self._memory, slot, 0, 0, 0)
        self._free.append(slot)
        self._finished += finished
        _HEAD.pack_into(self._memory, 0, self._finished, 0)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)


def recorder_path(token: str, worker: str) -> str:
    """Where a worker of the driver ``token`` records; the same path on whichever node it runs."""
    return os.path.join(tempfile.gettempdir(), f"specfold-{token}", f"{worker}.rows")


def take_flight(path: str) -> Flight | None:
    """What a dead process recorded; removes the file. None if there is none."""
    try:
        data = Path(path).read_bytes()
        finished, _ = _HEAD.unpack_from(data)
    except (OSError, struct.error):
        return None
    with contextlib.suppress(OSError):
        os.unlink(path)
        os.rmdir(os.path.dirname(path))
    rows = [RowKey(row, sample) for row, sample, used in _ENTRY.iter_unpack(data[_HEAD.size :]) if used]
    return Flight(rows, finished)
