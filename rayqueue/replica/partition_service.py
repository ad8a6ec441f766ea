"""What the clients of a partition's replica may ask, and how each of it is answered.

Lives on the engine's thread. Appends are admitted and proposed as they are
read; batches whose check takes long, in the order they came, once another
thread has checked them. Fetches at the end of the log are answered from memory; what is older is
read by a few threads beside; what is not there yet is waited for, and waiting
costs nothing until it comes. Questions about the present state are answered
once a majority has confirmed the leader, all those of one turn by one round.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from rayqueue.config import CallSettings
from rayqueue.errors import (
    InvalidInputError,
    OffsetOutOfRangeError,
    QueueFullError,
    RayQueueError,
    ReplicaClosedError,
    StorageError,
)
from rayqueue.partition import (
    Admission,
    Committed,
    Deleted,
    Fetched,
    Pinned,
    Trimmed,
    commit_command,
    forget_group_command,
    pin_command,
)
from rayqueue.partition.commands import check_offset, decode
from rayqueue.protocol import calls
from rayqueue.protocol.calls import Bounds, Call, ReplicaStatus, encode_answer
from rayqueue.protocol.data import (
    ANY_LANE,
    READ_FOLLOWER,
    Cursor,
    decode_fetch,
    encode_appended,
    encode_fetched,
)
from rayqueue.protocol.frames import Frame, Kind
from rayqueue.protocol.seals import Seals
from rayqueue.protocol.topics import check_name
from rayqueue.records import BatchHeader
from rayqueue.records.batch import is_costly
from rayqueue.replica.checks import Checks, Result
from rayqueue.replica.parking import Parking
from rayqueue.replica.tail import Tail
from rayqueue.replica.watched import WatchedPartition

if TYPE_CHECKING:
    from rayqueue.replica.partition import PartitionReplica

_log = logging.getLogger(__name__)

_TELL_UNACKED_S = 10.0
"""How often it is logged, at most, that unacknowledged batches are refused."""
_WOKEN_PER_TURN = 128
"""Waiting fetches that are answered in one turn, so that appends need not wait for thousands of them."""


class _Fetch:
    """One fetch that is under way. ``cursors`` move forward past what holds nothing for them."""

    __slots__ = ("client", "cursors", "deadline_s", "follower", "max_bytes", "request")

    def __init__(
        self, client: int, request: int, cursors: tuple[Cursor, ...], max_bytes: int, deadline_s: float, follower: bool
    ) -> None:
        self.client = client
        self.request = request
        self.cursors = cursors
        self.max_bytes = max_bytes
        self.deadline_s = deadline_s
        self.follower = follower

    @property
    def keys(self) -> list[int]:
        """The lanes it waits for."""
        return [lane for lane, _ in self.cursors]


class PartitionService:
    """Implements ``rayqueue.replica.service.Service``."""

    def __init__(
        self,
        replica: PartitionReplica,
        partition: WatchedPartition,
        admission: Admission,
        tail: Tail,
        settings: CallSettings,
        seals: Seals,
    ) -> None:
        self._replica = replica
        self._seals = seals
        self._partition = partition
        self._admission = admission
        self._tail = tail
        self._settings = settings
        self._parked: Parking[_Fetch] = Parking()
        self._woken: deque[_Fetch] = deque()
        self._answers: dict[tuple[tuple[Cursor, ...], int], tuple[list[bytes], list[Fetched]]] = {}
        self.fetched_records = 0
        self.fetched_bytes = 0
        self.unacked_refused = 0
        """Batches with ``acks="none"`` that were not written: the topic was full, for example."""
        self._tell_unacked_s = 0.0
        self._grown = partition.grown
        self._disk = ThreadPoolExecutor(settings.disk_readers, thread_name_prefix="client disk")
        self._on_disk = 0
        self._checks = Checks(self._check, replica.run, settings.check_queue_bytes)

    # -- Service ----------------------------------------------------------------------

    @property
    def next_deadline_s(self) -> float:
        if self._woken or self._grown:
            return 0.0
        return min(self._parked.next_deadline_s, self._admission.line.next_deadline_s)

    def serve(self, client: int, frame: Frame) -> None:
        kind = frame.kind
        if kind == Kind.FETCH:
            self._fetch(client, frame)
        elif kind in (Kind.APPEND, Kind.APPEND_LEADER):
            self._append(client, frame)
        elif kind == Kind.APPEND_UNACKED:
            try:
                self._append(client, frame)
            except RayQueueError as error:
                self._refused_unacked(error)
                raise
        elif kind == Kind.CALL:
            self._call(client, frame.request, calls.decode_partition_call(frame.body))
        else:
            raise InvalidInputError(f"there is no request of kind {kind}", kind=kind)

    def needs(self, client: int) -> bool:
        return client in self._checks

    def client_gone(self, client: int) -> None:
        self._parked.take_client(client)
        self._admission.line.client_gone(client)

    def lead(self, now_s: float) -> None:
        """Nothing to do: what is committed is in the log."""

    def unlead(self, now_s: float) -> None:
        for fetch in self._parked.take_all():
            if fetch.follower:
                self._parked.add(fetch)
            else:
                self._fail(fetch, self._replica.not_leader())
        for fetch in self._woken:
            fetch.follower = True  # what they wait for is committed, and there
        for answer in self._admission.line.clear():
            answer(self._replica.not_leader())

    def tick(self, now_s: float) -> None:
        if self._grown:
            self._woken.extend(self._parked.take([ANY_LANE, *self._grown]))
            self._grown.clear()
        for fetch in self._parked.take_expired(now_s):
            self._answer(fetch, [])
        for _ in range(min(len(self._woken), _WOKEN_PER_TURN)):
            self._go_on(self._woken.popleft())
        self._answers.clear()
        self._admission.advance(now_s)

    def close(self) -> None:
        closed = ReplicaClosedError("the replica is closing")
        for fetch in [*self._parked.take_all(), *self._woken]:
            self._fail(fetch, closed)
        for answer in self._admission.line.clear():
            answer(closed)
        self._disk.shutdown(wait=False, cancel_futures=True)
        self._checks.close()

    # -- appending ----------------------------------------------------------------------

    def _append(self, client: int, frame: Frame) -> None:
        self._replica.check_leads()
        kind, request, batch = frame.kind, frame.request, bytes(frame.body)
        if client not in self._checks and not is_costly(batch):
            self._propose(client, kind, request, batch, self._check(batch))
            return

        def propose(result: Result) -> None:
            try:
                if isinstance(result, Exception):
                    raise result
                self._propose(client, kind, request, batch, result)
            except RayQueueError as error:
                if kind == Kind.APPEND_UNACKED:
                    self._refused_unacked(error)
                raise

        waits = None if kind == Kind.APPEND_UNACKED else request
        self._checks.add(client, batch, lambda result: self._replica.serving(client, waits, partial(propose, result)))

    def _check(self, batch: bytes) -> BatchHeader:
        return self._admission.check(batch, now_ms=time.time_ns() // 1_000_000)

    def _propose(self, client: int, kind: int, request: int, batch: bytes, header: BatchHeader) -> None:
        replica = self._replica
        replica.check_leads()
        replica.keep_time()  # before: admission counts the batch at the index that it gets
        known = self._admission.admit_checked(header)
        if kind == Kind.APPEND_UNACKED:
            if known is None:
                replica.propose(batch, self._written_unacked)
            return
        if known is not None:
            self._appended(client, request, known)
            return
        pending = replica.propose(batch, partial(self._appended, client, request))
        if kind == Kind.APPEND_LEADER:
            replica.once_synced(pending, (None, header.count, False))

    def _written_unacked(self, result: Any) -> None:
        if isinstance(result, RayQueueError):
            self._refused_unacked(result)

    def _refused_unacked(self, error: RayQueueError) -> None:
        """Whoever sent it does not wait for an answer: it is counted and, from time to time, logged."""
        self.unacked_refused += 1
        now_s = time.monotonic()
        if now_s >= self._tell_unacked_s:
            self._tell_unacked_s = now_s + _TELL_UNACKED_S
            _log.warning(
                "%d batches that were sent with acks='none' have been refused so far, and nobody is told; this one: %s",
                self.unacked_refused,
                error,
            )

    def _appended(self, client: int, request: int, result: Any) -> None:
        if isinstance(result, RayQueueError):
            self._replica.fail(client, request, result)
        else:
            self._replica.send(client, Kind.APPENDED, request, (encode_appended(*result),))

    def _await_room(self, client: int, call: calls.AwaitRoom, reply: Callable[[Any], None]) -> None:
        self._replica.check_leads()
        admission, settings = self._admission, self._settings
        if len(admission.line) >= settings.max_fetches:
            raise QueueFullError(f"{len(admission.line)} producers wait here for room already, which is the limit")
        wait_s = min(call.wait_ms, settings.max_fetch_wait_ms) / 1000
        admission.await_room(call, client, time.monotonic() + wait_s, reply)

    # -- fetching -------------------------------------------------------------------------

    def _fetch(self, client: int, frame: Frame) -> None:
        wanted = decode_fetch(frame.body)
        lanes = self._partition.settings.lanes
        cursors = wanted.cursors
        for lane, offset in cursors:
            check_offset(offset)
            if lane >= lanes and lane != ANY_LANE:
                raise InvalidInputError(f"there is no lane {lane}; the partition has {lanes}", lane=lane)
        if lanes == 1:
            cursors = (Cursor(ANY_LANE, cursors[0].offset),)  # the same, and found sooner
        follower = bool(wanted.flags & READ_FOLLOWER)
        if not follower:
            self._replica.check_leads()
        settings = self._settings
        wait_s = min(wanted.max_wait_ms, settings.max_fetch_wait_ms) / 1000
        deadline_s = time.monotonic() + wait_s if wait_s else 0.0
        max_bytes = min(wanted.max_bytes, settings.max_fetch_bytes)
        self._continue(_Fetch(client, frame.request, cursors, max_bytes, deadline_s, follower))

    def _go_on(self, fetch: _Fetch) -> None:
        """``_continue``, when its client is not being served already."""
        self._replica.serving(fetch.client, fetch.request, partial(self._continue, fetch))

    def _continue(self, fetch: _Fetch) -> None:
        """Answer the fetch, or see to it that it is answered later."""
        end = self._tail.end
        if any(offset > end for _, offset in fetch.cursors):
            self._past_end(fetch)
            return
        if self._replica.is_full(fetch.client):
            self._fail(fetch, _not_taken())
            return
        key = (fetch.cursors, fetch.max_bytes)
        known = self._answers.get(key)
        if known is not None:
            self._send(fetch, *known)
            return
        found = self._tail.read_lanes(fetch.cursors, fetch.max_bytes)
        if found is None:
            self._read_disk(fetch)
        elif found:
            self._answers[key] = self._answer(fetch, found), found
        else:
            self._wait(fetch)

    def _wait(self, fetch: _Fetch) -> None:
        if fetch.deadline_s <= time.monotonic():
            self._answer(fetch, [])
        elif len(self._parked) >= self._settings.max_fetches:
            self._fail(fetch, QueueFullError(f"{len(self._parked)} fetches wait here already, which is the limit"))
        else:
            self._parked.add(fetch)

    def _answer(self, fetch: _Fetch, found: list[Fetched]) -> list[bytes]:
        buffers = encode_fetched(self._tail.end, self._partition.readable_from, found)
        self._send(fetch, buffers, found)
        return buffers

    def _send(self, fetch: _Fetch, buffers: list[bytes], found: list[Fetched]) -> None:
        self._replica.send(fetch.client, Kind.FETCHED, fetch.request, buffers)
        for _, count, payload in found:
            self.fetched_records += count
            self.fetched_bytes += len(payload)

    def _fail(self, fetch: _Fetch, error: RayQueueError) -> None:
        self._replica.fail(fetch.client, fetch.request, error)

    def _past_end(self, fetch: _Fetch) -> None:
        """A cursor is past the end that this replica knows.

        A leader that was just elected may not know yet how much of its log is committed, and a follower never does.
        To say "out of range" then would send a reader back to records that it has read.
        """
        if not self._replica.is_leader:
            self._wait(fetch)
            return

        def confirmed(error: Any) -> None:
            end = self._tail.end
            if isinstance(error, RayQueueError):
                self._fail(fetch, error)
            elif all(offset <= end for _, offset in fetch.cursors):
                self._go_on(fetch)
            else:
                lane, offset = max(fetch.cursors, key=lambda cursor: cursor.offset)
                start = self._partition.readable_from
                text = f"offset {offset} is past the end; the log has {start} to {end}"
                self._fail(fetch, OffsetOutOfRangeError(text, offset=offset, lane=lane, start=start, end=end))

        try:
            self._replica.confirm(confirmed)
        except RayQueueError as error:
            self._fail(fetch, error)

    # -- the disk -----------------------------------------------------------------------------

    def _read_disk(self, fetch: _Fetch) -> None:
        tail_start = self._tail.start

        def done(result: Any) -> None:
            if isinstance(result, RayQueueError):
                self._fail(fetch, result)
            elif result and self._replica.is_full(fetch.client):
                self._fail(fetch, _not_taken())
            elif result:
                self._answer(fetch, result)
            else:
                # All that is older than the tail was in the snapshot, and nothing of it is in these lanes.
                fetch.cursors = tuple(Cursor(lane, max(offset, tail_start)) for lane, offset in fetch.cursors)
                self._go_on(fetch)

        self._beside(lambda: self._replica.read_cursors(fetch.cursors, fetch.max_bytes), done)

    def _beside(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Do what takes disk time in another thread; ``done`` gets the result, or the error, on this one."""
        if self._on_disk >= self._settings.max_fetches:
            done(QueueFullError(f"{self._on_disk} reads wait for the disk already, which is the limit"))
            return
        self._on_disk += 1

        def finish(result: Any) -> None:
            self._on_disk -= 1
            done(result)

        def run() -> None:
            result: Any
            try:
                result = work()
            except RayQueueError as error:
                result = error
            except Exception as error:  # noqa: BLE001  # whoever waits must learn it
                _log.exception("a read failed")
                result = StorageError(f"the disk could not be read: {error}")
            with suppress(ReplicaClosedError):  # with the replica all connections end
                self._replica.run(lambda: finish(result))

        self._disk.submit(run)

    # -- calls --------------------------------------------------------------------------------

    def _call(self, client: int, request: int, call: Call) -> None:
        partition = self._partition
        reply = partial(self._reply, client, request)
        match call:
            case calls.GetStatus():
                reply(self._status())
            case calls.GetPosition(group=group):
                self._once_confirmed(client, request, lambda: partition.position(group))
            case calls.GetGroups():
                self._once_confirmed(client, request, partition.positions)
            case calls.GetLag(group=group):
                self._once_confirmed(client, request, lambda: partition.lag(group))
            case calls.GetBounds():
                self._once_confirmed(client, request, lambda: Bounds(partition.readable_from, partition.high_watermark))
            case calls.FindOffset(timestamp_ms=timestamp_ms):
                self._find_offset(timestamp_ms, reply)
            case calls.Commit(group=group, generation=generation, offsets=offsets, metadata=metadata, rewind=rewind):
                check_name("group", group)
                self._replica.check_leads()
                self._seals.check_grant(call.seal, group, self._replica.group_id, generation)
                self._command(commit_command(group, generation, offsets, metadata=metadata, rewind=rewind), reply)
            case calls.Pin(group=group, pinned=pinned):
                if pinned:  # a group that has another name from earlier can still be let go of
                    check_name("group", group)
                self._command(pin_command(group, pinned), reply)
            case calls.ForgetGroup(group=group, generation=generation, seen=position):
                self._replica.check_leads()
                self._seals.check_floor(call.seal, generation)
                seen = None if position is None else (position.generation, position.offsets)
                self._command(forget_group_command(group, generation, seen), reply)
            case calls.Trim(before=before):
                self._replica.check_leads()
                self._command(partition.guarded_trim(before), reply)
            case calls.AwaitRoom():
                self._await_room(client, call, reply)
            case _:
                raise InvalidInputError(f"a partition does not answer {type(call).__name__}")

    def _reply(self, client: int, request: int, answer: Any) -> None:
        if isinstance(answer, RayQueueError):
            self._replica.fail(client, request, answer)
        else:
            self._replica.send(client, Kind.ANSWER, request, (encode_answer(answer),))

    def _status(self) -> ReplicaStatus:
        """Who leads, as it is now; the size as of the last second."""
        replica, partition = self._replica, self._partition
        return ReplicaStatus(
            replica.node_id,
            replica.role,
            replica.leader,
            replica.term,
            partition.readable_from,
            partition.high_watermark,
            replica.status.size_bytes,
        )

    def _once_confirmed(self, client: int, request: int, read: Callable[[], Any]) -> None:
        def confirmed(error: Any) -> None:
            self._replica.serving(
                client, request, lambda: self._reply(client, request, read() if error is None else error)
            )

        self._replica.confirm(confirmed)

    def _find_offset(self, timestamp_ms: int, reply: Callable[[Any], None]) -> None:
        def confirmed(error: Any) -> None:
            if error is None:
                find = partial(self._replica.find_offset, timestamp_ms)
                self._replica.once_settled(lambda: self._beside(find, reply))
            else:
                reply(error)

        self._replica.confirm(confirmed)

    def _command(self, payload: bytes, reply: Callable[[Any], None]) -> None:
        self._replica.check_leads()
        self._replica.keep_time()
        decode(payload)  # raises here rather than at every replica that applies it
        self._replica.propose(payload, lambda result: reply(_told(result)))


def _told(result: Any) -> Any:
    """What applying a command answered, as a client is told."""
    match result:
        case Committed():
            return result.position()
        case Deleted():
            return result.existed
        case Trimmed():
            return result.start_offset
        case Pinned():
            return None
        case _:
            return result  # an error


def _not_taken() -> QueueFullError:
    return QueueFullError("this client does not take what it was answered; fetch less at a time")
