"""One replica of a Raft group, running: the engine's thread and the calls into it.

Owns the thread that drives the Raft engine, the store, the transport and the
clients' connections, and the hand-over between it and everybody else. Knows
nothing of Ray; the actor is a thin shell around it, and so is a plain process.
What the group's log means is said by the ``StateMachine`` that it is given,
what clients may ask by the ``Service``.

One thread writes. Calls from other threads are queued (``Inbox``), the thread is
woken, and takes all that is queued at once; clients' requests are read by the
thread itself. All of them share one append to the log and one sync. Answers to
other threads go out by ``deliver``, a whole step's at a time; those to clients as
soon as they are known, by one write per client.

Damage, whoever finds it, is told to the engine (``RaftEngine.damaged``): the
replica leads no more and goes on as a follower. What a client's bytes cause
ends with that client (``Clients.serving``). Any other exception in the thread is the
end of it: ``on_fatal`` is called, which ends the process. Whoever waits learns
it from the broken connection, and what was acknowledged is on disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, Generic, TypeVar, final

from rayqueue.config import Settings
from rayqueue.errors import (
    AppendTimeoutError,
    DamagedLogError,
    InvariantBrokenError,
    LostHistoryError,
    NotLeaderError,
    RayQueueError,
    ReplicaClosedError,
    StorageError,
)
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.log.store import LogStore, Snapshot
from rayqueue.log.waymark import Waymark
from rayqueue.protocol.calls import ReplicaStatus
from rayqueue.protocol.frames import SLACK_BYTES
from rayqueue.raft.clients import ClientTransport
from rayqueue.raft.engine import Done, RaftEngine
from rayqueue.raft.handshake import SPEAKS
from rayqueue.raft.machine import StateMachine
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.replica.answers import Answer, Answers, Deliver, Pending, call_each
from rayqueue.replica.clients import Clients
from rayqueue.replica.inbox import Inbox
from rayqueue.replica.leadership import Leadership
from rayqueue.replica.loop import Loop, Written
from rayqueue.replica.measures import Measures, SyncTimes
from rayqueue.replica.room import Room
from rayqueue.replica.scrub import Scrub
from rayqueue.replica.service import Service
from rayqueue.replica.status import Status
from rayqueue.replica.status_board import StatusBoard

_log = logging.getLogger(__name__)

ServiceT = TypeVar("ServiceT", bound=Service)

HAND_OVER_S = 2.0
"""A planned stop waits this long for another leader."""

_IDLE_SYNC_S = 0.02
_MAINTAIN_EVERY_S = 1.0
_POLL_MAX_S = 0.5


@dataclass(slots=True)
class _Due:
    """Work that waits for a point of this turn or the next one, and when turns have other things to do."""

    to_confirm: list[Answer] = field(default_factory=list)
    """Once a majority has confirmed the leader."""
    after_sync: list[tuple[Pending, Any]] = field(default_factory=list)
    to_settle: list[Callable[[], None]] = field(default_factory=list)
    """Once snapshots show all that is applied."""
    inspections: list[Answer] = field(default_factory=list)
    """At its end."""
    quiet_from_s: float = 0.0
    maintain_at_s: float = 0.0


@final
class Replica(Generic[ServiceT]):
    """A running replica. Every method but ``close`` returns at once.

    Methods may be called from any thread, except those for the service.
    """

    def __init__(
        self,
        store: LogStore,
        transport: ClientTransport,
        machine: StateMachine,
        service: Callable[[Replica[ServiceT]], ServiceT],
        settings: Settings,
        *,
        deliver: Deliver = call_each,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """``service`` gets this replica and makes what serves its clients."""
        self._name = f"{store.group_id} {store.replica_id}"
        self._store = store
        self._transport = transport
        self._log_settings = settings.log
        self._on_fatal = on_fatal
        rng = Random()  # noqa: S311  # election jitter
        self.engine = RaftEngine(store, machine, settings.raft, rng, time.monotonic())
        """Its thread's. The service looks at it, and proposes by this replica."""
        self._loop = Loop(
            self.engine,
            store,
            send=transport.send,
            take_calls=self._take_calls,
            stepped=self._stepped,
            troubled=self._cannot_write,
        )
        self._inbox = Inbox(self._name, transport.wake, deliver)
        self._answers = Answers(deliver, self._damaged)
        self._due = _Due()
        self._syncs = SyncTimes()
        self._room = Room(self._name, store, self._loop)
        max_frame_bytes = settings.log.max_batch_bytes + SLACK_BYTES
        self.clients = Clients(settings.calls, max_frame_bytes, damaged=self._damaged)
        self.service = self.clients.service = service(self)
        self._leadership = Leadership(self.engine, self.service)
        transport.serve_clients(self.clients)
        self._scrub = Scrub(self._name, store.tables, self.snapshot, settings.log)
        bounds = self.service.bounds
        self._board = StatusBoard(self.engine, store, transport, self._room, self._syncs, self._scrub, bounds)
        self.measures: Measures | None = None
        """As of about a second ago at most; None before the first."""
        self._thread = threading.Thread(target=self._main, name=f"raft {self._name}", daemon=True)
        self._thread.start()

    # -- from any thread ---------------------------------------------------------------

    @property
    def status(self) -> Status:
        """As of about a second ago at most. Who leads, and whether all is well, as it is now."""
        return self._board.status

    @property
    def token(self) -> bytes:
        """The token that clients prove to hold."""
        return self.clients.token

    def command(self, payload: bytes, answer: Answer) -> None:
        """Propose an entry; the answer is what applying it answers.

        The caller vouches that the machine can read it: in the log it would stop every replica that applies it.
        """
        self._ask(lambda pending: self.engine.propose(payload, pending), answer)

    def confirm_leadership(self, answer: Answer) -> None:
        """Answers None if this replica still leads, proven by a majority after the call; or the error."""
        self._ask(self.engine.confirm_leadership, answer)

    def change_members(self, change: Callable[[ReplicaSet], ReplicaSet], answer: Answer) -> None:
        self._ask(lambda pending: self.engine.change_replicas(change(self.engine.replica_set), pending), answer)

    def transfer_leadership(self, target: ReplicaId, answer: Answer) -> None:
        self._ask(lambda pending: self.engine.transfer_leadership(target, time.monotonic(), pending), answer)

    def set_peers(self, addresses: Mapping[ReplicaId, tuple[str, int]]) -> None:
        """Set the addresses of the others. Who belongs to the group is said in its log, not here."""
        peers = {peer: address for peer, address in addresses.items() if peer != self._store.replica_id}
        self.run(lambda: self._transport.set_peers(peers))

    def inspect(self, answer: Answer) -> None:
        """Answers with the status as it is now; ``status`` may be a second old.

        What the answer says is true for the next call: who it says leads accepts appends.
        """
        self.run(lambda: self._due.inspections.append(answer), answer)

    def look(self, find: Callable[[], Any], answer: Answer) -> None:
        """Answers with what this finds on the engine's thread."""
        self.run(lambda: self._answers.tell(answer, find()), answer)

    def run(self, work: Callable[[], None], refused: Answer | None = None) -> None:
        """Do this on the engine's thread, soon. An exception out of it ends the replica.

        ``ReplicaClosedError``, raised or given to ``refused``, if it will not be done any more.
        """
        self._inbox.put(work, refused)

    def _ask(self, action: Callable[[Pending], None], answer: Answer) -> None:
        pending = self._answers.pending(answer, inside=False)
        self.run(lambda: self._answers.attempt(action, pending), answer)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """The state on disk. If damage is met, the engine's thread is told before the caller is."""
        try:
            with self._store.snapshot() as snapshot:
                yield snapshot
        except DamagedLogError as error:
            why = str(error)
            with suppress(ReplicaClosedError):
                self.run(lambda: self._damaged(why))
            raise

    def make_way(self, answer: Answer) -> None:
        """Let the voter lead that can take over soonest. Answers None once this replica leads no more, or the error."""
        self._ask(lambda pending: self.engine.hand_over(time.monotonic(), pending), answer)

    def stop(self, hand_over_s: float = HAND_OVER_S) -> bool:
        """A planned stop: hand the leadership over, wait for that, but no longer than ``hand_over_s``, and close.

        True if nobody has to notice that this replica is gone before somebody leads.
        """
        done = threading.Event()
        outcome: list[Any] = []

        def answer(result: Any) -> None:
            outcome.append(result)
            done.set()

        def hand_over(pending: Pending) -> None:
            self.engine.hand_over(time.monotonic(), pending)

        pending = self._answers.pending(answer, inside=True)
        try:
            self.run(lambda: self._answers.attempt(hand_over, pending))
        except ReplicaClosedError:
            return True
        done.wait(hand_over_s)
        handed = bool(outcome) and not isinstance(outcome[0], RayQueueError)
        if not handed:
            why = outcome[0] if outcome else f"nobody took over within {hand_over_s:.1f} s"
            _log.warning("%s stops as the leader: %s", self._name, why)
        self.close()
        return handed

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop. Calls that wait are answered with ``ReplicaClosedError`` or, if written, as unknown."""
        if self._thread is not threading.current_thread():
            self._inbox.close()
            self._thread.join(timeout_s)

    # -- for the service, on the engine's thread -----------------------------------------

    @property
    def oldest_version(self) -> int:
        """Of the replicas' protocol, that all members of the group understand, as far as it is known. Who has not been
        seen by this process counts as new: it may be gone for good, and holds nothing up."""
        versions = self._transport.versions
        members = self.engine.replica_set.everyone - {self._store.replica_id}
        return min((versions.get(peer, SPEAKS.highest) for peer in members), default=SPEAKS.highest)

    @property
    def group_id(self) -> GroupId:
        return self._store.group_id

    @property
    def replica_id(self) -> ReplicaId:
        return self._store.replica_id

    def propose(self, payload: bytes, answer: Answer) -> Pending:
        """Append an entry to the log, if this replica leads; else it raises. The answer is what applying it answers."""
        pending = self._answers.pending(answer, inside=True)
        try:
            self.engine.propose(payload, pending)
        except (RayQueueError, OSError):
            raise
        except Exception as error:
            # Not the client's affair any more: how much of it was done is not known.
            raise InvariantBrokenError(f"a proposal failed: {error!r}") from error
        self._answers.wait(pending)
        return pending

    def tell_log(self, payload: bytes) -> None:
        """The same, for what nobody waits for."""
        self.engine.propose(payload, None)

    def once_synced(self, pending: Pending, result: Any) -> None:
        """Answer it with ``result`` once this replica has it on disk, unless another answer comes first."""
        self._due.after_sync.append((pending, result))

    def once_settled(self, work: Callable[[], None]) -> None:
        """Do this when snapshots of the store show all that is applied now; or, on a full disk, what they can."""
        self._due.to_settle.append(work)

    def confirm(self, answer: Answer) -> None:
        """Answers None once a majority has confirmed that this replica leads and it has applied what was committed
        at the time of the call; or the error. All questions of one turn are one question."""
        self.check_leads()
        self._due.to_confirm.append(answer)

    def hand_over(self, target: ReplicaId, answer: Answer) -> None:
        """Let another voter lead. Answers None once this replica does not any more, or the error."""
        pending = self._answers.pending(answer, inside=True)
        self._answers.attempt(lambda each: self.engine.transfer_leadership(target, time.monotonic(), each), pending)

    def check_leads(self) -> None:
        """``NotLeaderError``, with the leader's id if it is known, unless this replica leads."""
        if not self.engine.is_leader:
            raise self.not_leader()

    def not_leader(self) -> NotLeaderError:
        leader = self.engine.leader
        hint = f"ask {leader}" if leader else "no leader is known yet, retry"
        return NotLeaderError(f"{self._store.replica_id} does not lead; {hint}", leader=leader)

    def client_status(self) -> ReplicaStatus:
        """The status for clients: who leads, as it is now; the size as of the last second."""
        engine, board = self.engine, self._board
        bounds, known = self.service.bounds(), board.status
        problem = known.damaged or known.doubted or ""
        return ReplicaStatus(
            self.replica_id, board.role, engine.leader, engine.term, *bounds, known.size_bytes, problem
        )

    # -- the thread ------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._inbox.closed:
                try:
                    self._turn()
                except DamagedLogError as error:  # what met the damage ends; the replica goes on
                    self._damaged(str(error))
                except LostHistoryError as error:
                    _log.critical("%s: %s", self._name, error)
                    self.engine.abstain(str(error))
            self._end()
        except BaseException as error:  # noqa: BLE001  # whatever it is, this replica must not go on
            _log.critical("%s stops: %s", self._name, error, exc_info=True)
            self._inbox.closed = True
            self._on_fatal(error)

    def _turn(self) -> None:
        loop, due = self._loop, self._due
        events = self._transport.poll(self._patience_s())
        self._inbox.awake()
        now = time.monotonic()
        asked = loop.first_half(now, events)
        if events or asked:
            due.quiet_from_s = now
        settle = self._store.dirty and now - due.quiet_from_s >= _IDLE_SYNC_S
        if (loop.must_write or settle or due.to_settle) and not self._sync(now):
            self._publish()
            return
        loop.second_half()
        self._publish()
        if now >= due.maintain_at_s:
            self._maintain(now)

    def _patience_s(self) -> float:
        """The time that the thread may sleep if nothing happens."""
        engine = self.engine
        if engine.busy or self._inbox:
            return 0.0
        now = time.monotonic()
        patience = min(_POLL_MAX_S, engine.next_deadline - now, self.service.next_deadline_s - now)
        if self._loop.read_only:
            patience = min(patience, self._loop.retry_at_s - now)
        elif self._store.dirty and not engine.halted:
            patience = min(patience, _IDLE_SYNC_S)
        return max(0.0, patience)

    def _take_calls(self) -> bool:
        """True if there were any, or clients wanted something."""
        inbox = self._inbox
        stirred = self.clients.new_turn()
        # A call may propose: a leadership that messages have begun or ended is known before, and again after.
        self._leadership.look(time.monotonic())
        if inbox:
            stirred = True
            while inbox:
                try:
                    inbox.take()()
                except DamagedLogError as error:
                    self._damaged(str(error))
            self._leadership.look(time.monotonic())
        self.service.gather()
        if self._due.to_confirm:
            self._confirm_all()
        return stirred

    def _confirm_all(self) -> None:
        answers, self._due.to_confirm = self._due.to_confirm, []

        def answer_all(result: Any) -> None:
            for answer in answers:
                answer(result)

        self._answers.attempt(self.engine.confirm_leadership, self._answers.pending(answer_all, inside=True))

    def _stepped(self, done: list[Done]) -> None:
        now = time.monotonic()
        self._leadership.look(now)
        answers = self._answers
        for item in done:
            answers.give(item.context, item.result)
        answers.expire(now)
        self.service.tick(now)
        self.clients.flush()
        answers.flush()

    def _damaged(self, why: str) -> None:
        if self._store.damaged is None:
            _log.critical("%s is damaged, leads no more and must be rebuilt: %s", self._name, why)
        self.engine.damaged(why)

    def _sync(self, now: float) -> bool:
        """True if all is durable that the turn wants to promise."""
        due = self._due
        if not self._loop.may_write(now):
            return False
        started = time.perf_counter()
        after, due.after_sync = due.after_sync, []
        written = self._loop.write(now, tables=bool(due.to_settle))
        if written is Written.NOTHING:
            return False
        self._room.note()
        if not self._store.dirty:
            self.service.tables_synced()
        self._syncs.add(time.perf_counter() - started)
        if written is Written.SMALL:
            return False  # those in ``after`` have their answer
        for pending, result in after:
            self._answers.give(pending, result)
        return True

    def _cannot_write(self, error: StorageError) -> None:
        if isinstance(error, DamagedLogError):
            _log.critical("%s writes no more and must be rebuilt: %s", self._name, error)
        else:
            _log.error("%s can write nothing any more: %s", self._name, error)

    def _publish(self) -> None:
        """Let the other threads see where things stand."""
        due = self._due
        self._board.look()
        if due.inspections:
            status = self._board.renew()
            inspections, due.inspections = due.inspections, []
            for answer in inspections:
                self._answers.tell(answer, status)
        if due.to_settle:
            settled, due.to_settle = due.to_settle, []
            for work in settled:
                work()
        self.clients.flush()
        self._answers.flush()

    def _maintain(self, now: float) -> None:
        """Checkpoints, trimming and the like: not urgent, a bounded piece at a time."""
        settings, due = self._log_settings, self._due
        due.maintain_at_s = now + _MAINTAIN_EVERY_S
        self._room.look()
        more = self.engine.maintain(settings.segment_bytes, settings.trim_entries_per_tick)
        status = self._board.renew()
        if more:
            due.maintain_at_s = now
        else:
            led, longest_s, clients = self._leadership, self._syncs.longest_s, self.clients.stats()
            self.measures = Measures(status, led.elected, longest_s, clients, self.service.measure(), led.handed_over)
            self._syncs.longest_s = 0.0
        if self.engine.is_leader and len(self.engine.replica_set.voters) == 1:
            # Nobody else could tell what is missing if an older copy of the store were restored.
            commit = self.engine.commit
            self._store.set_waymark(Waymark(self._store.term_at(commit) or 0, commit, status.high_watermark))
        self.clients.sweep()
        self.service.maintain(now)

    def _end(self) -> None:
        self._scrub.close()
        self._inbox.end()
        unknown = AppendTimeoutError(f"{self._name} was closed before a majority answered; outcome unknown")
        self._answers.give_all(unknown)
        self.service.close()
        self.clients.flush()
        self._answers.flush()
        if self._store.dirty and not self._loop.read_only and not self.engine.halted:
            self._store.sync()
        self._transport.close()
        self._store.close()
