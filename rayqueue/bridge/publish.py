"""The end of a write: what tasks have written becomes visible, all of it at once, or none of it ever.

One entry of the coordinator's log commits the transactions of the tasks that
count, aborts those of all other attempts, and notes the batch in its writer's
ledger (ADR 40). So a driver may die anywhere, may be started again with the same
batch computed anew, may even run twice at the same time: one of them writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial

from rayqueue.bridge.task import TaskWriter, Touched, Write, Written, joined
from rayqueue.client.handle import RayQueue
from rayqueue.client.producer.transactions.marking import finished, marked
from rayqueue.errors import BridgeError, TopicError
from rayqueue.net.requests import gathered
from rayqueue.protocol.calls import GetTopics, Topics
from rayqueue.protocol.topics import TopicPartition
from rayqueue.protocol.transactions import (
    MAX_PARTICIPANTS,
    EndWrite,
    MarkTransaction,
    Transaction,
    WriteEnded,
    WritePart,
)


def publish(rq: RayQueue, write: Write, told: Sequence[Written]) -> bool:
    """Let what these have written be seen. False if the batch was written before. Any thread but the I/O thread.

    ``TransactionAbortedError``: nothing of it will be seen, because it took longer than ``timeout_ms``.
    """
    if write.staging:
        _check_not_staged(rq, write.staging)
    cuts = [cut for each in told for cut in each.cuts]
    if cuts:
        with closing(TaskWriter(rq, partial(joined, rq, write))) as mine:
            mine.add(cuts)
            told = [*told, mine.finish()]
    parts = [(each.transaction, each.touched) for each in told if each.transaction is not None]
    named = [WritePart(pair.producer_id, pair.epoch, tuple([each.group_id for each in at])) for pair, at in parts]
    return rq.io.call(_ended(rq, write, named, [touched for _, touched in parts], commit=True))


def abandon(rq: RayQueue, write: Write) -> None:
    """Nothing of it will be seen, unless it is decided already. Any thread but the I/O thread."""
    rq.io.call(_ended(rq, write, [], [], commit=False))


async def _ended(
    rq: RayQueue, write: Write, named: Sequence[WritePart], touched: Sequence[Sequence[Touched]], *, commit: bool
) -> bool:
    """Decide, and show the decision to all partitions that may have something of it."""
    others = [each for name in write.topics for each in await _partitions(rq, name)][:MAX_PARTICIPANTS]
    call = EndWrite(
        write=write.name,
        writer=write.writer or write.name,
        batch_id=write.batch_id,
        identity=write.identity,
        once=write.writer is None,
        commit=commit,
        parts=tuple(named),
        others=tuple([each.group_id for each in others]),
    )
    ended: WriteEnded = await rq.routes.coordinator.call(call)
    counted = {(part.producer_id, part.epoch): at for part, at in zip(named, touched, strict=True)}
    marks = [
        (each, MarkTransaction(producer_id=part.producer_id, epoch=part.epoch, commit=part.committed, seal=seal))
        for part in ended.parts
        for each, seal in zip(
            counted[part.producer_id, part.epoch] if part.committed else others, part.seals, strict=True
        )
    ]

    async def mark(marker: tuple[Touched, MarkTransaction]) -> bool:
        where, shown = marker
        return await marked(rq.routes, where.place, where.topic_id, shown, whose="a write")

    if all(await gathered(mark, marks)):
        done = [Transaction(part.producer_id, part.epoch) for part in ended.parts if part.committed]
        await finished(rq.routes, write.name, done)
    return ended.written


async def _partitions(rq: RayQueue, topic: str) -> list[Touched]:
    try:
        info = await rq.routes.topic(topic)
    except TopicError:
        return []  # it is gone, and so is what was written there
    return [Touched(TopicPartition(topic, part.number), info.topic_id, part.group_id) for part in info.partitions]


def _check_not_staged(rq: RayQueue, staging: str) -> None:
    found: Topics = rq.io.call(rq.routes.coordinator.call(GetTopics(names=(staging,))))
    if found.topics:
        raise BridgeError(
            f"this writer was begun by a release that staged its rows in {staging!r}; whether its last batch is "
            "written only that release knows. Let it finish the batch, delete that topic, and start again",
            topic=staging,
        )
