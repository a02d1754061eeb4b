"""The output folder: ``run.json``, who may write there, and what may be deleted. Knows nothing of rows."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import pyarrow as pa

from cluster.config import JobConfig
from cluster.errors import UserError
from cluster.input.schema import schema_from_json, schema_to_json
from cluster.output.identity import DEVICE, differences, identity_hash, other_versions
from cluster.output.lease import LEASE
from cluster.output.sink import DATA, QUARANTINE, STATS, part_index, quarantine_index
from cluster.output.storage import Store
from cluster.output.summary import SHARDS, SUMMARY

RUN = "run.json"
FORMAT = 1
GRADES = "grades"
"""Where an evaluation keeps the grades of a run, one file a part."""
_FOLDERS = (DATA, STATS, QUARANTINE, GRADES)
_FILES = (SUMMARY, SHARDS, "README.md", "report.html", RUN)  # run.json last: until then the folder is known as a run's
_MARK = "specfold run"
_BATCH_NOTE = "Not deterministic: tokens may depend on the rows that were decoded together."


@dataclass(frozen=True)
class RunFile:
    """What ``run.json`` says."""

    identity: dict[str, Any]
    schema: pa.Schema
    """Of the carried columns."""
    config: dict[str, Any] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, Any] = field(default_factory=dict)
    """How the run came to what it chose for itself: what was measured, on which device, at which batch size."""

    @property
    def hash(self) -> str:
        return identity_hash(self.identity)

    @property
    def shard_rows(self) -> int:
        return int(self.identity["shard_rows"])

    def with_identity(self, key: str, value: Any) -> RunFile:
        return replace(self, identity=self.identity | {key: value})

    def to_json(self) -> bytes:
        values = {
            "kind": _MARK,
            "format": FORMAT,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "note": None if self.identity.get("deterministic", True) else _BATCH_NOTE,
            "config": self.config,
            "identity": self.identity,
            "identity_hash": self.hash,
            "model": self.model,
            "choices": self.choices,
            "inputs": self.inputs,
            "schema": schema_to_json(self.schema),
            "versions": other_versions(),
        }
        return orjson.dumps(values, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


class RunDir:
    """An output folder. Nothing but what ``erase`` names is ever deleted in it."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def read(self) -> RunFile | None:
        """The run that is here; None if the folder is empty or absent. ``UserError`` for a folder of anything else."""
        try:
            data = self.store.read(RUN)
        except FileNotFoundError:
            self._require_empty()
            return None
        return self._parse(data)

    def create(self, run: RunFile) -> None:
        """Claim the folder. ``UserError`` if another run has done so."""
        if not self.store.create(RUN, run.to_json()):
            raise UserError(f"{self.store.url} has just become the output of another run; choose another --output.")

    def require_same(self, run: RunFile, now: dict[str, Any]) -> None:
        """``UserError`` that names every difference between the run's identity and this command's."""
        late = {DEVICE} - now.keys()  # known only once a worker is up
        found = differences({key: value for key, value in run.identity.items() if key not in late}, now)
        if found:
            raise UserError(
                f"{self.store.url} holds a run with other settings ({'; '.join(found)}); "
                "choose another --output, or --overwrite to start anew."
            )

    def require_own_data(self) -> None:
        """``UserError`` for a Parquet file in ``data/`` that is no part: readers would take it for one."""
        for name in self.store.names(DATA):
            if name.endswith(".parquet") and not name.startswith(".") and part_index(name) is None:
                raise UserError(f"{self.store.path(DATA)}/{name} is no part of a run; take it out of the folder.")

    def parts(self) -> list[int]:
        """Indexes of the parts that are there."""
        indexes = [part_index(name) for name in self.store.names(DATA)]
        return [index for index in indexes if index is not None]

    def quarantined(self) -> set[int]:
        """Indexes of the parts that have a file in ``quarantine/``."""
        indexes = [quarantine_index(name) for name in self.store.names(QUARANTINE)]
        return {index for index in indexes if index is not None}

    def erase(self) -> None:
        """Delete the run: its own files only."""
        for folder in _FOLDERS:
            for name in self.store.names(folder):
                if _is_ours(folder, name):
                    self.store.delete(f"{folder}/{name}")
            if self.store.is_local:
                self.store.delete(folder)
        for name in _FILES:
            self.store.delete(name)

    def clean(self) -> None:
        """Delete what killed writers left unfinished."""
        for folder in ("", *_FOLDERS):
            self.store.clean(folder)

    def _require_empty(self) -> None:
        others = [name for name in self.store.names() if name != LEASE and not name.endswith(".tmp")]
        if others:
            raise UserError(
                f"{self.store.url} is not empty and not the output of a run (it holds {others[0]}); "
                "choose another --output."
            )

    def _parse(self, data: bytes) -> RunFile:
        try:
            values = orjson.loads(data)
            if values["kind"] != _MARK:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{self.store.path(RUN)} was not written by this program; choose another --output."
            ) from None
        if values["format"] > FORMAT:
            raise UserError(f"{self.store.path(RUN)} was written by a newer version of this program.")
        schema = schema_from_json(values["schema"])
        choices = values.get("choices", {})
        return RunFile(values["identity"], schema, values["config"], values["inputs"], values["model"], choices)


def describe_run(
    config: JobConfig,
    identity: dict[str, Any],
    schema: pa.Schema,
    files: list[str],
    model: Any,
    choices: dict[str, Any] | None = None,
) -> RunFile:
    """A new run's file; ``model`` is a ``ModelRef``."""
    pinned = {k: v for k, v in vars(model).items() if v is not None}
    return RunFile(identity, schema, config.to_dict(), files, pinned, choices or {})


def _is_ours(folder: str, name: str) -> bool:
    if name.startswith(".") and name.endswith(".tmp"):
        return True
    if folder in (STATS, GRADES):
        return name.startswith("shard-") and name.endswith(".json")
    return (quarantine_index(name) if folder == QUARANTINE else part_index(name)) is not None
