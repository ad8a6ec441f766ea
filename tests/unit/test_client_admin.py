"""What a topic's description makes of the replicas' answers."""

from __future__ import annotations

from typing import Any

import pytest

from rayqueue.cli.topics import sharing_of
from rayqueue.client.admin import TopicDescription, _described, _topic_settings
from rayqueue.errors import InvalidInputError, StoreMissingError
from rayqueue.ids import GroupId, Index, NodeId, Offset, Term
from rayqueue.protocol.topics import PartitionInfo, ReplicaInfo, TopicSettings
from rayqueue.replica import Status

GROUP = "orders-0.1"
PARTITION = PartitionInfo(0, GROUP, (ReplicaInfo("r1", "b1"), ReplicaInfo("r2", "b2"), ReplicaInfo("r3", "b3")))


def status(node: str, role: str, *, term: int = 1, end: int = 0, **rest: Any) -> Status:
    facts: dict[str, Any] = {
        "group_id": GroupId(GROUP),
        "node_id": NodeId(node),
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


def test_settings_are_checked_before_anything_is_sent() -> None:
    assert _topic_settings({"partitions": 2}).partitions == 2
    for wrong in ({"partition": 2}, {"partitions": 0}, {"retention_ms": "soon"}, {"lanes": None}):
        with pytest.raises(InvalidInputError):
            _topic_settings(wrong)
