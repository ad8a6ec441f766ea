"""What a topic's description makes of the replicas' answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayqueue.bridge.staging import SHARED
from rayqueue.cli.topics import sharing_of
from rayqueue.client import admin
from rayqueue.client.admin import TopicDescription, _described, _topic_settings
from rayqueue.client.io import IoThread
from rayqueue.data.sink import _STAGING
from rayqueue.errors import InvalidInputError, StoreMissingError, TopicDiffersError
from rayqueue.ids import GroupId, Index, NodeId, Offset, Term
from rayqueue.protocol.calls import CreateTopic
from rayqueue.protocol.topics import PartitionInfo, ReplicaInfo, TopicInfo, TopicSettings
from rayqueue.replica import Status
from rayqueue.spark.writer import staging_of
from tests.unit.small_cluster import Connected, SmallCluster, quick_settings

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


def test_a_topic_that_is_there_is_taken_as_it_is_or_what_differs_is_told(tmp_path: Path) -> None:
    io = IoThread()

    async def made() -> SmallCluster:
        return SmallCluster()

    cluster = io.call(made())
    rq: Any = Connected(io, cluster.process(), quick_settings(tmp_path))

    def create(**settings: Any) -> TopicInfo:
        return admin.create_topic(rq, "t", settings, if_missing=True, wait=False, on_progress=None)

    try:
        first = create(partitions=2, retention_ms=1000)
        assert create(partitions=2, retention_ms=1000) == first
        assert create() == first, "what is not said is not compared, whatever the defaults are"
        with pytest.raises(TopicDiffersError) as refused:
            create(partitions=3, replication=3, retention_ms=None, lanes=1)
        differences = {"partitions": (3, 2), "retention_ms": (None, 1000)}
        assert refused.value.details["differences"] == differences
        for words in ("partitions is 2, not 3", "retention_ms is 1000, not None", "alter_topic"):
            assert words in str(refused.value)
        # Somebody else makes it between our look and our call.
        with pytest.raises(TopicDiffersError):
            _race(cluster, rq, "late", {"partitions": 5}, {"partitions": 1})
        assert _race(cluster, rq, "later", {"partitions": 5}, {"lanes": 1}).settings.partitions == 5
    finally:
        io.loop.call_soon_threadsafe(cluster.close)
        io.close()


def _race(cluster: SmallCluster, rq: Any, name: str, theirs: dict[str, Any], ours: dict[str, Any]) -> TopicInfo:
    """``ours`` is asked for, with ``if_missing``, and is not there when looked for; ``theirs`` is made then."""
    other: Any = Connected(rq.io, cluster.process(), rq.settings)
    handle = cluster.handle

    def overtaken(client: int, call: Any, reply: Any) -> None:
        if isinstance(call, CreateTopic) and client == rq.routes.coordinator.number:
            cluster.handle = handle  # type: ignore[method-assign]
            theirs_call = CreateTopic(name=name, settings=TopicSettings(**theirs))
            handle(other.routes.coordinator.number, theirs_call, lambda _: None)
        handle(client, call, reply)

    cluster.handle = overtaken  # type: ignore[method-assign]
    return admin.create_topic(rq, name, ours, if_missing=True, wait=False, on_progress=None)


def test_what_the_bridges_make_for_themselves_is_listed_only_if_asked_for(tmp_path: Path) -> None:
    io = IoThread()
    options: Any = SimpleNamespace(writer=None)
    staging = [SHARED, f"{_STAGING}nightly", staging_of(options, "query")]

    async def made() -> SmallCluster:
        cluster = SmallCluster()
        for name in ("orders", *staging):
            await cluster.create(name)
        return cluster

    cluster = io.call(made())
    rq: Any = Connected(io, cluster.process(), quick_settings(tmp_path))
    try:
        assert [info.name for info in admin.topics(rq, include_internal=False)] == ["orders"]
        every = [info.name for info in admin.topics(rq, include_internal=True)]
        assert every == sorted(["orders", *staging])
    finally:
        io.loop.call_soon_threadsafe(cluster.close)
        io.close()


def test_settings_are_checked_before_anything_is_sent() -> None:
    assert _topic_settings({"partitions": 2}).partitions == 2
    for wrong in ({"partition": 2}, {"partitions": 0}, {"retention_ms": "soon"}, {"lanes": None}):
        with pytest.raises(InvalidInputError):
            _topic_settings(wrong)
