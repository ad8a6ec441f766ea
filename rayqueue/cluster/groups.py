"""Consumer groups: who is a member, who may read what, and who is meant to.

Owns the group rows of the META table (``g<group>`` and
``m<group>\\0<member>``). A group has a *target*, what its assignor wants, and
*owners*, who may read each partition now and with which generation. The two
are brought together here and only here:

- a partition without an owner goes to its target at once;
- a partition whose owner is not its target any more stays with the owner until
  that one has let go of it (``Release``) or is out (``Leave``).

What a member is told (``grants``) is what it owns *and* is meant to own. Every
change of a group makes its generation grow, so a generation names one state
of the group; ``changed_at`` is the one in which a member was last told
something else. A release counts only if the member knew that: otherwise a
grant that is on its way to the member could still make it read.

The generation of a grant is that of the group when it was made, and therefore
higher than that of any earlier owner. That is what the partition fences by.
A grant also names the topic's id: a topic that was deleted and made again has
other partitions, though they have the same names, and nobody owns them yet.

Everything here is a function of the log: no clock, no dice, and no order that
depends on hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from rayqueue.cluster.assignors import STRATEGIES, assign
from rayqueue.cluster.commands import GroupChange, Join, Leave, Release
from rayqueue.cluster.tables import META
from rayqueue.errors import (
    GroupNotEmptyError,
    InvalidInputError,
    RayQueueError,
    UnknownGroupError,
    UnknownMemberError,
)
from rayqueue.log.store import LogStore
from rayqueue.protocol.calls import Assignment, Grant, GroupInfo, MemberInfo
from rayqueue.protocol.topics import TopicInfo, TopicPartition

_GROUP = b"g"
_MEMBER = b"m"


class _GroupRow(msgspec.Struct, frozen=True, array_like=True):
    group: str
    generation: int
    assignor: str
    born: int = 0
    empty_ms: int = 0


class _MemberRow(msgspec.Struct, frozen=True, array_like=True):
    member: str
    wish: Join
    changed_at: int
    owned: tuple[Grant, ...]
    target: tuple[TopicPartition, ...]


_encode = msgspec.msgpack.Encoder().encode

Topics = Mapping[str, TopicInfo]


class Member:
    __slots__ = ("changed_at", "meant", "owned", "target", "wish")

    def __init__(self, wish: Join) -> None:
        self.wish = wish
        self.changed_at = 0
        self.owned: dict[TopicPartition, Grant] = {}
        """Also what it has still to let go of."""
        self.target: tuple[TopicPartition, ...] = ()
        self.meant: frozenset[TopicPartition] = frozenset()
        """The target, for looking up."""

    @property
    def member(self) -> str:
        return self.wish.member

    @property
    def identity(self) -> str:
        """What the assignor knows it by: a static member keeps its place when its process is another."""
        return f"m{self.wish.member}" if self.wish.instance is None else f"i{self.wish.instance}"

    def set_target(self, target: tuple[TopicPartition, ...]) -> None:
        self.target = target
        self.meant = frozenset(target)

    def view(self) -> dict[TopicPartition, Grant]:
        """What it may read: its partitions that are meant for it."""
        return {each: self.owned[each] for each in self.target if each in self.owned}

    def grants(self) -> tuple[Grant, ...]:
        return tuple(self.view().values())

    def surplus(self) -> list[TopicPartition]:
        """What it has still to let go of."""
        return [each for each in self.owned if each not in self.meant]

    def releases(self, reading: Iterable[Grant], generation: int) -> tuple[TopicPartition, ...]:
        """What a member that has taken ``generation`` and reads by these grants has let go of."""
        if generation < self.changed_at:
            return ()
        kept = set(reading)
        return tuple(each for each in self.surplus() if self.owned[each] not in kept)


class Group:
    def __init__(self, name: str, generation: int, assignor: str, born: int = 0) -> None:
        self.name = name
        self.generation = generation
        self.assignor = assignor
        self.born = born
        """Its first generation. No other group of this name ever has the same; 0 of those that are older than this."""
        self.members: dict[str, Member] = {}
        self.instances: dict[str, str] = {}
        self.empty_ms = 0
        """When its last member left; 0 if it has some, or that was before leaders told the time."""
        self.owners: dict[TopicPartition, str] = {}
        self.rebalancing = False
        """Somebody has still to let go of something."""
        self._wishes: dict[tuple[str, ...], int] = {}
        self.wish_topics = 0
        """Topics that the members' different wishes name, in all: what an assignor's work grows with."""

    @property
    def wishes(self) -> Collection[tuple[str, ...]]:
        """The different lists of topics that members want. Many want the same."""
        return self._wishes.keys()

    def wish(self, topics: tuple[str, ...]) -> None:
        if topics not in self._wishes:
            self.wish_topics += len(topics)
        self._wishes[topics] = self._wishes.get(topics, 0) + 1

    def unwish(self, topics: tuple[str, ...]) -> None:
        self._wishes[topics] -= 1
        if not self._wishes[topics]:
            del self._wishes[topics]
            self.wish_topics -= len(topics)

    def wanted(self) -> set[str]:
        """All topics that some member wants."""
        return {topic for topics in self._wishes for topic in topics}

    def look(self) -> None:
        """See again whether it rebalances: its members changed."""
        self.rebalancing = any(each not in member.meant for member in self.members.values() for each in member.owned)

    def assignment(self, member: str, topics: Topics) -> Assignment:
        each = self.members[member]
        missing = tuple(topic for topic in each.wish.topics if topic not in topics)
        return Assignment(member, self.generation, each.grants(), self.rebalancing, missing)

    def info(self) -> GroupInfo:
        state = "empty" if not self.members else "rebalancing" if self.rebalancing else "stable"
        members = tuple(
            MemberInfo(name, each.wish.instance, each.wish.client, each.wish.topics, each.grants(), each.target)
            for name, each in sorted(self.members.items())
        )
        return GroupInfo(self.name, self.generation, self.assignor, state, members, self.born)

    # -- one step ------------------------------------------------------------------------

    def step(self, changes: Iterable[GroupChange], topics: Topics, least_generation: int = 0) -> _Step:
        """Several changes, then one new target for all of them if any needs one."""
        step = _Step(self)
        step.least_generation = least_generation
        for change in changes:
            match change:
                case Join():
                    step.join(change)
                case Leave(member):
                    step.leave(member)
                case Release():
                    step.release(change)
        step.finish(topics)
        return step

    def follow_topics(self, topics: Topics) -> _Step:
        """A topic was made, changed or deleted."""
        step = _Step(self)
        step.aim = True
        step.finish(topics)
        return step


class _Step:
    """One step of a group: from one generation to the next, or nowhere if nothing changed."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.answers: list[RayQueueError | None] = []
        self.gone: list[str] = []
        self.aim = False
        """The target must be computed again."""
        self.least_generation = 0
        """The next one is above this."""
        self._changed = False
        self._inherited: dict[str, list[TopicPartition]] = {}
        self._before = {name: (member.owned.copy(), member.target) for name, member in group.members.items()}
        self._views = {name: member.view() for name, member in group.members.items()}
        self.touched: set[str] = set()

    @property
    def changed(self) -> bool:
        return self._changed

    def join(self, wish: Join) -> None:
        group = self.group
        refusal = self._refusal(wish)
        self.answers.append(refusal)
        if refusal is not None:
            return
        wish = msgspec.structs.replace(wish, again=False)
        if not group.members:
            group.assignor = wish.assignor
        known = group.members.get(wish.member)
        if known is not None and known.wish == wish:
            return
        if wish.instance is not None:
            former = group.instances.get(wish.instance)
            if former is not None and former != wish.member:
                self._inherited.setdefault(f"i{wish.instance}", []).extend(group.members[former].view())
                self._remove(former)
        if known is None:
            known = group.members[wish.member] = Member(wish)
            if wish.member in self.gone:
                self.gone.remove(wish.member)
        else:
            group.unwish(known.wish.topics)
            if known.wish.instance is not None and known.wish.instance != wish.instance:
                del group.instances[known.wish.instance]
        group.wish(wish.topics)
        known.wish = wish
        if wish.instance is not None:
            group.instances[wish.instance] = wish.member
        self.touched.add(wish.member)
        self.aim = self._changed = True

    def _refusal(self, wish: Join) -> RayQueueError | None:
        if wish.again and wish.member not in self.group.members:
            return unknown_member(self.group.name, wish.member)
        if wish.assignor not in STRATEGIES:
            return InvalidInputError(
                f"there is no assignor {wish.assignor!r}; there are {', '.join(STRATEGIES)}", key="assignor"
            )
        # "balanced" took the place of "sticky": in a group that still uses that one, it goes along.
        follows = (wish.assignor, self.group.assignor) == ("balanced", "sticky")
        if self.group.members and wish.assignor != self.group.assignor and not follows:
            return InvalidInputError(
                f"group {self.group.name!r} uses the assignor {self.group.assignor!r}, not {wish.assignor!r}",
                key="assignor",
            )
        return None

    def leave(self, member: str) -> None:
        self.answers.append(None)
        if member in self.group.members:
            self._remove(member)
            self.aim = self._changed = True

    def _remove(self, member: str) -> None:
        """Out, and its partitions are nobody's."""
        group = self.group
        gone = group.members.pop(member)
        group.unwish(gone.wish.topics)
        for each in gone.owned:
            del group.owners[each]
        if gone.wish.instance is not None and group.instances.get(gone.wish.instance) == member:
            del group.instances[gone.wish.instance]
        self.gone.append(member)
        self.touched.discard(member)

    def release(self, release: Release) -> None:
        self.answers.append(None)
        member = self.group.members.get(release.member)
        if member is None or release.generation < member.changed_at:
            return
        for each in release.partitions:
            if each in member.owned and each not in member.meant:
                del member.owned[each], self.group.owners[each]
                self._changed = True

    def finish(self, topics: Topics) -> None:
        group = self.group
        if self.aim:
            self._retarget(topics)
        generation = max(group.generation, self.least_generation) + 1
        for name, member in group.members.items():
            for each in member.target:
                if each not in group.owners:
                    group.owners[each] = name
                    member.owned[each] = Grant(each.topic, each.partition, generation, topics[each.topic].topic_id)
                    self._changed = True
        if not self._changed:
            return
        group.generation = generation
        group.look()
        for name, member in group.members.items():
            if (member.owned, member.target) != self._before.get(name):
                self.touched.add(name)
            if member.view() != self._views.get(name):
                member.changed_at = generation
                self.touched.add(name)

    def _retarget(self, topics: Topics) -> None:
        group = self.group
        by_identity = {member.identity: member for member in group.members.values()}
        counts = {topic: len(topics[topic].partitions) for topic in sorted(group.wanted()) if topic in topics}
        previous: dict[str, Iterable[TopicPartition]] = {
            identity: list(member.owned) for identity, member in by_identity.items()
        }
        for identity, inherited in self._inherited.items():
            if identity in by_identity:
                previous[identity] = [*previous[identity], *inherited]
        wishes = {identity: by_identity[identity].wish.topics for identity in sorted(by_identity)}
        for identity, target in assign(group.assignor, wishes, counts, previous).items():
            member = by_identity[identity]
            if member.target != target:
                member.set_target(target)
                self._changed = True
        self._drop_deleted(topics)

    def _drop_deleted(self, topics: Topics) -> None:
        """What was deleted with its topic, also if another one has the name now: there is nothing to let go of."""
        for member in self.group.members.values():
            for each, grant in list(member.owned.items()):
                if each.topic not in topics or topics[each.topic].topic_id != grant.topic_id:
                    del member.owned[each], self.group.owners[each]
                    self._changed = True


class Groups:
    """All groups, in memory and written through to the table."""

    def __init__(self, store: LogStore, topics: Topics) -> None:
        self._store = store
        self.load(topics)

    def change(
        self,
        name: str,
        changes: Iterable[GroupChange],
        topics: Topics,
        least_generation: int,
        *,
        above: bool,
        now_ms: int = 0,
    ) -> tuple[RayQueueError | None, ...]:
        """``least_generation``: what a new group goes on after, and with ``above`` also one that is there."""
        group = self.known.get(name)
        new = group is None
        populated = group is not None and bool(group.members)
        if group is None:
            group = Group(name, least_generation, "sticky")
        step = group.step(changes, topics, least_generation if above else 0)
        if group.members:
            group.empty_ms = 0
        elif populated or new:
            group.empty_ms = now_ms
        if new and step.changed:
            group.born = group.generation if above else 0
            self.known[name] = group
        self._write(group, step)
        return tuple(step.answers)

    def follow_topic(self, topic: str, topics: Topics) -> list[str]:
        """A topic was made, changed or deleted. The groups that changed by it."""
        changed: list[str] = []
        for name in sorted(self._readers.get(topic, ())):
            step = self.known[name].follow_topics(topics)
            self._write(self.known[name], step)
            if step.changed:
                changed.append(name)
        return changed

    def delete(self, name: str, born: int) -> Group | RayQueueError | None:
        """The group that was deleted; None if there is none, or another one of this name."""
        group = self.known.get(name)
        if group is None or born not in (-1, group.born):
            return None
        if group.members:
            return _not_empty(group)
        self._drop(group)
        return group

    def fence(self, name: str, born: int, least_generation: int, *, now_ms: int) -> int | RayQueueError:
        """A generation above all that the group ever gave, and above those of all deleted groups. For one without
        members only: the next who joins has a higher one."""
        group = self.known.get(name)
        if group is None or group.born != born:
            return UnknownGroupError(f"there is no group {name!r} any more", group=name)
        if group.members:
            return _not_empty(group)
        group.generation = max(group.generation, least_generation) + 1
        group.empty_ms = now_ms or group.empty_ms
        self._write_head(group)
        return group.generation

    def expire(self, is_over: Callable[[int], bool], most: int) -> list[Group]:
        """Forget groups that have been without members for too long: ``is_over`` judges since when."""
        over = [group for _, group in sorted(self.known.items()) if not group.members and is_over(group.empty_ms)]
        for group in over[:most]:
            self._drop(group)
        return over[:most]

    def _drop(self, group: Group) -> None:
        del self.known[group.name]
        self._store.delete(META, _GROUP + group.name.encode())

    # -- rows ------------------------------------------------------------------------------

    def _write(self, group: Group, step: _Step) -> None:
        if not step.changed:
            return
        self._write_head(group)
        for name in step.gone:
            self._store.delete(META, _member_key(group.name, name))
        for name in sorted(step.touched):
            member = group.members[name]
            owned = tuple(member.owned[each] for each in sorted(member.owned))
            row_of_member = _MemberRow(name, member.wish, member.changed_at, owned, member.target)
            self._store.put(META, _member_key(group.name, name), _encode(row_of_member))
        if step.aim:
            self._note_readers(group)

    def _write_head(self, group: Group) -> None:
        row = _GroupRow(group.name, group.generation, group.assignor, group.born, group.empty_ms)
        self._store.put(META, _GROUP + group.name.encode(), _encode(row))

    def _note_readers(self, group: Group) -> None:
        wanted = group.wanted()
        for topic in self._topics_of.pop(group.name, set()) - wanted:
            readers = self._readers[topic]
            readers.discard(group.name)
            if not readers:
                del self._readers[topic]
        for topic in wanted:
            self._readers.setdefault(topic, set()).add(group.name)
        if wanted:
            self._topics_of[group.name] = wanted

    def load(self, topics: Topics) -> None:
        """Become what the table says."""
        self.known: dict[str, Group] = {}
        self._readers: dict[str, set[str]] = {}
        self._topics_of: dict[str, set[str]] = {}
        for _, row in self._store.scan(META, _GROUP, bytes([_GROUP[0] + 1])):
            head = msgspec.msgpack.decode(row, type=_GroupRow)
            group = self.known[head.group] = Group(head.group, head.generation, head.assignor, head.born)
            group.empty_ms = head.empty_ms
        for key, row in self._store.scan(META, _MEMBER, bytes([_MEMBER[0] + 1])):
            group = self.known[key[1:].split(b"\0", 1)[0].decode()]
            self._load_member(group, msgspec.msgpack.decode(row, type=_MemberRow), topics)
        for group in self.known.values():
            group.look()
            self._note_readers(group)

    def _load_member(self, group: Group, row: _MemberRow, topics: Topics) -> None:
        member = group.members[row.member] = Member(row.wish)
        group.wish(row.wish.topics)
        member.changed_at = row.changed_at
        member.set_target(row.target)
        for grant in row.owned:
            if not grant.topic_id and grant.topic in topics:  # of a release that did not write it
                grant = msgspec.structs.replace(grant, topic_id=topics[grant.topic].topic_id)
            member.owned[grant.topic_partition] = grant
            group.owners[grant.topic_partition] = row.member
        if row.wish.instance is not None:
            group.instances[row.wish.instance] = row.member


def unknown_member(group: str, member: str) -> UnknownMemberError:
    return UnknownMemberError(f"group {group!r} has no member {member!r}; join again", group=group, member=member)


def _not_empty(group: Group) -> GroupNotEmptyError:
    count = len(group.members)
    return GroupNotEmptyError(
        f"group {group.name!r} has {count} {'member' if count == 1 else 'members'}: stop its consumers first; one that "
        "was killed is out after its session_timeout_ms",
        group=group.name,
        members=count,
    )


def _member_key(group: str, member: str) -> bytes:
    return _MEMBER + group.encode() + b"\0" + member.encode()
