"""The stream of a producer's batches into one partition: in order, each once, many under way.

Batches are numbered when they are first sent and go to whoever leads, one after
the other, without waiting for answers. They stay in the *window* until they are
acknowledged. When one comes back with an error that may pass (the leader is
another one, the connection broke, the queue is full), the stream stops, waits
until nothing is under way any more, and sends the whole window again in its
order. The partition answers what it has already with the offset of the first
time, so nothing is lost, doubled or reordered, whatever happened in between.

A partition whose backlog is bounded refuses what does not fit. The stream then
waits for its turn there (``AwaitRoom``), is told how much room is kept for it,
cuts the batch where the room ends, and sends what fits; then it waits again.
Sequences count records, so a piece of a batch continues where the one before
it ended, and the partition knows a piece of what it has written as a whole.

A batch that is given up (an error that does not pass, or its time is up) leaves
a hole in the numbers, and the partition takes nothing behind a hole. So the
stream begins a new *epoch* of its producer id, numbered from 0. What is *held*
behind the hole goes with the new epoch, once what is before it is settled. A
newer epoch also fences the older one: a batch that was given up and still is
under way somewhere arrives before what was sent after it, or never.

Only a batch that is surely not written may be numbered again. The partition
takes batches without gaps, so behind one that is surely not written nothing
is. A batch whose time is up but that may be written stays in the window,
reported as unknown, for as long as others behind it may be written too.

A stream is bound to its topic by the topic's id. If the topic is deleted, or
another one has its name, all that waits here fails and says so; what is sent
later goes to the new topic by a stream of its own.

Everything in here runs in the I/O thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

from rayqueue.client.accumulator import Accumulator, PartitionBuffer
from rayqueue.client.outgoing import Batch
from rayqueue.client.surroundings import AppendChannel, LeaderRoute, Surroundings
from rayqueue.errors import (
    ClosedError,
    DeliveryTimeoutError,
    DiskFullError,
    InvalidInputError,
    NotLeaderError,
    OutcomeUnknownError,
    OversizedRecordError,
    ProducerError,
    ProducerFencedError,
    QueueFullError,
    RayQueueError,
    ReplicaClosedError,
    SequenceExpiredError,
    SequenceGapError,
)
from rayqueue.protocol.calls import AwaitRoom, Room
from rayqueue.protocol.data import Appended
from rayqueue.protocol.frames import Kind
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import Compression

_log = logging.getLogger(__name__)

STALL_DOUBTS = 5
"""A leader that is silent for so many times ``doubt_ms`` may have been replaced without our noticing."""

_LOST_TAIL_S = 1.0
"""How long a gap must be reported at the head of the window before it is taken for what acks="leader" has lost."""

_PATIENT_FAILURES = 3
"""After more of them in a row the topic itself is looked up again: it may have been deleted, or made anew."""

_LEADERLESS_S = 1.0
"""When nobody leads for so long, the same."""

_CONGESTED_S = 0.002

_ROOM_WAIT_MS = 5000
"""How long the leader of a full partition is asked to wait for room before it answers. Then it is asked again."""

_NOT_WRITTEN = (NotLeaderError, ReplicaClosedError, QueueFullError, DiskFullError, ProducerError, InvalidInputError)
"""Errors that say for sure that this attempt has written nothing."""

KINDS = {"all": Kind.APPEND, "leader": Kind.APPEND_LEADER, "none": Kind.APPEND_UNACKED}
COMPRESSIONS = {"none": Compression.NONE, "lz4": Compression.LZ4, "zstd": Compression.ZSTD}


class PartitionStream:
    """One partition's. ``pump`` whenever there may be something to send."""

    def __init__(self, buffer: PartitionBuffer, accumulator: Accumulator, around: Surroundings) -> None:
        settings = around.settings
        self.partition = TopicPartition(buffer.topic, buffer.number)
        self._buffer = buffer
        self._accumulator = accumulator
        self._around = around
        self._loop = around.loop
        self._clock_s = around.clock_s
        self._kind = KINDS[settings.acks]
        self._compression = COMPRESSIONS[settings.compression]
        self._max_batches = settings.in_flight_batches
        self._max_bytes = settings.in_flight_bytes
        self._raises_full = settings.on_full == "raise"
        self._stall_s = STALL_DOUBTS * around.client.doubt_ms / 1000
        self._window: deque[Batch] = deque()
        self._held: deque[Batch] = deque()
        self._window_bytes = 0
        self._channel: AppendChannel | None = None
        self._route: LeaderRoute | None = None
        self._producer_id: int | None = None
        self._epoch = 0
        self._sequence = 0
        self._new_epoch = False
        self._attempts = count(1)
        self._under_way: set[int] = set()
        self._heard_s = 0.0
        self._nothing_under_way: asyncio.Future[None] | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._error: RayQueueError | None = None  # why the stream has stopped
        self._last_error: RayQueueError | None = None  # since the last acknowledgement
        self._failures = 0
        self._gap_since_s: float | None = None
        self._probe = False
        self._rationed = False  # the partition is full: nothing goes without a grant
        self._full: RayQueueError = QueueFullError(f"{self.partition} has no room")  # as it was said last
        self._leaderless = False
        self._linger: asyncio.TimerHandle | None = None
        self._closed = False

    # -- sending -------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what may go now."""
        if self._recovery is not None or self._closed:
            return
        channel, buffer, window = self._channel, self._buffer, self._window
        if channel is None or channel.closed or self._producer_id is None or self._new_epoch:
            if window or len(buffer):
                self._recover()
            return
        while len(window) < self._max_batches and self._window_bytes < self._max_bytes:
            if self._kind is Kind.APPEND_UNACKED and not self._takes_more(channel):
                return
            batch = self._accumulator.take(buffer, self._clock_s())
            if batch is None:
                self._arm_linger()
                return
            try:
                batch.stamp(self._compression, self._producer_id, self._sequence, self._epoch)
            except RayQueueError as error:  # send has checked its records; this is a bug of ours, or a strange object
                self._resolve(batch, None, error)
                continue
            if self._kind is Kind.APPEND_UNACKED:
                self._hand_over(batch, channel)
                continue
            self._sequence += len(batch)
            window.append(batch)
            self._window_bytes += batch.size_bytes
            buffer.in_flight = len(window)
            if not self._transmit(batch, channel):
                return

    def _hand_over(self, batch: Batch, channel: AppendChannel) -> None:
        """acks="none": it is the kernel's now. There is no answer, and no second attempt."""
        try:
            future = channel.append(self._payload(batch), self._kind)
            error = _error_of(future) if future.done() else None
        except RayQueueError as refused:
            error = refused
        self._resolve(batch, None, error)

    def _takes_more(self, channel: AppendChannel) -> bool:
        """acks="none": nobody answers, so the kernel's pace is the only limit."""
        if channel.closed:
            self._recover()
            return False
        if channel.queued_bytes > self._max_bytes:
            self._loop.call_later(_CONGESTED_S, self.pump)
            return False
        return True

    def _transmit(self, batch: Batch, channel: AppendChannel) -> bool:
        attempt = batch.attempt = next(self._attempts)
        try:
            future = channel.append(self._payload(batch), self._kind)
        except RayQueueError as error:  # the connection is gone, and this batch was not given to it
            self._stop(error)
            return False
        if not self._under_way:
            self._heard_s = self._clock_s()
        self._under_way.add(attempt)
        future.add_done_callback(partial(self._answered, batch, attempt))
        return True

    def _payload(self, batch: Batch) -> bytes:
        assert batch.payload is not None  # noqa: S101  # stamped before
        return batch.payload

    def _arm_linger(self) -> None:
        due_s = self._accumulator.due_s(self._buffer)
        if due_s is None or self._linger is not None:
            return

        def due() -> None:
            self._linger = None
            self.pump()

        self._linger = self._loop.call_later(max(0.0, due_s - self._clock_s()), due)

    # -- answers -------------------------------------------------------------------------

    def _answered(self, batch: Batch, attempt: int, future: asyncio.Future[Appended]) -> None:
        self._under_way.discard(attempt)
        self._heard_s = self._clock_s()
        error = _error_of(future)
        if error is None or isinstance(error, SequenceExpiredError):
            # Also from an attempt that was given up: what is written is written.
            self._acknowledged(batch, None if error else future.result().base_offset)
        elif batch.attempt == attempt and not batch.settled:
            self._refused(batch, error)
        waiting = self._nothing_under_way
        if waiting is not None and not self._under_way and not waiting.done():
            waiting.set_result(None)

    def _acknowledged(self, batch: Batch, base_offset: int | None) -> None:
        if batch.settled:
            return
        batch.settled = True
        self._failures = 0
        self._last_error = None
        self._gap_since_s = None
        self._probe = False
        window = self._window
        while window and window[0].settled:
            self._window_bytes -= window.popleft().size_bytes
        self._buffer.in_flight = len(window) + len(self._held)
        self._resolve(batch, base_offset)
        self.pump()

    def _refused(self, batch: Batch, error: RayQueueError) -> None:
        self._last_error = error
        if not isinstance(error, _NOT_WRITTEN):
            batch.maybe_written = True
        full = isinstance(error, QueueFullError)
        bounded = _is_bounded(error)
        if bounded:
            self._rationed = True
            self._full = error
        self._probe = self._probe or (full and not bounded) or isinstance(error, DiskFullError)
        if full and not bounded and self._raises_full and not batch.maybe_written:
            self._give_up(batch, error)
        elif isinstance(error, SequenceGapError) and batch is self._window[0]:
            self._gap_at_head(batch, error)
        elif error.retriable:
            self._stop(error)
        else:
            self._give_up(batch, error)

    def _gap_at_head(self, batch: Batch, error: RayQueueError) -> None:
        """All before it is acknowledged, and yet the partition misses something.

        It has forgotten this producer, or lost what only one replica had acknowledged, or does not know its log yet.
        """
        now_s = self._clock_s()
        self._gap_since_s = now_s if self._gap_since_s is None else self._gap_since_s
        lost = self._kind is Kind.APPEND_LEADER and now_s - self._gap_since_s > _LOST_TAIL_S
        if lost or not batch.maybe_written:
            self._hold(self._window)
            self._window = deque()
        self._stop(error)

    def _give_up(self, batch: Batch, error: RayQueueError) -> None:
        """An error that does not pass. What is behind the batch waits until what is before it is settled."""
        batch.settled = True
        if isinstance(error, ProducerFencedError):
            self._producer_id = None
        before, behind = _around(self._window, batch)
        if batch.maybe_written:
            # An earlier attempt may have written it and some behind it: these cannot be numbered again.
            for each in behind:
                if each.maybe_written or each.attempt in self._under_way:
                    self._resolve(each, None, OutcomeUnknownError(f"it may be written; the batch before it: {error}"))
            behind = [each for each in behind if not each.outcome.done]
            error = OutcomeUnknownError(f"an earlier attempt may have written it; the last one: {error}")
        self._window = deque(before)
        self._hold(behind)
        self._resolve(batch, None, error)
        self._stop(None)

    def _hold(self, batches: Iterable[Batch]) -> None:
        """These are surely not written, and go with a new epoch."""
        batches = list(batches)
        for batch in batches:
            batch.attempt = 0  # an attempt under way can only come back with the gap before it
            batch.maybe_written = False
        self._held.extendleft(reversed(batches))
        self._new_epoch = True

    def _stop(self, error: RayQueueError | None) -> None:
        if self._error is None:  # the first one is the cause; those after it are gaps
            self._error = error
        self._recover()

    # -- recovering ----------------------------------------------------------------------

    def _recover(self) -> None:
        if self._recovery is None and not self._closed:
            self._recovery = self._loop.create_task(self._recovering())

    async def _recovering(self) -> None:
        try:
            while not await self._one_recovery():
                pass
        except Exception:  # noqa: BLE001  # a bug; nobody may wait for ever because of it
            _log.exception("the stream to %s has failed", self.partition)
            self._fail_all(OutcomeUnknownError(f"the stream to {self.partition} has failed; see the log"))
        finally:
            self._recovery = None
        self.pump()

    async def _one_recovery(self) -> bool:
        """One attempt to get under way again. True once there is nothing left to recover."""
        await self._settle()
        error, self._error = self._error, None
        if error is not None and not _is_bounded(error):  # for room we wait in the line
            await asyncio.sleep(self._pause_s())
        self._tidy()
        if not self._window and not self._held:
            self._rationed = False
            if not len(self._buffer):
                return True
        try:
            channel = await self._connect(error)
        except RayQueueError as failure:
            self._last_error = failure
            if failure.retriable:
                self._error = failure
            else:
                self._fail_all(failure)
            return False
        self._tidy()
        if self._new_epoch and not self._window:
            self._renumber()
        self._channel = channel
        if self._rationed:
            await self._send_rationed(channel)
            return not self._held and not self._window and not self._error
        probing = self._probe
        most = 1 if probing else self._max_batches  # more than that in doubt is more than the partition remembers
        for batch in list(self._window)[:most]:
            if not batch.settled and not self._transmit(batch, channel):
                return False
        return not self._held and not (probing and self._window) and len(self._window) <= most

    # -- a full partition ----------------------------------------------------------------

    async def _send_rationed(self, channel: AppendChannel) -> None:
        """Wait for room, and send as much as there is."""
        if not self._window:
            return
        head = self._window[0]
        try:
            room = await self._await_room(channel)
        except OversizedRecordError as error:
            self._give_up(self._cut(head, 1, head.first_bytes()), error)
            return
        except RayQueueError as error:
            self._last_error = error
            self._stop(error)
            return
        self._tidy()  # time has passed
        if self._new_epoch or not self._window or self._window[0] is not head or self._closed:
            return
        records, size_bytes = room.records, room.size_bytes
        for batch in list(self._window)[: self._max_batches]:
            if len(batch) > records or len(self._payload(batch)) > size_bytes:
                batch = self._cut(batch, records, size_bytes)
                if len(batch) > records or len(self._payload(batch)) > size_bytes:
                    break
            records -= len(batch)
            size_bytes -= len(self._payload(batch))
            if not self._transmit(batch, channel):
                return
        if self._raises_full and not self._under_way:
            self._give_up(self._window[0], self._full)

    async def _await_room(self, channel: AppendChannel) -> Room:
        """What the partition takes of us now. Nothing, if it takes longer than we wait."""
        assert self._producer_id is not None  # noqa: S101  # connected before
        window = list(self._window)[: self._max_batches]
        left_ms = max(1, round((window[0].deadline_s - self._clock_s()) * 1000))
        wait_ms = 0 if self._raises_full else min(_ROOM_WAIT_MS, left_ms)
        call = AwaitRoom(
            producer_id=self._producer_id,
            records=sum(map(len, window)),
            size_bytes=sum(len(self._payload(batch)) for batch in window),
            least_bytes=window[0].first_bytes(),
            wait_ms=wait_ms,
        )
        try:
            room: Room = await asyncio.wait_for(channel.call(call, may_take_ms=wait_ms), wait_ms / 1000 + self._stall_s)
        except asyncio.TimeoutError:
            raise OutcomeUnknownError(f"the leader of {self.partition} has not answered") from None
        return room

    def _cut(self, batch: Batch, records: int, size_bytes: int) -> Batch:
        """What of the batch fits into this, cut off; the batch itself if nothing can be."""
        pieces = batch.cut(records, size_bytes)
        if pieces is None:
            return batch
        self._accumulator.split(batch, pieces)
        at = self._window.index(batch)
        del self._window[at]
        for piece in reversed(pieces):
            self._window.insert(at, piece)
        self._count()
        return pieces[0]

    async def _settle(self) -> None:
        """Wait until nothing is under way, so that no batch is twice. Give up on a leader that stays silent."""
        while self._under_way:
            self._nothing_under_way = self._loop.create_future()
            silent_s = self._clock_s() - self._heard_s
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._nothing_under_way, max(0.001, self._stall_s - silent_s))
            self._nothing_under_way = None
            if self._under_way and self._clock_s() - self._heard_s >= self._stall_s:
                self._abandon()

    def _abandon(self) -> None:
        """Do not wait any longer for what is under way. Its outcome is unknown."""
        for batch in self._window:
            if batch.attempt in self._under_way:
                batch.maybe_written = True
                batch.attempt = 0
        self._under_way.clear()
        if self._error is None:
            self._error = OutcomeUnknownError(f"the leader of {self.partition} has not answered")

    def _pause_s(self) -> float:
        client = self._around.client
        pause_ms: float = min(client.retry_max_ms, client.retry_min_ms * 2 ** min(self._failures, 16))
        self._failures += 1
        return pause_ms / 1000 * (0.5 + self._around.rng.random() / 2)

    async def _connect(self, error: RayQueueError | None) -> AppendChannel:
        """An open channel to the leader. Whatever is needed for it is asked for again if there was trouble."""
        around = self._around
        if self._producer_id is None:
            if self._kind is Kind.APPEND_UNACKED:
                self._producer_id = 0  # numbers are for repeating, and nothing is repeated
            elif self._new_epoch:
                self._producer_id = await around.fresh_producer_id()
            else:
                self._producer_id = await around.producer_id()
        stale = error if error is not None and error.refresh_metadata else None
        if self._route is None:
            self._route = await around.route(self.partition, self._buffer.topic_id, refresh=False)
        elif self._leaderless or (stale is not None and self._failures > _PATIENT_FAILURES):
            await self._look_up()
        if stale is not None:
            self._current_route.failed(stale)
        try:
            channel: AppendChannel = await asyncio.wait_for(self._current_route.leader(), _LEADERLESS_S)
        except ClosedError as closed:  # the partition's replicas are others now, and so is the way to them
            self._route = None
            raise NotLeaderError(str(closed), leader=None) from None
        except asyncio.TimeoutError:
            self._leaderless = True
            raise NotLeaderError(f"nobody leads {self.partition} at the moment", leader=None) from None
        self._leaderless = False
        return channel

    @property
    def _current_route(self) -> LeaderRoute:
        assert self._route is not None  # noqa: S101  # looked up before
        return self._route

    async def _look_up(self) -> None:
        """The topic may have been deleted, or made anew. If nobody knows, the route that we have may still be right."""
        route = self._around.route(self.partition, self._buffer.topic_id, refresh=True)
        try:
            self._route = await asyncio.wait_for(route, _LEADERLESS_S)
        except asyncio.TimeoutError:
            return
        except RayQueueError as error:
            if not error.retriable:
                raise

    def _tidy(self) -> None:
        """Drop what is settled or too late. Nothing is under way."""
        self.expire(self._clock_s())
        window = [batch for batch in self._window if not batch.settled]
        unsure: list[Batch] = []
        for batch in window:
            if not batch.maybe_written:
                break
            unsure.append(batch)
        sure = window[len(unsure) :]
        if unsure and all(batch.outcome.done for batch in unsure):
            unsure = []
        left = [batch for batch in sure if not batch.outcome.done]
        if len(unsure) + len(left) < len(window):
            self._window = deque(unsure)
            self._hold(left)
        else:
            for batch in sure:
                batch.maybe_written = False
            self._window = deque(window)
        self._held = deque(batch for batch in self._held if not batch.outcome.done)
        self._count()

    def _renumber(self) -> None:
        """A new epoch for what is held."""
        assert self._producer_id is not None  # noqa: S101  # connected before
        self._epoch += 1
        self._sequence = 0
        self._new_epoch = False
        self._gap_since_s = None
        self._window, self._held = self._held, deque()
        for batch in self._window:
            batch.stamp(self._compression, self._producer_id, self._sequence, self._epoch)
            self._sequence += len(batch)
        self._count()

    def _count(self) -> None:
        self._window_bytes = sum(batch.size_bytes for batch in self._window)
        self._buffer.in_flight = len(self._window) + len(self._held)

    # -- time ----------------------------------------------------------------------------

    def expire(self, now_s: float) -> None:
        """Report what has waited for too long."""
        for batch in self._accumulator.expired(self._buffer, now_s):
            self._resolve(batch, None, self._too_late(unsure=False))
        for batch in (*self._window, *self._held):
            if batch.deadline_s <= now_s and not batch.outcome.done:
                unsure = batch.maybe_written or batch.attempt in self._under_way
                batch.maybe_written = unsure
                self._resolve(batch, None, self._too_late(unsure=unsure))

    def doubt(self, now_s: float) -> None:
        """Look for another leader if this one has been silent for long."""
        if self._under_way and self._recovery is None and now_s - self._heard_s >= self._stall_s:
            self._recovery = self._loop.create_task(self._doubting())

    async def _doubting(self) -> None:
        """Only another leader is a reason to send again: a slow one has it all already."""
        channel, route = self._channel, self._route
        error = OutcomeUnknownError(f"the leader of {self.partition} has not answered")
        found: Any = None
        try:
            if route is not None:
                route.failed(error)
                found = await route.leader()
        except RayQueueError as failure:
            self._last_error = failure
        finally:
            self._recovery = None
        if found is channel and channel is not None and not channel.closed and self._error is None:
            self._heard_s = self._clock_s()
            self.pump()
            return
        self._abandon()
        self._recover()

    def _too_late(self, *, unsure: bool) -> RayQueueError:
        timeout_ms = self._around.settings.delivery_timeout_ms
        why = f"; last error: {self._last_error}" if self._last_error is not None else ""
        if unsure:
            return DeliveryTimeoutError(
                f"not acknowledged by {self.partition} within {timeout_ms} ms; it may be written{why}"
            )
        if self._rationed:
            return self._full
        if self._last_error is not None and not isinstance(self._last_error, OutcomeUnknownError):
            return self._last_error
        return DeliveryTimeoutError(f"not sent to {self.partition} within {timeout_ms} ms; it is not written{why}")

    # -- the end -------------------------------------------------------------------------

    def _fail_all(self, error: RayQueueError) -> None:
        batches = [*self._window, *self._held, *self._accumulator.drain(self._buffer)]
        if any(batch.maybe_written for batch in self._window):
            self._new_epoch = True
        self._window, self._held = deque(), deque()
        self._under_way.clear()
        self._new_epoch = self._new_epoch or self._sequence > 0
        self._channel = self._route = None
        self._count()
        for batch in batches:
            batch.settled = True
            self._resolve(batch, None, error)

    def close(self) -> None:
        """Send nothing any more. What is not acknowledged is reported as unknown, or as not written."""
        self._closed = True
        if self._recovery is not None:
            self._recovery.cancel()
        if self._linger is not None:
            self._linger.cancel()
        for batch in (*self._window, *self._held, *self._accumulator.drain(self._buffer)):
            unsure = batch.maybe_written or batch.attempt in self._under_way
            error: RayQueueError = (
                OutcomeUnknownError("the producer was closed before this was acknowledged; it may be written")
                if unsure
                else ClosedError("the producer was closed before this was sent; it is not written")
            )
            self._resolve(batch, None, error)
        self._window, self._held = deque(), deque()

    def _resolve(self, batch: Batch, base_offset: int | None, error: RayQueueError | None = None) -> None:
        if error is not None and not batch.outcome.done:
            _log.warning("%d records for %s: %s: %s", len(batch), self.partition, type(error).__name__, error)
        self._accumulator.resolve(batch, base_offset, error)


def _is_bounded(error: RayQueueError) -> bool:
    """The partition's backlog has reached its bound; not a queue that is full for a moment."""
    return isinstance(error, QueueFullError) and "bound" in error.details


def _error_of(future: asyncio.Future[Appended]) -> RayQueueError | None:
    if future.cancelled():
        return OutcomeUnknownError("the call was cancelled")
    error = future.exception()
    if error is None or isinstance(error, RayQueueError):
        return error
    return OutcomeUnknownError(f"{type(error).__name__}: {error}")


def _around(batches: Iterable[Batch], batch: Batch) -> tuple[list[Batch], list[Batch]]:
    every = list(batches)
    at = every.index(batch)
    return every[:at], every[at + 1 :]
