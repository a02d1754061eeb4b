"""One job between its first look at the output folder and its exit code: check, decode, sum up."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from rich.console import Console

from cluster.config import JobConfig, default_shard_rows
from cluster.config_checks import check_parts
from cluster.driver.audit import Audit
from cluster.driver.check import check_rows, rows_to_check
from cluster.driver.choices import choose_by_first_rows, is_open, with_kept
from cluster.driver.dispatch import Dispatcher
from cluster.driver.events import Event, Wake
from cluster.driver.feed import InputFeed
from cluster.driver.findings import findings
from cluster.driver.footprint import measure_model
from cluster.driver.host import Admission, JobHost
from cluster.driver.ledger import Ledger
from cluster.driver.places import choose_device, most_workers, worker_count, worker_resources
from cluster.driver.pool import RayPool
from cluster.driver.preflight import short_report
from cluster.driver.session import ray_map, worker_environment
from cluster.driver.signals import Interrupted, StopSignals
from cluster.driver.summary_file import SummaryFile
from cluster.driver.views import View
from cluster.errors import UserError
from cluster.graph_file import notes_on_graph
from cluster.input.schema import Map, carried_schema
from cluster.input.shards import InputSource
from cluster.messages import WorkerPlan
from cluster.models import ModelRef
from cluster.output.card import CARD, dataset_card
from cluster.output.identity import other_versions, resolve, run_identity, token_versions
from cluster.output.lease import Lease
from cluster.output.push import push
from cluster.output.resume import Survey, restore_stats, survey
from cluster.output.rundir import RunDir, RunFile, describe_run
from cluster.output.sink import DATA, QUARANTINE
from cluster.output.storage import StorageError, Store
from cluster.output.summary import SHARDS, Tally
from cluster.output.summary_table import summary_table
from cluster.output.told import describe_audit
from cluster.words import count, verb

SMALL_INPUT_ROWS = 2_000
EXIT_MISSING, EXIT_CONFIG, EXIT_FAILED = 1, 2, 3


class Job:
    """A job whose Ray is up and whose output is held by this driver alone."""

    def __init__(
        self,
        config: JobConfig,
        source: InputSource,
        model: ModelRef,
        store: Store,
        *,
        lease: Lease,
        token: str,
        signals: StopSignals,
        events: SimpleQueue[Event],
        view: View,
        console: Console,
        engine_factory: str,
    ) -> None:
        self._config, self._source, self._model, self._store = config, source, model, store
        self._lease, self._token, self._signals, self._events = lease, token, signals, events
        self._view, self._console, self._engine_factory = view, console, engine_factory
        self._rundir = RunDir(store)
        self._tally = Tally()
        self._num_rows = limited(source.count(), config.limit)
        self._num_shards: int | None = None

    def run(self) -> int:
        """Do what is left to do; returns the exit code. Raises ``UserError`` or ``Interrupted``."""
        existing = self._open_rundir()
        config, admission, schema = self._settle(existing)
        left = self._survey(existing, config)
        preflight = self._check_rows(config, schema)
        total = None if self._num_rows is None else self._num_rows * config.num_samples
        summary = SummaryFile(self._store, self._tally, total, self._view.say, preflight)
        host = JobHost(admission, self._tally, self._view, summary, total, self._check_alive)
        try:
            self._decode(config, schema, left, host, summary)
        except (UserError, Interrupted) as error:
            self._store.hurry()  # it may be what ended the job, and patience with each last file added up to a minute
            self._count_unretried(left)
            if admission.identity and not self._lease.lost:
                state = "interrupted" if isinstance(error, Interrupted) else "stopped"
                with suppress(StorageError):  # what ended the job matters more, and may be the disk
                    reason = str(error) if isinstance(error, UserError) else None
                    summary.write(state, error.exit_code, self._missing(), reason)
            if isinstance(error, UserError) and error.exit_code == EXIT_MISSING and self._missing():
                raise UserError(f"{error} Missing shards: {self._missing()}.", EXIT_MISSING) from None
            raise
        return self._finish(summary, config)

    def _open_rundir(self) -> RunFile | None:
        existing = self._rundir.read()
        if existing and self._config.overwrite:
            self._rundir.erase()
            existing = None
        self._rundir.clean()
        return existing

    def _settle(self, existing: RunFile | None) -> tuple[JobConfig, Admission, Any]:
        """Make every ``auto`` choice, once for the life of the run."""
        shard_rows = self._config.shard_rows or (
            existing.shard_rows if existing else default_shard_rows(self._num_rows, self._config.num_samples)
        )
        config = resolve(self._config, choose_device(self._config), shard_rows)
        check_parts(config, self._num_rows)
        told: dict[str, Any] = {}
        if is_open(config):
            config, told = (with_kept(config, existing), {}) if existing else self._choose(config)
        identity = run_identity(config, self._model)
        if self._num_rows is not None:
            self._num_shards = -(-self._num_rows // shard_rows)
        if existing:
            self._rundir.require_same(existing, identity)
            return config, Admission(self._rundir, existing, self._view.say, is_new=False), existing.schema
        schema = carried_schema(self._source, config, self._helpers("column types"))
        run = describe_run(config, identity, schema, self._source.files, self._model, told)
        return config, Admission(self._rundir, run, self._view.say, is_new=True), schema

    def _choose(self, config: JobConfig) -> tuple[JobConfig, dict[str, Any]]:
        """What the run chooses for itself, before anything is written, and how it came about."""
        self._view.say("Decoding the first rows to choose how to draft.")
        found = choose_by_first_rows(config, self._model, self._source, self._engine_factory, worker_resources(config))
        for line in found.lines:
            self._view.say(line)
        return found.config, found.told

    def _survey(self, existing: RunFile | None, config: JobConfig) -> Survey:
        """What the parts of earlier sessions are worth; those that stand are counted."""
        if existing is None:
            return Survey()
        shards = self._source.shards(existing.shard_rows, config.limit)
        found = survey(
            self._rundir, existing.hash, shards, num_samples=config.num_samples, retry_failed=config.retry_failed
        )
        restore_stats(self._store, [*found.records.values(), *found.retry.values()])
        for index in sorted(found.records):
            self._tally.add(found.records.pop(index), fresh=False)
        for message in found.broken.values():
            self._view.say(f"Run again: {message}")
        if found.done:
            self._view.say(
                f"Resuming: {count(len(found.done), 'part')} with {count(self._tally.rows, 'row')} "
                f"{verb(len(found.done), 'is', 'are')} there."
            )
        return found

    def _check_rows(self, config: JobConfig, schema: Any) -> dict[str, Any]:
        """Find bad input before any GPU time is spent on it; what there is to tell of it."""
        rows = rows_to_check(self._num_rows)
        rows = config.limit if rows is None else min(rows, config.limit or rows)
        run = self._helpers("check rows")
        found = check_rows(self._source, config, self._model, schema, rows, run)
        self._view.say(short_report(found, config, self._num_rows))
        notes = notes_on_graph(config.draft_graph_text, self._model)
        for line in [*found.report()[0 if found.num_failed else 1 :], *notes]:
            self._view.say(line)
        if found.rows == found.num_failed and found.rows == (self._num_rows or found.rows):
            raise UserError(f"no row can be decoded: {found.first_problem()}")
        # By a helper where those check the rows: that node has the model already.
        [footprint] = self._helpers("check model")(partial(measure_model, config), [self._model])
        return findings(found, config, self._num_rows, footprint)

    def _decode(self, config: JobConfig, schema: Any, left: Survey, host: JobHost, summary: SummaryFile) -> None:
        if self._num_shards is not None and len(left.done) >= self._num_shards and not config.audit:
            return
        plan = WorkerPlan(
            config, self._model, schema, self._store.url, self._engine_factory, config.device, self._token
        )
        feed = InputFeed(self._source.shards(config.shard_rows or 1, config.limit), left, self._wake)
        pool = RayPool(
            plan,
            self._events.put,
            resources=worker_resources(config),
            runtime_env=worker_environment(),
            count=partial(worker_count, config, self._most_workers(config, left)),
        )
        self._signals.last_words.append(pool.close)
        try:
            dispatcher = Dispatcher(pool, Ledger(feed), host, self._events, stall_s=config.stall_timeout)
            dispatcher.run()
            host.conclude(dispatcher.live(), pool.wanted())
            self._num_shards = feed.num_shards
            if config.audit:
                self._audit(config, dispatcher, host, summary)
        finally:
            feed.close()
            pool.close()

    def _most_workers(self, config: JobConfig, left: Survey) -> int | None:
        """As many as can be of use; None while the input's length is unknown."""
        if self._num_rows is None or self._num_shards is None:
            return None
        shards = self._num_shards - len(left.done)
        rows = min((shards - len(left.retry)) * (config.shard_rows or 1), self._num_rows)
        again = sum(record.num_failed for record in left.retry.values())
        return most_workers(config, shards, rows * config.num_samples + again)

    def _audit(self, config: JobConfig, dispatcher: Dispatcher, host: JobHost, summary: SummaryFile) -> None:
        """Decode a few rows again without speculation. Every row is there already: if it fails, the job has not."""
        audit = Audit(config, self._tally.rows_by_shard())
        host.begin_audit(audit)
        summary.audit = audit.to_dict()
        if not audit.counts:
            return
        self._view.say(f"Auditing {count(audit.wanted, 'row')} with --mode {audit.mode}.")
        audit.run(self._source.shards(config.shard_rows or 1, config.limit), dispatcher.go_on, self._wake)
        self._check_alive()
        summary.audit = audit.to_dict()

    def _finish(self, summary: SummaryFile, config: JobConfig) -> int:
        failed = self._tally.num_failed > self._config.max_failed * max(self._tally.rows, 1)
        code = EXIT_FAILED if failed else 0
        self._rundir.clean()  # a worker killed while it wrote has left a temporary file
        self._store.write(SHARDS, self._tally.shards_file())
        values = summary.write("done", code)
        versions = token_versions() | other_versions()
        self._store.write(CARD, dataset_card(config, self._model, values, versions).encode())
        self._view.close()
        self._console.print(summary_table(values))
        if summary.audit is not None:
            self._console.print(describe_audit(summary.audit), markup=False, highlight=False, soft_wrap=True)
        # On a line of its own, however long: people copy it.
        self._console.print(f"Parquet: {self._store.path(DATA)}", markup=False, highlight=False, soft_wrap=True)
        if self._tally.quarantined:
            place = self._store.path(QUARANTINE)
            self._console.print(f"Quarantine: {place}", markup=False, highlight=False, soft_wrap=True)
        if self._tally.rows and self._tally.quarantined == self._tally.rows:
            self._view.say(
                "Every row is in quarantine: data/ holds none, which `datasets` reads only with streaming=True."
            )
        if failed:
            self._view.say(
                f"{self._tally.num_failed:,} of {self._tally.rows:,} rows have failed, more than --max-failed "
                f"{self._config.max_failed:g}; --retry-failed decodes again those whose input is not at fault."
            )
        if config.push_to_hub and failed:
            self._view.say("Nothing was pushed to the hub.")
        elif config.push_to_hub:
            self._view.say(f"Pushed to {push(self._store, config.push_to_hub, public=config.hub_public)}")
        return code

    def _count_unretried(self, left: Survey) -> None:
        """Parts that were to be improved and were not are still there."""
        for index, record in left.retry.items():
            if not self._tally.has(index):
                self._tally.add(record, fresh=False)

    def _missing(self) -> str:
        """Shards without a part, as ranges."""
        if self._num_shards is None:
            return ""
        return ranges([index for index in range(self._num_shards) if not self._tally.has(index)])

    def _helpers(self, name: str) -> Map:
        return helpers(name, self._num_rows)

    def _check_alive(self) -> None:
        self._signals.check()
        if self._lease.lost:
            raise UserError(f"stopped: {self._lease.lost}", EXIT_MISSING)

    def _wake(self) -> None:
        self._events.put(Wake())


def helpers(name: str, num_rows: int | None) -> Map:
    """How to go over the input's shards: in helper tasks, or here if it is so small that starting them costs more."""
    if num_rows is not None and num_rows <= SMALL_INPUT_ROWS:
        return map
    return partial(ray_map, name, worker_environment())


def limited(rows: int | None, limit: int | None) -> int | None:
    """Input rows of a job; None if unknown."""
    if rows is None or limit is None:
        return rows
    return min(rows, limit)


def ranges(indexes: list[int]) -> str:
    """``[1, 2, 3, 7]`` -> ``1-3, 7``."""
    runs: list[list[int]] = []
    for index in indexes:
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
