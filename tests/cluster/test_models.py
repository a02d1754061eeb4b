"""Models: a name is pinned to content once, and every node gets a folder of exactly that."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from cluster import models
from cluster.errors import UserError
from cluster.models import ModelRef, content_hash, local_folder, resolve_model
from specfold.reference_models import NAMES, path
from tests.cluster.make_inputs import make_model


def mistake(model: str, revision: str | None = None) -> str:
    with pytest.raises(UserError) as error:
        resolve_model(model, revision)
    assert error.value.exit_code == 2
    return str(error.value)


def stub_hub(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[tuple[str, str | None]]:
    """A hub that gives a commit or raises; returns the questions it was asked."""
    asked: list[tuple[str, str | None]] = []

    class Hub:
        def model_info(self, repo: str, revision: str | None = None) -> Any:
            asked.append((repo, revision))
            if isinstance(answer, Exception):
                raise answer
            return SimpleNamespace(sha=answer)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    return asked


def test_a_folder_is_known_by_its_content(tmp_path: Path) -> None:
    first, second = make_model(tmp_path / "a"), make_model(tmp_path / "b")
    (first / "README.md").write_text("not part of the model")
    (first / "modeling.py").write_text("raise SystemExit")
    (first / "pytorch_model.bin").write_bytes(b"pickle")
    ref = resolve_model(str(first))
    assert (ref.path, ref.repo, ref.commit) == (str(first), None, None)
    assert ref.content_hash == resolve_model(str(second)).content_hash
    assert local_folder(ref) == str(first)


def test_any_change_of_content_changes_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_HASH_BLOCK", 1 << 10)
    folder = make_model(tmp_path / "a")
    weights = bytearray(5000)
    (folder / "model.safetensors").write_bytes(weights)
    hashes = {content_hash(folder)}
    for position in (0, 1023, 1024, 4999):
        changed = weights.copy()
        changed[position] = 1
        (folder / "model.safetensors").write_bytes(changed)
        hashes.add(content_hash(folder))
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    hashes.add(content_hash(folder))
    (folder / "chat_template.jinja").write_text("x")
    hashes.add(content_hash(folder))
    assert len(hashes) == 7


@pytest.mark.parametrize("name", NAMES)
def test_bundled_models_go_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ref = resolve_model(name)
    assert local_folder(ref) == ref.path == str(path(name))
    elsewhere = replace(ref, path="/another/installation")
    assert local_folder(elsewhere) == str(path(name))
    with pytest.raises(UserError, match="does not exist on this node"):
        local_folder(replace(elsewhere, content_hash="sha256:another version"))
    (tmp_path / name).mkdir()
    assert resolve_model(name).path == str(tmp_path / name)


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    assert mistake("/nowhere/model") == "The model folder /nowhere/model does not exist."
    assert mistake("./model") == "The model folder ./model does not exist."
    assert mistake("model") == "The model folder model does not exist."
    folder = str(make_model(tmp_path / "a"))
    assert mistake(folder, "main") == f"--revision is for hub models; {folder} is a folder."
    with pytest.raises(UserError, match=r"does not exist on this node; put it where all nodes see it\."):
        local_folder(ModelRef("x", path="/nowhere/model", content_hash="sha256:0"))


def test_a_hub_id_is_pinned_to_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stub_hub(monkeypatch, "c0ffee")
    assert resolve_model("owner/model", "v1") == ModelRef("owner/model", repo="owner/model", commit="c0ffee")
    assert asked == [("owner/model", "v1")]


def refusal(kind: type[Exception], status: int) -> Exception:
    return kind("no", response=SimpleNamespace(headers={}, request=None, status_code=status))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (refusal(RepositoryNotFoundError, 404), "is neither a folder here nor a model on the hub that you may read."),
        (refusal(RevisionNotFoundError, 404), "has no revision 'v1'."),
        (refusal(GatedRepoError, 403), "is gated: accept its terms on the hub and log in with `hf auth login`."),
        (OSError("no route to host"), "cannot be looked up on the hub: no route to host."),
    ],
)
def test_what_the_hub_refuses_is_a_sentence(monkeypatch: pytest.MonkeyPatch, answer: Any, sentence: str) -> None:
    stub_hub(monkeypatch, answer)
    assert mistake("owner/model", "v1") == f"The model owner/model {sentence}"


def test_without_network_the_cached_commit_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_hub(monkeypatch, OSError("offline"))
    cached = tmp_path / "models--owner--model" / "snapshots" / "abc123" / "config.json"
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **kwargs: str(cached))
    assert resolve_model("owner/model").commit == "abc123"


def test_a_node_downloads_once_and_only_safe_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    inside = threading.Semaphore(1)

    def download(repo: str, **settings: Any) -> str:
        assert inside.acquire(blocking=False), "two downloads at once"
        calls.append({"repo": repo, **settings})
        inside.release()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    ref = ModelRef("owner/model", repo="owner/model", commit="c0ffee")
    threads = [threading.Thread(target=local_folder, args=(ref,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 4  # all but the first find the files in the cache
    assert calls[0]["repo"] == "owner/model"
    assert calls[0]["revision"] == "c0ffee"
    allowed = calls[0]["allow_patterns"]
    assert "*.safetensors" in allowed
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in allowed)


def test_a_failed_download_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: Any, **settings: Any) -> str:
        raise OSError("No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"The model owner/model cannot be downloaded: No space left on device\."):
        local_folder(ModelRef("owner/model", repo="owner/model", commit="c0ffee"))
