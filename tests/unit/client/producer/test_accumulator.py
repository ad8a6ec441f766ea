"""Batches: what goes into one, when it may go, and what bounds it all."""

from __future__ import annotations

import threading
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayqueue.client.producer.accumulator import ANY, BURST, STRIPE, Accumulator, Lack
from rayqueue.client.producer.batch import Batch
from rayqueue.client.producer.columns import check_columns, check_headers, cuts
from rayqueue.errors import ClosedError, InvalidInputError
from rayqueue.protocol.data import Appended
from rayqueue.records import Compression, RecordBatch

RECORD = 10


class Bench:
    """One accumulator and one topic, with a clock that is set by hand."""

    def __init__(self, *, partitions: int = 1, lanes: int = 1, **settings: Any) -> None:
        self.now_s = 0.0
        self.woken = 0
        defaults: dict[str, Any] = {"batch_bytes": 30, "buffer_bytes": 1000, "linger_ms": 0, "delivery_timeout_ms": 9}
        self.accumulator = Accumulator(**(defaults | settings), clock_s=lambda: self.now_s, wake=self._wake)
        self.topic = self.accumulator.add_topic("orders", 1, partitions, lanes)
        self.buffer = self.topic.partitions[0]

    def _wake(self) -> None:
        self.woken += 1

    def send(
        self, value: bytes, *, number: int = 0, lane: int = 0, key: bytes | None = None, size: int = RECORD
    ) -> Any:
        return self.accumulator.append(self.topic, number, lane, key, value, None, 7, size)

    def take(self, number: int = 0) -> Batch | None:
        return self.topic.partitions[number].take(self.now_s)

    def values(self, number: int = 0) -> list[list[bytes | None]]:
        taken: list[list[bytes | None]] = []
        while (batch := self.take(number)) is not None:
            taken.append(batch.values)
        return taken


def test_a_batch_is_full_before_it_is_too_large() -> None:
    bench = Bench()
    for value in (b"a", b"b", b"c", b"d"):
        bench.send(value)
    bench.send(b"large", size=500)
    bench.send(b"e")
    assert bench.values() == [[b"a", b"b", b"c"], [b"d"], [b"large"], [b"e"]]


def test_what_is_not_full_waits_while_something_is_under_way() -> None:
    bench = Bench()
    bench.send(b"a")
    assert bench.take() is not None
    bench.buffer.in_flight = 1
    for value in (b"b", b"c"):
        bench.send(value)
    assert bench.take() is None
    bench.send(b"d")
    bench.send(b"e")
    assert bench.values() == [[b"b", b"c", b"d"]]
    bench.buffer.in_flight = 0
    assert bench.values() == [[b"e"]]


def test_linger_is_waited_for_whatever_is_under_way() -> None:
    bench = Bench(linger_ms=5)
    bench.send(b"a")
    bench.buffer.in_flight = 1
    bench.now_s = 0.004
    assert bench.take() is None
    assert bench.buffer.due_s() == 0.005
    bench.now_s = 0.005
    assert bench.values() == [[b"a"]]
    assert bench.buffer.due_s() is None


def test_what_is_held_back_is_not_due_however_long_it_has_waited() -> None:
    """Whoever sets a timer by it would do nothing else until the transaction before is decided."""
    bench = Bench(linger_ms=5, transactional=True)
    bench.accumulator.accept(2)
    bench.accumulator.release(1)
    bench.send(b"a")
    bench.now_s = 0.006
    assert bench.take() is None
    assert bench.buffer.due_s() is None
    bench.accumulator.release(2)
    assert bench.buffer.due_s() == 0.005
    assert bench.values() == [[b"a"]]


def test_the_sender_is_woken_once_for_what_it_does_not_know() -> None:
    bench = Bench()
    bench.send(b"a")
    bench.send(b"b")
    assert bench.woken == 1
    assert bench.accumulator.signalled() == [bench.buffer]
    assert bench.accumulator.signalled() == []
    bench.take()
    bench.buffer.in_flight = 1
    bench.send(b"c")
    assert bench.woken == 1  # it comes back by itself when the one under way is answered
    for _ in range(3):
        bench.send(b"d")  # but a full one may go now
    assert bench.woken == 2


def test_higher_lanes_go_first_and_each_lane_keeps_its_order() -> None:
    bench = Bench(lanes=3)
    bench.send(b"low")
    bench.send(b"high", lane=2)
    bench.send(b"low too")
    batches = [bench.take(), bench.take()]
    assert [(batch.lane, batch.values) for batch in batches if batch] == [(2, [b"high"]), (0, [b"low", b"low too"])]


def test_any_is_one_partition_until_its_batch_is_full_or_gone_then_the_one_with_the_least_on_its_way() -> None:
    bench = Bench(partitions=3)
    for number in range(7):
        bench.send(b"%d" % number, number=ANY)
    assert [bench.values(number) for number in (1, 2, 0)] == [[[b"0", b"1", b"2"]], [[b"3", b"4", b"5"]], [[b"6"]]]
    bench.send(b"7", number=ANY)
    assert bench.values(0) == [[b"7"]]


def test_a_burst_without_keys_is_shared_by_partitions_that_have_nothing_to_do() -> None:
    """Nothing is taken meanwhile: the sender does not even know who leads yet."""
    bench = Bench(partitions=3, batch_bytes=10**6, buffer_bytes=10**6)
    for number in range(300):
        bench.send(b"%d" % number, number=ANY)
    counts = [partition.records for partition in bench.topic.partitions]
    assert sum(counts) == 300
    assert max(counts) - min(counts) <= STRIPE
    assert [len(bench.values(number)) for number in range(3)] == [1, 1, 1]  # in one batch each


def test_more_than_a_burst_goes_by_whole_batches() -> None:
    bench = Bench(partitions=2, batch_bytes=10**7, buffer_bytes=10**7)
    for _ in range(10 * BURST):
        bench.send(b"x", number=ANY)
    least, most = sorted(partition.records for partition in bench.topic.partitions)
    assert BURST - STRIPE <= least <= BURST
    assert most == 10 * BURST - least


def test_a_busy_partition_gets_less_of_a_burst_and_an_idle_one_its_share() -> None:
    bench = Bench(partitions=2, batch_bytes=10**6, buffer_bytes=10**6)
    for _ in range(100):
        bench.send(b"x", number=0)
    for _ in range(100):
        bench.send(b"y", number=ANY)
    busy, idle = (partition.records for partition in bench.topic.partitions)
    assert busy + idle == 200
    assert abs(busy - idle) <= 2 * STRIPE
    for number in (0, 1):
        batch = bench.take(number)
        assert batch is not None
        bench.accumulator.resolve(batch, Appended(0, 1, False))
    assert [partition.records for partition in bench.topic.partitions] == [0, 0]


def test_no_more_is_accepted_for_a_partition_than_it_ever_takes() -> None:
    bench = Bench(partitions=2, batch_bytes=10**6, buffer_bytes=10**6)
    bench.topic.bound(5, None)
    assert [bench.send(b"x") is not None for _ in range(7)] == [True] * 5 + [False] * 2
    assert [bench.send(b"x", number=ANY) is not None for _ in range(7)] == [True] * 5 + [False] * 2
    woken: list[int] = []
    for number in (0, 1, ANY):
        bench.accumulator.when_space(Lack(RECORD, bench.topic, number), partial(woken.append, number))
    assert woken == []
    batch = bench.take(1)
    assert batch is not None
    bench.accumulator.resolve(batch, Appended(0, 1, False))
    assert woken == [1, ANY]
    assert bench.send(b"x") is None
    assert bench.send(b"x", number=ANY) is not None


def test_what_is_larger_than_a_partition_takes_is_accepted_alone() -> None:
    bench = Bench(buffer_bytes=10**6)
    bench.topic.bound(None, RECORD)
    assert bench.send(b"x", size=10 * RECORD) is not None
    assert bench.send(b"x") is None


def test_keys_and_headers_may_begin_in_the_middle_of_a_batch() -> None:
    bench = Bench(batch_bytes=1000)
    accumulator, topic = bench.accumulator, bench.topic
    bench.send(b"a")
    bench.send(b"b", key=b"k")
    accumulator.append(topic, 0, 0, None, b"c", (("h", b"1"),), 7, RECORD)
    accumulator.extend(topic, 0, 0, [b"d", None], None, None, [8, 9], 2 * RECORD)
    accumulator.extend(topic, 0, 0, [b"e"], [b"l"], [{"i": b"2"}], [10], RECORD)
    batch = bench.take()
    assert batch is not None
    batch.compression = Compression.ZSTD
    batch.stamp(5, 6, 7)
    decoded = RecordBatch.decode(batch.encoded)
    assert [(record.value, record.key, record.headers, record.timestamp) for record in decoded.records()] == [
        (b"a", None, (), 7),
        (b"b", b"k", (), 7),
        (b"c", None, (("h", b"1"),), 7),
        (b"d", None, (), 8),
        (None, None, (), 9),
        (b"e", b"l", (("i", b"2"),), 10),
    ]
    assert (decoded.header.producer_id, decoded.header.sequence, decoded.header.epoch) == (5, 6, 7)
    batch.stamp(5, 0, 8)
    again = RecordBatch.decode(batch.encoded)
    assert (again.header.sequence, again.header.epoch, again.values()) == (0, 8, decoded.values())


def test_an_encoded_batch_follows_what_was_added_before_it() -> None:
    bench = Bench()
    bench.send(b"a")
    payload = RecordBatch.encode([b"b", b"c"], timestamps=3)
    part = bench.accumulator.put(bench.topic, 0, 0, payload, 2, 3)
    assert part is not None
    bench.send(b"d")
    taken = [bench.take() for _ in range(3)]
    assert [batch.values if batch and batch.payload is None else None for batch in taken] == [[b"a"], None, [b"d"]]
    assert part.count == 2


def test_the_buffer_is_bounded_until_something_is_resolved() -> None:
    bench = Bench(buffer_bytes=100)
    for _ in range(10):
        assert bench.send(b"x") is not None
    assert bench.send(b"x") is None
    assert bench.accumulator.extend(bench.topic, 0, 0, [b"x"], None, None, [1], RECORD) is None
    woken: list[str] = []
    bench.accumulator.when_space(Lack(RECORD, bench.topic, 0), lambda: woken.append("space"))
    batch = bench.take()
    assert batch is not None
    assert not woken
    bench.accumulator.resolve(batch, Appended(0, 1, False))
    assert woken == ["space"]
    assert bench.accumulator.used_bytes == 70
    bench.accumulator.resolve(batch, Appended(0, 1, False))  # a second time changes nothing
    assert bench.accumulator.used_bytes == 70
    assert bench.send(b"x") is not None


def test_what_is_larger_than_the_buffer_goes_alone() -> None:
    bench = Bench(buffer_bytes=100)
    assert bench.send(b"x", size=200) is not None
    assert bench.send(b"x") is None


def test_flush_waits_for_what_was_added_before_it_only() -> None:
    bench = Bench(linger_ms=1000)
    bench.send(b"a")
    serial = bench.accumulator.cut_all()
    batch = bench.take()
    assert batch is not None
    bench.send(b"b")
    flushed: list[bool] = []
    bench.accumulator.when_resolved(serial, lambda: flushed.append(True))
    assert not flushed
    bench.accumulator.resolve(batch, Appended(0, 1, False))
    assert flushed
    assert bench.accumulator.unresolved_records == 1


def test_what_was_never_taken_expires() -> None:
    bench = Bench()
    for _ in range(4):
        bench.send(b"x")
    assert bench.buffer.expired(0.008) == []
    assert [len(batch) for batch in bench.buffer.expired(0.009)] == [3, 1]
    assert bench.take() is None


def test_a_closed_one_takes_nothing_and_wakes_those_who_wait() -> None:
    bench = Bench(buffer_bytes=10)
    bench.send(b"x")
    woken: list[bool] = []
    bench.accumulator.when_space(Lack(RECORD, bench.topic, 0), lambda: woken.append(True))
    bench.accumulator.close()
    assert woken
    bench.take()
    for (batch,) in list(bench.accumulator._unresolved.values()):
        bench.accumulator.resolve(batch, Appended(0, 1, False))
    with pytest.raises(ClosedError):
        bench.send(b"x")


def test_threads_lose_nothing() -> None:
    bench = Bench(buffer_bytes=10**9, batch_bytes=300)
    taken: list[bytes | None] = []
    done = threading.Event()

    def send(name: int) -> None:
        for number in range(3000):
            bench.send(b"%d %d" % (name, number))

    def take() -> None:
        while not done.is_set() or len(bench.buffer):
            batch = bench.take()
            if batch is not None:
                taken.extend(batch.values)

    senders = [threading.Thread(target=send, args=(name,)) for name in range(4)]
    taker = threading.Thread(target=take)
    taker.start()
    for thread in senders:
        thread.start()
    for thread in senders:
        thread.join()
    done.set()
    taker.join()
    assert len(taken) == 12_000
    for name in range(4):
        mine = [value for value in taken if value and value.startswith(b"%d " % name)]
        assert mine == [b"%d %d" % (name, number) for number in range(3000)]


# -- columns -----------------------------------------------------------------------------


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(0, 20), st.integers(1, 120))
def test_cuts_are_as_large_as_they_may_be(sizes: list[int], overhead: int, limit: int) -> None:
    pieces = list(cuts(list(accumulate(sizes)), overhead, limit))
    assert [row for start, stop, _ in pieces for row in range(start, stop)] == list(range(len(sizes)))
    for start, stop, size in pieces:
        assert size == sum(sizes[start:stop]) + overhead * (stop - start)
        assert size <= limit or stop - start == 1
        if stop < len(sizes):
            assert size + sizes[stop] + overhead > limit


@pytest.mark.parametrize(
    "columns",
    [
        (["text"], None, None, 1),
        ([b"a", 3], None, None, 1),
        (b"not a column", None, None, 1),
        ("nor this", None, None, 1),
        (5, None, None, 1),
        ([b"a"], [b"k", b"l"], None, 1),
        ([b"a"], ["k"], None, 1),
        ([b"a"], None, [{"h": "text"}], 1),
        ([b"a"], None, [{1: b"v"}], 1),
        ([b"a"], None, [], 1),
        ([b"a"], None, None, [1.5]),
        ([b"a"], None, None, [2**63]),
        ([b"a"], None, None, [1, 2]),
    ],
)
def test_columns_that_are_none_are_refused(columns: Any) -> None:
    with pytest.raises(InvalidInputError):
        check_columns(*columns)


@pytest.mark.parametrize("headers", [5, "text", {"a": "b"}, [("a",)], [("a", None)], {"\ud800": b""}, [b"ab"]])
def test_headers_that_are_none_are_refused(headers: Any) -> None:
    with pytest.raises(InvalidInputError):
        check_headers(headers)


def test_headers_have_one_form() -> None:
    assert check_headers({"a": b"1"}) == check_headers([("a", b"1")]) == ((("a", b"1"),), 10)
    assert check_headers({}) == (None, 0)
