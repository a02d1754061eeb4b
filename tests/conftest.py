"""Settings shared by all tests, made before anything else is imported."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings

# Triton decides at decoration time whether kernels run in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

# The same examples every time, however slow the machine is.
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("SPECFOLD_SHARED", ROOT.parent / "shared"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-minutes", type=float, default=0.5, help="how long random faults hit a job")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Evaluation data and golden vectors that do not ship with the project."""
    if not SHARED.is_dir():
        pytest.skip(f"no shared data at {SHARED}")
    return SHARED
