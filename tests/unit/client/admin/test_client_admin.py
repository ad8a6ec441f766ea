"""A topic's description, made of the replicas' answers."""

from __future__ import annotations

from typing import Any

import pytest

from rayqueue.cli.topics import sharing_of, troubles_of
from rayqueue.client.admin.admin import TopicDescription, _described, _topic_settings
from rayqueue.data.sink import _STAGING
from rayqueue.errors import InvalidInputError, StoreMissingError, TopicDiffersError
from rayqueue.ids import GroupId, Index, Offset, ReplicaId, Term
from rayqueue.protocol.calls import CreateTopic, decode_coordinator_call, encode_call
from rayqueue.protocol.frames import Frame, Kind
from rayqueue.protocol.topics import PartitionInfo, ReplicaInfo, TopicSettings
from rayqueue.replica.status import Status
from rayqueue.testing import memory

GROUP = "orders-0.1"
PARTITION = PartitionInfo(0, GROUP, (ReplicaInfo("r1", "b1"), ReplicaInfo("r2", "b2"), ReplicaInfo("r3", "b3")))


def status(node: str, role: str, *, term: int = 1, end: int = 0, **rest: Any) -> Status:
    facts: dict[str, Any] = {
        "group_id": GroupId(GROUP),
        "replica_id": ReplicaId(node),
        "role": role,
        "leader": None,
        "term": Term(term),
        "start_offset": Offset(0),
        "high_watermark": Offset(end),
        "base_index": Index(0),
        "last_index": Index(0),
        "commit": Index(0),
        "applied": Index(0),
        "voters": (),
        "learners": (),
        "address": ("127.0.0.1", 1),
        "size_bytes": 1000 + end,
        "read_only": False,
        "damaged": None,
        "forgetful": (),
        "syncs": 0,
        "sync_ms": 0.0,
    }
    return Status(**(facts | rest))


def described(*answers: Any) -> Any:
    return _described(
        PARTITION, {(GROUP, node): answer for node, answer in zip(("r1", "r2", "r3"), answers, strict=True)}
    )


def test_the_leader_tells_offsets_and_a_replica_without_disk_is_reported() -> None:
    told = described(
        status("r1", "follower", end=8),
        status("r2", "leader", end=10, damaged="bad bytes"),
        StoreMissingError("no data here"),
    )
    assert (told.leader, told.start_offset, told.end_offset, told.size_bytes) == ("b2", 0, 10, 1010)
    assert [replica.role for replica in told.replicas] == ["follower", "leader", "absent"]
    assert [replica.problem for replica in told.replicas] == [None, "bad bytes", "no data here"]
    assert told.healthy == 1


def test_in_sync_is_what_the_leader_says_and_not_who_answers() -> None:
    lags = (("r1", 0), ("r3", 404))
    answers = [
        status("r1", "follower", end=10),
        status("r2", "leader", end=10, in_sync=("r1", "r2"), lags=lags),
        status("r3", "follower", end=2),
    ]
    told = described(*answers)
    assert (told.healthy, told.in_sync) == (3, 2)
    assert [(each.in_sync, each.lag) for each in told.replicas] == [(True, 0), (True, 0), (False, 404)]
    topic = TopicDescription("orders", 1, TopicSettings(), (told,))
    (trouble,) = troubles_of(topic)
    assert trouble == "r3 of orders-0 on b3 is not in sync: it lacks 404 entries of its leader's log"
    nobody_leads = described(answers[0], status("r2", "follower"), answers[2])
    assert (nobody_leads.healthy, nobody_leads.in_sync) == (3, 0)


def test_of_two_that_say_they_lead_the_newer_term_counts() -> None:
    told = described(
        status("r1", "leader", term=3, end=9), status("r2", "leader", term=4, end=7), status("r3", "follower", term=4)
    )
    assert (told.leader, told.term, told.end_offset) == ("b2", 4, 7)


def test_without_a_leader_the_most_that_is_known_is_told() -> None:
    told = described(status("r1", "follower", end=3), status("r2", "follower", end=5), StoreMissingError("gone"))
    assert (told.leader, told.end_offset) == (None, 5)
    nobody = described(*[StoreMissingError("gone")] * 3)
    assert (nobody.leader, nobody.end_offset, nobody.size_bytes) == (None, 0, 0)


def test_copies_that_share_a_node_are_told_and_are_a_trouble_only_where_they_need_not() -> None:
    one = PartitionInfo(0, GROUP, (ReplicaInfo("r1", "b1"), ReplicaInfo("r2", "b2"), ReplicaInfo("r3", "b1")))
    answers = {(GROUP, node): status(node, "follower") for node in ("r1", "r2", "r3")}
    shared = _described(one, answers)
    assert shared.shared_brokers == ("b1",)
    assert described(*answers.values()).shared_brokers == ()
    topic = TopicDescription("orders", 1, TopicSettings(), (shared,))
    needless, notes = sharing_of(topic, 4)
    assert "orders-0" in needless[0]
    assert "b1" in needless[0]
    assert notes == []
    needless, notes = sharing_of(topic, 2)
    assert needless == []
    assert len(notes) == 1
    apart = TopicDescription("orders", 1, TopicSettings(), (described(*answers.values()),))
    assert sharing_of(apart, 4) == ([], [])


def test_a_topic_that_is_there_is_taken_as_it_is_or_what_differs_is_told() -> None:
    with memory.connect() as rq:
        first = rq.create_topic("t", partitions=2, retention_ms=1000, if_missing=True)
        assert rq.create_topic("t", partitions=2, retention_ms=1000, if_missing=True) == first
        as_it_is = rq.create_topic("t", if_missing=True)
        assert as_it_is == first, "what is not said is not compared, whatever the defaults are"
        with pytest.raises(TopicDiffersError) as refused:
            rq.create_topic("t", partitions=3, replication=3, retention_ms=None, lanes=1, if_missing=True)
        differences = {"partitions": (3, 2), "retention_ms": (None, 1000)}
        assert refused.value.details["differences"] == differences
        for words in ("partitions is 2, not 3", "retention_ms is 1000, not None", "alter_topic"):
            assert words in str(refused.value)


@pytest.mark.parametrize(("name", "ours"), [("late", {"partitions": 1}), ("later", {"lanes": 1})])
def test_a_topic_that_somebody_makes_between_the_look_and_the_call(name: str, ours: dict[str, Any]) -> None:
    with memory.connect() as rq:
        coordinator = rq._queue.cluster.coordinator
        received = coordinator.received

        def overtaken(connection: Any, frame: Frame) -> None:
            call = decode_coordinator_call(frame.body)
            if isinstance(call, CreateTopic):
                coordinator.received = received  # type: ignore[method-assign]
                theirs = CreateTopic(name=name, settings=TopicSettings(partitions=5))
                received(connection, Frame(Kind.CALL, 10**6, memoryview(encode_call(theirs))))
            received(connection, frame)

        coordinator.received = overtaken  # type: ignore[method-assign]
        if "lanes" in ours:
            assert rq.create_topic(name, if_missing=True, **ours).settings.partitions == 5
        else:
            with pytest.raises(TopicDiffersError):
                rq.create_topic(name, if_missing=True, **ours)


def test_what_rayqueue_made_for_itself_is_listed_only_if_asked_for() -> None:
    """Staging topics of the releases before, too."""
    staging = ["bridge-staging", f"{_STAGING}nightly", "spark-staging.query"]
    with memory.connect() as rq:
        for name in ("orders", *staging):
            rq.create_topic(name)
        assert [info.name for info in rq.topics()] == ["orders"]
        assert [info.name for info in rq.topics(include_internal=True)] == sorted(["orders", *staging])


def test_settings_are_checked_before_anything_is_sent() -> None:
    assert _topic_settings({"partitions": 2}).partitions == 2
    for wrong in ({"partition": 2}, {"partitions": 0}, {"retention_ms": "soon"}, {"lanes": None}):
        with pytest.raises(InvalidInputError):
            _topic_settings(wrong)
