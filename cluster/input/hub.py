"""Datasets on the hub by their id: streamed, or from this machine's caches where the hub cannot be reached."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from cluster.errors import UserError
from cluster.input.files import explained
from cluster.input.tables import DatasetSource, choose_split

_PIECE = re.compile(r"(.*)-\d{5}-of-(\d{5})(.*)")
_SHOWN_COMMIT = 12


def open_hub(prompts: str, split: str | None) -> DatasetSource:
    """A dataset id, or ``id:configuration``. No code of the dataset is ever executed.

    Without a network the dataset must be in a cache: prepared by ``datasets``, which finds it there by itself, or a
    whole snapshot as ``hf download --repo-type dataset`` leaves it. Raises ``UserError``.
    """
    from datasets import get_dataset_split_names, load_dataset

    repository, _, name = prompts.partition(":")
    configuration = name or None
    with explained(f"The dataset {prompts}"):
        try:
            splits = get_dataset_split_names(repository, configuration)
        except Exception as error:
            if isinstance(error, FileNotFoundError | ValueError):  # there is no such dataset or configuration
                raise
            cached = _from_snapshot(prompts, repository, configuration, split)
            if cached is None:  # nowhere: why the hub gave none is the reason to tell
                raise
            return cached
        split = choose_split(prompts, splits, split)
        dataset = load_dataset(repository, configuration, split=split, streaming=True)
    return DatasetSource(f"{prompts} ({split})", dataset)


def _from_snapshot(prompts: str, repository: str, configuration: str | None, split: str | None) -> DatasetSource | None:
    """The dataset as the hub's cache on this machine has it; None if it has none."""
    from datasets import get_dataset_split_names, load_dataset

    folder = _snapshot(repository)
    if folder is None:
        return None
    _require_whole(prompts, folder)
    split = choose_split(prompts, get_dataset_split_names(str(folder), configuration), split)
    dataset = load_dataset(str(folder), configuration, split=split, streaming=True)
    return DatasetSource(f"{prompts} ({split}), commit {folder.name[:_SHOWN_COMMIT]} from the cache", dataset)


def _snapshot(repository: str) -> Path | None:
    """The folder of the hub's files in its cache; None if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _require_whole(prompts: str, folder: Path) -> None:
    """``UserError`` if of files in numbered pieces some were never downloaded: their rows would be missing silently."""
    pieces: Counter[tuple[str, ...]] = Counter()
    for file in folder.rglob("*"):
        match = _PIECE.fullmatch(str(file.relative_to(folder)))
        if match:
            pieces[match.groups()] += 1
    for (stem, total, end), found in pieces.items():
        if found != int(total):
            raise UserError(
                f"The dataset {prompts} is not whole in the cache: it has {found} of {int(total)} files {stem}-*{end}; "
                "download all of it."
            )
