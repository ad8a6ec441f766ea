"""Sites: no replica is placed before the brokers that are known are there, and not more than fit."""

from __future__ import annotations

from typing import Any

import pytest

from rayqueue.cluster.catalog import BrokerRow
from rayqueue.cluster.commands import PutBroker
from rayqueue.cluster.placement import AliveBroker
from rayqueue.cluster.tables import META
from rayqueue.errors import CapacityError, NoBrokerError, NotLeaderError
from rayqueue.protocol.calls import AlterTopic, CreateTopic, DeleteTopic, DescribeCluster
from rayqueue.protocol.topics import TopicInfo, TopicSettings
from tests.unit.cluster.cluster_state import SEALS, ClusterLog, Service

MIB = 1 << 20


def create(name: str = "t", partitions: int = 1, replication: int = 3) -> CreateTopic:
    return CreateTopic(name=name, settings=TopicSettings(partitions=partitions, replication=replication))


def nodes(count: int, **facts: Any) -> list[AliveBroker]:
    return [AliveBroker(f"b{number}", f"host{number}", **facts) for number in range(count)]


def restarted(known: int, there: int, **settings: Any) -> Service:
    """A leader that knows ``known`` brokers from its log and has heard of ``there``."""
    log = ClusterLog()
    for each in nodes(known):
        log.apply(PutBroker(each.broker, each.host, "node"))
    service = Service(log, **settings)
    service.coordinator.set_brokers(service.now, nodes(there))
    return service


def used(info: Any) -> list[set[str]]:
    assert isinstance(info, TopicInfo), info
    return [{replica.broker for replica in partition.replicas} for partition in info.partitions]


# -- whom it waits for -----------------------------------------------------------------------------------


def test_a_topic_made_after_a_restart_waits_for_the_brokers_that_are_known() -> None:
    service = restarted(known=4, there=2)
    asked = service.ask(create(partitions=2))
    service.pass_time(9.9)
    assert not asked.given
    service.coordinator.set_brokers(service.now, nodes(3))
    assert all(len(brokers) == 3 for brokers in used(asked.answer))


def test_so_do_new_partitions() -> None:
    service = restarted(known=3, there=3)
    service.ask(create())
    service.coordinator.set_brokers(service.now, nodes(2))
    asked = service.ask(AlterTopic(name="t", topic_id=1, changes={"partitions": 3}))
    other = service.ask(AlterTopic(name="t", topic_id=1, changes={"retention_ms": 5}))
    assert isinstance(other.answer, TopicInfo)  # what needs no place does not wait
    assert not asked.given
    service.coordinator.set_brokers(service.now, nodes(3))
    assert all(len(brokers) == 3 for brokers in used(asked.answer))


def test_the_wait_is_bounded() -> None:
    service = restarted(known=3, there=1, broker_wait_ms=4_000)
    asked = service.ask(create())
    service.pass_time(3.9)
    assert not asked.given
    service.pass_time(0.2)
    assert used(asked.answer) == [{"b0"}]
    assert used(service.ask(create("u")).answer) == [{"b0"}]  # it was waited for once
    service.coordinator.set_brokers(service.now, nodes(3))
    service.coordinator.set_brokers(service.now, nodes(2))
    again = service.ask(create("v"))
    assert not again.given  # it came back and went again: that is another absence
    service.pass_time(4.1)
    assert used(again.answer) == [{"b0", "b1"}]


def test_a_leader_that_has_not_heard_of_any_broker_waits_and_then_says_so() -> None:
    service = Service(ClusterLog())
    service.coordinator = type(service.coordinator)(
        service.log.machine, service.settings, SEALS, service._propose, service._confirm
    )
    service.coordinator.lead(service.now)
    asked = service.ask(create())
    assert not asked.given
    service.pass_time(10.1)
    assert isinstance(asked.answer, NoBrokerError)
    late = service.ask(create())
    assert isinstance(late.answer, NoBrokerError)


def test_nobody_waits_where_no_copies_would_share_a_node() -> None:
    service = restarted(known=4, there=3)
    assert used(service.ask(create()).answer) == [{"b0", "b1", "b2"}]
    few = restarted(known=2, there=2)
    assert used(few.ask(create()).answer) == [{"b0", "b1"}]  # there were never more


def test_hosts_count_too() -> None:
    log = ClusterLog()
    for broker, host in (("b0", "h0"), ("b1", "h0"), ("b2", "h1")):
        log.apply(PutBroker(broker, host, "node"))
    service = Service(log)
    service.coordinator.set_brokers(service.now, [AliveBroker("b0", "h0"), AliveBroker("b1", "h0")])
    asked = service.ask(create(replication=2))
    assert not asked.given
    service.coordinator.set_brokers(
        service.now, [AliveBroker("b0", "h0"), AliveBroker("b1", "h0"), AliveBroker("b2", "h1")]
    )
    assert "b2" in used(asked.answer)[0]


def test_others_need_not_wait_for_who_waits() -> None:
    service = restarted(known=4, there=2)
    waiting = service.ask(create("waits"))
    assert isinstance(service.ask(create("fits", replication=2)).answer, TopicInfo)
    assert service.ask(DeleteTopic(name="fits", topic_id=1)).answer is True
    assert not waiting.given
    service.coordinator.unlead()
    assert isinstance(waiting.answer, NotLeaderError)


# -- how many fit ----------------------------------------------------------------------------------------


def bounded(count: int = 3, memory_bytes: int = 1000 * MIB, coordinators: int = 0, **settings: Any) -> Service:
    service = Service(replica_memory_bytes=70 * MIB, replica_memory_percent=70, **settings)
    for each in nodes(count):
        service.log.apply(PutBroker(each.broker, each.host, "node", memory_bytes))
    service.coordinator.set_brokers(service.now, nodes(count, memory_bytes=memory_bytes, coordinators=coordinators))
    return service


def test_replicas_beyond_the_nodes_memory_are_refused_and_nothing_is_made() -> None:
    service = bounded()  # ten on each
    before = service.log.machine.checkpoint()
    refused = service.ask(create(partitions=10_000, replication=7)).answer
    assert isinstance(refused, CapacityError)
    assert not refused.retriable
    assert refused.details == {"wanted": 70_000, "there": 0, "left": 30}
    for word in ("cluster.replica_memory_percent", "cluster.replica_memory_bytes", "30 more fit", "0 replicas"):
        assert word in str(refused)
    assert service.log.machine.checkpoint() == before
    assert isinstance(service.ask(create("ten", partitions=10)).answer, TopicInfo)
    assert [broker.room for broker in service.ask(DescribeCluster()).answer.brokers] == [0, 0, 0]
    assert isinstance(service.ask(create("one")).answer, CapacityError)
    assert isinstance(service.ask(AlterTopic(name="ten", topic_id=1, changes={"partitions": 11})).answer, CapacityError)
    assert isinstance(service.ask(AlterTopic(name="ten", topic_id=1, changes={"retention_ms": 1})).answer, TopicInfo)
    service.ask(DeleteTopic(name="ten", topic_id=1))
    assert isinstance(service.ask(create("one")).answer, TopicInfo)


def test_the_coordinators_replicas_take_room_too() -> None:
    service = bounded(coordinators=1)
    assert isinstance(service.ask(create(partitions=10)).answer, CapacityError)
    assert isinstance(service.ask(create(partitions=9)).answer, TopicInfo)


def test_brokers_of_one_host_share_its_memory() -> None:
    service = bounded(count=0)
    alive = [AliveBroker(f"b{number}", "one", memory_bytes=1000 * MIB) for number in range(2)]
    service.coordinator.set_brokers(service.now, alive)
    assert isinstance(service.ask(create(partitions=6, replication=2)).answer, CapacityError)
    assert isinstance(service.ask(create(partitions=5, replication=2)).answer, TopicInfo)


def test_a_number_per_broker_takes_the_place_of_memory() -> None:
    service = bounded(max_replicas_per_broker=2)
    refused = service.ask(create(partitions=3)).answer
    assert isinstance(refused, CapacityError)
    assert "cluster.max_replicas_per_broker = 2" in str(refused)
    assert isinstance(service.ask(create(partitions=2)).answer, TopicInfo)


def test_a_full_broker_does_not_make_copies_share_another() -> None:
    service = bounded(memory_bytes=0, max_replicas_per_broker=4)
    for each in range(4):
        service.ask(create(f"single{each}", replication=1))  # two on b0, one on each of the others
    made = [service.ask(create(f"t{each}")).answer for each in range(3)]
    assert all(len(brokers) == 3 for info in made[:2] for brokers in used(info))
    assert isinstance(made[2], CapacityError)  # b0 is full, and two copies on one node are worse than none
    assert all(len(brokers) == 2 for brokers in used(service.ask(create("two", replication=2)).answer))


def test_larger_nodes_take_more() -> None:
    service = bounded()
    sizes = [500 * MIB, 1000 * MIB, 2000 * MIB]
    service.coordinator.set_brokers(
        service.now, [AliveBroker(f"b{at}", f"h{at}", memory_bytes=size) for at, size in enumerate(sizes)]
    )
    info = service.ask(create(partitions=35, replication=1)).answer
    placed = [replica.broker for partition in info.partitions for replica in partition.replicas]
    assert [placed.count(f"b{at}") for at in range(3)] == [5, 10, 20]
    assert isinstance(service.ask(create("u", replication=1)).answer, CapacityError)


def test_a_brokers_row_of_before_memory_was_known_can_be_read() -> None:
    log = ClusterLog()
    log.apply(PutBroker("b0", "h0", "node"))
    row = b"\x93\xa2b0\xa2h0\xa4node"  # three fields, as it was written before
    log.store.put(META, b"bb0", row)
    log.restart()
    assert log.machine.brokers["b0"] == BrokerRow("b0", "h0", "node", 0)


@pytest.mark.parametrize("most", [None, 5])
def test_memory_that_is_not_known_has_no_bound_unless_one_is_set(most: int | None) -> None:
    service = Service(max_replicas_per_broker=most)
    made = service.ask(create(partitions=100)).answer
    assert isinstance(made, TopicInfo if most is None else CapacityError)
