"""A store that does not let the job in, or is not there: one sentence and exit code 2 before any GPU time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs

from cluster.messages import Failure
from jobs import generate
from tests.cluster.jobs import JobFolder
from tests.cluster.object_store import BUCKET, ObjectStore, environment
from tests.cluster.test_worker import start


@pytest.fixture(scope="module")
def keys_of_reader(object_store: ObjectStore) -> tuple[str, str]:
    """Credentials that allow to read and to list, and no more."""
    iam = object_store.client("iam")
    iam.create_user(UserName="reader")
    allowed = [{"Effect": "Allow", "Action": ["s3:GetObject", "s3:ListBucket"], "Resource": "*"}]
    policy = json.dumps({"Version": "2012-10-17", "Statement": allowed})
    iam.put_user_policy(UserName="reader", PolicyName="read", PolicyDocument=policy)
    key = iam.create_access_key(UserName="reader")["AccessKey"]
    return key["AccessKeyId"], key["SecretAccessKey"]


@pytest.fixture
def reader(s3: ObjectStore, keys_of_reader: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store that asks for credentials, and an environment with those."""
    for name, value in environment(s3.endpoint, keys_of_reader).items():
        monkeypatch.setenv(name, value)
    with s3.guarded():
        yield


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which the main job ends before Ray starts."""
    s3fs.S3FileSystem.clear_instance_cache()
    assert generate.main(list(arguments)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    [line] = shown.err.splitlines()
    return line


@pytest.mark.usefixtures("reader", "no_ray")
@pytest.mark.parametrize("flag", ["--prompts", "--output"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "The request signature we calculated does not match"),
        ({"AWS_ACCESS_KEY_ID": "unknown"}, "The AWS Access Key Id you provided does not exist"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "Unable to locate credentials"),
        ({"AWS_PROFILE": "nobody"}, "The config profile (nobody) could not be found"),
    ],
)
def test_credentials_that_are_wrong_are_a_sentence(
    changes: dict[str, str | None], reason: str, flag: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in changes.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    place = f"s3://{BUCKET}/guarded/prompts.jsonl" if flag == "--prompts" else f"s3://{BUCKET}/new"
    others = ["--output", str(tmp_path / "out")] if flag == "--prompts" else []
    line = refusal(capsys, flag, place, *others)
    assert line.startswith(f"error: {place}")
    assert f" cannot be read: {reason}" in line
    assert "(credentials come from the usual environment, on every node" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("s3", "no_ray")
def test_a_bucket_that_is_not_there_is_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = refusal(capsys, "--output", "s3://nowhere/out")
    assert line == "error: s3://nowhere/out cannot be written: The specified bucket does not exist."
    line = refusal(capsys, "--prompts", "s3://nowhere/a.jsonl", "--output", str(tmp_path / "out"))
    assert line == "error: --prompts s3://nowhere/a.jsonl does not exist."


@pytest.mark.usefixtures("reader", "local_ray")
def test_a_place_that_may_only_be_read_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    s3fs.S3FileSystem.clear_instance_cache()
    assert generate.main(["--output", f"s3://{BUCKET}/mine", "--limit", "4", "--workers", "1"]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert line.startswith(f"error: s3://{BUCKET}/mine/.lease cannot be written: ")


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**_: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("cluster.driver.commands.ray_session", start)


@pytest.mark.usefixtures("reader")
def test_a_node_without_credentials_is_named(folder: JobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    failure = start(folder, folder.write_prompts(3), output=f"s3://{BUCKET}/elsewhere")
    assert isinstance(failure, Failure)
    assert (failure.fatal, failure.exit_code) == (True, 2)
    assert failure.message.startswith("worker-0 on ")
    assert "elsewhere/.lease cannot be read: Unable to locate credentials" in failure.message
