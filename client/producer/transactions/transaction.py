"""Transaction: what an application holds while it writes to several partitions at once.

    with producer.transaction() as tx:
        tx.send("invoices", invoice)
        tx.send("ledger", entry)
        tx.commit_offsets(consumer)

At the end of the block all of it becomes visible to readers of committed records,
or, after an exception, none of it ever does. One thread, or one task, ends it;
others may send in it until then. It stays in its process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from typing_extensions import Self

from rayqueue.client.forks import forked
from rayqueue.client.producer.delivery import Deliveries, Delivery
from rayqueue.client.producer.transactions.behind import Deferred
from rayqueue.client.producer.transactions.life import aborted
from rayqueue.client.producer.transactions.tasks import AckStage, OffsetStage, Place, TransactionTasks
from rayqueue.client.queue.settling import runs_of
from rayqueue.client.twins import Twin, awaiting, blocking, in_io, outcome, part, rest
from rayqueue.client.wakeup import Wakeup
from rayqueue.errors import (
    InvalidInputError,
    LeaseLostError,
    OutcomeUnknownError,
    RayQueueError,
)
from rayqueue.protocol.topics import TopicPartition

if TYPE_CHECKING:
    from rayqueue.client.consumer.consumer import Consumer
    from rayqueue.client.consumer.staging import Staging
    from rayqueue.client.io import IoThread
    from rayqueue.client.producer.producer import Producer
    from rayqueue.client.queue.job import Job
    from rayqueue.client.queue.worker import Worker

_log = logging.getLogger(__name__)

_LOOK_S = 1.0


class Transaction(Twin):
    """Made by ``Producer.transaction``. Begun by ``with``, ``async with`` or ``begin``; used once."""

    send: Callable[..., Delivery]
    """As ``Producer.send``: what the delivery tells is that the record is safe, not that it can be seen."""
    send_async: Callable[..., Any]
    send_many: Callable[..., Deliveries]
    """As ``Producer.send_many``."""
    send_many_async: Callable[..., Any]

    def __init__(
        self, producer: Producer[Any, Any], tasks: TransactionTasks, io: IoThread, *, waits: bool, visible: bool
    ) -> None:
        self._producer = producer
        self._tasks = tasks
        self._io = io
        self._waits = waits
        self._visible = visible
        self._deferred: Deferred | None = None
        self._number = 0
        self._over = False
        self._readers: dict[Consumer[Any, Any], Staging | None] = {}
        self._refuse_sends()

    # -- its life ------------------------------------------------------------------------------

    @blocking
    async def begin(self) -> None:
        """Open it. Needed only without a ``with`` block.

        ``InvalidInputError`` if another one of this producer is open; ``ProducerFencedError`` if another producer has
        the transactional id.
        """
        self._check_process()
        if self._number:
            raise InvalidInputError("a transaction is used once: make another one by producer.transaction()")
        try:
            begun = None if self._waits else await self._begin_behind()
            if begun is None:
                begun = await in_io(self._io, self._tasks.begin(self, waits=self._waits), finish=True)
        except asyncio.CancelledError:
            self._io.run(self._tasks.abandon(self))
            raise
        if begun is not None:
            self._deferred, self._number = begun, begun.number
            self._take_sends()

    async def _begin_behind(self) -> Deferred | None:
        """While others are being decided, if they are: nobody has to be asked, but there may be too many."""
        behind, room = self._tasks.behind, Wakeup()
        while (begun := behind.begin()) is None and behind.when_room(room.ring):
            await rest(room, _LOOK_S)
        return begun

    begin_async = awaiting(begin)

    @blocking
    async def commit(self) -> None:
        """Wait until all of it is acknowledged, and let it be seen. Done by the end of a ``with`` block.

        ``TransactionAbortedError``: nothing of it will be seen, because something of it could not be written, it took
        longer than ``transaction_timeout_ms``, or an operator has ended it; do it again. ``ProducerFencedError``: the
        same, because another producer has the transactional id; stop. ``OutcomeUnknownError``: the coordinator has not
        answered; ``commit`` again asks again.
        """
        self._check_begun()
        self._refuse_sends()
        if not self._waits:
            await self._commit_behind()
            return
        try:
            await in_io(self._io, self._tasks.commit(self._number, visible=self._visible), finish=True)
        except OutcomeUnknownError:
            raise
        except RayQueueError:
            self._ended(committed=False)
            raise
        self._ended(committed=True)

    commit_async = awaiting(commit)

    async def _commit_behind(self) -> None:
        deferred = self._deferred
        assert deferred is not None  # noqa: S101  # it has begun
        self._over = True
        if not self._tasks.behind.end(deferred, lambda: self._io.run(self._tasks.commit_behind())):
            await in_io(self._io, self._tasks.abort_behind(deferred), finish=True)
            await self._decided(deferred)

    @blocking
    async def wait_committed(self) -> None:
        """Wait until it is decided; raises what ``commit`` raises. Of use with ``wait=False``, after its end."""
        if self._deferred is None or not self._over:
            raise InvalidInputError("this transaction has not ended")
        if not self._waits:
            await self._decided(self._deferred)

    wait_committed_async = awaiting(wait_committed)

    async def _decided(self, deferred: Deferred) -> None:
        try:
            await outcome(deferred.decided)
        except RayQueueError:
            self._tasks.behind.error = None  # it is told by this
            raise

    @blocking
    async def abort(self) -> None:
        """Nothing of it will ever be seen. Consumers that it has committed offsets of go back to where they were."""
        self._check_begun()
        self._refuse_sends()
        if self._waits or self._deferred is None:
            await in_io(self._io, self._tasks.abort(self._number), finish=True)
        else:
            self._deferred.fail(aborted(self._tasks.transactional_id))
            await in_io(self._io, self._tasks.abort_behind(self._deferred), finish=True)
        self._ended(committed=False)

    abort_async = awaiting(abort)

    def _ended(self, *, committed: bool) -> None:
        self._over = True
        for reader, staging in self._readers.items():
            if not committed:
                reader._core.rewind()
            elif staging is not None:
                staging.committed()

    # -- what it takes along ---------------------------------------------------------------------

    @blocking
    async def commit_offsets(self, consumer: Consumer[Any, Any]) -> None:
        """Let the consumer's group go on behind all that this consumer has polled so far, if this is committed.

        The consumer is one with ``delivery="exactly_once"``. If the transaction is aborted it goes back, and polls the
        same again. ``StaleGenerationError`` if something that it polled went to another member: abort.
        """
        self._check_begun()
        self._check_waits()
        core = consumer._staged_by_transactions()
        self._readers.setdefault(consumer, None)

        async def stage() -> Staging:
            try:
                staging = await core.staging()
            except RayQueueError as error:
                self._tasks.doom(error)
                raise
            await self._tasks.stage_offsets(
                self._number,
                [
                    OffsetStage(
                        Place(each.assigned.partition, each.assigned.topic_id),
                        staging.group,
                        each.assigned.generation,
                        each.assigned.seal,
                        each.offsets,
                    )
                    for each in staging.parts
                ],
            )
            return staging

        self._readers[consumer] = await in_io(self._io, stage(), finish=True)

    commit_offsets_async = awaiting(commit_offsets)

    @blocking
    async def ack(self, *jobs: Job[Any, Any]) -> None:
        """Let these jobs be done if this is committed. If it is aborted they have failed, and come again.

        ``LeaseLostError`` if somebody else was given one of them meanwhile: abort, for its work is done there.
        """
        self._check_begun()
        self._check_waits()
        leases: dict[tuple[Worker, int, int], list[int]] = {}
        for job in jobs:
            if job.settled:
                raise InvalidInputError(f"{job!r} was ended already")
            leases.setdefault((job._worker, job.id.partition, job.token), []).append(job.id.offset)

        async def stage() -> None:
            stages = [
                AckStage(
                    Place(TopicPartition(worker.name, number), worker.topic_id),
                    worker.id,
                    token,
                    runs_of(sorted(offsets)),
                )
                for (worker, number, token), offsets in leases.items()
            ]
            settled = await self._tasks.stage_acks(self._number, stages)
            for (worker, number, token), offsets in leases.items():
                worker.handed_over(number, token, offsets)
            for answer, (worker, number, _) in zip(settled, leases, strict=True):
                if answer.lost:
                    lost = LeaseLostError(
                        f"leases of jobs of {worker.name}-{number} have ended, and somebody else was given them since, "
                        f"or they are gone: {answer.lost}; the transaction cannot be committed",
                        queue=worker.name,
                    )
                    self._tasks.doom(lost)
                    raise lost

        for job in jobs:
            job.settled = True
        try:
            await in_io(self._io, stage(), finish=True)
        except LeaseLostError:
            raise
        except RayQueueError:
            for job in jobs:  # they are in this worker's hand still
                job.settled = False
            raise

    ack_async = awaiting(ack)

    # -- blocks --------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.begin()
        return self

    async def __aenter__(self) -> Self:
        await self.begin_async()
        return self

    async def _leave(self, kind: type[BaseException] | None) -> None:
        if self._over:  # it was ended in the block
            return
        if kind is None:
            await part(self.commit)()
        elif not self._io.forked:
            try:
                await part(self.abort)()
            except RayQueueError as error:  # what the block has raised is not hidden by it
                _log.error("a transaction was not aborted here, and will be when its time is up: %s", error)

    # -- within ----------------------------------------------------------------------------------

    def _take_sends(self) -> None:
        within = self._producer._within(self._number)  # whose methods these are: a send costs no more than any other
        self.send, self.send_async = within.send, within.send_async
        self.send_many, self.send_many_async = within.send_many, within.send_many_async

    def _refuse_sends(self) -> None:
        self.send = self.send_async = self.send_many = self.send_many_async = self._not_open

    def _not_open(self, *_: object, **__: object) -> NoReturn:
        self._check_process()
        state = "is over" if self._number else "has not begun: use it in a with block, or call begin()"
        raise InvalidInputError(f"this transaction {state}")

    def _check_begun(self) -> None:
        self._check_process()
        if not self._number or self._over:
            self._not_open()

    def _check_waits(self) -> None:
        if not self._waits:
            raise InvalidInputError(
                "positions and jobs are for a transaction whose end is waited for, because what was polled comes again "
                "if it is aborted: leave out wait=False"
            )

    def _check_process(self) -> None:
        if self._io.forked:
            raise forked("this transaction")

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError("a transaction stays in its process")

    def __repr__(self) -> str:
        state = "over" if self._over else "open" if self._number else "not begun"
        return f"<Transaction of {self._tasks.transactional_id}: {state}>"
