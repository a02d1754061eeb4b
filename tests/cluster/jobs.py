"""Jobs for tests: inputs, settings, and what must come out of the fake engine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from cluster.config import JobConfig
from cluster.driver import run_job
from cluster.messages import RowKey
from specfold import DecodeConfig, Request
from specfold.checkpoint import expected_shapes, read_model_info
from tests.cluster import fake_engine
from tests.waiting import wait_until

MODEL_CONFIG = {
    "model_type": "Fast_dLLM_Qwen", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "intermediate_size": 8, "vocab_size": fake_engine.FakeEngine.vocab_size,
    "mask_token_id": fake_engine.FakeEngine.mask_token_id, "eos_token_id": 1, "max_position_embeddings": 4096,
}  # fmt: skip
VOLATILE = ["seconds"]
"""Columns that no two runs share."""


class JobFolder:
    """A folder with a model, an input and an output for one job."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.output = root / "out"
        self.model = root / "model"
        self.model.mkdir(parents=True)
        (self.model / "config.json").write_text(json.dumps(MODEL_CONFIG))

    def write_prompts(self, count: int, special: dict[int, Any] | None = None, name: str = "in.jsonl") -> str:
        """``count`` rows of token ids; ``special`` maps a row to a token id to put in, or to a whole line of text."""
        lines = []
        for i in range(count):
            extra = (special or {}).get(i)
            ids = prompt_ids(i) + ([extra] if isinstance(extra, int) else [])
            line = json.dumps({"prompt_token_ids": ids, "id": f"row-{i}", "n": i})
            lines.append(extra if isinstance(extra, str) else line)
        path = self.root / name
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    def write_weights(self, **changes: torch.Tensor | None) -> None:
        """Weights of the model, all zero; ``changes`` replaces tensors by name (``__`` for a dot), None leaves one
        out."""
        info = read_model_info(self.model)
        names = info.family.tensor_names(info.spec)
        tensors = {names[ours]: torch.zeros(shape) for ours, shape in expected_shapes(info.spec).items()}
        tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
        save_file({k: v for k, v in tensors.items() if v is not None}, self.model / "model.safetensors")

    def config(self, prompts: str, **settings: Any) -> JobConfig:
        # Ray has left a worker that got SIGTERM neither dead nor alive: it is replaced well before a test's own limit.
        defaults = {"model": str(self.model), "output": str(self.output), "device": "cpu", "workers": 1}
        defaults |= {"stall_timeout": 45}
        return JobConfig(prompts=prompts, **(defaults | settings))

    def run(self, prompts: str, engine: str = "instant", **settings: Any) -> int:
        return run_job(self.config(prompts, **settings), engine_factory=f"{fake_engine.MODULE}:{engine}")

    def hold(self, *rows: int) -> None:
        """Make the ``held`` engine stand still before these rows."""
        (self.root / fake_engine.HOLD).mkdir(exist_ok=True)
        for row in rows:
            (self.root / fake_engine.HOLD / str(row)).touch()

    def holder(self, row: int) -> int:
        """The process that stands still before a row, as soon as there is one."""
        file = self.root / fake_engine.HOLD / str(row)
        return int(wait_until(f"no worker has come to row {row}", file.read_text))

    def let_go(self, *rows: int) -> None:
        """Of these rows, and of all of them without any."""
        for file in (self.root / fake_engine.HOLD).iterdir():
            if not rows or int(file.name) in rows:
                file.unlink(missing_ok=True)

    @property
    def parts(self) -> list[Path]:
        return sorted((self.output / "data").glob("train-*"))

    @property
    def leftovers(self) -> list[Path]:
        """Temporary files of writers that were killed."""
        return sorted(self.output.rglob(".*"))

    @property
    def decoded(self) -> int:
        """Rows that counting engines have decoded, those that were lost with their process included."""
        return sum(path.stat().st_size for path in (self.root / fake_engine.DECODED).iterdir())

    def rows(self) -> pa.Table:
        """The whole output, in the order of the files."""
        return pa.concat_tables([pq.read_table(path).replace_schema_metadata(None) for path in self.parts])

    def steady(self) -> pa.Table:
        """The whole output without the columns that no two runs share."""
        return self.rows().drop_columns(VOLATILE)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.output / "summary.json").read_text())


def prompt_ids(row: int) -> list[int]:
    return [row % 97 + 2, 5, row % 11 + 3]


def expected(row: int, sample: int = 0, **settings: Any) -> dict[str, Any]:
    """The fake engine's output for a row of ``write_prompts``, as a line of the output."""
    completion = fake_engine.decode(Request(prompt_ids(row), row, sample), DecodeConfig(**settings))
    stats = asdict(completion.stats)
    return {
        "row_id": row,
        "sample_id": sample,
        "output_text": completion.text,
        "output_token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "num_output_tokens": len(completion.token_ids),
        "num_prompt_tokens": 3,
        "drafts_accepted": stats["drafts_accepted"],
        "id": f"row-{row}",
        "n": row,
    }


def keys(table: pa.Table) -> list[RowKey]:
    return [RowKey(*key) for key in zip(table["row_id"].to_pylist(), table["sample_id"].to_pylist(), strict=True)]
