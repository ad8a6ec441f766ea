"""The sender against a scripted leader with the real partition behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rayqueue.client.producer.callbacks import CallbackThread
from rayqueue.client.producer.delivery import Deliveries, Delivery, Part, when_known
from rayqueue.errors import (
    ClosedError,
    DeliveryTimeoutError,
    DiskFullError,
    InvalidInputError,
    NotLeaderError,
    OutcomeUnknownError,
    OversizedRecordError,
    QueueFullError,
    TopicRecreatedError,
    UnknownTopicError,
)
from rayqueue.net.write_window import WriteWindow
from rayqueue.protocol.frames import Kind
from rayqueue.records import BatchHeader, RecordBatch
from tests.unit.client.producer import scripted
from tests.unit.client.producer.scripted import Bench

Make = Callable[..., Bench]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Bench] = []

    def bench(*args: Any, **kwargs: Any) -> Bench:
        made.append(Bench(*args, **kwargs))
        return made[-1]

    yield bench
    for each in made:
        each.close()


def values(count: int, first: int = 0) -> list[bytes]:
    return [b"%06d" % number for number in range(first, first + count)]


def send_all(bench: Bench, count: int, first: int = 0) -> list[Delivery]:
    return [bench.send(value) for value in values(count, first)]


def offsets(deliveries: list[Delivery]) -> list[int | None]:
    return [delivery.result(0).offset for delivery in deliveries]


SMALL: dict[str, Any] = {"batch_bytes": 54}
"""Three records of ``values`` to a batch."""


def test_records_arrive_in_order_and_know_their_offsets(make: Make) -> None:
    bench = make(**SMALL)
    deliveries = send_all(bench, 100)
    bench.flush(1)
    assert bench.partition.records == values(100)
    assert offsets(deliveries) == list(range(100))
    assert deliveries[7].result(0) == ("orders", 0, 7, 1)


def test_a_lone_record_goes_at_once_and_those_after_it_fill_a_batch_meanwhile(make: Make) -> None:
    bench = make()
    bench.send(b"first")
    bench.flush(1)
    attempts = bench.partition.attempts
    for value in values(10):
        bench.send(value)
        bench.run(0.0001)
    bench.flush(1)
    assert bench.partition.attempts == attempts + 2  # the first of them, and the rest


def test_linger_waits_for_company(make: Make) -> None:
    bench = make(linger_ms=50)
    delivery = bench.send(b"a")
    bench.run(0.04)
    assert not delivery.done()
    bench.send(b"b")
    bench.run(0.03)
    assert delivery.done()
    assert bench.partition.attempts == 1


def test_no_more_is_in_flight_than_allowed(make: Make) -> None:
    bench = make([scripted.SILENT], in_flight_batches=4, **SMALL)
    send_all(bench, 60)
    bench.run(0.5)
    assert bench.partition.attempts == 4


@pytest.mark.parametrize(
    "script",
    [
        [scripted.NOT_LEADER],
        [scripted.OK, scripted.BROKEN],
        [scripted.OK, scripted.BROKEN_WRITTEN],
        [scripted.LOST_WRITTEN, scripted.OK, scripted.LOST],
        [scripted.OK, scripted.LATE],
        [scripted.OK, scripted.DISK_FULL] * 3,
        [scripted.OK, scripted.SILENT],
        [scripted.OK, scripted.SILENT_WRITTEN],
        [scripted.SLOW, scripted.OK, scripted.SLOW, scripted.NOT_LEADER],
        [scripted.FULL] * 20,
    ],
    ids=str,
)
def test_what_passes_is_survived_without_loss_double_or_disorder(make: Make, script: list[str]) -> None:
    bench = make(script, **SMALL)
    deliveries = send_all(bench, 100)
    bench.flush(30)
    assert bench.partition.records == values(100)
    assert offsets(deliveries) == list(range(100))


def test_a_full_queue_is_probed_with_one_batch(make: Make) -> None:
    bench = make([scripted.FULL] * 30, **SMALL)
    send_all(bench, 48)
    bench.run(3)
    assert not bench.partition.records
    assert bench.partition.attempts < 16 + 15  # the first window, then one at a time
    bench.flush(30)
    assert bench.partition.records == values(48)


def test_a_full_queue_fails_its_batch_alone_if_that_is_wanted(make: Make) -> None:
    bench = make([scripted.OK, scripted.FULL], on_full="raise", **SMALL)
    deliveries = send_all(bench, 12)
    bench.flush(1)
    for delivery in deliveries[3:6]:
        with pytest.raises(QueueFullError):
            delivery.result(0)
    assert bench.partition.records == values(3) + values(6, 6)
    assert offsets(deliveries[:3] + deliveries[6:]) == list(range(9))


def test_a_batch_is_cut_where_the_room_ends_and_goes_on_when_there_is_more(make: Make) -> None:
    bench = make(max_backlog_records=100)
    deliveries = send_all(bench, 1000)
    bench.run(0.1)
    assert bench.partition.records == values(100)
    assert [delivery.done() for delivery in deliveries] == [True] * 100 + [False] * 900
    for consumed in (1, 30, 69):
        bench.partition.consume(consumed)
        bench.run(0.02)  # woken at once, not after a pause
        assert bench.partition.log.partition.backlog().records == 100
    for _ in range(9):
        bench.partition.consume(100)
        bench.run(0.02)
    bench.flush(1)
    assert bench.partition.records == values(1000)
    assert offsets(deliveries) == list(range(1000))
    assert deliveries[555].result(0) == ("orders", 0, 555, 1)


def test_by_bytes_it_is_the_same_and_never_more(make: Make) -> None:
    bench = make(max_backlog_bytes=2000)
    deliveries = send_all(bench, 300)
    for _ in range(200):
        bench.run(0.01)
        assert 0 < bench.partition.log.partition.backlog().size_bytes <= 2000
        bench.partition.consume(7)
        if deliveries[-1].done():
            break
    bench.flush(1)
    assert bench.partition.records == values(300)
    assert offsets(deliveries) == list(range(300))


def test_a_record_that_never_fits_fails_alone(make: Make) -> None:
    bench = make(max_backlog_bytes=2000)
    before, large, after = bench.send(b"a"), bench.send(bytes(5000)), bench.send(b"b")
    bench.flush(1)
    assert isinstance(large.exception(0), OversizedRecordError)
    assert (before.result(0).offset, after.result(0).offset) == (0, 1)


def test_what_finds_no_room_in_time_is_not_written_and_says_so(make: Make) -> None:
    bench = make(max_backlog_records=10, delivery_timeout_ms=500)
    deliveries = send_all(bench, 30)
    bench.flush(0.6)
    assert offsets(deliveries[:10]) == list(range(10))
    assert {type(delivery.exception(0)) for delivery in deliveries[10:]} == {QueueFullError}
    bench.partition.consume(10)
    later = bench.send(b"later")
    bench.flush(1)
    assert bench.partition.records == [*values(10), b"later"]
    assert later.result(0).offset == 10


def test_if_that_is_wanted_what_finds_no_room_fails_at_once_and_what_fits_is_written(make: Make) -> None:
    bench = make(max_backlog_records=10, on_full="raise")
    deliveries = send_all(bench, 30)
    bench.flush(0.1)
    assert offsets(deliveries[:10]) == list(range(10))
    assert {type(delivery.exception(0)) for delivery in deliveries[10:]} == {QueueFullError}
    bench.partition.consume(4)
    later = send_all(bench, 6)
    bench.flush(0.1)
    assert offsets(later[:4]) == [10, 11, 12, 13]
    assert isinstance(later[4].exception(0), QueueFullError)


def test_callbacks_and_waiters_of_a_batch_that_is_cut_are_told_of_their_own_record(make: Make) -> None:
    bench = make(max_backlog_records=10)
    deliveries = send_all(bench, 25)
    told: list[tuple[int, int | None]] = []
    for number, delivery in enumerate(deliveries):
        delivery.add_done_callback(lambda each, number=number: told.append((number, each.result(0).offset)))  # type: ignore[misc]
    whole = Deliveries([Part(deliveries[0]._outcome, 0, 25)])
    bench.run(0.05)
    CallbackThread.shared().drain(5)
    assert told == [(number, number) for number in range(10)]
    assert not whole.done()
    bench.partition.consume(10)
    bench.run(0.05)
    bench.partition.consume(10)
    bench.flush(1)
    CallbackThread.shared().drain(5)
    assert told == [(number, number) for number in range(25)]
    assert [each.offset for each in whole.result(0)] == list(range(25))


def test_a_bad_batch_fails_alone_and_those_behind_it_get_a_new_epoch(make: Make) -> None:
    bench = make([scripted.SLOW, scripted.INVALID], **SMALL)
    deliveries = send_all(bench, 12)
    bench.flush(1)
    for delivery in deliveries[3:6]:
        with pytest.raises(InvalidInputError):
            delivery.result(0)
    assert bench.partition.records == values(3) + values(6, 6)
    stamps = [(header.producer_id, header.epoch, header.sequence) for header in _headers(bench)]
    assert stamps == [(1, 0, 0), (1, 1, 0), (1, 1, 3)]


def _headers(bench: Bench) -> list[BatchHeader]:
    return [BatchHeader.parse(payload) for payload in bench.partition.log.payloads]


def test_after_the_timeout_what_may_be_written_is_unknown_and_what_is_not_has_its_error(make: Make) -> None:
    bench = make([scripted.SILENT], delivery_timeout_ms=500, in_flight_batches=1, **SMALL)
    bench.partition.failed = lambda error: None  # type: ignore[method-assign]  # nobody else leads
    sent, waiting = send_all(bench, 3), send_all(bench, 3, first=3)
    bench.flush(0.6)
    with pytest.raises(DeliveryTimeoutError, match="may be written"):
        sent[0].result(0)
    with pytest.raises(DeliveryTimeoutError, match="not written"):
        waiting[0].result(0)


@pytest.mark.parametrize("unsure", [scripted.SILENT_WRITTEN, scripted.BROKEN_WRITTEN, scripted.LOST_WRITTEN])
def test_a_refusal_after_an_unsure_attempt_is_unknown(make: Make, unsure: str) -> None:
    bench = make([unsure, scripted.INVALID], **SMALL)
    delivery = bench.send(b"a")
    bench.flush(10)
    assert bench.partition.records == [b"a"]
    with pytest.raises(OutcomeUnknownError, match="earlier attempt"):
        delivery.result(0)


def test_a_disk_that_stays_full_is_the_error_in_the_end_and_nothing_is_written(make: Make) -> None:
    bench = make([scripted.DISK_FULL] * 100, delivery_timeout_ms=300)
    delivery = bench.send(b"a")
    bench.flush(1)
    with pytest.raises(DiskFullError):
        delivery.result(0)
    assert not bench.partition.records


def test_nobody_leads_until_it_is_too_late(make: Make) -> None:
    bench = make(delivery_timeout_ms=300)
    bench.partition.leaderless = NotLeaderError("nobody leads")
    delivery = bench.send(b"a")
    bench.flush(0.4)
    with pytest.raises(NotLeaderError):
        delivery.result(0)
    bench.partition.leaderless = None
    later = bench.send(b"b")
    bench.flush(2)
    assert later.result(0).offset == 0


def test_a_batch_given_up_arrives_before_later_ones_or_never(make: Make) -> None:
    """The first one is on its way for longer than its time; a later one must not overtake it and be overtaken."""
    bench = make([scripted.LATE], delivery_timeout_ms=20, in_flight_batches=1)
    lost = bench.send(b"0")
    bench.run(2.5 * scripted.LATENCY_S)  # a number, a leader, and it is on its way
    bench.partition.leaderless = NotLeaderError("election")
    bench.flush(0.2)
    with pytest.raises(DeliveryTimeoutError):
        lost.result(0)
    bench.partition.leaderless = None
    bench.send(b"1")
    bench.flush(1)
    bench.run(0.2)
    assert bench.partition.records in ([b"0", b"1"], [b"1"])


def test_a_partition_that_forgot_the_producer_is_told_a_new_epoch(make: Make) -> None:
    bench = make(producers=1)
    send_all(bench, 3)
    bench.flush(1)
    bench.partition.write(RecordBatch.encode([b"other"], timestamps=1, producer_id=99))
    later = send_all(bench, 3, first=3)
    bench.flush(1)
    assert [delivery.result(0).offset for delivery in later] == [4, 5, 6]


def test_a_fenced_producer_takes_another_number(make: Make) -> None:
    bench = make()
    send_all(bench, 1)
    bench.flush(1)
    bench.partition.write(RecordBatch.encode([b"other"], timestamps=1, producer_id=1, epoch=7))
    fenced = bench.send(b"x")
    bench.flush(1)
    assert type(fenced.exception(0)).__name__ == "ProducerFencedError"
    later = bench.send(b"y")
    bench.flush(1)
    assert later.result(0).offset == 2


def test_a_topic_that_is_gone_fails_what_waits_for_it(make: Make) -> None:
    bench = make()
    bench.routes.error = UnknownTopicError("no topic orders")
    delivery = bench.send(b"a")
    bench.flush(1)
    with pytest.raises(UnknownTopicError):
        delivery.result(0)


def test_a_topic_that_is_deleted_is_noticed_though_nobody_is_left_to_say_so(make: Make) -> None:
    bench = make()
    bench.send(b"a")
    bench.flush(1)

    async def nobody() -> Any:
        await asyncio.sleep(30)

    bench.partition.leader = nobody  # type: ignore[method-assign]
    bench.partition.channels[-1].break_off()
    bench.routes.error = UnknownTopicError("no topic orders")
    delivery = bench.send(b"b")
    bench.flush(3)
    with pytest.raises(UnknownTopicError):
        delivery.result(0)


@pytest.mark.parametrize("answer", [scripted.SILENT_WRITTEN, scripted.BROKEN, scripted.NOT_LEADER])
def test_what_was_for_a_deleted_topic_is_not_written_into_the_next_one(make: Make, answer: str) -> None:
    bench = make([scripted.OK, *[answer] * 20], delivery_timeout_ms=60_000)
    acknowledged = bench.send(b"for the old one")
    bench.flush(1)
    sent = bench.send(b"under way")
    bench.run(0.01)
    waiting = bench.send(b"behind it")
    bench.routes.topic_id = 2
    bench.partition.lose_everything()
    bench.flush(30)
    assert acknowledged.exception() is None
    for delivery in (sent, waiting):
        assert isinstance(delivery.exception(), TopicRecreatedError)
    assert bench.partition.records == [], "not a record of the old topic is in the new one"


def test_acks_of_the_leader_alone(make: Make) -> None:
    bench = make(acks="leader")
    delivery = bench.send(b"a")
    bench.flush(1)
    assert delivery.done()
    assert set(bench.partition.channels[0].kinds) == {Kind.APPEND_LEADER}


def test_what_only_the_leader_had_may_be_lost_and_the_rest_goes_on(make: Make) -> None:
    bench = make([], acks="leader", **SMALL)
    send_all(bench, 6)
    bench.flush(1)
    bench.partition.lose_everything()
    later = send_all(bench, 3, first=6)
    bench.flush(5)
    assert bench.partition.records == values(3, 6)
    assert later[0].exception(0) is None


def test_without_acks_a_record_is_done_when_it_is_handed_over(make: Make) -> None:
    bench = make(acks="none", **SMALL)
    deliveries = send_all(bench, 9)
    bench.flush(1)
    assert bench.partition.records == values(9)
    assert offsets(deliveries) == [None] * 9
    assert {header.producer_id for header in _headers(bench)} == {0}


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compression(make: Make, compression: str) -> None:
    bench = make(compression=compression)
    for _ in range(200):
        bench.send(b"the same again and again")
    bench.flush(1)
    assert bench.partition.records == [b"the same again and again"] * 200
    assert _headers(bench)[-1].compression


def test_closing_reports_what_is_left(make: Make) -> None:
    bench = make([scripted.SILENT], in_flight_batches=1, **SMALL)
    sent, waiting = send_all(bench, 3), send_all(bench, 3, first=3)
    bench.run(0.1)
    bench.sender.close()
    assert isinstance(sent[0].exception(0), OutcomeUnknownError)
    assert isinstance(waiting[0].exception(0), ClosedError)


def test_one_producer_id_for_all_partitions_and_few_questions(make: Make) -> None:
    bench = make(partitions=3)
    for number in range(3):
        bench.send(b"a", partition=number)
    bench.flush(1)
    assert bench.routes.ids == 16
    assert {BatchHeader.parse(each.log.payloads[0]).producer_id for each in bench.partitions} == {1}


def test_a_bug_in_the_writer_fails_what_waits_for_it_and_nothing_later(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make([scripted.OK, scripted.NOT_LEADER])
    bench.send(b"0")
    bench.flush(1)
    with monkeypatch.context() as patched:
        patched.setattr(WriteWindow, "connected", lambda *_: 1 / 0)
        lost = bench.send(b"1")
        bench.flush(1)
    with pytest.raises(OutcomeUnknownError, match="see the log"):
        lost.result(0)
    assert "ZeroDivisionError" in caplog.text
    later = bench.send(b"2")
    bench.flush(1)
    assert later.result(0).offset == 1
    assert _headers(bench)[-1].epoch == 1, "what was given up must not come behind it"


# -- any script --------------------------------------------------------------------------


@st.composite
def stories(draw: st.DrawFn) -> tuple[list[str], list[tuple[float, int]], dict[str, Any]]:
    script = draw(st.lists(st.sampled_from(scripted.ACTIONS), max_size=25))
    gaps = st.sampled_from([0.0, 0.0, 0.0, 0.001, 0.01, 0.3])
    sends = draw(st.lists(st.tuples(gaps, st.integers(0, 1)), min_size=1, max_size=40))
    options = {
        "in_flight_batches": draw(st.sampled_from([1, 2, 5, 32])),
        "batch_bytes": draw(st.sampled_from([18, 54, 500])),
        "linger_ms": draw(st.sampled_from([0, 0, 5])),
        "on_full": draw(st.sampled_from(["block", "raise"])),
        "delivery_timeout_ms": draw(st.sampled_from([15, 60, 400, 3000, 60_000])),
        "max_backlog_records": draw(st.sampled_from([None, None, 1, 4, 10])),
        "max_backlog_bytes": draw(st.sampled_from([None, None, 900, 1500])),
    }
    return script, sends, options


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(story=stories(), seed=st.integers(0, 3))
@example(
    # The second batch is given up on its way, while the first is surely not written; then the first one is, by another
    # attempt, and the second one's first attempt arrives behind it after all.
    story=(
        ["full", "late", "not leader", "lost, written", "not leader", "not leader", "not leader"],
        [(0.0, 0), (0.0, 0)],
        {
            "in_flight_batches": 2,
            "batch_bytes": 18,
            "linger_ms": 0,
            "on_full": "block",
            "delivery_timeout_ms": 400,
            "max_backlog_records": None,
            "max_backlog_bytes": None,
        },
    ),
    seed=0,
)
def test_whatever_happens_each_record_has_one_true_outcome(
    story: tuple[list[str], list[tuple[float, int]], dict[str, Any]], seed: int
) -> None:
    script, sends, options = story
    bench = Bench(script, lanes=2, seed=seed, **options)
    outcomes: list[int] = []
    deliveries: list[Delivery] = []
    sent_lanes: list[int] = []
    for number, (gap_s, lane) in enumerate(sends):
        if gap_s:
            bench.run(gap_s)
        delivery = bench.send(b"%06d" % number, lane=lane)
        at = delivery._position
        when_known([(delivery._outcome, at, at + 1)], partial(outcomes.append, number))
        deliveries.append(delivery)
        sent_lanes.append(lane)
    slack_s = 0.3

    def consume() -> None:
        bench.partition.consume(3)
        bench.loop.call_later(0.02, consume)

    bench.loop.call_later(0.02, consume)
    bench.flush(options["delivery_timeout_ms"] / 1000 + slack_s)
    bench.run(0.5)  # what is late arrives
    # Each is resolved once.
    assert sorted(outcomes) == list(range(len(sends)))
    records = [int(value or b"") for value in bench.partition.records]
    # Nothing is doubled, and each lane is in its order.
    for lane in (0, 1):
        of_lane = [number for number in records if sent_lanes[number] == lane]
        assert of_lane == sorted(set(of_lane))
    assert [sent_lanes[number] for number in records] == bench.partition.lanes
    for number, delivery in enumerate(deliveries):
        error = delivery.exception(0)
        if error is None:
            assert records[delivery.result(0).offset or 0] == number  # where it says
        elif not isinstance(error, OutcomeUnknownError):
            assert number not in records, f"reported as not written: {error!r}"
    bench.close()
