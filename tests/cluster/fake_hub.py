"""The part of the Hugging Face hub that downloads a model, served from a folder, with a count of what was fetched."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"


class FakeHub:
    """One repository, ``repo``, with one commit; its files are those of ``folder``."""

    def __init__(self, repo: str, folder: Path) -> None:
        self.repo, self.folder = repo, folder
        self.fetched: Counter[str] = Counter()
        """How often a file's content was sent."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self._serve(with_body=False)

            def do_GET(self) -> None:
                self._serve(with_body=True)

            def _serve(self, *, with_body: bool) -> None:
                status, headers, body = hub.answer(unquote(urlsplit(self.path).path), with_body=with_body)
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(body))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator[FakeHub]:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        yield self
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, *, with_body: bool) -> tuple[int, dict[str, str], bytes]:
        names = sorted(file.name for file in self.folder.iterdir())
        if path in (f"/api/models/{self.repo}", f"/api/models/{self.repo}/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in names]
            return _json({"id": self.repo, "sha": COMMIT, "siblings": siblings, "private": False})
        if path == f"/api/models/{self.repo}/tree/{COMMIT}":
            sizes = {name: (self.folder / name).stat().st_size for name in names}
            return _json([{"type": "file", "path": name, "size": sizes[name], "oid": _etag(name)} for name in names])
        name = path.removeprefix(f"/{self.repo}/resolve/{COMMIT}/")
        if name not in names:
            return 404, {"X-Error-Code": "EntryNotFound" if name != path else "RepoNotFound"}, b""
        if with_body:
            self.fetched[name] += 1
        return 200, {"ETag": f'"{_etag(name)}"', "X-Repo-Commit": COMMIT}, (self.folder / name).read_bytes()


def _etag(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


def _json(value: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()
