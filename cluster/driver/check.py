"""The check of input rows before anything is decoded: what is wrong, how often, and where first."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa

from cluster.config import JobConfig
from cluster.input.rows import RowPreparer
from cluster.input.schema import Map
from cluster.input.shards import InputSource, RawShard
from cluster.models import ModelRef, local_folder
from cluster.words import count, verb

CHECK_ALL_ROWS = 100_000
CHECK_FIRST_ROWS = 10_000
_SHARD_ROWS = 2_000
_ID_COLUMNS = ("id", "custom_id")
_KEYS = "<u8"


@dataclass
class RowCheck:
    """Counts over the rows checked so far."""

    rows: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    first: dict[str, tuple[int, str]] = field(default_factory=dict)
    """The first row of each kind of error, and its sentence."""
    prompts: list[bytes] = field(default_factory=list)
    """Hashes of the prompts, eight bytes each; ``ids``: likewise."""
    ids: list[bytes] = field(default_factory=list)
    lengths: Counter[int] = field(default_factory=Counter)
    """Rows that can be decoded, by the number of their prompt's tokens."""
    new_tokens: int = 0
    """The most tokens that one sample of each of these rows may bring."""
    with_stop: int = 0
    """Rows whose prompt holds a stop token, most often the chat template's own."""
    same_samples: int = 0
    """Rows of which several samples are wanted, but at temperature 0, where all are the same."""

    def add(self, other: RowCheck) -> None:
        self.rows += other.rows
        self.failed.update(other.failed)
        for kind, example in other.first.items():
            self.first[kind] = min(example, self.first.get(kind, example))
        self.prompts += other.prompts
        self.ids += other.ids
        self.lengths.update(other.lengths)
        self.new_tokens += other.new_tokens
        self.with_stop += other.with_stop
        self.same_samples += other.same_samples

    @property
    def num_failed(self) -> int:
        return sum(self.failed.values())

    @property
    def repeated_ids(self) -> int:
        """Rows with the id of an earlier row; ``repeated_prompts``: likewise."""
        return _repeated(self.ids)

    @property
    def repeated_prompts(self) -> int:
        return _repeated(self.prompts)

    @property
    def warnings(self) -> list[str]:
        """What is run, but may be a mistake: equal ids, equal prompts, equal samples."""
        repeated = [
            f"Warning: {count(n, 'row')} {verb(n, 'repeats', 'repeat')} the {name} of an earlier row; all are run."
            for name, n in (("id", self.repeated_ids), ("prompt", self.repeated_prompts))
            if n
        ]
        if not self.same_samples:
            return repeated
        rows = f"{count(self.same_samples, 'row')} {verb(self.same_samples, 'has', 'have')}"
        return [*repeated, f"Warning: {rows} temperature 0, where all samples are the same; all are run."]

    def first_problem(self) -> str:
        """The first bad row, in words."""
        row, message = min(self.first.values())
        return f"row {row}: {message}"

    def report(self) -> list[str]:
        """Lines for people: counts by kind with an example, and the warnings."""
        lines = [f"{count(self.rows, 'row')} checked, {self.num_failed:,} cannot be decoded."]
        for kind, number in self.failed.most_common():
            row, message = self.first[kind]
            lines.append(f"  {kind}: {count(number, 'row')}, first row {row}: {message}")
        lines += self.warnings
        return lines


def check_rows(
    source: InputSource, config: JobConfig, model: ModelRef, carried: pa.Schema, rows: int | None, run: Map = map
) -> RowCheck:
    """Prepare the first ``rows`` input rows (all: None) and count what fails; ``run`` may use other processes."""
    total = RowCheck()
    for result in run(partial(check_shard, config, model, carried), source.shards(_SHARD_ROWS, rows)):
        total.add(result)
    return total


def check_shard(config: JobConfig, model: ModelRef, carried: pa.Schema, raw: RawShard) -> RowCheck:
    preparer = RowPreparer(config, local_folder(model), carried)
    rows, table = preparer.prepare(raw)
    stops = set(preparer.stop_token_ids)
    result = RowCheck(rows=len(rows))
    hashes = array("Q")
    for row in rows:
        if row.error_kind is None:
            prompt = row.prompt_ids or []
            hashes.append(_hash(array("l", prompt).tobytes()))
            result.lengths[len(prompt)] += 1
            result.new_tokens += config.max_new_tokens if row.max_new_tokens is None else row.max_new_tokens
            result.with_stop += not stops.isdisjoint(prompt)
            temperature = config.temperature if row.temperature is None else row.temperature
            result.same_samples += config.num_samples > 1 and temperature == 0
        else:
            result.failed[row.error_kind] += 1
            result.first.setdefault(row.error_kind, (row.row_id, row.error or ""))
    result.prompts.append(hashes.tobytes())
    for name in _ID_COLUMNS:
        if config.input_prefix + name in table.column_names:
            ids = table[config.input_prefix + name].drop_null().to_pylist()
            result.ids.append(array("Q", [_hash(str(value).encode()) for value in ids]).tobytes())
            break
    return result


def rows_to_check(total: int | None) -> int | None:
    """How many rows are checked before a job decodes: None is all."""
    return None if total is not None and total <= CHECK_ALL_ROWS else CHECK_FIRST_ROWS


def _repeated(hashes: Iterable[bytes]) -> int:
    values = np.frombuffer(b"".join(hashes), _KEYS)
    return int(values.size - np.unique(values).size)


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
