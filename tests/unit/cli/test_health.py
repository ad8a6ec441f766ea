"""Sentences of `rayqueue status` about copies that are missing and disks that are nearly full."""

from __future__ import annotations

import msgspec

from rayqueue.cli import brokers
from rayqueue.cli.brokers import duration, state_of
from rayqueue.cli.health import drained, full_disks, losses, shortfalls
from rayqueue.client.admin.admin import PartitionDescription, ReplicaDescription, TopicDescription
from rayqueue.protocol.calls import Broker, ClusterInfo, LostReplica, MoveInfo, Waiting
from rayqueue.protocol.topics import TopicSettings

MIB = 1 << 20


def topic(*problems: str | None) -> TopicDescription:
    replicas = tuple(
        ReplicaDescription(f"r{each + 1}", f"b{each + 1}", "follower", 0, 0, problem)
        for each, problem in enumerate(problems)
    )
    partition = PartitionDescription(0, "b1", 1, 0, 0, 0, replicas)
    return TopicDescription("orders", 1, TopicSettings(replication=3), (partition,))


def info(*moves: MoveInfo, waiting: tuple[Waiting, ...] = (), away: str = "") -> ClusterInfo:
    brokers = tuple(Broker(f"b{each}", f"h{each}", f"b{each}" != away, 1) for each in range(1, 5))
    return ClusterInfo("c", "c1", 1, brokers, 1, 1, 0, moves, waiting=waiting)


def test_what_is_missing_why_what_is_done_and_for_how_much_longer() -> None:
    assert list(shortfalls(info(), [topic(None, None, None)])) == []
    move = MoveInfo("orders", 0, "r3", "r3.7", "b4", "lost", "", "b3", 100 * MIB, 40 * MIB, 20_000_000, 3_100)
    (told,) = shortfalls(info(move), [topic(None, None, "no store")])
    assert told == (
        "orders-0: 2 of 3 copies are well (r3 on b3: no store); r3.7 is made on b4 instead of r3: "
        "40.0 MiB of 100.0 MiB, 20.0 MB/s, 4 s left"
    )
    waits = (Waiting("orders", 0, "it is lost; no broker has a place for it now"),)
    assert "no broker has a place" in next(shortfalls(info(waiting=waits), [topic(None, None, "no store")]))
    assert "waiting for b3" in next(shortfalls(info(away="b3"), [topic(None, None, "has no actor now")]))
    assert "by itself" in next(shortfalls(info(), [topic(None, None, "does not answer")]))
    grows = MoveInfo("orders", 0, "", "r3.8", "b3", "grow", "")
    assert next(shortfalls(info(grows), [topic(None, None)])) == "orders-0: 2 of 3 copies are well; r3.8 is made on b3"


def test_what_is_lost_is_said_to_be_replaced_only_where_it_can_be() -> None:
    def told(copies: int, *lost: str, away: str = "") -> list[str]:
        known = tuple(LostReplica("orders-0.1", each, "no store") for each in lost)
        return list(losses(msgspec.structs.replace(info(away=away), lost=known), [topic(*[None] * copies)]))

    assert told(3, "r3") == ["r3 of orders-0.1 is lost, and is to be replaced: no store"]
    (alone,) = told(1, "r1")
    assert "is lost, and cannot be replaced, too few copies are left (rayqueue recover orders 0): no store" in alone
    assert ["cannot be replaced" in each for each in told(3, "r2", "r3")] == [True, True]
    assert ["cannot be replaced" in each for each in told(3, "r3", away="b2")] == [True]
    coordinator = (LostReplica("coordinator", "c1", "no store"),)
    (said,) = losses(msgspec.structs.replace(info(), lost=coordinator), [])
    assert "is to be replaced" in said


def test_a_node_that_ray_drains_is_named_while_it_holds_replicas() -> None:
    held = Broker("b1", "h1", True, 2, holds=2, leaving=True)
    empty, well = Broker("b2", "h2", True, 0, leaving=True), Broker("b3", "h3", True, 2, holds=2)
    (told,) = drained(ClusterInfo("c", "c1", 1, (held, empty, well), 0, 0, 0))
    assert "broker b1" in told
    assert "rayqueue brokers decommission b1" in told
    states = [state_of(each) for each in (held, empty, well)]
    assert states == ["drained by Ray, 2 left", "drained by Ray, 0 left", "alive"]


def test_a_disk_that_is_nearly_full_is_named_with_its_numbers() -> None:
    full = Broker("b1", "h1", True, 1, disk_bytes=100 * MIB, disk_free_bytes=3 * MIB, disk_spare_bytes=0)
    roomy = Broker("b2", "h2", True, 1, disk_bytes=100 * MIB, disk_free_bytes=30 * MIB, disk_spare_bytes=20 * MIB)
    unknown = Broker("b3", "h3", True, 1)
    told = list(full_disks(ClusterInfo("c", "c1", 1, (full, roomy, unknown), 0, 0, 0)))
    assert len(told) == 1
    assert "broker b1 on h1 is nearly full: 3.0 MiB of 100.0 MiB are free" in told[0]


def test_times_as_people_read_them() -> None:
    assert [duration(each) for each in (None, 0, 900, 119_000, 600_000, 3 * 3_600_000)] == [
        "", "0 s", "1 s", "119 s", "10 min", "3 h",
    ]  # fmt: skip


def test_a_decommission_says_what_it_waits_for() -> None:
    gone = Broker("b3", "h3", False, 1, draining=True, holds=1)
    info = ClusterInfo("id", "c1", 1, (gone,), 1, 1, 0)
    assert brokers._left(gone, info) == "1 replicas are still on b3, 0 are being moved"
    waiting = tuple(Waiting("orders", number, "0 of 1 copies are left") for number in range(3))
    said = brokers._left(gone, msgspec.structs.replace(info, waiting=waiting))
    assert said.endswith("0 are being moved; orders-0: 0 of 1 copies are left (and 2 more)")
