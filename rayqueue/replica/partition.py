"""A running replica of a partition: appending, reading, retention.

Reads do not need the engine's thread: the tail is in memory, everything older
comes from a snapshot of the store.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rayqueue.config import CallSettings, LogSettings, RaftSettings
from rayqueue.errors import (
    DamagedLogError,
    InvalidInputError,
    OffsetOutOfRangeError,
    RayQueueError,
    ReplicaClosedError,
)
from rayqueue.ids import Offset
from rayqueue.log.store import LogStore, Snapshot
from rayqueue.partition import (
    Admission,
    AdmissionLimits,
    Backlog,
    Fetched,
    PartitionSettings,
    offset_for_time,
    read,
    read_lanes,
)
from rayqueue.partition.commands import check_offset, decode
from rayqueue.partition.line import Line
from rayqueue.protocol.data import Cursor
from rayqueue.protocol.seals import Seals
from rayqueue.raft.clients import ClientTransport
from rayqueue.records import BatchHeader
from rayqueue.replica.measures import PartitionMeasures
from rayqueue.replica.partition_service import PartitionService
from rayqueue.replica.replica import Answer, Deliver, Pending, Replica, not_leader
from rayqueue.replica.status import Status
from rayqueue.replica.tail import Tail
from rayqueue.replica.watched import WatchedPartition

_EXPIRE_EVERY_S = 30.0
"""How often a leader looks for positions that nobody uses any more."""


class PartitionReplica(Replica):
    """Methods may be called from any thread and return at once, except ``read_disk``."""

    def __init__(
        self,
        store: LogStore,
        transport: ClientTransport,
        *,
        seals: Seals,
        raft: RaftSettings | None = None,
        log: LogSettings | None = None,
        calls: CallSettings | None = None,
        partition: PartitionSettings | None = None,
        append_timeout_ms: int = 10_000,
        group_retention_ms: int | None = None,
        deliver: Deliver | None = None,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        log = log or LogSettings()
        self._partition = WatchedPartition(store, partition or PartitionSettings())
        self._tail = Tail(self._partition.next_offset, log.cache_bytes, self._partition.lane_ends())
        self._partition.tail = self._tail
        self._partition.grown = set()
        self._began = self._partition.next_offset, self._partition.total_bytes
        limits = AdmissionLimits(
            max_batch_bytes=log.max_batch_bytes,
            max_message_bytes=log.max_message_bytes,
            max_batch_records=log.max_batch_records,
        )
        line = Line((calls or CallSettings()).room_hold_ms / 1000)
        self._admission = Admission(
            self._partition,
            limits,
            next_index=lambda: self._engine.next_index,
            applied=lambda: self._engine.applied,
            line=line,
            disks_full=lambda: self._engine.refuses_records,
        )
        self._appends: deque[tuple[bytes, BatchHeader, Pending]] = deque()
        self._readers: list[Answer] = []
        self._readers_lock = threading.Lock()
        self._woken_end = -1
        self._group_retention_ms = group_retention_ms
        self._expire_at_s = 0.0
        super().__init__(
            store,
            transport,
            self._partition,
            service=lambda replica: self._make_service(replica, calls or CallSettings(), seals),
            raft=raft,
            log=log,
            calls=calls,
            append_timeout_ms=append_timeout_ms,
            deliver=deliver,
            on_fatal=on_fatal,
        )

    def _make_service(self, replica: PartitionReplica, calls: CallSettings, seals: Seals) -> PartitionService:
        self._partition_service = PartitionService(replica, self._partition, self._admission, self._tail, calls, seals)
        return self._partition_service

    # -- writing ---------------------------------------------------------------------

    def append(self, batch: bytes, answer: Answer) -> None:
        """Append an encoded batch; the answer is ``Appended`` once a majority has it on disk.

        A batch that cannot be accepted raises here, before anything is written.
        """
        header = self._admission.check(batch, now_ms=time.time_ns() // 1_000_000)
        self._check_open()
        status = self.status
        if not status.role == "leader":
            raise not_leader(status.node_id, status.leader)
        pending = Pending(answer, time.monotonic() + self._append_timeout_s)
        self._appends.append((batch, header, pending))
        self._queued()

    def command(self, payload: bytes, answer: Answer) -> None:
        """Propose a command of ``rayqueue.partition.commands``.

        One that cannot be read raises here: in the log it would stop every replica that applies it.
        """
        if type(payload) is not bytes or not payload:
            raise InvalidInputError("a command is bytes, and at least one")
        decode(payload)
        super().command(payload, answer)

    # -- reading ------------------------------------------------------------------------

    @property
    def high_watermark(self) -> Offset:
        return self._tail.end

    def read_tail(self, offset: int, max_bytes: int, lane: int | None = None) -> list[Fetched] | None:
        """Batches from memory, without waiting for anything; None if they must be read from disk."""
        check_offset(offset)
        self._check_open()
        if offset > self._tail.end:
            start, end = self._partition.readable_from, self._tail.end
            raise OffsetOutOfRangeError(
                f"offset {offset} is past the end; the log has {start} to {end}", offset=offset, start=start, end=end
            )
        return self._tail.read(offset, max_bytes, lane)

    def read_disk(self, offset: int, max_bytes: int, lane: int | None = None) -> list[Fetched]:
        """Batches from a snapshot of the store. Takes disk time: not for an event loop."""
        with self._disk() as snapshot:
            return read(snapshot, offset, max_bytes, lane=lane, high_watermark=self._tail.end)

    def when_longer(self, offset: int, answer: Answer) -> None:
        """Answers None once there is something at ``offset``, at once if there is."""
        with self._readers_lock:
            if self._tail.end <= offset and not self._closing:
                self._readers.append(answer)
                return
        self._deliver([(answer, None)])

    def forget_reader(self, answer: Answer) -> None:
        """The reader gave up; it is not answered any more."""
        with self._readers_lock:
            if answer in self._readers:
                self._readers.remove(answer)

    @contextmanager
    def _disk(self) -> Iterator[Snapshot]:
        """What is on disk, from any thread. If damage is met, the engine's thread is told before the caller is."""
        try:
            with self._store.snapshot() as snapshot:
                yield snapshot
        except DamagedLogError as error:
            why = str(error)
            with suppress(ReplicaClosedError):
                self.run(lambda: self._damaged(why))
            raise

    def read_cursors(self, cursors: Sequence[Cursor], max_bytes: int) -> list[Fetched]:
        """Batches from a snapshot of the store, lane by lane. Takes disk time."""
        with self._disk() as snapshot:
            return read_lanes(snapshot, cursors, max_bytes, high_watermark=self._tail.end)

    def find_offset(self, timestamp_ms: int) -> Offset:
        """The first record that is not older. Takes disk time."""
        with self._disk() as snapshot:
            return offset_for_time(snapshot, timestamp_ms)

    # -- on the engine's thread -----------------------------------------------------------

    def _leadership_changed(self) -> None:
        self._admission.reset()

    def keep_time(self) -> None:
        """Tell the log the time, if what is proposed next would be stamped with an old one. On the engine's thread."""
        now_ms = time.time_ns() // 1_000_000
        tick = self._admission.tick(now_ms)
        if tick is not None:
            self._engine.propose(tick, None)
            self._admission.ticked(now_ms)

    def _has_queued(self) -> bool:
        return bool(self._appends)

    def _take_queued(self) -> bool:
        appends, engine = self._appends, self._engine
        if not appends:
            return False
        while appends:
            batch, header, pending = appends.popleft()
            try:
                if engine.is_leader:
                    self.keep_time()  # before: admission counts the batch at the index that it gets
                known = self._admission.admit_checked(header) if engine.is_leader else None
                if known is None:
                    engine.propose(batch, pending)
                    self._waiting.append(pending)
                else:
                    self._answer(pending, known)
            except RayQueueError as error:
                self._answer(pending, error)
        return True

    def _refused_queued(self) -> list[Answer]:
        refused: list[Answer] = []
        with suppress(IndexError):
            while True:
                refused.append(self._appends.popleft()[2].answer)
        return refused

    def _on_synced(self) -> None:
        self._tail.synced()

    def _on_published(self) -> None:
        if not self._readers:
            return
        with self._readers_lock:
            if self._woken_end == self._tail.end:
                return
            self._woken_end = self._tail.end
            readers, self._readers = self._readers, []
        self._deliver([(reader, None) for reader in readers])

    def _on_maintenance(self) -> None:
        if not self._engine.is_leader:
            return
        settings = self._log_settings
        trim = self._partition.retention_command(
            time.time_ns() // 1_000_000, retention_ms=settings.retention_ms, retention_bytes=settings.retention_bytes
        )
        now_s = time.monotonic()
        if trim is None and self._group_retention_ms and now_s >= self._expire_at_s:
            self._expire_at_s = now_s + _EXPIRE_EVERY_S
            trim = self._partition.expiry_command(time.time_ns() // 1_000_000, self._group_retention_ms)
        if trim is not None:
            # Straight to the engine: close() may have begun, and that is no reason to fail. If it is refused,
            # the next round tries again.
            with suppress(RayQueueError):
                self._engine.propose(trim, None)

    def _end(self) -> None:
        with self._readers_lock:
            readers, self._readers = self._readers, []
        self._answers.extend((reader, self._closed_error()) for reader in readers)
        super()._end()

    def _measure(self, status: Status, elected: int, longest_sync_s: float) -> PartitionMeasures:
        partition, service = self._partition, self._partition_service
        leads = status.role == "leader"
        backlog = partition.backlog() if leads else Backlog(0, 0)
        return PartitionMeasures(
            status,
            elected,
            longest_sync_s,
            appended_records=partition.next_offset - self._began[0],
            appended_bytes=partition.total_bytes - self._began[1],
            fetched_records=service.fetched_records,
            fetched_bytes=service.fetched_bytes,
            unacked_refused=service.unacked_refused,
            backlog_records=backlog.records,
            backlog_bytes=backlog.size_bytes,
            lags=partition.lags() if leads else {},
        )

    def _readable(self) -> tuple[Offset, Offset]:
        return self._partition.readable_from, self._partition.high_watermark
