"""What ``send`` returns: the outcome of a record that is on its way.

One ``Outcome`` is shared by all records of a batch, and a ``Delivery`` is no
more than an outcome and a position in it: it costs 0.15 µs, where a
``concurrent.futures.Future`` costs 2 µs. ``Deliveries`` is the same for the
records of one ``send_many``, which may have gone into many batches.

An outcome is resolved once, by the I/O thread. Whoever waits in another thread
or in another event loop is woken from there. Callbacks of the application run
in a thread of their own, one after the other, so that a slow one holds up
other callbacks and nothing else. What a callback raises is logged.

In a forked child an outcome that was not known at the fork is ``ForkedError``:
only the parent learns it. The parent's callbacks are not called there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, overload

from rayqueue.client.forks import forked
from rayqueue.errors import InvalidInputError, OutcomeUnknownError, RayQueueError

_log = logging.getLogger(__name__)

Callback = Callable[[], object]
Waker = Callable[[], None]
"""Called by the I/O thread when an outcome is known. Must not block or raise."""


class RecordMetadata(NamedTuple):
    """Where a record is."""

    topic: str
    partition: int
    offset: int | None
    """None if it is not known: ``acks`` was not ``all``."""
    timestamp: int


class CallbackThread:
    """Runs the application's callbacks, in the order in which outcomes became known. One per process."""

    MAX_BACKLOG = 100_000
    """Callbacks that wait; with more, a ``send`` with a callback waits too."""

    _shared: CallbackThread | None = None
    _shared_lock = threading.Lock()

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Sequence[Callback]] = queue.SimpleQueue()
        self._counting = threading.Lock()
        self._posted = 0
        self._done = 0
        self._thread = threading.Thread(target=self._main, name="rayqueue callbacks", daemon=True)
        self._thread.start()

    @classmethod
    def shared(cls) -> CallbackThread:
        shared = cls._shared
        if shared is None or not shared._thread.is_alive():  # it is not after a fork
            with cls._shared_lock:
                shared = cls._shared
                if shared is None or not shared._thread.is_alive():
                    shared = cls._shared = cls()
        return shared

    @property
    def is_current(self) -> bool:
        return self._thread is threading.current_thread()

    @property
    def backlog(self) -> int:
        return self._posted - self._done

    def post(self, callbacks: Sequence[Callback]) -> None:
        with self._counting:
            self._posted += len(callbacks)
        self._jobs.put(callbacks)

    def drain(self, timeout_s: float | None) -> bool:
        """Wait until all that was posted before has run. In the callback thread itself: at once."""
        if self.is_current or not self.backlog:
            return True
        passed = threading.Event()
        self.post((passed.set,))
        return passed.wait(timeout_s)

    def _main(self) -> None:
        while True:
            for callback in self._jobs.get():
                try:
                    callback()
                except Exception:  # noqa: BLE001  # the application's, and nobody is there to catch it
                    _log.exception("a delivery callback failed")
                self._done += 1


_registering = threading.Lock()
"""Held for an instant, while an outcome is resolved or somebody begins to wait for one."""

_pid = os.getpid()


class Outcome:
    """What became of a batch, or is not known yet. ``resolve`` is the I/O thread's."""

    __slots__ = ("_callbacks", "_wakers", "base_offset", "done", "error", "partition", "pid", "timestamps", "topic")

    def __init__(self, topic: str, partition: int, timestamps: Sequence[int] | int) -> None:
        self.topic = topic
        self.partition = partition
        self.timestamps = timestamps
        self.pid = _pid
        self.done = False
        self.base_offset: int | None = None
        self.error: RayQueueError | None = None
        self._wakers: list[Waker] | None = None
        self._callbacks: list[Callback] | None = None

    def resolve(self, base_offset: int | None, error: RayQueueError | None = None) -> None:
        """Once. A second time changes nothing."""
        with _registering:
            if self.done:
                return
            self.base_offset = base_offset
            self.error = error
            self.done = True
            wakers, self._wakers = self._wakers, None
            callbacks, self._callbacks = self._callbacks, None
        if callbacks:
            CallbackThread.shared().post(callbacks)
        for wake in wakers or ():
            wake()

    def known(self) -> bool:
        """Whether it is resolved; or, in a forked child, never will be."""
        if not self.done and self.pid != _pid:
            self._wakers = self._callbacks = None
            self.resolve(None, forked("this record"))
        return self.done

    def add_waker(self, wake: Waker) -> None:
        """Called at once if the outcome is known."""
        self.known()
        with _registering:
            if not self.done:
                self._wakers = [*(self._wakers or ()), wake]
                return
        wake()

    def add_callback(self, callback: Callback) -> None:
        """Run in the callback thread, also if the outcome is known."""
        self.known()
        with _registering:
            if not self.done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        CallbackThread.shared().post((callback,))

    def wait(self, timeout_s: float | None) -> bool:
        if self.known():
            return True
        _refuse_to_wait_in_io_thread()
        known = threading.Event()
        self.add_waker(known.set)
        return known.wait(timeout_s)

    def timestamp(self, position: int) -> int:
        timestamps = self.timestamps
        return timestamps if isinstance(timestamps, int) else timestamps[position]

    def metadata(self, position: int) -> RecordMetadata:
        """Of one record; the outcome is known and good."""
        base = self.base_offset
        offset = None if base is None else base + position
        return RecordMetadata(self.topic, self.partition, offset, self.timestamp(position))


def failed_outcome(topic: str, partition: int, error: RayQueueError) -> Outcome:
    outcome = Outcome(topic, partition, 0)
    outcome.resolve(None, error)
    return outcome


class Delivery:
    """One record on its way. ``await`` it in any event loop, or ask for its ``result``."""

    __slots__ = ("_outcome", "_position")

    def __init__(self, outcome: Outcome, position: int) -> None:
        self._outcome = outcome
        self._position = position

    def done(self) -> bool:
        return self._outcome.known()

    def result(self, timeout_ms: int | None = None) -> RecordMetadata:
        """Where the record is, or the error that says why it is not, or why nobody knows.

        ``OutcomeUnknownError`` after ``timeout_ms``: the producer still tries.
        """
        outcome = self._outcome
        if not outcome.done and not outcome.wait(_seconds(timeout_ms)):
            raise _not_yet(timeout_ms)
        if outcome.error is not None:
            raise outcome.error
        return outcome.metadata(self._position)

    def exception(self, timeout_ms: int | None = None) -> RayQueueError | None:
        """The error that ``result`` would raise; None if the record is written."""
        if not self._outcome.wait(_seconds(timeout_ms)):
            raise _not_yet(timeout_ms)
        return self._outcome.error

    def add_done_callback(self, callback: Callable[[Delivery], object]) -> None:
        """Called with this delivery in the callback thread, also if the outcome is known already."""
        self._outcome.add_callback(lambda: callback(self))

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        if not self._outcome.done:
            yield from _known([self._outcome]).__await__()
        return self.result()

    def __repr__(self) -> str:
        outcome = self._outcome
        state = "on its way" if not outcome.known() else repr(outcome.error or outcome.metadata(self._position))
        return f"<Delivery to {outcome.topic}-{outcome.partition}: {state}>"


class Part(NamedTuple):
    """Records of one ``send_many`` that follow each other in one batch."""

    outcome: Outcome
    position: int
    """Of the first of them in the batch."""
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here


class Deliveries(Sequence[Delivery]):
    """The records of one ``send_many``, each by its index, and all of them together."""

    __slots__ = ("_ends", "_order", "_parts", "_places")

    def __init__(self, parts: list[Part], order: list[int] | None = None) -> None:
        """``order``: the index of each record, in the order in which the parts have them."""
        self._parts = parts
        self._order = order
        self._places: list[int] | None = None
        ends: list[int] = []
        total = 0
        for part in parts:
            total += part.count
            ends.append(total)
        self._ends = ends

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Delivery: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Delivery]: ...
    def __getitem__(self, index: int | slice) -> Delivery | Sequence[Delivery]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        outcome, position = self._place(index)
        return Delivery(outcome, position)

    def done(self) -> bool:
        return all(part.outcome.known() for part in self._parts)

    def result(self, timeout_ms: int | None = None) -> Sequence[RecordMetadata]:
        """Where each record is. Raises the first error there is; ``self[index]`` tells of each record."""
        error = self.exception(timeout_ms)
        if error is not None:
            raise error
        return _Metadatas(self)

    def exception(self, timeout_ms: int | None = None) -> RayQueueError | None:
        """The first error there is; None if all are written."""
        self._wait(timeout_ms)
        return next((part.outcome.error for part in self._parts if part.outcome.error is not None), None)

    def add_done_callback(self, callback: Callable[[Deliveries], object]) -> None:
        """Called once, in the callback thread, when all outcomes are known."""
        outcomes = [part.outcome for part in self._parts]
        _when_all(outcomes, lambda: CallbackThread.shared().post((lambda: callback(self),)))

    def __await__(self) -> Generator[Any, None, Sequence[RecordMetadata]]:
        if not self.done():
            yield from _known([part.outcome for part in self._parts]).__await__()
        return self.result()

    def _wait(self, timeout_ms: int | None) -> None:
        if self.done():
            return
        _refuse_to_wait_in_io_thread()
        known = threading.Event()
        _when_all([part.outcome for part in self._parts], known.set)
        if not known.wait(_seconds(timeout_ms)):
            raise _not_yet(timeout_ms)

    def _place(self, index: int) -> tuple[Outcome, int]:
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"there are {count} records")
        index %= count
        if self._order is not None:
            if self._places is None:
                places = [0] * count
                for place, original in enumerate(self._order):
                    places[original] = place
                self._places = places
            index = self._places[index]
        at = bisect_right(self._ends, index)
        part = self._parts[at]
        return part.outcome, part.position + index - (self._ends[at] - part.count)


class _Metadatas(Sequence[RecordMetadata]):
    """Made as they are asked for: most callers of ``send_many`` look at none of them, or at the last."""

    __slots__ = ("_deliveries",)

    def __init__(self, deliveries: Deliveries) -> None:
        self._deliveries = deliveries

    def __len__(self) -> int:
        return len(self._deliveries)

    @overload
    def __getitem__(self, index: int) -> RecordMetadata: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RecordMetadata]: ...
    def __getitem__(self, index: int | slice) -> RecordMetadata | Sequence[RecordMetadata]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        outcome, position = self._deliveries._place(index)
        return outcome.metadata(position)

    def __iter__(self) -> Iterator[RecordMetadata]:
        return (self[index] for index in range(len(self)))


def _when_all(outcomes: Sequence[Outcome], wake: Waker) -> None:
    """Wake once, when the last of them is known."""
    missing = len(outcomes)
    counting = threading.Lock()
    if not missing:
        wake()
        return

    def one() -> None:
        nonlocal missing
        with counting:
            missing -= 1
            last = missing == 0
        if last:
            wake()

    for outcome in outcomes:
        outcome.add_waker(one)


async def _known(outcomes: Sequence[Outcome]) -> None:
    """Wait in the running event loop, whichever that is."""
    loop = asyncio.get_running_loop()
    known: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not known.done():
            known.set_result(None)

    def wake() -> None:
        try:
            loop.call_soon_threadsafe(settle)
        except RuntimeError:  # the loop was closed; nobody waits any more
            return

    _when_all(outcomes, wake)
    await known


def _refuse_to_wait_in_io_thread() -> None:
    if threading.current_thread().name == "rayqueue io":
        raise InvalidInputError("this would wait for itself: in the I/O thread, await the delivery instead")


def _seconds(timeout_ms: int | None) -> float | None:
    return None if timeout_ms is None else timeout_ms / 1000


def _not_yet(timeout_ms: int | None) -> OutcomeUnknownError:
    return OutcomeUnknownError(f"not acknowledged after {timeout_ms} ms; the producer still tries")


def _after_fork() -> None:
    global _registering, _pid
    _registering = threading.Lock()
    _pid = os.getpid()
    CallbackThread._shared_lock = threading.Lock()
    CallbackThread._shared = None  # its thread and its callbacks are the parent's


os.register_at_fork(after_in_child=_after_fork)
