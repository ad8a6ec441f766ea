"""The coordinator's service: calls in, proposals and answers out. It serves only on the replica that leads.

Owns what is of one leadership and in memory: sessions, parked heartbeats, and
the changes that wait to be proposed. What lasts is in ``ClusterMachine``.

Whoever drives it, the replica's thread or the simulator, hands in the time and
calls ``lead`` and ``unlead`` when leadership is won and lost, ``handle`` for
each call, ``disconnected`` when a client's connection is gone, and ``tick``
when ``next_deadline_s`` is reached, and after entries were applied. All of it
on one thread.

A new leader first writes an entry of its own (``Nothing``). Once that is
applied it has seen all that its predecessors committed; calls that come before
wait for it.

Changes of one group are proposed one step at a time; what arrives meanwhile is
the next step, all of it together. So a crowd that joins or leaves at once costs
a few steps, not one each. The first members of a group also wait for each
other, for ``join_window_ms``.

Heartbeats are answered from memory. A replica that was deposed and has not
noticed may answer one with what was true before; the member's next leader
knows better, and commits are fenced by the partitions in any case. Reads that
must be of now are confirmed first (``confirm``).

If this process itself did not run for a while (paused, or starved of CPU), its
members are not to blame for the silence: all deadlines are moved by as much.
Otherwise it would expel every member before it reads the heartbeats that
arrived meanwhile.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from rayqueue.cluster import commands
from rayqueue.cluster.brokers import (
    cluster_info,
    move_command,
    move_info,
    rebalance_command,
    recover_command,
    recovery_info,
)
from rayqueue.cluster.catalog import recreated_topic, unknown_topic
from rayqueue.cluster.commands import decode_command, encode_command
from rayqueue.cluster.fates import Fates
from rayqueue.cluster.groups import Group
from rayqueue.cluster.machine import ClusterMachine
from rayqueue.cluster.memberships import RETRY_S, Memberships
from rayqueue.cluster.moves import Move
from rayqueue.cluster.placement import AliveBroker, Placement
from rayqueue.cluster.recoveries import Recovery
from rayqueue.cluster.seen import Seen
from rayqueue.cluster.sessions import NEVER, Reply
from rayqueue.cluster.sites import Sites
from rayqueue.cluster.whereabouts import Whereabouts
from rayqueue.config import ClusterSettings
from rayqueue.errors import (
    InvalidInputError,
    InvariantBrokenError,
    NotLeaderError,
    QueueFullError,
    RayQueueError,
    UnknownGroupError,
)
from rayqueue.ids import ReplicaId
from rayqueue.protocol.calls import (
    AlterTopic,
    BeginRebalance,
    ClusterInfo,
    CoordinatorCall,
    CreateTopic,
    DeletedGroup,
    DeleteGroup,
    DeleteTopic,
    DescribeCluster,
    DescribeGroup,
    DrainBroker,
    EventInfo,
    FencedGroup,
    FenceGroup,
    GetEvents,
    GetTopics,
    GroupInfo,
    Heartbeat,
    JoinGroup,
    LeaveGroup,
    ListGroups,
    MoveReplica,
    NewProducerIds,
    RecoverPartition,
    ReportReplica,
    StopRebalance,
    Topics,
)
from rayqueue.protocol.seals import Seals
from rayqueue.protocol.topics import TopicInfo, check_name
from rayqueue.protocol.transactions import CoordinatorTransactionCall

_log = logging.getLogger(__name__)

MAX_PRODUCER_IDS = 100_000
MAX_ATTEMPT = 128
MAX_WHY = 500
"""Characters of what a replica says about its loss."""
MAX_WAITING_CALLS = 20_000
"""Calls that wait for a new leader's first entry, and topic changes that wait for each other."""

MAX_COMMAND_BYTES = 3 << 20
"""Less than ``raft.append_batch_bytes``, which an entry must fit into."""

EXPIRE_EVERY_S = 30.0
"""How often the leader looks for groups that nobody uses any more."""
STALL_S = 0.25
"""Being called so much later than asked for means that the process did not run."""
SLACK_S = 0.2
"""Time to read what arrived meanwhile."""

Propose = Callable[[bytes, Callable[[Any], None]], None]
Confirm = Callable[[Callable[[Any], None]], None]


class Coordinator:
    """See the module's text. ``propose`` may raise a ``RayQueueError`` or answer with one."""

    def __init__(
        self,
        machine: ClusterMachine,
        settings: ClusterSettings,
        seals: Seals,
        propose: Propose,
        confirm: Confirm | None = None,
        wall_ms: Callable[[], int] | None = None,
        check: Callable[[commands.AnyCommand], None] | None = None,
    ) -> None:
        """``wall_ms``: the time of day, which is written down where it must outlive this leader. Without it no group
        expires. ``check`` may raise: not all replicas could apply this command."""
        self._wall_ms: Callable[[], int] = (lambda: 0) if wall_ms is None else wall_ms
        self._expire_at_s = NEVER
        self._machine = machine
        self._settings = settings
        self._seals = seals
        self._raw_propose = propose
        self._confirm = confirm
        self._check = check
        self._now_s = 0.0
        self._stalled_s = 0.0
        """How far the time that sessions go by is behind the time that is handed in."""
        self._leading = False
        self._starting = False
        self._ready = False
        self._leadership = 0
        self._replica_id = ""
        self._term = 0
        self._sites = Sites(machine, settings)
        self.first_coordinators: Mapping[ReplicaId, str] = {}
        """Those that the cluster was made with, and their brokers: an operator is told where they are."""
        self.whereabouts = Whereabouts(machine)
        self._early: deque[tuple[int, CoordinatorCall, Reply]] = deque()
        self._topic_changes: deque[tuple[CoordinatorCall, Reply]] = deque()
        self._topic_change_under_way = False
        self._unplaced: deque[tuple[CoordinatorCall, Reply]] = deque()
        """Topic changes that wait for brokers, until ``_place_again_s`` at the latest."""
        self._place_again_s = NEVER
        self._fates = Fates(machine, settings, seals, self._write, self._read, self._wall_ms)
        self._memberships = Memberships(
            machine, settings, seals, self._propose, self._confirmed, self._wall_ms, self._expire_groups
        )
        machine.on_group_changed = self._memberships.group_changed

    # -- being driven -----------------------------------------------------------------------

    @property
    def leading(self) -> bool:
        return self._leading

    @property
    def next_deadline_s(self) -> float:
        """When ``tick`` is due though nothing happened. May be in the past: then it is due now."""
        return self._next_s + self._stalled_s

    @property
    def _next_s(self) -> float:
        if self._ready:
            return min(self._memberships.next_deadline_s, self._place_again_s, self._expire_at_s)
        return self._now_s + RETRY_S if self._leading and not self._starting else float("inf")

    def _pass_time(self, now_s: float) -> None:
        if now_s - self.next_deadline_s > STALL_S:
            # Go back to shortly before what was due, once: then it is due, however late the next call is.
            due_s = self._next_s
            self._stalled_s = now_s - (due_s - SLACK_S if self._now_s < due_s - SLACK_S else due_s)
        self._now_s = max(self._now_s, now_s - self._stalled_s)

    def lead(self, now_s: float, *, replica_id: str = "", term: int = 0) -> None:
        """Leadership was won. All members get a fresh session as soon as it is known who they are."""
        self.unlead()
        self._now_s = now_s
        self._stalled_s = 0.0
        self._leading = True
        self._leadership += 1
        self._replica_id, self._term = replica_id, term
        self._sites.lead(now_s)
        self.whereabouts.forget()
        self._fates.lead()
        self._start()

    def _start(self) -> None:
        self._starting = True

        def started(answer: Any) -> None:
            self._starting = False
            if isinstance(answer, RayQueueError):
                return  # the next tick tries again, unless leadership is lost
            self._ready = True
            self._expire_at_s = self._now_s + EXPIRE_EVERY_S
            self._memberships.lead(self._now_s)
            early, self._early = self._early, deque()
            for client, call, reply in early:
                self._dispatch(client, call, reply)

        self._propose(commands.Nothing(), started)

    def unlead(self) -> None:
        """Leadership was lost. Everybody who waits is told."""
        self._leading = self._ready = False
        self._leadership += 1
        refusal = self._not_leader()
        early, self._early = self._early, deque()
        changes, self._topic_changes = self._topic_changes + self._unplaced, deque()
        self._unplaced.clear()
        self._place_again_s = NEVER
        self._topic_change_under_way = False
        for _, _, reply in early:
            reply(refusal)
        for _, reply in changes:
            reply(refusal)
        self._memberships.unlead(refusal)

    def handle(self, now_s: float, client: int, call: CoordinatorCall, reply: Reply) -> None:
        """Answer a call, now or later, exactly once: with what the call's class says, or a ``RayQueueError``.

        The exception is a client that disconnects: what waits for news on its behalf is not answered any more.
        """
        self._pass_time(now_s)
        if not self._leading:
            reply(self._not_leader())
        elif self._ready:
            self._dispatch(client, call, reply)
        elif len(self._early) >= MAX_WAITING_CALLS:
            reply(_too_many())
        else:
            self._early.append((client, call, reply))

    def disconnected(self, now_s: float, client: int) -> None:
        """A connection is gone. Its members are out after the grace, unless they are heard of on another."""
        self._pass_time(now_s)
        self._early = deque(each for each in self._early if each[0] != client)
        if self._ready:
            self._memberships.disconnected(self._now_s, client)

    def has_members(self, client: int) -> bool:
        """Whether somebody who is a member of a group was last heard of on this connection."""
        return self._ready and self._memberships.has_members(client)

    def tick(self, now_s: float) -> None:
        """Let time pass."""
        self._pass_time(now_s)
        if self._ready:
            self._memberships.tick(self._now_s)
            if self._place_again_s <= self._now_s:
                self._place_again()
            if self._expire_at_s <= self._now_s:
                self._expire_at_s = self._now_s + EXPIRE_EVERY_S
                self._expire_groups()
                self._fates.tick(self._now_s)
        elif self._leading and not self._starting:
            self._start()

    def set_brokers(self, now_s: float, alive: Sequence[AliveBroker]) -> None:
        """Who can take replicas from now on."""
        self._pass_time(now_s)
        self._sites.set_alive(self._now_s, alive)
        self._place_again()

    def tell_seen(self, seen: Seen) -> None:
        """Note what the keeper has seen."""
        self._sites.seen = seen

    def _expire_groups(self) -> bool:
        """Let those go that were without members for too long. False if there is none."""
        now_ms, retention_ms = self._wall_ms(), self._settings.group_retention_ms
        if not now_ms or retention_ms is None or not self._machine.has_expired(now_ms, retention_ms):
            return False
        self._propose(commands.ExpireGroups(now_ms, retention_ms), lambda _: None)
        return True

    def _group_info(self, group: Group) -> GroupInfo:
        since_ms, retention_ms = self._machine.empty_since_ms(group), self._settings.group_retention_ms
        expires_at_ms = None if since_ms is None or retention_ms is None else since_ms + retention_ms
        return msgspec.structs.replace(group.info(), empty_since_ms=since_ms, expires_at_ms=expires_at_ms)

    # -- proposing ---------------------------------------------------------------------------

    def _write(self, command: commands.AnyCommand, answer: Callable[[Any], None]) -> None:
        try:
            if self._check is not None:
                self._check(command)
            payload = encode_command(command)
            decode_command(payload)  # raises here rather than at every replica that applies it
            if len(payload) > MAX_COMMAND_BYTES:
                raise InvalidInputError(
                    f"this would be {len(payload)} bytes in the coordinator's log, the limit is {MAX_COMMAND_BYTES}; "
                    "ask for fewer partitions at a time"
                )
            self._raw_propose(payload, answer)
        except RayQueueError as error:
            answer(error)

    def _propose(self, command: commands.AnyCommand, answer: Callable[[Any], None]) -> None:
        """``answer`` is not called any more once this leadership is over; ``unlead`` has told those who wait."""
        leadership = self._leadership

        def answered(result: Any) -> None:
            if leadership == self._leadership:
                answer(result)

        self._write(command, answered)

    # -- calls -------------------------------------------------------------------------------

    def _dispatch(self, client: int, call: CoordinatorCall, reply: Reply) -> None:
        try:
            if isinstance(call, CoordinatorTransactionCall):
                self._fates.call(self._now_s, call, reply)
                return
            match call:
                case Heartbeat():
                    self.whereabouts.note(call)
                    self._memberships.heartbeat(self._now_s, client, call, reply)
                case JoinGroup():
                    self._memberships.join(self._now_s, client, call, reply)
                case LeaveGroup():
                    self._memberships.leave(self._now_s, call, reply)
                case NewProducerIds():
                    self._new_producer_ids(call, reply)
                case CreateTopic() | AlterTopic() | DeleteTopic():
                    self._change_topic(call, reply)
                case DeleteGroup():
                    self._delete_group(call, reply)
                case FenceGroup():
                    self._fence_group(call, reply)
                case DrainBroker():
                    self._drain_broker(call, reply)
                case MoveReplica():
                    self._move_replica(call, reply)
                case RecoverPartition():
                    self._recover_partition(call, reply)
                case BeginRebalance():
                    command = rebalance_command(self._sites, call, self._wall_ms())
                    self._then_cluster(command, reply)
                case StopRebalance():
                    self._then_cluster(commands.EndRebalance(0), reply)
                case ReportReplica():
                    why = call.why[:MAX_WHY]
                    self._write(commands.ReplicaLost(call.group_id, call.replica_id, why, call.missing), reply)
                case GetTopics() | DescribeCluster() | ListGroups() | DescribeGroup() | GetEvents():
                    self._read(partial(self._answer, call), reply)
                case _:
                    raise InvalidInputError(f"a coordinator does not answer {type(call).__name__} itself")
        except Exception as error:  # noqa: BLE001  # it may be raised on behalf of another client than the one served
            reply(_refusal(call, error))

    def _read(self, answer: Callable[[], Any], reply: Reply) -> None:
        def confirmed(result: Any) -> None:
            if isinstance(result, RayQueueError):
                reply(result)
                return
            try:
                reply(answer())
            except RayQueueError as error:
                reply(error)

        self._confirmed(confirmed)

    def _confirmed(self, answer: Callable[[Any], None]) -> None:
        """Answers None once it is sure that this replica still leads, or the error that says otherwise."""
        if self._confirm is None:
            answer(None)
            return
        try:
            self._confirm(answer)
        except RayQueueError as error:
            answer(error)

    def _answer(self, call: CoordinatorCall) -> Any:
        machine = self._machine
        match call:
            case GetTopics():
                if call.unless == machine.version:
                    return Topics(machine.version, ())
                names = sorted(machine.topics) if call.names is None else call.names
                return Topics(machine.version, tuple(machine.topics[each] for each in names if each in machine.topics))
            case GetEvents(after=after):
                told = [each for each in machine.events if each.number > after]
                return tuple(EventInfo(*msgspec.structs.astuple(each)) for each in told)
            case ListGroups():
                return tuple(self._group_info(machine.groups[name]) for name in sorted(machine.groups))
            case DescribeGroup(group=name):
                group = machine.groups.get(name)
                if group is None:
                    raise UnknownGroupError(f"there is no group {name!r}", group=name)
                return self._group_info(group)
            case _:
                return self._cluster_info()

    def _cluster_info(self) -> ClusterInfo:
        return cluster_info(self._machine, self._sites, self._replica_id, self._term, self.first_coordinators)

    def _drain_broker(self, call: DrainBroker, reply: Reply) -> None:
        self._then_cluster(commands.DrainBroker(call.broker, call.draining), reply)

    def _then_cluster(self, command: commands.AnyCommand, reply: Reply) -> None:
        """Write it; the answer is how things are then."""

        def done(answer: Any) -> None:
            reply(answer if isinstance(answer, RayQueueError) else self._cluster_info())

        self._propose(command, done)

    def _move_replica(self, call: MoveReplica, reply: Reply) -> None:
        def begun(answer: Any) -> None:
            reply(move_info(self._machine, answer, self._sites.seen) if isinstance(answer, Move) else answer)

        self._propose(move_command(self._machine, self._sites, call), begun)

    def _recover_partition(self, call: RecoverPartition, reply: Reply) -> None:
        def begun(answer: Any) -> None:
            reply(recovery_info(answer) if isinstance(answer, Recovery) else answer)

        self._write(recover_command(self._machine, self._sites, call, self._wall_ms()), begun)

    def _delete_group(self, call: DeleteGroup, reply: Reply) -> None:
        check_name("group", call.group)

        def sealed(answer: Any) -> None:
            if isinstance(answer, DeletedGroup):
                answer = msgspec.structs.replace(answer, seal=self._seals.floor(answer.generation))
            reply(answer)

        if call.born is None:
            self._read(lambda: DeletedGroup(False, self._machine.deleted_generation), sealed)
        else:
            self._write(commands.DeleteGroup(call.group, call.born), sealed)

    def _fence_group(self, call: FenceGroup, reply: Reply) -> None:
        group = check_name("group", call.group)

        def sealed(answer: Any) -> None:
            reply(FencedGroup(answer, self._seals.fence(group, answer)) if isinstance(answer, int) else answer)

        self._write(commands.FenceGroup(group, call.born, self._wall_ms()), sealed)

    def _new_producer_ids(self, call: NewProducerIds, reply: Reply) -> None:
        if not 1 <= call.count <= MAX_PRODUCER_IDS:
            raise InvalidInputError(f"1 to {MAX_PRODUCER_IDS} producer ids at a time, not {call.count}", key="count")
        self._write(commands.TakeProducerIds(call.count), reply)

    # -- topics: one change after the other, for each is placed by what the former left ----------

    def _change_topic(self, call: CoordinatorCall, reply: Reply) -> None:
        if len(self._topic_changes) + len(self._unplaced) >= MAX_WAITING_CALLS:
            raise _too_many()
        self._topic_changes.append((call, reply))
        self._next_topic_change()

    def _next_topic_change(self) -> None:
        while self._topic_changes and not self._topic_change_under_way:
            call, reply = self._topic_changes.popleft()
            until_s = self._wait_for_brokers_until_s(call)
            if until_s > self._now_s:
                self._unplaced.append((call, reply))
                self._place_again_s = min(self._place_again_s, until_s)
                continue
            try:
                command = self._topic_command(call)
            except Exception as error:  # noqa: BLE001  # the same
                reply(_refusal(call, error))
                continue
            if isinstance(command, TopicInfo):
                reply(command)
                continue
            self._topic_change_under_way = True
            try:
                self._write(command, partial(self._topic_changed, self._leadership, reply))
            except BaseException:
                self._topic_change_under_way = False  # the others must not wait for what was never written
                raise

    def _wait_for_brokers_until_s(self, call: CoordinatorCall) -> float:
        """See ``Sites``. What needs no place, or is refused in any case, does not wait."""
        known = self._machine.topics.get(call.name) if isinstance(call, CreateTopic | AlterTopic) else None
        if isinstance(call, CreateTopic) and known is None:
            return self._sites.wait_until_s(call.settings.replication)
        if isinstance(call, AlterTopic) and known is not None and "partitions" in call.changes:
            return self._sites.wait_until_s(known.settings.replication)
        return -NEVER

    def _place_again(self) -> None:
        self._place_again_s = NEVER
        self._topic_changes.extendleft(reversed(self._unplaced))
        self._unplaced.clear()
        self._next_topic_change()

    def _topic_changed(self, leadership: int, reply: Reply, answer: Any) -> None:
        reply(answer)
        if leadership == self._leadership:
            self._topic_change_under_way = False
            self._memberships.settle(self._now_s)
            self._next_topic_change()

    def _topic_command(self, call: CoordinatorCall) -> commands.AnyCommand | TopicInfo:
        match call:
            case CreateTopic():
                return self._create_command(call)
            case AlterTopic():
                return self._alter_command(call)
            case DeleteTopic():
                return commands.DeleteTopic(check_name("topic", call.name), call.topic_id)
            case _:
                raise InvalidInputError(f"{type(call).__name__} changes no topic")

    def _create_command(self, call: CreateTopic) -> commands.AnyCommand | TopicInfo:
        name = check_name("topic", call.name)
        settings = call.settings.check()
        if len(call.attempt) > MAX_ATTEMPT:
            raise InvalidInputError(f"an attempt has at most {MAX_ATTEMPT} characters", key="attempt")
        known = self._machine.topics.get(name)
        placement: Placement = ()
        if known is None:
            if len(self._machine.topics) >= self._settings.max_topics:
                raise InvalidInputError(
                    f"there are {len(self._machine.topics)} topics, which is the limit (cluster.max_topics)"
                )
            placement = self._place(settings.partitions, settings.replication)
        elif call.if_missing:
            return known
        return commands.CreateTopic(name, settings, placement, call.if_missing, call.attempt)

    def _alter_command(self, call: AlterTopic) -> commands.AnyCommand:
        known = self._machine.topics.get(check_name("topic", call.name))
        if known is None:
            raise unknown_topic(call.name)
        if call.topic_id != known.topic_id:
            raise recreated_topic(known, call.topic_id)
        settings = known.settings.changed(call.changes)
        new = settings.partitions - len(known.partitions)
        more = settings.replication - known.settings.replication
        if more > 0:
            self._sites.check_copies(known.partitions, more)
        placement = self._place(new, settings.replication) if new else ()
        kind = commands.ResizeTopic if more else commands.AlterTopic
        return kind(call.name, call.changes, placement, call.topic_id)

    def _place(self, partitions: int, replication: int) -> Placement:
        machine = self._machine
        there = sum(len(info.partitions) for info in machine.topics.values())
        if there + partitions > self._settings.max_partitions:
            raise InvalidInputError(
                f"there are {there} partitions; {partitions} more would pass the limit (cluster.max_partitions)",
                key="partitions",
            )
        return self._sites.place(partitions, replication)

    # -- small things ------------------------------------------------------------------------

    def _not_leader(self) -> NotLeaderError:
        return NotLeaderError("this coordinator does not lead; ask another")


def _refusal(call: CoordinatorCall, error: Exception) -> RayQueueError:
    """What a call that raised this is answered with: no call may end the coordinator, whatever it holds.

    Not so if the coordinator itself is unsound, or its disk: that is raised again.
    """
    if isinstance(error, InvariantBrokenError | OSError):
        raise error
    if isinstance(error, RayQueueError):
        return error
    _log.error("%s could not be carried out", type(call).__name__, exc_info=error)
    return InvalidInputError(f"{type(call).__name__} could not be carried out: {type(error).__name__}")


def _too_many() -> QueueFullError:
    return QueueFullError("too many calls wait for the coordinator; retry later")
