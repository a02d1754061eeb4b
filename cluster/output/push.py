"""Uploading a finished run to the hub: its parts and its card. Knows nothing of how they were made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.errors import UserError
from cluster.output.card import CARD
from cluster.output.sink import DATA, part_index, part_name
from cluster.output.storage import Store

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_TYPE = "dataset"
_COMMIT_PARTS = 100
"""Files of one commit; the hub gives up on commits that take it over a minute."""


def require_token() -> None:
    """``UserError`` if the environment has no token for the hub: known before a long job, not after it."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise UserError("--push-to-hub needs a token: log in with `hf auth login`, or set HF_TOKEN.")


def push(store: Store, repo: str, *, public: bool, api: HfApi | None = None) -> str:
    """Upload the run; returns the address of the repository, which is made if it is not there.

    Parts that the hub has already are not sent again, so a push that broke off can be repeated. Parts of an earlier
    push that this run does not have are deleted, other files are left alone; the card comes last. ``UserError`` with
    exit code 1 for whatever goes wrong.
    """
    from huggingface_hub import HfApi

    api = api or HfApi()
    try:
        url = api.create_repo(repo, repo_type=_TYPE, private=not public, exist_ok=True)
        _upload(api, store, url.repo_id)
        return str(url)
    except Exception as error:  # the client raises many kinds, from HTTP errors to lost connections
        reason = (str(error).splitlines() or [""])[0].strip().rstrip(".") or type(error).__name__
        raise UserError(
            f"The results are whole in {store.url}, but could not be pushed to {repo}: {reason}. "
            "The same command again pushes them without decoding.",
            1,
        ) from None


def _upload(api: HfApi, store: Store, repo: str) -> None:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    names = [part_name(index) for index in map(part_index, store.names(DATA)) if index is not None]
    for start in range(0, len(names), _COMMIT_PARTS):
        operations = []
        for name in names[start : start + _COMMIT_PARTS]:
            operation = CommitOperationAdd(name, f"{store.root}/{name}" if store.is_local else store.read(name))
            if not store.is_local:  # one part at a time in memory
                api.preupload_lfs_files(repo, [operation], repo_type=_TYPE)
            operations.append(operation)
        _commit(api, repo, operations, "Add rows")
    old = set(filter(_is_part, api.list_repo_files(repo, repo_type=_TYPE))) - set(names)
    deletions = [CommitOperationDelete(name) for name in sorted(old)]
    _commit(api, repo, [*deletions, CommitOperationAdd(CARD, store.read(CARD))], "Add the dataset card")


def _commit(api: HfApi, repo: str, operations: list[Any], message: str) -> None:
    api.create_commit(repo, operations, commit_message=message, repo_type=_TYPE)


def _is_part(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return folder == DATA and part_index(file) is not None
