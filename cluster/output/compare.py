"""Two runs side by side: their settings, their totals, and every row that both have. Holds a few rows at a time."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cluster.errors import UserError
from cluster.messages import RowKey
from cluster.output.footers import read_footers
from cluster.output.rundir import RUN, RunDir, RunFile
from cluster.output.sink import PartError, part_name, quarantine_name
from cluster.output.storage import Store
from cluster.output.summary import Tally, read_summary

_BATCH_ROWS = 256
_COLUMNS = ["row_id", "sample_id", "output_token_ids", "output_text", "finish_reason", "error_kind",
            "num_prompt_tokens"]  # fmt: skip
_UNTOLD = {
    "output", "chat_template_text", "draft_graph_text", "chosen_drafts", "submitted", "overwrite", "retry_failed",
    "check",
}  # fmt: skip
"""Settings that say nothing about a run's rows or speed."""
_CONTEXT_CHARS, _EXCERPT_CHARS = 20, 60


@dataclass(frozen=True)
class Run:
    """A run directory that was found to be one."""

    store: Store
    file: RunFile
    totals: dict[str, Any]
    parts: dict[int, list[str]]
    """Files of every part: its rows in ``data/``, and those in quarantine."""


@dataclass
class RowComparison:
    """What became of the rows. ``a`` and ``b`` are the two runs in the order given."""

    same: int = 0
    changed: int = 0
    """Other tokens, another finish reason or another kind of error."""
    only_a: int = 0
    only_b: int = 0
    failed_only_a: int = 0
    """Error rows in a that have an output in b."""
    failed_only_b: int = 0
    other_prompts: int = 0
    """Rows whose prompts differ in length, so that they are not the same prompts."""
    first_difference: Counter[int] = field(default_factory=Counter)
    """Rows with other tokens, by the position of the first one."""
    examples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def both(self) -> int:
        return self.same + self.changed

    def to_dict(self) -> dict[str, Any]:
        return {
            "both": self.both,
            "same": self.same,
            "changed": self.changed,
            "agreement": round(self.same / self.both, 6) if self.both else None,
            "only_a": self.only_a,
            "only_b": self.only_b,
            "failed_only_a": self.failed_only_a,
            "failed_only_b": self.failed_only_b,
            "other_prompts": self.other_prompts,
            "first_difference": _quartiles(self.first_difference),
            "examples": self.examples,
        }


class _Row(NamedTuple):
    key: RowKey
    tokens: np.ndarray
    reason: str
    kind: str | None
    prompt_tokens: int
    texts: pa.Array
    at: int
    """Where in ``texts`` the row's text stands: it is read for examples only."""

    @property
    def text(self) -> str:
        return str(self.texts[self.at].as_py())


def open_run(path: str) -> Run:
    """The run in a folder. ``UserError`` in one sentence if there is none, or if its parts are damaged."""
    store = Store(path)
    if not store.exists(RUN):
        raise UserError(f"{path or store.url} is not the output of a run: it has no {RUN}.")
    try:
        rundir = RunDir(store)
        file = rundir.read()
        tally, parts = Tally(), {}
        for index, record in read_footers(rundir, pairs=False):
            if isinstance(record, PartError):
                raise record
            tally.add(record, fresh=False)
            parts[index] = [part_name(index), *([quarantine_name(index)] if record.quarantined else [])]
    except (UserError, PartError, KeyError) as error:
        raise UserError(f"{path} cannot be compared: {error}") from None
    assert file is not None
    return Run(store, file, _totals(tally, read_summary(store)), parts)


def compare_settings(a: Run, b: Run) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, those that can change a token first."""
    found: dict[str, tuple[Any, Any]] = {}
    for left, right in ((a.file.identity, b.file.identity), (_told(a.file), _told(b.file))):
        for name in sorted(left.keys() | right.keys()):
            if left.get(name) != right.get(name):
                found.setdefault(name, (left.get(name), right.get(name)))
    return found


def compare_rows(a: Run, b: Run, num_examples: int) -> RowComparison:
    """Join the rows of both runs and compare their tokens. ``UserError`` for a part that cannot be read."""
    result = RowComparison()
    lefts, rights = _rows(a), _rows(b)
    left, right = next(lefts, None), next(rights, None)
    while left is not None or right is not None:
        if right is None or (left is not None and left.key < right.key):
            result.only_a += 1
            left = next(lefts, None)
        elif left is None or right.key < left.key:
            result.only_b += 1
            right = next(rights, None)
        else:
            _compare(left, right, result, num_examples)
            left, right = next(lefts, None), next(rights, None)
    return result


def _compare(a: _Row, b: _Row, result: RowComparison, num_examples: int) -> None:
    result.other_prompts += a.prompt_tokens != b.prompt_tokens
    equal_tokens = np.array_equal(a.tokens, b.tokens)
    if equal_tokens and a.reason == b.reason and a.kind == b.kind:
        result.same += 1
        return
    result.changed += 1
    result.failed_only_a += a.kind is not None and b.kind is None
    result.failed_only_b += b.kind is not None and a.kind is None
    at = None if equal_tokens else _first_difference(a.tokens, b.tokens)
    if at is not None and a.kind is None and b.kind is None:
        result.first_difference[at] += 1
    if len(result.examples) < num_examples:
        texts = _excerpts(a.text, b.text)
        result.examples.append({**a.key._asdict(), "position": at, "a": _side(a, texts[0]), "b": _side(b, texts[1])})


def _side(row: _Row, text: str) -> dict[str, Any]:
    ending = row.reason if row.kind is None else row.kind
    return {"tokens": len(row.tokens), "ending": ending, "text": text}


def _first_difference(a: np.ndarray, b: np.ndarray) -> int:
    """Position of the first token that differs; the shorter length where one begins like the other."""
    length = min(len(a), len(b))
    found = np.flatnonzero(a[:length] != b[:length])
    return int(found[0]) if len(found) else length


def _excerpts(a: str, b: str) -> tuple[str, str]:
    """Both texts around the place where they part."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    start = max(at - _CONTEXT_CHARS, 0)
    return a[start : start + _EXCERPT_CHARS], b[start : start + _EXCERPT_CHARS]


def _rows(run: Run) -> Iterator[_Row]:
    """All rows of a run in order; those in quarantine stand where they would be in the data."""
    for _, names in sorted(run.parts.items()):
        yield from heapq.merge(*(_file_rows(run.store, name) for name in names), key=lambda row: row.key)


def _file_rows(store: Store, name: str) -> Iterator[_Row]:
    try:
        with store.open(name) as file:
            part = pq.ParquetFile(file, page_checksum_verification=True)
            for batch in part.iter_batches(_BATCH_ROWS, columns=_COLUMNS):
                yield from _batch_rows(batch)
    except (pa.ArrowInvalid, OSError, KeyError) as error:
        raise UserError(f"{store.path(name)} cannot be read: {error}") from None


def _batch_rows(batch: pa.RecordBatch) -> Iterator[_Row]:
    lists = batch["output_token_ids"]
    offsets, values = lists.offsets.to_pylist(), lists.values.to_numpy()
    rows, samples = batch["row_id"].to_pylist(), batch["sample_id"].to_pylist()
    reasons, kinds = batch["finish_reason"].to_pylist(), batch["error_kind"].to_pylist()
    prompt_tokens, texts = batch["num_prompt_tokens"].to_pylist(), batch["output_text"]
    for i, key in enumerate(map(RowKey, rows, samples)):
        tokens = values[offsets[i] : offsets[i + 1]]
        yield _Row(key, tokens, reasons[i], kinds[i], prompt_tokens[i], texts, i)


def _totals(tally: Tally, summary: dict[str, Any]) -> dict[str, Any]:
    """Counts from the parts themselves; speeds from the summary, where a job lived to write one."""
    values, stats, speed = tally.to_dict(1.0), tally.stats, summary.get("tokens_per_second") or {}
    return {
        "rows": values["rows"]["done"],
        "rows in quarantine": tally.quarantined,
        **{f"rows, {reason}": count for reason, count in values["rows"]["by_finish_reason"].items()},
        **{f"flag {name}": count for name, count in sorted((values.get("flags") or {}).items())},
        "output tokens": stats.output_tokens,
        "tokens/s while decoding": speed.get("decode"),
        "tokens/s end to end": speed.get("end_to_end"),
        "workers": len(summary.get("workers") or ()) or None,
        "tokens per forward": values["tokens_per_forward"],
        "acceptance": round(stats.drafts_accepted / stats.drafts_proposed, 4) if stats.drafts_proposed else None,
        "acceptance by depth": values["acceptance_by_depth"],
        "fold rate": values["fold_rate"],
        "folded in time": values["time_fold_rate"],
        "recomputed rows per token": values["recomputed_rows_per_token"],
    }


def _told(file: RunFile) -> dict[str, Any]:
    settings = {name: value for name, value in file.config.items() if name not in _UNTOLD | file.identity.keys()}
    return settings | {"input files": len(file.inputs)}


def _quartiles(counts: Counter[int]) -> dict[str, int] | None:
    """Rows with other tokens, and where the first, the middle and the last of them part."""
    if not counts:
        return None
    left = counts.total() / 2
    for median in sorted(counts):
        left -= counts[median]
        if left <= 0:
            break
    return {"rows": counts.total(), "least": min(counts), "median": median, "most": max(counts)}
