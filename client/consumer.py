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
that are acknowledged count. ``at_most_once`` commits before it hands out.

``close`` says nothing about what was handed out last: it may come from another
thread, or from a signal handler, while the application is at work with it.

One thread, or one asyncio task, uses it at a time; ``ack``, ``wakeup`` and
``close`` may come from others. A listener is called in the thread that polls.
A forked child cannot use it (``ForkedError``); the parent goes on.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Literal, NoReturn, Protocol

from typing_extensions import Self

from rayqueue.client.arguments import check_timeout_ms, hinted, refuse_unknown
from rayqueue.client.consuming import Consuming, Options
from rayqueue.client.decoding import Decoding, DecodingPolling
from rayqueue.client.feed import Feed
from rayqueue.client.io import IoThread
from rayqueue.client.pattern import TopicPattern
from rayqueue.client.polling import Listener, Polling, Unreadable
from rayqueue.client.routing import Routes
from rayqueue.client.turn import Pending, Turn, drive, drive_async
from rayqueue.config import ConsumerSettings, Settings
from rayqueue.errors import (
    ClosedError,
    InvalidInputError,
    InvalidOffsetError,
    NotLeaderError,
    StaleGenerationError,
    TopicRecreatedError,
)
from rayqueue.protocol.topics import TopicPartition, check_name
from rayqueue.records import KeyT, Record, RecordBatch, ValueT
from rayqueue.values import DESERIALIZERS

PartitionLike = TopicPartition | tuple[str, int]
Offsets = int | Mapping[int, int]
"""One for all lanes, or one per lane."""

_OPTIONS = ("group", "partitions", "pattern", "delivery", "auto_commit", "ack", "listener", "instance", "client", "pin")

_FOREVER_S = 3600.0
_CLOSE_WAIT_S = 10.0


class Connected(Protocol):
    """What a consumer needs of ``RayQueue``."""

    @property
    def io(self) -> IoThread: ...
    @property
    def routes(self) -> Any: ...
    @property
    def settings(self) -> Settings: ...


class Consumer(Generic[ValueT, KeyT]):
    """See the module's text, and ``ConsumerSettings`` for all that can be given as ``overrides``."""

    def __init__(
        self,
        rq: Connected,
        topics: Sequence[str] = (),
        group: str | None = None,
        *,
        partitions: Iterable[PartitionLike] | None = None,
        pattern: str | re.Pattern[str] | None = None,
        delivery: Literal["at_least_once", "at_most_once", "exactly_once"] = "at_least_once",
        auto_commit: bool = True,
        ack: Literal["poll", "record"] = "poll",
        listener: Listener | None = None,
        instance: str | None = None,
        client: str | None = None,
        pin: bool = False,
        model: Any = None,
        value_deserializer: Any = None,
        key_deserializer: Any = None,
        **overrides: Any,
    ) -> None:
        if delivery == "exactly_once":
            raise InvalidInputError("delivery='exactly_once' needs transactions, which come with a later release")
        if delivery not in ("at_least_once", "at_most_once") or ack not in ("poll", "record"):
            raise InvalidInputError(
                "delivery is 'at_least_once' or 'at_most_once', and ack is 'poll' or 'record', "
                f"not {delivery!r} and {ack!r}"
            )
        if delivery == "at_most_once" and (group is None or ack == "record"):
            raise InvalidInputError("delivery='at_most_once' needs a group to commit for, and has no use for ack")
        if pin and group is None:
            raise InvalidInputError("pin=True needs the group that retention shall wait for")
        decoding = Decoding.of(model, value_deserializer, key_deserializer)
        chosen = None if partitions is None else tuple(dict.fromkeys(map(_partition, partitions)))
        names = tuple(dict.fromkeys(topics if chosen is None else [*topics, *(each.topic for each in chosen)]))
        if pattern is not None and (names or chosen is not None):
            raise InvalidInputError("pattern= says which topics are read: give no topics or partitions besides")
        if pattern is None and (not names or chosen == ()):
            raise InvalidInputError("a consumer needs a topic, a pattern or partitions to read")
        for name in names:
            check_name("topic", name)
        if group is not None:
            check_name("group", group)
        settings = rq.settings
        if overrides:
            refuse_unknown("a consumer", overrides, (*_OPTIONS, *DESERIALIZERS, *ConsumerSettings.model_fields))
            known = settings.consumer.model_dump()
            settings = settings.model_copy(update={"consumer": ConsumerSettings(**{**known, **overrides})})
        options = Options(
            topics=names,
            partitions=chosen,
            group=group,
            instance=instance,
            client=client or f"{socket.gethostname()}-{os.getpid()}",
            delivery="at_most_once" if delivery == "at_most_once" else "at_least_once",
            auto_commit=auto_commit,
            by_record=ack == "record",
            pin=pin,
            listened=listener is not None,
            pattern=None if pattern is None else TopicPattern(pattern),
        )
        routes: Routes = rq.routes
        self._io = rq.io
        self._settings = settings.consumer
        self._options = options
        self._listener = listener
        self._core = Consuming(routes, self._io.loop, settings, options)
        self._sub = self._core.subscription
        self._turn = Turn("consumer")
        self._close_waits = False
        if decoding is None:
            self._polling = Polling(self._io, self._core, self._settings, listener)
        else:
            self._polling = DecodingPolling(self._io, self._core, self._settings, listener, decoding)
        self._given_up = weakref.finalize(self, _abandon, self._io, self._core)
        self._io.call(self._core.check() if self._core.managed else self._core.start())

    # -- reading -------------------------------------------------------------------------

    @hinted
    def poll(self, *, max_records: int | None = None, timeout_ms: int = 1000) -> list[Record[ValueT, KeyT]]:
        """The next records, at most so many. Waits up to ``timeout_ms`` for the first; [] if none came."""
        with self._calling():
            return drive(self._polling.records(max_records, check_timeout_ms(timeout_ms) / 1000), self._core.bell) or []

    @hinted
    async def poll_async(self, *, max_records: int | None = None, timeout_ms: int = 1000) -> list[Record[ValueT, KeyT]]:
        """The same for a coroutine."""
        with self._calling():
            steps = self._polling.records(max_records, check_timeout_ms(timeout_ms) / 1000)
            return await drive_async(steps, self._core.bell) or []

    @hinted
    def poll_arrow(self, *, max_records: int | None = None, timeout_ms: int = 1000) -> Any:
        """The next batches as a ``pyarrow.Table``; without rows if none came. Nothing is copied.

        Columns: topic, partition, offset, timestamp, key, value, headers, lane. Keys and values are bytes here,
        whatever the consumer's deserializers are.
        """
        from rayqueue.client import consumer_arrow as arrow

        with self._calling():
            parts = drive(self._polling.parts(max_records, check_timeout_ms(timeout_ms) / 1000), self._core.bell)
        return arrow.table(parts or [])

    @hinted
    async def poll_arrow_async(self, *, max_records: int | None = None, timeout_ms: int = 1000) -> Any:
        """The same for a coroutine."""
        from rayqueue.client import consumer_arrow as arrow

        with self._calling():
            parts = await drive_async(
                self._polling.parts(max_records, check_timeout_ms(timeout_ms) / 1000), self._core.bell
            )
        return arrow.table(parts or [])

    def __iter__(self) -> Iterator[Record[ValueT, KeyT]]:
        """Every record, as they come, until ``close``. A record is done when the next one is asked for."""
        while not self._polling.closing:
            with self._calling():
                try:
                    block = drive(self._polling.block(_FOREVER_S), self._core.bell)
                except ClosedError:
                    return
            yield from self._polling.each(block)

    async def __aiter__(self) -> AsyncIterator[Record[ValueT, KeyT]]:
        """The same for a coroutine."""
        while not self._polling.closing:
            with self._calling():
                try:
                    block = await drive_async(self._polling.block(_FOREVER_S), self._core.bell)
                except ClosedError:
                    return
            for record in self._polling.each(block):
                yield record
            await asyncio.sleep(0)  # a backlog must not keep the other tasks from running

    def wakeup(self) -> None:
        """Let a poll that waits return at once with what there is; or the next one. From any thread."""
        self._turn.check_process()
        self._polling.woken = True
        self._core.bell.ring()

    def assignment(self) -> frozenset[TopicPartition]:
        """What is read now."""
        self._turn.check_process()
        with self._sub.lock:
            return frozenset(feed.partition for feed in self._sub.feeds.values() if not feed.letting_go)

    # -- acknowledging and committing --------------------------------------------------------

    def ack(self, record: Record[Any, Any]) -> None:
        """This record is done. From any thread. Of no effect if its partition went to another member."""
        self._turn.check_process()
        self._sub.ack(TopicPartition(record.topic, record.partition), record.lane, record.offset)

    @hinted
    def commit(self, offsets: Mapping[PartitionLike, Offsets] | None = None, *, rewind: bool = False) -> None:
        """All that was handed out, or acknowledged; or these offsets, each of the next record to be read.

        ``StaleGenerationError`` if a partition went to another member: what was not committed will be read there.
        An offset that is given goes back only if ``rewind``.
        """
        with self._calling():
            self._io.call(self._committing(offsets, rewind))

    @hinted
    def commit_async(self, offsets: Mapping[PartitionLike, Offsets] | None = None, *, rewind: bool = False) -> Pending:
        """The same without waiting: ``await`` it, or look at it later."""
        return Pending(self._io.run(self._committing(offsets, rewind)))

    def _committing(self, offsets: Mapping[PartitionLike, Offsets] | None, rewind: bool) -> Any:
        self._check_open()
        if self._options.group is None:
            raise InvalidInputError("a consumer without a group has nowhere to commit: give group=")
        if offsets is not None:
            vectors: dict[Feed, Mapping[int, int]] = {}
            for partition, given in offsets.items():
                feed = self._sub.feeds.get(_partition(partition))
                if feed is None:
                    raise StaleGenerationError(f"{_partition(partition)} is not assigned to this consumer (any more)")
                vectors[feed] = _vector(given, len(feed.lanes))
            return self._core.commit(vectors, rewind=rewind)
        forfeited, self._sub.forfeited = self._sub.forfeited, set()
        if forfeited:
            names = ", ".join(map(str, sorted(forfeited)))
            raise StaleGenerationError(f"{names} went to another member; what was not committed will be read there")
        self._sub.ack_handed()
        return self._core.commit(None, rewind=False)

    # -- steering ----------------------------------------------------------------------------

    def seek(self, partition: PartitionLike, offset: Offsets) -> None:
        """Go on there. What was prefetched is dropped."""
        with self._calling():
            feed = self._feed(partition)
            self._sub.seek(feed.partition, _vector(offset, len(feed.lanes)))

    def seek_to_time(self, timestamp_ms: int, *partitions: PartitionLike) -> None:
        """Go on at the first record that is not older; in all partitions if none is named."""
        self._seek_each(partitions, lambda feed: self._core.find(feed.partition, feed.topic_id, timestamp_ms))

    def seek_to_beginning(self, *partitions: PartitionLike) -> None:
        async def start(feed: Feed) -> int:
            return (await self._core.bounds(feed.partition, feed.topic_id)).start

        self._seek_each(partitions, start)

    def seek_to_end(self, *partitions: PartitionLike) -> None:
        async def end(feed: Feed) -> int:
            return (await self._core.bounds(feed.partition, feed.topic_id)).end

        self._seek_each(partitions, end)

    def _seek_each(self, partitions: Iterable[PartitionLike], find: Callable[[Feed], Any]) -> None:
        with self._calling():
            feeds = [self._feed(each) for each in (tuple(partitions) or tuple(self.assignment()))]

            async def found() -> list[int]:
                return list(await asyncio.gather(*map(find, feeds)))

            for feed, offset in zip(feeds, self._io.call(found()), strict=True):
                self._sub.seek(feed.partition, _vector(offset, len(feed.lanes)))

    def pause(self, *partitions: PartitionLike) -> None:
        """Hand out nothing of these, or of any, until ``resume``. They stay assigned."""
        with self._calling():
            self._sub.pause([self._feed(each).partition for each in (partitions or self.assignment())])

    def resume(self, *partitions: PartitionLike) -> None:
        with self._calling():
            self._sub.resume([self._feed(each).partition for each in (partitions or self.assignment())])

    def paused(self) -> frozenset[TopicPartition]:
        self._turn.check_process()
        with self._sub.lock:
            return frozenset(feed.partition for feed in self._sub.feeds.values() if feed.paused)

    # -- questions ---------------------------------------------------------------------------

    @hinted
    def position(self, partition: PartitionLike, *, lane: int | None = None) -> int:
        """The offset of the next record to hand out: of this lane, or the first of all."""
        self._turn.check_process()
        self._sub.settle(current_done=False)
        feed = self._feed(partition)
        with self._sub.lock:
            positions = feed.positions()
        return positions[lane] if lane is not None else min(positions.values())

    @hinted
    def committed(self, partition: PartitionLike, *, lane: int | None = None) -> int | None:
        """Where the group goes on after a restart: in this lane, or the first of all. None if nowhere yet."""
        self._check_open()
        offsets = self._io.call(self._core.committed(_partition(partition)))
        if offsets is None:
            return None
        return offsets.get(lane) if lane is not None else min(offsets.values())

    def lag(self) -> dict[TopicPartition, int]:
        """Records that the group has not committed, in every partition of the topics.

        Without a group: offsets between this consumer's position and the end of the log.
        """
        self._check_open()
        return self._io.call(self._core.lag())

    @hinted
    def peek(
        self,
        topic: str,
        partition: int,
        *,
        offset: int | None = None,
        timestamp_ms: int | None = None,
        max_records: int = 10,
    ) -> list[Record[ValueT, KeyT]]:
        """Records from an offset, or a time, on, in the order of the log. Nothing is consumed.

        Without either: from the beginning. [] at the end. ``OffsetOutOfRangeError`` past it. What cannot be read is
        raised, whatever ``on_corrupt`` says.
        """
        self._check_open()
        if offset is not None and timestamp_ms is not None:
            raise InvalidInputError("peek takes an offset or a time, not both")
        found = self._io.call(
            self._peek(TopicPartition(topic, partition), offset, timestamp_ms, self._polling.most(max_records))
        )
        return self._polling.decoded(found)

    async def _peek(
        self, partition: TopicPartition, offset: int | None, timestamp_ms: int | None, most: int
    ) -> list[Record]:
        name = partition.topic
        try:
            return await self._peek_in(await self._core.topic_id(name), partition, offset, timestamp_ms, most)
        except TopicRecreatedError:  # what was known of this name was old, and the topic that has it now is meant
            return await self._peek_in(await self._core.topic_id(name), partition, offset, timestamp_ms, most)

    async def _peek_in(
        self, topic_id: int, partition: TopicPartition, offset: int | None, timestamp_ms: int | None, most: int
    ) -> list[Record]:
        if offset is None and timestamp_ms is not None:
            offset = await self._core.find(partition, topic_id, timestamp_ms)
        elif offset is None:
            offset = (await self._core.bounds(partition, topic_id)).start
        found: list[Record] = []
        while len(found) < most:
            answer = await self._core.look(partition, topic_id, offset, self._settings.fetch_bytes)
            if not answer.batches:
                break
            for base, count, payload in answer.batches:
                records = RecordBatch.decode(payload, base_offset=base).records(partition.topic, partition.partition)
                found += records[max(0, offset - base) : max(0, offset - base) + most - len(found)]
                offset = base + count
                if len(found) >= most:
                    break
        return found

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

    def close(self) -> None:
        """Commit what is done (``auto_commit``), leave the group, and end every iteration. May be repeated.

        What was handed out last is not done by this: another consumer gets it again. ``commit`` first if it is, or use
        a ``with`` block. From any thread and from a signal handler; in the middle of a call, once that ends.
        """
        self._close(done=False)

    async def close_async(self) -> None:
        """The same for a coroutine."""
        await self._close_async(done=False)

    def _close(self, *, done: bool) -> None:
        if not self._begin_close():
            return
        if self._turn.is_mine:  # this very thread may hold the lock of what it was interrupted in
            self._close_waits = True
            return
        with self._turn.taken(wait_s=_CLOSE_WAIT_S):
            drive(self._polling.close(done=done), self._core.bell)
        self._given_up.detach()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """One call of the application. A ``close`` that came in the middle of it is carried out when it is over."""
        try:
            with self._turn.taken():
                yield
        finally:
            if self._close_waits and not self._turn.is_mine:
                self._close_waits = False
                self._close(done=False)

    async def _close_async(self, *, done: bool) -> None:
        if self._begin_close():
            deadline_s = time.monotonic() + _CLOSE_WAIT_S
            while self._turn.is_others and time.monotonic() < deadline_s:  # noqa: ASYNC110 - its owner may be another thread
                await asyncio.sleep(0.005)
            with self._turn.taken():
                await drive_async(self._polling.close(done=done), self._core.bell)
            self._given_up.detach()

    def _begin_close(self) -> bool:
        """Whether there is something to close. Whoever waits in a poll comes back."""
        if self._core.closed or not self._io.usable:
            return False
        self._polling.closing = True
        if self._turn.is_mine:
            self._io.loop.call_soon_threadsafe(self._sub.interrupt)
        else:
            self._sub.interrupt()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # What was being worked on when something was raised is not done.
        self._close(done=kind is None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._close_async(done=kind is None)

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError(
            "a consumer stays in its process: pass the RayQueue handle, and make the consumer in the task or actor"
        )

    def __repr__(self) -> str:
        pattern = self._options.pattern
        names = ", ".join(self._options.topics) if pattern is None else f"topics like {pattern.text}"
        return f"<Consumer of {names}, group {self._options.group}{', closed' if self._polling.closing else ''}>"

    # -- within ------------------------------------------------------------------------------

    def _check_open(self) -> None:
        self._turn.check_process()
        if self._polling.closing:
            raise ClosedError("this consumer was closed")

    def _feed(self, partition: PartitionLike) -> Feed:
        """``InvalidInputError`` unless it is assigned."""
        self._check_open()
        wanted = _partition(partition)
        feed = self._sub.feeds.get(wanted)
        if feed is None:
            raise InvalidInputError(f"{wanted} is not assigned to this consumer", partition=str(wanted))
        if not feed.begun:
            self._io.call(self._core.begun(feed))
            if not feed.begun:
                raise feed.error or NotLeaderError(f"{wanted} cannot be read yet: nobody leads it", leader=None)
        return feed


def _partition(given: Any) -> TopicPartition:
    if isinstance(given, TopicPartition):
        return given
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str) and isinstance(given[1], int):
        return TopicPartition(*given)
    raise InvalidInputError(f"a partition is a TopicPartition, or a topic and a number, not {given!r}")


def _vector(given: Any, lanes: int) -> dict[int, int]:
    vector: dict[Any, Any] = dict(given) if isinstance(given, Mapping) else dict.fromkeys(range(lanes), given)
    for lane, offset in vector.items():
        if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
            raise InvalidOffsetError(f"an offset is a number that is not negative, not {offset!r}")
        if not isinstance(lane, int) or not 0 <= lane < lanes:
            raise InvalidInputError(f"there is no lane {lane!r}; the topic has {lanes}", lane=lane)
    return vector


def _abandon(io: IoThread, core: Consuming) -> None:
    """The application has dropped its consumer without closing it."""
    if io.usable:
        io.run(core.close(commit=False))
