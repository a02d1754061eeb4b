"""The loop that feeds an engine from several open shards, and the flight recorder beside it."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.messages import RowKey
from cluster.worker.decode import DecodeLoop
from cluster.worker.openshard import OpenShard
from cluster.worker.recorder import FlightRecorder, recorder_path, take_flight
from specfold import Completion, DecodeConfig, Request
from tests.cluster.fake_engine import RAISE, FakeEngine, decode
from tests.waiting import PATIENCE_S


class Events(queue.SimpleQueue):  # type: ignore[type-arg]
    """What a loop reported, in order."""

    def next(self) -> object:
        return self.get(timeout=PATIENCE_S)


class Spy(FakeEngine):
    """Notes which rows were in the engine together."""

    def __init__(self) -> None:
        super().__init__(step_s=0.001)
        self.companions: list[set[int]] = []

    def stream(self, requests: Iterator[Request | None], config: DecodeConfig, batch_size: int) -> Iterator[Completion]:
        inside: set[int] = set()

        def watched() -> Iterator[Request | None]:
            for request in requests:
                if request is not None:
                    inside.add(request.row_id)
                    self.companions.append(set(inside))
                yield request

        for completion in super().stream(watched(), config, batch_size):
            inside.discard(completion.row_id)
            yield completion


def requests(first: int, count: int) -> deque[Request]:
    return deque(Request([first + i, 3], first + i) for i in range(count))


def loop(engine: FakeEngine, path: Path, batch_size: int = 4) -> tuple[DecodeLoop, Events]:
    events = Events()
    made = DecodeLoop(
        engine, DecodeConfig(), batch_size, FlightRecorder(str(path), 100),
        on_finished=events.put, on_room=lambda: events.put("room"), on_failure=events.put,
    )  # fmt: skip
    return made, events


def test_open_shards_share_the_engine_and_finish_apart(tmp_path: Path) -> None:
    engine = Spy()
    decoding, events = loop(engine, tmp_path / "rows")
    shards = [OpenShard(i, requests(i * 10, 6)) for i in range(3)]
    for shard in shards:
        decoding.add(shard)
    decoding.start()
    finished = [event for event in (events.next() for _ in range(4)) if event != "room"]
    assert {shard.index for shard in finished} == {0, 1, 2}  # type: ignore[attr-defined]
    for shard in shards:
        assert {key.row_id for key in shard.results} == set(range(shard.index * 10, shard.index * 10 + 6))
        for key, completion in shard.results.items():
            assert completion == decode(Request([key.row_id, 3], key.row_id), DecodeConfig())
    assert any({row // 10 for row in group} == {0, 1} for group in engine.companions)
    state = decoding.state()
    assert (state.rows_done, state.rows_failed, state.active_rows, state.waiting_rows) == (18, 0, 0, 0)
    assert state.busy_s > 0
    decoding.close()


def test_room_is_told_once_fewer_than_a_batch_wait(tmp_path: Path) -> None:
    decoding, events = loop(FakeEngine(), tmp_path / "rows", batch_size=4)
    decoding.add(OpenShard(0, requests(0, 9)))
    decoding.start()
    assert events.next() == "room"
    assert events.next().index == 0  # type: ignore[attr-defined]
    decoding.close()


def test_a_row_to_be_alone_has_no_company(tmp_path: Path) -> None:
    engine = Spy()
    decoding, events = loop(engine, tmp_path / "rows")
    decoding.add(OpenShard(0, requests(0, 8), alone=requests(20, 3)))
    decoding.start()
    while not isinstance(events.next(), OpenShard):
        pass
    assert engine.companions[:3] == [{20}, {21}, {22}]
    assert max(map(len, engine.companions)) == 4
    decoding.close()


def test_a_shard_with_nothing_to_decode_is_finished_at_once(tmp_path: Path) -> None:
    decoding, events = loop(FakeEngine(), tmp_path / "rows")
    shard = OpenShard(0, deque())
    decoding.add(shard)
    assert events.next() is shard


def test_the_recorder_holds_exactly_the_rows_in_the_engine(tmp_path: Path) -> None:
    path = str(tmp_path / "rows")
    decoding, events = loop(FakeEngine(), tmp_path / "rows", batch_size=2)
    decoding.add(OpenShard(7, deque([Request([3], 0), Request([RAISE], 1), Request([4], 2), Request([5], 3)])))
    decoding.start()
    failure = events.next()
    assert isinstance(failure, RuntimeError)
    flight = take_flight(path)
    assert flight is not None
    assert sorted(flight.rows) == [RowKey(0, 0), RowKey(1, 0)]
    assert flight.finished == 0
    assert take_flight(path) is None


class Cramped(FakeEngine):
    """Has memory for two rows at a time, or for none of a marked row."""

    def stream(self, requests: Iterator[Request | None], config: DecodeConfig, batch_size: int) -> Iterator[Completion]:
        if batch_size > 2:
            taken = [next(requests) for _ in range(3)]
            raise MemoryError(f"no room for {len(taken)} rows")
        for request in requests:
            if request is not None and RAISE in request.prompt_ids:
                raise MemoryError("no room at all")
            if request is not None:
                yield decode(request, config)


def test_out_of_memory_halves_the_batch_and_loses_no_row(tmp_path: Path) -> None:
    decoding, events = loop(Cramped(), tmp_path / "rows", batch_size=8)
    decoding.add(OpenShard(0, requests(0, 30)))
    decoding.start()
    while not isinstance(shard := events.next(), OpenShard):
        pass
    assert {key.row_id for key in shard.results} == set(range(30))
    assert (decoding.state().batch_size, decoding.state().rows_done) == (2, 30)
    decoding.close()


def test_a_row_with_no_room_even_alone_is_a_failure(tmp_path: Path) -> None:
    decoding, events = loop(Cramped(), tmp_path / "rows", batch_size=2)
    decoding.add(OpenShard(0, deque([Request([RAISE], 0)])))
    decoding.start()
    while (event := events.next()) == "room":
        pass
    assert isinstance(event, MemoryError)


def test_recorders_of_two_drivers_are_apart() -> None:
    assert recorder_path("a", "worker-0") != recorder_path("b", "worker-0")


def test_a_recorder_survives_reuse_of_its_slots(tmp_path: Path) -> None:
    recorder = FlightRecorder(str(tmp_path / "rows"), 2)
    for row in range(10):
        recorder.admit(RowKey(row, 1))
        if row:
            recorder.release(RowKey(row - 1, 1))
    flight = take_flight(str(tmp_path / "rows"))
    assert flight is not None
    assert (flight.rows, flight.finished) == ([RowKey(9, 1)], 9)
    with pytest.raises(KeyError):
        recorder.release(RowKey(0, 1))
