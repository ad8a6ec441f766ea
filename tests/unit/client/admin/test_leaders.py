"""Leadership that is moved by hand, on the queue in memory."""

from __future__ import annotations

import asyncio

import pytest

from rayqueue.errors import InvalidInputError, UnknownPartitionError, UnknownTopicError
from rayqueue.testing import memory


def leader_of(rq: memory.MemoryQueue, topic: str, partition: int) -> str | None:
    return rq.topic(topic).partitions[partition].leader


def test_another_broker_leads_and_records_go_there() -> None:
    with memory.connect() as rq, rq.producer() as producer:
        rq.create_topic("orders", partitions=2)
        producer.send("orders", b"before", partition=1).result()
        before = leader_of(rq, "orders", 1)
        others = {replica.broker for replica in rq.topic("orders").partitions[1].replicas} - {before}
        for broker in sorted(others):
            rq.transfer_leader("orders", 1, broker)
            assert leader_of(rq, "orders", 1) == broker
            rq.transfer_leader("orders", 1, broker)  # it does already
        asyncio.run(rq.transfer_leader_async("orders", 1, str(before)))
        assert leader_of(rq, "orders", 1) == before
        producer.send("orders", b"after", partition=1).result()
        assert rq.topic("orders").partitions[1].end_offset == 2


def test_what_cannot_lead_is_refused_with_the_places_that_can() -> None:
    with memory.connect(brokers=4) as rq:
        rq.create_topic("orders", replication=3)
        held = {replica.broker for replica in rq.topic("orders").partitions[0].replicas}
        empty = next(each.broker for each in rq.cluster().brokers if each.broker not in held)
        with pytest.raises(InvalidInputError, match=f"none on {empty}") as refused:
            rq.transfer_leader("orders", 0, empty)
        assert all(broker in str(refused.value) for broker in held)
        with pytest.raises(UnknownPartitionError):
            rq.transfer_leader("orders", 1, empty)
        with pytest.raises(UnknownTopicError):
            rq.transfer_leader("invoices", 0, empty)
