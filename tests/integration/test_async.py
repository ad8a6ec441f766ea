"""Event loops: administration in an async actor, consumers in several loops, calls that are cancelled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

import rayqueue
from rayqueue.client.handle import RayQueue
from rayqueue.errors import ClosedError, GroupNotEmptyError, TopicExistsError, UnknownGroupError, UnknownTopicError
from rayqueue.protocol.topics import TopicPartition
from tests.integration.consumers import running_queue

pytestmark = pytest.mark.timeout(180)

RECORDS = 60


@pytest.fixture(scope="module")
def rq() -> Iterator[RayQueue]:
    with running_queue() as queue:
        queue.create_topic("orders", partitions=2, replication=1)
        with queue.producer() as producer:
            for partition in range(2):
                producer.send_many("orders", [b"%d" % each for each in range(RECORDS)], partition=partition)
        yield queue


@ray.remote(num_cpus=0)
class Administrator:
    """Its event loop goes on meanwhile: ``beat`` is answered in the midst of everything else."""

    def __init__(self, rq: RayQueue) -> None:
        self._rq = rq  # not connected yet
        self._longest_s = 0.0

    async def _beat(self) -> None:
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(0.001)
            self._longest_s = max(self._longest_s, time.monotonic() - began_s)

    async def administer(self) -> tuple[dict[str, Any], float]:
        beating = asyncio.create_task(self._beat())
        found: dict[str, Any] = {}
        async with self._rq as rq:
            progress: list[tuple[int, int]] = []
            made = await rq.create_topic_async(
                "made", partitions=2, replication=1, on_progress=lambda *each: progress.append(each)
            )
            found["made"] = (made.name, len(made.partitions), progress[-1])
            try:
                await rq.create_topic_async("made", replication=1)
            except TopicExistsError:
                found["again"] = "exists"
            altered = await rq.alter_topic_async("made", partitions=3)
            found["altered"] = len(altered.partitions)
            found["described"] = sum(each.leader is not None for each in (await rq.topic_async("made")).partitions)
            found["topics"] = [each.name for each in await rq.topics_async()]
            found["brokers"] = len((await rq.cluster_async()).brokers)
            async with await rq.producer_async() as producer:
                found["offset"] = (await producer.send_async("made", b"x", partition=0)).offset
            async with await rq.consumer_async("made", group="theirs") as consumer:
                found["values"] = [record.value for record in await consumer.poll_async(timeout_ms=10_000)]
                try:
                    await rq.reset_group_async("theirs", to="latest")
                except GroupNotEmptyError:
                    found["reset"] = "refused"
            moved = await rq.reset_group_async("theirs", to="earliest", topic="made")
            found["moved"] = [dict(each.after) for each in moved.positions]
            found["groups"] = [each.group for each in await rq.groups_async()]
            found["lag"] = (await rq.group_async("theirs")).lag
            found["deleted"] = await rq.delete_group_async("theirs"), await rq.delete_topic_async("made")
            for missing in (rq.group_async("theirs"), rq.topic_async("made"), rq.consumer_async("made", group="g")):
                try:
                    await missing
                except (UnknownGroupError, UnknownTopicError) as error:
                    found.setdefault("missing", []).append(type(error).__name__)
        try:
            await rq.topics_async()
        except ClosedError:
            found["closed"] = True
        beating.cancel()
        return found, self._longest_s


def test_an_async_actor_administers_without_holding_up_its_loop(rq: RayQueue) -> None:
    actor: Any = Administrator.remote(rq)  # type: ignore[attr-defined]
    found, longest_s = ray.get(actor.administer.remote(), timeout=120)
    assert found == {
        "made": ("made", 2, (2, 2)),
        "again": "exists",
        "altered": 3,
        "described": 3,
        "topics": ["made", "orders"],
        "brokers": 1,
        "offset": 0,
        "values": [b"x"],
        "reset": "refused",
        "moved": [{0: 0}, {0: 0}, {0: 0}],
        "groups": ["theirs"],
        "lag": 1,
        "deleted": (True, True),
        "missing": ["UnknownGroupError", "UnknownTopicError", "UnknownTopicError"],
        "closed": True,
    }
    assert longest_s < 1.0, "a call held up the actor's event loop"


async def read(consumer: rayqueue.Consumer, count: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while len(found) < count:
        records = await consumer.poll_async(max_records=count - len(found), timeout_ms=10_000)
        assert records
        found += [(record.partition, record.offset) for record in records]
    return found


ALL = [(partition, offset) for partition in range(2) for offset in range(RECORDS)]


def test_a_consumer_made_in_one_event_loop_is_used_in_another(rq: RayQueue) -> None:
    async def make() -> tuple[rayqueue.Consumer, list[tuple[int, int]]]:
        consumer = await rq.consumer_async("orders", group="loops")
        return consumer, await read(consumer, 50)

    async def use(consumer: rayqueue.Consumer) -> list[tuple[int, int]]:
        async with consumer:
            return await read(consumer, 70)

    consumer, first = asyncio.run(make())
    assert sorted(first + asyncio.run(use(consumer))) == ALL
    assert rq.group("loops").lag == 0


def test_calls_that_are_cancelled_leave_everything_usable(rq: RayQueue) -> None:
    place = TopicPartition("orders", 0)

    async def main() -> None:
        async with await rq.consumer_async("orders", group="cancelled") as consumer:
            await read(consumer, 1)  # it is a member now
            calls = (
                lambda: consumer.poll_async(max_records=1, timeout_ms=10_000),
                consumer.lag_async,
                lambda: consumer.committed_async(place),
                lambda: consumer.peek_async("orders", 1),
                consumer.seek_to_end_async,
                rq.topics_async,
                lambda: rq.topic_async("orders"),
                lambda: rq.group_async("cancelled"),
                lambda: rq.consumer_async("orders", group="another"),
            )
            for call in calls:
                for delay_s in (0.0, 0.0005, 0.003):
                    with pytest.raises((asyncio.TimeoutError, asyncio.CancelledError)):
                        await asyncio.wait_for(_endless_after(call), delay_s)
            await consumer.seek_to_beginning_async()
            assert sorted(await read(consumer, 2 * RECORDS)) == ALL
            await consumer.commit_async()
            assert (await rq.group_async("cancelled")).lag == 0

    async def _endless_after(call: Any) -> None:
        await call()
        await asyncio.sleep(60)

    asyncio.run(main())
