"""What the tools on one engine share with the main job's command line: model, prompts and decoding; no cluster."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import App, CycloptsError

from cluster.config import HIDDEN, Int, JobConfig
from cluster.errors import UserError
from cluster.models import ModelRef, local_folder, resolve_model
from cluster.output.identity import resolve
from jobs.cli import complete, one_line
from specfold import ConfigError, Engine, ModelError


@dataclass(frozen=True, kw_only=True)
class ToolConfig(JobConfig):
    """The main job's settings without what only a job on a cluster has."""

    output: Annotated[str, HIDDEN] = ""
    carry: Annotated[str, HIDDEN] = "none"
    input_prefix: Annotated[str, HIDDEN] = ""
    overwrite: Annotated[bool, HIDDEN] = False
    retry_failed: Annotated[bool, HIDDEN] = False
    check: Annotated[bool, HIDDEN] = False
    push_to_hub: Annotated[str | None, HIDDEN] = None
    hub_public: Annotated[bool, HIDDEN] = False
    quarantine: Annotated[bool, HIDDEN] = False
    num_samples: Annotated[Int, HIDDEN] = 1
    workers: Annotated[Int | None, HIDDEN] = None
    gpus_per_worker: Annotated[float | None, HIDDEN] = None
    shard_rows: Annotated[Int | None, HIDDEN] = None
    audit: Annotated[Int, HIDDEN] = 0
    max_failed: Annotated[float, HIDDEN] = 0.05
    stall_timeout: Annotated[float, HIDDEN] = 300.0


def run_tool(command: Callable[..., int], name: str, argv: Sequence[str]) -> int:
    """Parse the flags of ``command`` (its keyword arguments and a ``ToolConfig``) and run it; returns the exit code.

    A user's mistake is one line on stderr and exit code 2.
    """
    app = App(name=f"python jobs/{name}.py", help_format="markdown", version_flags=(), default_command=command)
    app["--help"].show = False
    try:
        code = app(list(argv), exit_on_error=False, print_error=False, result_action="return_value")
        return int(code or 0)
    except CycloptsError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
    except (UserError, ConfigError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 2)
    return 2


def settle(config: ToolConfig, environment: Mapping[str, str] = os.environ) -> ToolConfig:
    """The settings with files read and ``auto`` choices made for this machine."""
    fixed_drafts(config)
    config = complete(config, environment)
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise UserError("--device cuda was given, but torch finds no GPU on this machine.")
    device: Any = ("cuda" if has_gpu else "cpu") if config.device == "auto" else config.device
    if device == "cpu" and config.backend == "triton":
        raise UserError("--backend triton needs a GPU; leave --backend out or give torch.")
    return resolve(config, device, config.shard_rows or 1)


def fixed_drafts(config: JobConfig) -> int:
    """The number of drafts. Raises ``UserError`` where a job would choose it."""
    if isinstance(config.drafts, str):
        raise UserError("--drafts auto is for jobs, which choose by their own rows and batch size; give a number here.")
    return config.drafts


def load_engine(config: JobConfig, backend: str | None = None) -> tuple[Engine, ModelRef, str]:
    """The engine of settled settings, what model it has, and the model's folder."""
    model = resolve_model(config.model, config.revision)
    folder = local_folder(model)
    engine = Engine.from_pretrained(
        folder, device=config.device, dtype=config.dtype, backend=backend or config.backend,
        mask_token_id=config.mask_token_id, stop_token_ids=config.stop_token_ids,
    )  # fmt: skip
    engine.check_config(config.decode)
    if config.device == "cpu":
        torch.set_num_threads(1)
    return engine, model, folder


def other_prompts(config: ToolConfig, prompts: str) -> ToolConfig:
    """The same settings on another input."""
    return replace(config, prompts=prompts, split=None, limit=None)


def write_whole(path: Path, text: str) -> None:
    """The whole file or none of it. Raises ``UserError``."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.resolve().parent, suffix=".tmp", delete=False) as file:
            file.write(text)
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None
