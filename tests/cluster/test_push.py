"""Pushing a run to the hub, against a server that stands in for it on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import HfApi

from cluster.config import JobConfig
from cluster.driver import run_job
from cluster.errors import UserError
from cluster.output.push import push
from cluster.output.storage import Store

REPO = "team/answers"


class StandIn(ThreadingHTTPServer):
    """One dataset repository: Parquet goes through large-file storage, the rest into commits."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.created: list[dict[str, Any]] = []
        self.objects: dict[str, bytes] = {}
        self.files: dict[str, bytes] = {}
        self.commits: list[list[str]] = []
        self.tokens: set[str | None] = set()
        self.refuses: str | None = None
        """Part of a path that is answered with an error."""


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        if not self._refused():
            files = [{"type": "file", "path": path, "size": 1, "oid": "0"} for path in self.server.files]
            self._answer(files if "/tree/" in self.path else {"id": REPO, "sha": "0" * 40})

    def do_PUT(self) -> None:
        data = self._body()
        self.server.objects[hashlib.sha256(data).hexdigest()] = data
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        if self._refused():
            return
        self.server.tokens.add(self.headers.get("authorization"))
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._answer({"url": f"{self.server.url}/datasets/{REPO}"})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".parquet") else "regular" for name in names}
            self._answer({"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]})
        elif self.path.endswith("/objects/batch"):
            objects = json.loads(body)["objects"]
            for entry in objects:
                if entry["oid"] not in self.server.objects:
                    entry["actions"] = {"upload": {"href": f"{self.server.url}/object"}}
            self._answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            self._commit([json.loads(line) for line in body.splitlines()])
            self._answer({"commitUrl": f"{self.server.url}/datasets/{REPO}/commit/0", "commitOid": "0" * 40})
        else:
            self._answer({"errors": [], "warnings": []})

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.objects[value["oid"]]
            elif line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del self.server.files[value["path"]]
        self.server.commits.append([line["value"].get("path", line["key"]) for line in lines])

    def _refused(self) -> bool:
        if self.server.refuses is None or self.server.refuses not in self.path:
            return False
        self._answer({"error": "This token may not write here."}, 403)
        return True

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _answer(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    # The tests' own process is kept off the network; this server is on it.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    server = StandIn()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(str(tmp_path / "out"))
    for i in range(5):
        store.write(f"data/train-{i:07d}.parquet", b"part %d" % i)
    for name in ("README.md", "run.json", "report.html", "stats/shard-0000000.json", "data/.x.tmp"):
        store.write(name, name.encode())
    return store


def api(hub: StandIn) -> HfApi:
    return HfApi(endpoint=hub.url, token="hf_secret")


def test_parts_and_card_arrive_and_nothing_else(hub: StandIn, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.output.push._COMMIT_PARTS", 2)
    hub.files = {
        "data/train-0000009.parquet": b"of an earlier push", "data/train-00000-of-00001.parquet": b"not ours",
        "notes.txt": b"not ours",
    }  # fmt: skip
    assert push(store, REPO, public=False, api=api(hub)) == f"{hub.url}/datasets/{REPO}"
    assert hub.created == [{"name": "answers", "organization": "team", "visibility": "private", "type": "dataset"}]
    assert hub.tokens == {"Bearer hf_secret"}
    assert hub.files == {
        **{f"data/train-{i:07d}.parquet": b"part %d" % i for i in range(5)},
        "README.md": b"README.md", "data/train-00000-of-00001.parquet": b"not ours", "notes.txt": b"not ours",
    }  # fmt: skip
    assert [len(paths) - 1 for paths in hub.commits] == [2, 2, 1, 2]  # the last: one part deleted, and the card


def test_a_remote_output_is_pushed_too(hub: StandIn, store: Store) -> None:
    remote = Store("memory://push-test")
    for name in ("README.md", *(f"data/{part}" for part in store.names("data") if part.startswith("train"))):
        remote.write(name, store.read(name))
    push(remote, REPO, public=True, api=api(hub))
    assert hub.created[0]["visibility"] == "public"
    assert sorted(hub.files) == ["README.md", *(f"data/train-{i:07d}.parquet" for i in range(5))]


@pytest.mark.parametrize("step", ["/api/repos/create", "/preupload/", "/commit/", "/tree/"])
def test_a_failure_is_one_sentence_and_keeps_everything(hub: StandIn, store: Store, step: str) -> None:
    before = {name: store.read(f"data/{name}") for name in store.names("data")}
    hub.refuses = step
    with pytest.raises(
        UserError, match=rf"^The results are whole in .*, but could not be pushed to {REPO}: "
    ) as caught:
        push(store, REPO, public=False, api=api(hub))
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    assert "hf_secret" not in str(caught.value)
    assert {name: store.read(f"data/{name}") for name in store.names("data")} == before

    hub.refuses = None
    push(store, REPO, public=False, api=api(hub))
    assert len(hub.files) == 6


def test_without_a_token_the_job_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match=r"^--push-to-hub needs a token: ") as caught:
        run_job(JobConfig(prompts="unused", output=str(tmp_path / "out"), push_to_hub=REPO))
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("repo", ["", "a/b/c", "/a", "a b", "../x", "a/"])
def test_what_is_no_repository_is_refused(repo: str) -> None:
    with pytest.raises(UserError, match="--push-to-hub takes a dataset's name such as owner/name"):
        JobConfig(push_to_hub=repo)


def test_public_without_a_push_is_refused() -> None:
    with pytest.raises(UserError, match="--hub-public has no meaning without --push-to-hub"):
        JobConfig(hub_public=True)
