"""Files appear whole or not at all, and what goes wrong is one sentence."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.output.storage import StorageError, Store

ROOT = Path(__file__).resolve().parents[2]


def test_files_are_written_read_listed_and_deleted(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "new"))
    assert store.names() == []
    store.write("data/a", b"one")
    store.write("data/a", b"two")
    assert store.read("data/a") == b"two"
    assert (store.names(), store.names("data"), store.exists("data/a")) == (["data"], ["a"], True)
    store.delete("data/a")
    store.delete("data/a")
    store.delete("data")
    assert store.names() == []
    with pytest.raises(FileNotFoundError):
        store.read("data/a")


def test_creating_what_exists_changes_nothing(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    assert store.create("run.json", b"mine")
    assert not store.create("run.json", b"yours")
    assert store.read("run.json") == b"mine"
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_memory_file_system_behaves_alike() -> None:
    store = Store("memory://bucket/out")
    assert store.create("a", b"1")
    assert not store.create("a", b"2")
    store.write("data/b", b"3")
    assert (store.read("a"), store.names(), store.names("data")) == (b"1", ["a", "data"], ["b"])
    assert store.path("data/b") == "memory:///bucket/out/data/b"


@pytest.mark.usefixtures("s3")
def test_an_object_store_behaves_alike() -> None:
    store = Store("s3://bucket/alike/")
    assert (store.names(), store.exists("a")) == ([], False)
    assert store.create("a", b"1")
    assert not store.create("a", b"2")
    store.write("data/b", b"3")
    store.write("data/b", b"4")
    assert (store.read("a"), store.read("data/b")) == (b"1", b"4")
    assert (store.names(), store.names("data"), store.names("none")) == (["a", "data"], ["b"], [])
    with store.open("data/b") as file:
        assert file.read() == b"4"
    store.delete("a")
    store.delete("a")
    with pytest.raises(FileNotFoundError):
        store.read("a")
    assert store.path("data/b") == "s3://bucket/alike/data/b"
    with pytest.raises(StorageError, match="s3://nowhere/out/a cannot be written: "):
        Store("s3://nowhere/out").write("a", b"1")


@pytest.mark.parametrize(("folder", "reason"), [("file/out", "a part of the path is not a folder"), ("file", "")])
def test_a_file_where_a_folder_should_be(tmp_path: Path, folder: str, reason: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=f"out/x cannot be written: {reason}|file/x cannot be written: ") as caught:
        Store(str(tmp_path / folder)).write("x", b"data")
    assert caught.value.is_mistake
    with pytest.raises(StorageError, match=r"cannot be written: a (part of the path|file is in the way)"):
        Store(str(tmp_path / folder)).require_writable()


def test_a_folder_that_is_not_there_yet_is_fit_for_output(tmp_path: Path) -> None:
    Store(str(tmp_path / "new" / "out")).require_writable()
    assert os.listdir(tmp_path) == []


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    """Under a limit on file size, as on a full disk, the old file stays and no part of the new one does."""
    store = Store(str(tmp_path))
    store.write("part", b"old")
    code = (
        "import resource, sys; from cluster.output.storage import Store;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"
        "Store(sys.argv[1]).write('part', b'x' * 5000)"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert "part cannot be written: the limit on file size is reached." in run.stderr
    assert os.listdir(tmp_path) == ["part"]
    assert store.read("part") == b"old"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000


def test_leftovers_of_killed_writers_are_cleaned(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write("data/a", b"1")
    (tmp_path / "data" / ".a.123.tmp").write_bytes(b"half")
    store.clean("data")
    assert os.listdir(tmp_path / "data") == ["a"]
