"""Leaders, moved by hand: a partition's leadership goes to the replica on a broker that the caller names."""

from __future__ import annotations

import asyncio

from rayqueue.errors import InvalidInputError, TransferFailedError
from rayqueue.net.interfaces import Routes, ask
from rayqueue.protocol.calls import TransferLeader
from rayqueue.protocol.topics import TopicInfo, TopicPartition, check_name


async def transfer_leader(routes: Routes, topic: str, partition: int, broker: str, timeout_ms: int) -> None:
    """Returns once the replica on this broker leads. The topic is the one that has this name now, to the end."""
    info = await routes.topic(check_name("topic", topic), refresh=True)
    place, call = TopicPartition(topic, partition), TransferLeader(to=replica_on(info, partition, broker))
    clock_s = asyncio.get_running_loop().time
    deadline_s = clock_s() + timeout_ms / 1000
    while (left_ms := int((deadline_s - clock_s()) * 1000)) > 0:
        if await ask(routes, place, call, topic_id=info.topic_id, timeout_ms=left_ms):
            return
    raise TransferFailedError(f"{place} is not led by the replica on {broker} after {timeout_ms} ms", broker=broker)


def replica_on(info: TopicInfo, partition: int, broker: str) -> str:
    """The id of the partition's replica on a broker. An error that says where they are, if it has none there."""
    replicas = info.partition(partition).replicas
    for replica in replicas:
        if replica.broker == broker:
            return replica.replica_id
    held = ", ".join(replica.broker for replica in replicas)
    raise InvalidInputError(
        f"{info.name}-{partition} has replicas on {held}, none on {broker}: one of these can lead", broker=broker
    )
