"""A replica without its thread: the order of a turn, and what waits for a point in one.

Owns the engine, the loop around it, the answers that are due and what the service
is told of the leadership. Whoever drives it takes turns:

    first_half    messages, clients' requests and calls are taken, the engine steps, answers are given
    write         all of it becomes durable, if ``must_write``
    promise       promises leave
    publish       the turn is over: who waited for its end goes on

A replica's thread does them in a row (``rayqueue.replica.replica``). The simulator
does the same in virtual time, so that every rule of this order is simulated.
Knows neither threads nor transport; the clock is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from random import Random
from typing import Any, Generic, TypeVar

from rayqueue.config import RaftSettings
from rayqueue.errors import (
    DamagedLogError,
    InvariantBrokenError,
    NotLeaderError,
    RayQueueError,
    ReplicaClosedError,
    StorageError,
)
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.log.store import LogStore, Snapshot
from rayqueue.protocol.calls import ReplicaStatus
from rayqueue.raft.engine import Done, RaftEngine
from rayqueue.raft.handshake import SPEAKS
from rayqueue.raft.machine import StateMachine
from rayqueue.raft.messages import Message
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.raft.transport import Event
from rayqueue.replica.answers import Answer, Answers, Deliver, Pending
from rayqueue.replica.clients import Clients
from rayqueue.replica.inbox import Inbox
from rayqueue.replica.loop import Loop, Written
from rayqueue.replica.service import Events
from rayqueue.replica.tenure import Tenure

EventsT = TypeVar("EventsT", bound=Events)


class ReplicaCore(Generic[EventsT]):
    """Methods up to ``snapshot`` may be called from any thread, and return at once; the others belong to the turn."""

    def __init__(
        self,
        store: LogStore,
        machine: StateMachine,
        settings: RaftSettings,
        rng: Random,
        service: Callable[[Any], EventsT],
        *,
        inbox: Inbox,
        clients: Clients,
        send: Callable[[ReplicaId, Message], object],
        deliver: Deliver,
        clock: Callable[[], float],
    ) -> None:
        """``service`` gets this core and makes what hears of its events."""
        self.engine = RaftEngine(store, machine, settings, rng, clock())
        self._loop = Loop(
            self.engine,
            store,
            send=send,
            take_calls=self._take_calls,
            stepped=self._stepped,
            troubled=self._cannot_write,
        )
        self._inbox = inbox
        self.clients = clients
        self._answers = Answers(deliver, self._damaged, clock)
        self._store = store
        self._clock = clock
        self._to_confirm: list[Answer] = []
        """Once a majority has confirmed the leader."""
        self._after_sync: list[tuple[Pending, Any]] = []
        self._to_settle: list[Callable[[], None]] = []
        """Once snapshots show all that is applied."""
        self.service = service(self)
        self._leadership = Tenure(self.engine, self.service)

    # -- what the surroundings know ------------------------------------------------------

    @property
    def versions(self) -> Mapping[ReplicaId, int]:
        """Of the replicas' protocol, that others of the group have said they understand."""
        raise NotImplementedError

    def client_status(self) -> ReplicaStatus:
        """The status for clients: who leads, as it is now."""
        raise NotImplementedError

    def _damaged(self, why: str) -> None:
        self.engine.damaged(why)

    def _cannot_write(self, error: StorageError) -> None:
        """Told once: nothing can be written, now or for good."""

    # -- from any thread ---------------------------------------------------------------

    def command(self, payload: bytes, answer: Answer) -> None:
        """Propose an entry; the answer is what applying it answers.

        The caller vouches that the machine can read it: in the log it would stop every replica that applies it.
        """
        self._ask(lambda pending: self.engine.propose(payload, pending), answer)

    def confirm_leadership(self, answer: Answer) -> None:
        """Answers None if this replica still leads, proven by a majority after the call; or the error."""
        self._ask(self.engine.confirm_leadership, answer)

    def change_replicas(self, change: Callable[[ReplicaSet], ReplicaSet], answer: Answer) -> None:
        self._ask(lambda pending: self.engine.change_replicas(change(self.engine.replica_set), pending), answer)

    def transfer_leadership(self, target: ReplicaId, answer: Answer) -> None:
        self._ask(lambda pending: self.engine.transfer_leadership(target, self._clock(), pending), answer)

    def make_way(self, answer: Answer) -> None:
        """Let the voter lead that can take over soonest. Answers None once this replica leads no more, or the error."""
        self._ask(lambda pending: self.engine.hand_over(self._clock(), pending), answer)

    def look(self, find: Callable[[], Any], answer: Answer) -> None:
        """Answers with what this finds in a turn."""
        self.run(lambda: self._answers.tell(answer, find()), answer)

    def run(self, work: Callable[[], None], refused: Answer | None = None) -> None:
        """Do this in a turn, soon. An exception out of it ends the replica.

        ``ReplicaClosedError``, raised or given to ``refused``, if it will not be done any more.
        """
        self._inbox.put(work, refused)

    def _ask(self, action: Callable[[Pending], None], answer: Answer) -> None:
        pending = self._answers.pending(answer, inside=False)
        self.run(lambda: self._answers.attempt(action, pending), answer)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """The state on disk. If damage is met, the engine is told before the caller is."""
        try:
            with self._store.snapshot() as snapshot:
                yield snapshot
        except DamagedLogError as error:
            why = str(error)
            with suppress(ReplicaClosedError):
                self.run(lambda: self._damaged(why))
            raise

    # -- for the service -------------------------------------------------------------------

    @property
    def group_id(self) -> GroupId:
        return self._store.group_id

    @property
    def replica_id(self) -> ReplicaId:
        return self._store.replica_id

    @property
    def oldest_version(self) -> int:
        """Of the replicas' protocol, that all of the group understand, as far as it is known. Who has not been seen by
        this process counts as new: it may be gone for good, and holds nothing up."""
        others = self.engine.replica_set.everyone - {self.replica_id}
        return min((self.versions.get(other, SPEAKS.highest) for other in others), default=SPEAKS.highest)

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
        self._after_sync.append((pending, result))

    def once_settled(self, work: Callable[[], None]) -> None:
        """Do this when snapshots of the store show all that is applied now; or, on a full disk, what they can."""
        self._to_settle.append(work)

    def confirm(self, answer: Answer) -> None:
        """Answers None once a majority has confirmed that this replica leads and it has applied what was committed
        at the time of the call; or the error. All questions of one turn are one question."""
        self.check_leads()
        self._to_confirm.append(answer)

    def hand_over(self, target: ReplicaId, answer: Answer) -> None:
        """Let another voter lead. Answers None once this replica does not any more, or the error."""
        pending = self._answers.pending(answer, inside=True)
        self._answers.attempt(lambda each: self.engine.transfer_leadership(target, self._clock(), each), pending)

    def check_leads(self) -> None:
        """``NotLeaderError``, with the leader's id if it is known, unless this replica leads."""
        if not self.engine.is_leader:
            raise self.not_leader()

    def not_leader(self) -> NotLeaderError:
        leader = self.engine.leader
        hint = f"ask {leader}" if leader else "no leader is known yet, retry"
        return NotLeaderError(f"{self.replica_id} does not lead; {hint}", leader=leader)

    # -- a turn ----------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True if another turn is due at once."""
        return bool(self.engine.busy or self._inbox or self._to_confirm)

    @property
    def next_deadline_s(self) -> float:
        """When a turn is due though nothing happens."""
        return min(self.engine.next_deadline, self.service.next_deadline_s)

    def first_half(self, events: Iterable[Event]) -> bool:
        """Everything before the disk. True if something was asked."""
        return self._loop.first_half(self._clock(), events)

    @property
    def must_write(self) -> bool:
        return self._loop.must_write or self.must_settle

    @property
    def must_settle(self) -> bool:
        """Somebody waits until snapshots see all that is applied now."""
        return bool(self._to_settle)

    def write(self, *, tables: bool = False) -> Written:
        """Make all durable that the turn wants to promise. ``tables``: snapshots are to see it, whoever waits."""
        now = self._clock()
        if not self._loop.may_write(now):
            return Written.NOTHING
        after, self._after_sync = self._after_sync, []
        written = self._loop.write(now, tables=tables or self.must_settle)
        if written is not Written.NOTHING and not self._store.dirty:
            self.service.tables_synced()
        if written is Written.ALL:  # on a full disk they have their answer
            for pending, result in after:
                self._answers.give(pending, result)
        return written

    def promise(self) -> None:
        """All that this turn promises is durable."""
        self._loop.second_half()

    def publish(self) -> None:
        """The turn is over, and was durable or not."""
        if self._to_settle:
            settled, self._to_settle = self._to_settle, []
            for work in settled:
                work()
        self.clients.flush()
        self._answers.flush()

    def _take_calls(self) -> bool:
        """True if there were any, or clients wanted something."""
        stirred = self._begin()
        inbox = self._inbox
        inbox.awake()
        if inbox:
            stirred = True
            while inbox:
                try:
                    inbox.take()()
                except DamagedLogError as error:
                    self._damaged(str(error))
            self._leadership.look(self._clock())
        self.service.gather()
        if self._to_confirm:
            self._confirm_all()
        return stirred

    def _begin(self) -> bool:
        """A call may propose: a leadership that messages have begun or ended is known before, and again after."""
        self._leadership.look(self._clock())
        return self.clients.new_turn()

    def _confirm_all(self) -> None:
        answers, self._to_confirm = self._to_confirm, []

        def answer_all(result: Any) -> None:
            for answer in answers:
                answer(result)

        self._answers.attempt(self.engine.confirm_leadership, self._answers.pending(answer_all, inside=True))

    def _stepped(self, done: list[Done]) -> None:
        now = self._clock()
        self._leadership.look(now)
        for item in done:
            self._answers.give(item.context, item.result)
        self._answers.expire(now)
        self.service.tick(now)
        self.clients.flush()
        self._answers.flush()
