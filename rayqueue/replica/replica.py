"""One replica of one partition, running: the engine's thread and the calls into it.

Owns the thread that drives the Raft engine, the store and the transport, and
the hand-over between it and everybody else. Knows nothing of Ray; the actor is
a thin shell around it, and so is a plain process.

One thread writes. Calls from other threads are queued, the thread is woken,
and takes all that is queued at once: one append to the log and one sync for
all of them. Answers go out by ``deliver``, a whole step's at a time. Reads do
not pass through the thread at all: the tail is in memory, everything older
comes from a snapshot of the store.

Any exception in the thread is the end of it: ``on_fatal`` is called, which
ends the process. Whoever waits learns it from the broken connection, and what
was acknowledged is on disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from rayqueue.config import LogSettings, RaftSettings
from rayqueue.errors import (
    AppendTimeoutError,
    DamagedLogError,
    DiskFullError,
    InvalidInputError,
    NotLeaderError,
    OffsetOutOfRangeError,
    RayQueueError,
    ReplicaClosedError,
)
from rayqueue.ids import Index, NodeId, Offset
from rayqueue.log.store import LogStore
from rayqueue.partition import (
    Admission,
    AdmissionLimits,
    Appended,
    Fetched,
    Partition,
    PartitionSettings,
    read,
    retention_point,
    trim_command,
)
from rayqueue.partition.commands import check_offset, decode
from rayqueue.raft.engine import Done, RaftEngine
from rayqueue.raft.members import Members
from rayqueue.raft.transport import Transport
from rayqueue.records import BATCH_TAG, BatchHeader
from rayqueue.replica.status import Status
from rayqueue.replica.tail import Tail

_log = logging.getLogger(__name__)

Answer = Callable[[Any], None]
"""Takes a result, or a ``RayQueueError`` that says why there is none. Called once."""

Deliver = Callable[[list[tuple[Answer, Any]]], None]

_IDLE_SYNC_S = 0.02
_MAINTAIN_EVERY_S = 1.0
_POLL_MAX_S = 0.5


@dataclass(slots=True)
class _Pending:
    """A call that waits for its outcome."""

    answer: Answer
    deadline_s: float
    answered: bool = False


class _Watched(Partition):
    """The partition, telling the tail about each batch it accepts."""

    tail: Tail

    def apply(self, index: Index, payload: bytes) -> Any:
        answer = super().apply(index, payload)
        if payload[0] == BATCH_TAG and type(answer) is Appended and not answer.duplicate:
            lane = BatchHeader.parse(payload).lane if self.settings.lanes > 1 else 0
            self.tail.append(answer.base_offset, answer.count, payload, lane)
        return answer

    def restore(self, state: bytes) -> None:
        super().restore(state)
        self.tail.reset(self.next_offset)


class Replica:
    """A running replica. Every method but ``close`` may be called from any thread and returns at once."""

    def __init__(
        self,
        store: LogStore,
        transport: Transport,
        *,
        raft: RaftSettings | None = None,
        log: LogSettings | None = None,
        partition: PartitionSettings | None = None,
        append_timeout_ms: int = 10_000,
        deliver: Deliver | None = None,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._store = store
        self._transport = transport
        self._log_settings = log or LogSettings()
        self._append_timeout_s = append_timeout_ms / 1000
        self._deliver = deliver or _call_each
        self._on_fatal = on_fatal

        self._partition = _Watched(store, partition or PartitionSettings())
        self._tail = Tail(self._partition.next_offset, self._log_settings.cache_bytes)
        self._partition.tail = self._tail
        limits = AdmissionLimits(max_batch_bytes=self._log_settings.max_batch_bytes)
        self._admission = Admission(self._partition, limits)
        rng = Random()  # noqa: S311  # election jitter
        self._engine = RaftEngine(store, self._partition, raft or RaftSettings(), rng, time.monotonic())

        self._calls: deque[tuple[Callable[[], None], Answer | None]] = deque()
        self._appends: deque[tuple[bytes, BatchHeader, _Pending]] = deque()
        self._waiting: deque[_Pending] = deque()
        self._answers: list[tuple[Answer, Any]] = []
        self._inspections: list[Answer] = []
        self._readers: list[Answer] = []
        self._readers_lock = threading.Lock()
        self._woken = False
        self._led = False
        self._closing = False
        self._ended = False
        self._read_only = False
        self._maintain_at_s = 0.0
        self._syncs = 0
        self._sync_s = 0.0
        self._published: tuple[object, ...] = ()
        self.status = self._status()
        self._thread = threading.Thread(target=self._main, name=f"raft {store.group_id} {store.node_id}", daemon=True)
        self._thread.start()

    # -- writing ---------------------------------------------------------------------

    def append(self, batch: bytes, answer: Answer) -> None:
        """Append an encoded batch; the answer is ``Appended`` once a majority has it on disk.

        A batch that cannot be accepted raises here, before anything is written.
        """
        header = self._admission.check(batch, now_ms=time.time_ns() // 1_000_000)
        self._check_open()
        if not self.status.role == "leader":
            raise self._not_leader()
        pending = _Pending(answer, time.monotonic() + self._append_timeout_s)
        self._appends.append((batch, header, pending))
        self._queued()

    def command(self, payload: bytes, answer: Answer) -> None:
        """Propose a command of ``rayqueue.partition.commands``.

        One that cannot be read raises here: in the log it would stop every replica that applies it.
        """
        if type(payload) is not bytes or not payload:
            raise InvalidInputError("a command is bytes, and at least one")
        decode(payload)
        self._ask(lambda pending: self._engine.propose(payload, pending), answer)

    def confirm_leadership(self, answer: Answer) -> None:
        """Answers None if this replica still leads, proven by a majority after the call; or the error."""
        self._ask(self._engine.confirm_leadership, answer)

    def change_members(self, change: Callable[[Members], Members], answer: Answer) -> None:
        self._ask(lambda pending: self._engine.change_members(change(self._engine.members), pending), answer)

    def transfer_leadership(self, target: NodeId, answer: Answer) -> None:
        self._ask(lambda pending: self._engine.transfer_leadership(target, time.monotonic(), pending), answer)

    def set_peers(self, addresses: Mapping[NodeId, tuple[str, int]]) -> None:
        """Where the others listen. Who belongs to the group is said in its log, not here."""
        peers = {peer: address for peer, address in addresses.items() if peer != self._store.node_id}
        self._submit(lambda: self._transport.set_peers(peers))

    def inspect(self, answer: Answer) -> None:
        """Answers with the status as it is now; the attribute ``status`` may be a second old.

        What the answer says is true for the next call: who it says leads accepts appends.
        """
        self._submit(lambda: self._inspections.append(answer), answer)

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
        with self._store.snapshot() as snapshot:
            try:
                return read(snapshot, offset, max_bytes, lane=lane, high_watermark=self._tail.end)
            except DamagedLogError as error:
                self._submit(lambda why=str(error): self._store.mark_damaged(why))  # type: ignore[misc]
                raise

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

    # -- ending --------------------------------------------------------------------------

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop. Calls that wait are answered with ``ReplicaClosedError`` or, if written, as unknown."""
        if self._thread is not threading.current_thread():
            self._closing = True
            self._transport.wake()
            self._thread.join(timeout_s)

    # -- the thread --------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._closing:
                self._turn()
            self._end()
        except BaseException as error:  # noqa: BLE001  # whatever it is, this replica must not go on
            _log.critical("%s stops: %s", self._name(), error, exc_info=True)
            self._closing = True
            self._on_fatal(error)

    def _turn(self) -> None:
        engine, transport, store = self._engine, self._transport, self._store
        events = transport.poll(self._patience_s())
        self._woken = False
        now = time.monotonic()
        for event in events:
            engine.receive(now, event)
        had_calls = bool(self._appends or self._calls)
        self._take_calls()
        ready = engine.step(now)
        for peer, message in ready.early:
            transport.send(peer, message)
        self._finish(ready.done)
        sync_now = store.must_sync or self._read_only or (store.dirty and not events and not had_calls)
        if sync_now and not self._sync():
            self._publish()
            return  # what ready.late promises is not on disk
        for peer, message in ready.late:
            transport.send(peer, message)
        self._publish()
        if now >= self._maintain_at_s:
            self._maintain(now)

    def _patience_s(self) -> float:
        """How long the thread may sleep if nothing happens."""
        if self._engine.busy or self._appends or self._calls:
            return 0.0
        patience = min(_POLL_MAX_S, self._engine.next_deadline - time.monotonic())
        if self._store.dirty or self._read_only:
            patience = min(patience, _IDLE_SYNC_S)
        return max(0.0, patience)

    def _take_calls(self) -> None:
        calls, appends, engine = self._calls, self._appends, self._engine
        while calls:
            calls.popleft()[0]()
        if engine.is_leader != self._led:
            self._led = engine.is_leader
            self._admission.reset()
        while appends:
            batch, header, pending = appends.popleft()
            try:
                known = self._admission.admit_checked(header) if engine.is_leader else None
                if known is None:
                    engine.propose(batch, pending)
                    self._waiting.append(pending)
                else:
                    self._answer(pending, known)
            except RayQueueError as error:
                self._answer(pending, error)

    def _finish(self, done: list[Done]) -> None:
        for item in done:
            self._answer(item.context, item.result)
        now = time.monotonic()
        while self._waiting and (self._waiting[0].answered or self._waiting[0].deadline_s < now):
            pending = self._waiting.popleft()
            if not pending.answered:
                seconds = self._append_timeout_s
                self._answer(
                    pending, AppendTimeoutError(f"no majority confirmed it within {seconds} s; outcome unknown")
                )
        self._flush_answers()

    def _answer(self, pending: _Pending, result: Any) -> None:
        if not pending.answered:
            pending.answered = True
            self._answers.append((pending.answer, result))

    def _flush_answers(self) -> None:
        if self._answers:
            answers, self._answers = self._answers, []
            self._deliver(answers)

    def _sync(self) -> bool:
        started = time.perf_counter()
        try:
            self._store.sync()
        except DiskFullError as error:
            if not self._read_only:
                _log.error("%s is read-only: %s", self._name(), error)
            self._read_only = True
            self._engine.disk_full()
            return False
        if self._read_only:
            _log.warning("%s writes again", self._name())
        self._read_only = False
        self._engine.synced()
        self._tail.synced()
        self._syncs += 1
        self._sync_s += time.perf_counter() - started
        return True

    def _publish(self) -> None:
        """Let the other threads see where things stand."""
        engine, store = self._engine, self._store
        current = (engine.term, engine.leader, engine.is_leader, engine.members, self._read_only, store.damaged)
        if current != self._published:
            self._published = current
            status = self.status = self._status()
            _log.info("%s: %s of term %d, leader %s", self._name(), status.role, status.term, status.leader)
        if self._inspections:
            self.status = self._status()
            inspections, self._inspections = self._inspections, []
            self._deliver([(answer, self.status) for answer in inspections])
        if self._readers:
            self._wake_readers()

    def _wake_readers(self) -> None:
        with self._readers_lock:
            if self._woken_end == self._tail.end:
                return
            self._woken_end = self._tail.end
            readers, self._readers = self._readers, []
        self._deliver([(reader, None) for reader in readers])

    _woken_end = -1

    def _maintain(self, now: float) -> None:
        """Retention, checkpoints, trimming: not urgent, a bounded piece at a time."""
        settings = self._log_settings
        more = self._engine.maintain(settings.segment_bytes, settings.trim_entries_per_tick)
        self._maintain_at_s = now if more else now + _MAINTAIN_EVERY_S
        self.status = self._status()
        if self._engine.is_leader and (settings.retention_ms is not None or settings.retention_bytes is not None):
            with self._store.snapshot() as snapshot:
                now_ms = time.time_ns() // 1_000_000
                point = retention_point(snapshot, now_ms, settings.retention_ms, settings.retention_bytes)
            if point > self._partition.start_offset:
                # Straight to the engine: close() may have begun, and that is no reason to fail. If it is refused,
                # the next round tries again.
                with suppress(RayQueueError):
                    self._engine.propose(trim_command(point), None)

    def _end(self) -> None:
        self._ended = True
        self._refuse_queued()
        unknown = AppendTimeoutError(f"{self._name()} was closed before a majority answered; outcome unknown")
        for pending in self._waiting:
            self._answer(pending, unknown)
        with self._readers_lock:
            readers, self._readers = self._readers, []
        self._answers.extend((reader, self._closed_error()) for reader in readers)
        self._flush_answers()
        if self._store.dirty and not self._read_only:
            self._store.sync()
        self._transport.close()
        self._store.close()

    # -- small things ---------------------------------------------------------------------------

    def _ask(self, action: Callable[[_Pending], None], answer: Answer) -> None:
        self._check_open()
        pending = _Pending(answer, time.monotonic() + self._append_timeout_s)

        def attempt() -> None:
            try:
                action(pending)
            except RayQueueError as error:
                self._answer(pending, error)
            else:
                self._waiting.append(pending)

        self._submit(attempt, answer)

    def _submit(self, call: Callable[[], None], answer: Answer | None = None) -> None:
        self._check_open()
        self._calls.append((call, answer))
        self._queued()

    def _queued(self) -> None:
        # One wake-up is enough for everything queued before the thread looks.
        if not self._woken:
            self._woken = True
            self._transport.wake()
        if self._ended:
            self._refuse_queued()  # the thread has looked for the last time

    def _refuse_queued(self) -> None:
        """Answer what nobody will take any more. From any thread: what is popped is answered once."""
        refused: list[Answer | None] = []
        with suppress(IndexError):
            while True:
                refused.append(self._appends.popleft()[2].answer)
        with suppress(IndexError):
            while True:
                refused.append(self._calls.popleft()[1])
        error = self._closed_error()
        self._deliver([(answer, error) for answer in refused if answer is not None])

    def _check_open(self) -> None:
        if self._closing:
            raise self._closed_error()

    def _closed_error(self) -> ReplicaClosedError:
        return ReplicaClosedError(f"{self._name()} is closed")

    def _not_leader(self) -> NotLeaderError:
        leader = self.status.leader
        hint = f"ask {leader}" if leader else "no leader is known yet, retry"
        return NotLeaderError(f"{self._store.node_id} does not lead; {hint}", leader=leader)

    def _name(self) -> str:
        return f"{self._store.group_id} {self._store.node_id}"

    def _role(self) -> str:
        engine = self._engine
        if engine.is_leader:
            return "leader"
        return "follower" if self._store.node_id in engine.members.voters else "learner"

    def _status(self) -> Status:
        engine, store = self._engine, self._store
        return Status(
            group_id=store.group_id,
            node_id=store.node_id,
            role=self._role(),
            leader=engine.leader,
            term=engine.term,
            start_offset=self._partition.readable_from,
            high_watermark=self._partition.high_watermark,
            base_index=store.base_index,
            last_index=store.last_index,
            commit=engine.commit,
            applied=engine.applied,
            voters=tuple(sorted(engine.members.voters)),
            learners=tuple(sorted(engine.members.learners)),
            address=self._transport.address,
            size_bytes=store.size_bytes(),
            read_only=self._read_only,
            damaged=store.damaged,
            syncs=self._syncs,
            sync_ms=self._sync_s * 1000,
        )


def _call_each(answers: list[tuple[Answer, Any]]) -> None:
    for answer, result in answers:
        answer(result)
