"""One replica of a Raft group, running: the engine's thread and the calls into it.

Owns the thread that drives the Raft engine, the store, the transport and the
clients' connections, and the hand-over between it and everybody else. Knows
nothing of Ray; the actor is a thin shell around it, and so is a plain process.
What the group's log means is said by the ``StateMachine`` that it is given,
what clients may ask by the ``Service``.

One thread writes. Calls from other threads are queued, the thread is woken,
and takes all that is queued at once; clients' requests are read by the thread
itself. All of them share one append to the log and one sync. Answers to other
threads go out by ``deliver``, a whole step's at a time; those to clients as
soon as they are known, by one write per client.

Damage, whoever finds it, is told to the engine (``RaftEngine.damaged``): the
replica leads no more and goes on as a follower. What a client's bytes cause
ends with that client (``serving``). Any other exception in the thread is the
end of it: ``on_fatal`` is called, which ends the process. Whoever waits learns
it from the broken connection, and what was acknowledged is on disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from rayqueue.config import CallSettings, LogSettings, RaftSettings
from rayqueue.errors import (
    AppendTimeoutError,
    DamagedLogError,
    InvariantBrokenError,
    NotLeaderError,
    RayQueueError,
    ReplicaClosedError,
    StorageError,
)
from rayqueue.ids import GroupId, NodeId, Offset, Term
from rayqueue.log.store import LogStore
from rayqueue.protocol.frames import Frame, Kind
from rayqueue.raft.clients import ClientTransport
from rayqueue.raft.engine import Done, RaftEngine
from rayqueue.raft.machine import StateMachine
from rayqueue.raft.members import Members
from rayqueue.replica.clients import Clients
from rayqueue.replica.loop import Loop, Written
from rayqueue.replica.measures import Measures
from rayqueue.replica.service import Service
from rayqueue.replica.status import Status

_log = logging.getLogger(__name__)

Answer = Callable[[Any], None]
"""Takes a result, or a ``RayQueueError`` that says why there is none. Called once."""

Deliver = Callable[[list[tuple[Answer, Any]]], None]

_IDLE_SYNC_S = 0.02
_MAINTAIN_EVERY_S = 1.0
_POLL_MAX_S = 0.5
_FRAME_SLACK_BYTES = 64 * 1024
_NEVER = float("inf")


@dataclass(slots=True)
class Pending:
    """A call that waits for its outcome."""

    answer: Answer
    deadline_s: float
    inside: bool = False
    """The answer is for the engine's thread itself, and given at once."""
    answered: bool = False


class Replica:
    """A running replica. Every method but ``close`` returns at once.

    Methods may be called from any thread, except those for the service.
    """

    def __init__(
        self,
        store: LogStore,
        transport: ClientTransport,
        machine: StateMachine,
        *,
        service: Callable[[Any], Service] | None = None,
        raft: RaftSettings | None = None,
        log: LogSettings | None = None,
        calls: CallSettings | None = None,
        append_timeout_ms: int = 10_000,
        deliver: Deliver | None = None,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """``service`` gets this replica and makes what serves its clients; without one there are none."""
        self._store = store
        self._transport = transport
        self._log_settings = log or LogSettings()
        self._call_settings = calls or CallSettings()
        self._append_timeout_s = append_timeout_ms / 1000
        self._deliver = deliver or _call_each
        self._on_fatal = on_fatal

        rng = Random()  # noqa: S311  # election jitter
        self._engine = RaftEngine(store, machine, raft or RaftSettings(), rng, time.monotonic())
        self._loop = Loop(
            self._engine,
            store,
            send=transport.send,
            take_calls=self._take_calls,
            stepped=self._stepped,
            troubled=self._cannot_write,
        )
        self._calls: deque[tuple[Callable[[], None], Answer | None]] = deque()
        self._waiting: deque[Pending] = deque()
        self._to_confirm: list[Answer] = []
        self._after_sync: list[tuple[Pending, Any]] = []
        self._to_settle: list[Callable[[], None]] = []
        self._answers: list[tuple[Answer, Any]] = []
        self._inspections: list[Answer] = []
        self._woken = False
        self._led = False
        self._served = False
        self._closing = False
        self._ended = False
        self._was_full = False
        self._maintain_at_s = 0.0
        self._quiet_from_s = 0.0
        self._syncs = 0
        self._sync_s = 0.0
        self._longest_sync_s = 0.0
        self._elected = 0
        self._published: tuple[object, ...] = ()
        self.status = self._status()
        self.measures: Measures | None = None
        """As of about a second ago at most; None before the first."""

        self._service = None if service is None else service(self)
        max_frame_bytes = self._log_settings.max_batch_bytes + _FRAME_SLACK_BYTES
        self._clients = Clients(
            self._call_settings, max_frame_bytes, self._serve, self._client_gone, self._client_needed
        )
        if self._service is not None:
            transport.serve_clients(self._clients)
        self._thread = threading.Thread(target=self._main, name=f"raft {store.group_id} {store.node_id}", daemon=True)
        self._thread.start()

    # -- from any thread ---------------------------------------------------------------

    @property
    def token(self) -> bytes:
        """What clients prove that they hold."""
        return self._clients.token

    def command(self, payload: bytes, answer: Answer) -> None:
        """Propose an entry; the answer is what applying it answers.

        The caller vouches that the machine can read it: in the log it would stop every replica that applies it.
        """
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
        self.run(lambda: self._transport.set_peers(peers))

    def inspect(self, answer: Answer) -> None:
        """Answers with the status as it is now; the attribute ``status`` may be a second old.

        What the answer says is true for the next call: who it says leads accepts appends.
        """
        self.run(lambda: self._inspections.append(answer), answer)

    def run(self, work: Callable[[], None], refused: Answer | None = None) -> None:
        """Do this on the engine's thread, soon. An exception out of it ends the replica.

        ``ReplicaClosedError``, raised or given to ``refused``, if it will not be done any more.
        """
        self._check_open()
        self._calls.append((work, refused))
        self._queued()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop. Calls that wait are answered with ``ReplicaClosedError`` or, if written, as unknown."""
        if self._thread is not threading.current_thread():
            self._closing = True
            self._transport.wake()
            self._thread.join(timeout_s)

    # -- for the service, on the engine's thread -----------------------------------------

    @property
    def is_leader(self) -> bool:
        return self._engine.is_leader

    @property
    def leader(self) -> NodeId | None:
        return self._engine.leader

    @property
    def term(self) -> Term:
        return self._engine.term

    @property
    def role(self) -> str:
        if self._engine.is_leader:
            return "leader"
        return "follower" if self._store.node_id in self._engine.members.voters else "learner"

    @property
    def members(self) -> Members:
        return self._engine.members

    @property
    def group_id(self) -> GroupId:
        return self._store.group_id

    @property
    def node_id(self) -> NodeId:
        return self._store.node_id

    def propose(self, payload: bytes, answer: Answer) -> Pending:
        """Append an entry to the log, if this replica leads; else it raises. The answer is what applying it answers."""
        pending = Pending(answer, time.monotonic() + self._append_timeout_s, inside=True)
        try:
            self._engine.propose(payload, pending)
        except (RayQueueError, OSError):
            raise
        except Exception as error:
            # Not the client's affair any more: how much of it was done is not known.
            raise InvariantBrokenError(f"a proposal failed: {error!r}") from error
        self._waiting.append(pending)
        return pending

    def once_synced(self, pending: Pending, result: Any) -> None:
        """Answer it with ``result`` once this replica has it on disk, unless another answer comes first."""
        self._after_sync.append((pending, result))

    def once_settled(self, work: Callable[[], None]) -> None:
        """Do this when snapshots of the store show all that is applied now; or, on a full disk, what they can."""
        self._to_settle.append(work)

    def confirm(self, answer: Answer) -> None:
        """Answers None once a majority has confirmed that this replica leads and it has applied what was committed
        at the time of the call; or the error. All questions of one turn are one question."""
        self.check_leads()
        self._to_confirm.append(answer)

    def send(self, client: int, kind: Kind, request: int, buffers: Sequence[bytes]) -> None:
        """Answer a client's request. No error if the client is gone."""
        size_bytes = len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))
        self._clients.send(client, kind, request, buffers, size_bytes)

    def fail(self, client: int, request: int, error: RayQueueError) -> None:
        """Answer a client's request with an error."""
        self._note_damage(error)
        self._clients.fail(client, request, error)

    def serving(self, client: int, request: int | None, work: Callable[[], None]) -> None:
        """Do something that a client asked for. A ``RayQueueError`` out of it is the answer; with None nobody waits.

        Anything else is a bug that the client's bytes have found, before anything was proposed: it is hung up on,
        and the replica goes on. Not so if the replica itself is unsound, or its disk: then that is the end.
        """
        try:
            work()
        except (InvariantBrokenError, OSError):
            raise
        except RayQueueError as error:
            self._note_damage(error)
            if request is not None:
                self.fail(client, request, error)
        except Exception as error:  # noqa: BLE001  # whatever it is
            self._clients.hang_up(client, error)

    def is_full(self, client: int) -> bool:
        """It does not take its answers: nothing large should be made for it."""
        return self._clients.is_full(client)

    def check_leads(self) -> None:
        """``NotLeaderError``, with the leader's id if it is known, unless this replica leads."""
        if not self._engine.is_leader:
            raise self.not_leader()

    def not_leader(self) -> NotLeaderError:
        return not_leader(self._store.node_id, self._engine.leader)

    def status_now(self) -> Status:
        return self._status()

    # -- what a kind of replica adds -------------------------------------------------------

    def _leadership_changed(self) -> None:
        """Leadership was won or lost. Called before anything is proposed in it."""

    def _take_queued(self) -> bool:
        """Propose what waits in queues of its own. True if there was anything."""
        return False

    def _has_queued(self) -> bool:
        return False

    def _refused_queued(self) -> list[Answer]:
        """Empty those queues: nobody takes them any more."""
        return []

    def _on_synced(self) -> None:
        """The store's tables are on disk."""

    def _on_published(self) -> None:
        """A turn is over."""

    def _on_maintenance(self) -> None:
        """About once per second."""

    def _measure(self, status: Status, elected: int, longest_sync_s: float) -> Measures:
        """About once per second."""
        return Measures(status, elected, longest_sync_s)

    def _readable(self) -> tuple[Offset, Offset]:
        """For the status: the first offset that can be read, and the high watermark."""
        return Offset(0), Offset(self._engine.applied)

    # -- the thread ------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._closing:
                with self._noting_damage():
                    self._turn()
            self._end()
        except BaseException as error:  # noqa: BLE001  # whatever it is, this replica must not go on
            _log.critical("%s stops: %s", self._name(), error, exc_info=True)
            self._closing = True
            self._on_fatal(error)

    def _turn(self) -> None:
        loop = self._loop
        events = self._transport.poll(self._patience_s())
        self._woken = False
        now = time.monotonic()
        had_calls = loop.first_half(now, events)
        if events or had_calls:
            self._quiet_from_s = now
        settle = self._store.dirty and now - self._quiet_from_s >= _IDLE_SYNC_S
        if (loop.must_write or settle or self._to_settle) and not self._sync(now):
            self._publish()
            return
        loop.second_half()
        self._publish()
        if now >= self._maintain_at_s:
            self._maintain(now)

    def _patience_s(self) -> float:
        """How long the thread may sleep if nothing happens."""
        if self._engine.busy or self._calls or self._has_queued():
            return 0.0
        due_s = self._engine.next_deadline
        if self._service is not None:
            due_s = min(due_s, self._service.next_deadline_s)
        patience = min(_POLL_MAX_S, due_s - time.monotonic())
        if self._read_only:
            patience = min(patience, self._loop.retry_at_s - time.monotonic())
        elif self._store.dirty and not self._engine.halted:
            patience = min(patience, _IDLE_SYNC_S)
        return max(0.0, patience)

    def _take_calls(self) -> bool:
        """True if there were any, or clients wanted something."""
        calls = self._calls
        stirred = self._clients.new_turn() or bool(calls)
        # A call may propose: a leadership that messages have begun or ended is known before, and again after.
        self._note_leadership(time.monotonic())
        while calls:
            with self._noting_damage():
                calls.popleft()[0]()
        self._note_leadership(time.monotonic())
        stirred = self._take_queued() or stirred
        if self._to_confirm:
            self._confirm_all()
        return stirred

    def _confirm_all(self) -> None:
        answers, self._to_confirm = self._to_confirm, []

        def answer_all(result: Any) -> None:
            for answer in answers:
                answer(result)

        pending = Pending(answer_all, time.monotonic() + self._append_timeout_s, inside=True)
        try:
            self._engine.confirm_leadership(pending)
            self._waiting.append(pending)
        except RayQueueError as error:
            self._answer(pending, error)

    def _note_leadership(self, now: float) -> None:
        engine, service = self._engine, self._service
        if engine.is_leader != self._led:
            self._led = engine.is_leader
            self._elected += self._led
            self._leadership_changed()
        if service is None:
            return
        if self._served and not self._led:
            self._served = False
            service.unlead(now)
        elif self._led and not self._served and engine.applied >= engine.noop_index:
            self._served = True
            service.lead(now)

    def _stepped(self, done: list[Done]) -> None:
        self._note_leadership(time.monotonic())
        self._finish(done)

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
        if self._service is not None:
            self._service.tick(now)
        self._clients.flush()
        self._flush_answers()

    def _answer(self, pending: Pending, result: Any) -> None:
        if pending.answered:
            return
        pending.answered = True
        self._note_damage(result)
        if pending.inside:
            with self._noting_damage():
                pending.answer(result)
        else:
            self._answers.append((pending.answer, result))

    def _flush_answers(self) -> None:
        if self._answers:
            answers, self._answers = self._answers, []
            self._deliver(answers)

    def _note_damage(self, found: Any) -> None:
        """Every answer passes here: an error that is damage is the engine's business, too."""
        if type(found) is DamagedLogError:
            self._damaged(str(found))

    @contextmanager
    def _noting_damage(self) -> Iterator[None]:
        """For whatever may read the disk on the engine's thread. What met the damage ends; the replica goes on."""
        try:
            yield
        except DamagedLogError as error:
            self._damaged(str(error))

    def _damaged(self, why: str) -> None:
        if self._store.damaged is None:
            _log.critical("%s is damaged, leads no more and must be rebuilt: %s", self._name(), why)
        self._engine.damaged(why)

    @property
    def _read_only(self) -> bool:
        return self._loop.read_only

    def _sync(self, now: float) -> bool:
        """True if all is durable that the turn wants to promise."""
        if not self._loop.may_write(now):
            return False
        started = time.perf_counter()
        after, self._after_sync = self._after_sync, []
        written = self._loop.write(now, tables=bool(self._to_settle))
        if written is Written.NOTHING:
            return False
        self._note_room()
        if not self._store.dirty:
            self._on_synced()
        took_s = time.perf_counter() - started
        self._syncs += 1
        self._sync_s += took_s
        self._longest_sync_s = max(self._longest_sync_s, took_s)
        if written is Written.SMALL:
            return False  # those in ``after`` have their answer
        for pending, result in after:
            self._answer(pending, result)
        return True

    def _cannot_write(self, error: StorageError) -> None:
        if isinstance(error, DamagedLogError):
            _log.critical("%s writes no more and must be rebuilt: %s", self._name(), error)
        else:
            _log.error("%s can write nothing any more: %s", self._name(), error)

    @property
    def _full(self) -> bool:
        return self._read_only or self._store.full

    def _note_room(self) -> None:
        if self._store.full != self._was_full:
            self._was_full = self._store.full
            if self._was_full:
                _log.error("%s: the disk is full; it takes no records until there is space", self._name())
            else:
                _log.warning("%s: there is space again", self._name())

    def _publish(self) -> None:
        """Let the other threads see where things stand."""
        engine, store = self._engine, self._store
        current = (engine.term, engine.leader, engine.is_leader, engine.members, self._full, store.damaged)
        if current != self._published:
            self._published = current
            status = self.status = self._status()
            _log.info("%s: %s of term %d, leader %s", self._name(), status.role, status.term, status.leader)
        if self._inspections:
            self.status = self._status()
            inspections, self._inspections = self._inspections, []
            self._deliver([(answer, self.status) for answer in inspections])
        self._on_published()
        if self._to_settle:
            settled, self._to_settle = self._to_settle, []
            for work in settled:
                work()
        self._clients.flush()

    def _maintain(self, now: float) -> None:
        """Checkpoints, trimming and the like: not urgent, a bounded piece at a time."""
        settings = self._log_settings
        self._maintain_at_s = now + _MAINTAIN_EVERY_S
        if self._store.full:
            self._store.look_for_room()
            self._note_room()
        more = self._engine.maintain(settings.segment_bytes, settings.trim_entries_per_tick)
        if more:
            self._maintain_at_s = now
        self.status = self._status()
        if not more:
            measured = self._measure(self.status, self._elected, self._longest_sync_s)
            self.measures = replace(measured, clients=self._clients.stats())
            self._longest_sync_s = 0.0
        self._clients.sweep()
        self._on_maintenance()

    def _end(self) -> None:
        self._ended = True
        self._refuse_queued()
        unknown = AppendTimeoutError(f"{self._name()} was closed before a majority answered; outcome unknown")
        for pending in self._waiting:
            self._answer(pending, unknown)
        if self._service is not None:
            self._service.close()
        self._clients.flush()
        self._flush_answers()
        if self._store.dirty and not self._read_only and not self._engine.halted:
            self._store.sync()
        self._transport.close()
        self._store.close()

    # -- clients -----------------------------------------------------------------------------

    def _serve(self, client: int, frame: Frame) -> None:
        service = self._service
        if service is not None:
            request = None if frame.kind == Kind.APPEND_UNACKED else frame.request
            self.serving(client, request, partial(service.serve, client, frame))

    def _client_gone(self, client: int) -> None:
        if self._service is not None:
            self._service.client_gone(client)

    def _client_needed(self, client: int) -> bool:
        return self._service is not None and self._service.needs(client)

    # -- small things ---------------------------------------------------------------------------

    def _ask(self, action: Callable[[Pending], None], answer: Answer) -> None:
        self._check_open()
        pending = Pending(answer, time.monotonic() + self._append_timeout_s)

        def attempt() -> None:
            try:
                action(pending)
            except RayQueueError as error:
                self._answer(pending, error)
            else:
                self._waiting.append(pending)

        self.run(attempt, answer)

    def _queued(self) -> None:
        # One wake-up is enough for everything queued before the thread looks.
        if not self._woken:
            self._woken = True
            self._transport.wake()
        if self._ended:
            self._refuse_queued()  # the thread has looked for the last time

    def _refuse_queued(self) -> None:
        """Answer what nobody will take any more. From any thread: what is popped is answered once."""
        refused: list[Answer | None] = [*self._refused_queued()]
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

    def _name(self) -> str:
        return f"{self._store.group_id} {self._store.node_id}"

    def _status(self) -> Status:
        engine, store = self._engine, self._store
        start_offset, high_watermark = self._readable()
        return Status(
            group_id=store.group_id,
            node_id=store.node_id,
            role=self.role,
            leader=engine.leader,
            term=engine.term,
            start_offset=start_offset,
            high_watermark=high_watermark,
            base_index=store.base_index,
            last_index=store.last_index,
            commit=engine.commit,
            applied=engine.applied,
            voters=tuple(sorted(engine.members.voters)),
            learners=tuple(sorted(engine.members.learners)),
            address=self._transport.address,
            size_bytes=store.size_bytes(),
            read_only=self._full,
            damaged=store.damaged,
            syncs=self._syncs,
            sync_ms=self._sync_s * 1000,
        )


def not_leader(node: NodeId, leader: NodeId | None) -> NotLeaderError:
    hint = f"ask {leader}" if leader else "no leader is known yet, retry"
    return NotLeaderError(f"{node} does not lead; {hint}", leader=leader)


def _call_each(answers: list[tuple[Answer, Any]]) -> None:
    for answer, result in answers:
        answer(result)
