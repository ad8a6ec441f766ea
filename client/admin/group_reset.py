"""Moving the positions of a consumer group: to the beginning, the end, an offset, a time, or by a number of records.

Nobody's position is moved while he reads. A group that has members is refused.
Of one that has none the coordinator gives a generation (``FenceGroup``) that is
above all that its members ever had: with it each partition is told the new
position, and from then on refuses members of before that wake up late. A member
that joins meanwhile has a higher generation, so what has not been moved by then
is left where it is, and the caller is told.

Where a partition knows only positions without a generation (of consumers with
``partitions=``, Spark, Ray Data), they are moved without one: these readers are
no members, nobody knows whether they run, and they could not commit any more
where a generation has been. Stop them first.

What exists bounds where to: an offset before the log's beginning, or behind its
end, becomes that one, and the answer says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rayqueue.client.arguments import check_whole
from rayqueue.errors import (
    GroupNotEmptyError,
    InvalidInputError,
    RayQueueError,
    ResetIncompleteError,
    StaleGenerationError,
    TopicError,
    UnknownGroupError,
    UnknownTopicError,
)
from rayqueue.net.interfaces import Routes, ask
from rayqueue.net.requests import gathered
from rayqueue.protocol.calls import (
    Bounds,
    Commit,
    DescribeGroup,
    FencedGroup,
    FenceGroup,
    FindOffset,
    GetBounds,
    GetPosition,
    GetTopics,
    GroupInfo,
    Position,
    Topics,
)
from rayqueue.protocol.topics import TopicInfo, TopicPartition, check_name

_TOLD = 5

Anchor = Literal["earliest", "latest"]


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a reset: one of the four is given."""

    anchor: Anchor | None = None
    offset: int | None = None
    time_ms: int | None = None
    by: int | None = None

    @staticmethod
    def of(to: Anchor | int | None, to_time_ms: int | None, by: int | None) -> Target:
        """``InvalidInputError`` unless it is one, and possible."""
        if sum(each is not None for each in (to, to_time_ms, by)) != 1:
            raise InvalidInputError("say where to: one of to='earliest', to='latest', to=OFFSET, to_time_ms= and by=")
        if to_time_ms is not None:
            return Target(time_ms=check_whole("to_time_ms", to_time_ms, least=0))
        if by is not None:
            return Target(by=check_whole("by", by))
        if isinstance(to, str):
            if to not in ("earliest", "latest"):
                raise InvalidInputError(f"to is 'earliest', 'latest' or an offset, not {to!r}", key="to")
            return Target(anchor=to)
        return Target(offset=check_whole("to", to, least=0))


@dataclass(frozen=True, slots=True)
class PositionMove:
    """One partition's part of a reset."""

    topic: str
    partition: int
    before: Mapping[int, int]
    """Lane to the offset of the next record to read; empty if nothing is committed."""
    after: Mapping[int, int]
    start: int
    """Where its log begins, and ends."""
    end: int
    note: str = ""
    """What is not as it was asked for: an offset that does not exist, a position that cannot be moved by a number."""

    @property
    def topic_partition(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    @property
    def moves(self) -> bool:
        return dict(self.after) != dict(self.before)


@dataclass(frozen=True, slots=True)
class GroupReset:
    """The positions that a reset moves, or with ``executed`` has moved."""

    group: str
    positions: tuple[PositionMove, ...]
    executed: bool


@dataclass(frozen=True, slots=True)
class _Planned:
    move: PositionMove
    topic_id: int
    generation: int
    """That the partition has heard of: 0 if only consumers without membership have committed."""


async def reset_group(
    routes: Routes,
    group: str,
    target: Target,
    *,
    topic: str | None = None,
    partitions: Iterable[int] | None = None,
    dry_run: bool = False,
) -> GroupReset:
    """In the I/O thread. See ``RayQueue.reset_group``."""
    check_name("group", group)
    if topic is not None:
        check_name("topic", topic)
    elif partitions is not None:
        raise InvalidInputError("partitions= names partitions of a topic: give topic= too", key="partitions")
    numbers = None if partitions is None else [check_whole("a partition", each, least=0) for each in partitions]
    born = await _born_without_members(routes, group)
    plans = await _plan(routes, group, target, await _chosen(routes, topic), numbers, named=topic is not None)
    if not plans and born is None:
        raise UnknownGroupError(f"group {group!r} has no members and no positions; name a topic to give it some")
    moves = tuple(each.move for each in plans)
    if dry_run or not any(each.moves for each in moves):
        return GroupReset(group, moves, executed=not dry_run)
    fence = FencedGroup(0)
    if any(each.generation for each in plans):
        if born is None:
            raise UnknownGroupError(
                f"group {group!r} is no more; what it has pinned is left (`rayqueue groups delete` takes it away), and "
                "can be moved once a consumer has joined and left",
                group=group,
            )
        fence = await routes.coordinator.call(FenceGroup(group=group, born=born))
    gone = await _carry_out(routes, group, fence, [each for each in plans if each.move.moves])
    return GroupReset(group, tuple(each for each in moves if each.topic_partition not in gone), executed=True)


async def _born_without_members(routes: Routes, group: str) -> int | None:
    """None if the coordinator knows no such group: consumers without membership may have positions all the same."""
    try:
        info: GroupInfo = await routes.coordinator.call(DescribeGroup(group=group))
    except UnknownGroupError:
        return None
    if info.members:
        raise GroupNotEmptyError(
            f"group {group!r} has {len(info.members)} members, {info.members[0].client or info.members[0].member} for "
            "one: stop its consumers first; one that was killed is out after its session_timeout_ms",
            group=group,
            members=len(info.members),
        )
    return info.born


async def _chosen(routes: Routes, topic: str | None) -> tuple[TopicInfo, ...]:
    found: Topics = await routes.coordinator.call(GetTopics(names=None if topic is None else (topic,)))
    if topic is not None and not found.topics:
        raise UnknownTopicError(f"there is no topic {topic!r}", name=topic)
    return tuple(sorted(found.topics, key=lambda info: info.name))


# -- planning -------------------------------------------------------------------------------------


async def _plan(
    routes: Routes,
    group: str,
    target: Target,
    topics: Sequence[TopicInfo],
    partitions: Collection[int] | None,
    *,
    named: bool,
) -> list[_Planned]:
    """``named``: also where the group has no position yet."""
    for number in partitions or ():
        topics[0].partition(number)

    async def one(topic: TopicInfo, number: int) -> _Planned | None:
        place = TopicPartition(topic.name, number)
        try:
            seen: Position | None = await ask(routes, place, GetPosition(group=group), topic_id=topic.topic_id)
            if seen is None and not named:
                return None
            bounds: Bounds = await ask(routes, place, GetBounds(), topic_id=topic.topic_id)
            found = None
            if target.time_ms is not None:
                find = FindOffset(timestamp_ms=target.time_ms)
                found = await ask(routes, place, find, topic_id=topic.topic_id)
        except TopicError:
            return None  # deleted meanwhile, and its positions with it
        before = {} if seen is None else dict(seen.offsets)
        after, note = moved(target, before, topic.settings.lanes, bounds, found)
        move = PositionMove(topic.name, number, before, after, bounds.start, bounds.end, note)
        return _Planned(move, topic.topic_id, 0 if seen is None else seen.generation)

    places = [
        (topic, part.number)
        for topic in topics
        for part in topic.partitions
        if partitions is None or part.number in partitions
    ]
    return [each for each in await gathered(lambda place: one(*place), places) if each is not None]


def moved(
    target: Target, before: Mapping[int, int], lanes: int, bounds: Bounds, found: int | None = None
) -> tuple[dict[int, int], str]:
    """The new position of each lane, and a word about it. ``found``: the offset of the target's time."""
    if target.by is not None:
        if not before:
            return {}, "nothing is committed here: there is nothing to move by a number"
        wanted = {lane: offset + target.by for lane, offset in before.items()}
    else:
        fixed = {"earliest": bounds.start, "latest": bounds.end, None: target.offset}[target.anchor]
        wanted = dict.fromkeys(range(lanes), fixed if fixed is not None else found or 0)
    after = {lane: min(max(offset, bounds.start), bounds.end) for lane, offset in wanted.items()}
    beyond = sorted({offset for lane, offset in wanted.items() if offset != after[lane]})
    if not beyond:
        return after, ""
    asked = ", ".join(f"{offset:,}" for offset in beyond)
    return after, f"there is no offset {asked}: the log is from {bounds.start:,} to {bounds.end:,}"


# -- carrying it out ------------------------------------------------------------------------------


async def _carry_out(
    routes: Routes, group: str, fence: FencedGroup, plans: Sequence[_Planned]
) -> frozenset[TopicPartition]:
    """Those whose topic was deleted meanwhile. ``ResetIncompleteError`` if others could not be moved."""

    async def one(planned: _Planned) -> RayQueueError | None:
        move = planned.move
        given = fence if planned.generation else FencedGroup(0)
        call = Commit(group=group, generation=given.generation, offsets=dict(move.after), rewind=True, seal=given.seal)
        try:
            await ask(routes, move.topic_partition, call, topic_id=planned.topic_id)
        except RayQueueError as error:
            return error
        return None

    errors = await gathered(one, plans)
    failed = {each.move.topic_partition: error for each, error in zip(plans, errors, strict=True) if error is not None}
    gone = frozenset(place for place, error in failed.items() if isinstance(error, TopicError))
    left = [place for place in failed if place not in gone]
    if left:
        raise _incomplete(group, [each.move.topic_partition for each in plans], left, failed[left[0]])
    return gone


def _incomplete(
    group: str, all_of_them: Sequence[TopicPartition], left: Sequence[TopicPartition], error: RayQueueError
) -> ResetIncompleteError:
    moved_to = [str(each) for each in all_of_them if each not in left]
    names = ", ".join(map(str, left[:_TOLD])) + (", ..." if len(left) > _TOLD else "")
    joined = isinstance(error, StaleGenerationError)
    why = "a consumer has joined meanwhile, or the group was deleted" if joined else str(error)
    return ResetIncompleteError(
        f"{len(moved_to)} of {len(all_of_them)} positions of group {group!r} were moved; not {names}: {why}",
        group=group,
        moved=moved_to,
        left=[str(each) for each in left],
    )
