"""One worker: an engine in a thread, shards in, parts out. Made to be an async Ray actor, but knows no Ray.

Preparing rows and writing parts run in threads of their own, so that neither holds up the engine or a call of the
driver.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from cluster.errors import UserError
from cluster.input.rows import RowPreparer
from cluster.input.shards import RawShard
from cluster.messages import Failure, Help, Receipt, ShardTask, WorkerInfo, WorkerPlan, WorkerState
from cluster.models import local_folder
from cluster.output.identity import device_kind, token_versions
from cluster.output.lease import birth, holds
from cluster.output.storage import StorageError, Store
from cluster.worker.auditwork import AuditWork, reference
from cluster.worker.decode import DecodeLoop
from cluster.worker.guards import Specials
from cluster.worker.loans import Helping, Loans
from cluster.worker.openshard import OpenShard
from cluster.worker.recorder import FlightRecorder, recorder_path
from cluster.worker.shardwork import ShardWork
from specfold import Completion, ConfigError, DecodeConfig, ModelError, Request

MAX_OPEN_SHARDS = 4
"""Shards that come, wait or decode; beside them as many may be on their way to the disk."""
_WRITERS = 2
"""While one part waits for the disk the next is put together: with one thread workers wrote half as many rows."""


class Worker:
    """Decodes shards with one engine. The driver calls ``start``, then ``run_shard`` whenever ``room`` returns."""

    def __init__(self, name: str, node_id: str, plan: WorkerPlan) -> None:
        self._name, self._node_id, self._plan = name, node_id, plan
        self._store = Store(plan.output)
        self._decode: DecodeLoop | None = None
        self._running: dict[int, asyncio.Future[Failure | None]] = {}
        self._helping = Helping(self._decoded, self._drop)
        self._arrived = self._open = self._opening_rows = self._publishing = 0
        self._preparing = ThreadPoolExecutor(1, "prepare")
        self._writing = ThreadPoolExecutor(_WRITERS, "write")
        self._booked = (0.0, 0.0)
        self._broken: Failure | None = None
        self._auditing: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return self._name

    async def start(self) -> WorkerInfo | Failure:
        """Load the engine. A ``Failure`` is fatal if every other worker would fail the same way."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        try:
            info = await self._loop.run_in_executor(self._preparing, self._load)
        except (UserError, ConfigError, ModelError) as error:
            return Failure(str(error), fatal=True, exit_code=getattr(error, "exit_code", 2))
        except Exception as error:
            return Failure(f"{self._name} could not load the engine: {_sentence(error)}")
        return info

    async def run_shard(self, raw: RawShard, task: ShardTask) -> Receipt | Failure:
        """Decode a shard and publish its part. Several calls run at a time and share the engine."""
        rows = raw.num_rows * self._plan.config.num_samples
        self._arrived, self._open, self._opening_rows = self._arrived + 1, self._open + 1, self._opening_rows + rows
        try:
            return await self._run_shard(raw, task, rows)
        except UserError as error:
            return Failure(str(error), fatal=True, exit_code=error.exit_code)
        finally:
            self._open -= 1
            self._changed.set()

    async def room(self, assigned: int) -> int:
        """Return once all of the ``assigned`` shards have arrived and another would not lie about: how many more."""
        while self._arrived < assigned or not self._room():
            self._changed.clear()
            await self._changed.wait()
        return self._room()

    async def lend(self, loan: int, count: int) -> list[Request]:
        """Up to ``count`` rows for another worker to decode; ``take_back`` ends the loan."""
        rows = self._loans.lend(loan, count)
        self._changed.set()
        return rows

    async def take_back(self, loan: int, completions: list[Completion] | None) -> tuple[int, int]:
        """End a loan, with its results or (None) without; how many rows were done, and how many of them failed."""
        done = self._loans.take_back(loan, completions)
        self._changed.set()
        return done

    async def help(self, loan: int, requests: list[Request]) -> tuple[Help, list[Completion] | None]:
        """Decode rows of another worker: how that went, and their results if all of them are there."""
        return await self._helping.help(loan, requests)

    async def stop_helping(self, loan: int) -> None:
        """The rows of a loan are wanted no more."""
        self._helping.stop(loan)

    async def progress(self) -> WorkerState:
        """The live counters; answers while the engine works."""
        state = self._decode.state() if self._decode else WorkerState()
        return replace(state, open_shards=self._open, waiting_rows=state.waiting_rows + self._opening_rows)

    async def drain(self) -> WorkerState:
        """End the engine's thread after the rows that it has; the last counters."""
        state = await self.progress()
        if self._decode:
            self._decode.close()
            self._recorder.remove()
        return state

    async def _run_shard(self, raw: RawShard, task: ShardTask, rows: int) -> Receipt | Failure:
        started = time.time()
        try:
            work = await self._loop.run_in_executor(self._preparing, self._prepare, raw, task)
        finally:
            self._opening_rows -= rows
        if self._broken:
            return self._broken
        if task.audit:
            self._auditing = self._auditing or asyncio.ensure_future(self._begin_audit())
            await self._auditing
        assert self._decode is not None
        self._decode.count_failed(work.num_failed)
        failure = await self._decoded(work.shard)
        if failure:
            return failure
        self._publishing += 1
        self._changed.set()
        try:
            record, num_bytes = await self._loop.run_in_executor(
                self._writing, work.publish, self._store, self._name, started, self._spent()
            )
        finally:
            self._publishing -= 1
        return Receipt(record, await self.progress(), num_bytes)

    async def _decoded(self, shard: OpenShard) -> Failure | None:
        """Return once the engine has done with the shard, or why it cannot go on."""
        if self._broken:
            return self._broken
        assert self._decode is not None
        ended = self._running[shard.index] = self._loop.create_future()
        self._decode.add(shard)
        self._changed.set()
        try:
            return await ended
        finally:
            del self._running[shard.index]

    def _drop(self, shard: OpenShard) -> None:
        """Let go of a shard that is no longer wanted; ``_decoded`` returns."""
        assert self._decode is not None
        self._decode.drop(shard)
        if shard.dropped:
            self._finish(shard)

    def _spent(self) -> tuple[float, float]:
        """Busy and idle seconds since this was last asked."""
        assert self._decode is not None
        state = self._decode.state()
        (busy, idle), self._booked = self._booked, (state.busy_s, state.idle_s)
        return state.busy_s - busy, state.idle_s - idle

    def _load(self) -> WorkerInfo:
        plan = self._plan
        try:
            sees_driver = holds(self._store, plan.token)
        except StorageError as error:  # no credentials on this node, for instance
            raise UserError(
                f"{self._name} on {os.uname().nodename}: {error}", 2 if error.is_mistake else error.exit_code
            ) from None
        if not sees_driver:
            raise UserError(
                f"{self._name} on {os.uname().nodename} does not see the driver's files in {self._store.url}: "
                "--output must be a folder or URL that every node shares."
            )
        factory = import_factory(plan.engine_factory)
        if plan.device == "cpu":
            use_one_thread()
        folder = local_folder(plan.model)
        config = plan.config
        engine = factory(
            folder, device=plan.device, dtype=config.dtype, backend=config.backend,
            mask_token_id=config.mask_token_id, stop_token_ids=config.stop_token_ids,
        )  # fmt: skip
        decode = config.decode
        engine.check_config(decode)
        memory = engine.plan_memory(decode, config.batch_size)
        if plan.device.startswith("cuda"):
            engine.warm_up(decode, config.batch_size)
        self._specials = Specials.of(engine.tokenizer, engine.mask_token_id, engine.stop_token_ids)
        self._preparer = RowPreparer(config, folder, plan.carried)
        self._recorder = FlightRecorder(recorder_path(plan.token, self._name), 4 * config.batch_size + 64)
        self._engine = engine
        self._decode = self._open_loop(decode)
        _settle_interpreter()
        pid = os.getpid()
        return WorkerInfo(
            device_kind(plan.device), os.uname().nodename, self._node_id, pid, token_versions(), birth(pid), memory
        )

    def _open_loop(self, decode: DecodeConfig) -> DecodeLoop:
        loop = DecodeLoop(
            self._engine, decode, self._plan.config.batch_size, self._recorder,
            on_finished=lambda shard: self._post(self._finish, shard),
            on_room=lambda: self._post(self._changed.set),
            on_failure=lambda error: self._post(self._fail, error),
        )  # fmt: skip
        loop.start()
        self._loans = Loans(loop)
        return loop

    async def _begin_audit(self) -> None:
        """Decode without speculation from now on. The run's loop ends first: an engine has one owner at a time, and its
        memory is divided for one set of settings."""
        assert self._decode is not None
        self._decode.close()
        await self._loop.run_in_executor(self._preparing, self._decode.join)
        self._decode = self._open_loop(reference(self._plan.config.decode))

    def _prepare(self, raw: RawShard, task: ShardTask) -> ShardWork | AuditWork:
        rows, carried = self._preparer.prepare(raw)
        if task.audit:
            return AuditWork(raw, task, rows, self._store)
        config = self._plan.config
        return ShardWork(
            raw, task, rows, carried, config.num_samples, self._store, self._specials, quarantine=config.quarantine
        )

    def _post(self, call: Callable[..., Any], *args: Any) -> None:
        self._loop.call_soon_threadsafe(call, *args)

    def _finish(self, shard: OpenShard) -> None:
        ended = self._running[shard.index]
        if not ended.done():  # rows that were lent can come back after the engine has raised
            ended.set_result(None)

    def _fail(self, error: BaseException) -> None:
        """The engine raised: every open shard comes back. The rows in the engine stay in the flight recorder."""
        self._broken = Failure(_sentence(error))
        for done in self._running.values():
            if not done.done():
                done.set_result(self._broken)

    def _room(self) -> int:
        """Shards that should come now."""
        assert self._decode is not None
        config = self._plan.config
        wanted = self._decode.wanted_rows(self._opening_rows) / ((config.shard_rows or 1) * config.num_samples)
        opened = max(self._open - self._publishing, self._publishing)
        return max(min(MAX_OPEN_SHARDS - opened, math.ceil(wanted)), 0)


def use_one_thread() -> None:
    """The engine's sums have a fixed order only in one thread. One that has not brought torch has no such sums."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _settle_interpreter() -> None:
    """Keep Python's search for cycles away from what is loaded for good, and make it rarer: a shard's rows are many
    small objects without cycles, and looking through them took a quarter of what rows cost beside the engine.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def import_factory(name: str) -> Callable[..., Any]:
    """``module:name.name`` -> the object."""
    module, _, path = name.partition(":")
    value: Any = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".") + "."
