"""The producer: what an application calls to write.

``send`` checks the record, chooses its partition and leaves it with the
accumulator; the rest happens in the I/O thread. A mistake in the arguments is
raised by the call itself, and nothing is accepted then. Everything later is
told by the ``Delivery``; and what nobody has asked a delivery about by ``flush``
and ``close``, which raise ``DeliveryFailedError``: no record is lost in silence.

A producer may be used from several threads, and handed to a Ray task or actor:
there it is a new producer with the same options, of the same cluster. In a
forked child it accepts nothing (``ForkedError``); the parent's goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from typing_extensions import Never, Self, Unpack

from rayqueue.client.arguments import check_timeout_ms, hinted, refuse_unknown
from rayqueue.client.forks import forked
from rayqueue.client.producer.accumulator import ANY, BATCH_BYTES, KEY_BYTES, RECORD_BYTES, Accumulator, Lack, closed
from rayqueue.client.producer.batch import COMPRESSIONS
from rayqueue.client.producer.callbacks import CallbackThread
from rayqueue.client.producer.columns import as_bytes, check_headers
from rayqueue.client.producer.delivery import (
    Deliveries,
    Delivery,
    Part,
    RecordMetadata,
    delivery_failed,
    failed_outcome,
)
from rayqueue.client.producer.destination import Target, Targets
from rayqueue.client.producer.partitioners import CustomPartitioner, check_partitioner
from rayqueue.client.producer.send_many import MAX_TIMESTAMP, ManyRecords
from rayqueue.client.producer.sender import Sender
from rayqueue.client.producer.transactions.tasks import TransactionTasks
from rayqueue.client.producer.transactions.transaction import Transaction
from rayqueue.client.twins import Twin, awaiting, beside, blocking, in_io, part, rest, run_awaiting, run_blocking
from rayqueue.client.wakeup import Wakeup
from rayqueue.config import ProducerSettings
from rayqueue.errors import (
    DeliveryFailedError,
    InvalidInputError,
    OutcomeUnknownError,
    QueueFullError,
    UnknownPartitionError,
)
from rayqueue.protocol.topics import check_name
from rayqueue.records import HeadersIn, KeyT, ValueT
from rayqueue.values import SERIALIZERS

if TYPE_CHECKING:
    from rayqueue.client.options import ProducerOptions

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_FOREVER_S = 3600.0
_MAX_ID = 255
_SEND_OPTIONS = ("topic", "value", "key", "headers", "priority", "partition", "timestamp_ms", "on_delivery")

OnDelivery = Callable[[Delivery], object]
OnDeliveries = Callable[[Deliveries], object]


class Producer(Twin, Generic[ValueT, KeyT]):
    """Writes records to topics. Made by ``RayQueue.producer``; options are those of ``ProducerSettings``."""

    def __init__(self, rq: Any, **options: Unpack[ProducerOptions]) -> None:
        self._rq = rq
        self._options: dict[str, Any] = dict(options)
        self.transactional_id: str | None = self._options.get("transactional_id")
        partitioner, self.settings = _settings_of(rq.settings.producer, self._options)
        settings = self.settings
        transactional = self.transactional_id is not None
        max_batch_bytes: int = rq.settings.log.max_batch_bytes
        batch_bytes = min(settings.batch_bytes, max_batch_bytes - BATCH_BYTES)
        self._io = rq.io
        loop: asyncio.AbstractEventLoop = rq.io.loop

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(sender.wake)
            except RuntimeError:
                raise closed() from None

        self._accumulator = Accumulator(
            batch_bytes=batch_bytes,
            buffer_bytes=settings.buffer_bytes,
            linger_ms=settings.linger_ms,
            delivery_timeout_ms=settings.delivery_timeout_ms,
            compression=COMPRESSIONS[settings.compression],
            transactional=transactional,
            clock_s=time.monotonic,
            wake=wake,
        )
        make = partial(Target, partitioner=partitioner, max_batch_bytes=max_batch_bytes, accumulator=self._accumulator)
        self._targets = Targets(make)
        sender = self._sender = Sender(
            self._accumulator,
            rq.routes,
            settings,
            rq.settings.client,
            loop=loop,
            targets=self._targets,
            transactional=transactional,
        )
        self._transactions: TransactionTasks | None = None
        if self.transactional_id is not None:
            self._transactions = TransactionTasks(
                self.transactional_id,
                settings.transaction_timeout_ms,
                self._accumulator,
                sender,
                rq.routes,
                loop,
            )
        self._bulk = ManyRecords(
            self._accumulator, batch_bytes, COMPRESSIONS[settings.compression], transactional=transactional
        )
        self._append = self._accumulator.append
        self._of = 0
        self._leaving = weakref.finalize(self, _left, self._accumulator)

    # -- sending -------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        value: ValueT | None,
        *,
        key: KeyT | None = None,
        headers: HeadersIn = None,
        priority: int = 0,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        on_delivery: OnDelivery | None = None,
        **unknown: Never,
    ) -> Delivery:
        """Accept a record; it is sent with others, in the order of the calls.

        Waits if ``buffer_bytes`` are on their way already, or as much as a bounded topic ever takes, for
        ``delivery_timeout_ms`` at most; or raises ``QueueFullError`` if ``on_full`` says so. ``on_delivery`` is called
        with the delivery in the callback thread.
        """
        if unknown:  # not @hinted, which costs every call something
            refuse_unknown("send", unknown, _SEND_OPTIONS)
        if on_delivery is not None:
            self._wait_for_callbacks()
        try:
            delivery = self._try_send(topic, value, key, headers, priority, partition, timestamp_ms, on_delivery)
        except UnknownPartitionError:
            self._look_up(topic, refresh=True)
            delivery = self._try_send(topic, value, key, headers, priority, partition, timestamp_ms, on_delivery)
        if delivery.__class__ is Lack:
            # Not a lambda, for which every call would make cells of its arguments.
            again = partial(self._try_send, topic, value, key, headers, priority, partition, timestamp_ms, on_delivery)
            delivery = run_blocking(self._when_space(delivery, again, may_wait=not self._io.is_current))
        return delivery  # type: ignore[return-value]

    @hinted
    async def send_async(
        self,
        topic: str,
        value: ValueT | None,
        *,
        key: KeyT | None = None,
        headers: HeadersIn = None,
        priority: int = 0,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> RecordMetadata:
        """Send a record and wait until it is acknowledged, in any event loop. Many of these may be under way."""
        if topic not in self._targets:
            await run_awaiting(self._find(topic))
        arguments = (topic, value, key, headers, priority, partition, timestamp_ms, None)
        try:
            delivery = self._try_send(*arguments)
        except UnknownPartitionError:
            await run_awaiting(self._find(topic, refresh=True))
            delivery = self._try_send(*arguments)
        if isinstance(delivery, Lack):
            delivery = await run_awaiting(self._when_space(delivery, lambda: self._try_send(*arguments)))
        return await delivery

    def _try_send(
        self,
        topic: str,
        value: Any,
        key: Any,
        headers: HeadersIn,
        priority: int,
        partition: int | None,
        timestamp_ms: int | None,
        on_delivery: OnDelivery | None,
    ) -> Delivery | Lack:
        """Check and accept a record; what it needs if there is not enough space now. The hot path."""
        target = self._targets.get(topic)
        if target is None:
            target = self._look_up(topic)
        if type(value) is bytes:
            size_bytes = len(value)
        elif value is None:
            size_bytes = 0
        else:
            value = as_bytes("a value", value)
            size_bytes = len(value)
        overhead_bytes = RECORD_BYTES
        if key is not None:
            if type(key) is not bytes:
                key = as_bytes("a key", key)
            size_bytes += len(key)
            overhead_bytes += KEY_BYTES
        if headers is not None:
            headers, header_bytes = check_headers(headers)
            size_bytes += header_bytes
            overhead_bytes += KEY_BYTES
        if size_bytes > target.max_bytes:
            raise target.oversized(size_bytes)
        if priority != 0:
            target.check_priority(priority)
        if partition is not None:
            partition = target.check_partition(partition)
        elif key is None and target.sticks:
            partition = ANY
        elif key is not None and target.keyed is not None:
            partition = target.keyed[key]
        else:
            partition = target.choose(key, value)
        if timestamp_ms is None:
            timestamp_ms = int(time.time() * 1000)
        elif type(timestamp_ms) is not int or not -MAX_TIMESTAMP <= timestamp_ms < MAX_TIMESTAMP:
            raise InvalidInputError(f"a timestamp is whole milliseconds since 1970, not {timestamp_ms!r}")
        size_bytes += overhead_bytes
        delivery = self._append(
            target.buffer, partition, priority, key, value, headers, timestamp_ms, size_bytes, on_delivery
        )
        return Lack(size_bytes, target.buffer, partition) if delivery is None else delivery

    @hinted
    def send_many(
        self,
        topic: str,
        values: Any,
        *,
        keys: Any = None,
        headers: Any = None,
        priority: int = 0,
        partition: int | None = None,
        timestamps_ms: Any = None,
        on_delivery: OnDeliveries | None = None,
    ) -> Deliveries:
        """Accept many records, given as columns: lists of bytes, or Arrow arrays. In order, per partition.

        A mistake in any of them is raised before the first is accepted. With ``on_full="raise"`` all are accepted or
        none if ``buffer_bytes`` is too small for them; otherwise it waits as ``send`` does. What finds no space in
        time, or is more than a bounded topic takes, is told by its delivery.
        """
        if topic not in self._targets:
            self._look_up(topic)
        if on_delivery is not None:
            self._wait_for_callbacks()
        columns = (values, keys, headers, priority, partition, timestamps_ms)
        deliveries = run_blocking(self._accept_many(topic, partition, columns, may_wait=not self._io.is_current))
        if on_delivery is not None:
            deliveries.add_done_callback(on_delivery)
        return deliveries

    @hinted
    async def send_many_async(
        self,
        topic: str,
        values: Any,
        *,
        keys: Any = None,
        headers: Any = None,
        priority: int = 0,
        partition: int | None = None,
        timestamps_ms: Any = None,
    ) -> Sequence[RecordMetadata]:
        """Send many records, given as columns, and wait until all are acknowledged."""
        columns = (values, keys, headers, priority, partition, timestamps_ms)
        return await (await run_awaiting(self._accept_many(topic, partition, columns)))

    async def _accept_many(
        self, topic: str, partition: int | None, columns: tuple[Any, ...], *, may_wait: bool = True
    ) -> Deliveries:
        target = self._targets.get(topic)
        if target is None:
            target = await self._find(topic)
        try:
            steps, order, total_bytes = self._bulk.steps(self._of, target, *columns)
        except UnknownPartitionError:
            steps, order, total_bytes = self._bulk.steps(self._of, await self._find(topic, refresh=True), *columns)
        self._refuse_if_too_much(total_bytes)
        parts: list[Part] = []
        full: QueueFullError | None = None
        for add, lack in steps:
            added = None
            if full is None:
                added = add()
                if added is None:
                    try:
                        added = await self._when_space(lack, add, may_wait=may_wait)
                    except QueueFullError as error:
                        full = error
            if added is None:
                assert full is not None  # noqa: S101  # or there would be a part
                added = Part(failed_outcome(topic, -1 if partition is None else partition, full), 0, lack.count)
                self._accumulator.note_failure(added.outcome, added.count, self._of)
                if self._transactions is not None:
                    self._transactions.lost(full, self._of)
            parts.append(added)
        return Deliveries(parts, order)

    def transaction(self, *, wait: bool = True, wait_visible: bool = True) -> Transaction:
        """A transaction, for a ``with`` or ``async with`` block: all that is sent in it is seen, or nothing ever is.

        The producer needs a ``transactional_id``. ``wait_visible``: the end of the block waits until every partition
        knows. Without it, it returns as soon as that is decided; it becomes visible a moment later by itself, and the
        next transaction may be under way meanwhile.

        Without ``wait`` the end of the block waits for nothing, and the next one can begin at once: what ends while
        others are being decided is decided together, which is faster by far. What becomes of it is told by
        ``Transaction.wait_committed``, and that something was not committed by the next transaction to begin, or by
        ``flush`` or ``close``. If one is not committed, none is that has begun after it, until that was told.
        """
        self._refuse_in_child()
        if self._transactions is None:
            raise InvalidInputError(
                "a producer needs a transactional_id for transactions: rq.producer(transactional_id=)"
            )
        return Transaction(self, self._transactions, self._io, waits=wait, visible=wait_visible)

    def _within(self, number: int) -> Self:
        """This producer, for one transaction: what is sent by it is in that one, or in none."""
        within = object.__new__(type(self))
        within.__dict__.update(self.__dict__)
        within._of = number
        within._append = partial(self._append, of=number)
        return within

    def _give_back_id(self) -> None:
        """At ``close``: it was drawn for this run. One that names work stays, and fences whoever was there before."""
        assert self._transactions is not None  # noqa: S101  # it has an id
        self._transactions.drawn = True

    # -- waiting -------------------------------------------------------------------------

    def _refuse_if_too_much(self, size_bytes: int) -> None:
        if self.settings.on_full == "raise" and not self._accumulator.fits(size_bytes):
            raise self._full(None)

    def _full(self, lack: Lack | None) -> QueueFullError:
        if lack is not None and lack.topic.bounded and self._accumulator.fits(lack.size_bytes):
            topic = lack.topic
            bounds = {"max_backlog_records": topic.most_records, "max_backlog_bytes": topic.most_bytes}
            named = ", ".join(f"{name} = {most}" for name, most in bounds.items() if most is not None)
            return QueueFullError(
                f"as much as {topic.name} ever takes ({named}, per partition) is on its way and has found no room yet; "
                "slow down, or let its consumers commit",
                topic=topic.name,
            )
        return QueueFullError(
            f"{self._accumulator.used_bytes} bytes are not acknowledged yet, of {self.settings.buffer_bytes} that "
            "buffer_bytes allows; slow down and retry"
        )

    async def _when_space(self, lack: Lack, add: Callable[[], _T | Lack | None], *, may_wait: bool = True) -> _T:
        """Wait for space, and add then. ``QueueFullError`` if there is none in time, or waiting is not wanted."""
        if self.settings.on_full == "raise" or not may_wait:  # the I/O thread would wait for itself
            raise self._full(lack)
        deadline_s = time.monotonic() + self.settings.delivery_timeout_ms / 1000
        while True:
            space = Wakeup()
            self._accumulator.when_space(lack, space.ring)
            if not await rest(space, max(0.0, deadline_s - time.monotonic())):
                raise self._full(lack)
            added = add()
            if added is not None and not isinstance(added, Lack):
                return added

    def _wait_for_callbacks(self) -> None:
        """Callbacks that cannot keep up hold up those who ask for more of them."""
        callbacks = CallbackThread.shared()
        if callbacks.backlog > CallbackThread.MAX_BACKLOG and not self._io.is_current:
            callbacks.drain(self.settings.delivery_timeout_ms / 1000)

    @blocking
    async def flush(self, *, timeout_ms: int | None = None) -> None:
        """Send at once what lingers, and wait until all that was accepted before is acknowledged, or has failed.

        ``DeliveryFailedError`` if some has failed and nobody was told: no delivery was asked for it, and no flush
        has said so before. Callbacks have run then too. ``OutcomeUnknownError`` after ``timeout_ms``: the producer
        still tries.
        """
        self._refuse_in_child()
        began_s = time.monotonic()
        await self._until_resolved(timeout_ms)
        if self._transactions is not None and self._transactions.behind.busy:
            left_s = _FOREVER_S if timeout_ms is None else timeout_ms / 1000 - (time.monotonic() - began_s)
            await in_io(self._io, self._transactions.settled(max(0.0, left_s)))
        self._raise_failures()

    flush_async = awaiting(flush)

    async def _until_resolved(self, timeout_ms: int | None) -> None:
        deadline_s = None if timeout_ms is None else time.monotonic() + check_timeout_ms(timeout_ms) / 1000

        def left_s() -> float:
            return _FOREVER_S if deadline_s is None else max(0.0, deadline_s - time.monotonic())

        resolved = Wakeup()
        self._accumulator.when_resolved(self._accumulator.cut_all(), resolved.ring)
        while not await rest(resolved, left_s()):
            if deadline_s is not None:
                raise OutcomeUnknownError(
                    f"{self._accumulator.unresolved_records} records are not acknowledged after {timeout_ms} ms"
                )
        callbacks = CallbackThread.shared()
        if callbacks.backlog and not callbacks.is_current and not await beside(callbacks.drain, left_s()):
            raise OutcomeUnknownError(f"callbacks have not finished after {timeout_ms} ms")

    def _raise_failures(self) -> None:
        error = delivery_failed(*self._accumulator.failures())
        if error is not None:
            raise error

    def _refuse_in_child(self) -> None:
        if self._io.forked:
            raise forked("this producer")

    # -- topics --------------------------------------------------------------------------

    def _look_up(self, topic: str, *, refresh: bool = False) -> Target:
        if not self._io.is_current:
            return run_blocking(self._find(topic, refresh=refresh))
        info = self._rq.routes.cached_topic(topic)  # it would wait for itself; what is known must do
        if info is None:
            raise InvalidInputError(f"{topic} is not known yet: in the I/O thread, await send_async()")
        return self._targets.learn(info)

    async def _find(self, topic: str, *, refresh: bool = False) -> Target:
        """``refresh``: a partition was named that was not there when the topic was looked up; it may have grown."""
        check_name("topic", topic)
        self._accumulator.check_open()
        return await self._learn(topic, refresh=refresh)

    async def _learn(self, topic: str, *, refresh: bool = False) -> Target:
        """Also while nothing can be sent."""
        check_name("topic", topic)
        return self._targets.learn(await in_io(self._io, self._rq.routes.topic(topic, refresh=refresh)))

    # -- the end -------------------------------------------------------------------------

    @blocking
    async def close(self, *, timeout_ms: int | None = None) -> None:
        """Accept nothing more, and wait until all that was accepted is acknowledged or has failed.

        After ``timeout_ms`` what is left is given up: its deliveries tell whether it may be written. Raises
        ``DeliveryFailedError`` as ``flush`` does, once it is closed. In a forked child there is nothing to wait for:
        its parent sends what was accepted before the fork. ``OutcomeUnknownError`` if transactions that have ended are
        not decided by then.
        """
        if timeout_ms is not None:
            check_timeout_ms(timeout_ms)
        self._leaving.detach()
        if self._io.forked:
            return
        deadline_s = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        decided = True
        if self._transactions is not None and self._io.usable:
            timeout_s = None if timeout_ms is None else timeout_ms / 1000
            in_time = await in_io(self._io, self._transactions.close(timeout_s), finish=True)
            decided = in_time or not self._transactions.behind.deciding
        self._accumulator.close()
        try:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            await self._until_resolved(None if left_s is None else int(left_s * 1000))
        except OutcomeUnknownError as error:
            _log.warning("a producer was closed too soon: %s", error)
        except asyncio.CancelledError:  # nobody waits any more; what was accepted is sent all the same
            self._accumulator.when_resolved(self._accumulator.cut_all(), self._end_later)
            raise
        except BaseException:
            self._end_later()
            raise
        if self._io.is_current:
            self._sender.close()
        elif self._io.usable:
            await in_io(self._io, self._end(), finish=True)  # what is left is resolved after this
        if self._transactions is not None:
            self._transactions.behind.tell()
            if not decided:
                raise OutcomeUnknownError(
                    f"transactions of {self.transactional_id!r} are not decided after {timeout_ms} ms"
                )
        self._raise_failures()

    close_async = awaiting(close)

    def _end_later(self) -> None:
        with suppress(RuntimeError):  # the process has ended its connections
            self._io.loop.call_soon_threadsafe(self._sender.close)

    async def _end(self) -> None:
        self._sender.close()

    async def _leave(self, kind: type[BaseException] | None) -> None:
        try:
            await part(self.close)()
        except DeliveryFailedError as error:
            if kind is None:
                raise
            _log.error("%s", error)  # what the block has raised is not hidden by it

    def __reduce__(self) -> tuple[Any, ...]:
        if self.transactional_id is not None:
            raise InvalidInputError(
                "a transactional producer stays in its process, for another one of the same id would fence it: pass "
                "the RayQueue handle, and make one in the task or actor, with a transactional_id of its own"
            )
        return _make, (type(self), self._rq, self._options)

    def __repr__(self) -> str:
        state = "closed" if self._accumulator.is_closed else f"{self._accumulator.used_bytes} bytes on their way"
        name = "" if self.transactional_id is None else f" {self.transactional_id}"
        return f"<Producer{name} acks={self.settings.acks} topics={sorted(self._targets)}: {state}>"


def _make(kind: type[Producer[Any, Any]], rq: Any, options: dict[str, Any]) -> Producer[Any, Any]:
    return kind(rq, **options)


def _settings_of(
    defaults: ProducerSettings, options: dict[str, Any]
) -> tuple[str | CustomPartitioner, ProducerSettings]:
    options = dict(options)
    transactional_id = options.pop("transactional_id", None)
    partitioner = options.pop("partitioner", defaults.partitioner)
    if not isinstance(partitioner, str) and not callable(partitioner):
        raise InvalidInputError(f"a partitioner is a name or a callable, not {partitioner!r}")
    refuse_unknown("a producer", options, ("transactional_id", *ProducerSettings.model_fields, *SERIALIZERS))
    settings = ProducerSettings(**{**defaults.model_dump(), **options})
    if transactional_id is not None:
        if not isinstance(transactional_id, str) or not 1 <= len(transactional_id) <= _MAX_ID:
            raise InvalidInputError(
                f"a transactional_id is a text of 1 to {_MAX_ID} characters, not {transactional_id!r}",
                option="transactional_id",
            )
        if settings.acks != "all":
            raise InvalidInputError(f"a transactional producer has acks='all', not {settings.acks!r}", option="acks")
    return check_partitioner(partitioner), settings


def _left(accumulator: Accumulator) -> None:
    """A producer was let go, or the process ends, without ``close``."""
    records = accumulator.unresolved_records
    if records:
        _log.warning(
            "a producer was not closed, and %d of its records are not acknowledged: they may be lost when the process "
            "ends. Use it in a with block, or call close().",
            records,
        )
