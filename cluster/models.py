"""Which model a run uses: a name resolved once to content, and a folder of it on every node."""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import UserError
from specfold.checkpoint import MODEL_FILES
from specfold.reference_models import NAMES, path

UNWANTED = ("*/*", "consolidated*.safetensors")
"""Sub-folders, and the second copy of the weights that some repositories bring."""
_HASH_BLOCK = 1 << 26
_HASH_THREADS = 8


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
    folder = _folder(model)
    if folder is not None:
        if revision is not None:
            raise UserError(f"--revision is for hub models; {model} is a folder.")
        return ModelRef(model, path=str(folder), content_hash=content_hash(folder))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) is None or model.startswith("."):
        raise UserError(f"The model folder {model} does not exist.")
    return ModelRef(model, repo=model, commit=_commit(model, revision))


def pinned(ref: ModelRef) -> str | None:
    """What tells its content from any other's."""
    return f"{ref.repo}@{ref.commit}" if ref.commit else ref.content_hash


def local_folder(ref: ModelRef) -> str:
    """The model's folder on this node; a hub model is downloaded once per node under a file lock."""
    if ref.path is not None:
        if Path(ref.path).is_dir():
            return ref.path
        # The package may be installed elsewhere on this node; what it brings must be what the driver saw.
        if ref.name in NAMES and content_hash(path(ref.name)) == ref.content_hash:
            return str(path(ref.name))
        raise UserError(f"The model folder {ref.path} does not exist on this node; put it where all nodes see it.")
    return _download(ref)


def content_hash(folder: Path) -> str:
    """Hash of names and content of the model's files, blocks in parallel: 16 GB take seconds, not minutes."""
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        digests = pool.map(_hash_block, _blocks(folder))
        total = hashlib.sha256(b"".join(digests))
    return f"sha256:{total.hexdigest()}"


def _folder(model: str) -> Path | None:
    """The local folder that the name means, if it means one. A folder here goes before a bundled model."""
    if Path(model).is_dir():
        return Path(model).resolve()
    return path(model) if model in NAMES else None


def _blocks(folder: Path) -> Iterator[tuple[Path, int]]:
    for file in sorted(folder.iterdir()):
        if file.is_file() and _is_wanted(file.name):
            yield from ((file, offset) for offset in range(0, max(1, file.stat().st_size), _HASH_BLOCK))


def _is_wanted(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in MODEL_FILES) and not any(
        fnmatch.fnmatch(name, pattern) for pattern in UNWANTED
    )


def _hash_block(block: tuple[Path, int]) -> bytes:
    file, offset = block
    hasher = hashlib.sha256(f"{file.name}\0{offset}\0".encode())
    try:
        with file.open("rb") as content:
            content.seek(offset)
            hasher.update(content.read(_HASH_BLOCK))
    except OSError as error:
        raise UserError(f"The model file {file} cannot be read: {error.strerror}.") from None
    return hasher.digest()


def _commit(repo: str, revision: str | None) -> str:
    """The commit that the revision names now; from the local cache if the hub cannot be reached."""
    # Imported here: a job with a local model needs none of it.
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return str(HfApi().model_info(repo, revision=revision).sha)
    except GatedRepoError:
        reason = "is gated: accept its terms on the hub and log in with `hf auth login`"
    except RevisionNotFoundError:
        reason = f"has no revision {revision!r}"
    except RepositoryNotFoundError:
        reason = "is neither a folder here nor a model on the hub that you may read"
    except Exception as error:  # whatever its HTTP client raises without a network
        cached = try_to_load_from_cache(repo, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached).parent.name
        reason = f"cannot be looked up on the hub: {_first_line(error)}"
    raise UserError(f"The model {repo} {reason}.")


def _download(ref: ModelRef) -> str:
    from filelock import FileLock
    from huggingface_hub import constants, snapshot_download

    assert ref.repo is not None
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / f"{ref.repo.replace('/', '--')}-{ref.commit}.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            return snapshot_download(
                ref.repo, revision=ref.commit, allow_patterns=list(MODEL_FILES), ignore_patterns=list(UNWANTED)
            )
    except Exception as error:  # the client raises many kinds, from HTTP errors to full disks
        raise UserError(f"The model {ref.repo} cannot be downloaded: {_first_line(error)}.") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0].strip().rstrip(".") or type(error).__name__
