"""The files of the submit guide: valid by the validators of Ray and KubeRay, and their command run on a real head."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from jobs.cli import load_config
from specfold.checkpoint import MODEL_FILES
from specfold.reference_models import path
from tests.cluster.fake_hub import COMMIT, FakeHub
from tests.cluster.head import Head
from tests.cluster.object_store import BUCKET, ObjectStore
from tests.cluster.test_submit import submit

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
KUBERAY = {"kuberay-rayjob.yaml": "rayjobs", "kuberay-raycluster-spot.yaml": "rayclusters"}
CRDS = "SPECFOLD_KUBERAY_CRDS"
"""Folder of KubeRay's ``ray.io_*.yaml``, of which none ship with this project."""


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / name).read_text())


def rayjob_command() -> list[str]:
    return shlex.split(load("kuberay-rayjob.yaml")["spec"]["entrypoint"])


def commands() -> list[list[str]]:
    """Arguments of every call of the main job in the guide and in its files."""
    texts = [file.read_text() for file in (*EXAMPLES.iterdir(), ROOT / "docs" / "submit.md")]
    lines = [re.sub(r"\\\n#?", " ", text) for text in texts]
    found = [match for text in lines for match in re.findall(r"jobs/generate\.py (--[^\n`]*)", text)]
    return [rayjob_command()[2:], *(shlex.split(arguments.replace("…", "x")) for arguments in found)]


@pytest.mark.parametrize("arguments", commands())
def test_every_command_is_one_that_the_job_takes(arguments: list[str], tmp_path: Path) -> None:
    config = load_config(arguments, {"RAY_ADDRESS": "head:6379"})
    assert config is not None
    assert config.device == "cuda", "without it a cluster that has no GPU node yet decodes on CPUs"
    assert config.workers, "without it no node is asked for"
    assert config.output.startswith("s3://")


def test_ray_up_takes_its_file() -> None:
    config = load("ray-up-aws.yaml")
    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    assert prepared["available_node_types"]["h100"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    with pytest.raises(jsonschema.ValidationError, match="max_wokers"):
        validate_config(prepare_config(config | {"max_wokers": 3}))


@pytest.mark.parametrize("name", KUBERAY)
def test_kuberay_takes_its_files(name: str) -> None:
    if CRDS not in os.environ:
        pytest.skip(f"{CRDS} names no folder of KubeRay's schemas")
    definition = yaml.safe_load((Path(os.environ[CRDS]) / f"ray.io_{KUBERAY[name]}.yaml").read_text())
    [version] = [version for version in definition["spec"]["versions"] if version["name"] == "v1"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    jsonschema.Draft7Validator(schema).validate(load(name))
    with pytest.raises(jsonschema.ValidationError, match="backofLimit"):
        jsonschema.Draft7Validator(schema).validate(load(name) | {"backofLimit": 3})


def strict(schema: Any) -> Any:
    """Kubernetes' dialect, in which a field that is not named is a mistake, as JSON Schema."""
    if isinstance(schema, list):
        return [strict(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    values = {key: strict(value) for key, value in schema.items()}
    if "properties" in values and not values.get("x-kubernetes-preserve-unknown-fields"):
        values.setdefault("additionalProperties", False)
    if values.get("x-kubernetes-int-or-string"):
        values.pop("type", None)
    return values


@pytest.mark.parametrize("name", KUBERAY)
def test_clusters_on_kubernetes_fit_together(name: str) -> None:
    """What a schema does not say: shares of a node, credentials on every node, versions, as many workers as GPUs."""
    spec = load(name)["spec"]
    cluster = spec.get("rayClusterSpec", spec)
    pinned = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    assert cluster["rayVersion"] == pinned[1]
    head = cluster["headGroupSpec"]["template"]["spec"]
    groups = cluster["workerGroupSpecs"]
    pods = [head, *(group["template"]["spec"] for group in groups)]
    for pod in pods:
        [container] = pod["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "specfold-credentials"}}]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {port["containerPort"] for port in container["ports"]} >= {8080}
        mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert mounts == {volume["name"] for volume in pod.get("volumes", [])}
    assert "nvidia.com/gpu" not in head["containers"][0]["resources"]["limits"]
    gpus = sum(
        group["maxReplicas"] * int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
        for group in groups
    )
    if "entrypoint" in spec:
        config = load_config(rayjob_command()[2:], {})
        assert config is not None
        assert config.workers == gpus
    assert all(group["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-accelerator"] for group in groups)


def test_the_command_of_the_examples_runs_on_a_head_with_a_model_from_the_hub(
    head: Head, object_store: ObjectStore, tmp_path: Path
) -> None:
    """As it stands there but for the place of the code, the bucket, and what this machine has no GPU for. The node's
    two workers, the driver and its checks share one download."""
    prompts = (ROOT / "jobs" / "prompts.jsonl").read_bytes().splitlines(keepends=True)[:8]
    for i in range(2):
        object_store.fs.pipe_file(f"{BUCKET}/guide/prompts/{i}.jsonl", b"".join(prompts[4 * i : 4 * i + 4]))
    hub = FakeHub("nvidia/Nemotron-Labs-Diffusion-8B", Path(path("nemotron_labs_diffusion")))
    changes = {
        "/opt/specfold/jobs/generate.py": "jobs/generate.py", "s3://my-bucket": f"s3://{BUCKET}/guide",
        "--device cuda": "--device cpu", "--workers 16": "--workers 2", "--max-new-tokens 512": "--max-new-tokens 16",
    }  # fmt: skip
    command = " ".join(rayjob_command())
    for old, new in changes.items():
        assert old in command
        command = command.replace(old, new)
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    with hub.serving():
        options = ("--runtime-env-json", json.dumps({"env_vars": environment}))
        run = submit(head, *shlex.split(command)[2:], "--shard-rows", "2", options=options)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Summary" in run.stdout
    wanted = {file.name for file in hub.folder.iterdir()}
    assert {name for pattern in MODEL_FILES for name in wanted if Path(name).match(pattern)} == set(hub.fetched)
    assert set(hub.fetched.values()) == {1}, hub.fetched
    output = f"{BUCKET}/guide/runs/first"
    parts = [object_store.fs.cat_file(name) for name in sorted(object_store.fs.find(f"{output}/data"))]
    table = pa.concat_tables([pq.read_table(pa.BufferReader(part)) for part in parts])
    assert table["row_id"].to_pylist() == list(range(8))
    assert set(table["num_output_tokens"].to_pylist()) <= set(range(1, 17))
    assert json.loads(object_store.fs.cat_file(f"{output}/summary.json"))["state"] == "done"
    run_file = json.loads(object_store.fs.cat_file(f"{output}/run.json"))
    assert run_file["model"]["commit"] == COMMIT
    assert len(run_file["inputs"]) == 2
