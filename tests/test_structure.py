"""The house rules that a machine can check: one-way imports, no shadowed libraries."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ["kernels", "specfold", "cluster", "jobs"]
FOREIGN = {"kernels": {"ray", "datasets", "pyarrow", "transformers"}, "specfold": {"ray", "datasets", "pyarrow"}}


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_dependencies_point_one_way() -> None:
    for level, layer in enumerate(LAYERS):
        forbidden = set(LAYERS[level + 1 :]) | FOREIGN.get(layer, set())
        files = list((ROOT / layer).rglob("*.py"))
        assert files
        for path in files:
            assert not imported(path) & forbidden, path


def test_only_jobs_reads_the_environment() -> None:
    for layer in LAYERS[:3]:
        for path in (ROOT / layer).rglob("*.py"):
            text = path.read_text()
            assert "os.environ" not in text, path
            assert "getenv" not in text, path


def test_transformers_loads_its_models_beside_a_package_named_kernels() -> None:
    code = "from transformers import Qwen2ForCausalLM; import kernels"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_only_an_engine_brings_torch() -> None:
    """Torch takes seconds and hundreds of megabytes in every process: commands, drivers and helpers do without."""
    code = """
import sys
import jobs.generate, jobs.cli, cluster.driver, cluster.worker.worker
from cluster.config import JobConfig
from cluster.driver.check import check_rows
from cluster.driver.footprint import measure_model
from cluster.input.schema import carried_schema
from cluster.input.source import open_input
from cluster.models import resolve_model
config = JobConfig(prompts="jobs/prompts.jsonl", dtype="float32")
source, model = open_input(config), resolve_model(config.model)
found = check_rows(source, config, model, carried_schema(source, config), 20)
assert found.rows == 20 and not found.num_failed
assert measure_model(config, model).weights > 0
assert "torch" not in sys.modules
from specfold import Engine
assert "torch" in sys.modules and Engine.from_pretrained
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
