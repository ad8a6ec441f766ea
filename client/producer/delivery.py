"""Deliveries: what ``send`` returns, the outcome of a record that is on its way.

One ``Outcome`` is shared by all records of a batch, and a ``Delivery`` is no
more than an outcome and a position in it: it costs 0.15 µs, where a
``concurrent.futures.Future`` costs 2 µs. ``Deliveries`` is the same for the
records of one ``send_many``, which may have gone into many batches. A batch
that is cut, because its partition has room for a part of it only, becomes two
outcomes behind the first; whoever waits, waits for the one that is meant.

An error that nobody has looked at is told by ``flush`` and ``close``, so every
outcome knows which of its records were asked about.

An outcome is resolved once, by the I/O thread. Whoever waits in another thread
or in another event loop is woken from there; callbacks of the application run in
a thread of their own (``callbacks``).

In a forked child an outcome that was not known at the fork is ``ForkedError``:
only the parent learns it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, repeat
from typing import Any, NamedTuple, overload

from rayqueue.client.arguments import seconds_of
from rayqueue.client.forks import forked
from rayqueue.client.io import in_io_thread
from rayqueue.client.producer.callbacks import Callback, CallbackThread
from rayqueue.errors import DeliveryFailedError, InvalidInputError, OutcomeUnknownError, RayQueueError

_log = logging.getLogger(__name__)

Waker = Callable[[], None]
"""Called by the I/O thread when an outcome is known. Must not block or raise."""


class RecordMetadata(NamedTuple):
    """The place of a record: topic, partition, offset and timestamp."""

    topic: str
    partition: int
    offset: int | None
    """None if it is not known: ``acks`` was not ``all``."""
    timestamp: int


_registering = threading.Lock()
"""Held for an instant, while an outcome is resolved or cut, or somebody begins to wait for one."""

_pid = os.getpid()

_ALL = 2**62


@dataclass(eq=False, slots=True)
class _Latch:
    """Wakes somebody, once, when the last outcome that it waits for is known. Counted under ``_registering``."""

    wake: Waker
    left: int = 0


@dataclass(eq=False, slots=True)
class Outcome:
    """The fate of a batch, once it is known. ``resolve`` and ``cut`` are the I/O thread's."""

    topic: str
    partition: int
    timestamps: Sequence[int] | int
    pid: int = field(default_factory=lambda: _pid)
    done: bool = False
    """Never for one that was cut: its pieces are."""
    base_offset: int | None = None
    error: RayQueueError | None = None
    seen: set[int] | None = None
    """Records whose error somebody was told."""
    _pieces: tuple[Outcome, int, Outcome] | None = None
    _latches: list[tuple[int, int, _Latch]] | None = None
    _callbacks: list[tuple[int, Callback]] | None = None

    # -- the I/O thread's ----------------------------------------------------------------

    def resolve(self, base_offset: int | None, error: RayQueueError | None = None) -> None:
        """Once. A second time changes nothing."""
        ready: list[_Latch] = []
        with _registering:
            if self.done:
                return
            self.base_offset = base_offset
            self.error = error
            self.done = True
            latches, self._latches = self._latches, None
            callbacks, self._callbacks = self._callbacks, None
            for _, _, latch in latches or ():
                latch.left -= 1
                if not latch.left:
                    ready.append(latch)
        if callbacks:
            CallbackThread.shared().post([callback for _, callback in callbacks])
        for latch in ready:
            latch.wake()

    def cut(self, at: int) -> tuple[Outcome, Outcome]:
        """The batch becomes two: of so many records, and of the rest. Each has an outcome of its own from now on."""
        stamps = self.timestamps
        halves = (stamps, stamps) if isinstance(stamps, int) else (stamps[:at], stamps[at:])
        first, rest = (Outcome(self.topic, self.partition, half) for half in halves)
        with _registering:
            latches, self._latches = self._latches, None
            callbacks, self._callbacks = self._callbacks, None
            self._pieces = first, at, rest
            for start, stop, latch in latches or ():
                latch.left -= 1
                self._watch(latch, start, stop)
            for position, callback in callbacks or ():
                leaf, position = self.leaf(position)
                leaf._callbacks = [*(leaf._callbacks or ()), (position, callback)]
        return first, rest

    # -- any thread's --------------------------------------------------------------------

    def leaf(self, position: int) -> tuple[Outcome, int]:
        """The outcome that this record has now, and its position in it."""
        outcome = self
        while outcome._pieces is not None:
            first, at, rest = outcome._pieces
            if position < at:
                outcome = first
            else:
                outcome, position = rest, position - at
        return outcome, position

    def leaves(self, start: int, stop: int) -> Iterator[tuple[Outcome, int, int]]:
        """The outcomes of these records, each with where they begin and end in it."""
        outcome: Outcome = self
        while outcome._pieces is not None:  # the rest of a rest of a rest; the first of two is cut seldom
            first, at, rest = outcome._pieces
            if start < at:
                yield from first.leaves(start, min(stop, at))
            if stop <= at:
                return
            outcome, start, stop = rest, max(0, start - at), stop - at
        yield outcome, start, stop

    def known(self, start: int, stop: int) -> bool:
        """Whether these are resolved; or, in a forked child, never will be."""
        if not self.done and self.pid != _pid:
            for leaf, _, _ in self.leaves(0, _ALL):
                leaf._latches = leaf._callbacks = None
                leaf.resolve(None, forked("this record"))
        return self.done or all(leaf.done for leaf, _, _ in self.leaves(start, stop))

    def failure(self, start: int, stop: int) -> RayQueueError | None:
        """The first error of these records. It counts as seen, for all of them."""
        found: RayQueueError | None = None
        for leaf, begin, end in self.leaves(start, stop):
            if leaf.error is not None:
                found = found or leaf.error
                leaf.see(begin, end)
        return found

    def see(self, start: int, stop: int) -> None:
        """Somebody was told the error of these."""
        with _registering:
            self.seen = self.seen or set()
            self.seen.update(range(start, stop))

    def _watch(self, latch: _Latch, start: int, stop: int) -> None:
        """Under the lock."""
        for leaf, begin, end in self.leaves(start, stop):
            if not leaf.done:
                leaf._latches = [*(leaf._latches or ()), (begin, end, latch)]
                latch.left += 1

    def add_callback(self, position: int, callback: Callback) -> None:
        """Run in the callback thread once this record's outcome is known, also if it is."""
        self.known(position, position + 1)
        with _registering:
            leaf, position = self.leaf(position)
            if not leaf.done:
                if leaf._callbacks is None:
                    leaf._callbacks = []
                leaf._callbacks.append((position, callback))
                return
        CallbackThread.shared().post((callback,))

    def timestamp(self, position: int) -> int:
        timestamps = self.timestamps
        return timestamps if isinstance(timestamps, int) else timestamps[position]

    def metadata(self, position: int) -> RecordMetadata:
        """Of one record; the outcome is known and good."""
        base = self.base_offset
        offset = None if base is None else base + position
        return RecordMetadata(self.topic, self.partition, offset, self.timestamp(position))

    def metadatas(self, start: int, stop: int) -> Iterator[RecordMetadata]:
        """The same of several."""
        base, times = self.base_offset, self.timestamps
        return map(
            RecordMetadata,
            repeat(self.topic),
            repeat(self.partition),
            repeat(None) if base is None else range(base + start, base + stop),
            repeat(times, stop - start) if isinstance(times, int) else times[start:stop],
        )


Range = tuple[Outcome, int, int]
"""Records of one batch: from the first position to before the second."""


def when_known(ranges: Iterable[Range], wake: Waker) -> None:
    """Wake once, when the last of them is known; at once if all are."""
    ranges = list(ranges)
    for outcome, start, stop in ranges:
        outcome.known(start, stop)
    latch = _Latch(wake)
    with _registering:
        for outcome, start, stop in ranges:
            outcome._watch(latch, start, stop)
        waits = latch.left > 0
    if not waits:
        wake()


def wait_until_known(ranges: Iterable[Range], timeout_s: float | None) -> bool:
    """Block until all are known, or the time is up."""
    if in_io_thread():
        raise InvalidInputError("this would wait for itself: in the I/O thread, await the delivery instead")
    known = threading.Event()
    when_known(ranges, known.set)
    return known.wait(timeout_s)


def failed_outcome(topic: str, partition: int, error: RayQueueError) -> Outcome:
    outcome = Outcome(topic, partition, 0)
    outcome.resolve(None, error)
    return outcome


class Delivery:
    """One record on its way. ``await`` it in any event loop, or ask for its ``result`` as of a ``Future``."""

    __slots__ = ("_outcome", "_position")

    def __init__(self, outcome: Outcome, position: int) -> None:
        self._outcome = outcome
        self._position = position

    def done(self) -> bool:
        return self._outcome.known(self._position, self._position + 1)

    def result(self, timeout: float | None = None, *, timeout_ms: int | None = None) -> RecordMetadata:
        """The record's place, once it is acknowledged; or the error that says why it is not, or why nobody knows.

        Waits for ``timeout`` seconds, as ``concurrent.futures`` does, or for ``timeout_ms``. Then
        ``OutcomeUnknownError``: the producer still tries.
        """
        outcome, position = self._known(timeout, timeout_ms)
        if outcome.error is not None:
            outcome.see(position, position + 1)
            raise outcome.error
        return outcome.metadata(position)

    def exception(self, timeout: float | None = None, *, timeout_ms: int | None = None) -> RayQueueError | None:
        """The error that ``result`` would raise; None if the record is written."""
        outcome, position = self._known(timeout, timeout_ms)
        if outcome.error is not None:
            outcome.see(position, position + 1)
        return outcome.error

    def add_done_callback(self, callback: Callable[[Delivery], object]) -> None:
        """Called with this delivery in the callback thread, also if the outcome is known already."""
        self._outcome.add_callback(self._position, lambda: callback(self))

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        if not self.done():
            yield from _known([(self._outcome, self._position, self._position + 1)]).__await__()
        return self.result()

    def _known(self, timeout: float | None, timeout_ms: int | None) -> tuple[Outcome, int]:
        outcome, position = self._outcome, self._position
        timeout_s = seconds_of(timeout, timeout_ms)
        if outcome.done:
            return outcome, position
        if not self.done() and not wait_until_known([(outcome, position, position + 1)], timeout_s):
            raise _not_yet(timeout_s)
        return outcome.leaf(position)

    def __repr__(self) -> str:
        self.done()
        outcome, position = self._outcome.leaf(self._position)
        state = "on its way" if not outcome.done else repr(outcome.error or outcome.metadata(position))
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
        self._ends = list(accumulate(part.count for part in parts))

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
        return all(outcome.known(start, stop) for outcome, start, stop in self._ranges())

    def result(self, timeout: float | None = None, *, timeout_ms: int | None = None) -> Sequence[RecordMetadata]:
        """The places of all records. Raises the first error there is; ``self[index]`` tells of each record."""
        error = self.exception(timeout, timeout_ms=timeout_ms)
        if error is not None:
            raise error
        return Metadatas(self)

    def exception(self, timeout: float | None = None, *, timeout_ms: int | None = None) -> RayQueueError | None:
        """The first error there is; None if all are written."""
        timeout_s = seconds_of(timeout, timeout_ms)
        if not self.done() and not wait_until_known(self._ranges(), timeout_s):
            raise _not_yet(timeout_s)
        found: RayQueueError | None = None
        for outcome, start, stop in self._ranges():
            error = outcome.failure(start, stop)
            found = found or error
        return found

    def add_done_callback(self, callback: Callable[[Deliveries], object]) -> None:
        """Called once, in the callback thread, when all outcomes are known."""
        when_known(self._ranges(), lambda: CallbackThread.shared().post((lambda: callback(self),)))

    def __await__(self) -> Generator[Any, None, Sequence[RecordMetadata]]:
        if not self.done():
            yield from _known(self._ranges()).__await__()
        return self.result()

    def metadatas(self) -> list[RecordMetadata]:
        """Of all, in the order in which they were given; they are known and good."""
        made: list[RecordMetadata] = []
        for outcome, start, stop in self._ranges():
            for leaf, begin, end in outcome.leaves(start, stop):
                made += leaf.metadatas(begin, end)
        if self._order is None:
            return made
        ordered = made.copy()
        for place, original in enumerate(self._order):
            ordered[original] = made[place]
        return ordered

    def _ranges(self) -> list[Range]:
        return [(part.outcome, part.position, part.position + part.count) for part in self._parts]

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
        return part.outcome.leaf(part.position + index - (self._ends[at] - part.count))


class Metadatas(Sequence[RecordMetadata]):
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
        return iter(self._deliveries.metadatas())

    def runs(self) -> Iterator[tuple[RecordMetadata, int]]:
        """All of them, in their order, as runs of one partition and one timestamp: the first, and how many."""
        if self._deliveries._order is not None:
            yield from zip(self, repeat(1))
            return
        for outcome, start, stop in self._deliveries._ranges():
            for leaf, begin, end in outcome.leaves(start, stop):
                times = leaf.timestamps
                for _, alike in groupby(repeat(times, end - begin) if isinstance(times, int) else times[begin:end]):
                    count = len(list(alike))
                    yield leaf.metadata(begin), count
                    begin += count


async def _known(ranges: Iterable[Range]) -> None:
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

    when_known(ranges, wake)
    await known


def _not_yet(timeout_s: float | None) -> OutcomeUnknownError:
    return OutcomeUnknownError(f"not acknowledged after {timeout_s} s; the producer still tries")


def unseen(outcome: Outcome, count: int) -> list[Part]:
    """The records of a failed batch whose error nobody was told yet, in runs. They are told now."""
    with _registering:
        seen = outcome.seen or set()
        outcome.seen = set(range(count))
    runs: list[Part] = []
    start = 0
    for position in (*sorted(seen), count):
        if position > start:
            runs.append(Part(outcome, start, position - start))
        start = position + 1
    return runs


def delivery_failed(batches: Iterable[tuple[Outcome, int]], more_records: int) -> DeliveryFailedError | None:
    """One error for all records of failed batches whose error nobody was told; None if there are none."""
    parts = [part for outcome, count in batches for part in unseen(outcome, count)]
    failed = sum(part.count for part in parts) + more_records
    if not failed:
        return None
    unsure = sum(part.count for part in parts if isinstance(part.outcome.error, OutcomeUnknownError))
    text = f"{failed} records were not acknowledged"
    text += f", of which {unsure} may be written" if unsure else "; they are not written"
    cause: RayQueueError | None = None
    if parts:
        first = parts[0].outcome
        cause = first.error
        text += f". The first, for {first.topic}-{first.partition}: {type(cause).__name__}: {cause}"
    error = DeliveryFailedError(text, failed=failed, unknown=unsure)
    error.deliveries = Deliveries(parts)
    error.__cause__ = cause
    return error


def _after_fork() -> None:
    global _registering, _pid
    _registering = threading.Lock()
    _pid = os.getpid()


os.register_at_fork(after_in_child=_after_fork)
