"""One folder, local or remote, whose files appear whole or not at all. Knows nothing of what is in them."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from cluster.errors import UserError
from cluster.remote import is_client_error, is_lasting, lacks_bucket, reason_of

T = TypeVar("T")
_REASONS = {
    errno.ENOSPC: "no space is left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission is denied",
    errno.EPERM: "permission is denied",
    errno.EFBIG: "the limit on file size is reached",
    errno.ENOTDIR: "a part of the path is not a folder",
    errno.EEXIST: "a file is in the way",
    errno.EISDIR: "a folder is in the way",
    errno.ENAMETOOLONG: "the name is too long",
}
_MISTAKES = (PermissionError, FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError)
_MISTAKEN_NUMBERS = (errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)
_PAUSES_S = (0.5, 1.0, 2.0)
_TELL_S = 30.0


class StorageError(UserError):
    """The output cannot be read or written. Whatever was published before stays whole.

    ``is_mistake``: the place itself is at fault (a file in the way, no permission, a bucket that is not there), so that
    the same command would do no better later.
    """

    def __init__(self, message: str, exit_code: int = 1, *, is_mistake: bool = False) -> None:
        super().__init__(message, exit_code)
        self.is_mistake = is_mistake


@contextlib.contextmanager
def mistakes_of_place() -> Iterator[None]:
    """A place that can take or give nothing is a mistake of the command, unlike a disk that fills up: exit code 2."""
    try:
        yield
    except StorageError as error:
        if error.is_mistake:
            raise UserError(str(error)) from None
        raise


class Store:
    """A folder named by a path or URL. ``write`` and ``create`` publish a whole file in one step.

    Locally that is a dot-temporary, ``fsync`` and rename (also right on NFS); on an object store a single put. A file
    is never written through an open remote handle: closing one after an exception would publish a short file.
    """

    def __init__(self, url: str) -> None:
        try:
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise UserError(f"--output {url} cannot be opened: {error}.") from None
        self.is_local = isinstance(self._fs, LocalFileSystem)
        self.root = os.path.abspath(os.path.expanduser(root)) if self.is_local else root.rstrip("/")
        self.url = self.root if self.is_local else self._fs.unstrip_protocol(self.root)
        self.say: Callable[[str], None] = lambda _: None
        """Hears when a store on the network stays away for more than a moment."""
        self._pauses_s = () if self.is_local else _PAUSES_S
        self._told = float("-inf")

    def hurry(self) -> None:
        """From now on ask once: whoever is about to give up need not wait for each of his last files."""
        self._pauses_s = ()

    def path(self, name: str) -> str:
        """Where a file is, as shown to people."""
        return f"{self.url}/{name}"

    def require_writable(self) -> None:
        """Raise ``StorageError`` if the place can be seen to take no files; creates nothing."""
        if not self.is_local:
            self._require_bucket()
            return
        place = Path(self.root)
        with self._explained("written"):
            while not place.exists() and place != place.parent:
                place = place.parent
            if not place.is_dir():
                raise OSError(errno.EEXIST if place == Path(self.root) else errno.ENOTDIR, "")
            if not os.access(place, os.W_OK | os.X_OK):
                read_only = os.statvfs(place).f_flag & os.ST_RDONLY
                raise OSError(errno.EROFS if read_only else errno.EACCES, "")

    def write(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """Publish ``data``, replacing what was there. Raises ``StorageError``; then nothing is half-written."""
        with self._explained("written", name):
            if self.is_local:
                with self._temporary(name, data, durable) as temporary:
                    os.replace(temporary, self._local(name))
            else:
                self._put(name, data, "overwrite")

    def create(self, name: str, data: bytes) -> bool:
        """Publish ``data`` if the file does not exist yet; says whether it did."""
        with self._explained("written", name):
            if self.is_local:
                with self._temporary(name, data, durable=True) as temporary:
                    return _link_new(temporary, self._local(name))
            path = f"{self.root}/{name}"
            if self._again(self._fs.exists, path):  # not every store honours the condition of the put
                return False
            try:
                self._put(name, data, "create")
            except OSError:
                # Refused, as the file is there: perhaps by a first attempt of ours, whose answer was lost.
                if not self._again(self._fs.exists, path):
                    raise
                return bool(self._again(self._fs.cat_file, path) == data)
            return True

    def read(self, name: str) -> bytes:
        """The whole file. Raises ``FileNotFoundError`` or ``StorageError``."""
        with self._explained("read", name):
            return bytes(self._again(self._fs.cat_file, f"{self.root}/{name}"))

    def open(self, name: str) -> Any:
        """A seekable handle for reading."""
        with self._explained("read", name):
            return self._again(self._fs.open, f"{self.root}/{name}", "rb", cache_type="readahead")

    def exists(self, name: str) -> bool:
        with self._explained("read", name):
            return bool(self._again(self._fs.exists, f"{self.root}/{name}"))

    def names(self, folder: str = "") -> list[str]:
        """Names directly inside a folder, sorted; none if the folder does not exist."""
        path = f"{self.root}/{folder}".rstrip("/")
        with self._explained("read", folder or "."):
            try:
                found = self._again(self._fs.ls, path, detail=True)
            except FileNotFoundError:
                return []
        paths = [entry["name"].rstrip("/") for entry in found]
        return sorted(os.path.basename(entry) for entry in paths if entry != path.strip("/") and entry != path)

    def num_bytes(self, folder: str) -> int:
        """Size of the files directly inside a folder; 0 if it does not exist."""
        with self._explained("read", folder):
            try:
                found = self._again(self._fs.ls, f"{self.root}/{folder}", detail=True)
                return sum(entry["size"] or 0 for entry in found)
            except FileNotFoundError:
                return 0

    def delete(self, name: str) -> None:
        """Remove a file or an empty folder; nothing happens if it is not there."""
        with self._explained("deleted", name), contextlib.suppress(FileNotFoundError):
            if self.is_local and os.path.isdir(self._local(name)):
                with contextlib.suppress(OSError):
                    os.rmdir(self._local(name))
            else:
                self._again(self._fs.rm_file, f"{self.root}/{name}")

    def clean(self, folder: str = "") -> None:
        """Remove the dot-temporaries that killed writers left behind."""
        for name in self.names(folder) if self.is_local else ():
            if name.startswith(".") and name.endswith(".tmp"):
                self.delete(os.path.join(folder, name))

    def _local(self, name: str) -> str:
        return os.path.join(self.root, name)

    @contextlib.contextmanager
    def _temporary(self, name: str, data: bytes, durable: bool) -> Iterator[str]:
        """A finished file beside its destination, gone again unless the caller renames it."""
        target = Path(self._local(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f".{target.name}.{secrets.token_hex(6)}.tmp"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            yield str(temporary)
            if durable:
                _sync_folder(target.parent)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _put(self, name: str, data: bytes, mode: str) -> None:
        """One put: the whole file or none of it, also where it goes in several pieces."""
        self._again(self._fs.pipe_file, f"{self.root}/{name}", data, mode=mode)

    def _again(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Ask a store again a few times: one that is busy for a moment must not end a long job.

        Its client has patience of its own, but not with every answer.
        """
        for i, pause_s in enumerate(self._pauses_s):
            try:
                return call(*args, **kwargs)
            except Exception as error:
                if is_lasting(error) or not (isinstance(error, OSError) or is_client_error(error)):
                    raise
                if i:
                    self._tell(error)
            time.sleep(pause_s)
        return call(*args, **kwargs)

    def _tell(self, error: Exception) -> None:
        now = time.monotonic()
        if now - self._told >= _TELL_S:
            self._told = now
            self.say(f"{self.url} does not answer ({_words(error)}); trying again.")

    def _require_bucket(self) -> None:
        """Raise ``StorageError`` if the folder may not be looked into, or has no bucket to lie in."""
        with self._explained("read"):
            try:
                self._fs.ls(self.root, detail=True)  # the first request: an address that is wrong is told at once
            except FileNotFoundError as error:
                if lacks_bucket(error):
                    self._fail("written", "", error)

    @contextlib.contextmanager
    def _explained(self, verb: str, name: str = "") -> Iterator[None]:
        """Turn what the file system or the store raises into one sentence."""
        try:
            yield
        except FileNotFoundError as error:
            if verb != "written":
                raise
            self._fail(verb, name, error)
        except Exception as error:
            if not isinstance(error, OSError) and not is_client_error(error):
                raise
            self._fail(verb, name, error)

    def _fail(self, verb: str, name: str, error: Exception) -> NoReturn:
        number = getattr(error, "errno", None)
        if self.is_local:
            reason = _REASONS.get(number, "") if number else ""
            reason = reason or _words(error)
            is_mistake = isinstance(error, _MISTAKES) or number in _MISTAKEN_NUMBERS
        else:
            reason, is_mistake = _words(error), is_lasting(error)
        where = self.path(name) if name else self.url
        raise StorageError(f"{where} cannot be {verb}: {reason.rstrip('.')}.", is_mistake=is_mistake) from None


def _words(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or reason_of(error)).rstrip(".")


def _link_new(temporary: str, target: str) -> bool:
    """Give a finished file its name unless the name is taken; says whether it did."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links: claim the name, then fill it
        try:
            os.close(os.open(target, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        os.replace(temporary, target)
    return True


def _sync_folder(folder: Path) -> None:
    """Make a rename durable. Some network file systems refuse to open folders; they order renames themselves."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
