"""The two commands of the main job: run it, or only check its input."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue

from rich.console import Console

from cluster.config import JobConfig, default_shard_rows
from cluster.config_checks import check_parts
from cluster.driver.check import check_rows
from cluster.driver.choices import with_kept
from cluster.driver.events import Event, Wake
from cluster.driver.footprint import measure_model
from cluster.driver.job import Job, helpers, limited
from cluster.driver.places import choose_device, worker_count
from cluster.driver.preflight import JobPlan, earlier_run, full_report
from cluster.driver.session import OutputKeeper, ray_session
from cluster.driver.signals import Interrupted, StopSignals
from cluster.driver.views import open_view
from cluster.errors import UserError
from cluster.flags import as_flags
from cluster.graph_file import notes_on_graph
from cluster.input.schema import carried_schema
from cluster.input.shards import InputSource
from cluster.input.source import open_input
from cluster.messages import ShardRecord
from cluster.models import ModelRef, resolve_model
from cluster.output.footers import whole_records
from cluster.output.identity import resolve, run_identity
from cluster.output.lease import Lease, is_held
from cluster.output.push import require_token
from cluster.output.resume import survey
from cluster.output.rundir import RunDir, RunFile
from cluster.output.storage import Store, mistakes_of_place
from specfold import ConfigError, ModelError
from specfold.checkpoint import check_settings

DEFAULT_ENGINE = "specfold.engine:Engine.from_pretrained"


@contextmanager
def _as_user_errors() -> Iterator[None]:
    """The engine's complaints about a setting or a model are mistakes of the user."""
    try:
        yield
    except (ConfigError, ModelError) as error:
        raise UserError(str(error)) from None


@_as_user_errors()
def run_job(config: JobConfig, *, engine_factory: str = DEFAULT_ENGINE) -> int:
    """Decode the input into ``config.output``; returns the exit code.

    ``engine_factory``: ``module:callable`` that workers call to make their engine. Raises ``UserError`` for what the
    user can mend; its ``exit_code`` is the command's.
    """
    events: SimpleQueue[Event] = SimpleQueue()
    signals = StopSignals(lambda: events.put(Wake()))

    def run() -> int:
        if config.push_to_hub is not None:
            require_token()
        source = open_input(config)
        model = require_model(config)
        store, _ = _open_output(config)  # what is no output is refused before Ray takes its seconds to start
        with ray_session(config.ray_address, config.workers, signals):
            choose_device(config)  # a device that is not there is refused before anything is written
            return _run(config, source, model, store, signals, events, engine_factory)

    return _stoppable(signals, run)


@_as_user_errors()
def check_job(config: JobConfig) -> int:
    """Check every input row, the model's files and the output folder, and print what a job would find and need.

    Decodes nothing and writes nothing. Returns the exit code; raises ``UserError`` where the job could not run.
    """
    signals = StopSignals(resumable=False)
    return _stoppable(signals, partial(_check, config, signals))


def _stoppable(signals: StopSignals, run: Callable[[], int]) -> int:
    """The exit code of a command, or of the signal that stopped it."""
    try:
        with signals:
            return run()
    except Interrupted as interrupted:
        signals.tell(interrupted.number)
        return interrupted.exit_code


def _run(
    config: JobConfig,
    source: InputSource,
    model: ModelRef,
    store: Store,
    signals: StopSignals,
    events: SimpleQueue[Event],
    engine_factory: str,
) -> int:
    """Take the output folder and run the job in it; Ray is up."""
    console = Console()
    token = secrets.token_hex(8)
    view = open_view(console)
    store.say = view.say
    lease = Lease(store, token, view.say)
    keeper = OutputKeeper(store.url, partial(is_held, store))
    signals.last_words.append(lease.release)
    try:
        keeper.acquire()
        with mistakes_of_place():
            lease.acquire()
        job = Job(
            config, source, model, store, lease=lease, token=token, signals=signals, events=events, view=view,
            console=console, engine_factory=engine_factory,
        )  # fmt: skip
        return job.run()
    except Interrupted as interrupted:
        signals.tell(interrupted.number, view.say)
        raise
    finally:
        view.close()
        lease.release()
        keeper.release()


def _open_output(config: JobConfig) -> tuple[Store, RunFile | None]:
    """The output folder, which may not be there yet, and the run in it. Refuses what can be no output, makes none."""
    with mistakes_of_place():
        store = Store(config.output)
        store.require_writable()
        rundir = RunDir(store)
        run = rundir.read()
        rundir.require_own_data()
        return store, run


def _check(config: JobConfig, signals: StopSignals) -> int:
    source = open_input(config)
    model = require_model(config)
    store, existing = _open_output(config)
    if config.overwrite:
        existing = None
    with ray_session(config.ray_address, config.workers, signals):
        rows = limited(source.count(), config.limit)
        default = existing.shard_rows if existing else default_shard_rows(rows, config.num_samples)
        settled = resolve(config, choose_device(config), config.shard_rows or default)
        check_parts(settled, rows)
        if existing:
            settled = with_kept(settled, existing)
        carried = carried_schema(source, settled, helpers("column types", source.count()))
        found = check_rows(source, settled, model, carried, config.limit, helpers("check rows", rows))
        # By a helper where those check the rows: that node has the model already.
        [footprint] = helpers("check model", rows)(partial(measure_model, settled), [model])
        workers = worker_count(settled, None)
    records, standing, refusal = _look_back(RunDir(store), existing, settled, model, source)
    notes = notes_on_graph(settled.draft_graph_text, model)
    plan = JobPlan(settled, workers, footprint, earlier_run(store, records), standing, notes)
    console = Console()
    for line in full_report(found, plan):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if found.num_failed == found.rows:
        raise UserError(f"no row can be decoded: {found.first_problem()}")
    if footprint.problem:
        raise UserError(footprint.problem)
    if refusal:
        raise refusal
    return 0


def _look_back(
    rundir: RunDir, existing: RunFile | None, config: JobConfig, model: ModelRef, source: InputSource
) -> tuple[list[ShardRecord], int, UserError | None]:
    """The parts of the run in the output folder, how many of its rows the job would keep, and why it could not go on
    with these settings and this input."""
    if existing is None:
        return [], 0, None
    try:
        rundir.require_same(existing, run_identity(config, model))
        shards = source.shards(existing.shard_rows, config.limit)
        found = survey(rundir, existing.hash, shards, num_samples=config.num_samples, retry_failed=config.retry_failed)
    except UserError as error:
        return list(whole_records(rundir, existing.hash)), 0, error
    again = list(found.retry.values())
    standing = sum(r.rows for r in found.records.values()) + sum(r.rows - r.num_failed for r in again)
    return [*found.records.values(), *again], standing, None


def require_model(config: JobConfig) -> ModelRef:
    """The model; settings that it cannot decode with are refused before Ray takes its seconds to start."""
    model = resolve_model(config.model, config.revision)
    if model.path is not None:
        try:
            check_settings(model.path, config.decode)
        except ConfigError as error:
            raise UserError(as_flags(str(error))) from None
    return model
