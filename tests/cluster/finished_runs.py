"""Output folders as a job leaves them, but made without one: parts, run file, summary, any text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa

from cluster.config import JobConfig
from cluster.messages import RowKey, ShardRecord
from cluster.output.rundir import RUN, RunFile
from cluster.output.sink import build_rows, count_rows, publish
from cluster.output.storage import Store
from cluster.output.summary import SUMMARY, Tally, summary_json
from specfold import Completion, DecodeStats

START = 1_790_000_000
SENTENCE = "Tom has 12 pens and buys 5 more. 12 + 5 = 17. The answer is 17."

PREFLIGHT: dict[str, Any] = {
    "rows_checked": 96, "rows_total": 96, "failed": 1, "failed_by_kind": {"too_long": 1},
    "first_failed": {"too_long": {"row_id": 3, "error": "The prompt has 9,000 tokens, the model takes 4,096."}},
    "repeated_ids": 0, "repeated_prompts": 2, "with_stop_token": 96,
    "prompt_tokens": {
        "least": 39, "median": 46, "mean": 48.4, "most": 79,
        "bins": {"36": 9, "40": 32, "44": 55, "48": 40, "52": 30, "56": 14, "60": 9, "72": 2},
    },
    "outputs": 96, "parts": 12, "shard_rows": 8, "most_tokens_of_checked": 24_576, "most_bytes_of_checked": 137_280,
    "memory_bytes": {"weights": 14_785_000, "token": 6_144, "logits": 3_276_800},
}  # fmt: skip


class FinishedRun:
    """A folder with ``num_shards`` parts of ``rows`` rows, decoded by two workers, the second with a pause."""

    def __init__(self, root: Path, num_shards: int = 12, rows: int = 8, **config: Any) -> None:
        self.store = Store(str(root))
        self.tally = Tally()
        self.rows, self.num_shards = rows, num_shards
        settings = JobConfig(output=str(root), **({"prompts": "prompts.jsonl"} | config))
        identity = {"deterministic": True, "shard_rows": rows}
        self.run = RunFile(identity, pa.schema([]), settings.to_dict(), ["prompts.jsonl"], {"name": settings.model})
        self.store.create(RUN, self.run.to_json())

    def fill(self, texts: dict[int, str] | None = None, errors: dict[int, tuple[str, str]] | None = None) -> None:
        """Write all parts; ``texts`` and ``errors`` (kind, message) say what is special about a row."""
        for index in range(self.num_shards):
            self.add_part(index, texts or {}, errors or {})

    def add_part(
        self, index: int, texts: dict[int, str], errors: dict[int, tuple[str, str]], column: str = "id"
    ) -> None:
        ids = range(index * self.rows, (index + 1) * self.rows)
        results = [_completion(i, texts.get(i, SENTENCE), errors.get(i)) for i in ids]
        carried = pa.table({column: [texts.get(i, f"row-{i}") for i in ids]})
        table = build_rows([RowKey(i, 0) for i in ids], carried, [9] * self.rows, results)
        stats = DecodeStats()
        for result in results:
            stats.add(result.stats)
        turn, worker = divmod(index, 2)
        started = START + 5 + turn * 10 + (30 if worker and turn >= 3 else 0)
        record = ShardRecord(
            index, ids[0], self.rows, 1, "digest", self.run.hash, stats=stats, worker=f"worker-{worker}",
            started=started, ended=started + 9, **count_rows(table),
        )  # fmt: skip
        publish(self.store, table, record)
        self.tally.add(record, fresh=True)

    def summary(self, state: str = "done", exit_code: int | None = 0, **changes: Any) -> dict[str, Any]:
        """Write and return ``summary.json``."""
        values = self.tally.to_dict(95.0)
        total = self.rows * self.num_shards
        session = values.pop("session") | {"state": state, "exit_code": exit_code, "started": "2026-09-21T14:13:20Z"}
        session |= {"host": "node-1", "workers": 2, "versions": {"torch": "2.13.0"}}
        values["rows"] = {"total": total} | values["rows"]
        values |= {"state": state, "missing_shards": "", "updated": "2026-09-21T14:14:55Z", "sessions": [session]}
        values["history"] = [[t, t, int(max(t - 5, 0) * 100 + 90 * math.sin(t / 3))] for t in range(0, 96, 2)]
        values["preflight"] = PREFLIGHT | {"rows_checked": total, "rows_total": total, "outputs": total}
        values |= changes
        self.store.write(SUMMARY, summary_json(values))
        return values


def _completion(row: int, text: str, error: tuple[str, str] | None) -> Completion:
    if error:
        return Completion(row, 0, [], "", "error", error=error[1], error_kind=error[0])
    length = 20 + row * 7 % 60
    stats = DecodeStats(
        output_tokens=length, denoise_forwards=length // 3, drafts_proposed=120, drafts_accepted=70,
        proposed_by_depth=[40, 30, 30, 20], accepted_by_depth=[32, 18, 14, 6], run_lengths=[9, 6, 3, 2, 5],
        draft_rows=[64, 64, 64, 32], folded_qkv=[[60 - layer * 3, 56, 50, 20 + layer] for layer in range(6)],
        folded_ffn=[[58 - layer * 4, 50, 44, 18] for layer in range(6)], seconds=1 + row % 13 / 4,
    )  # fmt: skip
    return Completion(row, 0, list(range(2, 2 + length)), text, "length" if row % 9 == 0 else "stop", stats=stats)
