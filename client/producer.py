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
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar

from typing_extensions import Never, Self

from rayqueue.client.accumulator import ANY, BATCH_BYTES, KEY_BYTES, RECORD_BYTES, Accumulator, Lack, closed
from rayqueue.client.arguments import check_timeout_ms, hinted, refuse_unknown
from rayqueue.client.bulk import MAX_TIMESTAMP, Bulk
from rayqueue.client.columns import as_bytes, check_headers
from rayqueue.client.delivery import (
    CallbackThread,
    Deliveries,
    Delivery,
    Part,
    RecordMetadata,
    delivery_failed,
    failed_outcome,
)
from rayqueue.client.forks import forked
from rayqueue.client.partitioners import CustomPartitioner, check_partitioner
from rayqueue.client.sender import Sender
from rayqueue.client.stream import COMPRESSIONS
from rayqueue.client.targets import Target
from rayqueue.config import ProducerSettings
from rayqueue.errors import (
    DeliveryFailedError,
    InvalidInputError,
    OutcomeUnknownError,
    QueueFullError,
    UnknownPartitionError,
)
from rayqueue.protocol.topics import TopicInfo, check_name
from rayqueue.records import HeadersIn, KeyT, ValueT
from rayqueue.values import SERIALIZERS

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_SEND_OPTIONS = ("topic", "value", "key", "headers", "priority", "partition", "timestamp_ms", "on_delivery")

OnDelivery = Callable[[Delivery], object]
OnDeliveries = Callable[[Deliveries], object]


class Producer(Generic[ValueT, KeyT]):
    """Writes records to topics. Made by ``RayQueue.producer``; options are those of ``ProducerSettings``."""

    def __init__(self, rq: Any, **options: Any) -> None:
        self._rq = rq
        self._options = options
        self._partitioner, self.settings = _settings_of(rq.settings.producer, options)
        settings = self.settings
        max_batch_bytes: int = rq.settings.log.max_batch_bytes
        self._max_batch_bytes = max_batch_bytes
        batch_bytes = min(settings.batch_bytes, max_batch_bytes - BATCH_BYTES)
        self._io = rq.io
        loop: asyncio.AbstractEventLoop = rq.io.loop
        self._targets: dict[str, Target] = {}
        self._targets_lock = threading.Lock()

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
            clock_s=time.monotonic,
            wake=wake,
        )
        sender = self._sender = Sender(
            self._accumulator, rq.routes, settings, rq.settings.client, loop=loop, watch=_Changes(self._targets)
        )
        self._bulk = Bulk(self._accumulator, batch_bytes, COMPRESSIONS[settings.compression])
        self._append = self._accumulator.append
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
            self._look_again(topic)
            delivery = self._try_send(topic, value, key, headers, priority, partition, timestamp_ms, on_delivery)
        if delivery.__class__ is Lack:
            # Not a lambda, for which every call would make cells of its arguments.
            again = partial(self._try_send, topic, value, key, headers, priority, partition, timestamp_ms, on_delivery)
            delivery = self._when_space(delivery, again)
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
            await self._look_up_async(topic)
        arguments = (topic, value, key, headers, priority, partition, timestamp_ms, None)
        try:
            delivery = self._try_send(*arguments)
        except UnknownPartitionError:
            await self._look_again_async(topic)
            delivery = self._try_send(*arguments)
        if isinstance(delivery, Lack):
            delivery = await self._when_space_async(delivery, lambda: self._try_send(*arguments))
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
        target = self._targets.get(topic)
        if target is None:
            target = self._look_up(topic)
        if on_delivery is not None:
            self._wait_for_callbacks()
        arguments = (values, keys, headers, priority, partition, timestamps_ms)
        try:
            steps, order, total_bytes = self._bulk.steps(target, *arguments)
        except UnknownPartitionError:
            steps, order, total_bytes = self._bulk.steps(self._look_again(topic), *arguments)
        self._refuse_if_too_much(total_bytes)
        parts: list[Part] = []
        full: QueueFullError | None = None
        for add, lack in steps:
            part = None
            if full is None:
                part = add()
                if part is None:
                    try:
                        part = self._when_space(lack, add)
                    except QueueFullError as error:
                        full = error
            if part is None:
                assert full is not None  # noqa: S101  # or there would be a part
                part = Part(failed_outcome(topic, -1 if partition is None else partition, full), 0, lack.count)
                self._accumulator.note_failure(part.outcome, part.count)
            parts.append(part)
        deliveries = Deliveries(parts, order)
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
        if topic not in self._targets:
            await self._look_up_async(topic)
        arguments = (values, keys, headers, priority, partition, timestamps_ms)
        try:
            steps, order, total_bytes = self._bulk.steps(self._targets[topic], *arguments)
        except UnknownPartitionError:
            steps, order, total_bytes = self._bulk.steps(await self._look_again_async(topic), *arguments)
        self._refuse_if_too_much(total_bytes)
        parts: list[Part] = []
        for add, lack in steps:
            part = add()
            parts.append(await self._when_space_async(lack, add) if part is None else part)
        return await Deliveries(parts, order)

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

    def _when_space(self, lack: Lack, add: Callable[[], _T | Lack | None]) -> _T:
        """Wait for space, and add then. ``QueueFullError`` if there is none in time, or waiting is not wanted."""
        if self.settings.on_full == "raise" or self._io.is_current:  # the I/O thread would wait for itself
            raise self._full(lack)
        deadline_s = time.monotonic() + self.settings.delivery_timeout_ms / 1000
        while True:
            space = threading.Event()
            self._accumulator.when_space(lack, space.set)
            if not space.wait(max(0.0, deadline_s - time.monotonic())):
                raise self._full(lack)
            added = add()
            if added is not None and not isinstance(added, Lack):
                return added

    async def _when_space_async(self, lack: Lack, add: Callable[[], _T | Lack | None]) -> _T:
        if self.settings.on_full == "raise":
            raise self._full(lack)
        deadline_s = time.monotonic() + self.settings.delivery_timeout_ms / 1000
        loop = asyncio.get_running_loop()
        while True:
            space = asyncio.Event()
            self._accumulator.when_space(lack, lambda space=space: _wake_in(loop, space.set))  # type: ignore[misc]
            try:
                await asyncio.wait_for(space.wait(), max(0.0, deadline_s - time.monotonic()))
            except asyncio.TimeoutError:
                raise self._full(lack) from None
            added = add()
            if added is not None and not isinstance(added, Lack):
                return added

    def _wait_for_callbacks(self) -> None:
        """Callbacks that cannot keep up hold up those who ask for more of them."""
        callbacks = CallbackThread.shared()
        if callbacks.backlog > CallbackThread.MAX_BACKLOG and not self._io.is_current:
            callbacks.drain(self.settings.delivery_timeout_ms / 1000)

    @hinted
    def flush(self, *, timeout_ms: int | None = None) -> None:
        """Send at once what lingers, and wait until all that was accepted before is acknowledged, or has failed.

        ``DeliveryFailedError`` if some has failed and nobody was told: no delivery was asked for it, and no flush
        has said so before. Callbacks have run then too. ``OutcomeUnknownError`` after ``timeout_ms``: the producer
        still tries.
        """
        self._refuse_in_child()
        self._wait_until_resolved(timeout_ms)
        self._raise_failures()

    @hinted
    async def flush_async(self, *, timeout_ms: int | None = None) -> None:
        """The same in an event loop. Does not wait for callbacks."""
        self._refuse_in_child()
        timeout_s = None if timeout_ms is None else check_timeout_ms(timeout_ms) / 1000
        loop, resolved = asyncio.get_running_loop(), asyncio.Event()
        self._accumulator.when_resolved(self._accumulator.cut_all(), lambda: _wake_in(loop, resolved.set))
        try:
            await asyncio.wait_for(resolved.wait(), timeout_s)
        except asyncio.TimeoutError:
            raise self._not_flushed(timeout_ms) from None
        self._raise_failures()

    def _wait_until_resolved(self, timeout_ms: int | None) -> None:
        timeout_s = None if timeout_ms is None else check_timeout_ms(timeout_ms) / 1000
        if self._io.is_current:
            raise InvalidInputError("this would wait for itself: in the I/O thread, await flush_async()")
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        resolved = threading.Event()
        self._accumulator.when_resolved(self._accumulator.cut_all(), resolved.set)
        if not resolved.wait(timeout_s):
            raise self._not_flushed(timeout_ms)
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        if not CallbackThread.shared().drain(left_s):
            raise OutcomeUnknownError(f"callbacks have not finished after {timeout_ms} ms")

    def _raise_failures(self) -> None:
        batches, more_records = self._accumulator.failures()
        error = delivery_failed(batches, more_records)
        if error is not None:
            raise error

    def _refuse_in_child(self) -> None:
        if self._io.forked:
            raise forked("this producer")

    def _not_flushed(self, timeout_ms: int | None) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"{self._accumulator.unresolved_records} records are not acknowledged after {timeout_ms} ms"
        )

    # -- topics --------------------------------------------------------------------------

    def _look_up(self, topic: str) -> Target:
        check_name("topic", topic)
        self._accumulator.check_open()
        if self._io.is_current:
            info = self._rq.routes.cached_topic(topic)
            if info is None:
                raise InvalidInputError(f"{topic} is not known yet: in the I/O thread, await send_async()")
        else:
            info = self._io.call(self._rq.routes.topic(topic))
        return self._add_target(info)

    async def _look_up_async(self, topic: str) -> None:
        check_name("topic", topic)
        self._accumulator.check_open()
        self._add_target(await asyncio.wrap_future(self._io.run(self._rq.routes.topic(topic))))

    def _look_again(self, topic: str) -> Target:
        """A partition was named that was not there when the topic was looked up: it may have grown since."""
        if self._io.is_current:  # it would wait for itself; what is known must do
            return self._look_up(topic)
        return self._add_target(self._io.call(self._rq.routes.topic(topic, refresh=True)))

    async def _look_again_async(self, topic: str) -> Target:
        return self._add_target(await asyncio.wrap_future(self._io.run(self._rq.routes.topic(topic, refresh=True))))

    def _add_target(self, info: TopicInfo) -> Target:
        """What is known of this topic from now on."""
        with self._targets_lock:
            target = self._targets.get(info.name)
            if target is not None and target.buffer.topic_id == info.topic_id:
                target.changed(info)
            else:
                target = Target(info, self._partitioner, self._max_batch_bytes)
                self._accumulator.add_topic(target.buffer)
                self._targets[info.name] = target
        return target

    # -- the end -------------------------------------------------------------------------

    @hinted
    def close(self, *, timeout_ms: int | None = None) -> None:
        """Accept nothing more, and wait until all that was accepted is acknowledged or has failed.

        After ``timeout_ms`` what is left is given up: its deliveries tell whether it may be written. Raises
        ``DeliveryFailedError`` as ``flush`` does, once it is closed. In a forked child there is nothing to wait for:
        its parent sends what was accepted before the fork.
        """
        if timeout_ms is not None:
            check_timeout_ms(timeout_ms)
        self._leaving.detach()
        if self._io.forked:
            return
        self._accumulator.close()
        try:
            self._wait_until_resolved(timeout_ms)
        except OutcomeUnknownError as error:
            _log.warning("a producer was closed too soon: %s", error)
        finally:
            if self._io.is_current:
                self._sender.close()
            elif self._io.usable:
                self._io.call(self._end())  # what is left is resolved after this
        self._raise_failures()

    async def _end(self) -> None:
        self._sender.close()

    def _leave(self, kind: type[BaseException] | None) -> None:
        try:
            self.close()
        except DeliveryFailedError as error:
            if kind is None:
                raise
            _log.error("%s", error)  # what the block has raised is not hidden by it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(kind)

    @hinted
    async def close_async(self, *, timeout_ms: int | None = None) -> None:
        """The same in an event loop."""
        await asyncio.to_thread(self.close, timeout_ms=timeout_ms)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._leave, kind)

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (type(self), self._rq, self._options)

    def __repr__(self) -> str:
        state = "closed" if self._accumulator.is_closed else f"{self._accumulator.used_bytes} bytes on their way"
        return f"<Producer acks={self.settings.acks} topics={sorted(self._targets)}: {state}>"


class _Changes:
    """Tells the targets what the I/O thread has seen. Holds no producer, so that one can be let go."""

    def __init__(self, targets: dict[str, Target]) -> None:
        self._targets = targets

    def changed(self, info: TopicInfo) -> None:
        target = self._targets.get(info.name)
        if target is not None and info.topic_id == target.buffer.topic_id:
            target.changed(info)

    def gone(self, name: str, topic_id: int) -> None:
        """Whoever sends next looks it up."""
        target = self._targets.get(name)
        if target is not None and target.buffer.topic_id == topic_id:
            del self._targets[name]


def _make(kind: type[Producer[Any, Any]], rq: Any, options: dict[str, Any]) -> Producer[Any, Any]:
    return kind(rq, **options)


def _settings_of(
    defaults: ProducerSettings, options: dict[str, Any]
) -> tuple[str | CustomPartitioner, ProducerSettings]:
    options = dict(options)
    partitioner = options.pop("partitioner", defaults.partitioner)
    if not isinstance(partitioner, str) and not callable(partitioner):
        raise InvalidInputError(f"a partitioner is a name or a callable, not {partitioner!r}")
    refuse_unknown("a producer", options, (*ProducerSettings.model_fields, *SERIALIZERS))
    return check_partitioner(partitioner), ProducerSettings(**{**defaults.model_dump(), **options})


def _wake_in(loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(wake)
    except RuntimeError:  # the loop was closed; nobody waits any more
        return


def _left(accumulator: Accumulator) -> None:
    """A producer was let go, or the process ends, without ``close``."""
    records = accumulator.unresolved_records
    if records:
        _log.warning(
            "a producer was not closed, and %d of its records are not acknowledged: they may be lost when the process "
            "ends. Use it in a with block, or call close().",
            records,
        )
