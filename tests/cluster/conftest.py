"""One local Ray for all tests that need one; a first start takes several seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.head import Head, running_head
from tests.cluster.jobs import JobFolder
from tests.cluster.processes import RAY_SETTINGS

if TYPE_CHECKING:
    from tests.cluster.object_store import ObjectStore


@pytest.fixture(scope="session")
def ray_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home folder of the tests' own: Ray would write a token into the user's."""
    home = tmp_path_factory.mktemp("home")
    before = {name: os.environ.get(name) for name in ("HOME", *RAY_SETTINGS)}
    os.environ |= {"HOME": str(home), **RAY_SETTINGS}
    yield home
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(scope="session")
def local_ray(ray_home: Path) -> Iterator[str]:
    """A running Ray of four CPUs, whatever the machine has; its address."""
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, namespace="specfold", log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    """A place for a job: a model folder without weights, inputs, an output."""
    return JobFolder(tmp_path)


@pytest.fixture(scope="session")
def object_store() -> Iterator[ObjectStore]:
    """An S3 server with one bucket."""
    from tests.cluster.object_store import ObjectStore  # moto takes seconds to import

    store = ObjectStore()
    yield store
    store.stop()


@pytest.fixture(scope="session")
def head(object_store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A Ray head that jobs are submitted to, whose environment names the object store."""
    with running_head(tmp_path_factory.mktemp("head"), **object_store.environment) as head:
        yield head


@pytest.fixture
def s3(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """The same store, and this process as a client of it by the usual environment."""
    import s3fs

    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield object_store
    s3fs.S3FileSystem.clear_instance_cache()
