"""Topics by pattern: what matches is read, also what comes later, and what goes leaves quietly."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rayqueue.client.consumer.consumer import Consumer
from rayqueue.client.consumer.wanted import MAX_PATTERN, TopicPattern
from rayqueue.cluster.memberships import MAX_TOPICS
from rayqueue.errors import InvalidInputError
from rayqueue.protocol.calls import GetTopics, JoinGroup, Topics
from rayqueue.testing import wait_for
from tests.unit.client.consumer.consumer_place import Place, Told, place, take

__all__ = ["place"]


class Listener(Told):
    def __init__(self) -> None:
        super().__init__()
        self.gone: list[str] = []

    def deleted(self, topic: str) -> None:
        self.gone.append(topic)


def make(place: Place, *names: str) -> None:
    for name in names:
        place.rq.create_topic(name)
        place.append(1, topic=name)


def like(place: Place, pattern: Any, group: str | None = "billing", **options: Any) -> Consumer:
    settings = {"refresh_ms": 50, **options.pop("settings", {})}
    return place.consumer(group, settings=settings, topics=(), pattern=pattern, **options)


def topics_of(consumer: Consumer) -> set[str]:
    return {each.topic for each in consumer.assignment()}


@pytest.mark.slow
@pytest.mark.parametrize("group", ["billing", None])
def test_what_matches_is_read_also_what_comes_later_and_what_goes_leaves_quietly(
    place: Place, group: str | None
) -> None:
    make(place, "eu-orders", "eu-payments", "us-orders", "eu-orders2")
    told = Listener()
    consumer = like(place, "eu-(orders|payments|late)", group, listener=told)
    assert {record.topic for record in take(consumer, 2)} == {"eu-orders", "eu-payments"}, "the whole name must match"
    make(place, "eu-late", "us-late")
    assert [record.topic for record in take(consumer, 1)] == ["eu-late"]
    place.rq.delete_topic("eu-orders")
    wait_for(lambda: consumer.poll(timeout_ms=20) or topics_of(consumer) == {"eu-payments", "eu-late"}, "the loss")
    if group is not None:
        consumer.commit()  # nothing that was not committed will be read by anybody: there is nothing to tell
    wait_for(lambda: consumer.poll(timeout_ms=20) or told.gone == ["eu-orders"], "the listener is told")
    assert set(consumer.lag().values()) == {0}
    assert {each.topic for each in consumer.lag()} == {"eu-payments", "eu-late"}
    for name in ("eu-payments", "eu-late"):
        place.rq.delete_topic(name)
    wait_for(lambda: consumer.poll(timeout_ms=20) or not consumer.assignment(), "all are gone")
    assert consumer.poll(timeout_ms=20) == []
    make(place, "eu-orders")
    assert [(record.topic, record.offset) for record in take(consumer, 1)] == [("eu-orders", 0)]
    assert "revoked" not in [kind for kind, _ in told.calls]


def test_members_of_one_group_share_what_matches(place: Place) -> None:
    make(place, *(f"eu-{number}" for number in range(4)))
    first, second = (like(place, "eu-.*") for _ in range(2))

    def shared(count: int) -> bool:
        for each in (first, second):
            each.poll(timeout_ms=10)
        return len(topics_of(first)) == len(topics_of(second)) == count

    wait_for(lambda: shared(2), "two topics each")
    make(place, "eu-4", "eu-5")
    wait_for(lambda: shared(3), "three topics each")
    assert topics_of(first) | topics_of(second) == {f"eu-{number}" for number in range(6)}


@pytest.mark.parametrize("group", ["billing", None])
def test_nothing_matches_yet(place: Place, group: str | None) -> None:
    consumer = like(place, "never|later", group)
    assert consumer.poll(timeout_ms=50) == []
    make(place, "later")
    assert len(take(consumer, 1)) == 1


def test_what_is_internal_never_matches() -> None:
    everything = TopicPattern(".*")
    assert everything.matches("orders")
    for name in ("bridge-staging", "spark-staging.2f", "data-staging.nightly"):
        assert not everything.matches(name)


def test_a_topic_that_is_made_again_is_read_from_its_beginning(place: Place) -> None:
    make(place, "eu-orders")
    place.append(9, topic="eu-orders")
    consumer = like(place, "eu-.*")
    assert len(take(consumer, 10)) == 10
    place.rq.delete_topic("eu-orders")
    make(place, "eu-orders")
    place.append(2, topic="eu-orders")
    assert [record.offset for record in take(consumer, 3)] == [0, 1, 2]


def test_without_changes_nothing_is_told_and_nobody_joins_again(place: Place) -> None:
    consumer = like(place, "orders", settings={"refresh_ms": 20})
    wait_for(lambda: consumer.poll(timeout_ms=20) or len(consumer.assignment()) == 2, "both partitions")
    calls = place.coordinator_calls()
    looks = wait_for(lambda: [each for each in calls if isinstance(each, GetTopics)][2:] or None, "some looks")
    assert all(each.unless is not None for each in looks)
    assert not [each for each in calls if isinstance(each, JoinGroup)]
    answer: Topics = place.rq.io.call(consumer._core._routes.coordinator.call(looks[-1]))
    assert answer.topics == ()


def test_a_coordinator_that_fails_over_or_has_forgotten_the_member_is_told_all_again(place: Place) -> None:
    make(place, "eu-0")
    consumer = like(place, "eu-.*", settings={"session_timeout_ms": 60_000})
    assert len(take(consumer, 1)) == 1
    consumer.commit()

    place.rq.change_coordinator()
    make(place, "eu-1")
    assert [record.topic for record in take(consumer, 1)] == ["eu-1"]


def test_more_than_a_member_may_want_is_an_error_that_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    make(place, "eu-0")
    consumer = like(place, "eu-.*")
    assert len(take(consumer, 1)) == 1
    monkeypatch.setattr("rayqueue.cluster.memberships.MAX_TOPICS", 2)
    make(place, "eu-1", "eu-2")
    assert MAX_TOPICS == 1_000

    def refused() -> bool:
        try:
            consumer.poll(timeout_ms=20)
        except InvalidInputError as error:
            return "at most 2 topics" in str(error)
        return False

    wait_for(refused, "the limit")


@pytest.mark.parametrize("wrong", ["(", "", b"eu", 5, "x" * (MAX_PATTERN + 1), "(?P<a>x)(?P<a>y)"])
def test_what_is_no_pattern_is_refused(place: Place, wrong: Any) -> None:
    with pytest.raises(InvalidInputError):
        like(place, wrong)


def test_a_pattern_is_instead_of_topics(place: Place) -> None:
    with pytest.raises(InvalidInputError, match="besides"):
        place.consumer(pattern="orders")
    with pytest.raises(InvalidInputError, match="besides"):
        place.consumer(partitions=[("orders", 0)], pattern="orders")
    compiled = like(place, re.compile("ORDERS", re.IGNORECASE))
    wait_for(lambda: compiled.poll(timeout_ms=20) or len(compiled.assignment()) == 2, "both partitions")
    assert "ORDERS" in repr(compiled)


def test_the_coordinator_is_told_names_and_never_the_pattern(place: Place) -> None:
    """So one that takes for ever to match holds up its own process, and nobody else."""
    sent = place.coordinator_calls()
    consumer = like(place, "o(r+)+ders")
    wait_for(lambda: consumer.poll(timeout_ms=20) or len(consumer.assignment()) == 2, "both partitions")
    assert [each.topics for each in sent if isinstance(each, JoinGroup)] == [("orders",)]
    assert not any("+" in repr(each) for each in sent)
