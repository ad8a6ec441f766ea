"""The public consumer over a small cluster in one process: threads, listeners, delivery, and what ends it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from rayqueue.cli.consume import _place as begin_at
from rayqueue.errors import (
    ClosedError,
    InvalidInputError,
    NotLeaderError,
    OutcomeUnknownError,
    StaleGenerationError,
)
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import Record
from rayqueue.testing import wait_for
from tests.unit.client.consumer.consumer_place import P0, Place, Told, place, take

__all__ = ["place"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offset", "first"), [(3, {0: 3, 1: 3}), (9, {0: 9}), (50, {}), (-2, {0: 8, 1: 3}), (-50, {0: 0, 1: 0})]
)
def test_the_command_begins_at_an_offset_and_never_before_it(place: Place, offset: int, first: dict[int, int]) -> None:
    """Of a partition that has fewer records nothing is shown, rather than all of it."""
    place.append(10)
    place.append(5, number=1)
    consumer = place.consumer(None)
    begin_at(consumer, offset, None)
    found = take(consumer, len(first)) + consumer.poll(timeout_ms=300)
    assert {record.partition: record.offset for record in reversed(found)} == first


def test_what_an_earlier_poll_gave_is_committed_by_itself(place: Place) -> None:
    place.append(10)
    consumer = place.consumer()
    assert len(take(consumer, 10)) == 10
    time.sleep(0.2)
    assert place.committed().get(0, 0) == 0, "the application may still be at work with it"
    consumer.poll(timeout_ms=0)
    wait_for(lambda: place.committed() == {0: 10}, "the commit")


def test_leaving_the_block_commits_what_was_handed_out_and_frees_the_partitions(place: Place) -> None:
    place.append(10)
    with place.consumer() as consumer:
        take(consumer, 10)
    assert place.committed() == {0: 10}
    assert place.owners("billing") == {}


def test_closing_commits_what_is_done_and_not_what_was_handed_out_last(place: Place) -> None:
    place.append(10)
    consumer = place.consumer()
    assert len(consumer.poll(max_records=4, timeout_ms=5000)) == 4
    assert len(consumer.poll(max_records=3, timeout_ms=5000)) == 3
    consumer.close()
    assert place.committed() == {0: 4}
    assert place.owners("billing") == {}
    assert [record.offset for record in take(place.consumer(), 6)] == list(range(4, 10))


def test_iterating_commits_only_what_was_seen(place: Place) -> None:
    place.append(10)
    with place.consumer() as consumer:
        for record in consumer:
            if record.offset == 3:
                break
    assert place.committed() == {0: 4}


def test_an_exception_leaves_the_record_to_the_next(place: Place) -> None:
    place.append(10)

    def application() -> None:
        with place.consumer() as consumer:
            for record in consumer:
                if record.offset == 3:
                    raise RuntimeError("in the application")

    with pytest.raises(RuntimeError):
        application()
    assert place.committed() == {0: 3}


def test_only_what_is_acknowledged_counts_from_the_first_ack_on(place: Place) -> None:
    place.append(10)
    consumer = place.consumer(auto_commit=False)
    records = take(consumer, 10)
    for number in (1, 0, 3):
        consumer.ack(records[number])
    consumer.commit()
    assert place.committed() == {0: 2}
    consumer.ack(records[2])
    consumer.commit_async().result(timeout_ms=5000)
    assert place.committed() == {0: 4}


def test_given_offsets_are_committed_and_go_back_only_if_asked(place: Place) -> None:
    place.append(10)
    consumer = place.consumer(auto_commit=False)
    take(consumer, 10)
    consumer.commit({P0: 7})
    consumer.commit({("orders", 0): {0: 3}})
    assert place.committed() == {0: 7}
    consumer.commit({P0: 3}, rewind=True)
    assert place.committed() == {0: 3}
    with pytest.raises(StaleGenerationError):
        consumer.commit({TopicPartition("orders", 9): 1})


def test_going_back_on_purpose_is_committed_as_such(place: Place) -> None:
    place.append(10)
    consumer = place.consumer(auto_commit=False)
    take(consumer, 10)
    consumer.commit()
    consumer.seek(P0, 2)
    assert consumer.poll(max_records=3)[-1].offset == 4
    consumer.commit()
    assert place.committed() == {0: 5}


def test_at_most_once_has_committed_what_it_hands_out(place: Place) -> None:
    place.append(10)
    consumer = place.consumer(delivery="at_most_once", settings={"max_poll_records": 4})
    assert len(take(consumer, 1)) == 4
    assert place.committed() == {0: 4}
    iterated = iter(consumer)
    assert next(iterated).offset == 4
    assert place.committed() == {0: 8}


def test_a_listener_is_called_by_the_thread_that_polls(place: Place) -> None:
    told = Told()
    consumer = place.consumer(listener=told)
    wait_for(lambda: consumer.poll(timeout_ms=20) or len(consumer.assignment()) == 2, "both partitions")
    consumer.poll(timeout_ms=50)
    other = place.consumer()
    wait_for(lambda: [consumer.poll(timeout_ms=20), other.poll(timeout_ms=20)] and len(other.assignment()) == 1, "one")
    assert sorted(each for kind, names in told.calls if kind == "assigned" for each in names) == [0, 1]
    assert [kind for kind, _ in told.calls][-1] == "revoked"
    consumer.close()
    assert told.calls[-1][0] == "revoked", "closing gives the rest up"
    assert told.threads == {threading.get_ident()}


def test_a_listener_can_seek_and_commit(place: Place) -> None:
    place.append(10)
    place.append(10, 1)

    class Seeking(Told):
        def assigned(self, partitions: Sequence[TopicPartition]) -> None:
            for partition in partitions:
                consumer.seek(partition, 5)
            consumer.commit()

    consumer = place.consumer(listener=Seeking())
    assert sorted((each.partition, each.offset) for each in take(consumer, 10)) == [
        (number, offset) for number in range(2) for offset in range(5, 10)
    ]


def test_a_coroutine_polls_with_a_listener_of_its_kind(place: Place) -> None:
    place.append(10)
    told: list[str] = []

    class Awaited:
        async def assigned(self, partitions: Sequence[TopicPartition]) -> None:
            await asyncio.sleep(0)
            told.append("assigned")

        async def revoked(self, partitions: Sequence[TopicPartition]) -> None:
            told.append("revoked")

        async def lost(self, partitions: Sequence[TopicPartition]) -> None:
            told.append("lost")

    async def application() -> list[Record]:
        consumer = place.consumer(listener=Awaited())
        found: list[Record] = []
        while len(found) < 5:
            found += await consumer.poll_async(max_records=5, timeout_ms=100)
        async for record in consumer:
            found.append(record)
            if len(found) == 10:
                break
        await consumer.commit_async()
        with pytest.raises(InvalidInputError, match="at a time"):
            await asyncio.gather(consumer.poll_async(timeout_ms=200), consumer.poll_async(timeout_ms=200))
        await consumer.close_async()
        return found

    assert [record.offset for record in asyncio.run(application())] == list(range(10))
    assert told[0] == "assigned"
    assert told[-1] == "revoked"
    assert place.committed() == {0: 10}


@pytest.mark.slow
def test_lost_work_cannot_be_committed_and_says_so(place: Place) -> None:
    place.append(10)
    consumer = place.consumer(auto_commit=False, settings={"max_poll_interval_ms": 200})
    take(consumer, 10)
    wait_for(lambda: not consumer.assignment(), "the group to go on without it")
    with pytest.raises(StaleGenerationError):
        consumer.commit()
    assert len(take(consumer, 10)) == 10, "it joins again with the next poll, and gets what it has not committed"


@pytest.mark.slow
@pytest.mark.parametrize("half_way", [False, True])
def test_work_that_is_lost_on_the_way_to_its_commit_is_not_reported_as_committed(place: Place, half_way: bool) -> None:
    place.append(10)
    consumer = place.consumer(auto_commit=False)
    take(consumer, 10)
    membership = consumer._core._membership
    assert membership is not None
    busy = threading.Event()
    announce = consumer._sub.announce

    def announced(*arguments: Any, **options: Any) -> None:
        if half_way:
            busy.set()
            time.sleep(0.2)
        announce(*arguments, **options)

    def lose() -> None:
        if not half_way:
            busy.set()
            time.sleep(0.2)
        membership._lose(list(membership._held.values()))

    consumer._sub.announce = announced  # type: ignore[method-assign]
    consumer._io.loop.call_soon_threadsafe(lose)
    assert busy.wait(10)
    with pytest.raises(StaleGenerationError):
        consumer.commit()
    assert place.committed() == {}


def test_more_partitions_are_found_without_a_group(place: Place) -> None:
    place.append(3)
    consumer = place.consumer(None, settings={"refresh_ms": 50, "start": "latest"})
    consumer.seek_to_beginning()
    assert len(take(consumer, 3)) == 3
    place.rq.alter_topic("orders", partitions=3)
    place.append(2, 2)
    assert [each.partition for each in take(consumer, 2)] == [2, 2], "from its beginning, though start is latest"


def test_chosen_partitions_commit_for_a_group_without_joining_it(place: Place) -> None:
    place.append(5, 1)
    with place.consumer(partitions=[("orders", 1)]) as consumer:
        assert {each.partition for each in take(consumer, 5)} == {1}
    assert place.committed(1) == {0: 5}
    assert place.owners("billing") == {}


@pytest.mark.slow
def test_a_consumer_that_is_dropped_leaves_its_group(place: Place) -> None:
    place.consumer()
    wait_for(lambda: place.consumers[0].poll(timeout_ms=20) or len(place.owners("billing")) == 1, "a member")
    place.consumers.clear()
    gc.collect()
    wait_for(lambda: place.owners("billing") == {}, "the group to be empty")


def test_nothing_works_after_close(place: Place) -> None:
    consumer = place.consumer()
    consumer.close()
    consumer.close()
    for call in (consumer.poll, consumer.poll_arrow, consumer.commit, consumer.lag, lambda: consumer.seek(P0, 0)):
        with pytest.raises(ClosedError):
            call()
    assert list(consumer) == []


def test_impossible_wishes_are_refused_before_anything_starts(place: Place) -> None:
    wishes: list[dict[str, Any]] = [
        {"group": None, "delivery": "exactly_once"},
        {"delivery": "exactly_once", "isolation": "read_uncommitted"},
        {"isolation": "read_everything"},
        {"delivery": "maybe"},
        {"ack": "sometimes"},
        {"group": None, "delivery": "at_most_once"},
        {"group": None, "pin": True},
        {"partitions": []},
        {"partitions": ["orders"]},
        {"heartbeat_ms": 0},
    ]
    for options in wishes:
        with pytest.raises(InvalidInputError):
            place.consumer(**options)


@pytest.mark.slow
def test_no_call_waits_for_ever_for_a_partition_that_nobody_leads(place: Place) -> None:
    """A leader that hangs, and nobody who takes over: the call ends with its deadline, and says what it waited for."""
    consumer = place.consumer(None, client_settings={"call_timeout_ms": 300}, partitions=[P0])
    consumer.seek(P0, 0)
    with place.rq.holding("orders", 0), pytest.raises(OutcomeUnknownError):
        consumer.peek("orders", 0)
    with place.rq.without_leader("orders"):
        late = place.consumer(None, client_settings={"call_timeout_ms": 300}, partitions=[P0])
        with pytest.raises(NotLeaderError):
            late.seek(P0, 0)
