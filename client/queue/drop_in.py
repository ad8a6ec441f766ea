"""``rayqueue.Queue``: ``ray.util.queue.Queue``, durable and replicated.

    from rayqueue import Queue      # instead of ray.util.queue

The same methods with the same meaning, over a work queue of one partition: items
come in the order in which they were put, over the whole queue. An item is put
when a majority of replicas has it on disk, and is gone when ``get`` returns it:
``get`` leases it and acknowledges it before it returns. If the process dies in
between, the item comes again.

What differs is in docs/jobs.md, "From ray.util.queue".
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import RayActorError
from ray.util.queue import Empty, Full

from rayqueue.client.joining import own_node
from rayqueue.client.queue.bounded import BoundedPuts
from rayqueue.client.queue.getting import Getting
from rayqueue.client.queue.items import is_ref, pickled, unpickled
from rayqueue.client.twins import awaiting, beside, blocking, in_io, part
from rayqueue.errors import ClosedError, InvalidInputError, QueueFullError, TopicRecreatedError, UnknownTopicError
from rayqueue.net.interfaces import ask
from rayqueue.protocol.calls import Call
from rayqueue.protocol.jobs import GetQueueSizes, QueueSizes, worker_name
from rayqueue.protocol.topics import TopicInfo, TopicPartition

if TYPE_CHECKING:
    from rayqueue.client.handle import RayQueue

__all__ = ["Empty", "Full", "Queue"]

_T = TypeVar("_T")

_ONE = 0
PREFIX = "ray-queue."


class QueueEndedError(ClosedError, RayActorError):
    """The queue was shut down, here or elsewhere. Also what ``ray.util.queue`` raises then: its actor is dead."""

    def __init__(self, message: str, /, **details: Any) -> None:
        Exception.__init__(self, message)
        RayActorError.__init__(self, error_msg=message)
        self.details = details


class Queue:
    """A first-in, first-out queue on Ray that survives processes and nodes.

    ``maxsize``: how many items it holds at most; 0 for no limit. ``actor_options`` are accepted and have no effect:
    there is no actor of this queue's own. ``name`` opens the queue of this name again, or makes it: without one it is
    a new queue. ``rq`` is the RayQueue that it lives in; without one, ``rayqueue.connect()``.

    >>> q = Queue(maxsize=2)
    >>> q.put("a")
    >>> q.put({"any": "thing"})
    >>> q.full()
    True
    >>> q.get(), q.get()
    ('a', {'any': 'thing'})
    >>> q.shutdown()
    """

    def __init__(
        self,
        maxsize: int = 0,
        actor_options: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        rq: RayQueue | None = None,
    ) -> None:
        if rq is None:
            from rayqueue.client.connect import connect

            rq = connect()
        self._set_up(rq, name or f"{PREFIX}{uuid.uuid4().hex}", maxsize)
        rq.create_topic(
            self.name,
            partitions=1,
            queue=True,
            max_deliveries=None,
            max_backlog_records=maxsize if maxsize > 0 else None,
            if_missing=True,
        )

    def _set_up(self, rq: RayQueue, name: str, maxsize: int) -> None:
        self.name = name
        self.maxsize = maxsize
        self.actor: str | None = name
        """What stands for the queue, as the actor's handle does in ``ray.util.queue``: its name; None after
        ``shutdown``."""
        self._rq = rq
        self._worker = worker_name(uuid.uuid4().hex, own_node())
        self._lock = threading.Lock()
        self._info: TopicInfo | None = None
        self._getting: Getting
        self._bounded: BoundedPuts | None = None
        self._producer: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened_again, (self._rq, self.name, self.maxsize)

    def __repr__(self) -> str:
        return f"<rayqueue.Queue {self.name}, maxsize {self.maxsize}>"

    # -- sizes -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.size()

    @blocking
    async def size(self) -> int:
        """How many items are in the queue."""
        sizes: QueueSizes = await self._ask(GetQueueSizes())
        return sizes.ready + sizes.delayed + len(self._getting.kept)

    def qsize(self) -> int:
        """How many items are in the queue."""
        return self.size()

    def empty(self) -> bool:
        """Whether there is none."""
        return self.size() == 0

    def full(self) -> bool:
        """Whether there are ``maxsize`` of them."""
        return 0 < self.maxsize <= self.size()

    # -- putting ---------------------------------------------------------------------------------

    @blocking
    async def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add an item. If the queue is full, wait for room, for ``timeout`` seconds or for ever; then ``Full``. With
        ``block=False`` at once. ``ValueError`` if the timeout is negative."""
        wait_s = _seconds(block, timeout)
        if is_ref(item):
            item = await self._object(item)
        await self._put([item], wait_s)

    put_async = awaiting(put)

    def put_nowait(self, item: Any) -> None:
        """As ``put(item, block=False)``."""
        self.put(item, block=False)

    @blocking
    async def put_nowait_batch(self, items: Iterable[Any]) -> None:
        """Add items in this order: all of them, or none and ``Full``. Into a queue with a ``maxsize`` at most 1 MiB of
        them, or ``OversizedBatchError``."""
        if not isinstance(items, Iterable):
            raise TypeError("Argument 'items' must be an Iterable")
        await self._put(list(items), 0.0)

    async def _put(self, items: Sequence[Any], wait_s: float | None) -> None:
        values = [pickled(item) for item in items]
        if not values:
            return
        info = await self._opened()
        if self.maxsize > 0:
            if len(values) > self.maxsize:
                raise Full(f"Cannot add {len(values)} items to a queue of maxsize {self.maxsize}.")
            try:
                await self._there(self._put_bounded(info, values, wait_s))
            except QueueFullError as error:
                raise Full(str(error)) from None
            return
        if self._producer is None:
            made = await part(self._rq.producer)()
            with self._lock:
                if self._producer is None:
                    self._producer = made
        await beside(self._send, values)

    def _send(self, values: Sequence[bytes]) -> None:
        self._producer.send_many(self.name, values).result()

    async def _put_bounded(self, info: TopicInfo, values: Sequence[bytes], wait_s: float | None) -> None:
        if self._bounded is None:
            place = TopicPartition(self.name, _ONE)
            self._bounded = BoundedPuts(self._rq.routes, place, info.topic_id, self._rq.settings)
        await self._bounded.put(values, wait_s)

    async def _object(self, ref: Any) -> Any:
        """What it refers to, as a task's argument would be."""
        return await beside(ray.get, ref)

    # -- getting ---------------------------------------------------------------------------------

    @blocking
    async def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next item. If there is none, wait for one, for ``timeout`` seconds or for ever; then ``Empty``. With
        ``block=False`` at once. ``ValueError`` if the timeout is negative."""
        found = await self._get(1, _seconds(block, timeout))
        return unpickled(found[0])

    get_async = awaiting(get)

    def get_nowait(self) -> Any:
        """As ``get(block=False)``."""
        return self.get(block=False)

    @blocking
    async def get_nowait_batch(self, num_items: int) -> list[Any]:
        """The next ``num_items`` items: all of them, or none and ``Empty``. At most 50,000 at a time, or
        ``InvalidInputError``."""
        if not isinstance(num_items, int):
            raise TypeError("Argument 'num_items' must be an int")
        if num_items < 0:
            raise ValueError("'num_items' must be nonnegative")
        most = (await self._opened()).settings.max_leased
        if num_items > most:
            raise InvalidInputError(f"at most {most} items are got at a time (max_leased), not {num_items}")
        return [unpickled(each) for each in await self._get(num_items, 0.0)] if num_items else []

    async def _get(self, number: int, wait_s: float | None) -> list[bytes | None]:
        await self._opened()
        get = self._getting.begin(number, wait_s)
        try:
            return await self._there(get.values())
        except BaseException:
            with suppress(RuntimeError):  # this process ends
                self._rq.io.loop.call_soon_threadsafe(get.give_up)
            raise

    # -- the end ---------------------------------------------------------------------------------

    def shutdown(self, force: bool = False, grace_period_s: int = 5) -> None:
        """End the queue for everybody, and delete what is in it. What waits for it elsewhere gets an error. The
        arguments are those of ``ray.util.queue``, and have no effect."""
        if self.actor is None:
            return
        self.actor = None
        if self._producer is not None:
            self._producer.close(timeout_ms=max(0, round(grace_period_s * 1000)))
        self._rq.delete_topic(self.name)

    # -- within ----------------------------------------------------------------------------------

    async def _opened(self) -> TopicInfo:
        if self.actor is None:
            raise QueueEndedError(f"queue {self.name} was shut down")
        if self._info is None:
            await beside(lambda: self._rq.io)  # connected, which may block
            info = await self._there(self._rq.routes.topic(self.name))
            getting = Getting(self._rq.routes, self._rq.settings, info, self._worker)
            with self._lock:
                if self._info is None:
                    self._getting, self._info = getting, info
        return self._info

    async def _ask(self, call: Call) -> Any:
        info = await self._opened()
        place = TopicPartition(self.name, _ONE)
        return await self._there(ask(self._rq.routes, place, call, topic_id=info.topic_id))

    async def _there(self, work: Coroutine[Any, Any, _T]) -> _T:
        """What it returns, unless the queue was shut down, here or elsewhere."""
        try:
            return await in_io(self._rq.io, work)
        except (UnknownTopicError, TopicRecreatedError):
            raise QueueEndedError(f"queue {self.name} was shut down") from None


def _opened_again(rq: RayQueue, name: str, maxsize: int) -> Queue:
    queue = Queue.__new__(Queue)
    queue._set_up(rq, name, maxsize)
    return queue


def _seconds(block: bool, timeout: float | None) -> float | None:
    """How long to wait; None for ever."""
    if not block:
        return 0.0
    if timeout is not None and timeout < 0:
        raise ValueError("'timeout' must be a non-negative number")
    return timeout
