"""What settings of a job cannot be; each mistake is a ``UserError`` of one sentence that names the flag."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from cluster.errors import UserError
from cluster.flags import flag
from specfold.config import AUTO, DRAFTING

if TYPE_CHECKING:
    from cluster.config import JobConfig

AUTO_GRAPH = "auto"
"""``--draft-graph`` that is made from the job's own rows."""

MOST = {"num_samples": 10_000, "workers": 10_000, "batch_size": 65_536}
"""Far above what is of use, and measured to work: a million rows at once, or as many CPUs of a local Ray, do not."""
MOST_OUTPUTS = 2**20
"""Of one part, where rows have several samples: a worker holds a part in memory, and short outputs took 2.5 GB so."""


def check_numbers(config: JobConfig) -> None:
    """Counts, shares and times."""
    for name in ("limit", "num_samples", "workers", "batch_size", "shard_rows"):
        value = getattr(config, name)
        _require(value is None or value >= 1, f"{flag(name)} must be at least 1, not {value}.")
        most = MOST.get(name)
        _require(not most or value is None or value <= most, f"{flag(name)} must be at most {most}, not {value}.")
    _require(0 <= config.max_failed <= 1, f"--max-failed is a share between 0 and 1, not {config.max_failed}.")
    _require(config.audit >= 0, f"--audit must be 0 (off) or a number of rows, not {config.audit}.")
    _require(config.stall_timeout > 0, f"--stall-timeout must be above 0 seconds, not {config.stall_timeout}.")
    gpus = config.gpus_per_worker
    _require(gpus is None or gpus >= 0, f"--gpus-per-worker must not be negative, as {gpus} is.")
    _require(gpus is None or gpus <= 1 or gpus.is_integer(), f"--gpus-per-worker above 1 must be whole, not {gpus}.")


def check_combinations(config: JobConfig) -> None:
    """Texts, and settings that exclude one another."""
    _require(
        not (config.overwrite and config.retry_failed),
        "--overwrite starts anew and --retry-failed keeps what there is; give one of them.",
    )
    _require(
        not (config.device == "cpu" and config.gpus_per_worker), "--gpus-per-worker has no meaning with --device cpu."
    )
    _require(
        not (config.device == "cpu" and config.backend == "triton"),
        "--backend triton needs a GPU, but --device is cpu; leave --backend out or give torch.",
    )
    _require(
        not (config.chat_template == "none" and config.system_prompt is not None),
        "--system-prompt needs a chat template, but --chat-template is none.",
    )
    _require(
        config.prompt_template is None or config.prompt_column is None,
        "--prompt-template makes the prompt and --prompt-column names it; give one of them.",
    )
    _require(config.carry.strip() != "", "--carry is all, none or column names such as a,b; it must not be empty.")
    for name in ("prompt_template", "system_prompt", "stop"):
        # Arguments that are not UTF-8 arrive as lone surrogates, which no tokenizer takes.
        text = "".join(getattr(config, name) or "")
        _require(not re.search("[\ud800-\udfff]", text), f"{flag(name)} is not UTF-8 text.")
    repo = config.push_to_hub
    _require(
        repo is None or re.fullmatch(r"([\w-][\w.-]*/)?[\w-][\w.-]*", repo, re.ASCII) is not None,
        f"--push-to-hub takes a dataset's name such as owner/name, not {repo!r}.",
    )
    _require(not config.hub_public or repo is not None, "--hub-public has no meaning without --push-to-hub.")
    drafting = config.mode in DRAFTING
    _require(config.drafts != AUTO or drafting, "--drafts auto needs drafts: --mode spiffy or specfold.")
    _require(
        config.draft_graph != AUTO_GRAPH or (drafting and config.drafts != 0),
        "--draft-graph auto needs drafts: --mode spiffy or specfold, and --drafts above 0.",
    )
    _require(bool(config.model), "--model must not be empty.")
    _require(bool(config.prompts), "--prompts must not be empty.")


def check_parts(config: JobConfig, num_rows: int | None) -> None:
    """Whether a worker can hold a part; ``config`` is settled, ``num_rows`` those of the job, None for a stream."""
    samples, rows = config.num_samples, min(config.shard_rows or 1, num_rows or MOST_OUTPUTS)
    _require(
        samples == 1 or rows * samples <= MOST_OUTPUTS,
        f"--num-samples {samples} makes {rows * samples:,} outputs of a part's {rows:,} rows, more than "
        f"{MOST_OUTPUTS:,}; give --shard-rows {MOST_OUTPUTS // samples} or less.",
    )


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)
