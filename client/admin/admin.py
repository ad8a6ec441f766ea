"""Administration: topics, groups and brokers, for people and programs that look after them. In the I/O thread.

Each method asks the coordinator, and where it tells how things are now, the
replicas too. The answers are values: nothing in them changes later. Names and
settings are checked here, before anything is sent, and again by the coordinator.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import msgspec

from rayqueue.client.admin import rebalancing
from rayqueue.client.admin.readiness import Progress, wait_for_leaders
from rayqueue.client.admin.rebalancing import RebalancePlan, RebalanceProgress
from rayqueue.client.admin.recovery import PartitionRecovery, plan_recovery
from rayqueue.client.arguments import did_you_mean
from rayqueue.client.waiting import telling
from rayqueue.config import Settings
from rayqueue.errors import (
    GroupNotEmptyError,
    InvalidInputError,
    RayQueueError,
    TopicDiffersError,
    TopicError,
    TopicExistsError,
    TopicNotReadyError,
    UnknownGroupError,
)
from rayqueue.net.interfaces import Routes, ask
from rayqueue.net.requests import gathered
from rayqueue.protocol.calls import (
    AlterTopic,
    Call,
    ClusterInfo,
    CreateTopic,
    DeletedGroup,
    DeleteGroup,
    DeleteTopic,
    DescribeCluster,
    DescribeGroup,
    DrainBroker,
    EventInfo,
    ForgetGroup,
    GetEvents,
    GetLag,
    GetPosition,
    GetTopics,
    GroupInfo,
    ListGroups,
    MemberInfo,
    MoveInfo,
    MoveReplica,
    Position,
    RecoverPartition,
    RecoveryInfo,
    Topics,
)
from rayqueue.protocol.topics import (
    PartitionInfo,
    TopicInfo,
    TopicPartition,
    TopicSettings,
    check_name,
    is_internal,
)

_T = TypeVar("_T")

_TOLD_PARTITIONS = 3
_FORGET_ATTEMPTS = 5
"""A consumer without membership may commit while its group is deleted."""


@dataclass(frozen=True, slots=True)
class RaftState:
    """Where one replica stands in its group's log, as it tells itself. Indices are of entries, not of records."""

    term: int
    leader: str | None
    """Whom it follows, by its id."""
    first_index: int
    """Of the oldest entry that it has; those before are in its checkpoint."""
    last_index: int
    last_term: int
    commit: int
    applied: int
    epoch: int
    """How often its group went on without a majority (``rayqueue recover``)."""
    voters: tuple[str, ...]
    learners: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReplicaDescription:
    replica_id: str
    broker: str
    role: str
    """``leader``, ``follower``, ``learner``, or ``absent`` if it does not answer."""
    high_watermark: int | None
    size_bytes: int | None
    problem: str | None
    """Why it does not serve, such as a disk that was lost."""
    in_sync: bool = False
    """It is near the end of the log, as its leader knows it: it answers, and has all that the leader had
    ``raft.in_sync_ms`` ago. False for all while there is no leader."""
    lag: int | None = None
    """Entries of the log (batches and the like) that the leader does not know it to have; None if it knows nothing."""
    raft: RaftState | None = None
    """None if it does not answer."""


@dataclass(frozen=True, slots=True)
class PartitionDescription:
    number: int
    leader: str | None
    """The broker of the replica that leads."""
    term: int
    start_offset: int
    end_offset: int
    size_bytes: int
    replicas: tuple[ReplicaDescription, ...]
    shared_brokers: tuple[str, ...] = ()
    """Brokers that hold several of its copies: these survive that node's processes, not the node."""

    @property
    def healthy(self) -> int:
        """Replicas that answer and report no problem. How far each has come is another question: ``in_sync``."""
        return sum(replica.problem is None for replica in self.replicas)

    @property
    def in_sync(self) -> int:
        """Replicas that are near the end of the log, the leader included: there are so many copies of nearly all."""
        return sum(replica.in_sync for replica in self.replicas)


@dataclass(frozen=True, slots=True)
class TopicDescription:
    name: str
    topic_id: int
    settings: TopicSettings
    partitions: tuple[PartitionDescription, ...]

    @property
    def records(self) -> int:
        return sum(partition.end_offset - partition.start_offset for partition in self.partitions)

    @property
    def size_bytes(self) -> int:
        """Of one copy of each partition."""
        return sum(partition.size_bytes for partition in self.partitions)


@dataclass(frozen=True, slots=True)
class PartitionLag:
    topic: str
    partition: int
    member: str | None
    """Who reads it now."""
    committed: Mapping[int, int]
    """Lane to the next offset; empty if nothing was committed yet."""
    lag: int
    pinned: bool


@dataclass(frozen=True, slots=True)
class GroupDescription:
    group: str
    generation: int
    assignor: str
    state: str
    members: tuple[MemberInfo, ...]
    partitions: tuple[PartitionLag, ...]
    empty_since_ms: int | None = None
    """When its last member left. None if it has members, or never had one."""
    expires_at_ms: int | None = None
    """When it is forgotten unless somebody joins (``cluster.group_retention_ms``). Positions that are pinned stay."""

    @property
    def lag(self) -> int:
        return sum(partition.lag for partition in self.partitions)


class AdminRoutes(Routes, Protocol):
    async def statuses(self, info: TopicInfo) -> Mapping[tuple[str, str], Any]: ...


class Admin:
    """Of one queue. ``rayqueue.RayQueue`` has it for threads and for ``await``."""

    def __init__(self, routes: AdminRoutes, settings: Settings) -> None:
        self.routes = routes
        self._settings = settings

    # -- topics ---------------------------------------------------------------------------------

    async def create_topic(
        self,
        name: str,
        settings: Mapping[str, Any],
        *,
        if_missing: bool = False,
        wait: bool = True,
        on_progress: Progress | None = None,
    ) -> TopicInfo:
        check_name("topic", name)
        checked = _topic_settings(settings)
        with telling(lambda: f"waiting for the coordinator, which finds places for topic {name!r}"):
            info, made = await self._found_or_made(name, checked, if_missing)
        if not made:
            _refuse_differences(info, settings)
        if wait:
            try:
                await self._until_led(info, info.partitions, on_progress)
            except TopicNotReadyError as error:
                raise await self._taken_back(info, error, made) from error
        return info

    async def _found_or_made(self, name: str, settings: TopicSettings, if_missing: bool) -> tuple[TopicInfo, bool]:
        """The topic, and whether it is this call that made it."""
        for info in (await self._ask(GetTopics(names=(name,)))).topics if if_missing else ():
            return info, False
        call = CreateTopic(name=name, settings=settings, attempt=uuid.uuid4().hex)
        try:
            return await self._ask(call), True
        except TopicExistsError:
            if not if_missing:
                raise
            return await self._ask(msgspec.structs.replace(call, if_missing=True)), False

    async def _taken_back(self, info: TopicInfo, error: TopicNotReadyError, made: bool) -> TopicNotReadyError:
        """A topic that this call made, and that nobody can have written to, is not left behind."""
        there = f"the topic is there: create_topic({info.name!r}, if_missing=True) waits on, delete_topic takes it back"
        if made and not error.details["led"]:
            try:
                await self._ask(DeleteTopic(name=info.name, topic_id=info.topic_id))
                there = "the topic was taken back"
            except RayQueueError as problem:
                there = f"{there} (it could not be taken back now: {problem})"
        return TopicNotReadyError(f"{error}; {there}", **error.details)

    async def topics(self, *, include_internal: bool = False) -> list[TopicInfo]:
        found: Topics = await self._ask(GetTopics())
        shown = [info for info in found.topics if include_internal or not is_internal(info.name)]
        return sorted(shown, key=lambda info: info.name)

    async def topic(self, name: str) -> TopicDescription:
        check_name("topic", name)
        info = await self.routes.topic(name, refresh=True)
        statuses = await self.routes.statuses(info)
        return TopicDescription(
            info.name,
            info.topic_id,
            info.settings,
            tuple(_described(partition, statuses) for partition in info.partitions),
        )

    async def alter_topic(
        self, name: str, changes: Mapping[str, Any], *, wait: bool = True, on_progress: Progress | None = None
    ) -> TopicInfo:
        check_name("topic", name)
        before = await self.routes.topic(name, refresh=True)
        check_settings(changes)
        before.settings.changed(changes)  # says what is wrong without a round trip; the coordinator decides
        info: TopicInfo = await self._ask(AlterTopic(name=name, topic_id=before.topic_id, changes=dict(changes)))
        if wait:
            known = {partition.number for partition in before.partitions}
            new = [partition for partition in info.partitions if partition.number not in known]
            await self._until_led(info, new, on_progress)
        return info

    async def delete_topic(self, name: str) -> bool:
        """The topic that has this name now; one that is made while this is tried again stays."""
        found: Topics = await self._ask(GetTopics(names=(check_name("topic", name),)))
        for info in found.topics:
            await self._ask(DeleteTopic(name=name, topic_id=info.topic_id))
        return bool(found.topics)

    async def _until_led(
        self, info: TopicInfo, partitions: Sequence[PartitionInfo], on_progress: Progress | None
    ) -> None:
        """Until each has a leader, that this process is then connected with. ``TopicNotReadyError`` if that is given
        up."""

        async def reason() -> str:
            return f"waiting for leaders: {_standing(info, partitions, await self.routes.statuses(info))}"

        with telling(reason):
            await self.routes.topic(info.name, refresh=True)
            await wait_for_leaders(
                self.routes,
                info,
                partitions,
                lambda: self.routes.statuses(info),
                stall_s=self._settings.cluster.topic_timeout_ms / 1000,
                on_progress=on_progress,
            )

    # -- groups and brokers ---------------------------------------------------------------------

    async def groups(self) -> list[GroupInfo]:
        return sorted(await self._ask(ListGroups()), key=lambda info: info.group)

    async def group(self, name: str) -> GroupDescription:
        unknown: UnknownGroupError | None = None
        try:
            info: GroupInfo = await self._ask(DescribeGroup(group=check_name("group", name)))
        except UnknownGroupError as error:
            # Who reads without being a member (Spark, Ray Data, manual partitions) has positions and nothing else.
            unknown, info = error, GroupInfo(name, 0, "", "empty", ())
        readers = {grant.topic_partition: member.member for member in info.members for grant in member.grants}
        wanted = {topic for member in info.members for topic in member.topics}
        all_topics = await self.topics(include_internal=True)
        wanted_topics = [each for each in all_topics if not wanted or each.name in wanted]
        lags = await _lags(self.routes, name, wanted_topics, readers)
        # Without members only the partitions tell which topics were read.
        told = tuple(lag for lag in lags if wanted or lag.committed)
        if unknown is not None and not told:
            raise unknown
        return GroupDescription(
            info.group,
            info.generation,
            info.assignor,
            info.state,
            info.members,
            told,
            info.empty_since_ms,
            info.expires_at_ms,
        )

    async def cluster(self, timeout_ms: int | None = None) -> ClusterInfo:
        return await self.routes.coordinator.call(DescribeCluster(), timeout_ms=timeout_ms)  # type: ignore[no-any-return]

    async def events(self, after: int) -> list[EventInfo]:
        return list(await self._ask(GetEvents(after=after)))

    async def drain(self, broker: str, draining: bool) -> ClusterInfo:
        call = DrainBroker(broker=check_name("broker", broker), draining=draining)
        return await self._ask(call)  # type: ignore[no-any-return]

    async def move_replica(self, topic: str, partition: int, source: str, target: str) -> MoveInfo:
        info = await self.routes.topic(topic, refresh=True)
        sizes, _ = await rebalancing.looked_up(self.routes, (info,))
        group_id = info.partitions[partition].group_id if partition < len(info.partitions) else ""
        call = MoveReplica(
            topic=topic,
            topic_id=info.topic_id,
            partition=partition,
            source=source,
            target=target,
            size_bytes=sizes.get(group_id, 0),
        )
        return await self._ask(call)  # type: ignore[no-any-return]

    async def recover_partition(
        self,
        topic: str,
        partition: int,
        survivor: str | None,
        unsafe: bool,
        begin_at: int | None = None,
        broker: str | None = None,
    ) -> PartitionRecovery:
        info = await self.routes.topic(topic, refresh=True)
        where = info.partition(partition)
        plan = plan_recovery(info, where, await self.routes.statuses(info), survivor, begin_at, broker)
        if unsafe:
            call = RecoverPartition(
                topic=topic,
                topic_id=info.topic_id,
                partition=partition,
                survivor=plan.survivor,
                replicas=tuple(replica.replica_id for replica in where.replicas),
                said=plan.said,
                begins_at=plan.begins_at,
                broker=plan.broker if plan.begins_at is not None else "",
            )
            done: RecoveryInfo = await self._ask(call)
            plan = replace(plan, survivor=done.survivor, done=done)
            await self.routes.topic(topic, refresh=True)
        return plan

    async def plan_rebalance(self) -> RebalancePlan:
        return await rebalancing.make_plan(self.routes)

    async def rebalance(self, wanted: RebalancePlan | None) -> RebalanceProgress | None:
        if wanted is None:
            wanted = await rebalancing.make_plan(self.routes)
        return rebalancing.progress_of(await rebalancing.begin(self.routes, wanted))

    async def stop_rebalance(self) -> ClusterInfo:
        return await rebalancing.stop(self.routes)

    async def _ask(self, call: Call) -> Any:
        try:
            return await self.routes.coordinator.call(call)
        except msgspec.MsgspecError as error:
            raise InvalidInputError(f"{type(call).__name__} cannot be sent: {error}") from None


# -- topics -----------------------------------------------------------------------------------------


def _topic_settings(settings: Mapping[str, Any]) -> TopicSettings:
    check_settings(settings)
    return TopicSettings(**settings).check()


def check_settings(settings: Iterable[str]) -> None:
    """``InvalidInputError`` if a topic has no setting of one of these names."""
    known = TopicSettings.__struct_fields__
    for key in settings:
        if key not in known:
            raise InvalidInputError(f"a topic has no setting {key!r}{did_you_mean(key, known)}", key=key)


def _refuse_differences(info: TopicInfo, wanted: Mapping[str, Any]) -> None:
    """``TopicDiffersError`` if the topic is not as the caller said. What was not said may be anything."""
    existing = {key: getattr(info.settings, key) for key in wanted}
    differences = {key: (value, existing[key]) for key, value in wanted.items() if value != existing[key]}
    if not differences:
        return
    told = ", ".join(f"{key} is {there!r}, not {value!r}" for key, (value, there) in differences.items())
    raise TopicDiffersError(
        f"there is a topic {info.name!r} already, with other settings: {told}; "
        "leave them out to take it as it is, or change it by alter_topic",
        name=info.name,
        topic_id=info.topic_id,
        differences=differences,
    )


def _standing(info: TopicInfo, partitions: Sequence[PartitionInfo], statuses: Mapping[tuple[str, str], Any]) -> str:
    """Which replicas of the partitions without a leader have started, and what keeps the others."""
    waiting = [each for each in (_described(partition, statuses) for partition in partitions) if each.leader is None]
    told = [f"{len(partitions) - len(waiting)} of {len(partitions)} partitions of {info.name} have one"]
    for each in waiting[:_TOLD_PARTITIONS]:
        problems = [
            f"{replica.replica_id} on {replica.broker}: {replica.problem}"
            for replica in each.replicas
            if replica.problem
        ]
        started = f"{each.healthy} of {len(each.replicas)} replicas of {info.name}-{each.number} have started"
        told.append(f"{started} ({'; '.join(problems)})" if problems else started)
    return ", ".join(told)


def _raft_state(told: Any) -> RaftState:
    """Of a replica's ``Status``."""
    return RaftState(
        term=told.term,
        leader=told.leader,
        first_index=told.base_index + 1,
        last_index=told.last_index,
        last_term=told.last_term,
        commit=told.commit,
        applied=told.applied,
        epoch=told.epoch,
        voters=tuple(told.voters),
        learners=tuple(told.learners),
    )


def _described(partition: PartitionInfo, statuses: Mapping[tuple[str, str], Any]) -> PartitionDescription:
    replicas: list[ReplicaDescription] = []
    leader, newest = None, None
    for replica in partition.replicas:
        told = statuses[partition.group_id, replica.replica_id]
        if isinstance(told, Exception):
            replicas.append(ReplicaDescription(replica.replica_id, replica.broker, "absent", None, None, str(told)))
            continue
        problem = told.damaged or told.doubted or ("the disk is full" if told.read_only else None)
        size_bytes, raft = told.size_bytes, _raft_state(told)
        replicas.append(
            ReplicaDescription(
                replica.replica_id, replica.broker, told.role, told.high_watermark, size_bytes, problem, raft=raft
            )
        )
        if told.role == "leader" and (newest is None or newest.role != "leader" or told.term > newest.term):
            leader, newest = replica.broker, told
        elif newest is None or (newest.role != "leader" and told.high_watermark > newest.high_watermark):
            newest = told
    if newest is not None and newest.role == "leader":
        lags = {newest.replica_id: 0, **dict(newest.lags)}
        replicas = [
            replace(each, in_sync=each.replica_id in newest.in_sync, lag=lags.get(each.replica_id)) for each in replicas
        ]
    copies = Counter(replica.broker for replica in partition.replicas)
    shared = tuple(sorted(broker for broker, count in copies.items() if count > 1))
    if newest is None:
        return PartitionDescription(partition.number, None, 0, 0, 0, 0, tuple(replicas), shared)
    return PartitionDescription(
        partition.number,
        leader,
        newest.term,
        newest.start_offset,
        newest.high_watermark,
        newest.size_bytes,
        tuple(replicas),
        shared,
    )


# -- groups -----------------------------------------------------------------------------------------


async def _lags(
    routes: Routes, group: str, topics: Sequence[TopicInfo], readers: Mapping[TopicPartition, str]
) -> list[PartitionLag]:
    async def one(topic: TopicInfo, partition: PartitionInfo) -> PartitionLag | None:
        place = TopicPartition(topic.name, partition.number)
        try:
            position = await ask(routes, place, GetPosition(group=group), topic_id=topic.topic_id)
            lag = await ask(routes, place, GetLag(group=group), topic_id=topic.topic_id)
        except TopicError:
            return None  # the topic was deleted meanwhile, and its positions with it
        return PartitionLag(
            place.topic,
            place.partition,
            readers.get(place),
            {} if position is None else dict(position.offsets),
            lag.records,
            position is not None and position.pinned,
        )

    found = await _of_each(topics, one)
    return [lag for lag in found if lag is not None]


async def forget_group(routes: Routes, name: str) -> bool:
    """Delete the group that has this name now, and its positions. Whoever joins under this name later begins anew."""
    deleted: DeletedGroup = await routes.coordinator.call(DeleteGroup(group=name, born=await _born(routes, name)))
    found: Topics = await routes.coordinator.call(GetTopics())

    async def one(topic: TopicInfo, partition: PartitionInfo) -> bool:
        place = TopicPartition(topic.name, partition.number)
        for _ in range(_FORGET_ATTEMPTS):
            seen: Position | None = await ask(routes, place, GetPosition(group=name), topic_id=topic.topic_id)
            if seen is not None and seen.generation > deleted.generation and await _born(routes, name) is not None:
                return False  # it is the position of a new life of this group
            forget = ForgetGroup(group=name, generation=deleted.generation, seen=seen, seal=deleted.seal)
            gone: bool = await ask(routes, place, forget, topic_id=topic.topic_id)
            if gone or seen is None:
                return gone
        raise GroupNotEmptyError(f"somebody commits for group {name!r} to {place} all the time; close it first")

    async def unless_deleted(topic: TopicInfo, partition: PartitionInfo) -> bool:
        try:
            return await one(topic, partition)
        except TopicError:
            return False  # its positions went with it

    return any(await _of_each(found.topics, unless_deleted)) or deleted.existed


async def _born(routes: Routes, group: str) -> int | None:
    """None if the coordinator knows no such group."""
    try:
        info: GroupInfo = await routes.coordinator.call(DescribeGroup(group=group))
    except UnknownGroupError:
        return None
    return info.born


async def _of_each(topics: Iterable[TopicInfo], ask: Callable[[TopicInfo, PartitionInfo], Awaitable[_T]]) -> list[_T]:
    """Ask all partitions of these topics."""
    places = [(topic, partition) for topic in topics for partition in topic.partitions]
    return await gathered(lambda place: ask(*place), places)
