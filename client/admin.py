"""Topics, groups and brokers, for people and programs that look after them.

Each function asks the coordinator, and where it tells how things are now, the
replicas too. The answers are values: nothing in them changes later. Names and
settings are checked here, before anything is sent, and again by the coordinator.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import ray
from ray.exceptions import RayError

from rayqueue.actors.names import actor_name
from rayqueue.client.arguments import did_you_mean
from rayqueue.client.calls import typed
from rayqueue.client.readiness import Progress, wait_for_leaders
from rayqueue.client.routing import Routes, ask
from rayqueue.client.waiting import telling
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
from rayqueue.ids import GroupId, NodeId
from rayqueue.protocol.calls import (
    AlterTopic,
    Call,
    CreateTopic,
    DeletedGroup,
    DeleteGroup,
    DeleteTopic,
    DescribeGroup,
    ForgetGroup,
    GetLag,
    GetPosition,
    GetTopics,
    GroupInfo,
    ListGroups,
    MemberInfo,
    Position,
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

if TYPE_CHECKING:
    from rayqueue.client.connection import RayQueue

_T = TypeVar("_T")

_STATUS_TIMEOUT_S = 2.0
_AT_ONCE = 64
_TOLD_PARTITIONS = 3
_FORGET_ATTEMPTS = 5
"""A consumer without membership may commit while its group is deleted."""


@dataclass(frozen=True, slots=True)
class ReplicaDescription:
    node: str
    broker: str
    role: str
    """``leader``, ``follower``, ``learner``, or ``absent`` if it does not answer."""
    high_watermark: int | None
    size_bytes: int | None
    problem: str | None
    """Why it does not serve, such as a disk that was lost."""


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
        """Replicas that answer and report no problem. How far each has come is its ``high_watermark``."""
        return sum(replica.problem is None for replica in self.replicas)


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


# -- topics -----------------------------------------------------------------------------------------


def create_topic(
    rq: RayQueue,
    name: str,
    settings: Mapping[str, Any],
    *,
    if_missing: bool,
    wait: bool,
    on_progress: Progress | None,
) -> TopicInfo:
    check_name("topic", name)
    checked = _topic_settings(settings)
    with telling(lambda: f"waiting for the coordinator, which finds places for topic {name!r}"):
        info, made = _found_or_made(rq, name, checked, if_missing)
    if not made:
        _refuse_differences(info, settings)
    if wait:
        try:
            _until_led(rq, info, info.partitions, on_progress)
        except TopicNotReadyError as error:
            raise _taken_back(rq, info, error, made) from error
    return info


def _found_or_made(rq: RayQueue, name: str, settings: TopicSettings, if_missing: bool) -> tuple[TopicInfo, bool]:
    """The topic, and whether it is this call that made it."""
    for info in _ask(rq, GetTopics(names=(name,))).topics if if_missing else ():
        return info, False
    call = CreateTopic(name=name, settings=settings, attempt=uuid.uuid4().hex)
    try:
        return _ask(rq, call), True
    except TopicExistsError:
        if not if_missing:
            raise
        return _ask(rq, msgspec.structs.replace(call, if_missing=True)), False


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


def _taken_back(rq: RayQueue, info: TopicInfo, error: TopicNotReadyError, made: bool) -> TopicNotReadyError:
    """A topic that this call made, and that nobody can have written to, is not left behind."""
    there = f"the topic is there: create_topic({info.name!r}, if_missing=True) waits on, delete_topic takes it back"
    if made and not error.details["led"]:
        try:
            _ask(rq, DeleteTopic(name=info.name, topic_id=info.topic_id))
            there = "the topic was taken back"
        except RayQueueError as problem:
            there = f"{there} (it could not be taken back now: {problem})"
    return TopicNotReadyError(f"{error}; {there}", **error.details)


def topics(rq: RayQueue, *, include_internal: bool) -> list[TopicInfo]:
    found: Topics = _ask(rq, GetTopics())
    shown = [info for info in found.topics if include_internal or not is_internal(info.name)]
    return sorted(shown, key=lambda info: info.name)


def topic(rq: RayQueue, name: str) -> TopicDescription:
    check_name("topic", name)
    info = rq.io.call(rq.routes.topic(name, refresh=True))
    statuses = _statuses(rq, info)
    return TopicDescription(
        info.name,
        info.topic_id,
        info.settings,
        tuple(_described(partition, statuses) for partition in info.partitions),
    )


def alter_topic(
    rq: RayQueue, name: str, changes: Mapping[str, Any], *, wait: bool, on_progress: Progress | None
) -> TopicInfo:
    check_name("topic", name)
    before = rq.io.call(rq.routes.topic(name, refresh=True))
    _check_keys(changes)
    before.settings.changed(changes)  # says what is wrong without a round trip; the coordinator decides
    info: TopicInfo = _ask(rq, AlterTopic(name=name, topic_id=before.topic_id, changes=dict(changes)))
    if wait:
        known = {partition.number for partition in before.partitions}
        new = [partition for partition in info.partitions if partition.number not in known]
        _until_led(rq, info, new, on_progress)
    return info


def delete_topic(rq: RayQueue, name: str) -> bool:
    """The topic that has this name now; one that is made while this is tried again stays."""
    found: Topics = _ask(rq, GetTopics(names=(check_name("topic", name),)))
    for info in found.topics:
        _ask(rq, DeleteTopic(name=name, topic_id=info.topic_id))
    return bool(found.topics)


def _topic_settings(settings: Mapping[str, Any]) -> TopicSettings:
    _check_keys(settings)
    return TopicSettings(**settings).check()


def _check_keys(settings: Iterable[str]) -> None:
    known = TopicSettings.__struct_fields__
    for key in settings:
        if key not in known:
            raise InvalidInputError(f"a topic has no setting {key!r}{did_you_mean(key, known)}", key=key)


def _standing(rq: RayQueue, info: TopicInfo, partitions: Sequence[PartitionInfo]) -> str:
    """Which replicas of the partitions without a leader have started, and what keeps the others."""
    statuses = _statuses(rq, info)
    waiting = [each for each in (_described(partition, statuses) for partition in partitions) if each.leader is None]
    told = [f"{len(partitions) - len(waiting)} of {len(partitions)} partitions of {info.name} have one"]
    for each in waiting[:_TOLD_PARTITIONS]:
        problems = [
            f"{replica.node} on {replica.broker}: {replica.problem}" for replica in each.replicas if replica.problem
        ]
        started = f"{each.healthy} of {len(each.replicas)} replicas of {info.name}-{each.number} have started"
        told.append(f"{started} ({'; '.join(problems)})" if problems else started)
    return ", ".join(told)


def _until_led(
    rq: RayQueue, info: TopicInfo, partitions: Sequence[PartitionInfo], on_progress: Progress | None
) -> None:
    """Until each has a leader, that this process is then connected with. ``TopicNotReadyError`` if that is given up."""

    async def wait() -> None:
        await rq.routes.topic(info.name, refresh=True)
        await wait_for_leaders(
            rq.routes,
            info,
            partitions,
            lambda: asyncio.to_thread(_statuses, rq, info),
            stall_s=rq.settings.cluster.topic_timeout_ms / 1000,
            on_progress=on_progress,
        )

    with telling(lambda: f"waiting for leaders: {_standing(rq, info, partitions)}"):
        rq.io.call(wait())


def _statuses(rq: RayQueue, info: TopicInfo) -> dict[tuple[str, str], Any]:
    """What every replica says of itself now: a ``Status``, or why there is none. One Ray call each."""
    found: dict[tuple[str, str], Any] = {}
    asked: dict[Any, tuple[str, str]] = {}
    for partition in info.partitions:
        for replica in partition.replicas:
            key = (partition.group_id, replica.node)
            name = actor_name(GroupId(partition.group_id), NodeId(replica.node))
            try:
                asked[ray.get_actor(name, rq.namespace).status.remote()] = key
            except ValueError:
                found[key] = RayQueueError("has no actor now: its broker is away, or it is being started")
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=_STATUS_TIMEOUT_S) if asked else ([], [])
    for ref in late:
        found[asked[ref]] = RayQueueError("does not answer")
    for ref in ready:
        try:
            found[asked[ref]] = ray.get(ref)
        except (RayError, RayQueueError) as error:
            found[asked[ref]] = typed(error, asked[ref][1])
    return found


def _described(partition: PartitionInfo, statuses: Mapping[tuple[str, str], Any]) -> PartitionDescription:
    replicas: list[ReplicaDescription] = []
    leader, newest = None, None
    for replica in partition.replicas:
        told = statuses[partition.group_id, replica.node]
        if isinstance(told, Exception):
            replicas.append(ReplicaDescription(replica.node, replica.broker, "absent", None, None, str(told)))
            continue
        problem = told.damaged or ("the disk is full" if told.read_only else None)
        replicas.append(
            ReplicaDescription(replica.node, replica.broker, told.role, told.high_watermark, told.size_bytes, problem)
        )
        if told.role == "leader" and (newest is None or newest.role != "leader" or told.term > newest.term):
            leader, newest = replica.broker, told
        elif newest is None or (newest.role != "leader" and told.high_watermark > newest.high_watermark):
            newest = told
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


def groups(rq: RayQueue) -> list[GroupInfo]:
    return sorted(_ask(rq, ListGroups()), key=lambda info: info.group)


def group(rq: RayQueue, name: str) -> GroupDescription:
    unknown: UnknownGroupError | None = None
    try:
        info: GroupInfo = _ask(rq, DescribeGroup(group=check_name("group", name)))
    except UnknownGroupError as error:
        # Who reads without being a member (Spark, Ray Data, manual partitions) has positions and nothing else.
        unknown, info = error, GroupInfo(name, 0, "", "empty", ())
    readers = {grant.topic_partition: member.member for member in info.members for grant in member.grants}
    wanted = {topic for member in info.members for topic in member.topics}
    all_topics = topics(rq, include_internal=True)
    wanted_topics = [each for each in all_topics if not wanted or each.name in wanted]
    lags = rq.io.call(_lags(rq.routes, name, wanted_topics, readers))
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

    found = await _all(one(topic, partition) for topic in topics for partition in topic.partitions)
    return [lag for lag in found if lag is not None]


def delete_group(rq: RayQueue, name: str) -> bool:
    check_name("group", name)
    return rq.io.call(forget_group(rq.routes, name))


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

    places = [unless_deleted(topic, partition) for topic in found.topics for partition in topic.partitions]
    return any(await _all(places)) or deleted.existed


async def _born(routes: Routes, group: str) -> int | None:
    """None if the coordinator knows no such group."""
    try:
        info: GroupInfo = await routes.coordinator.call(DescribeGroup(group=group))
    except UnknownGroupError:
        return None
    return info.born


# -- small things -------------------------------------------------------------------------------------


def _ask(rq: RayQueue, call: Call) -> Any:
    try:
        return rq.io.call(rq.routes.coordinator.call(call))
    except msgspec.MsgspecError as error:
        raise InvalidInputError(f"{type(call).__name__} cannot be sent: {error}") from None


async def _all(waiting: Iterable[Awaitable[_T]]) -> list[_T]:
    """All of them, some at a time."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(each: Awaitable[_T]) -> _T:
        async with gate:
            return await each

    return list(await asyncio.gather(*map(one, waiting)))
