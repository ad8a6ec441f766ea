"""A topic that is deleted, or deleted and made again, under those who read it: they hear of it, and miss nothing."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest

from rayqueue.client.consumer import group as member
from rayqueue.client.consumer.consumer import Consumer
from rayqueue.errors import RayQueueError, TopicRecreatedError, UnknownPartitionError, UnknownTopicError
from rayqueue.testing import wait_for
from tests.unit.client.consumer.consumer_place import P0, Place, Told, place, take

pytestmark = pytest.mark.slow

__all__ = ["place"]


def error_of(consumer: Consumer) -> RayQueueError | None:
    """What a poll raises; it returns in its time, whatever it does."""
    began_s = time.monotonic()
    try:
        consumer.poll(timeout_ms=50)
    except RayQueueError as error:
        return error
    finally:
        assert time.monotonic() - began_s < 5
    return None


def recreate(place: Place, records: int, partitions: int = 2) -> None:
    place.delete()
    place.create(partitions)
    for number in range(partitions):
        place.append(records, number)


def test_a_group_reads_all_of_the_new_topic(place: Place) -> None:
    place.append(10)
    told = Told()
    consumer = place.consumer(listener=told)
    assert len(take(consumer, 10)) == 10
    wait_for(lambda: consumer.poll(timeout_ms=20) or len(consumer.assignment()) == 2, "both partitions")
    consumer.commit()
    recreate(place, 25)
    found = take(consumer, 50)
    assert sorted((each.partition, each.offset) for each in found) == [(n, o) for n in (0, 1) for o in range(25)]
    kinds = [kind for kind, _ in told.calls]
    assert "lost" in kinds
    assert kinds.index("lost") < len(kinds) - 1
    assert kinds[-1] == "assigned"
    assert "revoked" not in kinds, "there was nothing left that could be committed"
    consumer.commit()
    assert [place.committed(number) for number in (0, 1)] == [{0: 25}, {0: 25}]


def test_a_new_topic_with_fewer_partitions_leaves_nothing_behind(place: Place) -> None:
    consumer = place.consumer()
    wait_for(lambda: consumer.poll(timeout_ms=20) or len(consumer.assignment()) == 2, "both partitions")
    recreate(place, 5, partitions=1)
    assert len(take(consumer, 5)) == 5
    assert consumer.assignment() == {P0}


def test_a_group_is_told_when_its_topic_stays_away(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "_MISSING_S", 0.2)
    place.append(3)
    consumer = place.consumer()
    assert len(take(consumer, 3)) == 3
    place.delete()
    error = wait_for(lambda: error_of(consumer), "an error")
    assert isinstance(error, UnknownTopicError)
    assert "orders" in str(error)
    place.create(1)
    place.append(4)
    found: list[Any] = []

    def reads_again() -> bool:
        with suppress(UnknownTopicError):
            found.extend(consumer.poll(timeout_ms=50))
        return len(found) == 4

    wait_for(reads_again, "the new topic's records")


def test_a_group_of_several_topics_goes_on_with_the_others(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "_MISSING_S", 0.1)
    place.rq.create_topic("payments")
    told = Told()
    consumer = place.consumer(topics=("orders", "payments"), listener=told)
    wait_for(lambda: consumer.poll(timeout_ms=20) or len(consumer.assignment()) == 3, "all partitions")
    place.delete()
    wait_for(lambda: consumer.poll(timeout_ms=20) or "lost" in [kind for kind, _ in told.calls], "the loss")
    time.sleep(0.2)
    place.append(2, topic="payments")
    assert [record.topic for record in take(consumer, 2)] == ["payments"] * 2


class Listener(Told):
    def __init__(self) -> None:
        super().__init__()
        self.gone: list[str] = []

    def deleted(self, topic: str) -> None:
        self.gone.append(topic)


READERS: Any = [("billing", None), (None, None), (None, [P0]), ("billing", [P0])]


@pytest.mark.parametrize(("group", "chosen"), READERS)
def test_what_is_deleted_is_an_error_or_an_event_as_configured(
    group: str | None, chosen: Any, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "_MISSING_S", 0.2)
    options = {} if chosen is None else {"partitions": chosen}
    told = Listener()
    strict = place.consumer(group, settings={"refresh_ms": 50}, **options)
    other = None if group is None else f"{group}-drops"
    drops = place.consumer(other, settings={"refresh_ms": 50, "on_topic_deleted": "drop"}, listener=told, **options)
    place.append(3)
    assert len(take(strict, 3)) == len(take(drops, 3)) == 3
    place.delete()
    error = wait_for(lambda: error_of(strict), "an error")
    assert isinstance(error, UnknownTopicError)
    assert error.details["topic"] == "orders"
    wait_for(lambda: drops.poll(timeout_ms=20) or told.gone == ["orders"], "the event")
    assert [kind for kind, _ in told.calls][-1] == "lost", "its partitions went first"
    deadline_s = time.monotonic() + 0.4
    while time.monotonic() < deadline_s:
        assert drops.poll(timeout_ms=20) == []
    if group is not None:
        drops.commit()  # what was not committed will be read by nobody
    assert drops.assignment() == set()
    assert drops.lag() == {} or chosen
    place.create(2)
    place.append(4)
    assert [record.offset for record in take(drops, 4)] == list(range(4))
    assert told.gone == ["orders"]


@pytest.mark.parametrize("mode", ["raise", "drop"])
def test_a_lone_consumer_of_several_topics_goes_on_with_the_others(place: Place, mode: str) -> None:
    place.rq.create_topic("payments")
    told = Listener()
    settings = {"refresh_ms": 50, "on_topic_deleted": mode}
    consumer = place.consumer(None, settings=settings, topics=("orders", "payments"), listener=told)
    wait_for(lambda: consumer.poll(timeout_ms=20) or len(consumer.assignment()) == 3, "all partitions")
    place.delete()
    wait_for(lambda: consumer.poll(timeout_ms=20) or told.gone == ["orders"], "the event")
    place.append(2, topic="payments")
    assert [record.topic for record in take(consumer, 2)] == ["payments"] * 2


def test_a_partition_that_is_not_made_again_is_told(place: Place) -> None:
    consumer = place.consumer(None, settings={"refresh_ms": 50}, partitions=[("orders", 1)])
    wait_for(lambda: consumer.poll(timeout_ms=20) or len(consumer.assignment()) == 1, "its partition")
    recreate(place, 5, partitions=1)
    error = wait_for(lambda: error_of(consumer), "an error")
    assert isinstance(error, UnknownPartitionError)


@pytest.mark.parametrize("listened", [False, True])
def test_a_poll_that_commits_at_a_revocation_keeps_its_time(place: Place, listened: bool) -> None:
    place.append(10)
    place.append(10, number=1)
    told = Listener()
    first = place.consumer(listener=told if listened else None, settings={"session_timeout_ms": 20_000})
    assert len(take(first, 20)) == 20
    with place.rq.holding("orders", request="commit"):
        second = place.consumer(settings={"session_timeout_ms": 20_000})
        second.poll(timeout_ms=10)
        wait_for(lambda: _longest_s(first) or len(first.assignment()) == 1, "one is to go to the other")
        for _ in range(10):
            assert _longest_s(first) < 2
            assert second.poll(timeout_ms=10) == []
        assert "revoked" not in [kind for kind, _ in told.calls], "not before what was done is committed"
        kept = next(iter(first.assignment())).partition
        place.append(1, number=kept)
        assert len(take(first, 1)) == 1, "the others are read on"

    def moved() -> bool:
        for each in (first, second):
            each.poll(timeout_ms=20)
        return len(second.assignment()) == 1

    wait_for(moved, "the other has it")
    if listened:
        assert ("revoked", [1 - kept]) in told.calls
    assert place.committed(1 - kept) == {0: 10}, "nothing is read twice"


def _longest_s(consumer: Consumer) -> float:
    began_s = time.monotonic()
    consumer.poll(timeout_ms=20)
    return time.monotonic() - began_s


@pytest.mark.parametrize(("group", "chosen"), [(None, None), (None, [P0]), ("billing", [P0])])
def test_without_a_membership_the_new_topic_is_read_from_its_beginning(
    place: Place, group: str | None, chosen: Any
) -> None:
    place.append(10)
    options = {} if chosen is None else {"partitions": chosen}
    consumer = place.consumer(group, settings={"refresh_ms": 60_000, "start": "latest"}, **options)
    consumer.seek_to_beginning()
    assert [record.offset for record in take(consumer, 10)] == list(range(10))
    recreate(place, 12)
    wanted = 24 if chosen is None else 12
    found = take(consumer, wanted)
    assert [record.offset for record in found if record.partition == 0] == list(range(12)), "never at the old offset"
    assert len(found) == wanted


def test_with_start_error_a_lone_consumer_is_told(place: Place) -> None:
    place.append(10)
    consumer = place.consumer(None, settings={"start": "error"}, partitions=[P0])
    consumer.seek(P0, 0)
    assert len(take(consumer, 10)) == 10
    recreate(place, 12)
    error = wait_for(lambda: error_of(consumer), "an error")
    assert isinstance(error, TopicRecreatedError)
    consumer.seek(P0, 10)
    assert isinstance(wait_for(lambda: error_of(consumer), "an error"), TopicRecreatedError)


@pytest.mark.parametrize("options", [{}, {"partitions": [P0]}])
def test_a_lone_consumer_is_told_when_its_topic_is_deleted(place: Place, options: Any) -> None:
    place.append(3)
    consumer = place.consumer(None, **options)
    assert len(take(consumer, 3)) == 3
    place.delete()
    assert isinstance(wait_for(lambda: error_of(consumer), "an error"), UnknownTopicError)


def test_what_is_bound_to_the_old_topic_does_not_reach_the_new_one(place: Place) -> None:
    """Commits, seeks and questions of a consumer that has not heard of it yet."""
    place.append(10)
    consumer = place.consumer("billing", settings={"refresh_ms": 60_000}, partitions=[P0], auto_commit=False)
    assert len(take(consumer, 10)) == 10
    place.delete()
    place.create(2)
    place.append(20)
    with pytest.raises(TopicRecreatedError):
        consumer.commit({P0: 10})
    assert place.committed() == {}, "the group has read nothing of this topic"
