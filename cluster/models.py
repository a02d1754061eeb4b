"""Which model a run uses: a name resolved once to content, and a folder of it on every node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelRef:
    """A model pinned to its content: ``path`` and ``content_hash`` for a folder, ``repo`` and ``commit`` on the hub."""

    name: str
    path: str | None = None
    repo: str | None = None
    commit: str | None = None
    content_hash: str | None = None


def resolve_model(model: str, revision: str | None = None) -> ModelRef:
    """Pin ``model`` (folder, bundled name or hub id); called once, by the driver. Raises ``UserError`` if absent."""
    raise NotImplementedError


def local_folder(ref: ModelRef) -> str:
    """The model's folder on this node; a hub model is downloaded once per node under a file lock."""
    raise NotImplementedError
