"""Consumer: what an application reads records with.

    with rq.consumer("orders", group="billing") as consumer:
        for record in consumer:
            ...

Records arrive in the background; ``poll`` takes what is there and waits only
if there is nothing. With a group the partitions of the topics are shared with
its other members; without one, or with ``partitions``, this consumer reads on
its own.

What was handed out counts as done when the application asks for more, or leaves
the ``with`` block without an error, and is committed in the background
(``auto_commit``) or by ``commit``. From the first ``ack`` on only the records
that are acknowledged count. ``at_most_once`` commits before it hands out, and
``exactly_once`` only in transactions of a producer (``tx.commit_offsets``).

``close`` says nothing about what was handed out last: it may come from another
thread, or from a signal handler, while the application is at work with it.

One thread, or one asyncio task, uses it at a time; ``ack``, ``wakeup`` and
``close`` may come from others. A listener is called in the thread that polls.
A forked child cannot use it (``ForkedError``); the parent goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Protocol

from typing_extensions import Unpack

from rayqueue.client.arguments import check_count, check_timeout_ms, hinted, refuse_unknown
from rayqueue.client.consumer.assigned import AssignedPartition
from rayqueue.client.consumer.commits import PendingCommit
from rayqueue.client.consumer.decoding import Decoding, DecodingPolling
from rayqueue.client.consumer.one_caller import OneCaller
from rayqueue.client.consumer.poll import Block, Polling, Unreadable
from rayqueue.client.consumer.reader import ConsumerTasks
from rayqueue.client.consumer.wanted import Options, as_partition
from rayqueue.client.io import IoThread
from rayqueue.client.twins import Twin, awaiting, blocking, in_io, run_awaiting, run_blocking
from rayqueue.config import ConsumerSettings, Settings
from rayqueue.errors import (
    ClosedError,
    InvalidInputError,
    NotLeaderError,
    StaleGenerationError,
)
from rayqueue.net.interfaces import Routes
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import KeyT, Record, ValueT
from rayqueue.records.room import Room
from rayqueue.values import DESERIALIZERS

if TYPE_CHECKING:
    from rayqueue.client.options import ConsumerOptions

PartitionLike = TopicPartition | tuple[str, int]
Offsets = int | Mapping[int, int]
"""One for all lanes, or one per lane."""

_OPTIONS = tuple(inspect.signature(Options).parameters)[1:]

_FOREVER_S = 3600.0
_CLOSE_WAIT_S = 10.0


class Connected(Protocol):
    """The part of ``RayQueue`` that a consumer needs."""

    @property
    def io(self) -> IoThread: ...
    @property
    def routes(self) -> Any: ...
    @property
    def settings(self) -> Settings: ...


class Consumer(Twin, Generic[ValueT, KeyT]):
    """See the module's text, and ``RayQueue.consumer`` for all that can be given."""

    def __init__(
        self,
        rq: Connected,
        topics: Sequence[str] = (),
        *,
        model: Any = None,
        value_deserializer: Any = None,
        key_deserializer: Any = None,
        **options: Unpack[ConsumerOptions],
    ) -> None:
        overrides: dict[str, Any] = dict(options)
        self._options = Options(topics, **{name: overrides.pop(name) for name in _OPTIONS if name in overrides})
        listener = options.get("listener")
        decoding = Decoding.of(model, value_deserializer, key_deserializer)
        settings = rq.settings
        if overrides:
            refuse_unknown("a consumer", overrides, (*_OPTIONS, *DESERIALIZERS, *ConsumerSettings.model_fields))
            known = settings.consumer.model_dump()
            settings = settings.model_copy(update={"consumer": ConsumerSettings(**{**known, **overrides})})
        routes: Routes = rq.routes
        self._io = rq.io
        self._settings = settings.consumer
        self._core = ConsumerTasks(routes, self._io.loop, settings, self._options)
        self._sub = self._core.subscription
        self._caller = OneCaller("consumer")
        self._close_waits = False
        if decoding is None:
            self._polling = Polling(self._io, self._core, self._settings, listener)
        else:
            self._polling = DecodingPolling(self._io, self._core, self._settings, listener, decoding)
        self._given_up = weakref.finalize(self, _abandon, self._io, self._core)

    # -- reading -------------------------------------------------------------------------

    @blocking
    async def poll(
        self, *, max_records: int | None = None, timeout_ms: int = 1000, max_bytes: int | None = None
    ) -> list[Record[ValueT, KeyT]]:
        """The next records, at most so many. Waits up to ``timeout_ms`` for the first; [] if none came.

        ``max_bytes``: of keys, values and headers together, and 128 for each record. One that is larger comes alone.
        """
        async with _Call(self):
            return await self._polling.records(max_records, check_timeout_ms(timeout_ms) / 1000, max_bytes) or []

    poll_async = awaiting(poll)

    @blocking
    async def poll_arrow(self, *, max_records: int | None = None, timeout_ms: int = 1000) -> Any:
        """The next batches as a ``pyarrow.Table``; without rows if none came. Nothing is copied.

        Its columns are those of ``rayqueue.records.table``. Keys and values are bytes here, whatever the consumer's
        deserializers are.
        """
        from rayqueue.client.consumer import arrow

        async with _Call(self):
            parts = await self._polling.parts(max_records, check_timeout_ms(timeout_ms) / 1000)
        return arrow.table(parts or [])

    poll_arrow_async = awaiting(poll_arrow)

    def __iter__(self) -> Iterator[Record[ValueT, KeyT]]:
        """Every record, as they come, until ``close``. A record is done when the next one is asked for."""
        while not self._polling.closing:
            try:
                block = run_blocking(self._next_block())
            except ClosedError:
                return
            yield from self._polling.each(block)

    async def __aiter__(self) -> AsyncIterator[Record[ValueT, KeyT]]:
        """The same for a coroutine."""
        while not self._polling.closing:
            try:
                block = await run_awaiting(self._next_block())
            except ClosedError:
                return
            for record in self._polling.each(block):
                yield record
            await asyncio.sleep(0)  # a backlog must not keep the other tasks from running

    async def _next_block(self) -> Block | None:
        async with _Call(self):
            return await self._polling.block(_FOREVER_S)

    def wakeup(self) -> None:
        """Let a poll that waits return at once with what there is; or the next one. From any thread."""
        self._caller.check_process()
        self._polling.woken = True
        self._core.wakeup.ring()

    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions that are read now."""
        self._caller.check_process()
        with self._sub.lock:
            return frozenset(assigned.partition for assigned in self._sub.assigned.values() if not assigned.letting_go)

    def positions(self) -> dict[TopicPartition, int]:
        """The offset of the next record to hand out, as ``position``, of each partition of which it is known by now."""
        self._caller.check_process()
        with self._sub.lock:
            known = [each for each in self._sub.assigned.values() if each.begun and not each.letting_go]
            return {each.partition: min(each.positions().values()) for each in known}

    # -- acknowledging and committing --------------------------------------------------------

    def ack(self, record: Record[Any, Any]) -> bool:
        """This record is done. From any thread. May be repeated.

        False, and of no effect, if its partition went to another member since: it is read there.
        """
        self._caller.check_process()
        return self._sub.ack(TopicPartition(record.topic, record.partition), record.lane, record.offset)

    @blocking
    async def commit(self, offsets: Mapping[PartitionLike, Offsets] | None = None, *, rewind: bool = False) -> None:
        """All that was handed out, or acknowledged; or these offsets, each of the next record to be read.

        ``StaleGenerationError`` if a partition went to another member: what was not committed will be read there.
        An offset that is given goes back only if ``rewind``.
        """
        async with _Call(self):
            await in_io(self._io, self._committing(offsets, rewind), finish=True)

    @hinted
    def commit_async(
        self, offsets: Mapping[PartitionLike, Offsets] | None = None, *, rewind: bool = False
    ) -> PendingCommit:
        """The same, begun at once and not waited for: ``await`` it, or look at it later."""
        return PendingCommit(self._io.run(self._committing(offsets, rewind)))

    def _committing(self, offsets: Mapping[PartitionLike, Offsets] | None, rewind: bool) -> Coroutine[Any, Any, None]:
        self._check_open()
        if self._options.group is None:
            raise InvalidInputError("a consumer without a group has nowhere to commit: give group=")
        if self._options.exactly_once:
            raise InvalidInputError("delivery='exactly_once' commits by transactions: tx.commit_offsets(consumer)")
        if offsets is not None:
            vectors: dict[AssignedPartition, Mapping[int, int]] = {}
            for partition, given in offsets.items():
                assigned = self._sub.assigned.get(as_partition(partition))
                if assigned is None:
                    raise StaleGenerationError(f"{as_partition(partition)} is not assigned to this consumer (any more)")
                vectors[assigned] = assigned.vector(given)
            return self._core.commit(vectors, rewind=rewind)
        self._sub.ack_handed()
        return self._commit_handed()

    def _staged_by_transactions(self) -> ConsumerTasks:
        """All that was handed out is done, and goes with a transaction. In the application's thread."""
        self._check_open()
        if not self._options.exactly_once:
            raise InvalidInputError(
                "a transaction commits offsets of consumers with delivery='exactly_once', which do not commit by "
                "themselves"
            )
        self._sub.ack_handed()
        return self._core

    @blocking
    async def rewind(self) -> None:
        """Go back to behind what transactions have committed, or to where reading began: the rest comes again.

        For ``delivery="exactly_once"``, after an exception in a transaction that had not got to ``commit_offsets``.
        """
        async with _Call(self):
            self._check_open()
            self._core.rewind()

    rewind_async = awaiting(rewind)

    async def _commit_handed(self) -> None:
        """In the I/O thread, where partitions are lost, so that none can be lost unseen on the way to its commit."""
        errors = await self._core.commit_due()
        forfeited = self._sub.take_forfeited()
        if forfeited:
            names = ", ".join(map(str, sorted(forfeited)))
            raise StaleGenerationError(f"{names} went to another member; what was not committed will be read there")
        if errors:
            raise errors[0]

    # -- steering ----------------------------------------------------------------------------

    @blocking
    async def seek(self, partition: PartitionLike, offset: Offsets) -> None:
        """Go on there. What was prefetched is dropped."""
        async with _Call(self):
            assigned = await self._begun(partition)
            self._sub.seek(assigned.partition, assigned.vector(offset))

    seek_async = awaiting(seek)

    @blocking
    async def seek_to_time(self, timestamp_ms: int, *partitions: PartitionLike) -> None:
        """Go on at the first record that is not older; in all partitions if none is named."""
        await self._seek_each(partitions, timestamp_ms)

    seek_to_time_async = awaiting(seek_to_time)

    @blocking
    async def seek_to_beginning(self, *partitions: PartitionLike) -> None:
        """Go on at the first record that there is."""
        await self._seek_each(partitions, "start")

    seek_to_beginning_async = awaiting(seek_to_beginning)

    @blocking
    async def seek_to_end(self, *partitions: PartitionLike) -> None:
        """Go on with what is written from now on."""
        await self._seek_each(partitions, "end")

    seek_to_end_async = awaiting(seek_to_end)

    async def _seek_each(self, partitions: Iterable[PartitionLike], place: Literal["start", "end"] | int) -> None:
        async with _Call(self):
            wanted = await self._each_of(partitions)

            async def found() -> list[int]:
                return list(await asyncio.gather(*(self._core.offset_of(place, each) for each in wanted)))

            for assigned, offset in zip(wanted, await in_io(self._io, found()), strict=True):
                self._sub.seek(assigned.partition, assigned.vector(offset))

    @blocking
    async def pause(self, *partitions: PartitionLike) -> None:
        """Hand out nothing of these, or of any, until ``resume``. They stay assigned."""
        async with _Call(self):
            self._sub.pause([each.partition for each in await self._each_of(partitions)])

    pause_async = awaiting(pause)

    @blocking
    async def resume(self, *partitions: PartitionLike) -> None:
        """Hand out what these, or all, have again."""
        async with _Call(self):
            self._sub.resume([each.partition for each in await self._each_of(partitions)])

    resume_async = awaiting(resume)

    def paused(self) -> frozenset[TopicPartition]:
        self._caller.check_process()
        with self._sub.lock:
            return frozenset(assigned.partition for assigned in self._sub.assigned.values() if assigned.paused)

    # -- questions ---------------------------------------------------------------------------

    @blocking
    async def position(self, partition: PartitionLike, *, lane: int | None = None) -> int:
        """The offset of the next record to hand out: of this lane, or the first of all."""
        self._caller.check_process()
        self._sub.settle(current_done=False)
        assigned = await self._begun(partition)
        with self._sub.lock:
            positions = assigned.positions()
        return positions[lane] if lane is not None else min(positions.values())

    position_async = awaiting(position)

    @blocking
    async def committed(self, partition: PartitionLike, *, lane: int | None = None) -> int | None:
        """The offset at which the group goes on after a restart: in this lane, or the first of all; None if none."""
        self._check_open()
        offsets = await in_io(self._io, self._core.committed(as_partition(partition)))
        if offsets is None:
            return None
        return offsets.get(lane) if lane is not None else min(offsets.values())

    committed_async = awaiting(committed)

    @blocking
    async def lag(self) -> dict[TopicPartition, int]:
        """Records that the group has not committed, in every partition of the topics.

        Without a group: offsets between this consumer's position and the end of the log.
        """
        self._check_open()
        return await in_io(self._io, self._core.lag())

    lag_async = awaiting(lag)

    @blocking
    async def peek(
        self,
        topic: str,
        partition: int,
        *,
        offset: int | None = None,
        timestamp_ms: int | None = None,
        max_records: int = 10,
        max_bytes: int | None = None,
    ) -> list[Record[ValueT, KeyT]]:
        """Records from an offset, or a time, on, in the order of the log. Nothing is consumed.

        Without either: from the beginning. [] at the end. ``OffsetOutOfRangeError`` past it. What cannot be read is
        raised, whatever ``on_corrupt`` says. ``max_bytes`` as in ``poll``.
        """
        self._check_open()
        if offset is not None and timestamp_ms is not None:
            raise InvalidInputError("peek takes an offset or a time, not both")
        most = self._polling.most(max_records)
        room = None if max_bytes is None else Room(check_count("max_bytes", max_bytes))
        where = TopicPartition(topic, partition)
        found = await in_io(self._io, self._core.peek(where, offset, timestamp_ms, most, room))
        return self._polling.decoded(found)

    peek_async = awaiting(peek)

    @property
    def skipped_batches(self) -> int:
        """Batches that could not be read and were passed over (``on_corrupt``)."""
        return self._polling.skipped

    @property
    def skipped_records(self) -> int:
        """Records whose value or key could not be decoded, and that were passed over (``on_corrupt``)."""
        return self._polling.skipped_records

    def take_set_aside(self) -> list[tuple[Unreadable, bytes]]:
        """With ``on_corrupt="set_aside"``: what could not be read since the last call, each with its place and bytes.

        Of a record these are its value's bytes, and the error's ``details`` has all of it (``record``). At most 100
        are kept: ``poll`` raises rather than keep more, until they are taken.
        """
        taken, self._polling.set_aside = self._polling.set_aside, []
        return taken

    # -- closing -----------------------------------------------------------------------------

    @blocking
    async def close(self) -> None:
        """Commit what is done (``auto_commit``), leave the group, and end every iteration. May be repeated.

        What was handed out last is not done by this: another consumer gets it again. ``commit`` first if it is, or use
        a ``with`` block. From any thread and from a signal handler; in the middle of a call, once that ends.
        """
        await self._close(done=False)

    close_async = awaiting(close)

    async def _close(self, *, done: bool) -> None:
        if not self._begin_close():
            return
        if self._caller.is_inside:  # this very thread may hold the lock of what it was interrupted in
            self._close_waits = True
            return
        await self._caller.enter_when_free(_CLOSE_WAIT_S)
        try:
            await self._polling.close(done=done)
        finally:
            self._caller.leave()
        self._given_up.detach()

    def _begin_close(self) -> bool:
        """Whether there is something to close. Whoever waits in a poll comes back."""
        if self._core.closed or not self._io.usable:
            return False
        self._polling.closing = True
        if self._caller.is_inside:
            self._io.loop.call_soon_threadsafe(self._sub.interrupt)
        else:
            self._sub.interrupt()
        return True

    async def _leave(self, kind: type[BaseException] | None) -> None:
        await self._close(done=kind is None)  # what was being worked on when something was raised is not done

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError(
            "a consumer stays in its process: pass the RayQueue handle, and make the consumer in the task or actor"
        )

    def __repr__(self) -> str:
        pattern = self._options.pattern
        names = ", ".join(self._options.named) if pattern is None else f"topics like {pattern.text}"
        return f"<Consumer of {names}, group {self._options.group}{', closed' if self._polling.closing else ''}>"

    # -- within ------------------------------------------------------------------------------

    def _check_open(self) -> None:
        self._caller.check_process()
        if self._polling.closing:
            raise ClosedError("this consumer was closed")

    async def _each_of(self, partitions: Iterable[PartitionLike]) -> list[AssignedPartition]:
        """Of these, or of all that are assigned."""
        return [await self._begun(each) for each in (partitions or self.assignment())]

    async def _begun(self, partition: PartitionLike) -> AssignedPartition:
        """Once it is known where it is read from. ``InvalidInputError`` unless it is assigned."""
        self._check_open()
        wanted = as_partition(partition)
        assigned = self._sub.assigned.get(wanted)
        if assigned is None:
            raise InvalidInputError(f"{wanted} is not assigned to this consumer", partition=str(wanted))
        if not assigned.begun:
            await in_io(self._io, self._core.begun(assigned))
            if not assigned.begun:
                raise assigned.error or NotLeaderError(f"{wanted} cannot be read yet: nobody leads it", leader=None)
        return assigned


class _Call:
    """One call of the application. A ``close`` that came in the middle of it is carried out when it is over."""

    __slots__ = ("_consumer",)

    def __init__(self, consumer: Consumer[Any, Any]) -> None:
        self._consumer = consumer

    async def __aenter__(self) -> None:
        self._consumer._caller.enter()

    async def __aexit__(self, *_: object) -> None:
        consumer = self._consumer
        consumer._caller.leave()
        if consumer._close_waits and not consumer._caller.is_inside:
            consumer._close_waits = False
            await consumer._close(done=False)


async def opened(consumer: Consumer[ValueT, KeyT]) -> Consumer[ValueT, KeyT]:
    """The same, once its topics are known to be there. Without this they are looked for by the first poll."""
    core = consumer._core
    await in_io(consumer._io, core.check() if core.managed else core.start())
    return consumer


def _abandon(io: IoThread, core: ConsumerTasks) -> None:
    """The application has dropped its consumer without closing it."""
    if io.usable:
        io.run(core.close(commit=False))
