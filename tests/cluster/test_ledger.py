"""Which shard goes where, and who is blamed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.driver.ledger import Ledger, ListFeed, Work
from cluster.messages import RowKey


def ledger(shards: int = 3, rows: int = 4) -> Ledger:
    return Ledger(ListFeed(Work(i, i * rows, rows, None) for i in range(shards)))


def taken(book: Ledger, worker: str, **where: object) -> Work:
    work = book.take(worker, **where)  # type: ignore[arg-type]
    assert work is not None
    return work


def test_shards_come_in_order_and_lost_ones_come_again() -> None:
    book = ledger()
    assert [taken(book, "a").index, taken(book, "b").index] == [0, 1]
    book.lost("a")
    assert taken(book, "c").index == 0
    book.done(0)
    book.done(1)
    assert taken(book, "c").index == 2
    assert not book.finished
    book.done(2)
    assert book.take("c") is None
    assert book.finished


def test_suspects_run_alone_on_one_worker_at_a_time() -> None:
    book = ledger()
    taken(book, "a"), taken(book, "a")
    book.lost("a", [RowKey(1, 0), RowKey(5, 0)], proven=True)
    first = taken(book, "b")
    assert (first.index, first.alone) == (0, [RowKey(1, 0)])
    assert book.take("b") is None  # nothing beside suspects
    assert taken(book, "c").index == 2  # the other suspect waits
    book.done(0)
    assert taken(book, "b").alone == [RowKey(5, 0)]


def test_a_row_is_blamed_after_two_deaths_alone_and_the_others_are_cleared() -> None:
    book = ledger(1)
    bad, good = RowKey(2, 0), RowKey(1, 0)
    taken(book, "a")
    book.lost("a", [good, bad], proven=True)
    for worker in ("b", "c"):
        assert bad in taken(book, worker).alone
        book.lost(worker, [bad], proven=True, kind="worker_died", cause="killed")
    work = taken(book, "d")
    assert work.blamed == {bad: ("worker_died", "killed")}
    assert work.alone == [RowKey(0, 0), RowKey(3, 0), good]
    assert work.task("id").blamed == work.blamed


def test_deaths_from_outside_blame_no_row() -> None:
    book = ledger(1)
    for _ in range(5):
        taken(book, "a")
        book.lost("a", [RowKey(0, 0), RowKey(1, 0)], proven=True)  # never alone
    for _ in range(5):
        assert not taken(book, "a").blamed
        book.lost("a", [RowKey(0, 0)], proven=False)  # alone, but on a worker that never worked
    assert not taken(book, "a").blamed


def test_deaths_of_rows_that_later_finish_alone_make_it_harder_to_blame_one() -> None:
    book = ledger(1)
    first, second, other = RowKey(0, 0), RowKey(1, 0), RowKey(2, 0)
    taken(book, "a")
    book.lost("a", [first], proven=True)  # the last one in the engine, by chance
    taken(book, "b")
    book.lost("b", [second, other], proven=True)  # by then the first has finished alone
    for death in range(3):
        assert taken(book, "c").alone, death
        book.lost("c", [second], proven=True, cause="died {times}")
    assert taken(book, "d").blamed == {second: ("worker_died", "died 3 times")}


def test_a_row_needs_more_deaths_alone_where_other_workers_die_as_well() -> None:
    book = ledger(9)
    bad = RowKey(0, 0)
    taken(book, "a")
    book.lost("a", [bad, RowKey(1, 0)])
    for death in range(1, 6):
        while bad not in (work := taken(book, "b")).alone:
            book.done(work.index)
        assert not work.blamed, death
        if death < 5:
            other = taken(book, "c")
            book.lost("c", [RowKey(other.first_row, 0), RowKey(other.first_row + 1, 0)])  # somebody kills processes
        book.lost("b", [bad], proven=True, cause="died {times}")
    while (work := taken(book, "b")).index:
        book.done(work.index)
    assert work.blamed == {bad: ("worker_died", "died 5 times")}


def test_a_row_that_was_lent_is_blamed_only_once_it_was_tried_alone() -> None:
    """The last row of a job: its helper and then its own worker are killed from outside."""
    book = ledger(1)
    last = RowKey(3, 0)
    taken(book, "owner")
    book.lost("helper", [last], proven=True)
    book.lost("owner", [last], proven=True)
    work = taken(book, "a")
    assert last in work.alone
    assert not work.blamed
    book.lost("a", [last], proven=True)
    assert last in taken(book, "b").blamed


def test_the_row_that_died_alone_goes_last() -> None:
    book = ledger(1)
    taken(book, "a")
    book.lost("a", [RowKey(0, 0), RowKey(1, 0), RowKey(2, 0)])
    taken(book, "b")
    book.lost("b", [RowKey(0, 0)])
    assert taken(book, "c").alone == [RowKey(3, 0), RowKey(1, 0), RowKey(2, 0), RowKey(0, 0)]


def test_deaths_of_a_row_on_workers_that_never_worked_are_not_those_of_others() -> None:
    book = ledger(1)
    bad = RowKey(0, 0)
    for proven in (True, False, False, True):
        assert not taken(book, "a").blamed
        book.lost("a", [bad], proven=proven)
    assert bad in taken(book, "a").blamed


def test_suspects_are_tried_in_another_slot_if_there_is_one() -> None:
    book = ledger(1)
    taken(book, "a", slot=0)
    book.lost("a", [RowKey(0, 0), RowKey(1, 0)], slot=0)
    assert book.take("a.2", slot=0, only=False) is None
    assert taken(book, "b", slot=1, only=False).alone
    book.lost("b", slot=1)
    assert taken(book, "a.2", slot=0, only=True).alone


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 3)), max_size=60))
def test_no_shard_is_lost_or_run_twice_at_a_time(moves: list[tuple[int, bool, int]]) -> None:
    book, done, running = ledger(8), [], {0: [], 1: [], 2: []}  # type: ignore[var-annotated]
    for worker, dies, row in moves:
        if dies:
            indexes = running[worker]
            suspects = [RowKey(index * 4 + row, 0) for index in indexes[:1]]
            book.lost(str(worker), suspects, proven=True)
            running[worker] = []
        elif running[worker] and row == 0:
            index = running[worker].pop()
            book.done(index)
            done.append(index)
        else:
            work = book.take(str(worker))
            if work is not None:
                assert work.index not in done
                assert all(work.index not in others for others in running.values())
                running[worker].append(work.index)
    for worker in running:
        book.lost(str(worker))
    while (work := book.take("last")) is not None:
        book.done(work.index)
        done.append(work.index)
    assert sorted(done) == list(range(8))
    assert book.finished
