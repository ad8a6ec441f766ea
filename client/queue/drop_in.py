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

import asyncio
import logging
import threading
import uuid
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import RayActorError
from ray.util.queue import Empty, Full

from rayqueue.client.joining import own_node
from rayqueue.client.queue.bounded import BoundedPuts
from rayqueue.client.queue.items import is_ref, pickled, unpickled
from rayqueue.client.queue.settling import runs_of
from rayqueue.client.twins import awaiting, beside, blocking, in_io, part
from rayqueue.errors import ClosedError, LeaseLostError, QueueFullError, TopicRecreatedError, UnknownTopicError
from rayqueue.net.interfaces import ask
from rayqueue.protocol.calls import Call
from rayqueue.protocol.jobs import (
    MAX_JOBS,
    GetQueueSizes,
    Job,
    Leased,
    LeaseJobs,
    QueueSizes,
    SettleJobs,
    Settlement,
    WithdrawRequest,
    worker_name,
)
from rayqueue.protocol.topics import TopicInfo, TopicPartition

if TYPE_CHECKING:
    from rayqueue.client.handle import RayQueue

__all__ = ["Empty", "Full", "Queue"]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_WAIT_MS = 10_000
"""How long one question for an item waits in the partition."""
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
        self._attempts = count(1)
        self._lock = threading.Lock()
        self._info: TopicInfo | None = None
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
        return sizes.ready + sizes.delayed

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
        """Add items in this order: all of them, or none and ``Full``."""
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
        """The next ``num_items`` items: all of them, or none and ``Empty``."""
        if not isinstance(num_items, int):
            raise TypeError("Argument 'num_items' must be an int")
        if num_items < 0:
            raise ValueError("'num_items' must be nonnegative")
        return [unpickled(each) for each in await self._get(num_items, 0.0)] if num_items else []

    async def _get(self, number: int, wait_s: float | None) -> list[bytes | None]:
        info = await self._opened()
        return await self._there(_Getting(self, info).get(number, wait_s))

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
            self._info = await self._there(self._rq.routes.topic(self.name))
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


class _Getting:
    """One ``get``, in the I/O thread."""

    def __init__(self, queue: Queue, info: TopicInfo) -> None:
        self._routes = queue._rq.routes
        self._worker = queue._worker
        self._attempts = queue._attempts
        self._place = TopicPartition(info.name, _ONE)
        self._topic_id = info.topic_id
        self._max_bytes = queue._rq.settings.consumer.fetch_bytes

    async def get(self, number: int, wait_s: float | None) -> list[bytes | None]:
        """So many values. ``Empty`` if there were fewer for all of the time."""
        clock_s = asyncio.get_running_loop().time
        deadline_s = None if wait_s is None else clock_s() + wait_s
        while True:
            left_ms = _WAIT_MS if deadline_s is None else max(0, round((deadline_s - clock_s()) * 1000))
            leased = await self._lease(number, min(_WAIT_MS, left_ms))
            if leased and await self._acked(leased):
                return [job.value for each in leased for job in each.jobs]
            if not leased and deadline_s is not None and clock_s() >= deadline_s:
                raise Empty(f"Cannot get {number} items from {self._place.topic}.")

    async def _lease(self, number: int, wait_ms: int) -> list[Leased]:
        """Leases of exactly so many items, or none."""
        leased: list[Leased] = []
        missing = number
        while missing:
            some = await self._asked(missing, wait_ms if not leased else 0)
            if not some.jobs:
                for each in leased:  # others have taken the rest
                    await self._say("release", each.token, each.jobs)
                return []
            leased.append(some)
            missing -= len(some.jobs)
        return leased

    async def _asked(self, number: int, wait_ms: int) -> Leased:
        most = min(number, MAX_JOBS)
        call = LeaseJobs(
            worker=self._worker,
            attempt=next(self._attempts),
            max_jobs=most,
            least_jobs=most,
            max_bytes=self._max_bytes,
            wait_ms=wait_ms,
        )
        asking = asyncio.ensure_future(
            ask(self._routes, self._place, call, topic_id=self._topic_id, may_take_ms=wait_ms)
        )
        try:
            found: Leased = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(self._hand_back)  # whoever asked is gone, and the answer may be on its way
            _finish(self._withdrawn(call.attempt))
            raise
        return found

    def _hand_back(self, asking: asyncio.Future[Leased]) -> None:
        if not asking.cancelled() and asking.exception() is None and asking.result().jobs:
            leased = asking.result()
            _finish(self._say("release", leased.token, leased.jobs))

    async def _withdrawn(self, attempt: int) -> bool:
        call = WithdrawRequest(worker=self._worker, attempt=attempt)
        return bool(await ask(self._routes, self._place, call, topic_id=self._topic_id))

    async def _acked(self, leased: Sequence[Leased]) -> bool:
        """False if these went to somebody else meanwhile: this took longer than a lease."""
        for each in leased:
            if not await self._say("ack", each.token, each.jobs):
                if each is not leased[0]:
                    raise LeaseLostError(f"a part of a batch of {self._place.topic} was given to somebody else")
                return False
        return True

    async def _say(self, kind: Any, token: int, jobs: Sequence[Job]) -> bool:
        told = Settlement(kind=kind, token=token, jobs=runs_of(sorted(job.id for job in jobs)))
        call = SettleJobs(worker=self._worker, settlements=(told,))
        (answer,) = await ask(self._routes, self._place, call, topic_id=self._topic_id)
        return not answer.lost


_finishing: set[asyncio.Task[bool]] = set()
"""What goes on though nobody waits for it. If it fails, a lease ends by its time."""


def _finish(work: Coroutine[Any, Any, bool]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    _finishing.add(task)
    task.add_done_callback(_finished)


def _finished(task: asyncio.Task[bool]) -> None:
    _finishing.discard(task)
    if not task.cancelled() and task.exception() is not None:
        _log.info("a request that was given up: %s", task.exception())
