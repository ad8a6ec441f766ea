"""One replica of a Raft group, running: the engine's thread and the calls into it.

Owns the thread that takes the turns of the ``ReplicaCore``, the store, the transport
and the clients' connections, and the hand-over between it and everybody else. Knows
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar, final

from rayqueue.config import Settings
from rayqueue.errors import (
    AppendTimeoutError,
    DamagedLogError,
    LostHistoryError,
    RayQueueError,
    ReplicaClosedError,
    StorageError,
)
from rayqueue.ids import ReplicaId
from rayqueue.log.store import LogStore
from rayqueue.log.waymark import Waymark
from rayqueue.protocol.calls import ReplicaStatus
from rayqueue.protocol.frames import SLACK_BYTES
from rayqueue.raft.clients import ClientTransport
from rayqueue.raft.machine import StateMachine
from rayqueue.replica.answers import Answer, Deliver, Pending, call_each
from rayqueue.replica.clients import Clients
from rayqueue.replica.core import ReplicaCore
from rayqueue.replica.inbox import Inbox
from rayqueue.replica.loop import Written
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
    """When turns have other things to do, and who waits for the end of this one."""

    inspections: list[Answer] = field(default_factory=list)
    quiet_from_s: float = 0.0
    maintain_at_s: float = 0.0


@final
class Replica(ReplicaCore[ServiceT]):
    """A running replica. Every method but ``stop`` and ``close`` returns at once.

    ``engine`` is its thread's. The service looks at it, and proposes by this replica.
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
        self._transport = transport
        self._log_settings = settings.log
        self._on_fatal = on_fatal
        self._due = _Due()
        self._syncs = SyncTimes()
        super().__init__(
            store,
            machine,
            settings.raft,
            Random(),  # noqa: S311  # election jitter
            service,
            inbox=Inbox(self._name, transport.wake, deliver),
            clients=Clients(settings.calls, settings.log.max_batch_bytes + SLACK_BYTES, damaged=self._damaged),
            send=transport.send,
            deliver=deliver,
            clock=time.monotonic,
        )
        self.clients.service = self.service
        transport.serve_clients(self.clients)
        self._room = Room(self._name, store, self._loop)
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

    def set_peers(self, addresses: Mapping[ReplicaId, tuple[str, int]]) -> None:
        """Set the addresses of the others. Who belongs to the group is said in its log, not here."""
        peers = {peer: address for peer, address in addresses.items() if peer != self._store.replica_id}
        self.run(lambda: self._transport.set_peers(peers))

    def inspect(self, answer: Answer) -> None:
        """Answers with the status as it is now; ``status`` may be a second old.

        What the answer says is true for the next call: who it says leads accepts appends.
        """
        self.run(lambda: self._due.inspections.append(answer), answer)

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

    # -- what the core asks, on the engine's thread ------------------------------------------

    @property
    def versions(self) -> Mapping[ReplicaId, int]:
        return self._transport.versions

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
        due = self._due
        events = self._transport.poll(self._patience_s())
        asked = self.first_half(events)
        now = time.monotonic()
        if events or asked:
            due.quiet_from_s = now
        settle = self._store.dirty and now - due.quiet_from_s >= _IDLE_SYNC_S
        if (self.must_write or settle) and not self._sync():
            self._publish()
            return
        self.promise()
        self._publish()
        if now >= due.maintain_at_s:
            self._maintain(now)

    def _patience_s(self) -> float:
        """The time that the thread may sleep if nothing happens."""
        if self.busy:
            return 0.0
        now = time.monotonic()
        patience = min(_POLL_MAX_S, self.next_deadline_s - now)
        if self._loop.read_only:
            patience = min(patience, self._loop.retry_at_s - now)
        elif self._store.dirty and not self.engine.halted:
            patience = min(patience, _IDLE_SYNC_S)
        return max(0.0, patience)

    def _damaged(self, why: str) -> None:
        if self._store.damaged is None:
            _log.critical("%s is damaged, leads no more and must be rebuilt: %s", self._name, why)
        super()._damaged(why)

    def _sync(self) -> bool:
        """True if all is durable that the turn wants to promise."""
        started = time.perf_counter()
        written = self.write()
        if written is not Written.NOTHING:
            self._room.note()
            self._syncs.add(time.perf_counter() - started)
        return written is Written.ALL

    def _cannot_write(self, error: StorageError) -> None:
        if isinstance(error, DamagedLogError):
            _log.critical("%s writes no more and must be rebuilt: %s", self._name, error)
        else:
            _log.error("%s can write nothing any more: %s", self._name, error)

    def _publish(self) -> None:
        """Let the other threads see where things stand."""
        self._board.look()
        if self._due.inspections:
            status = self._board.renew()
            inspections, self._due.inspections = self._due.inspections, []
            for answer in inspections:
                self._answers.tell(answer, status)
        self.publish()

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
