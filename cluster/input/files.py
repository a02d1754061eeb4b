"""Finding and reading the input's files, local or remote. Knows nothing of rows."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import fsspec
from fsspec.core import has_magic, url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import infer_compression

from cluster.config import without_secrets
from cluster.errors import UserError
from cluster.remote import lacks_bucket, reason_of

Format = Literal["jsonl", "json", "csv", "text", "parquet", "arrow"]
FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".txt": "text",
    ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow",
}  # fmt: skip
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_BLOCK_BYTES = 1 << 22
MAX_RECORD_BYTES = 1 << 26
"""A longer line is cut here. It would not fit any context, and cut it cannot be valid JSON."""


@dataclass(frozen=True)
class InputFile:
    """One file; ``name`` is what people see, ``path`` what the file system takes."""

    fs: Any
    path: str
    name: str
    format: Format

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    def open(self) -> Any:
        """A seekable handle on the bytes as they are stored."""
        with explained(self.name):
            return self.fs.open(self.path, "rb")

    def blocks(self) -> Iterator[bytes]:
        """The content, decompressed, in pieces of a few MB, without a leading byte order mark."""
        with explained(self.name):
            opened = fsspec.core.OpenFile(self.fs, self.path, "rb", compression=infer_compression(self.path))
            with opened as handle:
                block = handle.read(_BLOCK_BYTES).removeprefix(b"\xef\xbb\xbf")
                while block:
                    yield block
                    block = handle.read(_BLOCK_BYTES)

    def lines(self) -> Iterator[list[bytes]]:
        """The lines, without their ends, in bunches. Only a line feed ends a line."""
        rest = b""
        for block in self.blocks():
            *whole, rest = (rest + block).split(b"\n")
            if whole:
                yield whole
            if len(rest) > MAX_RECORD_BYTES:
                rest = rest[:MAX_RECORD_BYTES]
        if rest:
            yield [rest]


def find_files(prompts: str) -> list[InputFile] | None:
    """The input's files, sorted by name, all of one format. None if ``prompts`` does not look like a path.

    A folder stands for the files in it whose extension is known. Raises ``UserError`` for no match, an unreadable
    folder, a mixture of formats and an unknown extension.
    """
    shown = without_secrets(prompts)
    with explained(shown):
        fs, path = url_to_fs(prompts)
        # A file first: over HTTP the question whether something is a folder would download it.
        if fs.isfile(path):
            return [_input_file(fs, path)]
        if fs.isdir(path):
            return _in_folder(fs, path, shown)
        if has_magic(path):
            return _matching(fs, path, shown)
        if isinstance(fs, LocalFileSystem):
            _raise_if_hidden(path)
            _require_no_pipe(path)
    if "://" not in prompts and _looks_like_hub_id(prompts):
        return None
    raise UserError(f"--prompts {shown} does not exist.")


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn whatever a file system, a codec or a remote client raises into one sentence about ``name``."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        bucket = ": there is no such bucket" if lacks_bucket(error) else ""
        raise UserError(f"{name} does not exist{bucket}.") from None
    except PermissionError as error:
        if error.errno:
            raise UserError(f"{name} cannot be read: permission is denied.") from None
        raise UserError(f"{name} cannot be read: {reason_of(error)}.") from None  # an object store's
    except IsADirectoryError:
        raise UserError(f"{name} is a folder, not a file.") from None
    except Exception as error:
        # Remote clients have exception trees of their own; all mean that this input cannot be read.
        reason = re.sub(r"\w+://[^\s\"']+", lambda url: without_secrets(url[0]), reason_of(error))
        raise UserError(f"{name} cannot be read: {reason}.") from None


def _raise_if_hidden(path: str) -> None:
    """Tell a path inside a folder that may not be entered from one that does not exist."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.stat(path)


def _require_no_pipe(path: str) -> None:
    """Refuse what can be read only once, or never ends; opening it could wait for ever."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(
            f"{path} is a pipe or a device; the input is read several times (to check it, to decode it, to resume), so "
            "write it to a file."
        )


def _in_folder(fs: Any, folder: str, shown: str) -> list[InputFile]:
    paths = [entry["name"] for entry in fs.ls(folder, detail=True) if entry["type"] == "file"]
    known = [path for path in paths if _format(path) and not os.path.basename(path).startswith((".", "_"))]
    if not known:
        raise UserError(f"The folder {shown} holds no {_known_formats()} file.")
    return _one_format([_input_file(fs, path) for path in sorted(known)], shown)


def _matching(fs: Any, pattern: str, shown: str) -> list[InputFile]:
    paths = [path for path in fs.glob(pattern) if not fs.isdir(path)]
    if not paths:
        # A glob passes silently over a folder that it may not list.
        fs.ls(re.split(r"[*?\[]", pattern)[0].rpartition("/")[0] or ".")
        raise UserError(f"No file matches --prompts {shown}.")
    return _one_format([_input_file(fs, path) for path in sorted(paths)], shown)


def _one_format(files: list[InputFile], shown: str) -> list[InputFile]:
    first = files[0]
    for file in files:
        if file.format != first.format:
            raise UserError(
                f"--prompts {shown} mixes formats: {os.path.basename(first.name)} is {first.format} and "
                f"{os.path.basename(file.name)} is {file.format}; choose one, for example with *.{first.format}."
            )
    return files


def _input_file(fs: Any, path: str) -> InputFile:
    is_local = isinstance(fs, LocalFileSystem)
    if is_local:
        _require_no_pipe(path)
    name = path if is_local else fs.unstrip_protocol(path)
    format = _format(path)
    if format is None:
        raise UserError(f"{without_secrets(name)} has an extension that is not supported; use {_known_formats()}.")
    return InputFile(fs, path, without_secrets(name), format)


def _format(path: str) -> Format | None:
    stem, extension = os.path.splitext(path.partition("?")[0].lower())
    if extension in _COMPRESSED:
        format = FORMATS.get(os.path.splitext(stem)[1])
        return None if format in ("parquet", "arrow") else format
    return FORMATS.get(extension)


def _known_formats() -> str:
    *others, last = dict.fromkeys(FORMATS)
    return f"{', '.join(others)} or {last}"


def _looks_like_hub_id(prompts: str) -> bool:
    """``owner/name`` or ``owner/name:configuration``, unless ``owner`` is a folder here or ``name`` is a data file."""
    owner = prompts.partition("/")[0]
    return (
        re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?", prompts) is not None
        and not os.path.isdir(owner)
        and _format(prompts) is None
    )
