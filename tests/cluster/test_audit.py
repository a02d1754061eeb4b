"""The audit: which rows it takes, what it compares, how it is told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.driver.audit import MAX_DIVERGENCES, Audit, spread
from cluster.driver.dispatch import Dispatcher
from cluster.driver.ledger import Ledger, ListFeed, Work
from cluster.errors import UserError
from cluster.input.shards import RawShard
from cluster.messages import AuditRecord, Divergence, Receipt, RowKey, ShardTask
from cluster.output.told import describe_audit
from cluster.worker.auditwork import compare, reference
from cluster.worker.worker import Worker
from specfold import Completion, DecodeConfig, DecodeStats
from tests.cluster.fake_engine import LOOP, NAN, UNFAITHFUL
from tests.cluster.jobs import JobFolder
from tests.cluster.simulation import SimHost, SimPool
from tests.cluster.test_worker import run_all, with_worker

ROWS = st.dictionaries(st.integers(0, 50), st.integers(0, 9))


@given(st.integers(0, 100), ROWS)
def test_rows_are_spread_over_the_shards(count: int, rows: dict[int, int]) -> None:
    chosen = spread(count, rows)
    assert sum(chosen.values()) == min(count, sum(rows.values()))
    assert all(0 < chosen[shard] <= rows[shard] for shard in chosen)
    most = max(chosen.values(), default=0)
    assert all(chosen.get(shard, 0) >= min(most - 1, size) for shard, size in rows.items())
    assert spread(count, dict(reversed(rows.items()))) == chosen


@pytest.mark.parametrize(
    ("run", "again", "position", "tokens"),
    [
        ([1, 2, 3], [1, 2, 3], None, ()),
        ([1, 2, 3], [1, 5, 3], 1, (2, 5)),
        ([1, 2, 3], [1, 2], 2, (3, None)),
        ([1, 2], [1, 2, 3], 2, (None, 3)),
        ([], [], None, ()),
        ([], [4], 0, (None, 4)),
    ],
)
def test_the_first_difference(run: list[int], again: list[int], position: int | None, tokens: Sequence[int]) -> None:
    found = compare(RowKey(3, 1), run, Completion(3, 1, again, "", "stop"))
    if position is None:
        assert found is None
    else:
        assert found == Divergence(3, 1, position, *tokens)


def test_a_row_that_fails_in_the_audit_is_a_difference() -> None:
    again = Completion(3, 0, [], "", "error", error="NaN logits.", error_kind="nan_logits")
    assert compare(RowKey(3, 0), [7], again) == Divergence(3, 0, 0, 7, None, "NaN logits.")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("specfold", "vanilla"), ("spiffy", "vanilla"), ("vanilla", "vanilla"), ("linear_spec", "ar"), ("ar", "ar")],
)
def test_each_mode_has_its_reference(mode: str, expected: str) -> None:
    config = DecodeConfig(mode=mode, seed=4, temperature=0.5)  # type: ignore[arg-type]
    assert reference(config) == DecodeConfig(mode=expected, seed=4, temperature=0.5)  # type: ignore[arg-type]


def test_a_worker_audits_parts_after_its_shards(folder: JobFolder) -> None:
    prompts = folder.write_prompts(24, {1: UNFAITHFUL, 3: NAN, 4: LOOP, 20: UNFAITHFUL})

    async def use(worker: Worker, raws: list[RawShard]) -> list[object]:
        before = await run_all(worker, raws)
        assert all(isinstance(receipt, Receipt) for receipt in before)
        parts = {path: path.read_bytes() for path in folder.parts}
        answers = await run_all(worker, raws, audit=9)
        assert {path: path.read_bytes() for path in folder.parts} == parts
        return [receipt.record for receipt in answers if isinstance(receipt, Receipt)]

    found = with_worker(folder, prompts, use, quarantine=True)
    records = [record for record in found if isinstance(record, AuditRecord)]
    assert [record.audited for record in records] == [7, 8, 8]  # the failed row has nothing to compare
    assert [[d.row_id for d in record.divergences] for record in records] == [[1], [], [20]]
    assert records[1].agreeing == records[1].tokens


def audited(*divergences: Divergence) -> AuditRecord:
    return AuditRecord(
        0, 0, 40, 1, "", "id", {}, {}, DecodeStats(), audited=40, tokens=400, agreeing=390, divergences=[*divergences]
    )


def test_the_audit_is_told_in_one_line(folder: JobFolder) -> None:
    audit = Audit(folder.config("in.jsonl", audit=80), {0: 60, 1: 60})
    audit.add(audited())
    assert describe_audit(audit.to_dict()) == "Audit: 40 of 40 rows decoded with --mode vanilla are identical."
    audit.add(audited(*(Divergence(row, 0, 5, 1, 2) for row in range(39, 9, -1))))
    values = audit.to_dict()
    assert (values["rows"], values["identical"], values["agreement"]) == (80, 50, 0.625)
    assert [d["row_id"] for d in values["divergences"]] == list(range(10, 10 + MAX_DIVERGENCES))
    audit.error = "no worker is left that works: gone."
    assert describe_audit(audit.to_dict()) == (
        "Audit: 50 of 80 rows decoded with --mode vanilla are identical; 97.5% of the tokens come before a difference; "
        "the first is in row 10 (sample 0) at token 5; not finished: no worker is left that works: gone."
    )
    repeated = Audit(folder.config("in.jsonl", audit=80, mode="vanilla"), {0: 60})
    assert describe_audit(repeated.to_dict()) == "Audit: 0 of 0 rows repeated are identical."
    # A vanilla run that folds in time is not repeated by an audit but held against plain decoding.
    folded = Audit(folder.config("in.jsonl", audit=80, mode="vanilla", delta_time=0.1), {0: 60}).to_dict()
    assert (folded["run_mode"], folded["audit_mode"]) == ("vanilla with delta-time 0.1", "vanilla")
    assert describe_audit(folded) == "Audit: 0 of 0 rows decoded with --mode vanilla are identical."


def test_the_workers_of_the_run_go_on_with_the_audit() -> None:
    pool, host = SimPool(size=2), SimHost()
    ran: list[tuple[str, int]] = []
    submit = pool.submit

    def note(worker: str, work: Work, task: ShardTask) -> None:
        ran.append((worker, task.audit))
        submit(worker, work, task)

    pool.submit = note  # type: ignore[method-assign]
    dispatcher = Dispatcher(pool, Ledger(works(6)), host, pool, stall_s=20.0, clock=lambda: pool.now)
    dispatcher.run()
    pool.deadly = {8}  # a worker that dies in the audit is replaced, and the row is given up in the end
    dispatcher.go_on(Ledger(works(3, audit=2)))
    assert [audit for _, audit in ran[:6]] == [0] * 6
    assert {worker for worker, _ in ran[:6]} == {"worker-0", "worker-1"}
    assert {worker for worker, _ in ran[6:8]} <= {"worker-0", "worker-1"}
    assert sorted(record.index for record in host.records) == [0, 0, 1, 1, 2, 2, 3, 4, 5]
    assert pool.blamed.keys() == {RowKey(8, 0)}


def works(count: int, audit: int = 0) -> ListFeed:
    return ListFeed(Work(i, 4 * i, 4, None, audit=audit) for i in range(count))


def test_an_audit_that_cannot_go_on_says_why(folder: JobFolder) -> None:
    def fail(ledger: Ledger) -> None:
        raise UserError("no worker is left that works: gone.", 1)

    audit = Audit(folder.config("in.jsonl", audit=4), {0: 8})
    audit.run(iter(()), fail, lambda: None)
    assert audit.to_dict()["error"] == "no worker is left that works: gone."
