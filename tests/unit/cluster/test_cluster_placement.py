"""Placement: hosts first, then brokers, evenly, and those who lead evenly too."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayqueue.cluster.placement import AliveBroker, partition_group_id, place


def brokers(*per_host: int) -> list[AliveBroker]:
    return [
        AliveBroker(f"b{host}.{number}", f"host{host}")
        for host, count in enumerate(per_host)
        for number in range(count)
    ]


def counts(placement: tuple[tuple[str, ...], ...], alive: list[AliveBroker]) -> list[int]:
    counted = Counter(broker for replicas in placement for broker in replicas)
    return [counted[each.broker] for each in alive]


def leaders(placement: tuple[tuple[str, ...], ...], alive: list[AliveBroker]) -> list[int]:
    counted = Counter(replicas[0] for replicas in placement)
    return [counted[each.broker] for each in alive]


@settings(max_examples=50, deadline=None)
@given(
    hosts=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    replication=st.integers(1, 7),
    partitions=st.integers(1, 20),
)
def test_replicas_are_on_as_many_hosts_then_brokers_as_there_are(
    hosts: list[int], replication: int, partitions: int
) -> None:
    alive = brokers(*hosts)
    host_of = {each.broker: each.host for each in alive}
    for replicas in place(partitions, replication, alive, {}, {}):
        assert len(replicas) == replication
        on_host = Counter(host_of[broker] for broker in replicas)
        assert len(on_host) == min(replication, len(hosts))
        assert max(on_host.values()) - min(on_host.get(host, 0) for host in set(host_of.values())) <= 1
        on_broker = Counter(replicas)
        for broker, used in on_broker.items():  # none twice while another one on the same host is free
            others = [each for each in alive if each.host == host_of[broker]]
            assert used - min(on_broker.get(each.broker, 0) for each in others) <= 1


@settings(max_examples=50, deadline=None)
@given(hosts=st.integers(1, 6), replication=st.integers(1, 4), partitions=st.integers(1, 30))
def test_replicas_and_leaders_are_shared_evenly(hosts: int, replication: int, partitions: int) -> None:
    alive = brokers(*[1] * hosts)
    placement = place(partitions, replication, alive, {}, {})
    for each in (counts(placement, alive), leaders(placement, alive)):
        assert max(each) - min(each) <= 1


def test_a_broker_that_joined_gets_the_new_partitions() -> None:
    alive = brokers(1, 1, 1, 1)
    had = {"b0.0": 8, "b1.0": 8, "b2.0": 8}
    placement = place(4, 1, alive, had, had)
    assert placement == (("b3.0",),) * 4


def test_more_replicas_than_brokers() -> None:
    assert place(1, 3, brokers(1), {}, {}) == (("b0.0",) * 3,)
    (replicas,) = place(1, 5, brokers(1, 1), {}, {})
    assert sorted(Counter(replicas).values()) == [2, 3]


def test_without_a_broker_there_is_no_place() -> None:
    with pytest.raises(ValueError, match="no broker"):
        place(1, 1, [], {}, {})


def test_many_partitions_on_many_brokers_take_no_time() -> None:
    alive = brokers(*[4] * 25)
    started = time.process_time()
    placement = place(10_000, 3, alive, {}, {})
    assert time.process_time() - started < 3
    each = counts(placement, alive)
    assert max(each) - min(each) <= 1


def test_a_topic_that_is_made_again_has_other_raft_groups() -> None:
    assert partition_group_id("orders", 3, 17) == "orders-3.17"
    assert partition_group_id("orders", 3, 18) != partition_group_id("orders", 3, 17)
