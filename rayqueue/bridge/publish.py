"""The end of a write: what tasks have written becomes visible, all of it at once, or none of it ever.

One entry of the coordinator's log commits the transactions of the tasks that
count, aborts those of all other attempts, and notes the batch in its writer's
ledger (ADR 40). So a driver may die anywhere, may be started again with the same
batch computed anew, may even run twice at the same time: one of them writes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from rayqueue.bridge.task import TaskWriter, Touched, Write, Written, joined
from rayqueue.client.handle import RayQueue
from rayqueue.errors import BridgeError, RayQueueError, TopicError
from rayqueue.net.interfaces import ask
from rayqueue.net.requests import gathered
from rayqueue.protocol.calls import GetTopics, Topics
from rayqueue.protocol.topics import TopicPartition
from rayqueue.protocol.transactions import (
    MAX_AT_ONCE,
    MAX_PARTICIPANTS,
    EndWrite,
    FinishTransactions,
    MarkTransaction,
    Transaction,
    WriteEnded,
    WritePart,
)

_log = logging.getLogger(__name__)

_FINISH_MS = 2_000


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
    counted = iter(touched)
    marks = [
        (each, MarkTransaction(producer_id=part.producer_id, epoch=part.epoch, commit=part.committed, seal=seal))
        for part in ended.parts
        for each, seal in zip(next(counted) if part.committed else others, part.seals, strict=True)
    ]
    if all(await gathered(partial(_mark, rq), marks)) and ended.written:
        await _finish(rq, write.name, [Transaction(part.producer_id, part.epoch) for part in named])
    return ended.written


async def _partitions(rq: RayQueue, topic: str) -> list[Touched]:
    try:
        info = await rq.routes.topic(topic)
    except TopicError:
        return []  # it is gone, and so is what was written there
    return [Touched(TopicPartition(topic, part.number), info.topic_id, part.group_id) for part in info.partitions]


async def _mark(rq: RayQueue, mark: tuple[Touched, MarkTransaction]) -> bool:
    """Whether a partition knows, or is gone. If not it asks the coordinator by itself."""
    where, call = mark
    try:
        await ask(rq.routes, where.place, call, topic_id=where.topic_id)
    except TopicError:
        return True
    except RayQueueError as error:
        _log.warning("%s has no marker of a write yet, and will ask for it: %s", where.place, error)
        return False
    return True


async def _finish(rq: RayQueue, write: str, pairs: Sequence[Transaction]) -> None:
    for first in range(0, len(pairs), MAX_AT_ONCE):
        call = FinishTransactions(transactional_id=write, finished=tuple(pairs[first : first + MAX_AT_ONCE]))
        try:
            await rq.routes.coordinator.call(call, timeout_ms=_FINISH_MS)
        except RayQueueError as error:  # it finds out by itself
            _log.info("the coordinator was not told that %s is done: %s", write, error)


def _check_not_staged(rq: RayQueue, staging: str) -> None:
    found: Topics = rq.io.call(rq.routes.coordinator.call(GetTopics(names=(staging,))))
    if found.topics:
        raise BridgeError(
            f"this writer was begun by a release that staged its rows in {staging!r}; whether its last batch is "
            "written only that release knows. Let it finish the batch, delete that topic, and start again",
            topic=staging,
        )
