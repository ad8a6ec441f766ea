"""The tasks of a transactional producer in the I/O thread: what ``TransactionLife`` says, carried out.

One of ``begin``, ``commit``, ``abort`` and the stages is under way at a time.
Each has an end: calls have ``client.call_timeout_ms``, batches their
``delivery_timeout_ms``. Markers are carried beside, of some transactions at a time;
what is given up of them the partitions find out by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar
from weakref import WeakSet

from rayqueue.client.producer.accumulator import Accumulator
from rayqueue.client.producer.sender import Sender
from rayqueue.client.producer.transactions.behind import Behind, Deferred
from rayqueue.client.producer.transactions.life import (
    Accept,
    Action,
    Drop,
    End,
    Finish,
    Flush,
    Init,
    Mark,
    Raise,
    State,
    TransactionLife,
    aborted,
)
from rayqueue.client.producer.transactions.marking import finished, forgotten, marked
from rayqueue.errors import (
    ClosedError,
    InvalidInputError,
    OutcomeUnknownError,
    RayQueueError,
    TransactionAbortedError,
)
from rayqueue.net.interfaces import Routes, ask, same_topic
from rayqueue.net.requests import in_time
from rayqueue.protocol.jobs import Settled
from rayqueue.protocol.topics import TopicPartition
from rayqueue.protocol.transactions import (
    Decided,
    EndTransaction,
    InitTransactions,
    MarkTransaction,
    StageAcks,
    StageOffsets,
    Transaction,
)

_log = logging.getLogger(__name__)

_MARKED_AT_ONCE = 8
"""Transactions whose markers are under way; the next end waits for one of them."""


class Place(NamedTuple):
    """A partition, as it was when the transaction wrote there."""

    partition: TopicPartition
    topic_id: int


class OffsetStage(NamedTuple):
    """Positions of a group in one partition."""

    place: Place
    group: str
    generation: int
    seal: bytes
    offsets: dict[int, int]


class AckStage(NamedTuple):
    """Jobs of one lease."""

    place: Place
    worker: str
    token: int
    jobs: tuple[tuple[int, int], ...]


_S = TypeVar("_S", OffsetStage, AckStage)
_A = TypeVar("_A")


class TransactionTasks:
    """Of one producer. Everything runs in the I/O thread."""

    def __init__(
        self,
        transactional_id: str,
        timeout_ms: int,
        accumulator: Accumulator,
        sender: Sender,
        routes: Routes,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.life = TransactionLife(transactional_id)
        self.transactional_id = self._id = transactional_id
        self._timeout_ms = timeout_ms
        self._accumulator = accumulator
        self._sender = sender
        self._routes = routes
        self._loop = loop
        self._attempt = ""
        self._turn = asyncio.Lock()
        self._places: dict[str, Place] = {}
        self._marking: list[asyncio.Task[None]] = []
        self._begun: tuple[object, Deferred] | None = None
        """The last one that was begun here, and by whom."""
        self._gone: WeakSet[object] = WeakSet()
        """Owners who were cancelled while they began."""
        self._closed = False
        self.drawn = False
        """The id is of one run only: nobody has a use for it after ``close``."""
        self.behind = Behind(accumulator, self._no_transaction)
        self._numbers: set[int] = set()
        """The transactions of the application that are decided with the pair that is open."""
        self._group_end: Deferred | None = None
        """With whose batches the flush ends; None: with what was sent last."""
        self._untold: list[tuple[Deferred, RayQueueError]] = []
        """Lost ones whose losing is not over yet."""
        accumulator.on_failure = self._failed
        accumulator.refuse(self._no_transaction)

    # -- what an application asks for ----------------------------------------------------------

    async def begin(self, owner: object, *, waits: bool) -> Deferred | None:
        """The one that is open then; None if nobody wants it any more. ``waits``: for its end."""
        async with self._turn:
            if self._closed:
                raise ClosedError("this producer was closed; make a new one")
            if owner in self._gone:  # and its going has overtaken it
                return None
            self.behind.tell()
            await self._carry_out(self.life.begin())
            deferred = self.behind.opened(waits=waits)
            self._begun, self._numbers = (owner, deferred), {deferred.number}
            return deferred

    async def abandon(self, owner: object) -> None:
        """Whoever has begun was cancelled on the way, and does not know that it is open, if it is."""
        async with self._turn:
            self._gone.add(owner)
            if self._begun is not None and self._begun[0] is owner:
                await self._abort(self._begun[1])

    async def commit(self, number: int, *, visible: bool) -> None:
        """``visible``: return once every participant has its marker, or cannot be told in time."""
        async with self._turn:
            self._check(number)
            await self._carry_out(self.life.commit())
            marking = list(self._marking)  # also of those before it, which readers must pass
        if visible and marking:
            await asyncio.wait(marking)

    async def abort(self, number: int) -> None:
        async with self._turn:
            self._check(number)
            await self._carry_out(self.life.abort())

    async def commit_behind(self) -> None:
        """Decide what has ended, until there is nothing more."""
        async with self._turn:
            while True:
                await self._abort_doomed()
                self._tell_lost()
                group, newest = self.behind.take()
                if not newest:
                    return
                try:
                    if self.life.state not in (State.OPEN, State.DOOMED):
                        await self._carry_out(self.life.begin())
                        self._numbers = set()
                    self._numbers.update([each.number for each in group] or [newest])
                    self._accumulator.release(newest)
                    if group:
                        self._group_end = group[-1]
                        await self._carry_out(self.life.commit())
                except Exception as error:  # noqa: BLE001  # also if it is a bug, nobody may wait for ever
                    self._not_committed(group, error)
                else:
                    for each in group:
                        each.decided.set_result(None)
                finally:
                    self._group_end = None

    async def _abort_doomed(self) -> None:
        """What was to be decided was lost before anybody began with it: nobody else ends it. What is behind it is lost,
        too."""
        if self.life.state is State.DOOMED:
            try:
                await self._carry_out(self.life.abort())
            except Exception as error:  # noqa: BLE001  # fenced, and aborted all the same; or a bug
                _log.warning("a transaction of %r was not aborted here: %r", self._id, error)

    def _not_committed(self, group: list[Deferred], error: Exception) -> None:
        if not isinstance(error, RayQueueError):
            _log.exception("transactions of %r have failed", self._id)
            error = OutcomeUnknownError(f"transactions of {self._id!r} have failed; see the log")
        behind = TransactionAbortedError(
            f"a transaction of {self._id!r} was aborted, because one before it was not committed: {error}",
            transactional_id=self._id,
        )
        lost = self.behind.fail(behind, cause=error)
        self._accumulator.refuse(self._no_transaction)
        self._sender.drop(error)  # what is held back
        # Only now: whoever is woken may begin the next one at once.
        self._untold += [*((each, error) for each in group), *((each, behind) for each in lost)]

    def _tell_lost(self) -> None:
        untold, self._untold = self._untold, []
        for each, error in untold:
            each.fail(error)

    async def settled(self, timeout_s: float) -> None:
        """Once all that have ended are decided. Raises if one is not committed, and nobody was told."""

        async def decided() -> None:
            async with self._turn:
                pass

        try:
            await in_time(decided(), timeout_s)
        except asyncio.TimeoutError:
            raise OutcomeUnknownError(f"transactions of {self._id!r} are not decided yet") from None
        if self.behind.error is not None:
            self._accumulator.failures()  # told by this
        self.behind.tell()

    async def abort_behind(self, deferred: Deferred) -> None:
        """One whose end nobody waits for: because its block has failed, or because it is lost anyway."""
        async with self._turn:  # those before it are decided then, and it is the one that is open
            await self._abort(deferred)

    async def _abort(self, deferred: Deferred) -> None:
        newest = self.behind.dropped(deferred) or deferred.number == self.behind.number
        if newest and self.life.state in (State.OPEN, State.DOOMED):
            await self._carry_out(self.life.abort())

    async def stage_offsets(self, number: int, stages: Sequence[OffsetStage]) -> None:
        """Once all of these are staged. What fails dooms the transaction."""

        async def stage(each: OffsetStage, transaction: Transaction) -> None:
            call = StageOffsets(
                producer_id=transaction.producer_id,
                epoch=transaction.epoch,
                group=each.group,
                generation=each.generation,
                offsets=each.offsets,
                seal=each.seal,
            )
            await ask(self._routes, each.place.partition, call, topic_id=each.place.topic_id)

        await self._stage(number, stages, stage)

    async def stage_acks(self, number: int, stages: Sequence[AckStage]) -> list[Settled]:
        """What became of each."""

        async def stage(each: AckStage, transaction: Transaction) -> Settled:
            call = StageAcks(
                producer_id=transaction.producer_id,
                epoch=transaction.epoch,
                worker=each.worker,
                token=each.token,
                jobs=each.jobs,
            )
            answer: Settled = await ask(self._routes, each.place.partition, call, topic_id=each.place.topic_id)
            return answer

        return await self._stage(number, stages, stage)

    def doom(self, error: RayQueueError) -> None:
        """It can only be aborted."""
        self.life.failed(error)

    def lost(self, error: RayQueueError, number: int) -> None:
        """Something was to be sent in this one (0: whichever is open), and was never accepted. From any thread; before
        any later call of the same."""
        self._loop.call_soon_threadsafe(self._lost, error, number)

    def _lost(self, error: RayQueueError, number: int) -> None:
        self._failed(error, number or self.behind.number)

    async def _stage(
        self, number: int, stages: Sequence[_S], stage: Callable[[_S, Transaction], Awaitable[_A]]
    ) -> list[_A]:
        async with self._turn:
            self._check(number)
            self._check_sound()
            transaction = self.life.current
            try:
                for each in stages:
                    await self._touch(each.place)
                done = await asyncio.gather(
                    *(stage(each, transaction) for each in stages), return_exceptions=True
                )  # all have ended then, also if one has failed
            except RayQueueError as error:
                self.life.failed(error)
                raise
            for outcome in done:
                if isinstance(outcome, BaseException):
                    if isinstance(outcome, RayQueueError):
                        self.life.failed(outcome)
                    raise outcome
            return done  # type: ignore[return-value]  # no exception among them

    async def close(self, timeout_s: float | None = None) -> bool:
        """Abort what is open, and let the coordinator forget what has ended. Whether that was done in time; if not, it
        goes on."""
        self.behind.close()
        self._closed = True
        closing = self._loop.create_task(self._close())
        done, _ = await asyncio.wait({closing}, timeout=timeout_s)
        if done:
            await closing
        else:
            closing.add_done_callback(_log_failure)
        return bool(done)

    async def _close(self) -> None:
        async with self._turn:
            self.behind.give_up(aborted(self._id))
            if self.life.state in (State.OPEN, State.DOOMED):
                _log.warning("a producer was closed with a transaction of %r open: it is aborted", self._id)
                try:
                    await self._carry_out(self.life.abort())
                except RayQueueError as error:  # somebody else has the id, and it is aborted all the same
                    _log.warning("%s", error)
            if self._marking:
                await asyncio.wait(self._marking)
            await self._carry_out(self.life.closed())
            if self.drawn and self._attempt and self.life.state in (State.NEW, State.READY):
                await forgotten(self._routes, self._id, self._attempt)

    def _check(self, number: int) -> None:
        """``InvalidInputError`` unless this one is meant."""
        if number != self.behind.number:
            raise InvalidInputError(f"this transaction of {self._id!r} is over")

    def _check_sound(self) -> None:
        if self.life.state is not State.OPEN:
            raise self._no_transaction()

    def _no_transaction(self) -> RayQueueError:
        return (
            self.behind.error
            or self.life.doomed()
            or InvalidInputError(
                f"this producer is transactional ({self._id!r}), and no transaction is open: send within "
                "`with producer.transaction() as tx:`"
            )
        )

    # -- failures -------------------------------------------------------------------------------

    def _failed(self, error: RayQueueError, number: int) -> None:
        """Something of this transaction was given up: what is behind it cannot be written either, and need not be tried
        for long."""
        if number > self._accumulator.released:
            self._failed_behind(error, number)
            return
        if number not in self._numbers:  # it is over, or lost already
            return
        before = self.life.state
        self.life.failed(error)
        why = self.life.aborted(error)
        lost = self.behind.fail(why)
        if lost or before in (State.OPEN, State.FLUSHING):
            self._accumulator.refuse(self._no_transaction)
            self._loop.call_soon(self._drop_rest, self.behind.number, error)
        self._untold += [(each, why) for each in lost]
        if not self.behind.deciding:
            self._tell_lost()

    def _failed_behind(self, error: RayQueueError, number: int) -> None:
        """It is held back still: what is before it is as sound as it was."""
        why = self.life.aborted(error)
        lost = self.behind.fail(why, first=number)
        if lost:
            self._accumulator.refuse(self._no_transaction)
            self._accumulator.withdraw(number, error)
            for each in lost:
                each.fail(why)

    def _drop_rest(self, number: int, error: RayQueueError) -> None:
        lost = self.behind.error is not None or self.life.state in (State.DOOMED, State.FLUSHING)
        if number == self.behind.number and lost:
            self._sender.drop(error)

    # -- actions --------------------------------------------------------------------------------

    async def _carry_out(self, actions: list[Action]) -> None:
        waiting = deque(actions)
        error: RayQueueError | None = None
        while waiting:
            action = waiting.popleft()
            if isinstance(action, Raise):
                error = error or action.error
            else:
                waiting.extend(await self._do(action))
        if error is not None:
            raise error

    async def _do(self, action: Action) -> list[Action]:
        if isinstance(action, Init):
            return await self._init(action)
        if isinstance(action, Accept):
            self._places = {}
            if not self.behind.busy:  # else it may be of what is held back
                self._accumulator.failures()  # of the one before, which is told
            self._sender.begin(action.transaction)
        elif isinstance(action, Flush):
            return await self._flush()
        elif isinstance(action, Drop):
            self._untold += [(each, action.error) for each in self.behind.fail(action.error)]
            self._accumulator.refuse(self._no_transaction)
            self._sender.drop(action.error)
            self._accumulator.failures()
            return self.life.dropped(self._touched())
        elif isinstance(action, End):
            return await self._end(action)
        elif isinstance(action, Mark):
            self._marking.append(self._loop.create_task(self._mark(action, self._places)))
        elif isinstance(action, Finish):
            await finished(self._routes, self._id, action.transactions)
        return []

    async def _init(self, action: Init) -> list[Action]:
        if action.anew or not self._attempt:
            self._attempt = uuid.uuid4().hex
        call = InitTransactions(
            transactional_id=self._id,
            attempt=self._attempt,
            timeout_ms=self._timeout_ms,
            owner=f"{socket.gethostname()}, process {os.getpid()}"[:256],
            resume=action.resume,
        )
        try:
            return self.life.initialised(await self._routes.coordinator.call(call))
        except RayQueueError as error:
            return self.life.not_initialised(error)

    async def _flush(self) -> list[Action]:
        if self._group_end is None:
            self._accumulator.refuse(self._no_transaction)
            newest = self._accumulator.cut_all()
        else:
            newest = self._group_end.serial
        resolved = asyncio.Event()
        self._accumulator.when_resolved(newest, resolved.set)  # in this thread: it is where outcomes become known
        await resolved.wait()  # each has its deadline
        failed, more = self._accumulator.failures(self._numbers)
        if failed or more:
            errors = [outcome.failure(0, count) for outcome, count in failed]
            self.life.failed(next((each for each in errors if each is not None), aborted(self._id)))
        return self.life.flushed(self._touched())

    async def _end(self, action: End) -> list[Action]:
        while len(self._marking) >= _MARKED_AT_ONCE:
            await asyncio.wait(self._marking, return_when=asyncio.FIRST_COMPLETED)
            self._marking = [each for each in self._marking if not each.done()]
        try:
            return self.life.decided(await self._decision(action.call))
        except RayQueueError as error:
            if not action.call.commit and (error.retriable or self.life.state is State.ENDING):
                _log.warning("transaction of %r: the coordinator was not told that it is aborted: %s", self._id, error)
            return self.life.not_decided(error)

    async def _decision(self, call: EndTransaction) -> Decided:
        coordinator = self._routes.coordinator
        try:
            decided: Decided = await coordinator.call(call, idempotent=False)
        except OutcomeUnknownError:  # what a later answer means depends on it
            self.life.unanswered()
            decided = await coordinator.call(call)
        return decided

    async def _mark(self, action: Mark, places: dict[str, Place]) -> None:
        transaction, commit, seals = action

        async def mark(participant: str, seal: bytes) -> bool:
            call = MarkTransaction(
                producer_id=transaction.producer_id, epoch=transaction.epoch, commit=commit, seal=seal
            )
            place, topic_id = places[participant]
            return await marked(self._routes, place, topic_id, call, whose=self._id)

        if all(await asyncio.gather(*(mark(*each) for each in seals))) and commit:
            self.life.marked(transaction)

    # -- participants ------------------------------------------------------------------------------

    async def _touch(self, place: Place) -> None:
        info = same_topic(await self._routes.topic(place.partition.topic), place.topic_id)
        group_id = info.partitions[place.partition.partition].group_id
        self._places[group_id] = place
        self.life.touched(group_id)

    def _touched(self) -> list[str]:
        """Those that may have a batch of it."""
        found = self._sender.touched()
        self._places.update({group_id: Place(*where) for group_id, where in found.items()})
        return list(found)


def _log_failure(closing: asyncio.Task[None]) -> None:
    if not closing.cancelled() and closing.exception() is not None:
        _log.warning("a producer that was closed too soon has not ended its transactions: %s", closing.exception())
