"""The service of a partition's replica: what its clients may ask, and how each of it is answered.

Appends and fetches have rooms of their own (``appends``, ``fetches``); here are
the calls, and what a partition does by itself: retention, expired positions,
figures. Questions about the present state are answered once a majority has
confirmed the leader, all those of one turn by one round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from rayqueue.config import Settings
from rayqueue.errors import InvalidInputError, RayQueueError, ReplicaClosedError, TopicKindError
from rayqueue.ids import Offset, ReplicaId
from rayqueue.partition import (
    Backlog,
    Committed,
    Deleted,
    Partition,
    Pinned,
    Trimmed,
    commit_command,
    forget_group_command,
    offset_for_time,
    pin_command,
)
from rayqueue.partition.commands import decode
from rayqueue.partition.jobs.facts import Counts
from rayqueue.protocol import calls
from rayqueue.protocol.calls import Bounds, Call
from rayqueue.protocol.frames import Frame, Kind
from rayqueue.protocol.jobs import JobCall
from rayqueue.protocol.seals import Seals
from rayqueue.protocol.topics import check_name
from rayqueue.protocol.transactions import PartitionTransactionCall
from rayqueue.replica.answers import Answer
from rayqueue.replica.appends import Appends
from rayqueue.replica.disk_reads import DiskReads
from rayqueue.replica.fetches import Fetches
from rayqueue.replica.jobs import Jobs
from rayqueue.replica.measures import PartitionMeasures
from rayqueue.replica.secret import secret_of
from rayqueue.replica.service import Service
from rayqueue.replica.settling import Settling
from rayqueue.replica.tail import Tail

if TYPE_CHECKING:
    from rayqueue.replica.core import ReplicaCore

_EXPIRE_EVERY_S = 30.0
"""How often a leader looks for positions that nobody uses any more."""


_OF_LOGS = (calls.GetPosition, calls.GetLag, calls.Commit, calls.Pin, calls.FindOffset, calls.Trim)


class PartitionService(Service):
    def __init__(self, replica: ReplicaCore[PartitionService], partition: Partition, settings: Settings) -> None:
        self.tail = Tail.opened(partition, settings.log.cache_bytes)
        partition.watch(self.tail)
        limits = settings.calls
        self.disk = DiskReads(replica.run, limits.disk_readers, limits.max_fetches)
        self.appends = Appends(replica, partition, settings, self._now_ms)
        self.fetches = Fetches(replica, partition, self.tail, self.disk, limits)
        self.jobs = Jobs(replica, partition, self.tail, self.disk, limits)
        self.partition = partition
        self._replica = replica
        self._clients = replica.clients
        self._settings = settings
        self._seals = Seals(secret_of(settings))
        self.settling = Settling(replica, partition, self.appends, self._seals, settings, self._now_ms)
        self._began = partition.next_offset, partition.total_bytes
        self._expire_at_s = 0.0

    # -- from any thread ------------------------------------------------------------------

    def command(self, payload: bytes, answer: Answer) -> None:
        """Propose a command of ``rayqueue.partition.commands``; the answer is what applying it answers.

        One that cannot be read raises here: in the log it would stop every replica that applies it.
        """
        if type(payload) is not bytes or not payload:
            raise InvalidInputError("a command is bytes, and at least one")
        decode(payload)
        self._replica.command(payload, answer)

    # -- Service: clients ------------------------------------------------------------------

    def serve(self, client: int, frame: Frame) -> None:
        kind = frame.kind
        if kind == Kind.FETCH:
            self._check_log()
            self.fetches.fetch(client, frame)
        elif kind in (Kind.APPEND, Kind.APPEND_LEADER):
            self.appends.append(client, frame)
        elif kind == Kind.APPEND_UNACKED:
            self.appends.append_unacked(client, frame)
        elif kind == Kind.CALL:
            self._call(client, frame.request, calls.decode_partition_call(frame.body))
        else:
            raise InvalidInputError(f"there is no request of kind {kind}", kind=kind)

    def _now_ms(self) -> int:
        return time.time_ns() // 1_000_000 if self.partition.jobs is None else self.jobs.time.now_ms()

    def _check_log(self) -> None:
        if self.partition.jobs is not None:
            raise TopicKindError("this topic is a work queue, not a log: it has jobs to do, not records to read")

    def needs(self, client: int) -> bool:
        return self.appends.needs(client) or self.jobs.needs(client)

    def client_gone(self, client: int) -> None:
        self.fetches.parked.take_client(client)
        self.appends.admission.line.client_gone(client)
        self.jobs.client_gone(client)

    # -- Service: events --------------------------------------------------------------------

    def won(self) -> None:
        self.appends.admission.reset()

    def lead(self, now_s: float) -> None:
        self.jobs.lead()

    def lost(self, now_s: float) -> None:
        self.appends.admission.reset()
        self.fetches.lost()
        self.appends.refuse_waiting(self._replica.not_leader())
        self.jobs.lost(self._replica.not_leader())

    @property
    def next_deadline_s(self) -> float:
        line_s = self.appends.admission.line.next_deadline_s
        return min(self.fetches.next_deadline_s, line_s, self.jobs.next_deadline_s)

    def gather(self) -> None:
        self.jobs.gather()

    def tick(self, now_s: float) -> None:
        self.fetches.tick(now_s)
        self.appends.admission.advance(now_s)
        self.jobs.tick(now_s)

    def tables_synced(self) -> None:
        self.tail.synced()

    def maintain(self, now_s: float) -> None:
        """Let go of what is too old, or of positions that nobody uses any more."""
        if not self._replica.engine.is_leader:
            return
        log, group_retention_ms = self._settings.log, self._settings.cluster.group_retention_ms
        self.jobs.maintain(log.segment_bytes, log.max_batch_bytes)
        now_ms = time.time_ns() // 1_000_000
        command = self.partition.retention_command(
            now_ms, retention_ms=log.retention_ms, retention_bytes=log.retention_bytes
        )
        if self.partition.jobs is None and command is None and group_retention_ms and now_s >= self._expire_at_s:
            self._expire_at_s = now_s + _EXPIRE_EVERY_S
            command = self.partition.expiry_command(now_ms, group_retention_ms)
        if command is not None:
            with suppress(RayQueueError):  # the next round tries again
                self._replica.tell_log(command)

    def close(self) -> None:
        closed = ReplicaClosedError("the replica is closing")
        self.fetches.close(closed)
        self.appends.close(closed)
        self.jobs.close(closed)
        self.disk.close()

    def bounds(self) -> tuple[Offset, Offset]:
        return self.partition.readable_from, self.partition.high_watermark

    def measure(self) -> PartitionMeasures:
        partition, fetches, leads = self.partition, self.fetches, self._replica.engine.is_leader
        backlog = partition.backlog() if leads else Backlog(0, 0)
        counts = partition.jobs.counts if leads and partition.jobs is not None else Counts()
        opened, oldest_ms = self.settling.open_for() if leads else (0, 0)
        return PartitionMeasures(
            appended_records=partition.next_offset - self._began[0],
            appended_bytes=partition.total_bytes - self._began[1],
            fetched_records=fetches.fetched_records,
            fetched_bytes=fetches.fetched_bytes,
            unacked_refused=self.appends.unacked_refused,
            backlog_records=backlog.records,
            backlog_bytes=backlog.size_bytes,
            lags=partition.lags() if leads else {},
            jobs_ready=counts.ready,
            jobs_leased=counts.leased,
            jobs_delayed=counts.delayed,
            jobs_dead=counts.dead,
            results_bytes=counts.result_bytes,
            results_evicted=0 if partition.jobs is None else partition.jobs.results.evicted,
            transactions_open=opened,
            oldest_transaction_ms=oldest_ms,
        )

    # -- calls --------------------------------------------------------------------------------

    def _call(self, client: int, request: int, call: Call) -> None:
        partition = self.partition
        if isinstance(call, JobCall):
            self.jobs.call(client, request, call)
            return
        if isinstance(call, PartitionTransactionCall):
            self.settling.call(call, partial(self._clients.answer, client, request))
            return
        if isinstance(call, _OF_LOGS):
            self._check_log()
        reply = partial(self._clients.answer, client, request)
        match call:
            case calls.GetStatus():
                reply(self._replica.client_status())
            case calls.GetPosition(group=group):
                self._once_confirmed(client, request, lambda: partition.position(group))
            case calls.GetGroups():
                self._once_confirmed(client, request, partition.positions)
            case calls.GetLag(group=group):
                self._once_confirmed(client, request, lambda: partition.lag(group))
            case calls.GetBounds():
                self._once_confirmed(client, request, self._bounds)
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
            case calls.TransferLeader(to=to):
                self._transfer(client, request, ReplicaId(to), reply)
            case calls.AwaitRoom():
                self.appends.await_room(client, call, reply)
            case _:
                raise InvalidInputError(f"a partition does not answer {type(call).__name__}")

    def _bounds(self) -> Bounds:
        partition = self.partition
        return Bounds(partition.readable_from, partition.high_watermark, partition.stable_offset)

    def _once_confirmed(self, client: int, request: int, read: Callable[[], Any]) -> None:
        def confirmed(error: Any) -> None:
            answer = partial(self._clients.answer, client, request)
            self._clients.serving(client, request, lambda: answer(read() if error is None else error))

        self._replica.confirm(confirmed)

    def _transfer(self, client: int, request: int, to: ReplicaId, reply: Callable[[Any], None]) -> None:
        """Whoever is named answers for itself: that another one leads no more does not say who does."""
        self._replica.check_leads()
        if to == self._replica.replica_id:
            self._once_confirmed(client, request, lambda: True)
        else:
            self._replica.hand_over(to, lambda error: reply(False if error is None else error))

    def _find_offset(self, timestamp_ms: int, reply: Callable[[Any], None]) -> None:
        """The first record that is not older."""

        def find() -> Offset:
            with self._replica.snapshot() as snapshot:
                return offset_for_time(snapshot, timestamp_ms)

        def confirmed(error: Any) -> None:
            if error is None:
                self._replica.once_settled(lambda: self.disk.read(find, reply))
            else:
                reply(error)

        self._replica.confirm(confirmed)

    def _command(self, payload: bytes, reply: Callable[[Any], None]) -> None:
        self._replica.check_leads()
        self.appends.keep_time()
        decode(payload)  # raises here rather than at every replica that applies it
        self._replica.propose(payload, lambda result: reply(_told(result)))


def _told(result: Any) -> Any:
    """The answer of applying a command, as a client is told."""
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
