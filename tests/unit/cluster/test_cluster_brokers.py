"""Brokers as operators see them: rooms on disks, what moves, what waits, and plans that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from rayqueue.cluster.brokers import MAX_PLANNED, cluster_info, move_command, rebalance_command
from rayqueue.cluster.commands import (
    BeginMove,
    BeginRebalance,
    CreateTopic,
    DrainBroker,
    PlaceCoordinator,
    PutBroker,
    ReplicasMade,
    ReplicasRemoved,
    RetireCoordinator,
)
from rayqueue.cluster.disks import reserve, spare_bytes
from rayqueue.cluster.moves import Reason
from rayqueue.cluster.placement import AliveBroker, place
from rayqueue.cluster.seen import Pace, Seen
from rayqueue.cluster.sites import Sites, room
from rayqueue.config import MIB, ClusterSettings
from rayqueue.errors import CapacityError, InvalidInputError, NoBrokerError
from rayqueue.ids import COORDINATOR, ReplicaId
from rayqueue.protocol import calls
from rayqueue.protocol.calls import RebalanceMove
from rayqueue.protocol.topics import TopicSettings
from tests.unit.cluster.cluster_state import ClusterLog

GROUP = "orders-0.1"
SETTINGS = ClusterSettings(replica_disk_bytes=10 * MIB, disk_reserve_percent=10, replica_memory_bytes=50 * MIB)


def broker(name: str, free_mib: int = 900, total_mib: int = 1000, **rest: Any) -> AliveBroker:
    return AliveBroker(name, f"h-{name}", disk_bytes=total_mib * MIB, disk_free_bytes=free_mib * MIB, **rest)


@pytest.fixture
def log() -> ClusterLog:
    made = ClusterLog()
    for each in ("b1", "b2", "b3", "b4"):
        made.apply(PutBroker(each, f"h-{each}", f"ray-{each}", 400 * MIB))
    made.apply(CreateTopic("orders", TopicSettings(partitions=1, replication=3), (("b1", "b2", "b3"),)))
    made.apply(ReplicasMade(tuple(made.machine.unmade)))
    return made


def sites(log: ClusterLog, *alive: AliveBroker) -> Sites:
    made = Sites(log.machine, SETTINGS)
    made.set_alive(0.0, alive)
    return made


def test_a_disk_bounds_what_fits_and_one_that_is_nearly_full_takes_nothing() -> None:
    roomy, tight, full = broker("b1", 900), broker("b2", 115), broker("b3", 99)
    unknown = AliveBroker("b4", "h")
    alive = [roomy, tight, full, unknown]
    assert spare_bytes(alive, SETTINGS) == {"b1": 800 * MIB, "b2": 15 * MIB, "b3": 0}
    assert room(alive, {}, SETTINGS) == {"b1": 80, "b2": 1, "b3": 0}
    shared = [each._replace(host="one") for each in (roomy, broker("b5", 900))]
    assert room(shared, {}, SETTINGS) == {"b1": 40, "b5": 40}, "they may have one disk"
    small = [broker("b1", 900, memory_bytes=250 * MIB)]
    assert room(small, {"b1": 1}, SETTINGS) == {"b1": 3}, "memory is less"


def test_what_does_not_fit_is_refused_with_the_numbers_of_each_broker(log: ClusterLog) -> None:
    here = sites(log, broker("b1", 105, memory_bytes=400 * MIB), broker("b2", 900), broker("b3", 300))
    with pytest.raises(CapacityError) as refused:
        here.place(2, 3)
    said = str(refused.value)
    assert "b1: 1 replicas, 400 MiB of memory, 105 of 1,000 MiB of disk free, 0 more fit" in said
    assert "b3: 1 replicas, 300 of 1,000 MiB of disk free, 20 more fit" in said
    assert "10 MiB (cluster.replica_disk_bytes)" in said
    with pytest.raises(CapacityError, match=r"broker b1 takes no further replica: 1 replicas, 400 MiB of memory"):
        here.check_room("b1")
    here.check_room("b3", 200 * MIB)
    with pytest.raises(CapacityError, match="takes no further replica of 201 MiB"):
        here.check_room("b3", 201 * MIB)


def test_more_copies_are_refused_where_there_is_no_room_for_all_of_them(log: ClusterLog) -> None:
    (info,) = log.machine.topics.values()
    roomy = [broker(f"b{each}") for each in range(1, 5)]
    sites(log, *roomy).check_copies(info.partitions, 1)
    with pytest.raises(CapacityError):
        sites(log, *roomy[:3], broker("b4", 50)).check_copies(info.partitions, 1)
    sites(log, *roomy).check_copies(info.partitions, 2)  # the fifth shares a broker, as in a new topic
    with pytest.raises(NoBrokerError):
        sites(log).check_copies(info.partitions, 1)


def test_more_copies_are_refused_where_the_disks_have_no_space_for_what_is_there(log: ClusterLog) -> None:
    """Found by an audit: each copy counted as the 16 MiB of an empty one, whatever the partition holds."""
    (info,) = log.machine.topics.values()
    here = sites(log, *[broker(f"b{each}", 400) for each in range(1, 5)])
    here.seen = Seen(sizes={GROUP: 300 * MIB})
    here.check_copies(info.partitions, 1)
    here.seen = Seen(sizes={GROUP: 301 * MIB})
    with pytest.raises(CapacityError) as refused:
        here.check_copies(info.partitions, 1)
    said = str(refused.value)
    assert "1 more copies of each of 1 partitions, 301 MiB in all, do not fit" in said
    assert "b4: 0 replicas, 400 of 1,000 MiB of disk free" in said


def test_what_moves_under_way_will_still_write_is_not_given_away_again(log: ClusterLog) -> None:
    """Found by an audit: a disk with 60 GB was given a second partition of 50 GB as soon as the first had begun."""
    here = sites(log, broker("b1"), broker("b2"), broker("b3"), broker("b4", 600))
    call = calls.MoveReplica(topic="orders", topic_id=1, partition=0, source="b2", target="b4", size_bytes=300 * MIB)
    move_command(log.machine, here, call)
    log.apply(CreateTopic("other", TopicSettings(partitions=1, replication=1), (("b1",),)))
    log.apply(ReplicasMade(tuple(log.machine.unmade)))
    log.apply(BeginMove("other-0.2", "r1", "b4", Reason.ASKED))
    here.seen = Seen(sizes={"other-0.2": 400 * MIB})
    with pytest.raises(CapacityError, match="600 of 1,000 MiB of disk free, 400 MiB of that for what is being moved"):
        move_command(log.machine, here, call)
    plan = calls.BeginRebalance(moves=(RebalanceMove(GROUP, "r1", "b4", 300 * MIB),))
    with pytest.raises(CapacityError, match="of 300 MiB"):
        rebalance_command(here, plan, 5)
    here.seen = Seen(sizes={"other-0.2": 400 * MIB}, paces={"other-0.2": Pace(400 * MIB, 200 * MIB, 1)})
    move_command(log.machine, here, call)
    here.seen = Seen(sizes={GROUP: 301 * MIB}, paces=here.seen.paces)
    with pytest.raises(CapacityError, match="of 301 MiB"):  # the keeper knows better than the client
        move_command(log.machine, here, call)


def test_brokers_of_one_host_share_what_its_disk_has(log: ClusterLog) -> None:
    one, two, three = (broker(each, 500)._replace(host="one") for each in ("b1", "b2", "b3"))
    alive = [one, two, three._replace(disk_bytes=2000 * MIB), broker("b4", 500)]
    spare = spare_bytes(alive, SETTINGS)
    assert spare == {"b1": 400 * MIB, "b2": 400 * MIB, "b3": 300 * MIB, "b4": 400 * MIB}
    reserve(spare, alive, "b2", 100 * MIB)
    assert spare == {"b1": 300 * MIB, "b2": 300 * MIB, "b3": 300 * MIB, "b4": 400 * MIB}, "b3 has another disk"
    log.apply(BeginMove(GROUP, "r3", "b1", Reason.ASKED))
    here = sites(log, *alive)
    here.seen = Seen(sizes={GROUP: 400 * MIB})
    assert here.spare_bytes() == {"b1": 0, "b2": 0, "b3": 300 * MIB, "b4": 400 * MIB}
    assert here.room()["b2"] == 0, "nor a new replica, however small"


def test_copies_of_new_partitions_are_in_different_racks() -> None:
    alive = [broker(f"b{each}", rack=f"k{each % 3}") for each in range(9)]
    placed = place(30, 3, alive, {}, {})
    racks = {each.broker: each.rack for each in alive}
    assert all(len({racks[name] for name in each}) == 3 for each in placed)
    loads = [sum(name in each for each in placed) for name in racks]
    assert max(loads) - min(loads) <= 1
    two = [broker("a1", rack="a"), broker("a2", rack="a"), broker("b1", rack="b")]
    assert all("b1" in each for each in place(5, 2, two, {}, {}))


def test_what_is_told_of_moves_disks_leaders_and_what_waits(log: ClusterLog) -> None:
    here = sites(log, broker("b1", 50, rack="k1"), broker("b2"), broker("b3"), broker("b4"))
    log.apply(BeginRebalance(((GROUP, "r1", "b4", 100),), 7))
    here.seen = Seen({GROUP: "b2"}, {GROUP: Pace(100, 25, 5)}, {GROUP: "no place"})
    info = cluster_info(log.machine, here, "c1", 1)
    first, second, *_ = info.brokers
    assert (first.rack, first.leaders, first.nearly_full, first.disk_free_bytes) == ("k1", 0, True, 50 * MIB)
    assert (second.leaders, second.nearly_full, second.disk_spare_bytes) == (1, False, 800 * MIB)
    assert [(each.topic, each.partition, each.why) for each in info.waiting] == [("orders", 0, "no place")]
    assert info.rebalance is not None
    assert [(each.broker, each.moves, each.size_bytes) for each in info.rebalance.waiting] == [("b4", 1, 100)]
    log.apply(BeginMove(GROUP, "r1", "b4", Reason.BALANCE))
    info = cluster_info(log.machine, here, "c1", 1)
    (move,) = info.moves
    assert (move.source, move.broker, move.size_bytes, move.copied_bytes, move.left_ms) == ("b1", "b4", 100, 25, 15_000)
    assert info.rebalance is not None
    assert (info.rebalance.waiting, info.waiting) == ((), ()), "it is being moved"
    assert info.brokers[3].disk_promised_bytes == 75
    here.seen = Seen()
    assert cluster_info(log.machine, here, "c1", 1).moves[0].left_ms is None


def test_a_broker_holds_the_coordinator_that_the_cluster_was_made_with(log: ClusterLog) -> None:
    """Else it would be called empty, and stopped, while it still votes; and once it leaves, hold one again."""
    here = sites(log, broker("b4"), broker("b5"))
    first = {ReplicaId("c1"): "b4", ReplicaId("c2"): "b5"}

    def held() -> list[int]:
        info = cluster_info(log.machine, here, "c1", 1, first)
        return [each.holds for each in info.brokers if each.broker in ("b4", "b5")]

    log.apply(PutBroker("b5", "h", "n5"))
    assert held() == [1, 1]
    log.apply(RetireCoordinator(COORDINATOR, "c2", "b5"))
    assert held() == [1, 1], "its data is still there"
    log.apply(ReplicasRemoved(((COORDINATOR, "c2"),)))
    assert held() == [1, 0]


def test_nothing_new_comes_to_a_broker_that_is_being_emptied(log: ClusterLog) -> None:
    """Whoever asks for it may have looked before the operator's word was written down."""
    log.apply(DrainBroker("b4", True))
    with pytest.raises(InvalidInputError, match="being emptied"):
        raise log.apply(BeginMove(GROUP, "r1", "b4", Reason.BALANCE))
    log.apply(PlaceCoordinator(COORDINATOR, "c9", "b4"))
    assert "c9" not in log.machine.coordinators
    assert log.machine.holds("b4") == 0


def test_a_plan_that_cannot_be_is_refused_before_anything_is_written(log: ClusterLog) -> None:
    here = sites(log, broker("b1"), broker("b2"), broker("b3"), broker("b4", 300, draining=False))

    def command(*moves: RebalanceMove) -> object:
        return rebalance_command(here, calls.BeginRebalance(moves=moves), 5)

    good = RebalanceMove(GROUP, "r1", "b4", 150 * MIB)
    assert command(good) == BeginRebalance(((GROUP, "r1", "b4", 150 * MIB),), 5)
    for wrong in (RebalanceMove(GROUP, "r1", "b9", 1), RebalanceMove(GROUP, "r1", "b4", -1)):
        with pytest.raises(InvalidInputError):
            command(wrong)
    with pytest.raises(CapacityError, match="of 250 MiB"):
        command(RebalanceMove(GROUP, "r1", "b4", 250 * MIB))
    with pytest.raises(InvalidInputError, match="plan anew"):
        command(good, good)  # the first one takes the space of the second
    with pytest.raises(InvalidInputError, match="more than one plan"):
        command(*[good] * (MAX_PLANNED + 1))
    leaving = sites(log, broker("b4", draining=True))
    with pytest.raises(InvalidInputError, match="to be emptied"):
        rebalance_command(leaving, calls.BeginRebalance(moves=(good,)), 5)
