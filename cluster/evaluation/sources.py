"""The rows of a task: from the hub, from a folder of benchmark files, or from one file of any format the job reads.

Folders and files may lie on an object store.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator
from typing import Any

from fsspec.core import url_to_fs

from cluster.config import JobConfig, without_secrets
from cluster.errors import UserError
from cluster.evaluation.taskfile import Data
from cluster.input.files import explained, find_files
from cluster.input.parse import parse_shard
from cluster.input.problems import RowProblem
from cluster.input.source import open_input

Row = dict[str, Any]
_BUNCH_ROWS = 256


def read_rows(
    task: str, data: Data, split: str, source: str | None, belongs: Callable[[Row], bool] | None
) -> Iterator[Row]:
    """The rows of ``split``, in their order.

    ``source``: a folder in which the task's files lie, another dataset id with the same splits, a single file (or
    anything else that ``--prompts`` takes), which is the split itself, or None for the task's own place on the hub.
    ``belongs`` picks the split's rows out of a file that holds more. Raises ``UserError``, also for a row that cannot
    be read: a benchmark must be whole.
    """
    place, hub_split, whole = _locate(task, data, split, source)
    opened = open_input(JobConfig(prompts=place, split=hub_split))
    for shard in opened.shards(_BUNCH_ROWS):
        for offset, row in enumerate(parse_shard(shard).rows):
            if isinstance(row, RowProblem):
                raise UserError(f"Row {shard.first_row + offset + 1} of {place} cannot be read: {row}")
            if whole or belongs is None or belongs(row):
                yield row


def require_source(source: str | None) -> None:
    """Raise ``UserError`` if ``source`` is neither a folder, nor files, nor possibly a dataset id."""
    if source is not None and not is_folder(source):
        _is_hub_id(source)


def is_single_file(source: str | None) -> bool:
    """Whether ``source`` is the rows themselves, which leaves no place for the rows of another split."""
    return source is not None and not is_folder(source) and not _is_hub_id(source)


def is_folder(source: str) -> bool:
    """Whether the task's files lie below ``source``, here or on an object store."""
    if "://" not in source:
        return os.path.isdir(source)
    if source.startswith(("http://", "https://")):  # no folders there, and any question may be answered with yes
        return False
    with explained(without_secrets(source)):
        fs, path = url_to_fs(source)
        return bool(fs.isdir(path))


def _is_hub_id(source: str) -> bool:
    """``UserError`` if it names files and there are none."""
    try:
        return find_files(source) is None
    except UserError as error:
        raise UserError(str(error).replace("--prompts ", "")) from None


def _locate(task: str, data: Data, split: str, source: str | None) -> tuple[str, str | None, bool]:
    """Where the rows are, their split there, and whether all rows there belong to it."""
    wanted = data.splits.get(split)
    if source is not None and is_single_file(source):
        return source, None, True
    if wanted is None:
        raise UserError(f"The task {task} has the splits {', '.join(data.splits)}, but no {split!r}.")
    if source is not None and is_folder(source):
        return _in_folder(task, source.rstrip("/"), split, wanted.file), None, False
    place = source or data.hub
    if place is None or wanted.hub is None:
        raise UserError(f"The split {split} of {task} is not on the hub: name the folder or the file that holds it.")
    return place, wanted.hub, False


def _in_folder(task: str, folder: str, split: str, file: str | None) -> str:
    if file is None:
        raise UserError(f"The split {split} of {task} is only on the hub, not in a folder.")
    # The folder of all benchmarks, or that of this one.
    for path in (f"{folder}/{file}", f"{folder}/{posixpath.basename(file)}"):
        with explained(without_secrets(path)):
            fs, name = url_to_fs(path)
            if fs.isfile(name):
                return path
    raise UserError(f"The folder {folder} holds no {file}, where the split {split} of {task} should be.")
