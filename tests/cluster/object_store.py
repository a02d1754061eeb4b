"""An S3 server on this machine that can be told to misbehave: to fail, hang, drop connections or hold a write."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import boto3
import s3fs
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "bucket"
REGION = "us-east-1"
KEYS = ("testing", "testing")
FAULTS = ("500", "lost", "503", "cut", "hang", "reset")
READ_TIMEOUT_S = 0.7
HANG_S = 1.2
_CODES = {"500": ("500 Internal Server Error", "InternalError"), "503": ("503 Slow Down", "SlowDown")}


class ObjectStore:
    """The server, and how to reach it. Its clients give up on an answer after ``READ_TIMEOUT_S``."""

    def __init__(self) -> None:
        self.app = _Faults(DomainDispatcherApplication(create_backend_app))
        self._server = make_server("127.0.0.1", 0, self.app, threaded=True, request_handler=_Quiet)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.client("s3").create_bucket(Bucket=BUCKET)

    @property
    def environment(self) -> dict[str, str]:
        """What names the server and the keys to any client."""
        return environment(self.endpoint, KEYS) | {
            "FSSPEC_S3": json.dumps({"config_kwargs": {"read_timeout": READ_TIMEOUT_S}})
        }

    @property
    def fs(self) -> Any:
        """A client of the test's own, whatever its environment says; what it asks for is never disturbed."""
        key, secret = KEYS
        kwargs = {"endpoint_url": self.endpoint, "region_name": REGION}
        return s3fs.S3FileSystem(
            key=key, secret=secret, client_kwargs=kwargs, use_listings_cache=False,
            config_kwargs={"user_agent": _Faults.spared},
        )  # fmt: skip

    def client(self, service: str) -> Any:
        key, secret = KEYS
        return boto3.client(
            service, endpoint_url=self.endpoint, region_name=REGION, aws_access_key_id=key, aws_secret_access_key=secret
        )

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Hold every request against its signature and the rights of its user."""
        self._set_guard("0")
        try:
            yield
        finally:
            self._set_guard("inf")

    def _set_guard(self, free_requests: str) -> None:
        request = urllib.request.Request(f"{self.endpoint}/moto-api/reset-auth", free_requests.encode())
        request.add_header("Content-Type", "text/plain")
        urllib.request.urlopen(request).close()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def environment(endpoint: str, keys: tuple[str, str]) -> dict[str, str]:
    key, secret = keys
    return {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": REGION,
    }  # fmt: skip


class _Quiet(WSGIRequestHandler):
    def log_request(self, *args: object) -> None:
        pass


class _Faults:
    """The server's application behind a network and a front end that fail."""

    spared = "undisturbed"

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app, self._lock = app, threading.Lock()
        self._every, self._count, self._kinds = 0, 0, iter(FAULTS)
        self._held: re.Pattern[str] | None = None
        self.holding, self.let_go = threading.Event(), threading.Event()
        """Set when a write is held after its first bytes, and by the test to read what follows."""
        self.incomplete = 0
        """Writes that did not come to their end."""
        self.made: list[str] = []
        """The faults so far."""

    @contextlib.contextmanager
    def misbehaving(self, every: int, kinds: Iterable[str] = FAULTS) -> Iterator[None]:
        """Every so many requests one of the faults, in turn."""
        self._every, self._kinds = every, itertools.cycle(kinds)
        try:
            yield
        finally:
            self._every = 0

    @contextlib.contextmanager
    def holding_writes(self, path: str) -> Iterator[None]:
        """Only the first bytes of writes to a matching path are read until the test lets go."""
        self._held = re.compile(path)
        try:
            yield
        finally:
            self._held = None
            self.let_go.set()

    def __call__(self, request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        fault = None if self.spared in request.get("HTTP_USER_AGENT", "") else self._next()
        body = self._body(request)
        if fault in _CODES:
            status, code = _CODES[fault]
            text = f"<Error><Code>{code}</Code><Message>{code} by request</Message></Error>".encode()
            start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
            return [text]
        if fault == "reset":
            _drop(request)
        if fault == "hang":
            time.sleep(HANG_S)
            _drop(request)
        request |= {"wsgi.input": body}
        answer = self._answer(request, start if fault is None else lambda *args: None)
        if fault == "lost":
            _drop(request)
        if fault == "cut":
            start("200 OK", [("Content-Length", str(len(answer) + 1000))])
            return _cut(request, answer)
        return [answer]

    def _next(self) -> str | None:
        with self._lock:
            self._count += 1
            if not self._every or self._count % self._every:
                return None
            self.made.append(next(self._kinds))
            return self.made[-1]

    def _answer(self, request: dict[str, Any], start: Callable[..., Any]) -> bytes:
        with self._lock:  # moto's own tables are not made for threads
            return b"".join(self._app(request, start))

    def _body(self, request: dict[str, Any]) -> io.BytesIO:
        """The whole body. As with S3, nothing is done with one that does not come to its end."""
        length = int(request.get("CONTENT_LENGTH") or 0)
        stream = request["wsgi.input"]
        begin = b""
        if request["REQUEST_METHOD"] == "PUT" and self._held and self._held.search(request["PATH_INFO"]):
            begin = stream.read(min(length, 1 << 16))
            self.holding.set()
            self.let_go.wait(30)
        body = begin
        with contextlib.suppress(OSError):
            body += stream.read(length - len(begin))
        if len(body) < length:
            self.incomplete += 1
            _drop(request)
        return io.BytesIO(body)


def _drop(request: dict[str, Any]) -> NoReturn:
    """End the connection without an answer."""
    with contextlib.suppress(OSError):
        request["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError


def _cut(request: dict[str, Any], answer: bytes) -> Iterator[bytes]:
    """Half of an answer, then the end of the connection."""
    yield answer[: len(answer) // 2]
    _drop(request)
