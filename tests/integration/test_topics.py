"""Topics: create, describe, alter, delete, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rayqueue
from rayqueue.actors.keeper.nodes import found_actors
from rayqueue.errors import (
    InvalidInputError,
    OversizedRecordError,
    TopicDiffersError,
    TopicExistsError,
    TopicRecreatedError,
    UnknownGroupError,
    UnknownTopicError,
)
from rayqueue.protocol.calls import Commit
from rayqueue.protocol.topics import TopicPartition
from rayqueue.testing import wait_for
from tests.integration.ray_clusters import ray_cluster

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def rq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rayqueue.RayQueue]:
    with ray_cluster("b1"):
        yield rayqueue.connect(data_dir=tmp_path_factory.mktemp("data"))


def actors_of(topic: str) -> list[str]:
    return sorted(name for name in found_actors("rayqueue") if name.startswith(f"rayqueue/{topic}-"))


def data_of(rq: rayqueue.RayQueue, topic: str) -> list[Path]:
    return sorted(rq.settings.data_dir.glob(f"{topic}-*/*"))


def test_a_topic_is_made_described_altered_and_deleted(rq: rayqueue.RayQueue) -> None:
    progress: list[tuple[int, int]] = []
    made = rq.create_topic(
        "orders", partitions=2, replication=1, retention_bytes=10**9, on_progress=lambda *told: progress.append(told)
    )
    assert progress == [(1, 2), (2, 2)]
    assert [info.name for info in rq.topics()] == ["orders"]
    assert len(actors_of("orders")) == len([each for each in data_of(rq, "orders") if each.is_dir()]) == 2

    told = rq.topic("orders")
    assert told.settings == made.settings
    assert [(each.number, each.leader, each.start_offset, each.end_offset) for each in told.partitions] == [
        (0, "b1", 0, 0),
        (1, "b1", 0, 0),
    ]
    assert all(each.replicas[0].role == "leader" and each.replicas[0].problem is None for each in told.partitions)
    assert all((each.healthy, each.in_sync) == (1, 1) for each in told.partitions)
    assert told.size_bytes > 0
    assert told.records == 0

    altered = rq.alter_topic("orders", partitions=3, retention_ms=60_000, retention_bytes=None)
    assert (altered.version, len(altered.partitions)) == (1, 3)
    assert (altered.settings.retention_ms, altered.settings.retention_bytes) == (60_000, None)
    assert [each.leader for each in rq.topic("orders").partitions] == ["b1"] * 3
    info = rq.cluster()
    assert (info.topics, info.partitions) == (1, 3)
    assert [(broker.broker, broker.alive, broker.replicas) for broker in info.brokers] == [("b1", True, 3)]

    assert rq.delete_topic("orders")
    assert not rq.delete_topic("orders")
    wait_for(lambda: not actors_of("orders") and not data_of(rq, "orders"), "the end of all replicas", 30.0)
    with pytest.raises(UnknownTopicError):
        rq.topic("orders")
    again = rq.create_topic("orders", replication=1)
    assert again.topic_id != made.topic_id
    rq.delete_topic("orders")


def test_a_topic_that_is_made_again_is_another_one_to_those_who_use_it(rq: rayqueue.RayQueue) -> None:
    rq.create_topic("again", partitions=2, replication=1)
    with (
        rq.producer() as producer,
        rq.consumer("again", group="members") as member,
        rq.consumer("again") as alone,
    ):
        for value in range(20):
            producer.send("again", b"old", partition=value % 2).result(30)
        readers = {"member": member, "alone": alone}
        seen: dict[str, list[bytes | None]] = {name: [] for name in readers}

        def read(count: int) -> bool:
            for name, reader in readers.items():
                seen[name] += [record.value for record in reader.poll(timeout_ms=50)]
            return all(len(values) >= count for values in seen.values())

        wait_for(lambda: read(20), "the old records", 30)
        member.commit()
        assert rq.delete_topic("again")
        rq.create_topic("again", partitions=1, replication=1)
        # What the producer still believes of the old topic fails once, and says so; nobody waits for a timeout.
        errors = [producer.send("again", b"lost", partition=0).exception(30) for _ in range(2)]
        assert {type(error) for error in errors if error is not None} <= {TopicRecreatedError, UnknownTopicError}
        written = errors.count(None)
        for _ in range(50 - written):
            producer.send("again", b"new", partition=0).result(30)
        wait_for(lambda: read(70), "all of the new topic", 30)
        for values in seen.values():
            assert values == [b"old"] * 20 + [b"lost"] * written + [b"new"] * (50 - written)
        member.commit()
        assert member.committed(("again", 0)) == 50
    assert rq.delete_group("members")
    assert rq.delete_topic("again")


def test_a_partition_learns_its_topics_new_settings(rq: rayqueue.RayQueue) -> None:
    rq.create_topic("limited", replication=1)
    with rq.producer() as producer:
        producer.send("limited", b"x" * 100).result(timeout_ms=10_000)  # it has seen the old limit
        rq.alter_topic("limited", max_record_bytes=10)

        def refused() -> bool:
            return isinstance(producer.send("limited", b"x" * 100).exception(timeout_ms=10_000), OversizedRecordError)

        wait_for(refused, "the new limit", 10.0)
        assert producer.send("limited", b"x").result(timeout_ms=10_000).partition == 0


def test_existing_and_impossible_topics(rq: rayqueue.RayQueue) -> None:
    rq.create_topic("once", replication=1)
    with pytest.raises(TopicExistsError):
        rq.create_topic("once")
    assert rq.create_topic("once", replication=1, if_missing=True).settings.partitions == 1
    with pytest.raises(TopicDiffersError, match="partitions is 1, not 7"):
        rq.create_topic("once", partitions=7, if_missing=True)
    for name in ("", "a/b", "-a", "x" * 121, "é", 7):
        with pytest.raises(InvalidInputError):
            rq.create_topic(name)  # type: ignore[arg-type]
    for wrong in ({"partitions": 0}, {"replication": 8}, {"lanes": 256}, {"colour": 1}, {"retention_ms": "1"}):
        with pytest.raises(InvalidInputError):
            rq.create_topic("wrong", **wrong)
    changes: Any
    for changes in ({"partitions": 0}, {"lanes": 2}, {"replication": 8}, {"colour": 1}):
        with pytest.raises(InvalidInputError):
            rq.alter_topic("once", **changes)
    with pytest.raises(UnknownTopicError):
        rq.alter_topic("nowhere", partitions=2)
    assert "wrong" not in [info.name for info in rq.topics()]


def test_groups_are_described_with_their_lag_and_forgotten(rq: rayqueue.RayQueue) -> None:
    rq.create_topic("read", replication=1)
    with rq.producer() as producer:
        producer.send_many("read", [b"1", b"2", b"3"]).result(timeout_ms=10_000)
    with rq.consumer("read", group="billing") as consumer:
        wait_for(lambda: bool(consumer.poll(timeout_ms=500)), "records", 20.0)
        told = rq.group("billing")
        assert (told.state, len(told.members)) == ("stable", 1)
        assert [(each.topic, each.partition, each.member) for each in told.partitions] == [
            ("read", 0, told.members[0].member)
        ]
        consumer.commit()
    assert [info.group for info in rq.groups()] == ["billing"]
    told = rq.group("billing")
    assert (told.state, told.members, told.lag) == ("empty", (), 0)
    assert [dict(each.committed) for each in told.partitions] == [{0: 3}]
    assert rq.delete_group("billing")
    assert not rq.delete_group("billing")
    with pytest.raises(UnknownGroupError):
        rq.group("billing")
    route = rq.io.call(rq.routes.partition(TopicPartition("read", 0)))
    assert rq.io.call(route.call(Commit(group="billing", generation=0, offsets={}))).offsets == {}
