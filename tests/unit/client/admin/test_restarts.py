"""The rule that says when a broker may be stopped, without any cluster."""

from __future__ import annotations

from rayqueue.client.admin.restarts import why_unsafe
from rayqueue.ids import GroupId, Index, Offset, ReplicaId, Term
from rayqueue.replica.status import Status

VOTERS = ("r1", "r2", "r3")


def said(node: str, *, role: str = "follower", commit: int = 1000, voters: tuple[str, ...] = VOTERS) -> Status:
    index = Index(commit)
    return Status(
        group_id=GroupId("orders-0.1"),
        replica_id=ReplicaId(node),
        role=role,
        leader=ReplicaId("r1"),
        term=Term(3),
        start_offset=Offset(0),
        high_watermark=Offset(commit),
        base_index=Index(0),
        last_index=index,
        commit=index,
        applied=index,
        voters=tuple(map(ReplicaId, voters)),
        learners=(),
        address=("127.0.0.1", 1),
        size_bytes=1,
        read_only=False,
        damaged=None,
        forgetful=(),
        syncs=0,
        sync_ms=0.0,
    )


def test_a_group_spares_a_replica_only_if_a_majority_elsewhere_has_everything() -> None:
    leader, second, third = said("r1", role="leader"), said("r2"), said("r3")
    assert why_unsafe([leader, second, third], {ReplicaId("r1")}) is None
    assert "only r1 of r1, r2, r3" in str(why_unsafe([leader, second], {ReplicaId("r2")}))
    behind = said("r3", commit=100)
    assert "only r1" in str(why_unsafe([leader, second, behind], {ReplicaId("r2")}))
    assert why_unsafe([second, third], {ReplicaId("r2")}) == "nobody leads"


def test_copies_that_are_all_on_one_broker_are_restarted_with_it() -> None:
    alone = said("r1", role="leader", voters=("r1",))
    assert why_unsafe([alone], {ReplicaId("r1")}) is None
    together = [said("r1", role="leader"), said("r2"), said("r3")]
    assert why_unsafe(together, {ReplicaId("r1"), ReplicaId("r2")}) is None
