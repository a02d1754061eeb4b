"""One job's settings: a frozen, typed, validated record whose fields are the command's flags.

It knows neither Ray nor the engine. The command line and YAML files are read in ``jobs``; everything that reaches a
``JobConfig`` has been checked, and a mistake is a ``UserError`` of one sentence.
"""

# No postponed annotations here: records derived from ``JobConfig`` in other modules need types, not their names.

import hashlib
from dataclasses import Field, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit, urlunsplit

from cyclopts import Parameter

from cluster.config_checks import AUTO_GRAPH, MOST_OUTPUTS, check_combinations, check_numbers
from cluster.errors import UserError
from cluster.flags import (
    DECODING,
    HIDDEN,
    INPUT,
    MODEL,
    PROMPT,
    RUNNING,
    SAMPLING,
    Int,
    IntOrAuto,
    Text,
    as_flags,
)
from cluster.graph_file import require_graph
from specfold.config import AUTO, ConfigError, DecodeConfig, FfnGate, Mode
from specfold.reference_models import NAMES

Backend = Literal["auto", "torch", "triton"]
Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]

BUNDLED_PROMPTS = "bundled"
MAX_PARTS = 10_000
STREAM_SHARD_ROWS = 1024
_ENGINE = DecodeConfig()


def _default_output(value: str) -> str:
    return "runs/MODEL-MODE-HASH, hash of the settings"


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """Every flag of the main job, in snake case, and below them what only the command itself can know."""

    model: Annotated[Text, Parameter(group=MODEL)] = NAMES[0]
    """Local folder, hub id, or a bundled model (fast_dllm_v2, nemotron_labs_diffusion)."""
    revision: Annotated[Text | None, Parameter(group=MODEL)] = None
    """Branch, tag or commit of a hub model; resolved to a commit once."""
    mask_token_id: Annotated[Int | None, Parameter(group=MODEL)] = None
    """Mask token; from the checkpoint unless given."""
    stop_token_ids: Annotated[tuple[Int, ...] | None, Parameter(group=MODEL, negative=())] = None
    """Stop token; repeat for several. From the checkpoint unless given."""
    backend: Annotated[Backend, Parameter(group=MODEL)] = "auto"
    """Implementation of the engine: auto is triton (fused kernels, CUDA graphs) on a GPU and torch on a CPU."""
    dtype: Annotated[Dtype, Parameter(group=MODEL)] = "auto"
    """Arithmetic: auto is bfloat16 on a GPU and float32 on a CPU."""
    device: Annotated[Device, Parameter(group=MODEL)] = "auto"
    """Where to decode: auto is the GPUs if the cluster has any."""

    prompts: Annotated[Text, Parameter(group=INPUT)] = BUNDLED_PROMPTS
    """JSONL, JSON, CSV, text or Parquet files, a folder of them, a saved Arrow dataset, or a hub dataset id (id:name
    for one of several configurations). Globs are sorted by name; remote URLs (s3://, gs://, https://) take credentials
    from the usual environment."""
    split: Annotated[Text | None, Parameter(group=INPUT)] = None
    """Split of a hub dataset or saved dataset; needed where there are several."""
    limit: Annotated[Int | None, Parameter(group=INPUT)] = None
    """Only the first N input rows."""
    output: Annotated[Text, Parameter(group=INPUT, show_default=_default_output)] = ""
    """Folder or URL of the results; the same command on the same folder resumes."""
    carry: Annotated[Text, Parameter(group=INPUT)] = "all"
    """Input columns copied to the output: all, none, or names (a,b). all leaves out the prompt itself; name it to keep
    it."""
    input_prefix: Annotated[str, Parameter(group=INPUT)] = ""
    """Put before the name of every carried column, so that none is named like an output column."""
    overwrite: Annotated[bool, Parameter(group=INPUT, negative=())] = False
    """Delete the results in the output folder and start anew."""
    retry_failed: Annotated[bool, Parameter(group=INPUT, negative=())] = False
    """Decode failed rows again, except those whose input is at fault."""
    check: Annotated[bool, Parameter(group=INPUT, negative=())] = False
    """Check every input row, the model's files and the output folder, print what a job would find and need, and decode
    nothing."""
    push_to_hub: Annotated[Text | None, Parameter(group=INPUT)] = None
    """Hub dataset (owner/name) that the rows and the card are uploaded to at the end; made if it is not there. The
    token comes from the usual environment."""
    hub_public: Annotated[bool, Parameter(group=INPUT, negative=())] = False
    """Make a new hub dataset public; left out: private."""

    prompt_column: Annotated[Text | None, Parameter(group=PROMPT)] = None
    """Column that holds the prompt; prompt unless given."""
    prompt_template: Annotated[Text | None, Parameter(group=PROMPT)] = None
    """Jinja2 template over the row's columns that makes the prompt; an undefined name is an error of the row."""
    system_prompt: Annotated[str | None, Parameter(group=PROMPT)] = None
    """System message for rows that bring none."""
    chat_template: Annotated[Text, Parameter(group=PROMPT)] = "auto"
    """auto: the model's; none: prompts go in raw; or a file with a Jinja2 chat template."""

    mode: Annotated[Mode, Parameter(group=DECODING)] = _ENGINE.mode
    """How to decode: vanilla is step by step, spiffy verifies drafts (same tokens), specfold folds them (fastest); ar
    and linear_spec exist for Nemotron-Labs-Diffusion only."""
    delta: Annotated[float, Parameter(group=DECODING)] = _ENGINE.delta
    """Largest relative change at which a draft position inherits from its parent; below 0 nothing folds."""
    ffn_gate: Annotated[FfnGate, Parameter(group=DECODING)] = _ENGINE.ffn_gate
    """own: test again before the FFN; entry: the paper's single test."""
    drafts: Annotated[IntOrAuto, Parameter(group=DECODING)] = _ENGINE.drafts
    """Draft branches verified beside the main one, or auto: as many as short runs of the job's first rows show to be
    fastest at this batch size, chosen before the first part and kept."""
    draft_graph: Annotated[Text | None, Parameter(group=DECODING)] = None
    """JSON file that replaces the default draft graph (python jobs/calibrate.py writes one), or auto: made from the
    job's own first rows before the first part, and kept in the output folder."""
    draft_budget: Annotated[Int | None, Parameter(group=DECODING)] = None
    """Of the drafts verify only so many a step, the likeliest; left out: all."""
    delta_time: Annotated[float | None, Parameter(group=DECODING)] = None
    """Largest relative change at which a position inherits from the step before; left out or below 0: off."""
    refresh_every: Annotated[Int, Parameter(group=DECODING)] = _ENGINE.refresh_every
    """With --delta-time, every so many steps of a block compute everything again; 0: never."""
    use_block_cache: Annotated[bool, Parameter(group=DECODING, negative=())] = False
    """Fast-dLLM-v2's sub-block cache, in mode vanilla."""
    threshold: Annotated[float | None, Parameter(group=DECODING)] = None
    """Unmask every position at least this confident; left out: one token a step."""
    small_block_size: Annotated[Int, Parameter(group=DECODING)] = _ENGINE.small_block_size
    """Sub-block of Fast-dLLM-v2."""
    block_size: Annotated[Int | None, Parameter(group=DECODING)] = None
    """Block size; from the checkpoint unless given."""
    causal_context: Annotated[bool, Parameter(group=DECODING)] = True
    """Nemotron-Labs-Diffusion: keys and values of finished blocks come from causal forwards."""
    max_thinking_tokens: Annotated[Int | None, Parameter(group=DECODING)] = None
    """End the thinking part after this many tokens; needs --end-think-token-id."""
    end_think_token_id: Annotated[Int | None, Parameter(group=DECODING)] = None
    """Token that ends the thinking part."""
    deterministic: Annotated[bool, Parameter(group=DECODING)] = True
    """Same tokens whatever the batch, the number of workers and what died."""

    max_new_tokens: Annotated[Int, Parameter(group=SAMPLING)] = _ENGINE.max_new_tokens
    """At most this many new tokens, exactly."""
    temperature: Annotated[float, Parameter(group=SAMPLING)] = _ENGINE.temperature
    """0 is greedy."""
    top_p: Annotated[float, Parameter(group=SAMPLING)] = _ENGINE.top_p
    """Keep the likeliest tokens up to this share."""
    top_k: Annotated[Int, Parameter(group=SAMPLING)] = _ENGINE.top_k
    """Keep this many of the likeliest tokens; 0 is off."""
    num_samples: Annotated[Int, Parameter(group=SAMPLING)] = 1
    """Outputs for each input row."""
    seed: Annotated[Int, Parameter(group=SAMPLING)] = _ENGINE.seed
    """Seed of the sampling noise."""
    stop: Annotated[tuple[str, ...], Parameter(group=SAMPLING, negative=())] = ()
    """Text that ends an output; repeat for several."""

    workers: Annotated[Int | None, Parameter(group=RUNNING)] = None
    """Worker processes; left out: one for each GPU, or one for each core."""
    gpus_per_worker: Annotated[float | None, Parameter(group=RUNNING)] = None
    """GPUs of one worker, a fraction to share one; left out: 1, or 0 on a CPU."""
    batch_size: Annotated[Int, Parameter(group=RUNNING)] = 8
    """Rows decoded together by a worker."""
    shard_rows: Annotated[Int | None, Parameter(group=RUNNING)] = None
    """Input rows of one output part; left out: fixed by the number of rows (8 to 2,048, more beyond 20 million)."""
    quarantine: Annotated[bool, Parameter(group=INPUT, negative=())] = False
    """Write flagged rows to quarantine/ instead of data/; the flag no_stop alone moves none."""
    audit: Annotated[Int, Parameter(group=RUNNING)] = 0
    """At the end decode N rows again without speculation, and report where outputs differ; 0 is off."""
    max_failed: Annotated[float, Parameter(group=RUNNING)] = 0.05
    """Share of failed rows above which the exit code is 3."""
    stall_timeout: Annotated[float, Parameter(group=RUNNING)] = 300.0
    """Seconds without progress after which a worker is replaced."""

    chat_template_text: Annotated[str | None, HIDDEN] = None
    """Content of the chat template's file, read once by the command so that workers need no file."""
    draft_graph_text: Annotated[str | None, HIDDEN] = None
    """Content of the draft graph's file, read once by the command; with auto, what the run made for itself."""
    chosen_drafts: Annotated[Int | None, HIDDEN] = None
    """With auto, the drafts that the run has chosen; None until then."""
    ray_address: Annotated[str | None, HIDDEN] = None
    """Where the environment says that a Ray cluster is; None: start a local one."""
    submitted: Annotated[bool, HIDDEN] = False
    """Running as a submitted Ray job, in whose working directory nothing lasts."""

    def __post_init__(self) -> None:
        check_numbers(self)
        check_combinations(self)
        try:
            _ = self.decode
        except ConfigError as error:
            raise UserError(as_flags(str(error))) from None

    @property
    def decode(self) -> DecodeConfig:
        """The engine's share of the settings."""
        values = {f.name: getattr(self, f.name) for f in fields(DecodeConfig)}
        file = None if self.draft_graph == AUTO_GRAPH else self.draft_graph
        drafts = self.drafts if self.chosen_drafts is None else self.chosen_drafts
        graph = file if self.draft_graph_text is None else self.draft_graph_text
        return DecodeConfig(**values | {"draft_graph": graph, "drafts": drafts})

    @property
    def tokens_follow_drafts(self) -> bool:
        """Whether tokens may depend on which drafts there are: with any folding on."""
        return self.decode.fold_delta >= 0 or self.decode.time_delta >= 0

    def identity(self) -> dict[str, Any]:
        """Settings that can change a token or a column, as JSON values.

        The driver adds what it alone knows: the model's hash, versions, the device kind, the resolved ``auto`` choices
        and ``shard_rows``. Files count by content, not by name.
        """
        names = {f.name for f in fields(DecodeConfig)} | {
            "num_samples", "prompt_column", "prompt_template", "system_prompt", "chat_template", "carry",
            "input_prefix", "shard_rows", "backend", "dtype", "mask_token_id", "stop_token_ids",
            "quarantine",
        }  # fmt: skip
        # With auto the drafts follow the batch size, and tokens may follow the drafts.
        if not self.deterministic or (self.drafts == AUTO and self.tokens_follow_drafts):
            names.add("batch_size")
        values = {name: _plain(getattr(self, name)) for name in sorted(names)}
        for name in ("chat_template", "draft_graph"):
            text = getattr(self, f"{name}_text")
            if text is not None:
                values[name] = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
        if self.draft_graph == AUTO_GRAPH and self.draft_graph_text is not None:
            values["draft_graph"] = f"{AUTO_GRAPH} {values['draft_graph']}"
        if self.chosen_drafts is not None:
            values["drafts"] = f"{AUTO} ({self.chosen_drafts})"
        return values

    def to_dict(self) -> dict[str, Any]:
        """Every setting as JSON values; credentials inside URLs are left out."""
        values = {name: _plain(value) for name, value in asdict(self).items() if name != "ray_address"}
        return values | {name: without_secrets(values[name]) for name in ("model", "prompts", "output")}

    def with_files(self) -> Self:
        """The same settings with the chat template and the draft graph read from their files. Raises ``UserError``."""
        template = None if self.chat_template in ("auto", "none") else _read(self.chat_template, "--chat-template")
        graph = None if self.draft_graph in (None, AUTO_GRAPH) else _read(str(self.draft_graph), "--draft-graph")
        config = replace(self, chat_template_text=template, draft_graph_text=graph)
        if graph is not None:
            require_graph(graph, str(self.draft_graph), config.decode)
        return config


def default_shard_rows(num_rows: int | None, num_samples: int = 1) -> int:
    """Input rows of a shard when the user names none: a power of two, a function of the row and sample counts alone.

    About 32 shards for a small input, so that a few workers share it and an interruption loses little; 256 rows up to
    131,072, then about 512 shards, up to 2,048 rows: a minute or two of a GPU that makes 4,000 tokens a second. Every
    shard costs some milliseconds, whatever is in it. More rows only to stay below ``MAX_PARTS``, fewer only where a
    worker could not hold that many samples. ``None``: a stream.
    """
    rows = 8 if num_rows is not None else STREAM_SHARD_ROWS
    if num_rows is not None:
        while (rows < 256 and rows * 32 < num_rows) or (rows < 2048 and rows * 512 < num_rows):
            rows *= 2
        while rows * MAX_PARTS < num_rows:
            rows *= 2
    while num_samples > 1 and rows * num_samples > MOST_OUTPUTS:
        rows //= 2
    return rows


def flag_fields() -> list[Field[Any]]:
    """The settings that are flags; the others only the command itself can know."""
    return [f for f in fields(JobConfig) if HIDDEN not in get_args(f.type)]


def without_secrets(url: str) -> str:
    """The URL without user, password and query, where credentials and signatures are."""
    if "://" not in url:
        return url
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _read(path: str, name: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{name} {path} is not UTF-8 text.") from None
    except OSError as error:
        raise UserError(f"{name} {path} cannot be read: {error.strerror}.") from None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
